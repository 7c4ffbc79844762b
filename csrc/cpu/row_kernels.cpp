#include "row_kernels.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "../numerics.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mxfp4::cpu {
namespace {

// code(v) = how many of the seven boundaries between codes lie below v. For 16-bit values, scaled boundaries are
// compared as integers: exact for every scale, subnormals included, without one floating-point operation.
struct Boundaries {
  int16_t below[256][8];  // [scale][i]: the largest magnitude (as bits) that still has a code <= i
};

template <typename T>
Boundaries make_boundaries() {
  // A tie goes to the even code, so the boundary itself belongs to the lower code where that is even.
  constexpr float edge[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  Boundaries b;
  for (uint32_t s = 0; s < 256; ++s) {
    for (int i = 0; i < 8; ++i) {
      int32_t low = 0, high = T::kInf - 1;  // s = 0xff: finite elements have code 0, NaN and Inf code 7
      if (s == 0 || i == 7) {
        low = 0x7fff;
      } else if (s == kScaleNaN) {
        low = high;
      } else {
        const double bound = static_cast<double>(edge[i]) * std::ldexp(1.0, static_cast<int>(s) - 127);
        auto below = [&](int32_t h) {
          const double v = T::to_float(static_cast<uint16_t>(h));
          return i % 2 == 0 ? v <= bound : v < bound;
        };
        while (low < high) {
          const int32_t mid = (low + high + 1) / 2;
          if (below(mid)) low = mid;
          else high = mid - 1;
        }
      }
      b.below[s][i] = static_cast<int16_t>(low);
    }
  }
  return b;
}

template <typename T>
Boundaries make_boundaries_exactly() {
  const ExactFloat exact;
  return make_boundaries<T>();
}

const Boundaries kBFloat16Boundaries = make_boundaries_exactly<BFloat16>();
const Boundaries kFloat16Boundaries = make_boundaries_exactly<Float16>();

// The silu of each of the 65,536 values, made when a row is first in need of it: a quarter of a megabyte, of which
// usual gates touch what fits in L1.
template <typename T>
std::vector<float> silu_of_all() {
  const ExactFloat exact;
  std::vector<float> result(1 << 16);
  for (uint32_t h = 0; h < result.size(); ++h) result[h] = silu<true>(T::to_float(static_cast<uint16_t>(h)));
  return result;
}

// The same loops once for each instruction set. Included as text: a vector type is broken up for the target of the
// function that it is written in, before anything is inlined.
#define MXFP4_VECTOR_BYTES 16
namespace baseline {
#include "row_kernels_body.h"
}
#undef MXFP4_VECTOR_BYTES
// clang has no such pragma and compiles the baseline alone.
#if defined(__x86_64__) && !defined(__clang__)
#define MXFP4_X86_SETS
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2")
#define MXFP4_VECTOR_BYTES 32
namespace avx2 {
#include "row_kernels_body.h"
}
#undef MXFP4_VECTOR_BYTES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi,bmi2,prefer-vector-width=512")
#define MXFP4_VECTOR_BYTES 64
namespace avx512 {
#include "row_kernels_body.h"
}
#undef MXFP4_VECTOR_BYTES
#pragma GCC pop_options
#endif

// Constants: no code of an instruction set runs before the CPU has been asked for it.
#define MXFP4_TABLE(set, name) \
  {name, set::quantize_bfloat16, set::quantize_float16, set::silu_and_mul_bfloat16, set::silu_and_mul_float16}
constexpr RowKernels kBaseline = MXFP4_TABLE(baseline, "default");
#if defined(MXFP4_X86_SETS)
constexpr RowKernels kAvx2 = MXFP4_TABLE(avx2, "avx2");
constexpr RowKernels kAvx512 = MXFP4_TABLE(avx512, "avx512");
#endif

const RowKernels& choose() {
#if defined(MXFP4_X86_SETS)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const char* set = std::getenv("MXFP4_OPS_CPU_CAPABILITY");
  auto asked = [&](const char* name) { return set != nullptr && std::strcmp(set, name) == 0; };
  if (asked("default")) return kBaseline;
  if (has_avx512 && !asked("avx2")) return kAvx512;
  if (has_avx2) return kAvx2;
#endif
  return kBaseline;
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
