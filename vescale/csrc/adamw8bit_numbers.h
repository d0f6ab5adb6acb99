// Numbers, maps and items of adamw8bit.cpp, and its update in plain C++: what every form of it has in common.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#define INLINE static inline __attribute__((always_inline))

namespace {

enum Dtype { kFloat, kBFloat16 };
enum States { kFloatStates, kBFloat16States, kCodes };

// Consecutive elements of one local tensor. Kept in step with _ITEM in _adamw8bit_update.py.
struct Item {
  void* param;
  const void* grad;
  void* m;
  void* v;
  float* m_max;
  float* v_max;
  float* master;                       // null: none
  const uint16_t* noise;               // null: round to nearest
  int64_t matrices, rows, columns, block_rows, block_columns;
  int64_t numel, num_maxima;           // that there are behind each of the pointers
  int32_t param_dtype, grad_dtype, states, maximize;
  float weight1, beta2, weight2, decay, step_size, inverse_root, eps, unused;
};

// Codes of magnitudes, counted from zero's, as straight lines. Kept in step with _LINES in _adamw8bit_update.py.
//
// Line k goes over to line k + 1 at a border, of which `borders` has the bits less kNear: `below` is such that the upper half
// of (the upper 16 bits of y, less `below`) * `factor` is the line of y or the one before it. `y * slope + offset`, at
// most the cap, is kUnits times the code plus a fraction; unless that fraction begins with 0, the code is sure.
struct Lines {
  int32_t borders[8];
  float slopes[8], offsets[8], caps[8];
  int32_t below, factor;
};
constexpr int kUnitBits = 11, kNear = 4;
constexpr int32_t kUnits = 1 << kUnitBits;

// Codes of magnitudes, counted from zero's, as the lesser of two lines for each cell of magnitudes, or the last line where
// that is more. Kept in step with _CELLS in _adamw8bit_update.py.
//
// The cell of y is the upper half of (the upper 16 bits of y, less kCellsBelow) * kCellsFactor. The code is sure unless the
// fraction of what the lines give is less than kUnsure.
struct Cells {
  float slopes[2][16], offsets[2][16];
  float last_slope, last_offset;
};
constexpr int kCellsBelow = 13224, kCellsFactor = 303;
constexpr float kUnsure = 1.0f / 4096;

struct Map {
  const float* values;
  const float* thresholds;
  const uint8_t* first_codes;
  const Lines* lines;
  const Cells* cells;
  const uint8_t* bytes;                // the first byte of the 256 values, the second byte, and so on
  int64_t zero_code;
};

// One moment of consecutive elements: codes to read, and where the new numbers and the bits of the largest magnitude go.
struct Codes {
  const uint8_t* codes;
  float scale;
  const Map* map;
  float* values;
  uint32_t* largest;

  Codes from(int64_t i) const { return {codes + i, scale, map, values + i, largest}; }
};

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE uint8_t code_of(float x, const Map& map) {
  const uint8_t code = map.first_codes[bits_of(x) >> 16];
  return static_cast<uint8_t>(code + (x >= map.thresholds[code]));  // behind the last threshold there is infinity
}

// Whether quotients by `divisor` are products with its inverse, but for three units in the last place.
INLINE bool has_inverse(float divisor) { return divisor >= 0x1p-126f && divisor <= 0x1p126f; }

INLINE void update(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t count,
                   const Item& item) {
  const float sign = item.maximize ? -1.0f : 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float gradient = g[i] * sign;
    const float first = m[i] + (gradient - m[i]) * item.weight1;
    const float second = v[i] * item.beta2 + (gradient * item.weight2) * gradient;
    m[i] = first;
    v[i] = second;
    const float denominator = __builtin_sqrtf(second) * item.inverse_root + item.eps;
    p[i] = p[i] * item.decay - (first / denominator) * item.step_size;
  }
}

INLINE uint32_t largest_bits(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    largest = bits > largest ? bits : largest;
  }
  return static_cast<uint32_t>(largest);
}

INLINE void decode_each(float* out, const uint8_t* codes, float largest, const Map& map, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = map.values[codes[i]] * largest;
}

INLINE void encode_each(uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
  for (int64_t i = 0; i < count; ++i) codes[i] = code_of(x[i] / divisor, map);
}

template <typename Form>
INLINE void step_codes_of(float* p, const float* g, const Codes& m, const Codes& v, int64_t count, const Item& item) {
  for (int64_t i = count; i < 2 * count; i += 16) {  // what comes next: 64 bytes are fetched at once
    __builtin_prefetch(p + i);
    __builtin_prefetch(g + i);
  }
  Form::decode(m.values, m.codes, m.scale, *m.map, count);
  Form::decode(v.values, v.codes, v.scale, *v.map, count);
  Form::step(p, g, m.values, v.values, count, item);
  *m.largest = std::max(*m.largest, Form::largest(m.values, count));
  *v.largest = std::max(*v.largest, Form::largest(v.values, count));
}

// One moment of a block back to its codes: `rows` rows of `columns` in `x`, `stride` elements apart in `codes`; `largest`:
// the bits of their largest magnitude.
template <typename Form>
void store_codes(uint8_t* codes, float* maximum, const float* x, uint32_t largest, int64_t rows, int64_t columns,
                 int64_t stride, const Map& map) {
  if (largest >= 0x7f800000u) {
    *maximum = float_of(largest > 0x7f800000u ? 0x7fc00000u : largest);
    for (int64_t row = 0; row < rows; ++row) memset(codes + row * stride, static_cast<int>(map.zero_code), columns);
    return;
  }
  *maximum = float_of(largest);
  const float divisor = largest == 0 ? 1.0f : *maximum;
  for (int64_t row = 0; row < rows; ++row) Form::encode(codes + row * stride, x + row * columns, divisor, map, columns);
}

// A form of the loops over consecutive elements; the others have the same members and give the same bits.
struct Plain {
  static bool is_there() { return true; }

  static void step(float* p, const float* g, float* m, float* v, int64_t count, const Item& item) {
    update(p, g, m, v, count, item);
  }

  static void step_codes(float* p, const float* g, const Codes& m, const Codes& v, int64_t count, const Item& item) {
    step_codes_of<Plain>(p, g, m, v, count, item);
  }

  static uint32_t largest(const float* x, int64_t count) { return largest_bits(x, count); }

  static void decode(float* out, const uint8_t* codes, float largest, const Map& map, int64_t count) {
    decode_each(out, codes, largest, map, count);
  }

  static void encode(uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
    encode_each(codes, x, divisor, map, count);
  }

  // Several blocks at once, if the form has a way to do that; returns the first that is left.
  static int64_t flat_blocks(const Item&, int64_t begin, int64_t, const Map*) { return begin; }
};

}  // namespace
