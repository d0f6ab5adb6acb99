// The functions of mt19937.h as plain C functions; docs are there.

#include "mt19937.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void mt19937_twist(uint32_t* x, uint64_t num_blocks) {
  if (x) mt19937::advance_by_twists(x, num_blocks);
}

EXPORT void mt19937_polynomial(uint64_t distance, const int32_t* exponents, int32_t num_exponents, uint64_t* residue) {
  if (exponents && residue) mt19937::power_of_t(distance, exponents, num_exponents, residue);
}

EXPORT void mt19937_apply(const uint64_t* residue, uint32_t* x) {
  if (residue && x) mt19937::advance_by_residue(residue, x);
}
