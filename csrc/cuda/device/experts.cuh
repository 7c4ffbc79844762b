// Which expert a row belongs to, and where its scales are. Offsets come from the device and may be wrong: every result
// is checked against the buffers before it is used as an address.
#pragma once
#include <cstdint>

#include "../../layout.h"

namespace mxfp4::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Number of experts whose range ends at or before `row`, which is the expert of `row`, or num_experts. A whole warp
// asks for one row: each step compares 32 ends and leaves a 32nd of the experts. Of 256, the first step brings all ends
// into the L1 cache.
__device__ __forceinline__ int search(const int32_t* offsets, int num_experts, int row) {
  const int lane = threadIdx.x & 31;
  int base = 0, range = num_experts;
#pragma unroll 1
  for (;;) {
    const int step = (range + 31) / 32, end = offsets[base + min((lane + 1) * step, range)];
    const int skip = min(__popc(__ballot_sync(kAllLanes, end <= row)) * step, range);
    base += skip;
    if (step == 1 || skip == range) return base;
    range = min(step, range - skip);
  }
}

// What the offsets say of an expert, on its way from memory.
struct ExpertOffsets {
  int begin, end, scales;

  __device__ __forceinline__ ExpertOffsets(const int32_t* expert_offsets, const int32_t* blockscale_offsets, int expert)
      : begin(expert_offsets[expert]), end(expert_offsets[expert + 1]), scales(blockscale_offsets[expert]) {}

  // Row of the scale tensor that a row of the expert has, -1 if none: the offsets may be wrong. Without a branch, for
  // which the loads would be waited one by one.
  __device__ __forceinline__ int scale_row(int row, int scale_rows) const {
    const auto r = static_cast<unsigned>(row) - static_cast<unsigned>(begin);
    // The whole tile must be there. Both terms are below 2^31.
    const bool inside = static_cast<unsigned>(scales) + (r | 127u) < static_cast<unsigned>(scale_rows);
    return (begin >= 0) & (row >= begin) & (row < end) & (scales >= 0) & inside ? scales + static_cast<int>(r) : -1;
  }
};

}  // namespace mxfp4::cuda
