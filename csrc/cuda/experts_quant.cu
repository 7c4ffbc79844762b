#include "backend.h"
#include "device/experts_quant.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

// From here on a table of silu is worth its way into shared memory.
constexpr int64_t kUnitsOfTable = int64_t{7} << 16;
// And from here on a lane takes four units.
constexpr int64_t kUnitsOfWideLanes = int64_t{3} << 17;

template <typename T, bool kSilu, bool kSearch, bool kZero, int kPerLane>
void launch(const QuantArgs& a, const OnDevice& device) {
  const int64_t padding_blocks = kZero ? a.scale_rows / kTileRows : 0;
  const RowGrid grid = row_grid(a.rows, a.K / 8, kPerLane, padding_blocks, 32, kPerLane == 1 ? 128 : 256);
  const auto row_blocks = static_cast<unsigned>(grid.blocks.x - padding_blocks);
  Launch{device, grid.blocks, grid.threads}(a.op, experts_quant_kernel<T, kSilu, kSearch, kZero, kPerLane>, a,
                                            RowShape::of(a.K), row_blocks);
}

template <bool kSearch, bool kZero>
void launch_silu_table(const QuantArgs& a, const OnDevice& device) {
  const int64_t padding_blocks = kZero ? a.scale_rows / kTileRows : 0;
  RowGrid grid = row_grid(a.rows, a.K / 8, 4, padding_blocks, 32);
  grid.threads.y = kTableThreads / grid.threads.x;
  const int64_t ctas = ceil_div(2 * device.attribute(a.op, cudaDevAttrMultiProcessorCount), grid.blocks.y);
  const auto row_blocks = static_cast<unsigned>(std::min(ceil_div(a.rows, grid.threads.y), ctas));
  grid.blocks.x = row_blocks + static_cast<unsigned>(padding_blocks);
  Launch{device, grid.blocks, grid.threads}(a.op, silu_table_quant_kernel<kSearch, kZero>, a, RowShape::of(a.K),
                                            row_blocks);
}

template <typename T, bool kSilu, bool kSearch, bool kZero>
void choose(const QuantArgs& a, const OnDevice& device) {
  const int64_t units = a.rows * (a.K / 8);
  if (a.K < kWideColumns || units < (kSilu ? kUnitsOfTable : kUnitsOfWideLanes) || is_without("wide_lanes"))
    return launch<T, kSilu, kSearch, kZero, 1>(a, device);
  if constexpr (kSilu && T::kBias == 127)
    if (!is_without("silu_table")) return launch_silu_table<kSearch, kZero>(a, device);
  launch<T, kSilu, kSearch, kZero, 4>(a, device);
}

template <typename T, bool kSilu>
void choose(const QuantArgs& a, const OnDevice& device) {
  if (a.sorted_expert_ids == nullptr)
    a.zero_padding ? choose<T, kSilu, true, true>(a, device) : choose<T, kSilu, true, false>(a, device);
  else a.zero_padding ? choose<T, kSilu, false, true>(a, device) : choose<T, kSilu, false, false>(a, device);
}

}  // namespace

void Backend::experts_quant(const QuantArgs& a) {
  if (a.rows == 0) return;  // then S is 0, too
  const OnDevice device(a.device);
  if (a.is_bfloat16) a.silu ? choose<BFloat16, true>(a, device) : choose<BFloat16, false>(a, device);
  else a.silu ? choose<Float16, true>(a, device) : choose<Float16, false>(a, device);
}

}  // namespace mxfp4::cuda
