#include <atomic>

#include "backend.h"
#include "device/metadata.cuh"
#include "launch.h"
#include "metadata.h"

namespace mxfp4::cuda {
namespace {

// How many CTAs share the slots that are not few.
constexpr int64_t kSlotsOfCta = 512, kMostCtas = 64;
constexpr int64_t kStatic = 1024, kDefaultShared = 48 * 1024 - kStatic;  // what every GPU gives without being asked

template <typename Id>
void launch_few(const char* op, const MetadataArgs& a, const OnDevice& device) {
  constexpr int64_t kThreads = 256, kMostCtasOfFew = 264;
  const int64_t tasks = ceil_div(a.num_experts, 32) + a.rows;
  const dim3 blocks(static_cast<unsigned>(std::min(ceil_div(tasks, kThreads / 32), kMostCtasOfFew)));
  Launch{device, blocks, dim3(kThreads), static_cast<size_t>(Slots::shared_bytes(a.num_experts, a.rows))}(
      op, metadata_few_kernel<Id>, a);
}

constexpr unsigned kClusterCtas = 16;

// Whether the current GPU, which has clusters, runs those of this kernel, asked of it once: a part of a GPU has none of
// this size.
template <typename Id>
bool has_cluster(const char* op, const OnDevice& device) {
  constexpr int kMostDevices = 64;
  static std::atomic<int8_t> known[kMostDevices]{};  // 1: yes, -1: no
  if (device.index() >= kMostDevices) return false;
  std::atomic<int8_t>& answer = known[device.index()];
  if (answer == 0) {
    int clusters = 0;
    const auto kernel = metadata_cluster_kernel<Id>;
    const int shared = device.attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int>(kStatic);
    check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = kClusterCtas;
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kClusterCtas);
    config.blockDim = dim3(kMetadataThreads);
    config.dynamicSmemBytes = shared;
    config.attrs = &size;
    config.numAttrs = 1;
    const bool asked = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
    if (!asked) cudaGetLastError();  // some say so of a size that they do not have
    answer = asked && clusters > 0 ? 1 : -1;
  }
  return answer > 0;
}

// One launch of CTAs that read each other's counts: as fast as two launches up to 16,384 slots, and little slower up to
// the most that it takes. False where the GPU or the sizes do not allow it.
template <typename Id>
bool launch_cluster(const char* op, const MetadataArgs& a, const OnDevice& device, bool followed) {
  constexpr int64_t kMostSlots = int64_t{kClusterCtas} * kClusterSpan;
  if (a.num_experts > kMostClusterExperts || a.rows > kMostSlots || !device.has_clusters()) return false;
  if (!has_cluster<Id>(op, device)) return false;
  const int64_t span = round_up(std::max<int64_t>(1, ceil_div(a.rows, kClusterCtas)), 32);
  // Fewer warps have fewer histograms to add up, more share the ballots.
  const int64_t warps = std::clamp<int64_t>(ceil_div(span, a.num_experts > 256 ? 128 : 64), 16, kMetadataThreads / 32);
  const int64_t stretch = round_up(ceil_div(span, warps), 32), slot_warps = ceil_div(span, stretch);
  const auto bytes = sizeof(SortedSlot) * span + sizeof(int32_t) * (slot_warps + 1) * a.num_experts;
  Launch{device, dim3(kClusterCtas), dim3(kMetadataThreads), bytes, kClusterCtas}(
      op, metadata_cluster_kernel<Id>, a, static_cast<int>(span), static_cast<int>(stretch),
      static_cast<int>(slot_warps), followed);
  return true;
}

template <typename Id>
void launch_many(const char* op, const MetadataArgs& a, const OnDevice& device, bool followed) {
  const int64_t E = a.num_experts, most_warps = kMetadataThreads / 32;
  auto bytes = [&](int64_t histograms) { return histograms * E * static_cast<int64_t>(sizeof(int32_t)); };
  int64_t ctas = 1, span = 0, slot_warps = 0;
  auto share = [&](int64_t among) {
    ctas = among;
    span = round_up(ceil_div(a.rows, ctas), 32);
    // More warps share the ballots, and make more histograms to add up.
    slot_warps = std::clamp<int64_t>(span <= 256 ? ceil_div(span, 32) : std::max<int64_t>(8, ceil_div(span, 128)), 1,
                                     most_warps);
  };
  auto shares = [&] { return Shares{span, round_up(ceil_div(span, slot_warps), 32), static_cast<int>(slot_warps)}; };
  auto threads = [&] {
    return dim3(static_cast<unsigned>(32 * std::max(slot_warps, std::min(most_warps, ceil_div(E, 32)))));
  };

  if (a.rows > kFewSlots) {
    share(std::min(kMostCtas, ceil_div(a.rows, kSlotsOfCta)));
    if (bytes(slot_warps) <= kDefaultShared) {
      const Tensor counted = device.scratch(ctas * E);
      const dim3 blocks(static_cast<unsigned>(ctas));
      Launch{device, blocks, dim3(kMetadataThreads), static_cast<size_t>(bytes(1))}(
          op, count_experts_kernel<Id>, a, shares(), mutable_data<int32_t>(counted));
      return Launch{device, blocks, threads(), static_cast<size_t>(bytes(slot_warps))}(
          op, metadata_kernel<Id, true>, a, shares(), nullptr, data<int32_t>(counted), followed);
    }
  }

  share(1);
  int64_t limit = kDefaultShared;
  if (bytes(slot_warps) > limit) {
    const int64_t wanted = slot_warps;
    limit = device.attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
    while (bytes(slot_warps) > limit && slot_warps > 1) slot_warps /= 2;
    if (bytes(slot_warps) > limit) {  // tens of thousands of experts
      slot_warps = wanted;
      const Tensor scratch = device.scratch(slot_warps * E);
      return Launch{device, dim3(1), threads()}(op, metadata_kernel<Id, false>, a, shares(),
                                                mutable_data<int32_t>(scratch), nullptr, followed);
    }
  }
  const auto kernel = metadata_kernel<Id, true>;
  // The attribute belongs to the process: always the same value, so that no thread takes away what another needs.
  if (bytes(slot_warps) > kDefaultShared)
    check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit)));
  Launch{device, dim3(1), threads(), static_cast<size_t>(bytes(slot_warps))}(op, kernel, a, shares(), nullptr, nullptr,
                                                                             followed);
}

template <typename Id>
void choose(const char* op, const MetadataArgs& a, const OnDevice& device, bool followed) {
  const bool few = a.rows <= kFewSlots && a.num_experts <= kFewExperts && !is_without("few_slots");
  if (few) launch_few<Id>(op, a, device);
  else if (!launch_cluster<Id>(op, a, device, followed)) launch_many<Id>(op, a, device, followed);
}

}  // namespace

void launch_metadata(const char* op, const MetadataArgs& args, const OnDevice& device, bool followed) {
  args.ids_are_int64 ? choose<int64_t>(op, args, device, followed) : choose<int32_t>(op, args, device, followed);
}

void Backend::metadata(const MetadataArgs& args) {
  launch_metadata("get_cutlass_moe_mm_data", args, OnDevice(args.device), false);
}

}  // namespace mxfp4::cuda
