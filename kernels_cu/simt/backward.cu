// Backward of the simt family: dq, dk, dv from do, o and lse, on any GPU, for any dtype.
//
// Three kernels. `delta` prepares a number a row. `dk_dv` owns key tiles and streams the query
// tiles of every head of the group past them; `dq` owns query tiles and streams key tiles. Both
// compute the scores again. No atomics: every sum has one order, so results are bit-reproducible.
// Dao 2023, arXiv:2307.08691, Algorithm 2; the formulas' numbers are those of cuflash/reference.py.
#include "careful.cuh"

using C = Config;
constexpr int CHUNKS = (C::HEAD_DIM + C::CHUNK - 1) / C::CHUNK;
constexpr int CHUNKS_V = (C::HEAD_DIM_V + C::CHUNK_V - 1) / C::CHUNK_V;
constexpr int COLUMNS_D = C::CHUNK / C::THREAD_COLUMNS;     // a thread's part of a chunk of dq, dk
constexpr int COLUMNS_DV = C::CHUNK_V / C::THREAD_COLUMNS;  // and of dv

using KMatrix = Matrix<C::HEAD_DIM>;    // like q and k
using VMatrix = Matrix<C::HEAD_DIM_V>;  // like v, o and do

// A block owns BLOCK_Q tokens and BLOCK_K pass: queries and keys in dq, keys and queries in dk_dv.
constexpr int OWN = C::BLOCK_Q, STREAM = C::BLOCK_K;
constexpr int ROWS = OWN / C::THREAD_ROWS;           // owned tokens of one thread
constexpr int COLUMNS = STREAM / C::THREAD_COLUMNS;  // its passing tokens in a tile of scores

template <bool OWN_IS_Q>
struct Smem {
  static constexpr int TOKENS_Q = OWN_IS_Q ? OWN : STREAM, TOKENS_K = OWN_IS_Q ? STREAM : OWN;
  SharedTile<TOKENS_Q, C::CHUNK> q;
  SharedTile<TOKENS_K, C::CHUNK> k;
  SharedTile<TOKENS_Q, C::CHUNK_V> do_;
  SharedTile<TOKENS_K, C::CHUNK_V> v;
  SharedTile<STREAM, OWN> weights;  // P or dS, a column an owned token
  Accumulation lse[TOKENS_Q], delta[TOKENS_Q];
  using Tile = ScoreTile<TOKENS_Q, TOKENS_K>;
};

// One head of one batch item, as both kernels see it.
struct Head {
  int b, h;
  KMatrix q_gmem, k_gmem;
  VMatrix do_gmem, v_gmem;
  __device__ Head(const Params& p, int b_, int h_, int head_k)
      : b(b_), h(h_), q_gmem(p.q, b, h, p.seqlen_q), k_gmem(p.k, b, head_k, p.seqlen_k),
        do_gmem(p.do_, b, h, p.seqlen_q), v_gmem(p.v, b, head_k, p.seqlen_k) {}
};

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

// lse and delta of a query tile, by the whole block. Rows beyond the end are like empty ones.
template <class Shared>
__device__ __forceinline__ void load_rows(
    const Params& p, Shared& smem, int b, int h, long long row0) {
  for (int i = threadIdx.x; i < Shared::TOKENS_Q; i += THREADS) {
    const bool inside = row0 + i < p.seqlen_q;
    smem.lse[i] = inside ? *row_address<Accumulation>(p.lse, b, h, row0 + i) : negative_infinity();
    smem.delta[i] = inside ? *row_address<Accumulation>(p.delta, b, h, row0 + i) : 0;
  }
}

