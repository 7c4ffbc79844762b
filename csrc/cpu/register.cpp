#include "../host/registration.h"
#include "backend.h"

STABLE_TORCH_LIBRARY_IMPL(mxfp4_ops, CPU, m) { mxfp4::register_kernels<mxfp4::cpu::Backend>(m); }
