// What every kernel does to a score: the printed score function, the sink, the scale that is too small.
#pragma once
#include "softmax.cuh"
#include "visit.cuh"

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

// 0, or NaN where the type of the sums does not hold the scale (it would be flushed to zero).
__device__ __forceinline__ Accumulation first_probe(const Params& p) {
  const Accumulation scale = Accumulation(p.scale), least = Accumulation(1.2e-38f);
  const bool is_held = p.scale == 0 || scale > least || scale < -least;
  return is_held ? Accumulation(0) : negative_infinity() - negative_infinity();
}

// Adds the sink of head h, where there is one. Returns the factor for earlier sums.
template <class Number, class Units>
__device__ __forceinline__ Number include_sink(
    const Params& p, int h, RowState<Number, Units>& row) {
#if HAS_SINK
  return row.include(Units::from_natural(Number(sink_logit(p, h))));
#else
  return 1;
#endif
}
