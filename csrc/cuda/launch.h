// Host side of a launch: device, current stream, grid of rows, and errors that say what is missing.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../host/tensor.h"
#include "../layout.h"

namespace mxfp4::cuda {

inline void check_cuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not surface in somebody else's check
  std::string message = std::string(op) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0;
    cudaDeviceProp properties{};
    cudaGetDevice(&device);
    cudaGetDeviceProperties(&properties, device);
    message += "; mxfp4_ops was compiled for " MXFP4_OPS_CUDA_ARCHS ", this GPU is " +
               std::to_string(properties.major) + "." + std::to_string(properties.minor) +
               " (set TORCH_CUDA_ARCH_LIST and build again)";
  }
  throw std::runtime_error(message);
}

// The device of the arguments, current while it lives, and torch's current stream there.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : device_(device), guard_(device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

  int attribute(const char* op, cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(op, cudaDeviceGetAttribute(&value, which, device_));
    return value;
  }

  // Whether kernels may start before the one in front of them has ended (programmatic dependent launch).
  bool has_dependent() const { return attribute("mxfp4_ops", cudaDevAttrComputeCapabilityMajor) >= 9; }

  // Uninitialised memory of torch's caching allocator, safe to drop once the launch is queued.
  Tensor scratch(int64_t ints) const {
    const int64_t stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &ints, &stride, aoti_torch_dtype_int32(),
                                                    aoti_torch_device_type_cuda(), device_, &handle));
    return Tensor(handle);
  }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

struct Launch {
  dim3 blocks, threads;
  size_t shared;
  cudaStream_t stream;
  bool dependent = false;  // may start while the kernel before it runs, and says itself when it waits

  template <typename... Parameters, typename... Arguments>
  void operator()(const char* op, void (*kernel)(Parameters...), Arguments... arguments) const {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = dependent ? 1 : 0;
    check_cuda(op, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }
};

// A block holds threads.x lanes along the units of a row and threads.y rows; a row is blocks.y * blocks.z blocks long
// (y alone ends at 65,535). Every lane takes
// up to `per_lane` units, threads.x apart. threads.x is a power of two or a multiple of 32, so that four or sixteen
// neighbours of a row are always in one warp.
struct RowGrid {
  dim3 threads, blocks;
};

inline RowGrid row_grid(int64_t rows, int64_t units, int per_lane, int64_t extra_blocks = 0) {
  const int64_t lanes = ceil_div(units, per_lane);
  unsigned x = 4;
  while (x < 32 && x < lanes) x *= 2;
  if (lanes > 32) x = static_cast<unsigned>(std::min<int64_t>(256, round_up(lanes, 32)));
  const unsigned y = std::max(1u, 256u / x);
  const int64_t chunks = ceil_div(units, static_cast<int64_t>(x) * per_lane), z = ceil_div(chunks, 65535);
  return RowGrid{dim3(x, y), dim3(static_cast<unsigned>(ceil_div(rows, y) + extra_blocks),
                                  static_cast<unsigned>(ceil_div(chunks, z)), static_cast<unsigned>(z))};
}

// Few units: one a lane, for the latency of a lane counts. Many of long rows: four loads in flight each.
constexpr int64_t kWideColumns = 1024;
inline bool many_units(int64_t rows, int64_t units) {
  return units >= kWideColumns / 8 && rows * units >= int64_t{1} << 18;
}

}  // namespace mxfp4::cuda
