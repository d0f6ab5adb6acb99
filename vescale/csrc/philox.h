// Random fills as CUDA makes them: from the numbers of elements in the stream to their values.
//
// Plain C++ without includes: compiled by NVRTC for the device (vescale/rng/_cuda_engine.py), and for the host by
// philox.cpp, so that all of it but the launch is tested without a GPU. Facts from ATen's DistributionTemplates.h and
// curand's documentation; the bits are compared with the native op on the device before a kernel is used.
//
// A block of Philox has four words, for two or four elements. They lie a whole pass of all threads apart
// in the stream, or next to each other. A thread of ours makes each block once and writes all of its elements that the
// piece owns. Where elements of a block are passes apart, it takes four neighbouring blocks at once.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { kMaxDims = 6 };
enum Rule { kGridStride, kVectors, kQuads };
enum Transform { kUniform, kNormal, kLogNormal, kExponential, kCauchy, kBelow, kBelowParameter, kModulo, kFull };
enum Dtype { kFloat, kDouble, kHalf, kBFloat16, kByte, kInt8, kInt16, kInt32, kInt64 };

// Division by a number that the host knows: x / value == (high_product(x, multiplier) + x) >> shift for x < 2^31.
struct Divisor {
  u64 value;
  u32 multiplier, shift;
};

// What tells one compiled kernel from another: constants on the device.
struct Kind {
  int rule, lanes, width;              // lanes: elements of a block; width: of kVectors
  int transform, dtype, parameter_dtype;
  int narrow;                          // all numbers of elements fit into 31 bits
};

// One piece of a fill: a box of elements. Kept in step with Plan in _cuda_engine.py.
struct Plan {
  u64 seed, block;                     // of the generator: its key, and its offset in blocks
  u64 count;                           // units of work: for each run of the last dim, as many as `units`
  u64 stream;                          // the first element
  i64 local;                           // where it goes
  i64 a, b, c;                         // of the transform: doubles as their bits, or integers
  Divisor threads;                     // of the native launch
  Divisor units;                       // of the last dim
  Divisor sizes[kMaxDims], stream_strides[kMaxDims];
  i64 local_strides[kMaxDims];
  i64 dims;
  Kind kind;
};

struct Words {
  u32 w[4];
};

// The numbers of one block before the transform's last step: four floats, or two doubles.
struct Draws {
  float f[4];
  double d[2];
};

DEVICE double as_double(i64 bits) {
  union { i64 i; double d; } value;
  value.i = bits;
  return value.d;
}

