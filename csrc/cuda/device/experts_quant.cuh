// Quantises rows, eight columns (a unit) a lane, and zeroes the padding of the scales in the same launch.
#pragma once
#include "../../args.h"
#include "e2m1.cuh"
#include "experts.cuh"
#include "rows.cuh"
#include "scales.cuh"

namespace mxfp4::cuda {

// Of a row of scale tiles: the padding behind an expert's last row, and the slack around experts. Out of line, as is
// what else rows rarely need: straight code is on its way before it is wanted.
__device__ __noinline__ void zero_padding(const QuantArgs& a, int tile_row, int tiles) {
  const int E = static_cast<int>(a.num_experts), first_row = tile_row * static_cast<int>(kTileRows);
  const int e = search(a.blockscale_offsets, E, first_row);
  int64_t rows = 0;
  if (e < E && first_row >= a.blockscale_offsets[e])
    rows = int64_t{a.expert_offsets[e + 1]} - a.expert_offsets[e] - (first_row - a.blockscale_offsets[e]);
  const int threads = blockDim.x * blockDim.y;
  zero_tile_row(a.output_scale + static_cast<int64_t>(tile_row) * tiles * kTileBytes, rows, tiles,
                chunk_index() * threads + threadIdx.y * blockDim.x + threadIdx.x, threads * chunk_count());
}

// By search; of the lanes that are `lost`, the others keep theirs.
__device__ __noinline__ int scale_row_by_offset(const QuantArgs& a, bool lost, int row, int target) {
  const int E = static_cast<int>(a.num_experts), expert = search(a.expert_offsets, E, row);
  if (!lost) return target;
  return expert < E ? scale_row(a.expert_offsets, a.blockscale_offsets, static_cast<int>(a.scale_rows), row, expert)
                    : -1;
}

// What becomes of gate and up where there is no silu.
struct NoSilu {
  __device__ __forceinline__ uint4 operator()(const uint4& w, const uint4&) const { return w; }
};

// One row, or what a CTA's y rows are at `row`.
template <typename T, bool kSilu, bool kSearch, int kPerLane, typename Activation>
__device__ __forceinline__ void quantize_row(const QuantArgs& a, const RowShape& shape, int row,
                                             const Activation& activation) {
  const int E = static_cast<int>(a.num_experts);
  const RowLane lane{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                     static_cast<int>(first_unit<kPerLane>())};
  const bool in_range = row < static_cast<int>(a.rows);
  int expert = E;
  if (!kSearch && in_range) expert = __ldg(a.sorted_expert_ids + row);
  uint4 w[kPerLane], up[kPerLane];
  const uint4* input = reinterpret_cast<const uint4*>(a.input + row * a.row_stride);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int u = lane.first + i * lane.lanes;
    const bool load = in_range && u < shape.units;
    w[i] = load ? __ldg(input + u) : make_uint4(0, 0, 0, 0);
    if constexpr (kSilu) up[i] = load ? __ldg(input + shape.units + u) : make_uint4(0, 0, 0, 0);
  }

  if constexpr (kSearch) expert = search(a.expert_offsets, E, row);
  const bool has_expert = static_cast<unsigned>(expert) < static_cast<unsigned>(E);
  int target = in_range && has_expert
                   ? scale_row(a.expert_offsets, a.blockscale_offsets, static_cast<int>(a.scale_rows), row, expert)
                   : -1;
  // The id says none, the offsets may say otherwise: then no row writes these scales and no tile counts them as
  // padding.
  if (!kSearch && a.zero_padding && __builtin_expect(__any_sync(kAllLanes, in_range && target < 0), 0))
    target = scale_row_by_offset(a, in_range && target < 0, row, target);

  uint32_t codes[kPerLane], scale[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if constexpr (kSilu) w[i] = activation(w[i], up[i]);
    codes[i] = quantize8<T>(w[i], scale[i]);
  }
  auto packed = pack(codes, scale, lane, in_range, shape.units);
  if (!has_expert) packed.clear();
  if (packed.store)
    store_codes(reinterpret_cast<uint32_t*>(a.output) + static_cast<int64_t>(row) * shape.units + packed.unit, packed);
  if (packed.store_scales && target >= 0)
    store_scales(a.output_scale + scale_address(target, packed.unit / 16, shape.tiles), packed.scales,
                 scale_bytes(packed.unit / 4, shape.blocks(), a.zero_padding));
}

template <typename T, bool kSilu, bool kSearch, int kPerLane>
__global__ void __launch_bounds__(256)
    experts_quant_kernel(const __grid_constant__ QuantArgs a, const RowShape shape, const unsigned row_blocks) {
  if (blockIdx.x >= row_blocks) return zero_padding(a, static_cast<int>(blockIdx.x - row_blocks), shape.tiles);
  quantize_row<T, kSilu, kSearch, kPerLane>(a, shape, routed_row_index(), std::conditional_t<kSilu, Silu<T>, NoSilu>{});
}

// For so many rows that CTAs which take one after the other, and share a table of silu, are worth its making.
template <bool kSearch>
__global__ void __launch_bounds__(256)
    silu_table_quant_kernel(const __grid_constant__ QuantArgs a, const RowShape shape, const unsigned row_blocks) {
  if (blockIdx.x >= row_blocks) return zero_padding(a, static_cast<int>(blockIdx.x - row_blocks), shape.tiles);
  __shared__ float table[2 * SiluTable::kSize];
  SiluTable::fill(table, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x * blockDim.y);
  __syncthreads();
  const int rows = static_cast<int>(a.rows), step = static_cast<int>(row_blocks * blockDim.y);
  // To the end of the last CTA row, so that whole warps go on together.
#pragma unroll 1
  for (int row = routed_row_index(); row - static_cast<int>(threadIdx.y) < rows; row += step)
    quantize_row<BFloat16, true, kSearch, 4>(a, shape, row, SiluTable{table});
}

}  // namespace mxfp4::cuda
