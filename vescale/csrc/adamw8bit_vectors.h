// The loops of adamw8bit.cpp with vectors of 8 and of 16 elements, for processors that have them; the bits are those of
// plain C++.
//
// A code comes from a line instead of a search, and from a product with the inverse of the divisor instead of a quotient.
// What is next to the border of two codes or of two lines (one number of about two thousand) is not sure, and is done again
// by the definition.

#pragma once

#include "adamw8bit_numbers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_VECTORS 1
#define AVX2 __attribute__((target("avx2")))
#define ALWAYS inline __attribute__((always_inline))
#define AVX512 __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
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

struct Vectors16 {
  static bool is_there() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi");
  }

  static AVX512 void step(float* p, const float* g, float* m, float* v, int64_t count, const Item& item) {
    const Factors factors(item);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      __m512 first = _mm512_loadu_ps(m + i), second = _mm512_loadu_ps(v + i);
      step(p + i, g + i, &first, &second, factors);
      _mm512_storeu_ps(m + i, first);
      _mm512_storeu_ps(v + i, second);
    }
    update(p + i, g + i, m + i, v + i, count - i, item);
  }

  // Lookups of one group of elements run beside quotients and roots of the one before it.
  static AVX512 void step_codes(float* p, const float* g, const Codes& m, const Codes& v, int64_t count, const Item& item) {
    const Factors factors(item);
    const __m512 m_scale = _mm512_set1_ps(m.scale), v_scale = _mm512_set1_ps(v.scale);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i m_largest = _mm512_setzero_si512(), v_largest = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
      __m512 first[4], second[4];
      values_of(first, m.codes + i, *m.map);
      values_of(second, v.codes + i, *v.map);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const int64_t at = i + part * 16;
        _mm_prefetch(reinterpret_cast<const char*>(g + at + kAhead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(p + at + kAhead), _MM_HINT_T0);
        first[part] = _mm512_mul_ps(first[part], m_scale);
        second[part] = _mm512_mul_ps(second[part], v_scale);
        step(p + at, g + at, &first[part], &second[part], factors);
        m_largest = _mm512_max_epi32(m_largest, _mm512_and_si512(_mm512_castps_si512(first[part]), magnitude));
        v_largest = _mm512_max_epi32(v_largest, _mm512_and_si512(_mm512_castps_si512(second[part]), magnitude));
        _mm512_storeu_ps(m.values + at, first[part]);
        _mm512_storeu_ps(v.values + at, second[part]);
      }
    }
    *m.largest = std::max(*m.largest, static_cast<uint32_t>(_mm512_reduce_max_epi32(m_largest)));
    *v.largest = std::max(*v.largest, static_cast<uint32_t>(_mm512_reduce_max_epi32(v_largest)));
    step_codes_of<Plain>(p + i, g + i, m.from(i), v.from(i), count - i, item);
  }

  static AVX512 void encode(uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
    if (!has_inverse(divisor)) return encode_each(codes, x, divisor, map, count);
    const Lines& lines = *map.lines;
    const __m512 inverse = _mm512_set1_ps(1.0f / divisor);
    const __m512i zero_code = _mm512_set1_epi32(static_cast<int>(map.zero_code));
    const __m512i below = _mm512_set1_epi32(lines.below << 16), factor = _mm512_set1_epi32(lines.factor << 16);
    const __m512i borders =
        _mm512_broadcast_i32x8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines.borders)));
    const __m512 slopes = _mm512_broadcast_f32x8(_mm256_loadu_ps(lines.slopes));
    const __m512 offsets = _mm512_broadcast_f32x8(_mm256_loadu_ps(lines.offsets));
    const __m512 caps = _mm512_broadcast_f32x8(_mm256_loadu_ps(lines.caps));
    const __m512i near = _mm512_set1_epi32(kNear), one = _mm512_set1_epi32(1);
    const __m512i far = _mm512_set1_epi32(~(2 * kNear - 1)), fraction = _mm512_set1_epi32(kUnits - 1);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
      __m512i found[4];
      uint64_t unsure = 0;
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i + part * 16), inverse);
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        y = _mm512_abs_ps(y);
        const __m512i bits = _mm512_castps_si512(y);
        __m512i line = _mm512_srli_epi32(_mm512_mulhi_epu16(_mm512_subs_epu16(bits, below), factor), 16);
        const __m512i from = _mm512_sub_epi32(bits, _mm512_permutexvar_epi32(line, borders));
        line = _mm512_mask_add_epi32(line, _mm512_cmpge_epi32_mask(from, near), line, one);
        __m512 at = _mm512_mul_ps(y, _mm512_permutexvar_ps(line, slopes));
        at = _mm512_add_ps(at, _mm512_permutexvar_ps(line, offsets));
        at = _mm512_min_ps(at, _mm512_permutexvar_ps(line, caps));
        const __m512i units = _mm512_cvttps_epi32(at);
        const uint64_t doubt = _mm512_testn_epi32_mask(from, far) | _mm512_testn_epi32_mask(units, fraction);
        unsure |= doubt << part * 16;
        const __m512i code = _mm512_srli_epi32(units, kUnitBits);
        found[part] = _mm512_mask_sub_epi32(_mm512_add_epi32(zero_code, code), negative, zero_code, code);
      }
      // Saturation: -1 has the code of the smallest value above it.
      const __m512i words = _mm512_packus_epi16(_mm512_packus_epi32(found[0], found[1]),
                                                _mm512_packus_epi32(found[2], found[3]));
      _mm512_storeu_si512(codes + i, _mm512_permutexvar_epi32(order, words));
      if (__builtin_expect(unsure != 0, 0)) encode_unsure(codes + i, x + i, divisor, map, unsure);
    }
    encode_each(codes + i, x + i, divisor, map, count - i);
  }

 private:
  static constexpr int64_t kAhead = 512;  // elements

  struct Factors {
    __m512 sign, weight1, beta2, weight2, decay, step_size, inverse_root, eps;

    AVX512 explicit Factors(const Item& item)
        : sign(_mm512_set1_ps(item.maximize ? -1.0f : 1.0f)),
          weight1(_mm512_set1_ps(item.weight1)),
          beta2(_mm512_set1_ps(item.beta2)),
          weight2(_mm512_set1_ps(item.weight2)),
          decay(_mm512_set1_ps(item.decay)),
          step_size(_mm512_set1_ps(item.step_size)),
          inverse_root(_mm512_set1_ps(item.inverse_root)),
          eps(_mm512_set1_ps(item.eps)) {}
  };

  static AVX512 ALWAYS void step(float* p, const float* g, __m512* m, __m512* v, const Factors& by) {
    const __m512 gradient = _mm512_mul_ps(_mm512_loadu_ps(g), by.sign);
    *m = _mm512_add_ps(*m, _mm512_mul_ps(_mm512_sub_ps(gradient, *m), by.weight1));
    *v = _mm512_add_ps(_mm512_mul_ps(*v, by.beta2), _mm512_mul_ps(_mm512_mul_ps(gradient, by.weight2), gradient));
    const __m512 denominator = _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(*v), by.inverse_root), by.eps);
    const __m512 change = _mm512_mul_ps(_mm512_div_ps(*m, denominator), by.step_size);
    _mm512_storeu_ps(p, _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(p), by.decay), change));
  }

  // The values of 64 codes: each of their four bytes by two lookups among 128.
  static AVX512 ALWAYS void values_of(__m512* values, const uint8_t* codes, const Map& map) {
    // Bytes of one value come together within 128 bits: to begin with, groups of four codes change places.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i code = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
    const __mmask64 upper = _mm512_movepi8_mask(code);
    __m512i planes[4];
#pragma GCC unroll 4
    for (int plane = 0; plane < 4; ++plane) {
      const uint8_t* table = map.bytes + plane * 256;
      const __m512i below = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), code, _mm512_loadu_si512(table + 64));
      const __m512i above =
          _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), code, _mm512_loadu_si512(table + 192));
      planes[plane] = _mm512_mask_blend_epi8(upper, below, above);
    }
    const __m512i low01 = _mm512_unpacklo_epi8(planes[0], planes[1]), low23 = _mm512_unpacklo_epi8(planes[2], planes[3]);
    const __m512i high01 = _mm512_unpackhi_epi8(planes[0], planes[1]);
    const __m512i high23 = _mm512_unpackhi_epi8(planes[2], planes[3]);
    values[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low01, low23));
    values[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low01, low23));
    values[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(high01, high23));
    values[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(high01, high23));
  }
};

}  // namespace
#endif
