// From inner products to scores: scale, and the mask by selection. Shared by forward and backward.
#pragma once
#include "../scores.cuh"
#include "tile.cuh"

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

// s = score(scale * <q, k>) where the pair is attended, else -inf, in place. `probe` turns NaN once
// an attended score is not finite: then the careful path has to look again. A score of -inf is no
// fault: it leaves the pair out.
template <bool OWN_IS_Q, int ROWS, int COLUMNS, class Tile>
__device__ __forceinline__ void finish_scores(
    const Params& p, const Tile& tile, bool partly, Accumulation (&s_acc)[ROWS][COLUMNS],
    Accumulation& probe) {
  const unsigned long long allowed =
      partly ? allowed_pairs<OWN_IS_Q, ROWS, COLUMNS>(p, tile) : ~0ull;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const Accumulation x = s_acc[i][j] * Accumulation(p.scale);
      const bool attended = allowed >> (i * COLUMNS + j) & 1;
      s_acc[i][j] = negative_infinity();
      if (attended) {
        const int own = own_row(i), stream = stream_column(j);
        s_acc[i][j] = score_at(p, tile, OWN_IS_Q ? own : stream, OWN_IS_Q ? stream : own, x);
        probe = multiply_add(x, Accumulation(0), probe);
        if (HAS_SCORE && !is_masked(s_acc[i][j]))
          probe = multiply_add(s_acc[i][j], Accumulation(0), probe);
      }
    }
}
