// Quantises rows, eight columns (a unit) a lane, and zeroes the padding of the scales in the same launch.
#pragma once
#include "../../args.h"
#include "e2m1.cuh"
#include "experts.cuh"

namespace mxfp4::cuda {

// Zeroes what no row writes in one row of scale tiles: rows behind an expert's last, and the slack behind the last expert.
__device__ __forceinline__ void zero_scale_tiles(const QuantArgs& a, int64_t tile_row, int64_t tiles) {
  const int64_t first_row = tile_row * kTileRows;
  const int E = static_cast<int>(a.num_experts);
  const int e = search(a.blockscale_offsets, E, first_row);
  int64_t rows = 0;  // of this tile that belong to somebody
  if (e < E) rows = a.expert_offsets[e + 1] - a.expert_offsets[e] - (first_row - a.blockscale_offsets[e]);
  if (rows >= kTileRows) return;
  const int64_t words = tiles * 32;  // of 16 bytes: the scales of rows g, g + 32, g + 64 and g + 96
  for (int64_t w = threadIdx.y * blockDim.x + threadIdx.x; w < words; w += blockDim.x * blockDim.y) {
    const int64_t g = w % 32;
    uint32_t* scales = reinterpret_cast<uint32_t*>(a.output_scale + tile_row * tiles * kTileBytes + w * 16);
    if (g >= rows) {
      *reinterpret_cast<uint4*>(scales) = make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int j = 1; j < 4; ++j)
        if (g + 32 * j >= rows) scales[j] = 0;
    }
  }
}

template <typename T, bool kSilu, int kPerLane>
__global__ void __launch_bounds__(256) experts_quant_kernel(const QuantArgs a, const int64_t row_blocks, const int chunks) {
  const int64_t tiles = scale_tiles(a.K);
  const int64_t block = blockIdx.x;
  if (block >= row_blocks * chunks) return zero_scale_tiles(a, block - row_blocks * chunks, tiles);

  const int64_t units = a.K / 8;
  const int64_t row = block / chunks * blockDim.y + threadIdx.y;
  const bool in_range = row < a.rows;
  const int64_t first_unit = block % chunks * (blockDim.x * kPerLane) + threadIdx.x;

  uint4 w[kPerLane], up[kPerLane];
  const uint4* input = reinterpret_cast<const uint4*>(a.input + row * a.row_stride);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t u = first_unit + i * blockDim.x;
    const bool load = in_range && u < units;
    w[i] = load ? __ldg(input + u) : make_uint4(0, 0, 0, 0);
    if constexpr (kSilu) up[i] = load ? __ldg(input + units + u) : make_uint4(0, 0, 0, 0);
  }

  const int E = static_cast<int>(a.num_experts);
  int expert = E;
  if (a.sorted_expert_ids == nullptr) expert = search(a.expert_offsets, E, row);
  else if (in_range) expert = a.sorted_expert_ids[row];
  ScaleRow s{false, 0, 0};
  if (in_range) s = scale_row(a.expert_offsets, a.blockscale_offsets, E, a.scale_rows, row, expert);
  const bool has_expert = s.valid;
  // The id says none, the offsets say otherwise: no row writes these scales and no tile counts them as padding.
  if (a.zero_padding && a.sorted_expert_ids != nullptr) {
    const bool lost = in_range && !has_expert;
    const bool any_lost = __any_sync(kAllLanes, lost);
    if (any_lost) {
      const int by_offset = search(a.expert_offsets, E, row);
      if (lost) s = scale_row(a.expert_offsets, a.blockscale_offsets, E, a.scale_rows, row, by_offset);
    }
  }

#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t u = first_unit + i * blockDim.x;
    if constexpr (kSilu) w[i] = silu_and_mul8<T>(w[i], up[i]);
    uint32_t scale;
    uint32_t codes = quantize8<T>(w[i], scale);
    if (!has_expert) codes = scale = 0;
    const bool store = in_range && u < units;
    if (store) reinterpret_cast<uint32_t*>(a.output)[row * units + u] = codes;

    // The four scales of a tile's row, from lanes 4 apart, are one word.
    if (!store) scale = 0;
    const uint32_t s1 = __shfl_down_sync(kAllLanes, scale, 4), s2 = __shfl_down_sync(kAllLanes, scale, 8);
    const uint32_t s3 = __shfl_down_sync(kAllLanes, scale, 12);
    if (store && s.valid && threadIdx.x % 16 == 0) {
      const unsigned lanes = blockDim.x - threadIdx.x;  // of this row from here on; beyond lie other rows
      const uint32_t word = scale | (lanes > 4 ? s1 << 8 : 0) | (lanes > 8 ? s2 << 16 : 0) | (lanes > 12 ? s3 << 24 : 0);
      uint8_t* target = a.output_scale + scale_word(s, tiles, u / 16);
      const int64_t blocks = (units - u) / 4;
      if (blocks >= 4 || a.zero_padding) {
        *reinterpret_cast<uint32_t*>(target) = word;
      } else {
        for (int64_t c = 0; c < blocks; ++c) target[c] = static_cast<uint8_t>(word >> (8 * c));
      }
    }
  }
}

}  // namespace mxfp4::cuda
