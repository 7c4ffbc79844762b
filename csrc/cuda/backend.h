// The CUDA kernels behind the front ends of ../host.
#pragma once
#include "../host/dequantize.h"
#include "../host/experts_quant.h"
#include "../host/metadata.h"
#include "../host/moe_permute.h"
#include "../host/shuffle_rows.h"

namespace mxfp4::cuda {

struct Backend {
  static constexpr int64_t kAlignment = 16;  // of every row that a kernel reads or writes in vectors
  static void metadata(const MetadataArgs& args);
  static void shuffle_rows(const ShuffleArgs& args);
  static void experts_quant(const QuantArgs& args);
  static void moe_permute_mxfp4_quant(const PermuteQuantArgs& args);
  static void dequantize(const DequantizeArgs& args);
};

}  // namespace mxfp4::cuda
