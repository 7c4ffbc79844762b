// Host side of a launch: device, current stream, grid of rows, and errors that say what is missing.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
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

// Whether launches must do without something, for the tests of what then takes its place: MXFP4_OPS_CUDA_WITHOUT names
// it in the environment, in a list with commas. Who does not have that at the first launch pays nothing for it later.
inline bool is_without(const char* what) {
  constexpr const char* kName = "MXFP4_OPS_CUDA_WITHOUT";
  static const bool used = std::getenv(kName) != nullptr;
  if (!used) return false;
  const char* list = std::getenv(kName);
  const size_t length = std::strlen(what);
  for (const char* at = list; at != nullptr; at = std::strchr(at, ',')) {
    if (*at == ',') ++at;
    if (std::strncmp(at, what, length) == 0 && (at[length] == ',' || at[length] == 0)) return true;
  }
  return false;
}

// The virtual architecture (80, 90, ...) that this GPU's kernels were compiled for. A GPU newer than those of the build
// runs what its driver makes of the oldest, which is without all that came later.
int compiled_architecture(int device);

// The device of the arguments, current while it lives, and torch's current stream there.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : device_(device), guard_(device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }
  int32_t index() const { return device_; }

  int attribute(const char* op, cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(op, cudaDeviceGetAttribute(&value, which, device_));
    return value;
  }

  // Whether kernels can wait for the one in front of them by themselves, and have clusters.
  bool has_dependent_launch() const { return compiled_architecture(device_) >= 90 && !is_without("dependent_launch"); }
  bool has_clusters() const { return compiled_architecture(device_) >= 90 && !is_without("clusters"); }

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

// Where the GPU allows it, a kernel's CTAs start while the kernel before it ends, whoever launched that: the kernel
// waits by itself before it touches memory (device/dependent_launch.cuh).
struct Launch {
  const OnDevice& device;
  dim3 blocks, threads;
  size_t shared = 0;
  unsigned cluster = 0;  // CTAs of a cluster, 0 without

  template <typename... Parameters, typename... Arguments>
  void operator()(const char* op, void (*kernel)(Parameters...), Arguments... arguments) const {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = device.stream();
    config.attrs = attributes;
    if (device.has_dependent_launch()) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster != 0) {
      cudaLaunchAttribute& size = attributes[config.numAttrs++];
      size.id = cudaLaunchAttributeClusterDimension;
      size.val.clusterDim.x = cluster;
      size.val.clusterDim.y = size.val.clusterDim.z = 1;
    }
    check_cuda(op, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }
};

// A block holds threads.x lanes along the units of a row and threads.y rows; a row is blocks.y * blocks.z blocks long
// (y alone ends at 65,535). Every lane takes up to `per_lane` units, threads.x apart. threads.x is a power of two or a
// multiple of 32.
struct RowGrid {
  dim3 threads, blocks;
};

// least_lanes: 32 where a warp must not hold two rows. most_threads: of a block, a multiple of 32.
inline RowGrid row_grid(int64_t rows, int64_t units, int per_lane, int64_t extra_blocks = 0, unsigned least_lanes = 4,
                        unsigned most_threads = 256) {
  const int64_t lanes = ceil_div(units, per_lane), chunks = ceil_div(lanes, most_threads);
  unsigned x = least_lanes;
  while (x < 32 && x < lanes) x *= 2;
  if (lanes > 32) x = static_cast<unsigned>(round_up(ceil_div(lanes, chunks), 32));  // chunks of equal length
  const unsigned y = std::max(1u, most_threads / x);
  const int64_t z = ceil_div(chunks, 65535);
  return RowGrid{dim3(x, y), dim3(static_cast<unsigned>(ceil_div(rows, y) + extra_blocks),
                                  static_cast<unsigned>(ceil_div(chunks, z)), static_cast<unsigned>(z))};
}

// Few units: one a lane, for the latency of a lane counts. Many of long rows: four loads in flight each.
constexpr int64_t kWideColumns = 1024;
inline bool many_units(int64_t rows, int64_t units) {
  return units >= kWideColumns / 8 && rows * units >= int64_t{1} << 18;
}

}  // namespace mxfp4::cuda