// P = exp(min(S - lse, 0)) and dS = P * (dP - delta) on one tile, from S = scale * Q K^T and
// dP = dO V^T; both 0 where masked. On return the last chunk of each operand is in shared memory.
template <bool OWN_IS_Q>
__device__ __forceinline__ void weights_of_tile(
    const Params& p, Smem<OWN_IS_Q>& smem, const Head& head,
    const typename Smem<OWN_IS_Q>::Tile& tile, bool partly, Accumulation (&p_acc)[ROWS][COLUMNS],
    Accumulation (&ds_acc)[ROWS][COLUMNS], Accumulation& probe) {
  // An owned operand that fits into one chunk is there already.
  constexpr bool LOAD_Q = !OWN_IS_Q || CHUNKS > 1, LOAD_K = OWN_IS_Q || CHUNKS > 1;
  constexpr bool LOAD_DO = !OWN_IS_Q || CHUNKS_V > 1, LOAD_V = OWN_IS_Q || CHUNKS_V > 1;
  Accumulation s_acc[ROWS][COLUMNS] = {}, dp_acc[ROWS][COLUMNS] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    if (chunk > 0) __syncthreads();  // the chunk before has been read by all
    if (LOAD_Q) load_tile(smem.q, head.q_gmem, tile.row0, chunk);
    if (LOAD_K) load_tile(smem.k, head.k_gmem, tile.column0, chunk);
    if (chunk == 0) {
      if (LOAD_DO) load_tile(smem.do_, head.do_gmem, tile.row0, 0);
      if (LOAD_V) load_tile(smem.v, head.v_gmem, tile.column0, 0);
      if (!OWN_IS_Q) load_rows(p, smem, head.b, head.h, tile.row0);
    }
    __syncthreads();  // q, k, do, v, lse, delta: written by all, read by all
    if constexpr (OWN_IS_Q)
      add_inner_products<C::HEAD_DIM>(s_acc, smem.q, smem.k, chunk);
    else
      add_inner_products<C::HEAD_DIM>(s_acc, smem.k, smem.q, chunk);
  }
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS_V; ++chunk) {
    if (chunk > 0) {
      __syncthreads();  // the chunk before has been read by all
      load_tile(smem.do_, head.do_gmem, tile.row0, chunk);
      load_tile(smem.v, head.v_gmem, tile.column0, chunk);
      __syncthreads();  // do, v: written by all, read by all
    }
    if constexpr (OWN_IS_Q)
      add_inner_products<C::HEAD_DIM_V>(dp_acc, smem.do_, smem.v, chunk);
    else
      add_inner_products<C::HEAD_DIM_V>(dp_acc, smem.v, smem.do_, chunk);
  }
  finish_scores<OWN_IS_Q>(p, tile, partly, s_acc, probe);
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int row = OWN_IS_Q ? own_row(i) : stream_column(j);
      const bool masked = is_masked(s_acc[i][j]) || is_masked(smem.lse[row]);
      p_acc[i][j] = weigh_by_lse(s_acc[i][j], smem.lse[row]);
      ds_acc[i][j] = masked ? 0 : p_acc[i][j] * (dp_acc[i][j] - smem.delta[row]);
    }
}

// result += weights x, chunk by chunk of x; reload(chunk) brings a chunk that is not there.
template <int CHUNKS_, int COLUMNS_, class Weights, class Stream, class Reload>
__device__ __forceinline__ void add_result(
    Accumulation (&result)[CHUNKS_][ROWS][COLUMNS_], const Weights& weights, const Stream& x,
    Reload reload) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_; ++chunk) {
    if (CHUNKS_ > 1) {
      __syncthreads();  // the chunk before has been read by all
      reload(chunk);
      __syncthreads();  // x: written by all, read by all
    }
    add_outer_products(result[chunk], weights, x);
  }
}

// Adds 0 times every number to the probe: NaN if one is not finite.
template <int CHUNKS_, int COLUMNS_>
__device__ __forceinline__ void probe_result(
    const Accumulation (&result)[CHUNKS_][ROWS][COLUMNS_], Accumulation& probe) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_; ++chunk)
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS_; ++j)
        probe = multiply_add(result[chunk][i][j], Accumulation(0), probe);
}

// One tile of dk and dv, summed over the query heads of the group. Stores nothing and returns false
// where the careful path has to do it (as in forward.cu).
__device__ __forceinline__ bool dk_dv_tile(
    const Params& p, Smem<false>& smem, int b, int head_k, long long column0) {
  // 1 coordinates, 2 state
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
    Walk walk((p.seqlen_q + STREAM - 1) / STREAM);
    long long tile;
    bool partly;
    while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
      Accumulation p_acc[ROWS][COLUMNS], ds_acc[ROWS][COLUMNS];
      weights_of_tile<false>(p, smem, head, tile_at(tile), partly, p_acc, ds_acc, probe);
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
  if (__syncthreads_or(!is_finite(probe))) return false;
  const KMatrix dk_gmem(p.dk, b, head_k, p.seqlen_k);
  const VMatrix dv_gmem(p.dv, b, head_k, p.seqlen_k);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk)
    store_result(dk_gmem, column0, chunk * C::CHUNK, dk_acc[chunk], Accumulation(p.scale));
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
    store_result(dv_gmem, column0, chunk * C::CHUNK_V, dv_acc[chunk]);
  return true;
}

