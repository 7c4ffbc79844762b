// Router ids and tokens to sorted, quantised rows. Quantisation does not depend on the expert: each token is quantised
// once and stored to all its rows.
//
// Few slots: one launch, in which every CTA, or for a handful of slots every warp, finds the places of its rows by
// itself (slots.cuh). More: the metadata kernel, and one that quantises tokens while that runs and then stores them to
// their rows. Many: the scales of the tokens are kept flat until a third kernel brings them into the tiles of the
// experts, whole tiles at a time.
#pragma once
#include "../../args.h"
#include "dependent_launch.cuh"
#include "e2m1.cuh"
#include "rows.cuh"
#include "scales.cuh"
#include "slots.cuh"

namespace mxfp4::cuda {

// Loads a lane's units of a token; past L1, for some do before they wait (dependent_launch.cuh).
template <int kPerLane>
__device__ __forceinline__ void load_units(const PermuteQuantArgs& a, int64_t token, bool in_range, const RowLane& lane,
                                           int units, uint4 (&w)[kPerLane]) {
  const uint4* input = reinterpret_cast<const uint4*>(a.hidden_states + token * a.row_stride);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int u = lane.first + i * lane.lanes;
    w[i] = in_range && u < units ? __ldcg(input + u) : make_uint4(0, 0, 0, 0);
  }
}

template <typename T, int kPerLane>
__device__ __forceinline__ PackedUnits<kPerLane> quantize_units(const uint4 (&w)[kPerLane], const RowLane& lane,
                                                                bool in_range, int units) {
  uint32_t codes[kPerLane], scale[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) codes[i] = quantize8<T>(w[i], scale[i]);
  return pack(codes, scale, lane, in_range, units);
}

// ---- Few slots ----

// Blocks along x: those that write the arrays of the experts, one for each token, and those that zero the padding of
// `tile_rows` rows of scale tiles. Along y: the chunks of a row. Along z: shares of a token's slots.
struct FewBlocks {
  int expert_blocks, share, tile_rows;

