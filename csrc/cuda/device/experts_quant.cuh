// Quantises rows, eight columns (a unit) a lane, and zeroes the padding of the scales in the same launch.
#pragma once
#include "../../args.h"
#include "e2m1.cuh"
#include "experts.cuh"
#include "rows.cuh"

namespace mxfp4::cuda {

// Zeroes what no row writes in one row of scale tiles: rows behind an expert's last, and the slack around experts.
__device__ __forceinline__ void zero_scale_tiles(const QuantArgs& a, int tile_row, int tiles) {
  const int E = static_cast<int>(a.num_experts), first_row = tile_row * static_cast<int>(kTileRows);
  const int e = search(a.blockscale_offsets, E, first_row);
  int64_t rows = 0;  // of this tile that belong to somebody
  if (e < E && first_row >= a.blockscale_offsets[e])
    rows = int64_t{a.expert_offsets[e + 1]} - a.expert_offsets[e] - (first_row - a.blockscale_offsets[e]);
  if (rows >= kTileRows) return;
  uint8_t* tile = a.output_scale + static_cast<int64_t>(tile_row) * tiles * kTileBytes;
  const int words = tiles * 32;  // of 16 bytes: the scales of rows g, g + 32, g + 64 and g + 96
  const int threads = blockDim.x * blockDim.y;
  for (int w = chunk_index() * threads + threadIdx.y * blockDim.x + threadIdx.x; w < words;
       w += threads * chunk_count()) {
    const int g = w % 32;
    uint32_t* scales = reinterpret_cast<uint32_t*>(tile + static_cast<int64_t>(w) * 16);
    if (g >= rows) {
      *reinterpret_cast<uint4*>(scales) = make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int j = 1; j < 4; ++j)
        if (g + 32 * j >= rows) scales[j] = 0;
    }
  }
}

// Scales of up to four neighbouring blocks of a row from `block`, a multiple of 4, on; the low byte is the first.
__device__ __forceinline__ void store_scales(const QuantArgs& a, const ScaleRow& s, int tiles, unsigned block,
                                             uint32_t word) {
  uint8_t* target = a.output_scale + scale_address(s, tiles, block);
  const unsigned blocks = static_cast<unsigned>(a.K / kBlock) - block;
  if (blocks >= 4 || a.zero_padding) {
    *reinterpret_cast<uint32_t*>(target) = word;
  } else {
    for (unsigned c = 0; c < blocks; ++c) target[c] = static_cast<uint8_t>(word >> (8 * c));
  }
}

// One unit a lane: 4 bytes of codes; the scales of a tile's row come from lanes 4 apart.
__device__ __forceinline__ void store_units(const QuantArgs& a, const ScaleRow& s, int row, int units, int tiles, int u,
                                            bool store, const uint32_t (&codes)[1], const uint32_t (&scale)[1]) {
  if (store) reinterpret_cast<uint32_t*>(a.output)[static_cast<int64_t>(row) * units + u] = codes[0];
  const uint32_t first = store ? scale[0] : 0;
  const uint32_t s1 = __shfl_down_sync(kAllLanes, first, 4), s2 = __shfl_down_sync(kAllLanes, first, 8);
  const uint32_t s3 = __shfl_down_sync(kAllLanes, first, 12);
  if (!store || !s.valid || threadIdx.x % 16 != 0) return;
  const unsigned lanes = blockDim.x - threadIdx.x;  // of this row from here on; beyond lie other rows
  store_scales(a, s, tiles, u / 4,
               first | (lanes > 4 ? s1 << 8 : 0) | (lanes > 8 ? s2 << 16 : 0) | (lanes > 12 ? s3 << 24 : 0));
}

// Four units a lane, blockDim.x apart: the four lanes of a block exchange them, so that each stores 16 bytes, the codes
// of a whole block, and knows that block's scale.
__device__ __forceinline__ void store_units(const QuantArgs& a, const ScaleRow& s, int row, int units, int tiles, int u,
                                            bool in_range, uint32_t (&codes)[4], const uint32_t (&scale)[4]) {
  const int sub = threadIdx.x & 3;
  auto exchange = [&](uint32_t& low, uint32_t& high, bool upper, int distance) {
    const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? low : high, distance);
    (upper ? low : high) = received;
  };
  exchange(codes[0], codes[1], sub & 1, 1);
  exchange(codes[2], codes[3], sub & 1, 1);
  exchange(codes[0], codes[2], sub & 2, 2);
  exchange(codes[1], codes[3], sub & 2, 2);
  const int mine = u - sub + sub * blockDim.x;  // first unit of the block that this lane now has
  const bool store = in_range && mine < units;
  uint32_t word = sub & 2 ? (sub & 1 ? scale[3] : scale[2]) : (sub & 1 ? scale[1] : scale[0]);
  if (!store) word = 0;
  word |= __shfl_down_sync(kAllLanes, word, 4) << 8;
  word |= __shfl_down_sync(kAllLanes, word, 8) << 16;
  if (!store) return;
  uint32_t* output = reinterpret_cast<uint32_t*>(a.output) + static_cast<int64_t>(row) * units + mine;
  *reinterpret_cast<uint4*>(output) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
  if (s.valid && (threadIdx.x & 12) == 0) store_scales(a, s, tiles, mine / 4, word);
}

template <typename T, bool kSilu, int kPerLane>
__global__ void __launch_bounds__(256) experts_quant_kernel(const QuantArgs a, const unsigned row_blocks) {
  const int tiles = static_cast<int>(scale_tiles(a.K)), units = static_cast<int>(a.K / 8);
  if (blockIdx.x >= row_blocks) return zero_scale_tiles(a, static_cast<int>(blockIdx.x - row_blocks), tiles);

  const int row = routed_row_index(), first = static_cast<int>(first_unit<kPerLane>());
  const bool in_range = row < a.rows;
  uint4 w[kPerLane], up[kPerLane];
  const uint4* input = reinterpret_cast<const uint4*>(a.input + row * a.row_stride);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int u = first + i * blockDim.x;
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
  const bool has_expert = s.valid, lost = in_range && !has_expert;
  // The id says none, the offsets may say otherwise: then no row writes these scales and no tile counts them as
  // padding.
  if (a.zero_padding && a.sorted_expert_ids != nullptr && __any_sync(kAllLanes, lost)) {
    const int by_offset = search(a.expert_offsets, E, row);
    if (lost) s = scale_row(a.expert_offsets, a.blockscale_offsets, E, a.scale_rows, row, by_offset);
  }

  uint32_t codes[kPerLane], scale[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if constexpr (kSilu) w[i] = silu_and_mul8<T>(w[i], up[i]);
    codes[i] = quantize8<T>(w[i], scale[i]);
    if (!has_expert) codes[i] = scale[i] = 0;
  }
  const bool store = in_range && (kPerLane > 1 || first < units);
  store_units(a, s, row, units, tiles, first, store, codes, scale);
}

}  // namespace mxfp4::cuda
