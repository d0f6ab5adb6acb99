// The loops of adamw8bit.cpp with vectors of 16 elements, for processors that have them; the bits are those of plain C++.
//
// A code comes from two lines instead of a search, and from a product with the inverse of the divisor instead of a quotient.
// What is next to the border of two codes (one number of about four thousand) is not sure, and is done again by the
// definition.

#pragma once

#include "adamw8bit_vectors.h"

#if HAS_VECTORS
#define AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))

namespace {

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
      moments(g + i, &first, &second, factors);
      change(p + i, quotient(first, _mm512_sqrt_ps(second), factors), factors);
      _mm512_storeu_ps(m + i, first);
      _mm512_storeu_ps(v + i, second);
    }
    update(p + i, g + i, m + i, v + i, count - i, item);
  }

  static AVX512 void step_codes(float* p, const float* g, const Codes& m, const Codes& v, int64_t count, const Item& item) {
    const int64_t whole = count & -64;
    const Factors factors(item);
    Stepped one(p, g, m, v);
    for (int64_t i = 0; i < whole; i += 64) step64(one, i, factors);
    *m.largest = std::max(*m.largest, one.m_largest());
    *v.largest = std::max(*v.largest, one.v_largest());
    step_codes_of<Plain>(p + whole, g + whole, m.from(whole), v.from(whole), count - whole, item);
  }

  static AVX512 void encode(uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
    if (!has_inverse(divisor)) return encode_each(codes, x, divisor, map, count);
    const int64_t whole = count & -64;
    const Cells16 cells(*map.cells, map.zero_code);
    const Encoded one{codes, x, divisor, &map};
    const __m512 inverse = _mm512_set1_ps(1.0f / divisor);
    for (int64_t i = 0; i < whole; i += 64) encode64(one, inverse, i, cells);
    encode_each(codes + whole, x + whole, divisor, map, count - whole);
  }

  // Whole flat blocks from `begin` on; returns the first that is left. While a block is updated, the one before it goes back
  // to codes: quotients and roots of one run beside lookups of the other.
  static AVX512 int64_t flat_blocks(const Item& item, int64_t begin, int64_t end, const Map* maps) {
    const int64_t size = item.block_columns;
    const bool fits = item.states == kCodes && item.matrices == 1 && item.rows == 1 && size % 64 == 0 && size <= kLongest &&
                      item.param_dtype == kFloat && item.grad_dtype == kFloat;
    if (!fits) return begin;
    end = std::min(end, item.columns / size);
    if (end <= begin) return begin;
    alignas(64) float numbers[2][2][kLongest + 144];
    const Factors factors(item);
    const Cells16 m_cells(*maps[0].cells, maps[0].zero_code), v_cells(*maps[1].cells, maps[1].zero_code);
    uint32_t m_largest = 0, v_largest = 0;
    for (int64_t index = begin; index <= end; ++index) {
      const int64_t at = index * size, before = at - size;
      float *m = numbers[index & 1][0], *v = numbers[index & 1][1];
      const Encoded m_before{static_cast<uint8_t*>(item.m) + before, numbers[~index & 1][0], float_of(m_largest), &maps[0]};
      const Encoded v_before{static_cast<uint8_t*>(item.v) + before, numbers[~index & 1][1], float_of(v_largest), &maps[1]};
      const bool is_usual = index > begin && index < end && has_inverse(m_before.divisor) && has_inverse(v_before.divisor);
      if (index > begin && !is_usual) {
        store_codes<Vectors16>(m_before.codes, &item.m_max[index - 1], m_before.x, m_largest, 1, size, size, maps[0]);
        store_codes<Vectors16>(v_before.codes, &item.v_max[index - 1], v_before.x, v_largest, 1, size, size, maps[1]);
      }
      if (index == end) break;
      Stepped now(static_cast<float*>(item.param) + at, static_cast<const float*>(item.grad) + at,
                  {static_cast<uint8_t*>(item.m) + at, item.m_max[index], &maps[0], m, nullptr},
                  {static_cast<uint8_t*>(item.v) + at, item.v_max[index], &maps[1], v, nullptr});
      if (is_usual) {
        item.m_max[index - 1] = m_before.divisor;
        item.v_max[index - 1] = v_before.divisor;
        const __m512 m_inverse = _mm512_set1_ps(1.0f / m_before.divisor), v_inverse = _mm512_set1_ps(1.0f / v_before.divisor);
        for (int64_t i = 0; i < size; i += 64) {
          __m512 numbers[4];
          find_roots(now, i, numbers, factors);
          encode64(m_before, m_inverse, i, m_cells);
          find_quotients(now, i, numbers, factors);
          encode64(v_before, v_inverse, i, v_cells);
          change(now, i, numbers, factors);
        }
      } else {
        for (int64_t i = 0; i < size; i += 64) step64(now, i, factors);
      }
      m_largest = now.m_largest();
      v_largest = now.v_largest();
    }
    return end;
  }

 private:
  static constexpr int64_t kAhead = 512;     // elements
  static constexpr int64_t kLongest = 1024;  // block of flat_blocks

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

  // What encode64 looks up.
  struct Cells16 {
    __m512 slopes[2], offsets[2], last_slope, last_offset;
    __m512i zero_code;

    AVX512 Cells16(const Cells& cells, int64_t zero_code) : last_slope(_mm512_set1_ps(cells.last_slope)),
          last_offset(_mm512_set1_ps(cells.last_offset)), zero_code(_mm512_set1_epi16(static_cast<int16_t>(zero_code))) {
      for (int line = 0; line < 2; ++line) {
        slopes[line] = _mm512_loadu_ps(cells.slopes[line]);
        offsets[line] = _mm512_loadu_ps(cells.offsets[line]);
      }
    }
  };

  // Numbers that become codes; their divisor has an inverse.
  struct Encoded {
    uint8_t* codes;
    const float* x;
    float divisor;
    const Map* map;
  };

  static AVX512 ALWAYS void encode64(const Encoded& one, __m512 inverse, int64_t i, const Cells16& cells) {
    const __m512 unsure = _mm512_set1_ps(kUnsure);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i below = _mm512_set1_epi32(kCellsBelow << 16), factor = _mm512_set1_epi32(kCellsFactor << 16);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i found[4];
    __m512 fraction[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i signed_bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(one.x + i + part * 16), inverse));
      const __m512i bits = _mm512_and_si512(signed_bits, magnitude);
      const __m512 y = _mm512_castsi512_ps(bits);
      const __m512i cell = _mm512_srli_epi32(_mm512_mulhi_epu16(_mm512_subs_epu16(bits, below), factor), 16);
      const __m512 first = _mm512_fmadd_ps(y, _mm512_permutexvar_ps(cell, cells.slopes[0]),
                                           _mm512_permutexvar_ps(cell, cells.offsets[0]));
      const __m512 second = _mm512_fmadd_ps(y, _mm512_permutexvar_ps(cell, cells.slopes[1]),
                                            _mm512_permutexvar_ps(cell, cells.offsets[1]));
      const __m512 last = _mm512_fmadd_ps(y, cells.last_slope, cells.last_offset);
      const __m512 at = _mm512_max_ps(_mm512_min_ps(first, second), last);
      fraction[part] = _mm512_reduce_ps(at, 0x0b);  // less its integral part
      // The magnitude of `at`, the sign of the number.
      found[part] = _mm512_cvttps_epi32(
          _mm512_castsi512_ps(_mm512_ternarylogic_epi32(magnitude, _mm512_castps_si512(at), signed_bits, 0xca)));
    }
    const __m512i low = _mm512_add_epi16(_mm512_packs_epi32(found[0], found[1]), cells.zero_code);
    const __m512i high = _mm512_add_epi16(_mm512_packs_epi32(found[2], found[3]), cells.zero_code);
    // Saturation: -1 has the code of the smallest value above it.
    _mm512_storeu_si512(one.codes + i, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
    const __m512 least = _mm512_min_ps(_mm512_min_ps(fraction[0], fraction[1]), _mm512_min_ps(fraction[2], fraction[3]));
    if (__builtin_expect(_mm512_cmp_ps_mask(least, unsure, _CMP_LT_OQ) != 0, 0)) {
      uint64_t which = 0;
      for (int part = 0; part < 4; ++part)
        which |= static_cast<uint64_t>(_mm512_cmp_ps_mask(fraction[part], unsure, _CMP_LT_OQ)) << part * 16;
      encode_unsure(one.codes + i, one.x + i, one.divisor, *one.map, which);
    }
  }

  // A block of parameters in a step, and the largest magnitudes so far.
  struct Stepped {
    float* p;
    const float* g;
    Codes m, v;
    __m512 m_scale, v_scale;
    __m512i m_most, v_most;

    AVX512 Stepped(float* p, const float* g, const Codes& m, const Codes& v)
        : p(p), g(g), m(m), v(v), m_scale(_mm512_set1_ps(m.scale)), v_scale(_mm512_set1_ps(v.scale)),
          m_most(_mm512_setzero_si512()), v_most(_mm512_setzero_si512()) {}

    AVX512 uint32_t m_largest() const { return static_cast<uint32_t>(_mm512_reduce_max_epi32(m_most)); }
    AVX512 uint32_t v_largest() const { return static_cast<uint32_t>(_mm512_reduce_max_epi32(v_most)); }
  };

  // A step of 64 elements in three parts, with work between them while roots and quotients are computed: `numbers` become
  // the roots, the quotients.
  static AVX512 ALWAYS void step64(Stepped& one, int64_t i, const Factors& factors) {
    __m512 numbers[4];
    find_roots(one, i, numbers, factors);
    find_quotients(one, i, numbers, factors);
    change(one, i, numbers, factors);
  }

  static AVX512 ALWAYS void find_roots(Stepped& one, int64_t i, __m512* numbers, const Factors& factors) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 first[4], second[4];
    values_of(first, one.m.codes + i, *one.m.map);
    values_of(second, one.v.codes + i, *one.v.map);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const int64_t at = i + part * 16;
      _mm_prefetch(reinterpret_cast<const char*>(one.g + at + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(one.p + at + kAhead), _MM_HINT_T0);
      first[part] = _mm512_mul_ps(first[part], one.m_scale);
      second[part] = _mm512_mul_ps(second[part], one.v_scale);
      moments(one.g + at, &first[part], &second[part], factors);
      numbers[part] = _mm512_sqrt_ps(second[part]);
      one.m_most = _mm512_max_epi32(one.m_most, _mm512_and_si512(_mm512_castps_si512(first[part]), magnitude));
      one.v_most = _mm512_max_epi32(one.v_most, _mm512_and_si512(_mm512_castps_si512(second[part]), magnitude));
      _mm512_storeu_ps(one.m.values + at, first[part]);
      _mm512_storeu_ps(one.v.values + at, second[part]);
    }
  }

  static AVX512 ALWAYS void find_quotients(const Stepped& one, int64_t i, __m512* numbers, const Factors& by) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part)
      numbers[part] = quotient(_mm512_loadu_ps(one.m.values + i + part * 16), numbers[part], by);
  }

  static AVX512 ALWAYS void change(const Stepped& one, int64_t i, const __m512* numbers, const Factors& by) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) change(one.p + i + part * 16, numbers[part], by);
  }

  static AVX512 ALWAYS void moments(const float* g, __m512* m, __m512* v, const Factors& by) {
    const __m512 gradient = _mm512_mul_ps(_mm512_loadu_ps(g), by.sign);
    *m = _mm512_add_ps(*m, _mm512_mul_ps(_mm512_sub_ps(gradient, *m), by.weight1));
    *v = _mm512_add_ps(_mm512_mul_ps(*v, by.beta2), _mm512_mul_ps(_mm512_mul_ps(gradient, by.weight2), gradient));
  }

  static AVX512 ALWAYS __m512 quotient(__m512 m, __m512 root, const Factors& by) {
    return _mm512_div_ps(m, _mm512_add_ps(_mm512_mul_ps(root, by.inverse_root), by.eps));
  }

  static AVX512 ALWAYS void change(float* p, __m512 quotient, const Factors& by) {
    _mm512_storeu_ps(p, _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(p), by.decay), _mm512_mul_ps(quotient, by.step_size)));
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
