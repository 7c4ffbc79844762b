// Text of row_kernels.cpp, compiled once for each instruction set that has AVX2, FMA and F16C, inside a namespace of
// its own: hence no include guard. Rare inputs are left to row_kernels_generic.h.

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256 constant(float f) { return _mm256_set1_ps(f); }
// The same place in the next chunk: the processor's own look ahead ends with a page of memory.
inline void prefetch_next(const uint16_t* x) { _mm_prefetch(reinterpret_cast<const char*>(x + kChunk), _MM_HINT_T0); }

// ---- Codes ----

// By integers alone. A magnitude is a number's bits without its sign, M of them mantissa. As long as numbers are
// normal, element / scale has the magnitude of the element less (the scale's exponent << M): boundaries between codes
// are the same for every block. d is that magnitude less the one of 0.625. Multiplied by kFirst, then by kSecond, each
// product rounded as its instruction does, it becomes an index that steps where the code does. Boundaries belong to the
// code below and to the code above in turn, which no shift follows but two roundings can: the factors were found by
// trying all, and the assertion below tries every d.
template <typename T>
constexpr int kFirst = T::kMantissa == 7 ? 13082 : 16355;  // vpmulhrsw: nearest, in 2^-15
template <typename T>
constexpr int kSecond = T::kMantissa == 7 ? 5130 : 513;  // vpmulhw: down, in 2^-16
// The code is 0 below the first index, and one more than the table has from index 0 on.
constexpr int kCode1From = -5;
constexpr int8_t kCodeLessOne[16] = {0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6};

template <typename T>
constexpr int kOctave = 1 << T::kMantissa;  // from a magnitude to its double

template <typename T>
constexpr bool every_code_is_right() {
  constexpr int octave = kOctave<T>, quarter = octave / 4;
  // m is counted from 0.25, below which all is code 0, to 7, which no element over its scale reaches.
  for (int m = 0; m < 5 * octave - quarter; ++m) {
    const int index = (((m - 5 * quarter) * kFirst<T> + 0x4000) >> 15) * kSecond<T> >> 16;
    const double v = 0.25 * (1 << m / octave) * (1.0 + m % octave * (1.0 / octave));
    int code = 0;
    for (int i = 0; i < 7; ++i) code += i % 2 == 0 ? v > generic::kEdge[i] : v >= generic::kEdge[i];
    if (index > 15 || code != (index >= 0 ? kCodeLessOne[index] + 1 : index >= kCode1From)) return false;
  }
  return true;
}
static_assert(every_code_is_right<BFloat16>() && every_code_is_right<Float16>());

constexpr int kGroup = 4;  // blocks whose scales are found together

// GCC would build these anew in each turn of a loop, did it know what is in them.
struct Constants {
  __m256i no_sign, first, second, less_one, code_0, minus, nibbles;
};

// Of each block of a group the scale, and what is to be taken from a magnitude to get d, twice. false: a block has NaN
// or Inf, or 0.25 * scale is subnormal and the block is not all zeros.
template <typename T>
inline bool group_scales(const uint16_t* x, uint8_t* scales, int16_t* bases) {
  constexpr int kQuarter = kOctave<T> / 4;
  constexpr int kNormalFrom = 5 * kOctave<T> - kQuarter;  // here 0.25 * scale has exponent 1
  const __m256i no_sign = _mm256_set1_epi16(0x7fff);
  __m256i m[kGroup];
  for (int b = 0; b < kGroup; ++b)
    m[b] =
        _mm256_max_epu16(_mm256_and_si256(load(x + 32 * b), no_sign), _mm256_and_si256(load(x + 32 * b + 16), no_sign));
  const __m256i m01 = _mm256_max_epu16(_mm256_unpacklo_epi64(m[0], m[1]), _mm256_unpackhi_epi64(m[0], m[1]));
  const __m256i m23 = _mm256_max_epu16(_mm256_unpacklo_epi64(m[2], m[3]), _mm256_unpackhi_epi64(m[2], m[3]));
  const __m256 low = _mm256_castsi256_ps(m01), high = _mm256_castsi256_ps(m23);
  const __m256i halves = _mm256_max_epu16(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)),
                                          _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)));
  __m128i amax = _mm_max_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  amax =
      _mm_max_epu16(amax, _mm_shuffle_epi8(amax, _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)));

  const __m128i rounded = _mm_add_epi16(amax, _mm_set1_epi16(kQuarter));  // carries from a significand of 1.75 on
  const __m128i zero = _mm_cmpeq_epi16(amax, _mm_setzero_si128());
  const __m128i scale =
      _mm_andnot_si128(zero, _mm_add_epi16(_mm_srli_epi16(rounded, T::kMantissa), _mm_set1_epi16(127 - T::kBias - 2)));
  const int scale_bytes =
      _mm_cvtsi128_si32(_mm_shuffle_epi8(scale, _mm_setr_epi8(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)));
  std::memcpy(scales, &scale_bytes, kGroup);
  const __m128i base = _mm_sub_epi16(_mm_andnot_si128(_mm_set1_epi16(kOctave<T> - 1), rounded),
                                     _mm_set1_epi16(4 * kOctave<T> - 5 * kQuarter));
  // With 0x4000 taken from it, a zero has code 0.
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bases), _mm_blendv_epi8(base, _mm_set1_epi16(0x4000), zero));
  const __m128i rare = _mm_andnot_si128(zero, _mm_subs_epu16(_mm_sub_epi16(amax, _mm_set1_epi16(kNormalFrom)),
                                                             _mm_set1_epi16(T::kInf - 1 - kNormalFrom)));
  return _mm_testz_si128(rare, rare);
}

