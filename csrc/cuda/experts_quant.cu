#include "backend.h"
#include "device/experts_quant.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

template <typename T, bool kSilu, int kPerLane>
void launch(const QuantArgs& a, cudaStream_t stream) {
  const int64_t padding_blocks = a.zero_padding ? a.scale_rows / kTileRows : 0;
  const RowGrid grid = row_grid(a.rows, a.K / 8, kPerLane, padding_blocks);
  const auto row_blocks = static_cast<unsigned>(grid.blocks.x - padding_blocks);
  experts_quant_kernel<T, kSilu, kPerLane><<<grid.blocks, grid.threads, 0, stream>>>(a, row_blocks);
  check_cuda(a.op, cudaGetLastError());
}

template <typename T, bool kSilu>
void choose(const QuantArgs& a, cudaStream_t stream) {
  many_units(a.rows, a.K / 8) ? launch<T, kSilu, 4>(a, stream) : launch<T, kSilu, 1>(a, stream);
}

}  // namespace

void Backend::experts_quant(const QuantArgs& a) {
  if (a.rows == 0) return;  // then S is 0, too
  const OnDevice device(a.device);
  if (a.is_bfloat16) a.silu ? choose<BFloat16, true>(a, device.stream()) : choose<BFloat16, false>(a, device.stream());
  else a.silu ? choose<Float16, true>(a, device.stream()) : choose<Float16, false>(a, device.stream());
}

}  // namespace mxfp4::cuda
