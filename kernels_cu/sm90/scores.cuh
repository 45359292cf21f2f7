// From products to weights, in the registers of a warp: mask, score, and the softmax of its rows. A
// thread holds two rows of a tile (fragments.cuh).
#pragma once
#include "../forward.cuh"
#include "fragments.cuh"

// Where each query attends an interval of keys, the mask is two comparisons a score: the interval of
// this thread's two rows in a tile, counted from the thread's first column.
struct Attended {
  int first[2] = {0, 0}, end[2];
  __device__ __forceinline__ Attended(const Params& p, const Tile& tile, int row, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long start = tile.column0 + column;
      long long from = 0, to = p.seqlen_k;
#if HAS_MASK
      long long at = tile.row0 + row + 8 * half;
      if (at >= p.seqlen_q) at = p.seqlen_q - 1;
      mask_interval(p, tile.b, tile.h, at, from, to);
      if (to > p.seqlen_k) to = p.seqlen_k;
      if (INTERVAL_HAS_FIRST) first[half] = place(from - start);
#endif
      end[half] = place(to - start);
    }
  }
  // Whether a thread's score `i` is attended.
  __device__ __forceinline__ bool operator[](int i) const {
    const int half = i / 2 % 2, at = i / 4 * 8 + i % 2;
    return at < end[half] && (!INTERVAL_HAS_FIRST || at >= first[half]);
  }

 private:
  __device__ __forceinline__ static int place(long long at) {
    return int(at < 0 ? 0 : at > C::BLOCK_K ? C::BLOCK_K : at);
  }
};

template <int N>
__device__ __forceinline__ void cut_scores(const Attended& attended, float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (!attended[i]) s[i] = negative_infinity();
}

// 32 of a thread's scores, those from 32 * WORD on: bit i says whether pair 32 * WORD + i is attended.
template <int WORD, int N>
__device__ __forceinline__ unsigned allowed_pairs(
    const Params& p, const Tile& tile, int row, int column) {
  constexpr int COUNT = N - 32 * WORD < 32 ? N - 32 * WORD : 32;
  unsigned allowed = 0;
  if constexpr (MASK_IS_INTERVAL) {
    const Attended attended(p, tile, row, column);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) allowed |= unsigned(attended[32 * WORD + i]) << i;
  } else {
#pragma unroll 1  // the text of a mask may be long
    for (int block = 0; block < COUNT / 4; ++block)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool allows =
            tile.allows(p, row + e / 2 * 8, column + 8 * (8 * WORD + block) + e % 2);
        allowed |= unsigned(allows) << (4 * block + e);
      }
  }
  return allowed;
}

// s = score(scale * x), or x itself where the scale waits for the exponent; -inf where masked.
template <int WORD = 0, int N>
__device__ __forceinline__ void finish_scores(
    const Params& p, const Tile& tile, bool partly, int row, int column, float (&s)[N]) {
  if constexpr (32 * WORD < N) {
    constexpr bool HAS_VALUE = HAS_SCORE || C::SCALE_FIRST;
    const unsigned allowed = partly ? allowed_pairs<WORD, N>(p, tile, row, column) : ~0u;
#pragma unroll
    for (int i = 0; i < 32 && 32 * WORD + i < N; ++i) {
      const int at = 32 * WORD + i;
      const float x = HAS_VALUE ? s[at] * float(p.scale) : s[at];
      s[at] = negative_infinity();
      if (allowed >> i & 1)
        s[at] = score_at(p, tile, row + at % 4 / 2 * 8, column + at / 4 * 8 + at % 2, x);
    }
    finish_scores<WORD + 1>(p, tile, partly, row, column, s);
  }
}

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
      has_grown |= greatest[half] - row[half].row_max > float(C::LAZY);
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
