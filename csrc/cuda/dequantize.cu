#include "backend.h"
#include "device/dequantize.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

template <FloatType kType, int kPerLane>
void launch(const DequantizeArgs& a, cudaStream_t stream) {
  const RowGrid grid = row_grid(a.rows, a.K / 8, kPerLane, 0, 32);
  dequantize_kernel<kType, kPerLane><<<grid.blocks, grid.threads, 0, stream>>>(a);
  check_cuda("mxfp4_dequantize", cudaGetLastError());
}

template <FloatType kType>
void choose(const DequantizeArgs& a, cudaStream_t stream) {
  many_units(a.rows, a.K / 8) ? launch<kType, 4>(a, stream) : launch<kType, 1>(a, stream);
}

}  // namespace

void Backend::dequantize(const DequantizeArgs& a) {
  if (a.rows == 0) return;
  const OnDevice device(a.device);
  switch (a.type) {
    case FloatType::kFloat32:
      return choose<FloatType::kFloat32>(a, device.stream());
    case FloatType::kBFloat16:
      return choose<FloatType::kBFloat16>(a, device.stream());
    case FloatType::kFloat16:
      return choose<FloatType::kFloat16>(a, device.stream());
  }
}

}  // namespace mxfp4::cuda
