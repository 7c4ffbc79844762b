#include "backend.h"
#include "device/metadata.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

constexpr const char* kOp = "get_cutlass_moe_mm_data";

template <typename Id>
void launch(const MetadataArgs& a) {
  const OnDevice device(a.device);
  const int64_t E = a.num_experts, most_warps = kMetadataThreads / 32, default_shared = 48 * 1024;
  const int64_t wanted_warps = std::min(most_warps, std::max<int64_t>(1, ceil_div(a.rows, 32)));
  auto bytes = [&](int64_t warps) { return warps * E * static_cast<int64_t>(sizeof(int32_t)); };
  int64_t slot_warps = wanted_warps, shared = bytes(slot_warps), limit = default_shared - 1024;
  if (shared > limit) {
    limit = device.attribute(kOp, cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024;
    while (shared > limit && slot_warps > 1) shared = bytes(slot_warps /= 2);
    if (shared <= limit)
      check_cuda(kOp, cudaFuncSetAttribute(metadata_kernel<Id>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared)));
  }
  std::optional<Tensor> scratch;
  if (shared > limit) {  // tens of thousands of experts
    slot_warps = wanted_warps;
    shared = 0;
    scratch = device.scratch(slot_warps * E);
  }
  const auto threads = static_cast<unsigned>(32 * std::max(slot_warps, std::min(most_warps, ceil_div(E, 32))));
  metadata_kernel<Id><<<1, threads, static_cast<size_t>(shared), device.stream()>>>(
      a, static_cast<int>(slot_warps), scratch.has_value() ? mutable_data<int32_t>(*scratch) : nullptr);
  check_cuda(kOp, cudaGetLastError());
}

}  // namespace

void Backend::metadata(const MetadataArgs& args) { args.ids_are_int64 ? launch<int64_t>(args) : launch<int32_t>(args); }

}  // namespace mxfp4::cuda
