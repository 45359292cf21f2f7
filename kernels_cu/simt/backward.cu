// Backward of the simt family: dq, dk, dv from do, o and lse, on any GPU, for any dtype.
//
// Three kernels. `delta` prepares a number a row. `dk_dv` owns key tiles and streams the query
// tiles of every head of the group past them; `dq` owns query tiles and streams key tiles. Both
// compute the scores again. No atomics: every sum has one order, so results are bit-reproducible.
// Dao 2023, arXiv:2307.08691, Algorithm 2; the formulas' numbers are those of cuflash/reference.py.
#include "backward.cuh"

// A call costs the fast path registers (dk_dv, bfloat16, head_dim 64 on sm_90: 308 bytes of spills
// against 0), a copy in line costs time to compile: much, where the text of a mask or score is long.
#if HAS_MASK || HAS_SCORE
#define CAREFUL __noinline__
#else
#define CAREFUL __forceinline__
#endif

#if PART_MAIN
// delta_i = <do_i, o_i> - dlse_i, a warp a row; 0 in a row that sees no key, whatever do and dlse
// hold there.
extern "C" __global__ void __launch_bounds__(THREADS) delta(const __grid_constant__ Params p) {
  const long long warps = (long long)gridDim.x * (THREADS / 32);
  const long long rows = p.batch * p.heads_q * p.seqlen_q;
  const int lane = threadIdx.x % 32;
  for (long long at = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; at < rows;
       at += warps) {
    const long long b = at / p.seqlen_q / p.heads_q, h = at / p.seqlen_q % p.heads_q;
    const long long row = at % p.seqlen_q;
    const VMatrix do_gmem(p.do_, b, h, p.seqlen_q), o_gmem(p.o, b, h, p.seqlen_q);
    Accumulation sum = 0;
    for (int d = lane; d < C::HEAD_DIM_V; d += 32)
      sum = multiply_add(do_gmem.at(row, d), o_gmem.at(row, d), sum);
    sum = lanes_sum<32>(sum);
    if (lane != 0) continue;
    if (p.dlse.pointer != nullptr) sum -= *row_address<Accumulation>(p.dlse, b, h, row);
    const bool empty = is_masked(*row_address<Accumulation>(p.lse, b, h, row));
    *row_address<Accumulation>(p.delta, b, h, row) = empty ? Accumulation(0) : sum;
  }
}
#endif

// One tile of dk and dv, summed over the query heads of the group, or a segment of one. Stores
// nothing and returns false where the careful path has to do it (as in forward.cu).
__device__ __forceinline__ bool dk_dv_tile(const Params& p, Smem<false>& smem, Item item) {
  // 1 coordinates, 2 state
  const int b = item.b, head_k = item.head;
  const long long column0 = item.tile * OWN;
  const int group = int(p.heads_q / p.heads_k);
  Accumulation dk_acc[CHUNKS][ROWS][COLUMNS_D] = {}, dv_acc[CHUNKS_V][ROWS][COLUMNS_DV] = {};
  Accumulation probe = first_probe(p);
  // 3 prologue: k and v that fit into one chunk stay in shared memory
  const Head first(p, b, head_k * group, head_k);
  if (CHUNKS == 1) load_tile(smem.k, first.k_gmem, column0, 0);
  if (CHUNKS_V == 1) load_tile(smem.v, first.v_gmem, column0, 0);
  for (int member = 0; member < group; ++member) {
    const Head head(p, b, head_k * group + member, head_k);
    // 4, 5 over the query tiles that the mask does not skip
    const auto tile_at = [&](long long tile) {
      return Smem<false>::Tile{b, head.h, tile * STREAM, column0};
    };
    Walk walk((p.seqlen_q + STREAM - 1) / STREAM, item.visits);
    long long tile;
    bool partly;
    while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
      Accumulation p_acc[ROWS][COLUMNS], ds_acc[ROWS][COLUMNS];
      NoSums none;
      weights_of_tile<false>(p, smem, head, tile_at(tile), partly, p_acc, ds_acc, probe, none);
      // dV += P^T dO
      store_weights(smem.weights, p_acc);
      __syncwarp();  // weights: written by this warp, read by this warp
      add_result(dv_acc, smem.weights, smem.do_, [&](int chunk) {
        load_tile(smem.do_, head.do_gmem, tile * STREAM, chunk);
      });
      // dK += dS^T Q
      __syncwarp();  // weights: read by this warp, may be overwritten
      store_weights(smem.weights, ds_acc);
      __syncwarp();  // weights: written by this warp, read by this warp
      add_result(dk_acc, smem.weights, smem.q, [&](int chunk) {
        load_tile(smem.q, head.q_gmem, tile * STREAM, chunk);
      });
      __syncthreads();  // the tile has been read by all, the next may overwrite it
    }
  }
  // 6 is all of it finite? 7 store
  probe_result(dk_acc, probe);
  probe_result(dv_acc, probe);
  const bool is_bad = __syncthreads_or(!is_finite(probe));
  const Accumulation scale = Accumulation(p.scale);
  if (item.is_split()) {
    const Partial partial(p, item.slot);
    const Accumulation nan = negative_infinity() - negative_infinity();
    store_chunks(partial.dq_or_dk(), 0, dk_acc, is_bad ? nan : scale);
    store_chunks(partial.dv(), 0, dv_acc, is_bad ? nan : Accumulation(1));
    return true;
  }
  if (is_bad) return false;
  store_chunks(KMatrix(p.dk, b, head_k, p.seqlen_k), column0, dk_acc, scale);
  store_chunks(VMatrix(p.dv, b, head_k, p.seqlen_k), column0, dv_acc, 1);
  return true;
}

