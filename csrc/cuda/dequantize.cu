#include "backend.h"
#include "device/dequantize.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

template <FloatType kType, int kPerLane>
void launch(const DequantizeArgs& a, const OnDevice& device) {
  const RowGrid grid = row_grid(a.rows, a.K / 8, kPerLane, 0, 32);
  Launch{device, grid.blocks, grid.threads}("mxfp4_dequantize", dequantize_kernel<kType, kPerLane>, a);
}

template <FloatType kType>
void choose(const DequantizeArgs& a, const OnDevice& device) {
  many_units(a.rows, a.K / 8) ? launch<kType, 4>(a, device) : launch<kType, 1>(a, device);
}

}  // namespace

void Backend::dequantize(const DequantizeArgs& a) {
  if (a.rows == 0) return;
  const OnDevice device(a.device);
  switch (a.type) {
    case FloatType::kFloat32:
      return choose<FloatType::kFloat32>(a, device);
    case FloatType::kBFloat16:
      return choose<FloatType::kBFloat16>(a, device);
    case FloatType::kFloat16:
      return choose<FloatType::kFloat16>(a, device);
  }
}

}  // namespace mxfp4::cuda
