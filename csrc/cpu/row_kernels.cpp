#include "row_kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../numerics.h"
#include "row_kernels_generic.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mxfp4::cpu {
namespace {

// clang has no such pragma and compiles the generic loops alone.
#if defined(__x86_64__) && !defined(__clang__)
#define MXFP4_X86_SETS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "row_kernels_avx2.h"
}
#pragma GCC pop_options
// The same text with twice the registers.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#include "row_kernels_avx2.h"
}
#pragma GCC pop_options
#endif

// Constants: no code of an instruction set runs before the CPU has been asked for it.
#define MXFP4_TABLE(set, name) \
  {name, set::quantize<BFloat16>, set::quantize<Float16>, set::silu_and_mul<BFloat16>, set::silu_and_mul<Float16>}
constexpr RowKernels kGeneric = MXFP4_TABLE(generic, "default");
#if defined(MXFP4_X86_SETS)
constexpr RowKernels kAvx2 = MXFP4_TABLE(avx2, "avx2");
constexpr RowKernels kAvx512 = MXFP4_TABLE(avx512, "avx512");
#endif

const RowKernels& choose() {
#if defined(MXFP4_X86_SETS)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const char* set = std::getenv("MXFP4_OPS_CPU_CAPABILITY");
  auto asked = [&](const char* name) { return set != nullptr && std::strcmp(set, name) == 0; };
  if (asked("default")) return kGeneric;
  if (has_avx512 && !asked("avx2")) return kAvx512;
  if (has_avx2) return kAvx2;
#endif
  return kGeneric;
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& kernels = choose();
  return kernels;
}

#if defined(__x86_64__)
ExactFloat::ExactFloat() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
ExactFloat::~ExactFloat() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
ExactFloat::ExactFloat() {
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
}
ExactFloat::~ExactFloat() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
ExactFloat::ExactFloat() : saved_(0) {}
ExactFloat::~ExactFloat() {}
#endif

}  // namespace mxfp4::cpu

extern "C" __attribute__((visibility("default"))) const char* mxfp4_ops_cpu_capability() {
  return mxfp4::cpu::row_kernels().name;
}
