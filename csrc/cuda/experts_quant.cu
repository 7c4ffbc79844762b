#include "backend.h"
#include "device/experts_quant.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

// From here on a table of silu is worth its making.
constexpr int64_t kUnitsOfTable = int64_t{1} << 20;

template <typename T, bool kSilu, bool kSearch, int kPerLane>
void launch(const QuantArgs& a, cudaStream_t stream) {
  const int64_t padding_blocks = a.zero_padding ? a.scale_rows / kTileRows : 0;
  const RowGrid grid = row_grid(a.rows, a.K / 8, kPerLane, padding_blocks);
  const auto row_blocks = static_cast<unsigned>(grid.blocks.x - padding_blocks);
  experts_quant_kernel<T, kSilu, kSearch, kPerLane>
      <<<grid.blocks, grid.threads, 0, stream>>>(a, RowShape::of(a.K), row_blocks);
  check_cuda(a.op, cudaGetLastError());
}

template <bool kSearch>
void launch_silu_table(const QuantArgs& a, const OnDevice& device) {
  constexpr int64_t kCtas = 4;  // of an SM: what its registers hold
  const int64_t padding_blocks = a.zero_padding ? a.scale_rows / kTileRows : 0;
  RowGrid grid = row_grid(a.rows, a.K / 8, 4, padding_blocks);
  const auto row_blocks = static_cast<unsigned>(
      std::min<int64_t>(grid.blocks.x - padding_blocks,
                        ceil_div(kCtas * device.attribute(a.op, cudaDevAttrMultiProcessorCount), grid.blocks.y)));
  grid.blocks.x = row_blocks + static_cast<unsigned>(padding_blocks);
  silu_table_quant_kernel<kSearch><<<grid.blocks, grid.threads, 0, device.stream()>>>(a, RowShape::of(a.K), row_blocks);
  check_cuda(a.op, cudaGetLastError());
}

template <typename T, bool kSilu, bool kSearch>
void choose(const QuantArgs& a, const OnDevice& device) {
  const cudaStream_t stream = device.stream();
  if constexpr (kSilu && T::kBias == 127)
    if (a.K >= kWideColumns && a.rows * (a.K / 8) >= kUnitsOfTable) return launch_silu_table<kSearch>(a, device);
  many_units(a.rows, a.K / 8) ? launch<T, kSilu, kSearch, 4>(a, stream) : launch<T, kSilu, kSearch, 1>(a, stream);
}

template <typename T, bool kSilu>
void choose(const QuantArgs& a, const OnDevice& device) {
  a.sorted_expert_ids == nullptr ? choose<T, kSilu, true>(a, device) : choose<T, kSilu, false>(a, device);
}

}  // namespace

void Backend::experts_quant(const QuantArgs& a) {
  if (a.rows == 0) return;  // then S is 0, too
  const OnDevice device(a.device);
  if (a.is_bfloat16) a.silu ? choose<BFloat16, true>(a, device) : choose<BFloat16, false>(a, device);
  else a.silu ? choose<Float16, true>(a, device) : choose<Float16, false>(a, device);
}

}  // namespace mxfp4::cuda
