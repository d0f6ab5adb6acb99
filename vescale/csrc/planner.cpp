// The layout planner's table over multisets of tensors. Its meaning is told in vescale/buffer/_shard_size_search.py, whose numpy form
// fills the same table; the caller guarantees that every position fits in 62 bits.

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kNowhere = -1;

// Remainder by a fixed positive divisor: two multiplications and a correction instead of a hardware division.
class Divisor {
 public:
  explicit Divisor(int64_t value) : value_(value), reciprocal_(~uint64_t{0} / static_cast<uint64_t>(value)) {}

  int64_t remainder(int64_t number) const {
    const auto quotient = static_cast<int64_t>((static_cast<unsigned __int128>(number) * reciprocal_) >> 64);
    int64_t rest = number - quotient * value_;
    while (rest >= value_) rest -= value_;  // the quotient is at most 2 too small
    return rest;
  }

 private:
  int64_t value_;
  uint64_t reciprocal_;
};

struct Kind {
  int64_t numel;
  int64_t block;
  int64_t count;
  int64_t stride;        // of its digit in the table
  bool spans_shards;     // block divides the shard: the tensor may contain whole shards
  int64_t longest_head;  // largest multiple of block in one shard
  Divisor by_block;
};

// Elements left empty before the earliest legal start, or kNowhere; `room` = elements to the next shard boundary.
inline int64_t gap_before(const Kind& kind, int64_t room, int64_t shard) {
  if (kind.numel <= room || kind.block == 1) return 0;
  const int64_t rest = kind.by_block.remainder(room);
  if (kind.spans_shards || kind.numel - (room - rest) <= shard) return rest;
  if (kind.numel - kind.longest_head <= shard) return room + shard - kind.longest_head;
  return kNowhere;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Word holds slack + 1, so that memory that was never written (0) means "not reachable".
template <typename Word>
int32_t fill(const std::vector<Kind>& kinds, int64_t size, int64_t shard, int64_t slack_at_start, int32_t* order) {
  const std::unique_ptr<Word[], Free> table(static_cast<Word*>(std::calloc(size, sizeof(Word))));
  if (!table) return -1;
  const auto num_kinds = static_cast<int32_t>(kinds.size());
  const Kind& inner = kinds[0];
  const Divisor by_shard(shard);
  std::vector<int64_t> digits(num_kinds, 0);
  int64_t placed = 0;  // elements of the tensors that the current row has placed
  table[0] = static_cast<Word>(slack_at_start + 1);

  for (int64_t row = 0; row < size; row += inner.count + 1) {
    for (digits[0] = 0; digits[0] <= inner.count; ++digits[0]) {
      const int64_t state = row + digits[0];
      if (table[state] == 0) continue;
      const int64_t slack = static_cast<int64_t>(table[state]) - 1;
      const int64_t end = placed + digits[0] * inner.numel + slack_at_start - slack;
      const int64_t room = shard - by_shard.remainder(end);
      for (int32_t i = 0; i < num_kinds; ++i) {
        const Kind& kind = kinds[i];
        if (digits[i] == kind.count) continue;
        const int64_t gap = gap_before(kind, room, shard);
        if (gap == kNowhere || gap > slack) continue;
        Word& next = table[state + kind.stride];
        const auto left = static_cast<Word>(slack - gap + 1);
        if (next < left) next = left;
      }
    }
    for (int32_t i = 1; i < num_kinds; ++i) {  // odometer over the rows
      if (digits[i] < kinds[i].count) {
        ++digits[i];
        placed += kinds[i].numel;
        break;
      }
      placed -= kinds[i].numel * kinds[i].count;
      digits[i] = 0;
    }
  }
  if (table[size - 1] == 0) return 0;

  int64_t state = size - 1, at = 0;
  placed = 0;
  for (int32_t i = 0; i < num_kinds; ++i) {
    digits[i] = kinds[i].count;
    at += digits[i];
    placed += kinds[i].numel * kinds[i].count;
  }
  while (state > 0) {
    int32_t i = 0;
    for (; i < num_kinds; ++i) {  // the first kind that explains the slack: the tie rule of both forms
      if (digits[i] == 0 || table[state - kinds[i].stride] == 0) continue;
      const int64_t before = static_cast<int64_t>(table[state - kinds[i].stride]) - 1;
      const int64_t end = placed - kinds[i].numel + slack_at_start - before;
      const int64_t gap = gap_before(kinds[i], shard - by_shard.remainder(end), shard);
      if (gap != kNowhere && before - gap + 1 == static_cast<int64_t>(table[state])) break;
    }
    order[--at] = i;
    state -= kinds[i].stride;
    placed -= kinds[i].numel;
    --digits[i];
  }
  return 1;
}

}  // namespace

// 1 and order[sum(counts)] (kinds in buffer order) when all tensors fit within `limit`, 0 when they do not, -1 when there
// is no memory for the table of prod(counts + 1) entries, -2 where numbers are not sound. Tensors are no more than `limit`
// elements in all.
extern "C" __attribute__((visibility("default"))) int32_t planner_best_order(
    int32_t num_kinds, const int64_t* numels, const int64_t* blocks, const int64_t* counts, int64_t shard, int64_t limit,
    int32_t* order) {
  constexpr int32_t kUnsound = -2;
  std::vector<Kind> kinds;
  int64_t size = 1, slack = limit;
  if (shard < 1 || limit < 0 || num_kinds < 1 || !numels || !blocks || !counts || !order) return kUnsound;
  for (int32_t i = 0; i < num_kinds; ++i) {
    int64_t numel;
    if (numels[i] < 0 || blocks[i] < 1 || counts[i] < 0 || __builtin_mul_overflow(numels[i], counts[i], &numel) || numel > slack)
      return kUnsound;
    const int64_t rest = shard % blocks[i];
    kinds.push_back({numels[i], blocks[i], counts[i], size, rest == 0, shard - rest, Divisor(blocks[i])});
    if (__builtin_mul_overflow(size, counts[i] + 1, &size)) return kUnsound;
    slack -= numel;
  }
  if (slack < std::numeric_limits<uint32_t>::max()) return fill<uint32_t>(kinds, size, shard, slack, order);
  return fill<uint64_t>(kinds, size, shard, slack, order);
}
