#include <algorithm>
#include <cstring>

#include "backend.h"
#include "expert_rows.h"
#include "row_kernels.h"
#include "scales.h"

namespace mxfp4::cpu {
namespace {

void check_sorted_ids(const Checks& check, const QuantArgs& a, const ExpertRows& experts) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t e = a.sorted_expert_ids[row];
    if (e < 0 || e >= a.num_experts) continue;
    if (row < experts.begin(e) || row >= experts.end(e))
      check.fail(("sorted_expert_ids[" + std::to_string(row) + "]").c_str(),
                 "be the expert whose expert_offsets hold the row, or none", e);
  }
}

}  // namespace

void Backend::experts_quant(const QuantArgs& a) {
  const Checks check(a.op);
  const ExpertRows experts{a.expert_offsets, a.blockscale_offsets, a.num_experts};
  experts.validate(check, a.rows, a.scale_rows);
  if (a.sorted_expert_ids) check_sorted_ids(check, a, experts);

  const int64_t T = scale_tiles(a.K), scale_row_bytes = kTileBlocks * T;
  if (a.zero_padding) zero_rows(a.output_scale, a.scale_rows, scale_row_bytes);

  const RowKernels& kernels = row_kernels();
  const auto quantize = a.is_bfloat16 ? kernels.quantize_bfloat16 : kernels.quantize_float16;
  const auto silu_and_mul = a.is_bfloat16 ? kernels.silu_and_mul_bfloat16 : kernels.silu_and_mul_float16;

  for_rows(a.rows, a.silu ? 4 * a.K : a.K, [&](int64_t begin, int64_t end) {
    const ExactFloat exact;
    uint16_t activated[kChunk];
    uint8_t flat[kChunk / kBlock];
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* codes = a.output + row * (a.K / 2);
      const int64_t e = a.sorted_expert_ids ? a.sorted_expert_ids[row] : experts.search(row);
      if (e < 0 || e >= a.num_experts) {
        std::memset(codes, 0, static_cast<size_t>(a.K / 2));
        continue;
      }
      const uint16_t* x = a.input + row * a.row_stride;
      uint8_t* expert_scale = a.output_scale + scale_row_bytes * a.blockscale_offsets[e];
      for (int64_t c = 0; c < a.K; c += kChunk) {
        const int64_t n = std::min(kChunk, a.K - c);
        if (a.silu) silu_and_mul(x + c, x + a.K + c, n, activated);
        quantize(a.silu ? activated : x + c, n, codes + c / 2, flat);
        store_scales(flat, c / kBlock, n / kBlock, T, row - experts.begin(e), expert_scale);
      }
    }
  });
}

}  // namespace mxfp4::cpu
