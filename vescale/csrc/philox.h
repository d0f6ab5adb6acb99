// One element of a random fill as CUDA makes it: from the element's number in the stream to its value.
//
// Plain C++ without includes: compiled by NVRTC for the device (vescale/rng/_cuda_kernel.py), and for the host by
// philox.cpp, so that the arithmetic is tested without a GPU. Facts from ATen's DistributionTemplates.h and curand's
// documentation; the bits are compared with the native op on the device before a kernel is used.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What the host tells the kernel: 64-bit integers, doubles as their bits. Kept in step with _cuda_kernel.py.
enum Plan {
  kSeed, kBlock, kCount, kRule, kThreads, kWidth, kTransform, kDtype, kParameterDtype, kA, kB, kC,
  kStream, kLocal, kDims, kNarrow, kSizes, kStreamStrides = kSizes + 6, kLocalStrides = kStreamStrides + 6,
  kPlanLength = kLocalStrides + 6
};
enum Rule { kGridStride, kVectors, kQuads };
enum Transform { kUniform, kNormal, kBelow, kBelowParameter, kModulo, kFull };
enum Dtype { kFloat, kDouble, kHalf, kBFloat16, kByte, kInt8, kInt16, kInt32, kInt64 };

struct Words {
  u32 w[4];
};

DEVICE double as_double(i64 bits) {
  union { i64 i; double d; } value;
  value.i = bits;
  return value.d;
}

DEVICE u32 float_bits(float x) {
  union { float f; u32 i; } value;
  value.f = x;
  return value.i;
}

DEVICE float bits_float(u32 x) {
  union { u32 i; float f; } value;
  value.i = x;
  return value.f;
}

