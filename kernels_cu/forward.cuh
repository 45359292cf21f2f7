// What the forward kernels of all families share: where a head lies, what blocks that share a tile
// leave, one row by the careful path, and the kernels around the one that does the work.
#pragma once
#include "careful.cuh"

using C = Config;
using Owned = Ownership<true, C::BLOCK_Q, C::BLOCK_K>;
using Tile = Owned::Tile;

// One head of one batch item, seqlen x head_dim each.
struct Head {
  int b, h;
  long long head_k;
  __device__ Head(const Params& p, int b_, int h_)
      : b(b_), h(h_), head_k(h_ / (p.heads_q / p.heads_k)) {}
  using QMatrix = Matrix<C::HEAD_DIM>;
  using VMatrix = Matrix<C::HEAD_DIM_V>;
  __device__ QMatrix q(const Params& p) const { return QMatrix(p.q, b, h, p.seqlen_q); }
  __device__ QMatrix k(const Params& p) const { return QMatrix(p.k, b, head_k, p.seqlen_k); }
  __device__ VMatrix v(const Params& p) const { return VMatrix(p.v, b, head_k, p.seqlen_k); }
  __device__ VMatrix o(const Params& p) const { return VMatrix(p.o, b, h, p.seqlen_q); }
};

// What a block that shares its tile with others leaves: o of its own keys, and the state of each
// row, in the kernel's units. A row_sum of NaN: something was not finite, the careful path has to do the row.
template <class Units>
struct Partial {
  using State = RowState<Accumulation, Units>;
  Accumulation* start;
  __device__ Partial(const Params& p, long long slot)
      : start((Accumulation*)p.partials + slot * C::PARTIAL_NUMBERS) {}
  __device__ Matrix<C::HEAD_DIM_V, Accumulation> o() const {
    const Tensor rows{start, 0, C::HEAD_DIM_V, 0, 1};
    return Matrix<C::HEAD_DIM_V, Accumulation>(rows, 0, 0, C::BLOCK_Q);
  }
  __device__ State& row(int own) const {
    return ((State*)(start + C::BLOCK_Q * C::HEAD_DIM_V))[own];
  }
};
static_assert(C::PARTIAL_NUMBERS == C::BLOCK_Q * (C::HEAD_DIM_V + 2), "as cuflash/config.py says");

// One row by the definition: lse first, then o with normalised weights. By a warp.
__device__ COLD void careful_forward(
    const Params& p, const Head& head, long long row0, int own) {
  const auto q_gmem = head.q(p), k_gmem = head.k(p);
  const auto v_gmem = head.v(p);
  const auto tile_at = [&](long long tile) {
    return Tile{head.b, head.h, row0, tile * C::BLOCK_K};
  };
  const long long tiles = (p.seqlen_k + C::BLOCK_K - 1) / C::BLOCK_K;
  const long long at = row0 + own;
  if (at >= p.seqlen_q) return;
  double lse = 0;
  CarefulSum<C::HEAD_DIM_V> o;
  RowState<double> row;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    visit_tokens<true, C::BLOCK_K>(
        p, tiles, tile_at, own, [&](long long key0, long long key, bool attended) {
          double s = negative_infinity<double>();
          if (attended) {
            const double x = careful_product(q_gmem, at, k_gmem, key, p.scale);
            s = careful_score(p, head.b, head.h, at, key, x);
          }
          if (pass == 0) {
            row.raise(s);
            row.row_sum += row.weigh(s);
          } else {
            o.add(v_gmem, key0, natural_exp(s - lse), !is_masked(s));
          }
        });
    if (pass == 0) {
      RowState<double> whole = row.over_lanes();
      include_sink(p, head.h, whole);
      lse = whole.lse();
    }
  }
  o.store(head.o(p), at);
  if (p.lse.pointer != nullptr && threadIdx.x % 32 == 0)
    *row_address<Accumulation>(p.lse, head.b, head.h, at) = Accumulation(lse);
}

// o and lse of split tiles. The maximum and the sum of each segment, not its lse, are merged: the
// difference of two maxima is exact at any size of s.
template <class Units>
__device__ __forceinline__ void combine_segments(const Params& p) {
#if HAS_ORDER
  combine_tokens<Owned>(p, [&](const Item& item, int own, const Slots& slots) {
    const Head head(p, item.b, item.head);
    const long long at = item.tile * C::BLOCK_Q + own;
    const int lane = threadIdx.x % 32;
    if (at >= p.seqlen_q) return;
    RowState<Accumulation, Units> mine;
    for (long long segment = lane; segment < slots.count; segment += 32)
      mine.merge(Partial<Units>(p, slots[segment]).row(own));
    auto row = mine.over_lanes();
    include_sink(p, head.h, row);
    if (!is_finite(row.row_sum)) return careful_forward(p, head, item.tile * C::BLOCK_Q, own);
    const auto o_gmem = head.o(p);
    const Accumulation factor = row.row_sum == 0 ? 0 : Accumulation(1) / row.row_sum;
    for (int column = lane; column < C::HEAD_DIM_V; column += 32) {
      Accumulation sum = 0;
      for (long long segment = 0; segment < slots.count; ++segment) {
        const Partial<Units> partial(p, slots[segment]);
        const auto part = partial.row(own);
        const Accumulation weight = part.row_sum * row.weigh(part.row_max) * factor;
        sum = multiply_add(weight, partial.o().at(own, column), sum);
      }
      o_gmem.set(at, column, sum);
    }
    if (p.lse.pointer != nullptr && lane == 0)
      *row_address<Accumulation>(p.lse, head.b, head.h, at) = row.lse();
  });
#endif
}

#if HAS_ORDER && PART_ORDER
extern "C" __global__ void __launch_bounds__(C::THREADS) count(const __grid_constant__ Params p) {
  count_visits<Owned>(p);
}

extern "C" __global__ void __launch_bounds__(C::THREADS) arrange(const __grid_constant__ Params p) {
  arrange_rows<Owned>(p);
}
#endif