// One tile of dq, or a segment of one, by the same rules; and what its pairs add to parameters. The
// careful path adds nothing to these: its pairs have been added here, masked ones left out.
template <class Sums>
__device__ __forceinline__ bool dq_tile(
    const Params& p, Smem<true>& smem, const Head& head, Item item, Sums sums) {
  const long long row0 = item.tile * OWN;
  // 2 state
  Accumulation dq_acc[CHUNKS][ROWS][COLUMNS_D] = {};
  Accumulation probe = first_probe(p);
  // 3 prologue: q and do that fit into one chunk stay in shared memory
  if (CHUNKS == 1) load_tile(smem.q, head.q_gmem, row0, 0);
  if (CHUNKS_V == 1) load_tile(smem.do_, head.do_gmem, row0, 0);
  load_rows(p, smem, head.b, head.h, row0);
  // 4, 5 over the key tiles that the mask does not skip
  const auto tile_at = [&](long long tile) {
    return Smem<true>::Tile{head.b, head.h, row0, tile * STREAM};
  };
  Walk walk((p.seqlen_k + STREAM - 1) / STREAM, item.visits);
  long long tile;
  bool partly;
  while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
    Accumulation p_acc[ROWS][COLUMNS], ds_acc[ROWS][COLUMNS];
    weights_of_tile<true>(p, smem, head, tile_at(tile), partly, p_acc, ds_acc, probe, sums);
    // dQ += dS K
    store_weights(smem.weights, ds_acc);
    __syncwarp();  // weights: written by this warp, read by this warp
    add_result(dq_acc, smem.weights, smem.k, [&](int chunk) {
      load_tile(smem.k, head.k_gmem, tile * STREAM, chunk);
    });
    __syncthreads();  // the tile has been read by all, the next may overwrite it
  }
  sums.finish();
  // 6 is all of it finite? 7 store
  probe_result(dq_acc, probe);
  const bool is_bad = __syncthreads_or(!is_finite(probe));
  const Accumulation scale = Accumulation(p.scale);
  if (item.is_split()) {
    const Accumulation nan = negative_infinity() - negative_infinity();
    store_chunks(Partial(p, item.slot).dq_or_dk(), 0, dq_acc, is_bad ? nan : scale);
    return true;
  }
  if (is_bad) return false;
  store_chunks(KMatrix(p.dq, head.b, head.h, p.seqlen_q), row0, dq_acc, scale);
  return true;
}

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
      return Smem<false>::Tile{b, head.h, tile * STREAM, column0};
    };
    visit_tokens<false, STREAM>(
        p, (p.seqlen_q + STREAM - 1) / STREAM, tile_at, own,
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
    return Smem<true>::Tile{head.b, head.h, row0, tile * STREAM};
  };
  const long long row = row0 + own;
  if (row >= p.seqlen_q) return;
  CarefulSum<C::HEAD_DIM> dq;
  visit_tokens<true, STREAM>(
      p, (p.seqlen_k + STREAM - 1) / STREAM, tile_at, own,
      [&](long long key0, long long key, bool allowed) {
        const CarefulPair pair(p, head, row, key, allowed);
        dq.add(head.k_gmem, key0, pair.dx, pair.attended);
      });
  dq.store(KMatrix(p.dq, head.b, head.h, p.seqlen_q), row);
}

