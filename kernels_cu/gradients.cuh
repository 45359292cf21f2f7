// Gradients of the parameters of a score: sums of ds times a derivative, over the pairs that read
// the same element. They are made while dq is, and stored by a kernel of their own.
//
// Elements are added by atomics in the type of the sums: quick, but in another order in each run.
// Where the caller asks for the same bits, pairs are added as integers, whose sum has no order: a
// first run finds the greatest value of each parameter, which says how far 64 bits reach.
#pragma once
#include "math.cuh"
#include "params.cuh"

enum ParamMode { ADD, GREATEST, FIXED };

__device__ __forceinline__ void atomic_add(float* at, float value) { atomicAdd(at, value); }
__device__ __forceinline__ void atomic_add(double* at, double value) { atomicAdd(at, value); }

// The step of the fixed-point numbers of one parameter is 2^step: as many of its greatest value as
// there are pairs stay below 2^62.
__device__ __forceinline__ int fixed_step(const Params& p, int param) {
  const unsigned long long greatest = ((const unsigned long long*)p.maxima)[param];
  const int exponent = int(greatest >> 52) - 1022;  // the greatest is below 2^exponent
  const long long pairs = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k;
  return exponent + (64 - __clzll(pairs)) - 62;
}

// What the pairs of a thread add to the parameters.
template <int MODE>
class ParamSums {
 public:
  // A scale that the type of the sums does not hold leaves x wrong: then all gradients are NaN.
  __device__ ParamSums(const Params& p, Accumulation fault) : p_(p), fault_(fault) {
    clear();
  }

  __device__ __forceinline__ void add_pair(
      int b, int h, long long row, long long column, Accumulation x, Accumulation ds) {
    score_params(p_, b, h, row, column, x, ds + fault_, *this);
  }

  // Called by the printed score_params. An element that is the same for all pairs of a head waits
  // in a register.
  template <int LOAD, int PARAM, bool UNIFORM>
  __device__ __forceinline__ void add(long long index, Accumulation value) {
    if (UNIFORM) {
      sum_[LOAD] += value;
      index_[LOAD] = index;
      param_[LOAD] = PARAM;
    } else {
      put(PARAM, index, value);
    }
  }

  // Adds what waits; by whole warps, before the pairs of another head and at the end of a tile.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int load = 0; load < PARAM_LOADS; ++load) {
      const Accumulation sum = lanes_sum<32>(sum_[load]);
      const long long index = lanes_max<32>(index_[load]);
      const long long param = lanes_max<32>((long long)param_[load]);
      if (threadIdx.x % 32 == 0 && index >= 0) put(int(param), index, sum);
    }
    clear();
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int load = 0; load < PARAM_LOADS; ++load) {
      sum_[load] = 0;
      index_[load] = -1;
      param_[load] = 0;
    }
  }

  __device__ __forceinline__ void put(int param, long long index, Accumulation value) {
    if (MODE == ADD) {
      atomic_add((Accumulation*)p_.sums + index, value);
    } else if (MODE == GREATEST) {
      // the bits of doubles that are not negative are ordered as the numbers; NaN is the greatest
      const double size = value < 0 ? -value : value;
      const unsigned long long bits = __double_as_longlong(size);
      atomicMax((unsigned long long*)p_.maxima + param, bits & 0x7fffffffffffffffull);
    } else {
      const double steps = ldexp(double(value), -fixed_step(p_, param));
      const unsigned long long count = (unsigned long long)(long long)rint(steps);
      atomicAdd((unsigned long long*)p_.sums + index, count);
    }
  }

  const Params& p_;
  Accumulation fault_, sum_[PARAM_LOADS];
  long long index_[PARAM_LOADS];
  int param_[PARAM_LOADS];
};

// Zeroes the sums and the greatest values.
template <class Number>
__device__ void clear_sums(const Params& p, long long elements) {
  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long at = thread; at < elements; at += threads) ((Number*)p.sums)[at] = 0;
  if (p.maxima != 0)
    for (long long at = thread; at < PARAMS; at += threads) ((long long*)p.maxima)[at] = 0;
}

// The sums of one parameter, from `base` on, to the gradient that the caller gets (C order).
template <bool IS_FIXED, class Element>
__device__ void store_param(
    const Params& p, int param, long long gradient, long long base, long long elements) {
  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long at = thread; at < elements; at += threads) {
    double value;
    if (IS_FIXED) {
      const double greatest = __longlong_as_double(((const long long*)p.maxima)[param]);
      const long long count = ((const long long*)p.sums)[base + at];
      value = is_finite(greatest) ? ldexp(double(count), fixed_step(p, param)) : greatest - greatest;
    } else {
      value = ((const Accumulation*)p.sums)[base + at];
    }
    store_element((Element*)gradient + at, value);
  }
}
