// The update of vescale/optim/_adamw8bit.py on a CPU, for many parameters in one call and on several threads.
//
// Plain C++ with the arithmetic of vescale/optim/_adamw8bit_update.py, operation by operation in float32, so that both give
// the same bits (compiled without contraction of products and sums). Blocks are independent: the number of threads does
// not show in the result. Tables come from vescale/optim/_dynamic_map.py.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2 1
#define AVX2 __attribute__((target("avx2")))
#else
#define HAS_AVX2 0
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

enum Dtype { kFloat, kBFloat16 };
enum States { kFloatStates, kBFloat16States, kCodes };
constexpr int64_t kChunk = 1024;       // elements of a row that are worked on at once
constexpr int64_t kTask = 1 << 16;     // elements that a thread takes at once

// Consecutive elements of one local tensor. Kept in step with _ITEM in _adamw8bit_native.py.
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
  int32_t param_dtype, grad_dtype, states, maximize;
  float weight1, beta2, weight2, decay, step_size, inverse_root, eps, unused;
};

// Codes of magnitudes by decade (0: those that become zero): the code above zero's is the floor of `slope * y + offset`,
// surely where y is in [from, to] and adding `margin` does not change the floor.
struct Lines {
  float borders[8], slopes[8], offsets[8], from[8], to[8];
  float margin;
};

struct Map {
  const float* values;
  const float* thresholds;
  const uint8_t* first_codes;
  const Lines* lines;
  int64_t zero_code;
};

struct Task {
  const Item* item;
  int64_t begin, end;                  // blocks
};

struct Scratch {
  float p[kChunk], g[kChunk];
  std::vector<float> m, v;
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

INLINE uint16_t nearest_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE uint16_t noisy_bfloat16(float x, uint16_t noise) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return nearest_bfloat16(x);
  return static_cast<uint16_t>((bits + noise) >> 16);
}

INLINE void load(float* out, const void* from, int32_t dtype, int64_t at, int64_t count) {
  if (dtype == kFloat) {
    memcpy(out, static_cast<const float*>(from) + at, count * 4);
  } else {
    const uint16_t* words = static_cast<const uint16_t*>(from) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = float_of(static_cast<uint32_t>(words[i]) << 16);
  }
}

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

struct Plain {
  static void step(float* p, const float* g, float* m, float* v, int64_t count, const Item& item) {
    update(p, g, m, v, count, item);
  }

  static uint32_t largest(const float* x, int64_t count) { return largest_bits(x, count); }

  static void decode(float* out, const uint8_t* codes, float largest, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = values[codes[i]] * largest;
  }

  static void encode(uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
    for (int64_t i = 0; i < count; ++i) codes[i] = code_of(x[i] / divisor, map);
  }
};

#if HAS_AVX2
// Eight elements at once. Within a decade codes are evenly spaced, so that a product and a sum give the code, unless the
// result is next to the border of two codes, or the number next to the border of two decades: then the tables decide.
struct Vectors {
  static AVX2 void step(float* p, const float* g, float* m, float* v, int64_t count, const Item& item) {
    update(p, g, m, v, count, item);
  }

  static AVX2 uint32_t largest(const float* x, int64_t count) { return largest_bits(x, count); }

  static AVX2 void decode(
      float* out, const uint8_t* codes, float largest, const float* values, int64_t count) {
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
    for (; i < count; ++i) out[i] = values[codes[i]] * largest;
  }