// Round to nearest, ties to even, as every device conversion; no NaN reaches these.
DEVICE unsigned short to_bfloat16(float x) {
  u32 bits = float_bits(x);
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

DEVICE float from_bfloat16(unsigned short x) { return bits_float((u32)x << 16); }

DEVICE unsigned short to_half(float x) {
  u32 bits = float_bits(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // rounds to infinity
  if (rest < 0x38800000u) {  // a subnormal half: let the float addition round
    float shifted = bits_float(rest) + 0.5f;
    return (unsigned short)(sign | (float_bits(shifted) - 0x3f000000u));
  }
  return (unsigned short)(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

DEVICE float from_half(unsigned short x) {
  u32 sign = ((u32)x & 0x8000u) << 16, exponent = (x >> 10) & 31u, mantissa = x & 0x3ffu;
  if (exponent == 31u) return bits_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0u) {
    float value = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

DEVICE u32 high_product(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), block `block` of subsequence `thread`.
DEVICE Words philox(u64 seed, u64 thread, u64 block) {
  u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)thread, c3 = (u32)(thread >> 32);
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    u32 high0 = high_product(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = high_product(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  Words words = {{c0, c1, c2, c3}};
  return words;
}

// (0, 1], from 32 bits and from 53.
DEVICE float uniform_float(u32 x) { return x * 2.3283064e-10f + 1.1641532e-10f; }

DEVICE double uniform_double(u32 x, u32 y) {
  u64 z = (u64)x ^ ((u64)y << 21);
  return z * 1.1102230246251565e-16 + 5.5511151231257827e-17;
}

// One of the two normals of a pair of words (Box-Muller): the sine first.
DEVICE float normal_float(u32 x, u32 y, int which) {
  float radius = sqrtf(-2.0f * logf(uniform_float(x)));
  float angle = y * 1.46291807e-09f + 0.731459035e-09f, sine, cosine;  // 2^-32 * 2 pi, and half of it
  FAST_SINCOS(angle, &sine, &cosine);
  return (which ? cosine : sine) * radius;
}

DEVICE double normal_double(Words words, int which) {
  double u = uniform_double(words.w[0], words.w[1]);
  u64 z = (u64)words.w[2] ^ ((u64)words.w[3] << 21);
  double v = z * 2.2204460492503131e-16 + 1.1102230246251565e-16, sine, cosine;
  double radius = sqrt(-2.0 * log(u));
  SINCOSPI(v, &sine, &cosine);
  return (which ? cosine : sine) * radius;
}

DEVICE void store_float(void* out, i64 at, int dtype, float x) {
  switch (dtype) {
    case kFloat: ((float*)out)[at] = x; break;
    case kDouble: ((double*)out)[at] = x; break;
    case kHalf: ((unsigned short*)out)[at] = to_half(x); break;
    case kBFloat16: ((unsigned short*)out)[at] = to_bfloat16(x); break;
  }
}

DEVICE void store_integer(void* out, i64 at, int dtype, i64 x) {
  switch (dtype) {
    case kByte: ((unsigned char*)out)[at] = (unsigned char)x; break;
    case kInt8: ((signed char*)out)[at] = (signed char)x; break;
    case kInt16: ((short*)out)[at] = (short)x; break;
    case kInt32: ((int*)out)[at] = (int)x; break;
    case kInt64: ((i64*)out)[at] = x; break;
    case kDouble: ((double*)out)[at] = (double)x; break;
    default: store_float(out, at, dtype, (float)x);
  }
}

DEVICE float rounded(float x, int dtype) {
  if (dtype == kHalf) return from_half(to_half(x));
  if (dtype == kBFloat16) return from_bfloat16(to_bfloat16(x));
  return x;
}

DEVICE double parameter_at(const void* parameter, i64 at, int dtype) {
  switch (dtype) {
    case kFloat: return ((const float*)parameter)[at];
    case kDouble: return ((const double*)parameter)[at];
    case kHalf: return from_half(((const unsigned short*)parameter)[at]);
    default: return from_bfloat16(((const unsigned short*)parameter)[at]);
  }
}

// Element `index` of the piece that `plan` describes. `Index`: u32 where all numbers of elements fit (kNarrow; a 64-bit
// division costs a GPU several times as much), else u64.
template <typename Index>
DEVICE void fill_element(void* out, const void* parameter, const i64* plan, Index index) {
  i64 at = plan[kLocal];
  Index element = (Index)plan[kStream], rest = index;
  for (int dim = (int)plan[kDims] - 1; dim >= 0; --dim) {
    Index size = (Index)plan[kSizes + dim], place = rest;
    if (dim > 0) {  // nothing is left over in the first dim
      rest /= size;
      place -= rest * size;
    }
    element += place * (Index)plan[kStreamStrides + dim];
    at += (i64)place * plan[kLocalStrides + dim];
  }
  Index threads = (Index)plan[kThreads], width = (Index)plan[kWidth], thread, block;
  int lane;
  if (plan[kRule] == kGridStride) {
    Index number = element / threads;
    thread = element - number * threads;
    block = width == 4 ? number / 4 : number / 2;
    lane = (int)(number & (width - 1));
  } else if (plan[kRule] == kVectors) {
    Index group = element / width, place = element % width, number = group / threads;
    thread = group - number * threads;
    block = number * (width > 4 ? width / 4 : 1) + place / 4;
    lane = (int)(place % 4);
  } else {
    thread = element / 4;
    block = 0;
    lane = (int)(element % 4);
  }
  Words words = philox((u64)plan[kSeed], (u64)thread, (u64)plan[kBlock] + block);
  int dtype = (int)plan[kDtype];
  bool wide = plan[kRule] == kGridStride && width == 2;  // two numbers of 64 bits in a block
  u32 low = words.w[wide ? 2 * lane : lane], high = words.w[wide ? 2 * lane + 1 : 0];
  switch (plan[kTransform]) {
    case kUniform: {
      if (wide) {
        double from = as_double(plan[kA]), to = as_double(plan[kB]);
        double value = uniform_double(low, high) * as_double(plan[kC]) + from;
        ((double*)out)[at] = value == to ? from : value;
      } else {
        float from = (float)as_double(plan[kA]), to = (float)as_double(plan[kB]);
        float value = rounded(uniform_float(low) * (float)as_double(plan[kC]) + from, dtype);
        store_float(out, at, dtype, value == to ? from : value);
      }
      break;
    }
    case kNormal: {
      if (wide) {
        ((double*)out)[at] = normal_double(words, lane) * as_double(plan[kB]) + as_double(plan[kA]);
      } else {
        float value = normal_float(words.w[lane & 2], words.w[(lane & 2) + 1], lane & 1);
        store_float(out, at, dtype, value * (float)as_double(plan[kB]) + (float)as_double(plan[kA]));
      }
      break;
    }
    case kBelow: {
      double value = wide ? uniform_double(low, high) : (double)uniform_float(low);
      store_integer(out, at, dtype, value < as_double(plan[kA]));
      break;
    }
    case kBelowParameter: {
      double p = parameter_at(parameter, at, (int)plan[kParameterDtype]);
      if (dtype != kDouble) p = (double)(float)p;
      store_integer(out, at, dtype, (double)uniform_float(low) <= p);
      break;
    }
    case kModulo: {
      u64 value = wide ? ((u64)low << 32 | high) : (u64)low;
      store_integer(out, at, dtype, (i64)(value % (u64)plan[kB]) + plan[kA]);
      break;
    }
    case kFull: store_integer(out, at, dtype, (i64)((u64)low << 32 | high)); break;
  }
}
