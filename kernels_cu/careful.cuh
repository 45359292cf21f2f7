// The careful path: the definition itself, for the tokens of a tile that came out not finite.
//
// It leaves masked pairs out of every sum (0 * NaN is NaN, so the fast path cannot), and sums in
// double, with the scale inside where that keeps the sum small (so x is right wherever it is
// representable). A warp takes an owned token; its lanes take 32 passing tokens at a time for the
// scores, and the columns of the result for the sums. Straight from global memory: rare, so plain.
#pragma once
#include "matrix.cuh"
#include "order.cuh"
#include "scores.cuh"

// <a_i, b_j> * factor
template <int WIDTH>
__device__ __forceinline__ double careful_product(
    const Matrix<WIDTH>& a, long long i, const Matrix<WIDTH>& b, long long j, double factor) {
  const bool inside = factor * factor < 1;
  double sum = 0;
#pragma unroll 1
  for (int d = 0; d < WIDTH; ++d)
    sum += double(a.at(i, d)) * (inside ? factor : 1.0) * double(b.at(j, d));
  return inside ? sum : sum * factor;
}

// score(x) of a pair, in the type of the sums like everywhere; x itself where there is no score.
__device__ __forceinline__ double careful_score(
    const Params& p, int b, int h, long long row, long long column, double x) {
#if HAS_SCORE
  return score(p, b, h, row, column, Accumulation(x));
#else
  return x;
#endif
}

// One row of a result: columns lane, lane + 32, ... in each lane.
template <int WIDTH>
struct CarefulSum {
  static constexpr int COLUMNS = (WIDTH + 31) / 32;
  double sum[COLUMNS] = {};

  // Adds weight * x of 32 tokens from token0 on; lane n brings the weight of token n, and whether
  // it is attended. By the whole warp.
  __device__ __forceinline__ void add(
      const Matrix<WIDTH>& x, long long token0, double weight, bool attended) {
    unsigned left = __ballot_sync(ALL_LANES, attended);
    while (left != 0) {
      const int n = __ffs(left) - 1;
      left &= left - 1;
      const double weight_n = __shfl_sync(ALL_LANES, weight, n);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int column = threadIdx.x % 32 + 32 * c;
        if (column < WIDTH) sum[c] += weight_n * double(x.at(token0 + n, column));
      }
    }
  }

  __device__ __forceinline__ void store(const Matrix<WIDTH>& x, long long token) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = threadIdx.x % 32 + 32 * c;
      if (column < WIDTH) x.set(token, column, Accumulation(sum[c]));
    }
  }
};

// Calls visit(token0, token, attended) for 32 passing tokens at a time, a lane a token; `own` is
// the owned token's place in its tile. Skips the tiles that the mask skips. By the whole warp.
template <bool OWN_IS_Q, int STREAM, class TileAt, class Visit>
__device__ __forceinline__ void visit_tokens(
    const Params& p, long long tiles, TileAt tile_at, int own, Visit visit) {
  Visits all;
  Walk walk(tiles, all);
  long long tile;
  bool partly;
  while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
#pragma unroll 1
    for (int first = 0; first < STREAM; first += 32) {
      const int at = first + threadIdx.x % 32;
      const bool attended = at < STREAM && (OWN_IS_Q ? tile_at(tile).allows(p, own, at)
                                                     : tile_at(tile).allows(p, at, own));
      visit(tile * STREAM + first, tile * STREAM + at, attended);
    }
  }
}