  static AVX2 void encode(
      uint8_t* codes, const float* x, float divisor, const Map& map, int64_t count) {
    const Lines lines = *map.lines;  // a copy: stores of codes cannot change it
    const __m256 by = _mm256_set1_ps(divisor), magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 slopes = _mm256_loadu_ps(lines.slopes), offsets = _mm256_loadu_ps(lines.offsets);
    const __m256 from = _mm256_loadu_ps(lines.from), to = _mm256_loadu_ps(lines.to);
    const __m256 margin = _mm256_set1_ps(lines.margin);
    const __m256i zero_code = _mm256_set1_epi32(static_cast<int>(map.zero_code));
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256 signed_y = _mm256_div_ps(_mm256_loadu_ps(x + i), by), y = _mm256_and_ps(signed_y, magnitude);
      __m256i decade = _mm256_setzero_si256();
      for (int border = 1; border < 8; ++border) {
        const __m256 above = _mm256_cmp_ps(y, _mm256_set1_ps(lines.borders[border]), _CMP_GE_OQ);
        decade = _mm256_sub_epi32(decade, _mm256_castps_si256(above));
      }
      // The offsets are smaller by the margin, so that codes next to a border differ below and above it.
      const __m256 low = _mm256_add_ps(_mm256_mul_ps(y, _mm256_permutevar8x32_ps(slopes, decade)),
                                       _mm256_permutevar8x32_ps(offsets, decade));
      __m256i code = _mm256_cvttps_epi32(low);
      const __m256i same = _mm256_cmpeq_epi32(code, _mm256_cvttps_epi32(_mm256_add_ps(low, margin)));
      const __m256 inside = _mm256_and_ps(_mm256_cmp_ps(y, _mm256_permutevar8x32_ps(from, decade), _CMP_GE_OQ),
                                          _mm256_cmp_ps(y, _mm256_permutevar8x32_ps(to, decade), _CMP_LE_OQ));
      const int sure = _mm256_movemask_ps(_mm256_and_ps(inside, _mm256_castsi256_ps(same)));
      const __m256i sign = _mm256_srai_epi32(_mm256_castps_si256(signed_y), 31);
      code = _mm256_add_epi32(_mm256_sub_epi32(_mm256_xor_si256(code, sign), sign), zero_code);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packus_epi16(words, words));
      for (unsigned mask = static_cast<unsigned>(sure) ^ 255u; mask != 0; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        codes[i + lane] = code_of(x[i + lane] / divisor, map);
      }
    }
    for (; i < count; ++i) codes[i] = code_of(x[i] / divisor, map);
  }
};
#endif

// One moment of a block back to its codes: `rows` rows of `columns` in `x`, `stride` elements apart in `codes`.
template <typename Form>
void store_codes(uint8_t* codes, float* maximum, float* x, int64_t rows, int64_t columns, int64_t stride,
                        const Map& map) {
  const uint32_t largest = Form::largest(x, rows * columns);
  if (largest >= 0x7f800000u) {
    *maximum = float_of(largest > 0x7f800000u ? 0x7fc00000u : largest);
    for (int64_t row = 0; row < rows; ++row) memset(codes + row * stride, static_cast<int>(map.zero_code), columns);
    return;
  }
  *maximum = float_of(largest);
  const float divisor = largest == 0 ? 1.0f : *maximum;
  for (int64_t row = 0; row < rows; ++row) Form::encode(codes + row * stride, x + row * columns, divisor, map, columns);
}

INLINE void load_param(Scratch& scratch, const Item& item, int64_t at, int64_t count) {
  load(scratch.p, item.param, kBFloat16, at, count);
  if (item.master == nullptr) return;
  const float* master = item.master + at;
  for (int64_t i = 0; i < count; ++i) {  // where the parameter was changed meanwhile, it counts
    const uint16_t rounded = static_cast<uint16_t>(bits_of(scratch.p[i]) >> 16);
    if (nearest_bfloat16(master[i]) == rounded) scratch.p[i] = master[i];
  }
}

INLINE void store_param(const Scratch& scratch, const Item& item, int64_t at, int64_t count) {
  uint16_t* out = static_cast<uint16_t*>(item.param) + at;
  if (item.noise != nullptr)
    for (int64_t i = 0; i < count; ++i) out[i] = noisy_bfloat16(scratch.p[i], item.noise[at + i]);
  else
    for (int64_t i = 0; i < count; ++i) out[i] = nearest_bfloat16(scratch.p[i]);
  if (item.master != nullptr) memcpy(item.master + at, scratch.p, count * 4);
}

