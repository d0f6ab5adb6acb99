// Skipping in the stream of the 32-bit Mersenne Twister (Matsumoto and Nishimura 1998), without drawing.
//
// The state is the block of 624 untempered words that the generator is reading. Two ways to a later block:
//   * twist: compute every block on the way, 0.2 ns a word;
//   * jump: the words obey a linear recurrence over GF(2) with the characteristic polynomial phi (degree 19937, sparse),
//     so that word n+i is the sum of the words j+i with t^j in t^n mod phi (Haramoto et al. 2008). A block takes about
//     2 ms whatever the distance, a tenth of that when the polynomial is known.
// `phi` is passed in by the caller (the exponents below the leading one, descending), who owns its derivation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

namespace mt19937 {
namespace {

constexpr int kWords = 624;
constexpr int kMiddle = 397;
constexpr int kDegree = 19937;
constexpr int kLimbs = (kDegree + 63) / 64;      // of a residue
constexpr int kGap = 9;                          // limbs reduced at once: phi has no term in its 623 upper exponents
constexpr int kWide = 2 * kLimbs + kGap + 2;     // of a square, and room for the reduction

inline uint32_t mixed(uint32_t upper, uint32_t lower, uint32_t middle) {
  uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
  return middle ^ (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
}

// The next block, in place. Three loops, each free of dependences between its own steps.
WIDE void twist(uint32_t* x) {
  constexpr int split = kWords - kMiddle;  // 227
  uint32_t next[kWords];
  for (int i = 0; i < split; ++i) next[i] = mixed(x[i], x[i + 1], x[i + kMiddle]);
  for (int i = split; i < 2 * split; ++i) next[i] = mixed(x[i], x[i + 1], next[i - split]);
  for (int i = 2 * split; i < kWords - 1; ++i) next[i] = mixed(x[i], x[i + 1], next[i - split]);
  next[kWords - 1] = mixed(x[kWords - 1], next[0], next[kMiddle - 1]);
  std::memcpy(x, next, sizeof(next));
}

uint16_t spread_table[256];
const bool spread_ready = [] {
  for (int byte = 0; byte < 256; ++byte) {
    uint16_t wide = 0;
    for (int bit = 0; bit < 8; ++bit) wide |= static_cast<uint16_t>(((byte >> bit) & 1) << (2 * bit));
    spread_table[byte] = wide;
  }
  return true;
}();

inline uint64_t spread(uint32_t half) {
  return static_cast<uint64_t>(spread_table[half & 255]) | static_cast<uint64_t>(spread_table[(half >> 8) & 255]) << 16 |
         static_cast<uint64_t>(spread_table[(half >> 16) & 255]) << 32 |
         static_cast<uint64_t>(spread_table[half >> 24]) << 48;
}

// to ^= from << (64 * limb + bit), kGap limbs of `from`.
WIDE void add_shifted(uint64_t* to, const uint64_t* from, int bit) {
  if (bit == 0) {
    for (int i = 0; i < kGap; ++i) to[i] ^= from[i];
    return;
  }
  uint64_t padded[kGap + 2] = {};
  std::memcpy(padded + 1, from, kGap * sizeof(uint64_t));
  for (int i = 0; i < kGap + 1; ++i) to[i] ^= (padded[i + 1] << bit) | (padded[i] >> (64 - bit));
}

// Reduces `wide` modulo phi in place, from the top, kGap limbs (576 bits, less than phi's gap of 623) at a time.
void reduce(uint64_t* wide, const int32_t* exponents, int num_exponents) {
  constexpr int bottom = kDegree / 64;  // the limb that holds t^19937
  int top = kWide - 1 - kGap;
  while (top > bottom) {
    int low = top - kGap;
    if (low < bottom) low = bottom;
    uint64_t high[kGap] = {};
    for (int i = 0; i < top - low; ++i) {
      high[i] = wide[low + i];
      wide[low + i] = 0;
    }
    if (low == bottom) {  // keep the bits below t^19937
      uint64_t kept = (uint64_t{1} << (kDegree % 64)) - 1;
      wide[low] = high[0] & kept;
      high[0] &= ~kept;
    }
    for (int i = 0; i < num_exponents; ++i) {
      int shift = 64 * low - kDegree + exponents[i];
      // With low == bottom the lowest bits of `high` are zero, so that a negative shift loses nothing.
      if (shift >= 0) {
        add_shifted(wide + shift / 64, high, shift % 64);
      } else {
        for (int limb = 0; limb < kGap; ++limb) {
          uint64_t above = limb + 1 < kGap ? high[limb + 1] : 0;
          wide[limb] ^= (high[limb] >> -shift) | (above << (64 + shift));
        }
      }
    }
    top = low;
  }
}

WIDE void add_window(uint32_t* sum, const uint32_t* words) {
  for (int i = 0; i < kWords; ++i) sum[i] ^= words[i];
}

// Advances the block `x` by `num_blocks` blocks, computing each.
inline void advance_by_twists(uint32_t* x, uint64_t num_blocks) {
  for (uint64_t i = 0; i < num_blocks; ++i) twist(x);
}

// residue[312] = t^distance mod phi, little-endian bits.
inline void power_of_t(uint64_t distance, const int32_t* exponents, int32_t num_exponents, uint64_t* residue) {
  std::vector<uint64_t> wide(kWide);
  uint64_t now[kLimbs] = {1};
  int bit = 63;
  while (bit >= 0 && !((distance >> bit) & 1)) --bit;
  for (; bit >= 0; --bit) {  // now = now^2 * t^(this bit of the distance)
    std::fill(wide.begin(), wide.end(), 0);
    for (int i = 0; i < kLimbs; ++i) {
      wide[2 * i] = spread(static_cast<uint32_t>(now[i]));
      wide[2 * i + 1] = spread(static_cast<uint32_t>(now[i] >> 32));
    }
    if ((distance >> bit) & 1) {
      for (int i = 2 * kLimbs; i > 0; --i) wide[i] = (wide[i] << 1) | (wide[i - 1] >> 63);
      wide[0] <<= 1;
    }
    reduce(wide.data(), exponents, num_exponents);
    std::memcpy(now, wide.data(), sizeof(now));
  }
  std::memcpy(residue, now, sizeof(now));
}

// Advances the block `x` by the distance of `residue` (in words). All bits of x must obey the recurrence: true of every
// block but the one a seed wrote, whose first word has 31 bits outside of it (twist that one first).
inline void advance_by_residue(const uint64_t* residue, uint32_t* x) {
  constexpr int blocks = kDegree / kWords + 2;  // words 0 .. 19936 + 623
  std::vector<uint32_t> words(static_cast<size_t>(blocks) * kWords);
  std::memcpy(words.data(), x, kWords * sizeof(uint32_t));
  for (int b = 1; b < blocks; ++b) {
    uint32_t* block = words.data() + static_cast<size_t>(b) * kWords;
    std::memcpy(block, block - kWords, kWords * sizeof(uint32_t));
    twist(block);
  }
  uint32_t sum[kWords] = {};
  for (int limb = 0; limb < kLimbs; ++limb)
    for (uint64_t bits = residue[limb]; bits; bits &= bits - 1)
      add_window(sum, words.data() + 64 * limb + __builtin_ctzll(bits));
  std::memcpy(x, sum, sizeof(sum));
}

}  // namespace
}  // namespace mt19937
