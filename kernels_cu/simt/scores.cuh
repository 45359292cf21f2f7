// From sums of products to scores: scale, and the mask by selection. Shared by forward and backward.
#pragma once
#include "../softmax.cuh"
#include "../tile.cuh"
#include "../visit.cuh"

// scale = inner * outer. The careful path takes the inner part into the sum where that keeps it
// small, so that x is right wherever it is representable, whatever <q, k> alone is.
struct Scale {
  double inner, outer;
  __device__ Scale(double scale, bool careful) {
    const bool inside = careful && scale * scale < 1;
    inner = inside ? scale : 1;
    outer = inside ? 1 : scale;
  }
};

// Bit i * COLUMNS + j: whether this thread's pair (own row i, stream column j) is attended.
template <bool OWN_IS_Q, int ROWS, int COLUMNS, class Tile>
__device__ __forceinline__ unsigned long long allowed_pairs(const Params& p, const Tile& tile) {
  static_assert(ROWS * COLUMNS <= 64, "a bit a pair");
  unsigned long long allowed = 0;
#pragma unroll 1  // the text of a mask may be long
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int own = own_row(i), stream = stream_column(j);
      const bool allows = OWN_IS_Q ? tile.allows(p, own, stream) : tile.allows(p, stream, own);
      allowed |= (unsigned long long)allows << (i * COLUMNS + j);
    }
  }
  return allowed;
}

// s = scale * x where the pair is attended, else -inf. `probe` turns NaN once an attended score is
// not finite: then the careful path has to look again.
template <bool OWN_IS_Q, class Sum, int ROWS, int COLUMNS, class Tile>
__device__ __forceinline__ void finish_scores(
    const Params& p, const Tile& tile, bool partly, double outer,
    const Sum (&sum)[ROWS][COLUMNS], Accumulation (&s_acc)[ROWS][COLUMNS], Accumulation& probe) {
  const unsigned long long allowed =
      partly ? allowed_pairs<OWN_IS_Q, ROWS, COLUMNS>(p, tile) : ~0ull;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const Accumulation x = Accumulation(sum[i][j] * Sum(outer));
      const bool attended = allowed >> (i * COLUMNS + j) & 1;
      s_acc[i][j] = attended ? x : negative_infinity();
      probe = attended ? multiply_add(x, Accumulation(0), probe) : probe;
    }
}