// One tile of dq, by the same rules.
__device__ __forceinline__ bool dq_tile(
    const Params& p, Smem<true>& smem, const Head& head, long long row0) {
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
  Walk walk((p.seqlen_k + STREAM - 1) / STREAM);
  long long tile;
  bool partly;
  while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
    Accumulation p_acc[ROWS][COLUMNS], ds_acc[ROWS][COLUMNS];
    weights_of_tile<true>(p, smem, head, tile_at(tile), partly, p_acc, ds_acc, probe);
    // dQ += dS K
    store_weights(smem.weights, ds_acc);
    __syncwarp();  // weights: written by this warp, read by this warp
    add_result(dq_acc, smem.weights, smem.k, [&](int chunk) {
      load_tile(smem.k, head.k_gmem, tile * STREAM, chunk);
    });
    __syncthreads();  // the tile has been read by all, the next may overwrite it
  }
  // 6 is all of it finite? 7 store
  probe_result(dq_acc, probe);
  if (__syncthreads_or(!is_finite(probe))) return false;
  const KMatrix dq_gmem(p.dq, head.b, head.h, p.seqlen_q);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk)
    store_result(dq_gmem, row0, chunk * C::CHUNK, dq_acc[chunk], Accumulation(p.scale));
  return true;
}

// P and scale * dS of one pair, by the definition.
struct CarefulPair {
  double weight = 0, dx = 0;
  bool attended;
  __device__ CarefulPair(
      const Params& p, const Head& head, long long row, long long column, bool allowed)
      : attended(allowed) {
    if (!attended) return;
    const double s = careful_product(head.q_gmem, row, head.k_gmem, column, p.scale);
    const double lse = *row_address<Accumulation>(p.lse, head.b, head.h, row);
    attended = !is_masked(s) && !is_masked(lse);
    if (!attended) return;
    const double dp = careful_product(head.do_gmem, row, head.v_gmem, column, 1);
    weight = weigh_by_lse(s, lse);
    dx = weight * (dp - *row_address<Accumulation>(p.delta, head.b, head.h, row)) * p.scale;
  }
};

__device__ __forceinline__ void careful_dk_dv(
    const Params& p, int b, int head_k, long long column0) {
  const int group = int(p.heads_q / p.heads_k);
  const KMatrix dk_gmem(p.dk, b, head_k, p.seqlen_k);
  const VMatrix dv_gmem(p.dv, b, head_k, p.seqlen_k);
  for (int own = threadIdx.x / 32; own < OWN; own += THREADS / 32) {
    const long long key = column0 + own;
    if (key >= p.seqlen_k) break;
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
    dk.store(dk_gmem, key);
    dv.store(dv_gmem, key);
  }
}

__device__ __forceinline__ void careful_dq(const Params& p, const Head& head, long long row0) {
  const KMatrix dq_gmem(p.dq, head.b, head.h, p.seqlen_q);
  const auto tile_at = [&](long long tile) {
    return Smem<true>::Tile{head.b, head.h, row0, tile * STREAM};
  };
  for (int own = threadIdx.x / 32; own < OWN; own += THREADS / 32) {
    const long long row = row0 + own;
    if (row >= p.seqlen_q) break;
    CarefulSum<C::HEAD_DIM> dq;
    visit_tokens<true, STREAM>(
        p, (p.seqlen_k + STREAM - 1) / STREAM, tile_at, own,
        [&](long long key0, long long key, bool allowed) {
          const CarefulPair pair(p, head, row, key, allowed);
          dq.add(head.k_gmem, key0, pair.dx, pair.attended);
        });
    dq.store(dq_gmem, row);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    dk_dv(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_memory[];
  auto& smem = *(Smem<false>*)shared_memory;
  static_assert(sizeof(smem) <= C::SHARED_BYTES, "cuflash/plan.py counts the bytes");
  const long long tiles = (p.seqlen_k + OWN - 1) / OWN;
  const long long items = p.batch * p.heads_k * tiles;
  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    const int b = int(item / tiles / p.heads_k), head_k = int(item / tiles % p.heads_k);
    const long long column0 = item % tiles * OWN;
    if (!dk_dv_tile(p, smem, b, head_k, column0)) careful_dk_dv(p, b, head_k, column0);
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    dq(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_memory[];
  auto& smem = *(Smem<true>*)shared_memory;
  static_assert(sizeof(smem) <= C::SHARED_BYTES, "cuflash/plan.py counts the bytes");
  const long long tiles = (p.seqlen_q + OWN - 1) / OWN;
  const long long items = p.batch * p.heads_q * tiles;
  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    const int b = int(item / tiles / p.heads_q), h = int(item / tiles % p.heads_q);
    const long long row0 = (tiles - 1 - item % tiles) * OWN;
    const Head head(p, b, h, int(h / (p.heads_q / p.heads_k)));
    if (!dq_tile(p, smem, head, row0)) careful_dq(p, head, row0);
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}
