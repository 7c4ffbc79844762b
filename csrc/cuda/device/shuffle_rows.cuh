// Copies rows through a map, in the widest units that both buffers allow.
#pragma once
#include "../../args.h"
#include "dependent_launch.cuh"
#include "rows.cuh"

namespace mxfp4::cuda {

template <typename Unit, typename Index, int kPerLane>
__global__ void __launch_bounds__(256) shuffle_rows_kernel(const ShuffleArgs a) {
  wait_for_prior_launch();
  const int64_t units = a.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t row = row_index(), first = first_unit<kPerLane, int64_t>();
  if (row >= a.rows) return;
  const int64_t source = static_cast<const Index*>(a.map)[row];
  const bool inside = source >= 0 && source < a.input_rows;
  const Unit* input = reinterpret_cast<const Unit*>(a.input + (inside ? source : 0) * a.row_stride_bytes);
  Unit* output = reinterpret_cast<Unit*>(a.output) + row * units;
  Unit v[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t u = first + i * blockDim.x;
    v[i] = inside && u < units ? input[u] : Unit{};
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t u = first + i * blockDim.x;
    if (u < units) output[u] = v[i];
  }
}

}  // namespace mxfp4::cuda
