// Which expert a row belongs to, and where its scales are. Offsets come from the device and may be wrong: every result
// is checked against the buffers before it is used as an address.
#pragma once
#include <cstdint>

#include "../../layout.h"

namespace mxfp4::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Number of experts whose range ends at or before `row`, which is the expert of `row`, or num_experts. All lanes of the
// warp ask for the same row: 32 ends are compared at a time.
__device__ __forceinline__ int search_warp(const int32_t* __restrict__ offsets, int num_experts, int row) {
  const int lane = (threadIdx.y * blockDim.x + threadIdx.x) & 31;
  int count = 0;
  for (int base = 0; base < num_experts; base += 128) {
    unsigned below[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = base + i * 32 + lane;
      below[i] = __ballot_sync(kAllLanes, e < num_experts && offsets[e + 1] <= row);
    }
    const int found = __popc(below[0]) + __popc(below[1]) + __popc(below[2]) + __popc(below[3]);
    count += found;
    if (found < 128) break;
  }
  return count;
}

// The same for one thread.
__device__ __forceinline__ int search_thread(const int32_t* __restrict__ offsets, int num_experts, int row) {
  int low = 0, high = num_experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offsets[middle + 1] <= row) low = middle + 1;
    else high = middle;
  }
  return low;
}

// A row is a whole number of warps wide, or several rows share one.
__device__ __forceinline__ int search(const int32_t* __restrict__ offsets, int num_experts, int row) {
  return blockDim.x >= 32 ? search_warp(offsets, num_experts, row) : search_thread(offsets, num_experts, row);
}

struct ScaleRow {
  bool valid;
  int32_t first;  // first scale row of the expert
  uint32_t r;     // row within the expert
};

__device__ __forceinline__ ScaleRow scale_row(const int32_t* __restrict__ expert_offsets,
                                              const int32_t* __restrict__ blockscale_offsets, int num_experts,
                                              int64_t scale_rows, int row, int expert) {
  ScaleRow s{false, 0, 0};
  if (expert < 0 || expert >= num_experts) return s;
  const int32_t begin = expert_offsets[expert], end = expert_offsets[expert + 1];
  s.first = blockscale_offsets[expert];
  s.r = static_cast<uint32_t>(row) - static_cast<uint32_t>(begin);
  s.valid = begin >= 0 && row >= begin && row < end && s.first >= 0 &&
            int64_t{s.first} + (s.r / kTileRows + 1) * kTileRows <= scale_rows;
  return s;
}

// Scale byte of a row's block of 32 columns.
__device__ __forceinline__ int64_t scale_address(const ScaleRow& s, int tiles, unsigned block) {
  return int64_t{s.first} * (4 * tiles) + scale_byte(s.r, block, tiles);
}

}  // namespace mxfp4::cuda
