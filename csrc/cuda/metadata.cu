#include "backend.h"
#include "device/metadata.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

constexpr const char* kOp = "get_cutlass_moe_mm_data";

template <typename Id>
void launch(const MetadataArgs& a) {
  const OnDevice device(a.device);
  const int64_t E = a.num_experts, most_warps = kMetadataThreads / 32;
  const int64_t wanted_warps = std::min(most_warps, std::max<int64_t>(1, ceil_div(a.rows, 32)));
  auto threads = [&](int64_t slot_warps) {
    return static_cast<unsigned>(32 * std::max(slot_warps, std::min(most_warps, ceil_div(E, 32))));
  };
  auto bytes = [&](int64_t slot_warps) { return slot_warps * E * static_cast<int64_t>(sizeof(int32_t)); };

  constexpr int64_t kStatic = 1024, kDefaultShared = 48 * 1024 - kStatic;  // what every GPU gives without being asked
  int64_t slot_warps = wanted_warps, limit = kDefaultShared;
  if (bytes(slot_warps) > limit) {
    limit = device.attribute(kOp, cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
    while (bytes(slot_warps) > limit && slot_warps > 1) slot_warps /= 2;
  }
  if (bytes(slot_warps) <= limit) {
    const auto kernel = metadata_kernel<Id, true>;
    const auto shared = static_cast<int>(bytes(slot_warps));
    // The attribute belongs to the process: always the same value, so that no thread takes away what another needs.
    if (shared > kDefaultShared)
      check_cuda(kOp,
                 cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit)));
    kernel<<<1, threads(slot_warps), shared, device.stream()>>>(a, static_cast<int>(slot_warps), nullptr);
  } else {  // tens of thousands of experts
    const Tensor scratch = device.scratch(wanted_warps * E);
    metadata_kernel<Id, false><<<1, threads(wanted_warps), 0, device.stream()>>>(a, static_cast<int>(wanted_warps),
                                                                                 mutable_data<int32_t>(scratch));
  }
  check_cuda(kOp, cudaGetLastError());
}

}  // namespace

void Backend::metadata(const MetadataArgs& args) { args.ids_are_int64 ? launch<int64_t>(args) : launch<int32_t>(args); }

}  // namespace mxfp4::cuda
