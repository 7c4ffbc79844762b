// The tiles of scales: packing a row's, storing them, and zeroing what belongs to no row.
#pragma once
#include "../../args.h"
#include "experts.cuh"
#include "rows.cuh"

namespace mxfp4::cuda {

// A row's units as a lane stores them, and the scales of up to four neighbouring blocks, the low byte the first.
template <int kPerLane>
struct PackedUnits {
  uint32_t codes[kPerLane];
  uint32_t scales;
  int unit;  // the first of those codes and scales
  bool store, store_scales;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t& c : codes) c = 0;
    scales = 0;
  }
};

// Lane `x` of the `lanes` that share a chunk of a row, whose units are `first` and on, `lanes` apart; rows of less than
// a warp stand next to each other.
struct RowLane {
  int x, lanes, first;
};

// One unit a lane: the scales of a tile's row come from lanes 4 apart.
__device__ __forceinline__ PackedUnits<1> pack(const uint32_t (&codes)[1], const uint32_t (&scale)[1],
                                               const RowLane& lane, bool in_range, int units) {
  PackedUnits<1> p{{codes[0]}, 0, lane.first, in_range && lane.first < units, false};
  const uint32_t own = p.store ? scale[0] : 0;
  const uint32_t s1 = __shfl_down_sync(kAllLanes, own, 4), s2 = __shfl_down_sync(kAllLanes, own, 8);
  const uint32_t s3 = __shfl_down_sync(kAllLanes, own, 12);
  const int lanes = lane.lanes - lane.x;  // of this row from here on; beyond lie other rows
  p.scales = own | (lanes > 4 ? s1 << 8 : 0) | (lanes > 8 ? s2 << 16 : 0) | (lanes > 12 ? s3 << 24 : 0);
  p.store_scales = p.store && lane.x % 16 == 0;
  return p;
}

// Four units a lane: the four lanes of a block exchange them, so that each has 16 bytes, the codes of a whole block,
// and that block's scale.
__device__ __forceinline__ PackedUnits<4> pack(const uint32_t (&codes)[4], const uint32_t (&scale)[4],
                                               const RowLane& lane, bool in_range, int units) {
  PackedUnits<4> p{{codes[0], codes[1], codes[2], codes[3]}, 0, 0, false, false};
  const int sub = lane.x & 3;
  auto exchange = [&](uint32_t& low, uint32_t& high, bool upper, int distance) {
    const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? low : high, distance);
    (upper ? low : high) = received;
  };
  exchange(p.codes[0], p.codes[1], sub & 1, 1);
  exchange(p.codes[2], p.codes[3], sub & 1, 1);
  exchange(p.codes[0], p.codes[2], sub & 2, 2);
  exchange(p.codes[1], p.codes[3], sub & 2, 2);
  p.unit = lane.first - sub + sub * lane.lanes;
  p.store = in_range && p.unit < units;
  uint32_t word = sub & 2 ? (sub & 1 ? scale[3] : scale[2]) : (sub & 1 ? scale[1] : scale[0]);
  if (!p.store) word = 0;
  word |= __shfl_down_sync(kAllLanes, word, 4) << 8;
  p.scales = word | __shfl_down_sync(kAllLanes, word, 8) << 16;
  p.store_scales = p.store && (lane.x & 12) == 0;
  return p;
}

template <int kPerLane>
__device__ __forceinline__ void store_codes(uint32_t* target, const PackedUnits<kPerLane>& p) {
  if constexpr (kPerLane == 1) *target = p.codes[0];
  else *reinterpret_cast<uint4*>(target) = make_uint4(p.codes[0], p.codes[1], p.codes[2], p.codes[3]);
}

// Byte of a row's first scale in tile t of a scale tensor with `tiles` tiles a row.
__device__ __forceinline__ int64_t scale_address(int scale_row, int t, int tiles) {
  const auto r = static_cast<unsigned>(scale_row);
  return static_cast<int64_t>(uint64_t{r / 128u} * static_cast<unsigned>(tiles) + static_cast<unsigned>(t)) *
             kTileBytes +
         (r % 32u * 16u + r / 32u % 4u * 4u);
}

// How many bytes of a row's scales from `block`, a multiple of 4, on are stored at once: 4, or fewer where columns
// behind the last block are left alone.
__device__ __forceinline__ int scale_bytes(unsigned block, unsigned blocks, bool zero_padding) {
  return zero_padding ? 4 : static_cast<int>(min(blocks - block, 4u));
}

__device__ __forceinline__ void store_scales(uint8_t* target, uint32_t word, int bytes) {
  if (bytes == 4) {
    *reinterpret_cast<uint32_t*>(target) = word;
  } else {
#pragma unroll 1
    for (int c = 0; c < bytes; ++c) target[c] = static_cast<uint8_t>(word >> (8 * c));
  }
}

// Zeroes what no row writes in one row of scale tiles, of which `rows` rows belong to an expert; by thread `first` of
// `threads`.
__device__ __forceinline__ void zero_tile_row(uint8_t* tile_row, int64_t rows, int tiles, int first, int threads) {
  if (rows >= kTileRows) return;
  const int words = tiles * 32;  // of 16 bytes: the scales of rows g, g + 32, g + 64 and g + 96
#pragma unroll 2
  for (int w = first; w < words; w += threads) {
    const int g = w % 32;
    uint32_t* scales = reinterpret_cast<uint32_t*>(tile_row + static_cast<int64_t>(w) * 16);
    if (g >= rows) {
      *reinterpret_cast<uint4*>(scales) = make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int j = 1; j < 4; ++j)
        if (g + 32 * j >= rows) scales[j] = 0;
    }
  }
}

// Of a row of scale tiles, by the CTAs along y and z: the padding behind an expert's last row, and the slack around
// experts. Out of line, as is what else rows rarely need: straight code is on its way before it is wanted.
static __device__ __noinline__ void zero_padding(const int32_t* expert_offsets, const int32_t* blockscale_offsets,
                                                 int num_experts, uint8_t* output_scale, unsigned tile_row, int tiles) {
  const int first_row = static_cast<int>(tile_row * kTileRows), e = search(blockscale_offsets, num_experts, first_row);
  int64_t rows = 0;
  if (e < num_experts && first_row >= blockscale_offsets[e])
    rows = int64_t{expert_offsets[e + 1]} - expert_offsets[e] - (first_row - blockscale_offsets[e]);
  const int threads = blockDim.x * blockDim.y;
  zero_tile_row(output_scale + static_cast<int64_t>(tile_row) * tiles * kTileBytes, rows, tiles,
                chunk_index() * threads + threadIdx.y * blockDim.x + threadIdx.x, threads * chunk_count());
}

}  // namespace mxfp4::cuda
