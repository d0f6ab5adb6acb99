// The host build of philox.h: the kernel's arithmetic, an element at a time, for tests on machines without a GPU.

#include <math.h>

#define DEVICE static inline
#define FAST_SINCOS(angle, sine, cosine) (*(sine) = sinf(angle), *(cosine) = cosf(angle))
#define SINCOSPI(x, sine, cosine) (*(sine) = sin(3.14159265358979323846 * (x)), *(cosine) = cos(3.14159265358979323846 * (x)))

#include "philox.h"

extern "C" __attribute__((visibility("default"))) void philox_fill(void* out, const void* parameter, const i64* plan) {
  for (i64 index = 0; index < plan[kCount]; ++index) {
    if (plan[kNarrow])
      fill_element(out, parameter, plan, (u32)index);
    else
      fill_element(out, parameter, plan, (u64)index);
  }
}
