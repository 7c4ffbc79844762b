#include "backend.h"
#include "device/moe_permute.cuh"
#include "launch.h"
#include "metadata.h"

namespace mxfp4::cuda {
namespace {

constexpr const char* kOp = "moe_permute_mxfp4_quant";

// From here on a lane takes four units of a token: fewer, wider stores instead of more CTAs.
constexpr int64_t kUnitsOfWideLanes = int64_t{1} << 14;
constexpr int64_t kLanes = 128;                       // that share a chunk of a token
constexpr int64_t kManyLanes = 256;                   // where there are CTAs enough all the same
constexpr int64_t kMostColumns = kLanes * 8 * 65535;  // as many chunks as a grid is wide
// From here on scales are kept by token and brought into whole tiles by a launch of their own.
constexpr int64_t kTilesOfTiledScales = int64_t{1} << 19;
// Of the GPU that this was measured on: its SMs, and half of them.
constexpr int64_t kSms = 132, kSpareCtas = 66;

// The grid of FewBlocks, for CTAs of `warps` warps and rows of `chunks` chunks.
dim3 few_grid(const PermuteQuantArgs& a, int64_t warps, int64_t chunks, FewBlocks& blocks) {
  // A CTA's time goes with the slots that it stores; while there are SMs to spare, more CTAs share them. Zeroing needs
  // those SMs.
  const int64_t topk = a.metadata.topk;
  int64_t share = topk;
  while (!a.zero_padding && share > 1 && a.tokens * chunks * ceil_div(topk, share) <= kSpareCtas)
    share = ceil_div(share, 2);
  const int64_t shares = ceil_div(topk, share);
  const int64_t expert_blocks = ceil_div(ceil_div(a.metadata.num_experts, 32), warps * chunks * shares);
  const int64_t tile_rows = a.zero_padding ? a.scale_rows / kTileRows : 0;
  blocks = {static_cast<int>(expert_blocks), static_cast<int>(share), static_cast<int>(tile_rows)};
  return dim3(static_cast<unsigned>(expert_blocks + a.tokens + ceil_div(std::min(tile_rows, kSms), chunks * shares)),
              static_cast<unsigned>(chunks), static_cast<unsigned>(shares));
}

template <typename T, typename Id, int kPerLane>
void launch_few(const PermuteQuantArgs& a, const OnDevice& device) {
  const RowShape shape = RowShape::of(a.K);
  const bool enough = a.tokens * ceil_div(shape.units, kLanes * kPerLane) > kSms;
  const int64_t lanes =
      std::min(round_up(ceil_div(shape.units, kPerLane), 32), kPerLane > 1 && enough ? kManyLanes : kLanes);
  FewBlocks blocks;
  const dim3 grid = few_grid(a, (kPlacingThreads + lanes) / 32, ceil_div(shape.units, lanes * kPerLane), blocks);
  Launch{device, grid, dim3(static_cast<unsigned>(kPlacingThreads + lanes)),
         static_cast<size_t>(Slots::shared_bytes(a.metadata.num_experts, a.metadata.rows))}(
      kOp, moe_permute_few_kernel<T, Id, kPerLane>, a, shape, blocks);
}

template <typename T, typename Id>
void launch_warp(const PermuteQuantArgs& a, const OnDevice& device) {
  const RowShape shape = RowShape::of(a.K);
  const int64_t lanes = std::min(round_up(shape.units, 32), kLanes);
  FewBlocks blocks;
  const dim3 grid = few_grid(a, lanes / 32, ceil_div(shape.units, lanes), blocks);
  Launch{device, grid, dim3(static_cast<unsigned>(lanes))}(kOp, moe_permute_warp_kernel<T, Id>, a, shape, blocks);
}

template <typename T, typename Id>
void choose_few(const PermuteQuantArgs& a, const OnDevice& device) {
  if (a.metadata.rows <= WarpSlots::kMost && !is_without("warp_slots")) return launch_warp<T, Id>(a, device);
  const bool wide = a.K >= kWideColumns && a.tokens * (a.K / 8) >= kUnitsOfWideLanes && !is_without("wide_lanes");
  wide ? launch_few<T, Id, 4>(a, device) : launch_few<T, Id, 1>(a, device);
}

// CTAs that share the rows without an expert.
int64_t zeroing_blocks(const PermuteQuantArgs& a) {
  return std::clamp<int64_t>(ceil_div(a.metadata.rows * (a.K / 32), 4096), 1, kSms);
}

template <typename T, typename Id, int kPerLane>
void launch_tokens(const PermuteQuantArgs& a, const int32_t* blockscale_offsets, const OnDevice& device) {
  const RowShape shape = RowShape::of(a.K);
  const int64_t tile_rows = a.zero_padding ? a.scale_rows / kTileRows : 0;
  RowGrid grid = row_grid(a.tokens, shape.units, kPerLane, 0, 32);
  const unsigned token_blocks = grid.blocks.x;
  grid.blocks.x += static_cast<unsigned>(tile_rows + zeroing_blocks(a));
  Launch{device, grid.blocks, grid.threads}(kOp, permute_tokens_kernel<T, Id, kPerLane>, a, shape, blockscale_offsets,
                                            token_blocks, static_cast<unsigned>(tile_rows));
}

template <typename T, int kPerLane>
void launch_many(const PermuteQuantArgs& a, const OnDevice& device) {
  std::optional<Tensor> offsets;  // of the scales, for the kernel that needs them where the caller does not
  MetadataArgs metadata = a.metadata;
  if (metadata.blockscale_offsets == nullptr) {
    offsets = device.scratch(metadata.num_experts + 1);
    metadata.blockscale_offsets = mutable_data<int32_t>(*offsets);
  }
  const RowShape shape = RowShape::of(a.K);
  const bool tiled = a.metadata.rows * shape.tiles >= kTilesOfTiledScales && !is_without("tiled_scales");
  if (!tiled) {
    launch_metadata(kOp, metadata, device, true);
    return a.metadata.ids_are_int64 ? launch_tokens<T, int64_t, kPerLane>(a, metadata.blockscale_offsets, device)
                                    : launch_tokens<T, int32_t, kPerLane>(a, metadata.blockscale_offsets, device);
  }

  const Tensor token_scales = device.scratch(a.tokens * token_scale_words(shape.tiles));
  uint32_t* scales = reinterpret_cast<uint32_t*>(mutable_data<int32_t>(token_scales));
  launch_metadata(kOp, metadata, device, true);
  const RowGrid grid = row_grid(a.tokens, shape.units, kPerLane);
  Launch{device, grid.blocks, grid.threads}(kOp, quantize_tokens_kernel<T, kPerLane>, a, shape, scales);

  const int64_t chunks = ceil_div(shape.tiles, kScaleTiles), some_tiles = round_up(ceil_div(shape.tiles, chunks), 4);
  const int64_t tile_rows = a.scale_rows / kTileRows;
  const dim3 blocks(static_cast<unsigned>(tile_rows + zeroing_blocks(a)), static_cast<unsigned>(chunks));
  Launch{device, blocks, dim3(256)}(kOp, place_scales_kernel, a, shape, static_cast<int>(some_tiles), scales,
                                    metadata.blockscale_offsets, static_cast<unsigned>(tile_rows));
}

template <typename T>
void choose(const PermuteQuantArgs& a, const OnDevice& device) {
  const bool few = a.metadata.rows <= kFewSlots && a.metadata.num_experts <= kFewExperts && a.K <= kMostColumns &&
                   !is_without("few_slots");
  if (few) a.metadata.ids_are_int64 ? choose_few<T, int64_t>(a, device) : choose_few<T, int32_t>(a, device);
  else a.K >= kWideColumns ? launch_many<T, 4>(a, device) : launch_many<T, 1>(a, device);
}

}  // namespace

void Backend::moe_permute_mxfp4_quant(const PermuteQuantArgs& a) {
  const OnDevice device(a.device);
  if (a.metadata.rows == 0) return launch_metadata(kOp, a.metadata, device, false);  // then S is 0, too
  a.is_bfloat16 ? choose<BFloat16>(a, device) : choose<Float16>(a, device);
}

}  // namespace mxfp4::cuda
