// Eight 16-bit values a lane to eight E2M1 codes and the scale of the block that four neighbouring lanes hold.
// The rule is numerics.h's; here are its fast forms for registers of two values.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../numerics.h"
#include "experts.cuh"

namespace mxfp4::cuda {

// Two float32 to two f16 or bf16 in one register, nearest even; a NaN becomes 0x7fff.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t r;
  if constexpr (T::kBias == 15) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <typename T>
__device__ __forceinline__ float low_to_float(uint32_t pair) {
  if constexpr (T::kBias == 15) return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
  else return bits_to_float(pair << 16);
}
template <typename T>
__device__ __forceinline__ float high_to_float(uint32_t pair) {
  if constexpr (T::kBias == 15) return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  else return bits_to_float(pair & 0xffff0000u);
}

// Maximum of magnitudes, two at once, in which a NaN wins as it does in the integer maximum of the bits.
template <typename T>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (T::kBias == 15) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

template <typename T>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  if constexpr (T::kBias == 15) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

__device__ __forceinline__ constexpr uint32_t twice(uint32_t half) { return (half & 0xffffu) << 16 | (half & 0xffffu); }

constexpr uint32_t kMagnitudes = 0x7fff7fffu;

// A block's scale byte, and 2^(127 - s) for a pair, as one factor or two.
template <typename T>
struct BlockScale {
  uint32_t byte, factor, factor2;

  // m: the largest magnitude of the block, in both halves.
  __device__ __forceinline__ explicit BlockScale(uint32_t m) {
    // Both halves as a float32 serve for bfloat16: the low one is below what decides.
    const uint32_t bits = T::kBias == 127 ? m : float_to_bits(low_to_float<T>(m));
    const int exponent = static_cast<int>((bits + 0x00200000u) >> 23);
    byte = static_cast<uint32_t>(max(exponent - 2, 0));
    if constexpr (T::kBias == 127) {
      factor = exponent > 2 ? 0x80008000u - static_cast<uint32_t>(exponent) * 0x00800080u : 0;
    } else {
      // -28 is enough for what stands beside an Inf: 65504 * 2^-28 rounds to zero.
      const int wanted = 129 - exponent, first = min(max(wanted, -14), 15), second = max(wanted - first, -14);
      factor = exponent > 2 ? static_cast<uint32_t>(first + 15) * 0x04000400u : 0;
      factor2 = static_cast<uint32_t>(min(second, 15) + 15) * 0x04000400u;
    }
  }

