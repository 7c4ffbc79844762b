#include "../host/registration.h"
#include "backend.h"

STABLE_TORCH_LIBRARY_IMPL(mxfp4_ops, CUDA, m) { mxfp4::register_kernels<mxfp4::cuda::Backend>(m); }

extern "C" __attribute__((visibility("default"))) const char* mxfp4_ops_cuda_archs() { return MXFP4_OPS_CUDA_ARCHS; }
