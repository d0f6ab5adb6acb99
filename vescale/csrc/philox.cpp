// The host build of philox.h: the kernel's arithmetic, a unit of work at a time, for tests on machines without a GPU.

#include <math.h>

static unsigned long long blocks_made = 0;

#define DEVICE static inline
#define COUNT_BLOCK ++blocks_made
#define UNROLL
#define FAST_LOG logf
#define FAST_EXP expf
#define FAST_TAN tanf
#define FAST_SINCOS(angle, sine, cosine) (*(sine) = sinf(angle), *(cosine) = cosf(angle))
#define SINCOSPI(x, sine, cosine) (*(sine) = sin(3.14159265358979323846 * (x)), *(cosine) = cos(3.14159265358979323846 * (x)))

#include "philox.h"

extern "C" __attribute__((visibility("default"))) void philox_fill(void* out, const void* parameter, const Plan* plan) {
  if (!out || !plan) return;
  // The last unit first, so that no element is right only because a later unit mends it: on a device there is no order.
  for (u64 index = plan->count; index-- > 0;) {
    if (plan->kind.narrow)
      fill_unit(out, parameter, *plan, plan->kind, (u32)index);
    else
      fill_unit(out, parameter, *plan, plan->kind, index);
  }
}

extern "C" __attribute__((visibility("default"))) u64 philox_plan_bytes() { return sizeof(Plan); }

// How many blocks of Philox were made since the last call.
extern "C" __attribute__((visibility("default"))) u64 philox_blocks_made() {
  u64 made = blocks_made;
  blocks_made = 0;
  return made;
}

// 16 bits for each element of `count` runs (first element, number of elements), at their indices: vescale/rng/_stream_spans.py.
// Returns 0, and writes nothing, where the runs have another number of elements than `numel`.
extern "C" __attribute__((visibility("default"))) int philox_indexed_bits(
    u64 seed, u64 subsequence, i64 count, const i64* runs, i64 numel, unsigned short* out) {
  if (count < 0 || (count > 0 && !runs) || (numel > 0 && !out)) return 0;
  for (i64 run = 0; run < count; ++run) {
    if (runs[2 * run] < 0 || runs[2 * run + 1] < 0 || runs[2 * run + 1] > numel) return 0;
    numel -= runs[2 * run + 1];
  }
  if (numel != 0) return 0;
  for (i64 run = 0; run < count; ++run) {
    const u64 stop = (u64)(runs[2 * run] + runs[2 * run + 1]);
    for (u64 element = (u64)runs[2 * run]; element < stop;) {
      const Words words = philox(seed, subsequence, element / 8);
      for (u64 lane = element % 8; lane < 8 && element < stop; ++lane, ++element)
        *out++ = (unsigned short)(words.w[lane / 2] >> (lane % 2 * 16));
    }
  }
  return 1;
}
