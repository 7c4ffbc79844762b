// Programmatic dependent launch, where the GPU has it: a kernel's CTAs start when those of the kernel before it, which
// may be anybody's, have ended or said launch_dependents. Elsewhere, and where the launch does not ask for it, these do
// nothing, and kernels follow one another.
//
// Every kernel waits before it touches memory, in every CTA, for the kernel behind it takes its end as the end of all
// before. (A kernel of somebody else's that starts early and never waits breaks that for whoever follows it.) Nothing
// is read through the cache of constants (__ldg, __restrict__): the kernel in front may still be writing it.
//
// The later kernels of one call do more before they wait. The first has waited before it said launch_dependents, so
// that all before the call has ended when they start: what the call was given may be read, past L1 (__ldcg), which may
// be older than that end, and what no kernel of the call reads or writes meanwhile may be written.
#pragma once

namespace mxfp4::cuda {

// Until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_prior_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once all CTAs of this one have said so. Said only to kernels of the same call: others would
// take the place of CTAs to do nothing but wait, and grouped GEMMs are known that read their problem sizes before that.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mxfp4::cuda