#if PART_DK_DV
extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    dk_dv(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_memory[];
  auto& smem = *(Smem<false>*)shared_memory;
  static_assert(sizeof(smem) <= C::SHARED_BYTES, "cuflash/simt.py counts the bytes");
  const WorkList<KeyTiles> list(p);
  const long long items = list.items(p);
  for (long long at = blockIdx.x; at < items; at += gridDim.x) {
    const Item item = list.item(p, at);
    if (!dk_dv_tile(p, smem, item)) {
      for (int own = threadIdx.x / 32; own < OWN; own += THREADS / 32)
        careful_dk_dv(p, item.b, item.head, item.tile * OWN, own);
    }
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}
#endif

#if PART_MAIN
template <class Sums>
__device__ __forceinline__ void dq_of_all(const Params& p, const Sums& sums) {
  extern __shared__ Vector shared_memory[];
  auto& smem = *(Smem<true>*)shared_memory;
  static_assert(sizeof(smem) <= C::SHARED_BYTES, "cuflash/simt.py counts the bytes");
  const WorkList<QueryTiles> list(p);
  const long long items = list.items(p);
  for (long long at = blockIdx.x; at < items; at += gridDim.x) {
    const Item item = list.item(p, at);
    const Head head(p, item.b, item.head, int(item.head / (p.heads_q / p.heads_k)));
    if (!dq_tile(p, smem, head, item, sums)) {
      for (int own = threadIdx.x / 32; own < OWN; own += THREADS / 32)
        careful_dq(p, head, item.tile * OWN, own);
    }
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    dq(const __grid_constant__ Params p) {
#if HAS_PARAMS
  dq_of_all(p, ParamSums<IS_DETERMINISTIC ? FIXED : ADD>(p, first_probe(p)));
#else
  dq_of_all(p, NoSums());
#endif
}

#if HAS_PARAMS
#if IS_DETERMINISTIC
// Finds the greatest values that dq will add (and makes dq, to be made again).
extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    greatest(const __grid_constant__ Params p) {
  dq_of_all(p, ParamSums<GREATEST>(p, first_probe(p)));
}
using Sum = long long;
#else
using Sum = Accumulation;
#endif

extern "C" __global__ void __launch_bounds__(THREADS) clear(const __grid_constant__ Params p) {
  clear_sums<Sum>(p, param_elements(p));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    store_params(const __grid_constant__ Params p) {
  store_all_params<IS_DETERMINISTIC>(p);
}
#endif

#if HAS_DSINK
// dsink_h = - sum over batch items and rows of exp(sink_h - lse) delta; a warp a head, in one order.
extern "C" __global__ void __launch_bounds__(THREADS) dsink(const __grid_constant__ Params p) {
  const long long warps = (long long)gridDim.x * (THREADS / 32);
  const int lane = threadIdx.x % 32;
  for (long long h = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; h < p.heads_q;
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
#endif  // PART_MAIN

#if HAS_ORDER && PART_ORDER
extern "C" __global__ void __launch_bounds__(THREADS) count(const __grid_constant__ Params p) {
  count_visits<QueryTiles>(p);
  count_visits<KeyTiles>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) arrange(const __grid_constant__ Params p) {
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

extern "C" __global__ void __launch_bounds__(THREADS)
    combine_dk_dv(const __grid_constant__ Params p) {
  combine_tokens<KeyTiles>(p, [&](const Item& item, int own, const Slots& slots) {
    const long long key = item.tile * OWN + own;
    if (key >= p.seqlen_k) return;
    const bool finite_dk = combine_parts(
        KMatrix(p.dk, item.b, item.head, p.seqlen_k), key, slots.count,
        [&](long long n, int column) { return Partial(p, slots[n]).dq_or_dk().at(own, column); });
    const bool finite_dv = combine_parts(
        VMatrix(p.dv, item.b, item.head, p.seqlen_k), key, slots.count,
        [&](long long n, int column) { return Partial(p, slots[n]).dv().at(own, column); });
    if (!finite_dk || !finite_dv) careful_dk_dv(p, item.b, item.head, item.tile * OWN, own);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_dq(const __grid_constant__ Params p) {
  combine_tokens<QueryTiles>(p, [&](const Item& item, int own, const Slots& slots) {
    const long long row = item.tile * OWN + own;
    if (row >= p.seqlen_q) return;
    const bool finite = combine_parts(
        KMatrix(p.dq, item.b, item.head, p.seqlen_q), row, slots.count,
        [&](long long n, int column) { return Partial(p, slots[n]).dq_or_dk().at(own, column); });
    if (finite) return;
    const Head head(p, item.b, item.head, int(item.head / (p.heads_q / p.heads_k)));
    careful_dq(p, head, item.tile * OWN, own);
  });
}
#endif
