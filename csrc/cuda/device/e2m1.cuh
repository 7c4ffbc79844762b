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

// Two f16 that hold v * 2^-14 to two codes at bits 0..3 and 16..19. 2^-14 puts E2M1's subnormal step on f16's
// exponents, so that one integer rounding at mantissa bit 9 serves all magnitudes. NaN, which conversion made positive,
// becomes 7.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t h) {
  const uint32_t magnitude = h & 0x7fff7fffu;
  uint32_t code = ((magnitude + 0x00ff00ffu + ((magnitude >> 9) & 0x00010001u)) >> 9) & 0x007f007fu;
  code = __vminu2(code, 0x00070007u);
  return code | ((h >> 12) & 0x00080008u);
}

// Codes of four values scaled by `inverse`, which is 0 for the scale bytes 0 (signed zeros are left) and 0xff (where
// NaN and Inf become 7).
template <typename T>
__device__ __forceinline__ uint32_t codes_of_pair(uint32_t a, uint32_t b, float inverse, uint32_t s) {
  // a holds columns 2i and 2i+1, b columns 2i+4 and 2i+5: the result has codes at bits 0, 4, 16 and 20.
  const float a0 = low_to_float<T>(a), a1 = high_to_float<T>(a), b0 = low_to_float<T>(b), b1 = high_to_float<T>(b);
  if constexpr (T::kBias == 127) {
    const float f = inverse * 6.103515625e-05f;  // bf16 times a power of two is exact in f16 at these magnitudes
    return e2m1_pair(round_pair<Float16>(a0 * f, b0 * f)) | e2m1_pair(round_pair<Float16>(a1 * f, b1 * f)) << 4;
  } else {
    auto code = [&](float v) { return s == kScaleNaN && !(v - v == 0.0f) ? 7u : e2m1_from_float(v * inverse); };
    return code(a0) | code(a1) << 4 | code(b0) << 16 | code(b1) << 20;
  }
}

// Values w of 8 columns to their 8 codes (column i at bits 4i) and the scale byte. Lanes 4j to 4j+3 hold one block;
// every lane of the warp takes part.
template <typename T>
__device__ __forceinline__ uint32_t quantize8(const uint4& w, uint32_t& scale) {
  constexpr uint32_t kMagnitude = 0x7fff7fffu;
  uint32_t m =
      max_pair<T>(max_pair<T>(w.x & kMagnitude, w.y & kMagnitude), max_pair<T>(w.z & kMagnitude, w.w & kMagnitude));
  m = max_pair<T>(m, __shfl_xor_sync(kAllLanes, m, 1));
  m = max_pair<T>(m, __shfl_xor_sync(kAllLanes, m, 2));
  m = max_pair<T>(m, m >> 16);
  scale = scale_from_amax(float_to_bits(low_to_float<T>(m)) & 0x7fffffffu);
  const float inverse = inverse_scale(scale);
  return codes_of_pair<T>(w.x, w.z, inverse, scale) | codes_of_pair<T>(w.y, w.w, inverse, scale) << 8;
}

template <typename T>
__device__ __forceinline__ uint4 silu_and_mul8(const uint4& gate, const uint4& up) {
  auto pair = [](uint32_t g, uint32_t u) {
    return round_pair<T>(silu_and_mul(low_to_float<T>(g), low_to_float<T>(u)),
                         silu_and_mul(high_to_float<T>(g), high_to_float<T>(u)));
  };
  return make_uint4(pair(gate.x, up.x), pair(gate.y, up.y), pair(gate.z, up.z), pair(gate.w, up.w));
}

}  // namespace mxfp4::cuda
