// Where a lane is in the grid that row_grid (../launch.h) made.
#pragma once
#include <cstdint>

#include "../../layout.h"

namespace mxfp4::cuda {

__device__ __forceinline__ unsigned chunk_index() { return blockIdx.z * gridDim.y + blockIdx.y; }
__device__ __forceinline__ unsigned chunk_count() { return gridDim.y * gridDim.z; }

__device__ __forceinline__ int64_t row_index() { return int64_t{blockIdx.x} * blockDim.y + threadIdx.y; }

// Routed rows are counted in 31 bits; lanes behind the last row stay behind it.
__device__ __forceinline__ int routed_row_index() {
  const int64_t row = row_index();
  return row < INT32_MAX ? static_cast<int>(row) : INT32_MAX;
}

// What a row of K columns has: units of 8 columns and scale tiles.
struct RowShape {
  int units, tiles;
  static RowShape of(int64_t K) { return {static_cast<int>(K / 8), static_cast<int>(scale_tiles(K))}; }
  __device__ __forceinline__ unsigned blocks() const { return static_cast<unsigned>(units) / 4; }
};

// A lane's units are this one and the next kPerLane - 1, blockDim.x apart.
template <int kPerLane>
__device__ __forceinline__ int64_t first_unit() {
  return int64_t{chunk_index()} * (blockDim.x * kPerLane) + threadIdx.x;
}

}  // namespace mxfp4::cuda