// 16 lanes with two codes each, in the order that packing gives: columns 0 to 7, 16 to 23, 8 to 15, 24 to 31.
inline __m256i block_pairs(const uint16_t* x, int32_t base_twice, const Constants& k) {
  const __m256i base = _mm256_set1_epi32(base_twice), x0 = load(x), x1 = load(x + 16);
  const __m256i d0 = _mm256_sub_epi16(_mm256_and_si256(x0, k.no_sign), base);
  const __m256i d1 = _mm256_sub_epi16(_mm256_and_si256(x1, k.no_sign), base);
  const __m256i index = _mm256_packs_epi16(_mm256_mulhi_epi16(_mm256_mulhrs_epi16(d0, k.first), k.second),
                                           _mm256_mulhi_epi16(_mm256_mulhrs_epi16(d1, k.first), k.second));
  const __m256i code = _mm256_sub_epi8(_mm256_shuffle_epi8(k.less_one, index), _mm256_cmpgt_epi8(index, k.code_0));
  const __m256i with_sign = _mm256_blendv_epi8(code, _mm256_or_si256(code, k.minus), _mm256_packs_epi16(x0, x1));
  return _mm256_maddubs_epi16(with_sign, k.nibbles);
}

template <typename T>
void quantize(const uint16_t* x, int64_t n, uint8_t* codes, uint8_t* scales) {
  constexpr int64_t kColumns = kGroup * kBlock;
  if (n < kColumns) return generic::quantize<T>(x, n, codes, scales);
  Constants k = {_mm256_set1_epi16(0x7fff),
                 _mm256_set1_epi16(kFirst<T>),
                 _mm256_set1_epi16(kSecond<T>),
                 _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodeLessOne))),
                 _mm256_set1_epi8(kCode1From - 1),
                 _mm256_set1_epi8(8),
                 _mm256_set1_epi16(0x1001)};
  asm("" : "+m"(k));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // undoes that each half is packed alone

  // Scales first, codes in a loop of their own: no code waits for the maximum of its block.
  int16_t bases[kChunk / kBlock * 2];
  uint32_t rare = 0;
  auto first = [&](int64_t g) { return std::min(g * kColumns, n - kColumns); };
  const int64_t groups = ceil_div(n, kColumns);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t c = first(g);  // the last group may do blocks again
    if (!group_scales<T>(x + c, scales + c / kBlock, bases + c / kBlock * 2)) rare |= 1u << g;
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t c = first(g);
    for (int h = 0; h < 2; ++h) {
      __m256i pairs[2];
      for (int b = 0; b < 2; ++b) {
        const int64_t block = c / kBlock + 2 * h + b;
        int32_t base;
        std::memcpy(&base, bases + 2 * block, 4);
        prefetch_next(x + block * kBlock);
        pairs[b] = block_pairs(x + block * kBlock, base, k);
      }
      const __m256i packed = _mm256_packus_epi16(pairs[0], pairs[1]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + c / 2 + 32 * h),
                          _mm256_permutevar8x32_epi32(packed, order));
    }
  }
  for (; rare; rare &= rare - 1) {
    const int64_t c = first(__builtin_ctz(rare));
    generic::quantize<T>(x + c, kColumns, codes + c / 2, scales + c / kBlock);
  }
}

