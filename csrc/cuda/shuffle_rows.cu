#include "backend.h"
#include "device/shuffle_rows.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

template <typename Unit, typename Index, int kPerLane>
void launch(const ShuffleArgs& a, const OnDevice& device) {
  const RowGrid grid = row_grid(a.rows, a.row_bytes / static_cast<int64_t>(sizeof(Unit)), kPerLane);
  Launch{device, grid.blocks, grid.threads}("shuffle_rows", shuffle_rows_kernel<Unit, Index, kPerLane>, a);
}

template <typename Unit>
void choose(const ShuffleArgs& a, const OnDevice& device) {
  const bool many = many_units(a.rows, a.row_bytes / static_cast<int64_t>(sizeof(Unit)));
  if (a.map_is_int64) many ? launch<Unit, int64_t, 4>(a, device) : launch<Unit, int64_t, 1>(a, device);
  else many ? launch<Unit, int32_t, 4>(a, device) : launch<Unit, int32_t, 1>(a, device);
}

}  // namespace

void Backend::shuffle_rows(const ShuffleArgs& a) {
  const OnDevice device(a.device);
  const auto alignment = static_cast<uint64_t>(a.row_bytes) | static_cast<uint64_t>(a.row_stride_bytes) |
                         reinterpret_cast<uintptr_t>(a.input) | reinterpret_cast<uintptr_t>(a.output);
  if (alignment % 16 == 0) choose<uint4>(a, device);
  else if (alignment % 8 == 0) choose<uint2>(a, device);
  else if (alignment % 4 == 0) choose<uint32_t>(a, device);
  else if (alignment % 2 == 0) choose<uint16_t>(a, device);
  else choose<uint8_t>(a, device);
}

}  // namespace mxfp4::cuda
