// Loops over one row for any CPU and any input, in vectors of 16 bytes as the compiler makes them of what there is.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "../numerics.h"
#include "row_kernels.h"

namespace mxfp4::cpu::generic {

// Boundaries between codes. A tie goes to the even code, so one itself belongs to the lower code where that is even.
constexpr float kEdge[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

// code(v) = how many of the seven boundaries between codes lie below v. For 16-bit values, scaled boundaries are
// compared as integers: exact for every scale, subnormals included, without one floating-point operation.
struct Boundaries {
  int16_t below[256][8];  // [scale][i]: the largest magnitude (as bits) that still has a code <= i
};

template <typename T>
Boundaries make_boundaries() {
  const ExactFloat exact;
  Boundaries b;
  for (uint32_t s = 0; s < 256; ++s) {
    for (int i = 0; i < 8; ++i) {
      int32_t low = 0, high = T::kInf - 1;  // s = 0xff: finite elements have code 0, NaN and Inf code 7
      if (s == 0 || i == 7) {
        low = 0x7fff;
      } else if (s == kScaleNaN) {
        low = high;
      } else {
        const double bound = static_cast<double>(kEdge[i]) * std::ldexp(1.0, static_cast<int>(s) - 127);
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
const Boundaries kBoundaries = make_boundaries<T>();

// The silu of each of the 65,536 values, made when a row is first in need of it: a quarter of a megabyte, of which
// usual gates touch what fits in L1.
template <typename T>
std::vector<float> silu_of_all() {
  const ExactFloat exact;
  std::vector<float> result(1 << 16);
  for (uint32_t h = 0; h < result.size(); ++h) result[h] = silu<true>(T::to_float(static_cast<uint16_t>(h)));
  return result;
}

typedef int16_t Int16 __attribute__((vector_size(16)));  // compilers break wider ones up element by element
constexpr int kLanes = sizeof(Int16) / 2;
constexpr int kVectors = kBlock / kLanes;

inline int16_t max_lane(Int16 m) {
  const Int16 four = __builtin_shufflevector(m, m, 4, 5, 6, 7, 0, 1, 2, 3);
  m = four > m ? four : m;
  const Int16 two = __builtin_shufflevector(m, m, 2, 3, 0, 1, 6, 7, 4, 5);
  m = two > m ? two : m;
  return m[0] > m[1] ? m[0] : m[1];
}

template <typename T>
void quantize(const uint16_t* x, int64_t n, uint8_t* codes, uint8_t* scales) {
  uint32_t pairs[kChunk / 2];
  for (int64_t b = 0; b < n / kBlock; ++b) {
    Int16 bits[kVectors], magnitude[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(&bits[v], x + b * kBlock + v * kLanes, sizeof bits[v]);
      magnitude[v] = bits[v] & 0x7fff;
    }
    Int16 maxima = magnitude[0];
    for (int v = 1; v < kVectors; ++v) maxima = magnitude[v] > maxima ? magnitude[v] : maxima;
    const uint16_t amax = static_cast<uint16_t>(max_lane(maxima));
    const uint32_t s = scale_from_amax(float_to_bits(T::to_float(amax)));
    scales[b] = static_cast<uint8_t>(s);
    const int16_t* below = kBoundaries<T>.below[s];
    for (int v = 0; v < kVectors; ++v) {
      Int16 code = (bits[v] >> 12) & 8;
      if (s == kScaleNaN) code &= magnitude[v] < static_cast<int16_t>(T::kInf);  // NaN and Inf: 7 without a sign
      for (int i = 0; i < 7; ++i) code -= magnitude[v] > below[i];
      std::memcpy(pairs + b * (kBlock / 2) + v * (kLanes / 2), &code, sizeof code);
    }
  }
  for (int64_t i = 0; i < n / 2; ++i) codes[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 12);
}

template <typename T>
void silu_and_mul(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y) {
  static const std::vector<float> silus = silu_of_all<T>();
  const float* table = silus.data();
  float activated[kChunk];  // in a loop of its own: what looks up is not vectorised, what multiplies is
  for (int64_t i = 0; i < n; ++i) activated[i] = table[gate[i]];
  for (int64_t i = 0; i < n; ++i) y[i] = T::from_float(mul_rn(activated[i], T::to_float(up[i])));
}

}  // namespace mxfp4::cpu::generic