// ---- silu(gate) * up ----

// 16 numbers of 16 bits as two vectors of float, and back. Even and odd lanes apart where that is cheaper: whoever
// widens and narrows need not know.
inline void widen(BFloat16, __m256i x, __m256* wide) {
  wide[0] = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  wide[1] = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-0x10000)));
}
// A NaN stays one: of a NaN from 16 bits, and of the processor's own, the lower half is zero.
inline __m256i narrow(BFloat16, const __m256* wide) {
  const __m256i even = _mm256_castps_si256(wide[0]), odd = _mm256_castps_si256(wide[1]);
  const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
  const __m256i low = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
  // Nearest even: up from a half where the upper half is odd, else from more than a half.
  const __m256i half = _mm256_subs_epu16(low, _mm256_andnot_si256(high, _mm256_set1_epi16(1)));
  return _mm256_add_epi16(high, _mm256_srli_epi16(half, 15));
}
inline void widen(Float16, __m256i x, __m256* wide) {
  wide[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
  wide[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
}
inline __m256i narrow(Float16, const __m256* wide) {
  return _mm256_set_m128i(_mm256_cvtps_ph(wide[1], _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(wide[0], _MM_FROUND_TO_NEAREST_INT));
}

// silu<false>(gate) * up of 32 columns: four vectors in step, for each operation waits for the one before.
template <typename T>
inline __attribute__((always_inline)) void silu_and_mul_block(const uint16_t* gate, const uint16_t* up, uint16_t* y) {
  constexpr int kVectors = 4;
  __m256 t[kVectors], z[kVectors], n[kVectors], r[kVectors], p[kVectors];
#define EACH for (int v = 0; v < kVectors; ++v)
  for (int h = 0; h < 2; ++h) widen(T(), load(gate + 16 * h), t + 2 * h);
  EACH z[v] = _mm256_fmadd_ps(t[v], constant(kMinusLog2E), constant(kInteger));
  EACH n[v] = _mm256_sub_ps(z[v], constant(kInteger));
  EACH r[v] = _mm256_fmsub_ps(n[v], constant(kMinusLn2High), t[v]);
  EACH r[v] = _mm256_fmadd_ps(n[v], constant(kMinusLn2Low), r[v]);
  EACH p[v] = _mm256_fmadd_ps(constant(kExp6), r[v], constant(kExp5));
  EACH p[v] = _mm256_fmadd_ps(p[v], r[v], constant(kExp4));
  EACH p[v] = _mm256_fmadd_ps(p[v], r[v], constant(kExp3));
  EACH p[v] = _mm256_fmadd_ps(p[v], r[v], constant(kExp2));
  EACH p[v] = _mm256_fmadd_ps(p[v], r[v], constant(1.0f));
  EACH p[v] = _mm256_fmadd_ps(p[v], r[v], constant(1.0f));
  EACH p[v] = _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(p[v]), _mm256_slli_epi32(_mm256_castps_si256(z[v]), 23)));
  EACH p[v] = _mm256_div_ps(t[v], _mm256_add_ps(p[v], constant(1.0f)));
#undef EACH
  for (int h = 0; h < 2; ++h) {
    __m256 u[2];
    widen(T(), load(up + 16 * h), u);
    for (int v = 0; v < 2; ++v) u[v] = _mm256_mul_ps(p[2 * h + v], u[v]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + 16 * h), narrow(T(), u));
  }
}

template <typename T>
void silu_and_mul(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y) {
  const __m256i limit = _mm256_set1_epi16(static_cast<int16_t>(T::from_float(kGateLimit)));
  const __m256i no_sign = _mm256_set1_epi16(0x7fff);
  for (int64_t i = 0; i < n; i += kBlock) {
    prefetch_next(gate + i);
    prefetch_next(up + i);
    const __m256i largest =
        _mm256_max_epu16(_mm256_and_si256(load(gate + i), no_sign), _mm256_and_si256(load(gate + i + 16), no_sign));
    const __m256i beyond = _mm256_subs_epu16(largest, limit);
    if (__builtin_expect(_mm256_testz_si256(beyond, beyond), 1)) silu_and_mul_block<T>(gate + i, up + i, y + i);
    else generic::silu_and_mul<T>(gate + i, up + i, kBlock, y + i);
  }
}
