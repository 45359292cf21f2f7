// What the backward kernels of all families share: where a head lies, what blocks that share a tile
// leave, one token by the careful path, and the kernels around those that do the work.
#pragma once
#include "careful.cuh"
#if HAS_PARAMS
#include "gradients.cuh"
#endif

// A call costs the fast path registers (dk_dv, bfloat16, head_dim 64 on sm_90: 308 bytes of spills
// against 0), a copy in line costs time to compile: much, where the text of a mask or score is long.
#if HAS_MASK || HAS_SCORE
#define CAREFUL COLD
#else
#define CAREFUL __forceinline__
#endif

using C = Config;
using KMatrix = Matrix<C::HEAD_DIM>;    // like q and k
using VMatrix = Matrix<C::HEAD_DIM_V>;  // like v, o and do
using QueryTiles = Ownership<true, C::OWN_Q, C::STREAM_K>;
using KeyTiles = Ownership<false, C::OWN_K, C::STREAM_Q>;

// What a block that shares its tile with others leaves: its part of dq, or of dk and dv. All NaN:
// something was not finite, the careful path has to do the tile.
struct Partial {
  Accumulation* start;
  __device__ Partial(const Params& p, long long slot)
      : start((Accumulation*)p.partials + slot * C::PARTIAL_NUMBERS) {}
  __device__ Matrix<C::HEAD_DIM, Accumulation> dq() const {
    return {rows<C::HEAD_DIM>(0), 0, 0, C::OWN_Q};
  }
  __device__ Matrix<C::HEAD_DIM, Accumulation> dk() const {
    return {rows<C::HEAD_DIM>(0), 0, 0, C::OWN_K};
  }
  __device__ Matrix<C::HEAD_DIM_V, Accumulation> dv() const {
    return {rows<C::HEAD_DIM_V>(C::OWN_K * C::HEAD_DIM), 0, 0, C::OWN_K};
  }

 private:
  template <int WIDTH>
  __device__ Tensor rows(int after) const {
    return {start + after, 0, WIDTH, 0, 1};
  }
};
static_assert(
    C::PARTIAL_NUMBERS >= C::OWN_K * (C::HEAD_DIM + C::HEAD_DIM_V) &&
        C::PARTIAL_NUMBERS >= C::OWN_Q * C::HEAD_DIM,
    "cuflash/config.py counts as many");

// One head of one batch item, as both kernels see it.
struct Head {
  int b, h;
  KMatrix q_gmem, k_gmem;
  VMatrix do_gmem, v_gmem;
  __device__ Head(const Params& p, int b_, int h_, int head_k)
      : b(b_), h(h_), q_gmem(p.q, b, h, p.seqlen_q), k_gmem(p.k, b, head_k, p.seqlen_k),
        do_gmem(p.do_, b, h, p.seqlen_q), v_gmem(p.v, b, head_k, p.seqlen_k) {}
};

// In the place of ParamSums where no parameter is to get a gradient.
struct NoSums {
  __device__ void add_pair(int, int, long long, long long, Accumulation, Accumulation) {}
  __device__ void finish() {}
};

// delta of a row, again in double where it left the type of the sums.
__device__ __forceinline__ double careful_delta(const Params& p, const Head& head, long long row) {
  const Accumulation stored = *row_address<Accumulation>(p.delta, head.b, head.h, row);
  if (is_finite(stored)) return stored;
  const VMatrix o_gmem(p.o, head.b, head.h, p.seqlen_q);
  const double delta = careful_product(head.do_gmem, row, o_gmem, row, 1);
  if (p.dlse.pointer == nullptr) return delta;
  return delta - *row_address<Accumulation>(p.dlse, head.b, head.h, row);
}

// P and scale * dS of one pair, by the definition.
struct CarefulPair {
  double weight = 0, dx = 0;
  bool attended;
  __device__ CarefulPair(
      const Params& p, const Head& head, long long row, long long column, bool allowed)
      : attended(allowed) {
    if (!attended) return;
    const double x = careful_product(head.q_gmem, row, head.k_gmem, column, p.scale);
    const double s = careful_score(p, head.b, head.h, row, column, x);
    const double lse = *row_address<Accumulation>(p.lse, head.b, head.h, row);
    attended = !is_masked(s) && !is_masked(lse);
    if (!attended) return;
    const double dp = careful_product(head.do_gmem, row, head.v_gmem, column, 1);
    weight = weigh_by_lse(s, lse);
    dx = weight * (dp - careful_delta(p, head, row)) * p.scale;
#if HAS_SCORE
    dx *= score_slope(p, head.b, head.h, row, column, Accumulation(x));
#endif
  }
};

// One key of dk and dv by the definition, by a warp.
__device__ CAREFUL void careful_dk_dv(
    const Params& p, int b, int head_k, long long column0, int own) {
  const int group = int(p.heads_q / p.heads_k);
  const long long key = column0 + own;
  if (key >= p.seqlen_k) return;
  CarefulSum<C::HEAD_DIM> dk;
  CarefulSum<C::HEAD_DIM_V> dv;
  for (int member = 0; member < group; ++member) {
    const Head head(p, b, head_k * group + member, head_k);
    const auto tile_at = [&](long long tile) {
      return KeyTiles::Tile{b, head.h, tile * C::STREAM_Q, column0};
    };
    visit_tokens<false, C::STREAM_Q>(
        p, (p.seqlen_q + C::STREAM_Q - 1) / C::STREAM_Q, tile_at, own,
        [&](long long row0, long long row, bool allowed) {
          const CarefulPair pair(p, head, row, key, allowed);
          dv.add(head.do_gmem, row0, pair.weight, pair.attended);
          dk.add(head.q_gmem, row0, pair.dx, pair.attended);
        });
  }
  dk.store(KMatrix(p.dk, b, head_k, p.seqlen_k), key);
  dv.store(VMatrix(p.dv, b, head_k, p.seqlen_k), key);
}

