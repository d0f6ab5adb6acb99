// The layout planner's table over multisets of tensors: for every choice of "how many tensors of each kind are already
// placed", the smallest position at which they can end. The meaning of every step is in vescale/buffer/_table.py, whose
// numpy form gives the same table; the caller guarantees that every position fits in 62 bits.

#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Floor division by a fixed positive divisor: one multiplication and a correction instead of a hardware division.
class Divisor {
 public:
  explicit Divisor(int64_t value) : value_(value), reciprocal_(~uint64_t{0} / static_cast<uint64_t>(value)) {}

  int64_t remainder(int64_t number) const {
    const auto quotient =
        static_cast<int64_t>((static_cast<unsigned __int128>(number) * reciprocal_) >> 64);  // at most 2 too small
    int64_t rest = number - quotient * value_;
    while (rest >= value_) rest -= value_;
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
  int64_t stride;       // of its digit in the table
  bool spans_shards;    // block divides the shard: the tensor may contain whole shards
  int64_t longest_head; // largest multiple of block in one shard
  Divisor by_block;
};

// Smallest legal start at or after `end`, or kNever. `room` = elements from `end` to the next shard boundary.
inline int64_t earliest_start(const Kind& kind, int64_t end, int64_t room, int64_t shard) {
  if (kind.numel <= room) return end;
  const int64_t head = room - kind.by_block.remainder(room);
  if (kind.spans_shards || kind.numel - head <= shard) return end + room - head;
  if (kind.numel - kind.longest_head <= shard) return end + room + shard - kind.longest_head;
  return kNever;
}

}  // namespace

#define VESCALE_EXPORT extern "C" __attribute__((visibility("default")))

// Fills ends[prod(count + 1)] and, when all tensors fit within `limit`, order[sum(count)] with the kinds in buffer order.
// Returns 1 when they fit, 0 when they do not.
VESCALE_EXPORT int32_t planner_fill_table(int32_t num_kinds, const int64_t* numels, const int64_t* blocks,
                                          const int64_t* counts, int64_t shard, int64_t limit, int64_t* ends,
                                          int32_t* order) {
  std::vector<Kind> kinds;
  int64_t size = 1, unplaced = 0, num_tensors = 0;
  for (int32_t i = 0; i < num_kinds; ++i) {
    const Divisor by_block(blocks[i]);
    kinds.push_back({numels[i], blocks[i], counts[i], size, shard % blocks[i] == 0,
                     shard - shard % blocks[i], by_block});
    size *= counts[i] + 1;
    unplaced += numels[i] * counts[i];
    num_tensors += counts[i];
  }
  for (int64_t i = 0; i < size; ++i) ends[i] = kNever;
  ends[0] = 0;

  const Divisor by_shard(shard);
  std::vector<int64_t> digits(num_kinds, 0);
  for (int64_t state = 0; state < size; ++state) {
    const int64_t end = ends[state];
    if (end != kNever) {
      if (end + unplaced > limit) {
        ends[state] = kNever;
      } else {
        const int64_t room = shard - by_shard.remainder(end);
        for (int32_t i = 0; i < num_kinds; ++i) {
          const Kind& kind = kinds[i];
          if (digits[i] == kind.count) continue;
          const int64_t start = earliest_start(kind, end, room, shard);
          if (start == kNever) continue;
          int64_t& next = ends[state + kind.stride];
          if (start + kind.numel < next) next = start + kind.numel;
        }
      }
    }
    for (int32_t i = 0; i < num_kinds; ++i) {  // odometer
      if (digits[i] < kinds[i].count) {
        ++digits[i];
        unplaced -= kinds[i].numel;
        break;
      }
      unplaced += kinds[i].numel * kinds[i].count;
      digits[i] = 0;
    }
  }
  if (ends[size - 1] == kNever) return 0;

  int64_t state = size - 1;
  for (int32_t i = 0; i < num_kinds; ++i) digits[i] = counts[i];
  for (int64_t at = num_tensors - 1; at >= 0; --at) {
    for (int32_t i = 0; i < num_kinds; ++i) {  // the first kind that explains the end: the tie rule of both forms
      if (digits[i] == 0) continue;
      const int64_t before = ends[state - kinds[i].stride];
      if (before == kNever) continue;
      const int64_t start = earliest_start(kinds[i], before, shard - by_shard.remainder(before), shard);
      if (start != kNever && start + kinds[i].numel == ends[state]) {
        order[at] = i;
        state -= kinds[i].stride;
        --digits[i];
        break;
      }
    }
  }
  return 1;
}
