// Backward of the simt family: dq, dk, dv from do, o and lse, on any GPU, for any dtype.
//
// Three kernels. `delta` prepares a number a row. `dk_dv` owns key tiles and streams the query
// tiles of every head of the group past them; `dq` owns query tiles and streams key tiles. Both
// compute the scores again. No atomics: every sum has one order, so results are bit-reproducible.
// Dao 2023, arXiv:2307.08691, Algorithm 2; the formulas' numbers are those of cuflash/reference.py.
#include "backward.cuh"

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
    store_chunks(partial.dk(), 0, dk_acc, is_bad ? nan : scale);
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
    store_chunks(Partial(p, item.slot).dq(), 0, dq_acc, is_bad ? nan : scale);
    return true;
  }
  if (is_bad) return false;
  store_chunks(KMatrix(p.dq, head.b, head.h, p.seqlen_q), row0, dq_acc, scale);
  return true;
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

#if PART_MAIN || PART_GREATEST
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

#if PART_MAIN
extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    dq(const __grid_constant__ Params p) {
#if HAS_PARAMS
  dq_of_all(p, ParamSums<IS_DETERMINISTIC ? FIXED : ADD>(p, first_probe(p)));
#else
  dq_of_all(p, NoSums());
#endif
}
#endif

#if PART_GREATEST && HAS_PARAMS && IS_DETERMINISTIC
// Finds the greatest values that dq will add (and makes dq, to be made again).
extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    greatest(const __grid_constant__ Params p) {
  dq_of_all(p, ParamSums<GREATEST>(p, first_probe(p)));
}
#endif
#endif