// One row of dq by the definition, by a warp.
__device__ CAREFUL void careful_dq(
    const Params& p, const Head& head, long long row0, int own) {
  const auto tile_at = [&](long long tile) {
    return QueryTiles::Tile{head.b, head.h, row0, tile * C::STREAM_K};
  };
  const long long row = row0 + own;
  if (row >= p.seqlen_q) return;
  CarefulSum<C::HEAD_DIM> dq;
  visit_tokens<true, C::STREAM_K>(
      p, (p.seqlen_k + C::STREAM_K - 1) / C::STREAM_K, tile_at, own,
      [&](long long key0, long long key, bool allowed) {
        const CarefulPair pair(p, head, row, key, allowed);
        dq.add(head.k_gmem, key0, pair.dx, pair.attended);
      });
  dq.store(KMatrix(p.dq, head.b, head.h, p.seqlen_q), row);
}

#if PART_MAIN && HAS_PARAMS
#if IS_DETERMINISTIC
using ParamSum = long long;
#else
using ParamSum = Accumulation;
#endif

extern "C" __global__ void __launch_bounds__(C::THREADS) clear(const __grid_constant__ Params p) {
  clear_sums<ParamSum>(p, param_elements(p));
}

extern "C" __global__ void __launch_bounds__(C::THREADS)
    store_params(const __grid_constant__ Params p) {
  store_all_params<IS_DETERMINISTIC>(p);
}
#endif

#if PART_MAIN && HAS_DSINK
// dsink_h = - sum over batch items and rows of exp(sink_h - lse) delta; a warp a head, in one order.
extern "C" __global__ void __launch_bounds__(C::THREADS) dsink(const __grid_constant__ Params p) {
  const long long warps = (long long)gridDim.x * (C::THREADS / 32);
  const int lane = threadIdx.x % 32;
  for (long long h = (long long)blockIdx.x * (C::THREADS / 32) + threadIdx.x / 32; h < p.heads_q;
       h += warps) {
    double sum = 0;
    for (long long b = 0; b < p.batch; ++b)
      for (long long row = lane; row < p.seqlen_q; row += 32) {
        const Accumulation lse = *row_address<Accumulation>(p.lse, b, h, row);
        if (is_masked(lse)) continue;
        const Accumulation share = weigh_by_lse(sink_logit(p, int(h)), lse);
        sum -= double(share) * *row_address<Accumulation>(p.delta, b, h, row);
      }
    sum = lanes_sum<32>(sum);
    if (lane == 0) store_dsink(p, h, sum);
  }
}
#endif

#if HAS_ORDER && PART_ORDER
extern "C" __global__ void __launch_bounds__(C::THREADS) count(const __grid_constant__ Params p) {
  count_visits<QueryTiles>(p);
  count_visits<KeyTiles>(p);
}

extern "C" __global__ void __launch_bounds__(C::THREADS) arrange(const __grid_constant__ Params p) {
  arrange_rows<QueryTiles>(p);
  arrange_rows<KeyTiles>(p);
}
#endif

#if HAS_ORDER && PART_COMBINE
// One token of a split tile: the sum of the segments' parts. False where it is not finite: a
// segment asked for the careful path, or its part is beyond the type of the sums.
template <int WIDTH, class PartAt>
__device__ __forceinline__ bool combine_parts(
    const Matrix<WIDTH>& x, long long token, long long segments, PartAt part_at) {
  bool finite = true;
  for (int column = threadIdx.x % 32; column < WIDTH; column += 32) {
    Accumulation sum = 0;
    for (long long segment = 0; segment < segments; ++segment) sum += part_at(segment, column);
    finite = finite && is_finite(sum);
    x.set(token, column, sum);
  }
  return __ballot_sync(ALL_LANES, !finite) == 0;
}

extern "C" __global__ void __launch_bounds__(C::THREADS)
    combine_dk_dv(const __grid_constant__ Params p) {
  combine_tokens<KeyTiles>(p, [&](const Item& item, int own, const Slots& slots) {
    const long long key = item.tile * C::OWN_K + own;
    if (key >= p.seqlen_k) return;
    const bool finite_dk = combine_parts(
        KMatrix(p.dk, item.b, item.head, p.seqlen_k), key, slots.count,
        [&](long long n, int column) { return Partial(p, slots[n]).dk().at(own, column); });
    const bool finite_dv = combine_parts(
        VMatrix(p.dv, item.b, item.head, p.seqlen_k), key, slots.count,
        [&](long long n, int column) { return Partial(p, slots[n]).dv().at(own, column); });
    if (!finite_dk || !finite_dv) careful_dk_dv(p, item.b, item.head, item.tile * C::OWN_K, own);
  });
}

#if !IS_FUSED
extern "C" __global__ void __launch_bounds__(C::THREADS)
    combine_dq(const __grid_constant__ Params p) {
  combine_tokens<QueryTiles>(p, [&](const Item& item, int own, const Slots& slots) {
    const long long row = item.tile * C::OWN_Q + own;
    if (row >= p.seqlen_q) return;
    const bool finite = combine_parts(
        KMatrix(p.dq, item.b, item.head, p.seqlen_q), row, slots.count,
        [&](long long n, int column) { return Partial(p, slots[n]).dq().at(own, column); });
    if (finite) return;
    const Head head(p, item.b, item.head, int(item.head / (p.heads_q / p.heads_k)));
    careful_dq(p, head, item.tile * C::OWN_Q, own);
  });
}
#endif
#endif
