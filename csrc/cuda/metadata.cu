#include "backend.h"
#include "device/metadata.cuh"
#include "launch.h"

namespace mxfp4::cuda {
namespace {

constexpr const char* kOp = "get_cutlass_moe_mm_data";

// From here on the slots are too many for one CTA, and a launch to count them is worth its time.
constexpr int64_t kManySlots = 2048, kSlotsOfCta = 1024, kMostCtas = 64;

template <typename Id>
void launch(const MetadataArgs& a) {
  const OnDevice device(a.device);
  constexpr int64_t kStatic = 1024, kDefaultShared = 48 * 1024 - kStatic;  // what every GPU gives without being asked
  const int64_t E = a.num_experts, most_warps = kMetadataThreads / 32;
  auto bytes = [&](int64_t warps) { return warps * E * static_cast<int64_t>(sizeof(int32_t)); };
  const bool many = a.rows >= kManySlots && bytes(1) <= kDefaultShared;
  const int64_t ctas = many ? std::min(kMostCtas, ceil_div(a.rows, kSlotsOfCta)) : 1;
  const int64_t span = round_up(ceil_div(a.rows, ctas), 32);
  // More warps share the ballots, and make more histograms to add up.
  const int64_t wanted_warps =
      std::clamp<int64_t>(span <= 256 ? ceil_div(span, 32) : std::max<int64_t>(8, ceil_div(span, 128)), 1, most_warps);
  auto shares = [&](int64_t slot_warps) {
    return Shares{span, round_up(ceil_div(span, slot_warps), 32), static_cast<int>(slot_warps)};
  };
  auto threads = [&](int64_t slot_warps) {
    return static_cast<unsigned>(32 * std::max(slot_warps, std::min(most_warps, ceil_div(E, 32))));
  };

  std::optional<Tensor> counted;
  if (many) {
    counted = device.scratch(ctas * E);
    count_experts_kernel<Id>
        <<<static_cast<unsigned>(ctas), kMetadataThreads, static_cast<size_t>(bytes(1)), device.stream()>>>(
            a, shares(1), mutable_data<int32_t>(*counted));
    check_cuda(kOp, cudaGetLastError());
  }
  const int32_t* counts = data<int32_t>(counted);

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
    kernel<<<static_cast<unsigned>(ctas), threads(slot_warps), shared, device.stream()>>>(a, shares(slot_warps),
                                                                                          nullptr, counts);
  } else {  // tens of thousands of experts
    const Tensor scratch = device.scratch(wanted_warps * E);
    metadata_kernel<Id, false><<<1, threads(wanted_warps), 0, device.stream()>>>(
        a, shares(wanted_warps), mutable_data<int32_t>(scratch), nullptr);
  }
  check_cuda(kOp, cudaGetLastError());
}

}  // namespace

void Backend::metadata(const MetadataArgs& args) { args.ids_are_int64 ? launch<int64_t>(args) : launch<int32_t>(args); }

}  // namespace mxfp4::cuda
