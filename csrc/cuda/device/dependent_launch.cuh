// Programmatic dependent launch, where the GPU has it: a kernel's CTAs start when those of the kernel before it, which
// may be anybody's, have ended or said launch_dependents. Elsewhere, and where the launch does not ask for it, these do
// nothing, and kernels follow one another.
//
// Every kernel waits before it touches memory, in every CTA, for the kernel behind it takes its end as the end of all
// before. One alone reads and writes before it waits: what follows a kernel of ours that said launch_dependents after
// its own wait, so that only that one can be running. And nothing is read through the cache of constants (__ldg,
// __restrict__): the kernel in front may still be writing it.
#pragma once

namespace mxfp4::cuda {

// Until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_prior_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once all CTAs of this one have said so. Said only where kernels of one call overlap: CTAs
// that merely wait take the place of others.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mxfp4::cuda
