// Programmatic dependent launch, where the GPU has it: a kernel starts while the one before it runs. Elsewhere, and
// where the launch does not ask for it, these do nothing, and kernels follow one another.
#pragma once

namespace mxfp4::cuda {

// Until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_prior_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once all CTAs of this one have said so.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mxfp4::cuda
