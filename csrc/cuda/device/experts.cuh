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

// Row of the scale tensor that a row of an expert has, -1 if none: the offsets may be wrong.
__device__ __forceinline__ int scale_row(const int32_t* __restrict__ expert_offsets,
                                         const int32_t* __restrict__ blockscale_offsets, int scale_rows, int row,
                                         int expert) {
  const int begin = expert_offsets[expert], end = expert_offsets[expert + 1], first = blockscale_offsets[expert];
  if (begin < 0 || row < begin || row >= end || first < 0) return -1;
  const auto r = static_cast<unsigned>(row - begin);
  // The whole tile must be there. Both terms are below 2^31.
  return static_cast<unsigned>(first) + (r | 127u) < static_cast<unsigned>(scale_rows) ? static_cast<int>(first + r)
                                                                                       : -1;
}

}  // namespace mxfp4::cuda
