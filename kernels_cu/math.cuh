// Constants, elementary functions of both sum types, and reductions in a warp.
#pragma once
#include "types.cuh"

using Accumulation = decltype(widen(Config::dtype{}));  // float, or double for float64

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr double EXACT_LOG2_E = 1.4426950408889634;
constexpr float LOG2_E = float(EXACT_LOG2_E), LN_2 = 0.6931471805599453f;

template <class Number = Accumulation>
__device__ __forceinline__ Number negative_infinity() {
  return Number(__uint_as_float(0xff800000u));
}

// Compilers may not fold x - x to 0: it is NaN for both infinities and for NaN.
template <class Number>
__device__ __forceinline__ bool is_finite(Number x) {
  return x - x == Number(0);
}

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// a / b of numbers that are not negative: 64 bits cost five times as much, so only where they are used.
__device__ __forceinline__ long long quotient(long long a, long long b) {
  return ((a | b) >> 32) == 0 ? (long long)((unsigned)a / (unsigned)b) : a / b;
}

// The compiler's own exp and log: full float32 accuracy (2 ulp), no fast-math variant.
__device__ __forceinline__ float natural_exp(float x) { return expf(x); }
__device__ __forceinline__ double natural_exp(double x) { return exp(x); }
__device__ __forceinline__ float natural_log(float x) { return logf(x); }
__device__ __forceinline__ double natural_log(double x) { return log(x); }

// NaN loses against a number.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ long long larger(long long a, long long b) { return a > b ? a : b; }

// Over WIDTH neighbouring lanes (a power of two); every lane gets the result. The order of the sum
// is fixed, so it is bit-reproducible.
template <int WIDTH, class Number>
__device__ __forceinline__ Number lanes_max(Number x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    x = larger(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}
template <int WIDTH, class Number>
__device__ __forceinline__ Number lanes_sum(Number x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}
// The sum over the lanes before this one.
__device__ __forceinline__ long long lanes_before(long long x) {
  long long sum = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const long long other = __shfl_up_sync(ALL_LANES, sum, offset);
    if (threadIdx.x % 32 >= offset) sum += other;
  }
  return sum - x;
}