template <typename Form>
void block(const Item& item, int64_t index, Scratch& scratch, const Map* maps) {
  const int64_t tiles = (item.columns + item.block_columns - 1) / item.block_columns;
  const int64_t bands = (item.rows + item.block_rows - 1) / item.block_rows;
  const int64_t tile = index % tiles, band = index / tiles % bands, matrix = index / tiles / bands;
  const int64_t rows = std::min(item.block_rows, item.rows - band * item.block_rows);
  const int64_t columns = std::min(item.block_columns, item.columns - tile * item.block_columns);
  const int64_t at = (matrix * item.rows + band * item.block_rows) * item.columns + tile * item.block_columns;
  if (static_cast<int64_t>(scratch.m.size()) < rows * columns) {
    scratch.m.resize(rows * columns);
    scratch.v.resize(rows * columns);
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kChunk) {
      const int64_t count = std::min(kChunk, columns - column), from = at + row * item.columns + column;
      float* m = scratch.m.data() + row * columns + column;
      float* v = scratch.v.data() + row * columns + column;
      if (item.states == kCodes) {
        Form::decode(m, static_cast<uint8_t*>(item.m) + from, item.m_max[index], maps[0].values, count);
        Form::decode(v, static_cast<uint8_t*>(item.v) + from, item.v_max[index], maps[1].values, count);
      } else {
        load(m, item.m, item.states, from, count);
        load(v, item.v, item.states, from, count);
      }
      const float* g = static_cast<const float*>(item.grad) + from;
      if (item.grad_dtype != kFloat) {
        load(scratch.g, item.grad, item.grad_dtype, from, count);
        g = scratch.g;
      }
      if (item.param_dtype == kFloat) {
        Form::step(static_cast<float*>(item.param) + from, g, m, v, count, item);
      } else {
        load_param(scratch, item, from, count);
        Form::step(scratch.p, g, m, v, count, item);
        store_param(scratch, item, from, count);
      }
      if (item.states == kFloatStates) {
        memcpy(static_cast<float*>(item.m) + from, m, count * 4);
        memcpy(static_cast<float*>(item.v) + from, v, count * 4);
      } else if (item.states == kBFloat16States) {
        uint16_t* m_out = static_cast<uint16_t*>(item.m) + from;
        uint16_t* v_out = static_cast<uint16_t*>(item.v) + from;
        for (int64_t i = 0; i < count; ++i) m_out[i] = nearest_bfloat16(m[i]);
        for (int64_t i = 0; i < count; ++i) v_out[i] = nearest_bfloat16(v[i]);
      }
    }
  }
  if (item.states != kCodes) return;
  store_codes<Form>(static_cast<uint8_t*>(item.m) + at, item.m_max + index, scratch.m.data(), rows, columns, item.columns,
              maps[0]);
  store_codes<Form>(static_cast<uint8_t*>(item.v) + at, item.v_max + index, scratch.v.data(), rows, columns, item.columns,
              maps[1]);
}

void blocks(const Task& task, Scratch& scratch, const Map* maps) {
  for (int64_t index = task.begin; index < task.end; ++index) block<Plain>(*task.item, index, scratch, maps);
}

#if HAS_AVX2
void blocks_in_vectors(const Task& task, Scratch& scratch, const Map* maps) {
  for (int64_t index = task.begin; index < task.end; ++index) block<Vectors>(*task.item, index, scratch, maps);
}
#endif

}  // namespace

// One step of `count` items; `maps`: of the first moment and of the second. Items must not overlap.
extern "C" __attribute__((visibility("default"))) void adamw8bit_step(
    const Item* items, int64_t count, const Map* maps, int32_t num_threads) {
  std::vector<Task> tasks;
  for (int64_t i = 0; i < count; ++i) {
    const Item& item = items[i];
    const int64_t tiles = (item.columns + item.block_columns - 1) / item.block_columns;
    const int64_t bands = (item.rows + item.block_rows - 1) / item.block_rows;
    const int64_t num_blocks = item.matrices * bands * tiles;
    const int64_t numel = std::max<int64_t>(1, std::min(item.block_rows, item.rows) * std::min(item.block_columns, item.columns));
    const int64_t step = std::max<int64_t>(1, kTask / numel);
    for (int64_t begin = 0; begin < num_blocks; begin += step)
      tasks.push_back({&item, begin, std::min(begin + step, num_blocks)});
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    Scratch scratch;
#if HAS_AVX2
    if (__builtin_cpu_supports("avx2")) {
      for (size_t i; (i = next.fetch_add(1)) < tasks.size();) blocks_in_vectors(tasks[i], scratch, maps);
      return;
    }
#endif
    for (size_t i; (i = next.fetch_add(1)) < tasks.size();) blocks(tasks[i], scratch, maps);
  };
  std::vector<std::thread> threads;
  const size_t helpers = std::min<size_t>(std::max(0, num_threads - 1), tasks.empty() ? 0 : (tasks.size() - 1) / 2);
  for (size_t i = 0; i < helpers; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

extern "C" __attribute__((visibility("default"))) int64_t adamw8bit_item_bytes() { return sizeof(Item); }
