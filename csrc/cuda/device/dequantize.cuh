// Rows of codes and their scales to values, eight columns (a unit, four bytes of codes) a lane.
#pragma once
#include "../../args.h"
#include "dependent_launch.cuh"
#include "e2m1.cuh"
#include "experts.cuh"
#include "rows.cuh"
#include "scales.cuh"

namespace mxfp4::cuda {

template <FloatType kType>
__device__ __forceinline__ void store_values(void* output, int64_t unit, const float (&v)[8]) {
  if constexpr (kType == FloatType::kFloat32) {
    float4* out = static_cast<float4*>(output) + 2 * unit;
    out[0] = make_float4(v[0], v[1], v[2], v[3]);
    out[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    using T = std::conditional_t<kType == FloatType::kBFloat16, BFloat16, Float16>;
    // The conversion instruction makes another NaN than the CPU: all eight are NaN or none is.
    constexpr uint32_t kNaNs = T::kNaN << 16 | T::kNaN;
    static_cast<uint4*>(output)[unit] = v[0] != v[0] ? make_uint4(kNaNs, kNaNs, kNaNs, kNaNs)
                                                     : make_uint4(round_pair<T>(v[0], v[1]), round_pair<T>(v[2], v[3]),
                                                                  round_pair<T>(v[4], v[5]), round_pair<T>(v[6], v[7]));
  }
}

template <FloatType kType, int kPerLane>
__global__ void __launch_bounds__(256) dequantize_kernel(const DequantizeArgs a) {
  wait_for_prior_launch();
  const int units = static_cast<int>(a.K / 8), tiles = static_cast<int>(scale_tiles(a.K));
  const unsigned routed_row = routed_row_index();
  if (routed_row >= a.rows) return;  // a whole warp
  const int row = static_cast<int>(routed_row), first = static_cast<int>(first_unit<kPerLane>());
  const uint32_t* packed = reinterpret_cast<const uint32_t*>(a.packed + row * a.row_stride);
  uint32_t codes[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int u = first + i * blockDim.x;
    codes[i] = u < units ? packed[u] : 0;
  }
  const int E = static_cast<int>(a.num_experts);
  const int expert = search(a.expert_offsets, E, row);
  int scales = -1;
  if (expert < E)
    scales = ExpertOffsets(a.expert_offsets, a.blockscale_offsets, expert)
                 .scale_row(row, static_cast<int>(min(a.scale_rows, int64_t{INT32_MAX})));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int u = first + i * blockDim.x;
    if (u >= units) continue;
    float v[8] = {};
    if (scales >= 0) {
      const float scale = scale_to_float(a.scale[scale_address(scales, u / 16, tiles) + u / 4 % 4]);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = e2m1_to_float(codes[i] >> (4 * j) & 15u, scale);
    }
    store_values<kType>(a.output, static_cast<int64_t>(row) * units + u, v);
  }
}

}  // namespace mxfp4::cuda