  // The codes of two finite magnitudes in bits 0..2 and 16..18, above which lies more: the sums with 2^j have their
  // last bit at E2M1's steps of 0.5, 1 and 2, so that the adds round, to even, and count steps; the right count is the
  // least of the three. No finite magnitude reaches 7, where 6 would not be next any more.
  __device__ __forceinline__ uint32_t e2m1_magnitudes(uint32_t pair) const {
    constexpr uint32_t kBits = T::kBias == 15 ? 10 : 7;            // of the significand
    constexpr uint32_t kHalves = (T::kBias + kBits - 1) << kBits;  // 2^j whose last bit is worth 0.5
    constexpr uint32_t kOnes = kHalves + (1u << kBits), kTwos = kOnes + (1u << kBits);
    uint32_t last = factor;
    if constexpr (T::kBias == 15) {  // what the first factor makes inexact is below the least tie
      pair = fma_pair<T>(pair, factor, 0);
      last = factor2;
    }
    uint32_t code = fma_pair<T>(pair, last, twice(kTwos));
    code = __viaddmin_u16x2(code, twice(kOnes - kTwos + 2), fma_pair<T>(pair, last, twice(kOnes)));
    return __viaddmin_u16x2(code, twice(kHalves - kOnes + 2), fma_pair<T>(pair, last, twice(kHalves)));
  }
};

// Where the mask has a bit, that of a, else that of b; of constants the compiler would make two instructions.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

constexpr uint32_t kHighCodes = 0x70007000u;  // magnitudes of codes in the high bits of each half

// The codes of two values in the high bits of each half, where their block has an Inf or a NaN: beside a NaN, it and
// Inf become 7, and the rest zero. Out of line, as is what else rows rarely need: straight code is on its way before it
// is wanted.
template <typename T>
__device__ __noinline__ uint32_t codes_beside_inf(uint32_t pair, uint32_t code, bool nan) {
  const uint32_t infinite = __vcmpgeu2(pair & kMagnitudes, twice(T::kInf));
  const uint32_t sign = pair & ~kMagnitudes & ~(nan ? infinite : 0u);
  return (infinite & kHighCodes) | (~infinite & (nan ? 0u : code & kHighCodes)) | sign;
}

// Values w of 8 columns to their 8 codes (column i at bits 4i) and the scale byte. Lanes 4j to 4j+3 hold one block;
// every lane of the warp takes part.
template <typename T>
__device__ __forceinline__ uint32_t quantize8(const uint4& w, uint32_t& scale) {
  const uint32_t a[4] = {w.x & kMagnitudes, w.y & kMagnitudes, w.z & kMagnitudes, w.w & kMagnitudes};
  uint32_t m = max_pair<T>(max_pair<T>(a[0], a[1]), max_pair<T>(a[2], a[3]));
  m = max_pair<T>(m, __shfl_xor_sync(kAllLanes, m, 1));
  m = max_pair<T>(m, __shfl_xor_sync(kAllLanes, m, 2));
  m = max_pair<T>(m, __byte_perm(m, m, 0x1032)) & kMagnitudes;
  const BlockScale<T> block(m);
  scale = block.byte;
  const uint32_t values[4] = {w.x, w.y, w.z, w.w};
  uint32_t codes[4];  // in the high bits of each half, above what does not matter
#pragma unroll
  for (int i = 0; i < 4; ++i) codes[i] = select_bits(kHighCodes, block.e2m1_magnitudes(a[i]) << 12, values[i]);
  if (__builtin_expect(m >= twice(T::kInf), 0)) {
    const bool nan = m > twice(T::kInf) + 0xffffu;
    if (nan) scale = kScaleNaN;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = codes_beside_inf<T>(values[i], codes[i], nan);
  }
  // Even columns are in the low halves, odd ones in the high halves.
  const uint32_t first = __byte_perm(codes[0], codes[1], 0x7351), second = __byte_perm(codes[2], codes[3], 0x7351);
  return select_bits(0x0f0f0f0fu, __byte_perm(first, second, 0x5410) >> 4, __byte_perm(first, second, 0x7632));
}

// ---- silu(gate) * up, of eight columns ----

// Whether all of a lane's eight magnitudes, as bits, are from `least` to `most`.
__device__ __forceinline__ bool all_within(const uint4& w, uint32_t least, uint32_t most) {
  const uint32_t a[4] = {w.x & kMagnitudes, w.y & kMagnitudes, w.z & kMagnitudes, w.w & kMagnitudes};
  const uint32_t low = __vminu2(__vminu2(a[0], a[1]), __vminu2(a[2], a[3]));
  const uint32_t high = __vmaxu2(__vmaxu2(a[0], a[1]), __vmaxu2(a[2], a[3]));
  return (least == 0 || __vminu2(low, twice(least)) == twice(least)) && __vmaxu2(high, twice(most)) == twice(most);
}

template <typename T, bool kAny>
__device__ __forceinline__ uint32_t silu_and_mul2(uint32_t gate, uint32_t up) {
  return round_pair<T>(mul_rn(silu<kAny>(low_to_float<T>(gate)), low_to_float<T>(up)),
                       mul_rn(silu<kAny>(high_to_float<T>(gate)), high_to_float<T>(up)));
}

// For any gates; in a short loop, through which the registers rotate.
template <typename T>
__device__ __forceinline__ uint4 silu_and_mul8_of_any(uint4 gate, uint4 up) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const uint32_t result = silu_and_mul2<T, true>(gate.x, up.x);
    gate = make_uint4(gate.y, gate.z, gate.w, result);
    up = make_uint4(up.y, up.z, up.w, up.x);
  }
  return gate;
}

// Computes each silu.
template <typename T>
struct Silu {
  static constexpr uint32_t kEighty = T::kBias == 127 ? 0x42a0 : 0x5500;

  __device__ __forceinline__ uint4 operator()(const uint4& gate, const uint4& up) const {
    if (__builtin_expect(!all_within(gate, 0, kEighty), 0)) return silu_and_mul8_of_any<T>(gate, up);
    return make_uint4(silu_and_mul2<T, false>(gate.x, up.x), silu_and_mul2<T, false>(gate.y, up.y),
                      silu_and_mul2<T, false>(gate.z, up.z), silu_and_mul2<T, false>(gate.w, up.w));
  }
};

}  // namespace mxfp4::cuda
