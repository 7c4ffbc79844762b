#include <algorithm>
#include <cstring>
#include <vector>

#include "backend.h"
#include "row_kernels.h"
#include "scales.h"

namespace mxfp4::cpu {

// A token is quantised once, in the place of its first routed row, and copied from there to the others.
void Backend::moe_permute_mxfp4_quant(const PermuteQuantArgs& a) {
  MetadataArgs m = a.metadata;
  std::vector<int32_t> blockscale_offsets, sorted_expert_ids;  // needed here, though the caller does not ask for them
  if (!m.blockscale_offsets) {
    blockscale_offsets.resize(static_cast<size_t>(m.num_experts) + 1);
    m.blockscale_offsets = blockscale_offsets.data();
  }
  if (!m.sorted_expert_ids) {
    sorted_expert_ids.resize(static_cast<size_t>(m.rows));
    m.sorted_expert_ids = sorted_expert_ids.data();
  }
  metadata(m);

  const int64_t T = scale_tiles(a.K), scale_row_bytes = kTileBlocks * T, row_bytes = a.K / 2;
  const int64_t valid = m.expert_offsets[m.num_experts];
  if (a.zero_padding) zero_rows(a.output_scale, a.scale_rows, scale_row_bytes);
  zero_rows(a.output + valid * row_bytes, m.rows - valid, row_bytes);

  const RowKernels& kernels = row_kernels();
  const auto quantize = a.is_bfloat16 ? kernels.quantize_bfloat16 : kernels.quantize_float16;

  for_rows(a.tokens, a.K, [&](int64_t begin, int64_t end) {
    const ExactFloat exact;
    uint8_t flat[kChunk / kBlock];
    for (int64_t token = begin; token < end; ++token) {
      const int32_t* const last = m.output_permutation + (token + 1) * m.topk;
      const int32_t* const first = std::find_if(last - m.topk, last, [](int32_t row) { return row >= 0; });
      if (first == last) continue;
      for (int64_t c = 0; c < a.K; c += kChunk) {
        const int64_t n = std::min(kChunk, a.K - c);
        uint8_t* codes = a.output + *first * row_bytes + c / 2;
        quantize(a.hidden_states + token * a.row_stride + c, n, codes, flat);
        for (const int32_t* slot = first; slot < last; ++slot) {
          if (*slot < 0) continue;
          if (slot != first) std::memcpy(a.output + *slot * row_bytes + c / 2, codes, static_cast<size_t>(n / 2));
          const int32_t e = m.sorted_expert_ids[*slot];
          store_scales(flat, c / kBlock, n / kBlock, T, *slot - m.expert_offsets[e],
                       a.output_scale + scale_row_bytes * m.blockscale_offsets[e]);
        }
      }
    }
  });
}

}  // namespace mxfp4::cpu