  __device__ __forceinline__ int token() const { return static_cast<int>(blockIdx.x) - expert_blocks; }
  // The CTAs of one x.
  __device__ __forceinline__ int column() const { return blockIdx.z * gridDim.y + blockIdx.y; }
  __device__ __forceinline__ int columns() const { return gridDim.y * gridDim.z; }
  // Zeroes this CTA's share of the padding: some rows of scale tiles, of which `rows_of_tile` tells a warp how many of
  // their rows belong to an expert.
  template <typename RowsOfTile>
  __device__ __forceinline__ void zero(const PermuteQuantArgs& a, const RowShape& shape, int tokens,
                                       const RowsOfTile& rows_of_tile) const {
    const int step = (static_cast<int>(gridDim.x) - expert_blocks - tokens) * columns();
#pragma unroll 1
    for (int tile_row = (token() - tokens) * columns() + column(); tile_row < tile_rows; tile_row += step)
      zero_tile_row(a.output_scale + static_cast<int64_t>(tile_row) * shape.tiles * kTileBytes, rows_of_tile(tile_row),
                    shape.tiles, threadIdx.x, blockDim.x);
  }
  // This warp's first group of 32 experts, and how far it is to its next.
  __device__ __forceinline__ int first_group() const {
    return (column() * expert_blocks + blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  }
  __device__ __forceinline__ int next_group() const { return expert_blocks * (blockDim.x / 32) * columns(); }
};

// At most WarpSlots::kMost slots: no warp waits for another.
template <typename T, typename Id>
__global__ void __launch_bounds__(256)
    moe_permute_warp_kernel(const __grid_constant__ PermuteQuantArgs a, const RowShape shape, const FewBlocks blocks) {
  const int token = blocks.token(), tokens = static_cast<int>(a.tokens), E = static_cast<int>(a.metadata.num_experts);
  const bool has_token = token >= 0 && token < tokens;
  const unsigned first = blockIdx.y * blockDim.x + threadIdx.x;  // z is a share of the slots
  wait_for_prior_launch();
  const Id raw = WarpSlots::load<Id>(a.metadata);
  uint4 w = make_uint4(0, 0, 0, 0);
  if (has_token && first < static_cast<unsigned>(shape.units))
    w = reinterpret_cast<const uint4*>(a.hidden_states + token * a.row_stride)[first];
  const WarpSlots slots(a.metadata, raw);
  if (token < 0) {
#pragma unroll 1
    for (int g = blocks.first_group(); 32 * g < E; g += blocks.next_group()) {
      const int e = 32 * g + static_cast<int>(threadIdx.x & 31);
      const auto sums = slots.sums(e);
      if (e < E) write_expert(a.metadata, e, sums.rows, sums.tiles, sums.count);
    }
    return;
  }
  const Place own = slots.place();
  if (!has_token) {
    blocks.zero(a, shape, tokens, [&](int tile_row) { return slots.rows_of_tile(a.metadata, own, tile_row); });
    return;
  }

  uint32_t scale;
  const uint32_t codes = quantize8<T>(w, scale);
  const int topk = static_cast<int>(a.metadata.topk), begin = token * topk + blockIdx.z * blocks.share;
  const int end = min(begin + blocks.share, (token + 1) * topk), lane = threadIdx.x & 31;
  const bool store = first < static_cast<unsigned>(shape.units);
  const bool store_scale =
      (lane & 3) == 0 && first < static_cast<unsigned>(a.zero_padding ? 16 * shape.tiles : shape.units);
  uint32_t* output = reinterpret_cast<uint32_t*>(a.output) + first;
  uint8_t* scales = a.output_scale + first / 16 * static_cast<unsigned>(kTileBytes) + first / 4 % 4;
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int slot = begin; slot < end; slot += kAtOnce) {
    int row[kAtOnce], scale_row[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      row[j] = __shfl_sync(kAllLanes, own.row, slot + j);
      scale_row[j] = __shfl_sync(kAllLanes, own.expert < E ? own.scale_row : -1, slot + j);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (slot + j >= end) break;
      if (store) output[int64_t{row[j]} * shape.units] = scale_row[j] >= 0 ? codes : 0;
      if (store_scale && scale_row[j] >= 0)
        scales[scale_address(scale_row[j], 0, shape.tiles)] = static_cast<uint8_t>(scale);
    }
  }
  if (blockIdx.y == 0 && threadIdx.x < 32 && lane >= begin && lane < end) write_slot(a.metadata, lane, token, own);
}

constexpr int kPlacingThreads = 256;  // the first of a CTA count slots and place rows, while the others quantise
constexpr int kPlaces = 32;           // slots of a token that a CTA places at a time

// A barrier of those that place alone, or of the others. Both pass as many, for compute-sanitizer's racecheck compares
// threads by how many they have passed.
__device__ __forceinline__ void sync_half(bool placing) {
  asm volatile("bar.sync %0, %1;" ::"r"(placing ? 1 : 2), "r"(placing ? kPlacingThreads : blockDim.x - kPlacingThreads)
               : "memory");
}