DEVICE u64 double_bits(double x) {
  union { double d; u64 i; } value;
  value.d = x;
  return value.i;
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
DEVICE u32 to_bfloat16(float x) {
  u32 bits = float_bits(x);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

DEVICE float from_bfloat16(u32 x) { return bits_float(x << 16); }

DEVICE u32 to_half(float x) {
  u32 bits = float_bits(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (rest < 0x38800000u) {  // a subnormal half: let the float addition round
    float shifted = bits_float(rest) + 0.5f;
    return sign | (float_bits(shifted) - 0x3f000000u);
  }
  return sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13);
}

DEVICE float from_half(u32 x) {
  u32 sign = (x & 0x8000u) << 16, exponent = (x >> 10) & 31u, mantissa = x & 0x3ffu;
  if (exponent == 31u) return bits_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0u) {
    float value = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

DEVICE u32 high_product(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }

DEVICE u32 divide(u32 x, const Divisor& by) { return (high_product(x, by.multiplier) + x) >> by.shift; }

DEVICE u64 divide(u64 x, const Divisor& by) { return x / by.value; }

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), block `block` of subsequence `thread`.
DEVICE Words philox(u64 seed, u64 thread, u64 block) {
  COUNT_BLOCK;
  u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)thread, c3 = (u32)(thread >> 32);
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  UNROLL for (int round = 0; round < 10; ++round) {
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

// Box-Muller on a pair of words: the sine first.
DEVICE void normal_floats(u32 x, u32 y, float* out) {
  float radius = sqrtf(-2.0f * logf(uniform_float(x)));
  float angle = y * 1.46291807e-09f + 0.731459035e-09f, sine, cosine;  // 2^-32 * 2 pi, and half of it
  FAST_SINCOS(angle, &sine, &cosine);
  out[0] = sine * radius;
  out[1] = cosine * radius;
}

DEVICE void normal_doubles(const Words& words, double* out) {
  double u = uniform_double(words.w[0], words.w[1]);
  u64 z = (u64)words.w[2] ^ ((u64)words.w[3] << 21);
  double v = z * 2.2204460492503131e-16 + 1.1102230246251565e-16, sine, cosine;
  double radius = sqrt(-2.0 * log(u));
  SINCOSPI(v, &sine, &cosine);
  out[0] = sine * radius;
  out[1] = cosine * radius;
}

DEVICE Draws draws_of(const Kind& kind, const Words& words) {
  Draws draws = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0, 0.0}};
  bool normal = kind.transform == kNormal || kind.transform == kLogNormal;
  if (kind.transform == kModulo || kind.transform == kFull) return draws;
  if (kind.lanes == 4 || kind.rule != kGridStride) {
    if (normal) {
      normal_floats(words.w[0], words.w[1], draws.f);
      normal_floats(words.w[2], words.w[3], draws.f + 2);
    } else {
      UNROLL for (int lane = 0; lane < 4; ++lane) draws.f[lane] = uniform_float(words.w[lane]);
    }
  } else if (normal) {
    normal_doubles(words, draws.d);
  } else {
    draws.d[0] = uniform_double(words.w[0], words.w[1]);
    draws.d[1] = uniform_double(words.w[2], words.w[3]);
  }
  return draws;
}

DEVICE u64 float_as(float x, int dtype) {
  switch (dtype) {
    case kDouble: return double_bits((double)x);
    case kHalf: return to_half(x);
    case kBFloat16: return to_bfloat16(x);
    default: return float_bits(x);
  }
}

DEVICE u64 integer_as(i64 x, int dtype) {
  switch (dtype) {
    case kFloat: case kHalf: case kBFloat16: return float_as((float)x, dtype);
    case kDouble: return double_bits((double)x);
    default: return (u64)x;  // the store keeps the lowest bytes
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

// The value of one lane of a block, as the bits of its dtype.
DEVICE u64 value_of(
    const Plan& plan, const Kind& kind, const Words& words, const Draws& draws, int lane, const void* parameter, i64 at) {
  int dtype = kind.dtype;
  bool wide = kind.rule == kGridStride && kind.lanes == 2;  // two numbers of 64 bits in a block
  u32 low = wide ? words.w[2 * lane & 3] : words.w[lane], high = words.w[(2 * lane + 1) & 3];
  double d = draws.d[lane & 1], a = as_double(plan.a), b = as_double(plan.b), c = as_double(plan.c);
  float f = draws.f[lane];
  switch (kind.transform) {
    case kUniform: {
      if (wide) {
        double value = d * c + a;
        return double_bits(value == b ? a : value);
      }
      float value = rounded(f * (float)c + (float)a, dtype);
      return float_as(value == (float)b ? (float)a : value, dtype);
    }
    case kNormal: return wide ? double_bits(d * b + a) : float_as(f * (float)b + (float)a, dtype);
    case kLogNormal: return wide ? double_bits(exp(d * b + a)) : float_as(FAST_EXP(f * (float)b + (float)a), dtype);
    case kExponential: {
      if (wide) {
        double logarithm = d >= 1.0 - 1.1102230246251565e-16 ? -1.1102230246251565e-16 : log(d);
        return double_bits(-1.0 / a * logarithm);
      }
      float logarithm = f >= 1.0f - 5.9604644775390625e-8f ? -5.9604644775390625e-8f : FAST_LOG(f);
      return float_as(-1.0f / (float)a * logarithm, dtype);
    }
    case kCauchy: {
      if (wide) return double_bits(a + b * tan(3.14159265358979323846 * (d - 0.5)));
      const float least = 1.1920928955078125e-7f, most = 1.0f - 1.1920928955078125e-7f;
      float inside = f > most ? most : f;
      inside = inside < least ? least : inside;
      return float_as((float)a + (float)b * FAST_TAN(3.14159265358979323846f * (inside - 0.5f)), dtype);
    }
    case kBelow: return integer_as((wide ? d : (double)f) < a, dtype);
    case kBelowParameter: {
      double p = parameter_at(parameter, at, kind.parameter_dtype);
      if (dtype != kDouble) p = (double)(float)p;
      return integer_as((double)f <= p, dtype);
    }
    case kModulo: {
      if (wide) return integer_as((i64)(((u64)low << 32 | high) % (u64)plan.b) + plan.a, dtype);
      return integer_as((i64)(low % (u32)plan.b) + plan.a, dtype);
    }
    default: return integer_as((i64)((u64)low << 32 | high), dtype);
  }
}

DEVICE int item_bytes(int dtype) {
  switch (dtype) {
    case kByte: case kInt8: return 1;
    case kHalf: case kBFloat16: case kInt16: return 2;
    case kFloat: case kInt32: return 4;
    default: return 8;
  }
}

DEVICE void store(void* out, i64 at, int bytes, u64 value) {
  switch (bytes) {
    case 1: ((unsigned char*)out)[at] = (unsigned char)value; break;
    case 2: ((unsigned short*)out)[at] = (unsigned short)value; break;
    case 4: ((u32*)out)[at] = (u32)value; break;
    default: ((u64*)out)[at] = value;
  }
}

struct alignas(16) Sixteen {
  u32 w[4];
};

// Four neighbours, `stride` apart: in one store where they are adjacent and aligned.
DEVICE void store_four(void* out, i64 at, i64 stride, int bytes, const u64* values) {
  u64 address = (u64)out + (u64)(at * bytes);
  if (stride == 1 && bytes < 8 && (address & (u64)(4 * bytes - 1)) == 0) {
    if (bytes == 1) {
      u32 packed = 0;
      UNROLL for (int i = 0; i < 4; ++i) packed |= (u32)(values[i] & 0xffu) << 8 * i;
      *(u32*)address = packed;
    } else if (bytes == 2) {
      u64 packed = 0;
      UNROLL for (int i = 0; i < 4; ++i) packed |= (values[i] & 0xffffu) << 16 * i;
      *(u64*)address = packed;
    } else {
      Sixteen packed = {{(u32)values[0], (u32)values[1], (u32)values[2], (u32)values[3]}};
      *(Sixteen*)address = packed;
    }
    return;
  }
  UNROLL for (int i = 0; i < 4; ++i) store(out, at + i * stride, bytes, values[i]);
}

// Where the piece puts an element of the stream, or -1 when the piece does not own it. `left`: how many elements follow it
// in its run of the last dim. The strides are those of a row-major box inside of a row-major whole, the last one 1: then
// only an element of the box has every place within its size.
template <typename Index>
DEVICE i64 place_of(const Plan& plan, Index element, Index* left) {
  if (element < (Index)plan.stream) return -1;
  Index rest = element - (Index)plan.stream;
  i64 at = plan.local;
  int last = (int)plan.dims - 1;
  for (int dim = 0; dim < last; ++dim) {
    Index place = divide(rest, plan.stream_strides[dim]);
    if (place >= (Index)plan.sizes[dim].value) return -1;
    rest -= place * (Index)plan.stream_strides[dim].value;
    at += (i64)place * plan.local_strides[dim];
  }
  if (rest >= (Index)plan.sizes[last].value) return -1;
  *left = (Index)plan.sizes[last].value - 1 - rest;
  return at + (i64)rest * plan.local_strides[last];
}

// Elements of a block that are a pass of all threads apart: the first one that the piece owns makes the others.
template <typename Index>
DEVICE void fill_one(void* out, const void* parameter, const Plan& plan, const Kind& kind, Index element) {
  Index threads = (Index)plan.threads.value, left;
  Index number = divide(element, plan.threads);
  int lane = (int)(number & (Index)(kind.lanes - 1));
  Index first = element - (Index)lane * threads;
  i64 at[4] = {-1, -1, -1, -1};
  UNROLL for (int k = 0; k < 4; ++k) {
    if (k >= kind.lanes) continue;
    at[k] = place_of(plan, (Index)(first + (Index)k * threads), &left);
    if (k < lane && at[k] >= 0) return;
  }
  Words words = philox(plan.seed, element - number * threads, plan.block + number / (Index)kind.lanes);
  Draws draws = draws_of(kind, words);
  UNROLL for (int k = 0; k < 4; ++k)
    if (at[k] >= 0) store(out, at[k], item_bytes(kind.dtype), value_of(plan, kind, words, draws, k, parameter, at[k]));
}

// The same for `num` neighbours in a run: four of them together, unless a border of the piece or of a pass is among them.
template <typename Index>
DEVICE void fill_passes(void* out, const void* parameter, const Plan& plan, const Kind& kind, Index element, int num) {
  Index threads = (Index)plan.threads.value, left = 0;
  Index number = divide(element, plan.threads), thread = element - number * threads;
  int lane = (int)(number & (Index)(kind.lanes - 1));
  Index first = element - (Index)lane * threads;
  bool together = num == 4 && thread + 3 < threads;
  i64 at[4] = {-1, -1, -1, -1};
  UNROLL for (int k = 0; k < 4; ++k) {
    if (!together || k >= kind.lanes) continue;
    at[k] = place_of(plan, (Index)(first + (Index)k * threads), &left);
    // A run of four or more cannot lie between two elements that are not owned.
    if (at[k] >= 0 ? left < 3 : place_of(plan, (Index)(first + (Index)k * threads + 3), &left) >= 0) together = false;
    if (together && k < lane && at[k] >= 0) return;
  }
  if (!together) {
    for (int i = 0; i < num; ++i) fill_one(out, parameter, plan, kind, (Index)(element + (Index)i));
    return;
  }
  int bytes = item_bytes(kind.dtype);
  i64 stride = plan.local_strides[plan.dims - 1];
  u64 values[4][4];
  UNROLL for (int i = 0; i < 4; ++i) {
    Words words = philox(plan.seed, thread + (Index)i, plan.block + number / (Index)kind.lanes);
    Draws draws = draws_of(kind, words);
    UNROLL for (int k = 0; k < 4; ++k)
      values[k][i] = at[k] < 0 ? 0 : value_of(plan, kind, words, draws, k, parameter, at[k] + i * stride);
  }
  UNROLL for (int k = 0; k < 4; ++k)
    if (at[k] >= 0) store_four(out, at[k], stride, bytes, values[k]);
}

// Elements of a block that lie next to each other: those of one block that are in the run from `start` on.
template <typename Index>
DEVICE void fill_neighbours(
    void* out, const void* parameter, const Plan& plan, const Kind& kind, Index start, i64 local, Index unit) {
  Index lanes = (Index)kind.lanes, first = start - start % lanes + unit * lanes;
  Index size = (Index)plan.sizes[plan.dims - 1].value, thread, block = 0, within = 0;
  if (first >= start + size) return;
  if (kind.rule == kVectors) {
    Index width = (Index)kind.width, group = first / width, number = divide(group, plan.threads);
    within = first % width;
    thread = group - number * (Index)plan.threads.value;
    block = (width > 4 ? number * (width / 4) : number) + within / 4;
  } else {
    thread = first / 4;
  }
  Words words = philox(plan.seed, thread, plan.block + block);
  Draws draws = draws_of(kind, words);
  i64 stride = plan.local_strides[plan.dims - 1], at = local + ((i64)first - (i64)start) * stride;
  bool whole = lanes == 4 && first >= start && first + 4 <= start + size;
  int bytes = item_bytes(kind.dtype);
  u64 values[4];
  UNROLL for (int k = 0; k < 4; ++k) {
    bool owned = k < kind.lanes && first + (Index)k >= start && first + (Index)k < start + size;
    values[k] = owned ? value_of(plan, kind, words, draws, k, parameter, at + k * stride) : 0;
    if (owned && !whole) store(out, at + k * stride, bytes, values[k]);
  }
  if (whole) store_four(out, at, stride, bytes, values);
}

// Unit `index` of the piece that `plan` describes. `Index`: u32 where all numbers of elements fit (narrow), else u64.
template <typename Index>
DEVICE void fill_unit(void* out, const void* parameter, const Plan& plan, const Kind& kind, Index index) {
  int last = (int)plan.dims - 1;
  Index rest = divide(index, plan.units), unit = index - rest * (Index)plan.units.value;
  Index element = (Index)plan.stream;
  i64 local = plan.local;
  for (int dim = last - 1; dim >= 0; --dim) {
    Index place = rest;
    if (dim > 0) {  // nothing is left over in the first dim
      rest = divide(rest, plan.sizes[dim]);
      place -= rest * (Index)plan.sizes[dim].value;
    }
    element += place * (Index)plan.stream_strides[dim].value;
    local += (i64)place * plan.local_strides[dim];
  }
  if (kind.rule != kGridStride) {
    fill_neighbours(out, parameter, plan, kind, element, local, unit);
    return;
  }
  Index size = (Index)plan.sizes[last].value, done = 4 * unit;
  fill_passes(out, parameter, plan, kind, (Index)(element + done), size - done < 4 ? (int)(size - done) : 4);
}
