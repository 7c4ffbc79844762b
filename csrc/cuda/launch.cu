#include <atomic>

#include "launch.h"

namespace mxfp4::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

int compiled_architecture(int device) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices]{};
  if (device < kMostDevices && known[device] != 0) return known[device];
  cudaFuncAttributes attributes{};
  check_cuda("mxfp4_ops", cudaFuncGetAttributes(&attributes, probe_kernel));
  if (device < kMostDevices) known[device] = attributes.ptxVersion;
  return attributes.ptxVersion;
}

}  // namespace mxfp4::cuda
