// Where a lane is in the grid that row_grid (../launch.h) made.
#pragma once
#include <cstdint>

#include "../../layout.h"

namespace mxfp4::cuda {

__device__ __forceinline__ unsigned chunk_index() { return blockIdx.z * gridDim.y + blockIdx.y; }
__device__ __forceinline__ unsigned chunk_count() { return gridDim.y * gridDim.z; }

__device__ __forceinline__ int64_t row_index() { return int64_t{blockIdx.x} * blockDim.y + threadIdx.y; }

// Routed rows are counted in 31 bits, which a block's last ones may pass.
__device__ __forceinline__ unsigned routed_row_index() { return blockIdx.x * blockDim.y + threadIdx.y; }

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

// The same of a row of values, whose units are counted in 31 bits.
template <int kPerLane>
__device__ __forceinline__ unsigned first_value_unit() {
  return chunk_index() * (blockDim.x * kPerLane) + threadIdx.x;
}

}  // namespace mxfp4::cuda
