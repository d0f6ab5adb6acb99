// The update of vescale/optim/_adamw8bit.py on a CPU, for many parameters in one call and on several threads.
//
// Plain C++ with the arithmetic of vescale/optim/_adamw8bit_update.py, operation by operation in float32, so that both give
// the same bits (compiled without contraction of products and sums), and forms of its loops for wider vectors. Blocks are
// independent: neither the number of threads nor the form shows in the result. Tables come from
// vescale/optim/_adamw8bit_update.py.

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <thread>
#include <vector>

#include "adamw8bit_numbers.h"
#include "adamw8bit_vectors.h"
#include "adamw8bit_vectors16.h"

namespace {

constexpr int64_t kChunk = 1024;       // elements of a row that are worked on at once
constexpr int64_t kTask = 1 << 16;     // elements that a thread takes at once

struct Task {
  const Item* item;
  int64_t begin, end;                  // blocks
};

struct Scratch {
  float p[kChunk], g[kChunk];
  std::vector<float> m, v;
};

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
  const bool is_codes = item.states == kCodes;
  const float m_scale = is_codes ? item.m_max[index] : 0.0f, v_scale = is_codes ? item.v_max[index] : 0.0f;
  uint32_t m_largest = 0, v_largest = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kChunk) {
      const int64_t count = std::min(kChunk, columns - column), from = at + row * item.columns + column;
      float* m = scratch.m.data() + row * columns + column;
      float* v = scratch.v.data() + row * columns + column;
      const float* g = static_cast<const float*>(item.grad) + from;
      if (item.grad_dtype != kFloat) {
        load(scratch.g, item.grad, item.grad_dtype, from, count);
        g = scratch.g;
      }
      float* p = static_cast<float*>(item.param) + from;
      if (item.param_dtype != kFloat) {
        load_param(scratch, item, from, count);
        p = scratch.p;
      }
      if (is_codes) {
        const Codes m_codes{static_cast<uint8_t*>(item.m) + from, m_scale, &maps[0], m, &m_largest};
        const Codes v_codes{static_cast<uint8_t*>(item.v) + from, v_scale, &maps[1], v, &v_largest};
        Form::step_codes(p, g, m_codes, v_codes, count, item);
      } else {
        load(m, item.m, item.states, from, count);
        load(v, item.v, item.states, from, count);
        Form::step(p, g, m, v, count, item);
      }
      if (item.param_dtype != kFloat) store_param(scratch, item, from, count);
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
  if (!is_codes) return;
  store_codes<Form>(static_cast<uint8_t*>(item.m) + at, item.m_max + index, scratch.m.data(), m_largest, rows, columns,
                    item.columns, maps[0]);
  store_codes<Form>(static_cast<uint8_t*>(item.v) + at, item.v_max + index, scratch.v.data(), v_largest, rows, columns,
                    item.columns, maps[1]);
}

template <typename Form>
void blocks(const Task& task, Scratch& scratch, const Map* maps) {
  int64_t index = Form::flat_blocks(*task.item, task.begin, task.end, maps);
  for (; index < task.end; ++index) block<Form>(*task.item, index, scratch, maps);
}

using Blocks = void (*)(const Task&, Scratch&, const Map*);

Blocks widest_blocks(int32_t width) {
#if HAS_VECTORS
  if (width >= 16 && Vectors16::is_there()) return blocks<Vectors16>;
  if (width >= 8 && Vectors8::is_there()) return blocks<Vectors8>;
#endif
  return blocks<Plain>;
}

}  // namespace

namespace {

// The product of numbers that are not negative; -1 where one is, and where there are more elements than a tensor may have.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t found = 1;
  for (const int64_t factor : factors) {
    if (factor < 0 || __builtin_mul_overflow(found, factor, &found)) return -1;
  }
  return found;
}

// Whether all that a step of the item reads and writes is there.
bool is_sound(const Item& item) {
  const int64_t numel = product({item.matrices, item.rows, item.columns});
  if (numel < 0 || numel > item.numel || item.block_rows < 1 || item.block_columns < 1) return false;
  if (numel == 0) return true;
  if (item.param == nullptr || item.grad == nullptr || item.m == nullptr || item.v == nullptr) return false;
  const auto is_float = [](int32_t dtype) { return dtype == kFloat || dtype == kBFloat16; };
  if (!is_float(item.param_dtype) || !is_float(item.grad_dtype)) return false;
  if (item.states != kCodes) return item.states == kFloatStates || item.states == kBFloat16States;
  const int64_t bands = (item.rows - 1) / item.block_rows + 1, tiles = (item.columns - 1) / item.block_columns + 1;
  const int64_t num_blocks = product({item.matrices, bands, tiles});
  return item.m_max != nullptr && item.v_max != nullptr && num_blocks <= item.num_maxima;
}

}  // namespace

// One step of `count` items; `maps`: of the first moment and of the second; `width`: at most so many elements in a vector.
// Items must not overlap. The result is `count`, or which item is not sound: nothing has been written then.
extern "C" __attribute__((visibility("default"))) int64_t adamw8bit_step(
    const Item* items, int64_t count, const Map* maps, int32_t num_threads, int32_t width) {
  if (count > 0 && (items == nullptr || maps == nullptr)) return 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_sound(items[i])) return i;
  }
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
  const Blocks blocks = widest_blocks(width);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    Scratch scratch;
    for (size_t i; (i = next.fetch_add(1)) < tasks.size();) blocks(tasks[i], scratch, maps);
  };
  std::vector<std::thread> threads;
  const size_t helpers = std::min<size_t>(std::max(0, num_threads - 1), tasks.empty() ? 0 : (tasks.size() - 1) / 2);
  for (size_t i = 0; i < helpers; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return count;
}

extern "C" __attribute__((visibility("default"))) int64_t adamw8bit_item_bytes() { return sizeof(Item); }
