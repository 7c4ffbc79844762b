// CTAs that run together and read each other's shared memory, on GPUs that have clusters; elsewhere what uses this is
// compiled and not launched.
#pragma once
#include <cstdint>

namespace mxfp4::cuda {

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
// What another CTA of the cluster has where `local` is in this one.
__device__ __forceinline__ int32_t read_of_cta(const int32_t* local, unsigned cta) {
  int32_t value = 0;
#if __CUDA_ARCH__ >= 900
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(cta));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address));
#endif
  return value;
}

}  // namespace mxfp4::cuda