template <typename T, typename Id, int kPerLane>
__global__ void __launch_bounds__(512)
    moe_permute_few_kernel(const __grid_constant__ PermuteQuantArgs a, const RowShape shape, const FewBlocks blocks) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ struct {
    int64_t code;   // index of the row's first unit
    int64_t scale;  // byte of its first scale, -1 without an expert
  } places[kPlaces];
  __shared__ Place slot_places[kPlaces];
  const int token = blocks.token(), tokens = static_cast<int>(a.tokens);
  const bool has_token = token >= 0 && token < tokens, placing = threadIdx.x < kPlacingThreads;
  const int warp = threadIdx.x / 32;
  const Slots slots(a.metadata, shared);
  PackedUnits<kPerLane> packed{};
  wait_for_prior_launch();
  if (placing) {
    Id ahead[Slots::kAhead];
    slots.prepare(kPlacingThreads, ahead);
    sync_half(true);
    slots.count(kPlacingThreads, ahead);
    sync_half(true);
  } else {
    const int lanes = blockDim.x - kPlacingThreads, x = threadIdx.x - kPlacingThreads;
    const RowLane lane{x, lanes, static_cast<int>(blockIdx.y) * lanes * kPerLane + x};
    uint4 w[kPerLane];
    load_units(a, token, has_token, lane, shape.units, w);
    sync_half(false);
    sync_half(false);
    if (has_token) packed = quantize_units<T>(w, lane, true, shape.units);
  }

  if (!has_token) {
    __syncthreads();
    if (token < 0) {
#pragma unroll 1
      for (int g = blocks.first_group(); 32 * g < static_cast<int>(a.metadata.num_experts); g += blocks.next_group())
        slots.write_experts(g);
    } else {
      blocks.zero(a, shape, tokens, [&](int tile_row) { return slots.rows_of_tile(tile_row); });
    }
    return;
  }

  const int topk = static_cast<int>(a.metadata.topk), share = blocks.share;
  const int end = min(static_cast<int>(blockIdx.z + 1) * share, topk);
#pragma unroll 1
  for (int begin = blockIdx.z * share; begin < end; begin += kPlaces) {
    const int count = min(end - begin, kPlaces);
    if (placing) {
#pragma unroll 1
      for (int j = warp; j < count; j += kPlacingThreads / 32) {
        const auto place = slots.place(token * topk + begin + j);
        if (threadIdx.x % 32 == 0) {
          const bool routed = place.expert < static_cast<int>(a.metadata.num_experts);
          places[j] = {int64_t{place.row} * shape.units, routed ? scale_address(place.scale_row, 0, shape.tiles) : -1};
          slot_places[j] = place;
        }
      }
    }
    __syncthreads();
    if (packed.store) {
      uint32_t* codes = reinterpret_cast<uint32_t*>(a.output) + packed.unit;
      uint8_t* scales = a.output_scale + packed.unit / 16 * static_cast<int>(kTileBytes);
      const int bytes = scale_bytes(packed.unit / 4, shape.blocks(), a.zero_padding);
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const auto place = places[j];
        const bool routed = place.scale >= 0;
        store_codes(codes + place.code, routed ? packed : PackedUnits<kPerLane>{});
        if (routed && packed.store_scales) store_scales(scales + place.scale, packed.scales, bytes);
      }
    }
    if (blockIdx.y == 0 && threadIdx.x < count)
      write_slot(a.metadata, token * topk + begin + static_cast<int>(threadIdx.x), token, slot_places[threadIdx.x]);
    if (begin + kPlaces < end) __syncthreads();
  }
}

// ---- Many slots ----

// Words of four scales in a token's row of scratch, whole 16 bytes.
__host__ __device__ __forceinline__ int token_scale_words(int tiles) { return (tiles + 3) / 4 * 4; }

// Rows without an expert, shared among `count` CTAs.
__device__ __forceinline__ void zero_unrouted_rows(const PermuteQuantArgs& a, const RowShape& shape, int64_t index,
                                                   int64_t count) {
  const int64_t row_words = shape.units / 4, end = a.metadata.rows * row_words;  // of 16 bytes
  const int threads = blockDim.x * blockDim.y;
  uint4* codes = reinterpret_cast<uint4*>(a.output);
  for (int64_t i = a.metadata.expert_offsets[a.metadata.num_experts] * row_words + index * threads +
                   threadIdx.y * blockDim.x + threadIdx.x;
       i < end; i += count * threads)
    codes[i] = make_uint4(0, 0, 0, 0);
}

