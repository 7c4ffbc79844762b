// The CPU kernels behind the front ends of ../host.
#pragma once
#include "../host/dequantize.h"
#include "../host/experts_quant.h"
#include "../host/metadata.h"
#include "../host/moe_permute.h"
#include "../host/shuffle_rows.h"

namespace mxfp4::cpu {

struct Backend {
  static constexpr int64_t kAlignment = 1;
  static void metadata(const MetadataArgs& args);
  static void shuffle_rows(const ShuffleArgs& args);
  static void experts_quant(const QuantArgs& args);
  static void moe_permute_mxfp4_quant(const PermuteQuantArgs& args);
  static void dequantize(const DequantizeArgs& args);
};

// Splits [0, rows) over torch's threads; a row is worth `row_cost` elements of work. The body must not throw.
template <typename F>
void for_rows(int64_t rows, int64_t row_cost, const F& body) {
  constexpr int64_t kGrain = 32768;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_cost)), body);
}

}  // namespace mxfp4::cpu
