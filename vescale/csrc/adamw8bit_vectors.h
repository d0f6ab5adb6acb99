// The loops of adamw8bit.cpp with vectors of 8 elements, for processors that have them; the bits are those of plain C++.
//
// A code comes from a line instead of a search, and from a product with the inverse of the divisor instead of a quotient.
// What is next to the border of two codes or of two lines (one number of about two thousand) is not sure, and is done again
// by the definition.

#pragma once

#include "adamw8bit_numbers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if !defined(__clang__)
// Intrinsics of gcc 12 initialize a variable that may have any value with itself (`__Y = __Y`), and its warnings see that.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#define HAS_VECTORS 1
#define AVX2 __attribute__((target("avx2")))
#define ALWAYS inline __attribute__((always_inline))
#else
#define HAS_VECTORS 0
#endif

#if HAS_VECTORS
namespace {

INLINE void encode_unsure(uint8_t* codes, const float* x, float divisor, const Map& map, uint64_t unsure) {
  for (; unsure != 0; unsure &= unsure - 1) {
    const int lane = __builtin_ctzll(unsure);
    codes[lane] = code_of(x[lane] / divisor, map);
  }
}

struct Vectors8 {
  static bool is_there() { return __builtin_cpu_supports("avx2"); }

  static AVX2 void step(float* p, const float* g, float* m, float* v, int64_t count, const Item& item) {
    update(p, g, m, v, count, item);
  }

  static AVX2 void step_codes(float* p, const float* g, const Codes& m, const Codes& v, int64_t count, const Item& item) {
    step_codes_of<Vectors8>(p, g, m, v, count, item);
  }

  static AVX2 uint32_t largest(const float* x, int64_t count) { return largest_bits(x, count); }

  static AVX2 void decode(float* out, const uint8_t* codes, float largest, const Map& map, int64_t count) {
    const float* values = map.values;
    const __m256 scale = _mm256_set1_ps(largest);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      uint64_t eight;
      memcpy(&eight, codes + i, 8);
      const __m128 a = _mm_setr_ps(values[eight & 255], values[eight >> 8 & 255], values[eight >> 16 & 255],
                                   values[eight >> 24 & 255]);
      const __m128 b = _mm_setr_ps(values[eight >> 32 & 255], values[eight >> 40 & 255], values[eight >> 48 & 255],
                                   values[eight >> 56]);
      _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_set_m128(b, a), scale));
    }
    decode_each(out + i, codes + i, largest, map, count - i);
  }

  static AVX2 void encode(uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
    if (!has_inverse(divisor)) return encode_each(codes, x, divisor, map, count);
    const Lines lines = *map.lines;  // a copy: stores of codes cannot change it
    const __m256 inverse = _mm256_set1_ps(1.0f / divisor);
    const __m256i zero_code = _mm256_set1_epi32(static_cast<int>(map.zero_code));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      __m256i found[4];
      uint32_t unsure = 0;
      for (int part = 0; part < 4; ++part) {
        __m256i doubt;
        const __m256i code = signed_code(_mm256_mul_ps(_mm256_loadu_ps(x + i + part * 8), inverse), lines, &doubt);
        found[part] = _mm256_add_epi32(code, zero_code);
        unsure |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(doubt))) << part * 8;
      }
      // Saturation: -1 has the code of the smallest value above it.
      const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(found[0], found[1]),
                                                _mm256_packus_epi32(found[2], found[3]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_permutevar8x32_epi32(words, order));
      encode_unsure(codes + i, x + i, divisor, map, unsure);
    }
    encode_each(codes + i, x + i, divisor, map, count - i);
  }

  static int64_t flat_blocks(const Item&, int64_t begin, int64_t, const Map*) { return begin; }

 private:
  static AVX2 ALWAYS __m256i signed_code(__m256 y, const Lines& lines, __m256i* doubt) {
    const __m256i sign = _mm256_srai_epi32(_mm256_castps_si256(y), 31);
    y = _mm256_and_ps(y, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
    const __m256i bits = _mm256_castps_si256(y);
    __m256i line = _mm256_subs_epu16(bits, _mm256_set1_epi32(lines.below << 16));
    line = _mm256_srli_epi32(_mm256_mulhi_epu16(line, _mm256_set1_epi32(lines.factor << 16)), 16);
    const __m256i borders = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines.borders));
    const __m256i from = _mm256_sub_epi32(bits, _mm256_permutevar8x32_epi32(borders, line));
    line = _mm256_sub_epi32(line, _mm256_cmpgt_epi32(from, _mm256_set1_epi32(kNear - 1)));
    __m256 at = _mm256_mul_ps(y, _mm256_permutevar8x32_ps(_mm256_loadu_ps(lines.slopes), line));
    at = _mm256_add_ps(at, _mm256_permutevar8x32_ps(_mm256_loadu_ps(lines.offsets), line));
    at = _mm256_min_ps(at, _mm256_permutevar8x32_ps(_mm256_loadu_ps(lines.caps), line));
    const __m256i units = _mm256_cvttps_epi32(at), none = _mm256_setzero_si256();
    const __m256i is_near = _mm256_cmpeq_epi32(_mm256_and_si256(from, _mm256_set1_epi32(~(2 * kNear - 1))), none);
    *doubt = _mm256_or_si256(
        is_near, _mm256_cmpeq_epi32(_mm256_and_si256(units, _mm256_set1_epi32(kUnits - 1)), none));
    const __m256i code = _mm256_srli_epi32(units, kUnitBits);
    return _mm256_sub_epi32(_mm256_xor_si256(code, sign), sign);
  }
};

}  // namespace
#endif