// Quantises tokens before it waits for their places, and stores the codes to them. token_scales:
// [tokens, token_scale_words].
template <typename T, int kPerLane>
__global__ void __launch_bounds__(256)
    quantize_tokens_kernel(const __grid_constant__ PermuteQuantArgs a, const RowShape shape, uint32_t* token_scales) {
  launch_dependents();
  const RowLane lane{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                     static_cast<int>(first_unit<kPerLane>())};
  const int64_t token = row_index();
  const bool in_range = token < a.tokens;
  uint4 w[kPerLane];
  load_units(a, token, in_range, lane, shape.units, w);
  const auto packed = quantize_units<T>(w, lane, in_range, shape.units);
  if (packed.store_scales) token_scales[token * token_scale_words(shape.tiles) + packed.unit / 16] = packed.scales;

  wait_for_prior_launch();  // the permutation
  if (!packed.store) return;
  const int topk = static_cast<int>(a.metadata.topk);
  const int32_t* rows = a.metadata.output_permutation + token * topk;
  uint32_t* codes = reinterpret_cast<uint32_t*>(a.output) + packed.unit;
  constexpr int kAhead = 8;
#pragma unroll 1
  for (int begin = 0; begin < topk; begin += kAhead) {
    int row[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) row[j] = begin + j < topk ? rows[begin + j] : -1;
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (row[j] >= 0) store_codes(codes + int64_t{row[j]} * shape.units, packed);
  }
}

// The same, and the scales at once, four bytes at a time; whole warps are in one row. Blocks along x: `token_blocks` of
// tokens, `tile_rows` that zero the padding of a row of scale tiles each, and some that zero rows without an expert.
// blockscale_offsets: a.metadata's, or scratch if that has none.
template <typename T, typename Id, int kPerLane>
__global__ void __launch_bounds__(256)
    permute_tokens_kernel(const __grid_constant__ PermuteQuantArgs a, const RowShape shape,
                          const int32_t* blockscale_offsets, const unsigned token_blocks, const unsigned tile_rows) {
  const int E = static_cast<int>(a.metadata.num_experts), topk = static_cast<int>(a.metadata.topk);
  if (blockIdx.x >= token_blocks) {
    wait_for_prior_launch();
    const unsigned block = blockIdx.x - token_blocks;
    if (block < tile_rows)
      return zero_padding(a.metadata.expert_offsets, blockscale_offsets, E, a.output_scale, block, shape.tiles);
    const unsigned blocks = gridDim.x - token_blocks - tile_rows;
    return zero_unrouted_rows(a, shape, chunk_index() * blocks + (block - tile_rows), chunk_count() * blocks);
  }
  const unsigned token = routed_row_index(), lane_of_warp = threadIdx.x & 31;
  if (token >= a.tokens) return;
  const RowLane lane{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                     static_cast<int>(first_unit<kPerLane>())};
  uint4 w[kPerLane];
  load_units(a, token, true, lane, shape.units, w);
  int expert = lane_of_warp < topk ? expert_of<Id>(a.metadata, int64_t{token} * topk + lane_of_warp) : E;
  const auto packed = quantize_units<T>(w, lane, true, shape.units);
  const int bytes = scale_bytes(packed.unit / 4, shape.blocks(), a.zero_padding);
  uint32_t* codes = reinterpret_cast<uint32_t*>(a.output) + packed.unit;
  uint8_t* scales = a.output_scale + int64_t{packed.unit / 16} * kTileBytes;

  wait_for_prior_launch();  // permutation and offsets
#pragma unroll 1
  for (int begin = 0; begin < topk; begin += 32) {
    // A slot a lane.
    const int64_t slot = int64_t{token} * topk + begin + lane_of_warp;
    if (begin > 0) expert = begin + static_cast<int>(lane_of_warp) < topk ? expert_of<Id>(a.metadata, slot) : E;
    int own_row = -1, own_scale_row = 0;
    if (expert < E) {
      own_row = a.metadata.output_permutation[slot];
      own_scale_row = own_row - a.metadata.expert_offsets[expert] + blockscale_offsets[expert];
    }
    const int count = min(topk - begin, 32);
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const int row = __shfl_sync(kAllLanes, own_row, j), scale_row = __shfl_sync(kAllLanes, own_scale_row, j);
      if (row < 0) continue;
      if (packed.store) store_codes(codes + int64_t{row} * shape.units, packed);
      if (packed.store_scales) store_scales(scales + scale_address(scale_row, 0, shape.tiles), packed.scales, bytes);
    }
  }
}

