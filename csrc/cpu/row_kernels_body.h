// Text of row_kernels.cpp, compiled once for each instruction set inside a namespace of its own: hence no include
// guard.

// A block of 32 as the vectors of the target, for compilers break up wider ones element by element.
constexpr int kLanes = MXFP4_VECTOR_BYTES / 2;
constexpr int kVectors = kBlock / kLanes;
typedef int16_t Int16 __attribute__((vector_size(MXFP4_VECTOR_BYTES)));
typedef int16_t Int16x8 __attribute__((vector_size(16)));

inline int16_t max_lane(const Int16& v) {
  Int16x8 parts[MXFP4_VECTOR_BYTES / 16];
  std::memcpy(parts, &v, sizeof parts);
  Int16x8 m = parts[0];
  for (const Int16x8& part : parts) m = part > m ? part : m;
  const Int16x8 four = __builtin_shufflevector(m, m, 4, 5, 6, 7, 0, 1, 2, 3);
  m = four > m ? four : m;
  const Int16x8 two = __builtin_shufflevector(m, m, 2, 3, 0, 1, 6, 7, 4, 5);
  m = two > m ? two : m;
  return m[0] > m[1] ? m[0] : m[1];
}

template <typename T>
void quantize(const Boundaries& boundaries, const uint16_t* x, int64_t n, uint8_t* packed, uint8_t* scales) {
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
    const int16_t* below = boundaries.below[s];
    for (int v = 0; v < kVectors; ++v) {
      Int16 code = (bits[v] >> 12) & 8;
      if (s == kScaleNaN) code &= magnitude[v] < static_cast<int16_t>(T::kInf);  // NaN and Inf: 7 without a sign
      for (int i = 0; i < 7; ++i) code -= magnitude[v] > below[i];
      std::memcpy(pairs + b * (kBlock / 2) + v * (kLanes / 2), &code, sizeof code);
    }
  }
  for (int64_t i = 0; i < n / 2; ++i) packed[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 12);
}

template <typename T>
void silu_and_mul_row(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y) {
  static const std::vector<float> silus = silu_of_all<T>();
  const float* table = silus.data();
  float activated[kChunk];  // in a loop of its own: what looks up is not vectorised, what multiplies is
  for (int64_t i = 0; i < n; ++i) activated[i] = table[gate[i]];
  for (int64_t i = 0; i < n; ++i) y[i] = T::from_float(mul_rn(activated[i], T::to_float(up[i])));
}

void quantize_bfloat16(const uint16_t* x, int64_t K, uint8_t* codes, uint8_t* scales) {
  quantize<BFloat16>(kBFloat16Boundaries, x, K, codes, scales);
}
void quantize_float16(const uint16_t* x, int64_t K, uint8_t* codes, uint8_t* scales) {
  quantize<Float16>(kFloat16Boundaries, x, K, codes, scales);
}
void silu_and_mul_bfloat16(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y) {
  silu_and_mul_row<BFloat16>(gate, up, n, y);
}
void silu_and_mul_float16(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y) {
  silu_and_mul_row<Float16>(gate, up, n, y);
}
