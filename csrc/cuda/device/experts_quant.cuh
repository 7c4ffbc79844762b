// Quantises rows, eight columns (a unit) a lane, a warp in one row, and zeroes the padding of the scales in the same
// launch.
#pragma once
#include "../../args.h"
#include "dependent_launch.cuh"
#include "e2m1.cuh"
#include "experts.cuh"
#include "rows.cuh"
#include "scales.cuh"
#include "silu_table.cuh"

namespace mxfp4::cuda {

// By search.
__device__ __noinline__ int scale_row_by_offset(const QuantArgs& a, int row) {
  const int E = static_cast<int>(a.num_experts), expert = search(a.expert_offsets, E, row);
  if (expert >= E) return -1;
  return ExpertOffsets(a.expert_offsets, a.blockscale_offsets, expert).scale_row(row, static_cast<int>(a.scale_rows));
}

// What becomes of gate and up where there is no silu.
struct NoSilu {
  __device__ __forceinline__ uint4 operator()(const uint4& w, const uint4&) const { return w; }
};

// A warp's part of a row.
template <typename T, bool kSilu, bool kSearch, bool kZero, int kPerLane, typename Activation>
__device__ __forceinline__ void quantize_row(const QuantArgs& a, const RowShape& shape, unsigned row,
                                             const Activation& activation) {
  const int E = static_cast<int>(a.num_experts);
  const unsigned first = first_unit<kPerLane>(), lanes = blockDim.x;
  int expert = 0;
  if (!kSearch) expert = a.sorted_expert_ids[row];
  const uint4* input =
      reinterpret_cast<const uint4*>(a.input + uint64_t{row} * static_cast<uint64_t>(a.row_stride)) + first;
  uint4 w[kPerLane], up[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool load = first + i * lanes < static_cast<unsigned>(shape.units);
    w[i] = load ? input[i * lanes] : make_uint4(0, 0, 0, 0);
    if constexpr (kSilu) up[i] = load ? input[shape.units + i * lanes] : make_uint4(0, 0, 0, 0);
  }

  if constexpr (kSearch) {
    // Up to 1,024 experts, brings the offsets of the scales into the L1 cache while those of the rows are searched.
    int scales;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(scales) : "l"(a.blockscale_offsets + (threadIdx.x & 31) * E / 32));
    expert = search(a.expert_offsets, E, static_cast<int>(row));
    asm volatile("" ::"r"(scales));
  }
  const bool has_expert = static_cast<unsigned>(expert) < static_cast<unsigned>(E);
  const ExpertOffsets offsets(a.expert_offsets, a.blockscale_offsets, has_expert ? expert : 0);
  uint32_t codes[kPerLane], scale[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if constexpr (kSilu) w[i] = activation(w[i], up[i]);
    codes[i] = quantize8<T>(w[i], scale[i]);
  }
  // The offsets came while the values were quantised.
  int target = offsets.scale_row(static_cast<int>(row), static_cast<int>(a.scale_rows));
  if (!has_expert) target = -1;
  // The id says none, the offsets may say otherwise: then no row writes these scales and no tile counts them as
  // padding.
  if (!kSearch && kZero && __builtin_expect(target < 0, 0)) target = scale_row_by_offset(a, static_cast<int>(row));

  // A lane stores the codes of its units, and one of four their scale.
  uint32_t* output =
      reinterpret_cast<uint32_t*>(a.output) + (uint64_t{row} * static_cast<unsigned>(shape.units) + first);
  uint8_t* scales = a.output_scale + scale_address(target, first / 16, shape.tiles) + first / 4 % 4;
  const bool store_scales = (threadIdx.x & 3) == 0 && target >= 0;
  const unsigned end_of_scales = kZero ? 16 * shape.tiles : shape.units;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const unsigned u = first + i * lanes;
    if (u < static_cast<unsigned>(shape.units)) output[i * lanes] = has_expert ? codes[i] : 0;
    if (store_scales && u < end_of_scales)
      scales[i * (lanes / 16) * kTileBytes] = has_expert ? static_cast<uint8_t>(scale[i]) : 0;
  }
}

template <typename T, bool kSilu, bool kSearch, bool kZero, int kPerLane>
__global__ void __launch_bounds__(256)
    experts_quant_kernel(const __grid_constant__ QuantArgs a, const RowShape shape, const unsigned row_blocks) {
  wait_for_prior_launch();
  if (kZero && blockIdx.x >= row_blocks)
    return zero_padding(a.expert_offsets, a.blockscale_offsets, static_cast<int>(a.num_experts), a.output_scale,
                        blockIdx.x - row_blocks, shape.tiles);
  const unsigned row = routed_row_index();
  if (row < static_cast<unsigned>(a.rows))
    quantize_row<T, kSilu, kSearch, kZero, kPerLane>(a, shape, row, std::conditional_t<kSilu, Silu<T>, NoSilu>{});
}

// For so many rows that two CTAs an SM, which take one after the other, are worth their tables of silu.
constexpr int kTableThreads = 512;

template <bool kSearch, bool kZero>
__global__ void __launch_bounds__(kTableThreads, 2)
    silu_table_quant_kernel(const __grid_constant__ QuantArgs a, const RowShape shape, const unsigned row_blocks) {
  __shared__ __align__(16) float table[SiluTable::kWords];
  const bool zeroes = kZero && blockIdx.x >= row_blocks;
  if (!zeroes) SiluTable::load(table, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x * blockDim.y);
  wait_for_prior_launch();
  if (zeroes)
    return zero_padding(a.expert_offsets, a.blockscale_offsets, static_cast<int>(a.num_experts), a.output_scale,
                        blockIdx.x - row_blocks, shape.tiles);
  __syncthreads();
  const unsigned rows = static_cast<unsigned>(a.rows), step = row_blocks * blockDim.y;
#pragma unroll 1
  for (unsigned row = routed_row_index(); row < rows; row += step)
    quantize_row<BFloat16, true, kSearch, kZero, 4>(a, shape, row, SiluTable(table));
}

}  // namespace mxfp4::cuda
