// From inner products to scores: scale, and the mask by selection. Shared by forward and backward.
#pragma once
#include "../softmax.cuh"
#include "../tile.cuh"
#include "../visit.cuh"

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

// s = score(x) of one pair; row and column count from those of the tile. Without a score s = x. Only
// for pairs inside the sequences: a score may read arrays.
template <class Tile>
__device__ __forceinline__ Accumulation score_at(
    const Params& p, const Tile& tile, int row, int column, Accumulation x) {
#if HAS_SCORE
  return score(p, tile.b, tile.h, tile.row0 + row, tile.column0 + column, x);
#else
  return x;
#endif
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

// 0, or NaN where the type of the sums does not hold the scale (it would be flushed to zero).
__device__ __forceinline__ Accumulation first_probe(const Params& p) {
  const Accumulation scale = Accumulation(p.scale), least = Accumulation(1.2e-38f);
  const bool is_held = p.scale == 0 || scale > least || scale < -least;
  return is_held ? Accumulation(0) : negative_infinity() - negative_infinity();
}

// Adds the sink of head h, where there is one. Returns the factor for earlier sums.
template <class Number>
__device__ __forceinline__ Number include_sink(const Params& p, int h, RowState<Number>& row) {
#if HAS_SINK
  return row.include(Number(sink_logit(p, h)));
#else
  return 1;
#endif
}
