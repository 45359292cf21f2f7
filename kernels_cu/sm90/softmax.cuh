// The online softmax in the registers of a warp. A thread holds two rows of a tile (fragments.cuh).
#pragma once
#include "../softmax.cuh"
#include "fragments.cuh"

// The softmax of a warp's 16 rows, two of them in each thread, in units of log2. A row's sum is
// that of this thread's columns.
struct Softmax {
  RowState<float, Binary> row[2];
  float rescale[2];  // what the latest scores ask of earlier sums
  bool has_rescale;

  // m = max(m, rowmax S);  P = exp2(S c - m), in place;  l = l exp2(m_old - m) + rowsum P
  template <int N>
  __device__ __forceinline__ void operator()(float (&s)[N], float c) {
    constexpr int CHAINS = N >= 64 ? 8 : 4;
    float greatest[2], chain[CHAINS];  // several chains, so that one need not wait for the other
#pragma unroll
    for (int i = 0; i < N; ++i) chain[i % CHAINS] = i < CHAINS ? s[i] : larger(chain[i % CHAINS], s[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      greatest[half] = larger(
          larger(chain[2 * half], chain[2 * half + 1]),
          larger(chain[CHAINS - 4 + 2 * half], chain[CHAINS - 3 + 2 * half]));
    bool has_grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      greatest[half] = lanes_max<4>(greatest[half]) * c;
      has_grown |= greatest[half] - row[half].row_max > float(Config::LAZY);
    }
    has_rescale = __any_sync(ALL_LANES, has_grown);
    if (has_rescale)
#pragma unroll
      for (int half = 0; half < 2; ++half) rescale[half] = row[half].raise(greatest[half]);
    const float reference[2] = {row[0].reference(), row[1].reference()};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = ex2_approx_ftz_f32(multiply_add(s[i], c, -reference[i / 2 % 2]));
      chain[i % CHAINS] = i < CHAINS ? s[i] : chain[i % CHAINS] + s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      for (int i = 2 * half; i < CHAINS; i += 4) row[half].row_sum += chain[i] + chain[i + 1];
  }

  // O *= exp2(m_old - m)
  template <int N>
  __device__ __forceinline__ void correct(float (&o)[N]) const {
    if (!has_rescale) return;
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= rescale[i / 2 % 2];
  }
};
