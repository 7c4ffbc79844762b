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

// A lane's units are this one and the next kPerLane - 1, blockDim.x apart. 31 bits count the units of a row of values.
template <int kPerLane, typename Index = unsigned>
__device__ __forceinline__ Index first_unit() {
  return Index{chunk_index()} * (blockDim.x * kPerLane) + threadIdx.x;
}

}  // namespace mxfp4::cuda
