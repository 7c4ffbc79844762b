// The numbers, once, for host and device: E8M0 scales, E2M1 codes, and a silu that gives the same bits everywhere.
// Host code that includes this is compiled with -ffp-contract=off, so that only the fma written here are fused.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "layout.h"

namespace mxfp4 {

#if defined(__CUDA_ARCH__)
MXFP4_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
MXFP4_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
MXFP4_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
MXFP4_HD float min_of(float a, float b) { return fminf(a, b); }
MXFP4_HD float max_of(float a, float b) { return fmaxf(a, b); }
MXFP4_HD float bits_to_float(uint32_t u) { return __uint_as_float(u); }
MXFP4_HD uint32_t float_to_bits(float f) { return __float_as_uint(f); }
#else
MXFP4_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MXFP4_HD float add_rn(float a, float b) { return a + b; }
MXFP4_HD float mul_rn(float a, float b) { return a * b; }
// With a NaN as a: b.
MXFP4_HD float min_of(float a, float b) { return a < b ? a : b; }
MXFP4_HD float max_of(float a, float b) { return a > b ? a : b; }
MXFP4_HD float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
MXFP4_HD uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}
#endif

// ---- 16-bit types, held as their bits ----

struct BFloat16 {
  static constexpr uint16_t kInf = 0x7f80;
  static constexpr int kBias = 127;
  static constexpr int kMantissa = 7;
  static constexpr uint16_t kNaN = 0x7fc0;
  static MXFP4_HD float to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }
  static MXFP4_HD uint16_t from_float(float f) {  // nearest even; a NaN becomes kNaN
    uint32_t u = float_to_bits(f);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? kNaN : rounded);
  }
};

struct Float16 {
  static constexpr uint16_t kInf = 0x7c00;
  static constexpr int kBias = 15;
  static constexpr int kMantissa = 10;
  static constexpr uint16_t kNaN = 0x7e00;
  static MXFP4_HD float to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, m = static_cast<uint32_t>(h & 0x7fffu);
    // The product renormalises subnormals exactly: 2^112 moves an exponent of bias 15 to bias 127.
    uint32_t finite = float_to_bits(mul_rn(bits_to_float(m << 13), bits_to_float(0x77800000u)));
    return bits_to_float(sign | (m >= kInf ? 0x7f800000u | (m << 13) : finite));
  }
  static MXFP4_HD uint16_t from_float(float f) {  // nearest even, to Inf beyond 65504, subnormals kept
    uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u, m = u & 0x7fffffffu;
    uint32_t normal = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
    // Adding 0.5 puts the rounding of the float add at 2^-24, the step of fp16 subnormals.
    uint32_t subnormal = float_to_bits(add_rn(bits_to_float(m), 0.5f)) - 0x3f000000u;
    uint32_t r = m < 0x38800000u ? subnormal : normal;
    r = m >= 0x477ff000u ? static_cast<uint32_t>(kInf) : r;
    return static_cast<uint16_t>(m > 0x7f800000u ? kNaN : sign | r);
  }
};

// ---- E8M0 scale of a block ----

constexpr uint32_t kScaleNaN = 0xff;

// amax_bits: the integer maximum of float_bits(x) & 0x7fffffff over the block, so that a NaN, if there is one, wins.
MXFP4_HD uint32_t scale_from_amax(uint32_t amax_bits) {
  if (amax_bits > 0x7f800000u) return kScaleNaN;
  uint32_t exponent = (amax_bits + 0x00200000u) >> 23;  // carries when the significand is >= 1.75
  return exponent > 2 ? exponent - 2 : 0;
}

// 2^(s - 127); NaN for 0xff.
MXFP4_HD float scale_to_float(uint32_t s) {
  if (s == kScaleNaN) return bits_to_float(0x7fc00000u);
  return bits_to_float(s == 0 ? 0x00400000u : s << 23);
}

// ---- E2M1 elements ----

// Value of a code times 2, an integer from 0 to 12.
MXFP4_HD int e2m1_doubled_magnitude(uint32_t code) {
  uint32_t c = code & 7u;
  return static_cast<int>(c < 4u ? c : (c & 1u ? 3u : 2u) << (c / 2u - 1u));
}