constexpr int kScaleTiles = 32;  // along a row that a CTA handles at most at a time

// Blocks along x: a row of scale tiles each, and then some that share the rows without an expert, which are zeroed.
// Along y: `some_tiles` tiles of a row each, a multiple of 4. blockscale_offsets: a.metadata's, or scratch if that has
// none.
__global__ void __launch_bounds__(256)
    place_scales_kernel(const __grid_constant__ PermuteQuantArgs a, const RowShape shape, const int some_tiles,
                        const uint32_t* token_scales, const int32_t* blockscale_offsets, const unsigned tile_rows) {
  __shared__ uint32_t words[kTileRows][kScaleTiles + 1];
  wait_for_prior_launch();
  const int E = static_cast<int>(a.metadata.num_experts);
  const int32_t* expert_offsets = a.metadata.expert_offsets;
  if (blockIdx.x >= tile_rows) {
    const int64_t blocks = gridDim.x - tile_rows;
    return zero_unrouted_rows(a, shape, blockIdx.x - tile_rows + blockIdx.y * blocks, blocks * gridDim.y);
  }

  __shared__ int found;
  const int first_row = static_cast<int>(blockIdx.x * kTileRows);
  if (threadIdx.x < 32) {
    const int e = search(blockscale_offsets, E, first_row);
    if (threadIdx.x == 0) found = e;
  }
  __syncthreads();
  const int e = found;
  int rows = 0;  // of this tile
  const int32_t* tokens = a.metadata.input_permutation;
  if (e < E) {
    const int begin = expert_offsets[e] + first_row - blockscale_offsets[e];
    rows = min(expert_offsets[e + 1] - begin, static_cast<int>(kTileRows));
    tokens += begin;
  }
  if (rows == 0 && !a.zero_padding) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int first_tile = blockIdx.y * some_tiles, stride = token_scale_words(shape.tiles);
  // Eight lanes to a row, four tiles a lane.
  const int row_in_four = lane / 8, quad = lane % 8 * 4;
  const bool in_row = quad < some_tiles && first_tile + quad < shape.tiles;
  constexpr int kRounds = static_cast<int>(kTileRows) / 32;
  uint4 v[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int r = i * 32 + warp * 4 + row_in_four;
    v[i] = make_uint4(0, 0, 0, 0);
    if (r < rows && in_row)
      v[i] = *reinterpret_cast<const uint4*>(token_scales + int64_t{tokens[r]} * stride + first_tile + quad);
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    uint32_t* row = words[i * 32 + warp * 4 + row_in_four] + quad;
    row[0] = v[i].x, row[1] = v[i].y, row[2] = v[i].z, row[3] = v[i].w;
  }
  __syncthreads();
  uint8_t* tile = a.output_scale + (int64_t{blockIdx.x} * shape.tiles + first_tile) * kTileBytes + lane * 16;
  const int end = min(some_tiles, shape.tiles - first_tile);
  for (int t = warp; t < end; t += warps) {
    const uint32_t word[4] = {words[lane][t], words[lane + 32][t], words[lane + 64][t], words[lane + 96][t]};
    uint8_t* target = tile + t * kTileBytes;
    const int bytes = scale_bytes(4 * (first_tile + t), shape.blocks(), a.zero_padding);
    if (a.zero_padding || (lane + 96 < rows && bytes == 4)) {
      *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (lane + 32 * j < rows) store_scales(target + 4 * j, word[j], bytes);
    }
  }
}

}  // namespace mxfp4::cuda