// code * scale, exact unless it overflows to Inf; a NaN scale gives that same NaN whatever the code.
MXFP4_HD float e2m1_to_float(uint32_t code, float scale) {
  if (scale != scale) return scale;
  float magnitude = mul_rn(0.5f * static_cast<float>(e2m1_doubled_magnitude(code)), scale);
  return code & 8u ? -magnitude : magnitude;
}

// ---- silu(gate) * up ----

// a / b, correctly rounded. b and 1 / b are normal numbers, and what silu divides is not subnormal unless the quotient
// is exact: the GPU's own division spends most of its instructions on the rest.
template <bool kInfinite>
MXFP4_HD float quotient_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
  const float q = mul_rn(a, reciprocal), excess = fma_rn(b, q, -a);
  // An infinite quotient leaves a NaN here, and is right as it is.
  if (kInfinite && excess != excess) return q;
  return fma_rn(-excess, reciprocal, q);
#else
  return a / b;
#endif
}

// exp(r) = 1 + r + kExp2 * r^2 + ..., for |r| <= ln(2) / 2.
constexpr float kExp2 = 4.99999851e-1f, kExp3 = 1.66664720e-1f, kExp4 = 4.16695364e-2f, kExp5 = 8.37312452e-3f,
                kExp6 = 1.37805939e-3f;
constexpr float kMinusLog2E = -1.44269502f;
constexpr float kMinusLn2High = -0.693145752f, kMinusLn2Low = -1.42860677e-06f;  // high: few bits, n * high is exact
// 1.5 * 2^23: the last bit is worth one, so what is added to it is rounded to an integer, and the low bits hold that.
constexpr float kInteger = 12582912.0f;
constexpr float kGateLimit = 80.0f;

// gate / (1 + exp(-gate)), for |gate| <= kGateLimit or, with kAny, for all that 16 bits can hold. exp by fma and add
// alone, each correctly rounded: Cody-Waite reduction and a polynomial of degree 6, at most 1.25 * 2^-24 off. With kAny
// all is divided by 16, exactly, so that exp, 1 + exp and its reciprocal are normal numbers for every gate.
// cpu/row_kernels_avx2.h has silu<false> once more, in vectors.
template <bool kAny>
MXFP4_HD float silu(float gate) {
  constexpr float kUnit = kAny ? 0.0625f : 1.0f;
  // From 80 on, 1 + exp is 1; below -88.72 exp is Inf, and its place is taken by a gate of zero.
  const float t = kAny ? min_of(max_of(gate, -88.75f), kGateLimit) : gate;
  constexpr float kMagic = kAny ? kInteger - 4.0f : kInteger;  // 2^-4 is the unit of kAny
  const float z = fma_rn(t, kMinusLog2E, kMagic);
  const float n = add_rn(z, -kMagic);
  float r = fma_rn(n, kMinusLn2High, -t);
  r = fma_rn(n, kMinusLn2Low, r);
  float p = kExp6;
  p = fma_rn(p, r, kExp5);
  p = fma_rn(p, r, kExp4);
  p = fma_rn(p, r, kExp3);
  p = fma_rn(p, r, kExp2);
  p = fma_rn(p, r, 1.0f);
  p = fma_rn(p, r, 1.0f);
  const float exp = bits_to_float(float_to_bits(p) + (float_to_bits(z) << 23));
  if (kAny) gate = mul_rn(gate, gate < -88.7228394f ? 0.0f : kUnit);  // -Inf becomes NaN here
  return quotient_rn<kAny>(gate, add_rn(exp, kUnit));
}

// Magnitudes of bfloat16 gates, as bits, in the table of silu: from 9e-8 to 65,280, for who looks up should rarely have
// to multiply the gate by a factor, which silu is below, and from 88.5 on.
constexpr uint32_t kSiluLeast = 0x33c1, kSiluMost = 0x477f;
MXFP4_HD float silu_factor(uint32_t magnitude, bool negative) {
  return magnitude < kSiluLeast ? 0.5f : (negative ? 0.0f : 1.0f);
}

}  // namespace mxfp4
