// Backward of the simt family: dq, dk, dv from do, o and lse, on any GPU, for any dtype.
//
// Three kernels. `delta` prepares a number a row. `dk_dv` owns key tiles and streams the query
// tiles of every head of the group past them; `dq` owns query tiles and streams key tiles. Both
// compute the scores again. No atomics: every sum has one order, so results are bit-reproducible.
// Dao 2023, arXiv:2307.08691, Algorithm 2; the formulas' numbers are those of cuflash/reference.py.
#include "scores.cuh"

using C = Config;
constexpr int CHUNKS = (C::HEAD_DIM + C::CHUNK - 1) / C::CHUNK;
constexpr int CHUNKS_V = (C::HEAD_DIM_V + C::CHUNK_V - 1) / C::CHUNK_V;
constexpr int COLUMNS_D = C::CHUNK / C::THREAD_COLUMNS;      // a thread's columns in a chunk of dq, dk
constexpr int COLUMNS_DV = C::CHUNK_V / C::THREAD_COLUMNS;   // and of dv

using KMatrix = Matrix<C::HEAD_DIM>;    // like q and k
using VMatrix = Matrix<C::HEAD_DIM_V>;  // like v, o and do

// A block owns BLOCK_Q tokens and BLOCK_K pass: queries and keys in dq, keys and queries in dk_dv.
constexpr int OWN = C::BLOCK_Q, STREAM = C::BLOCK_K;
constexpr int ROWS = OWN / C::THREAD_ROWS;            // owned tokens of one thread
constexpr int COLUMNS = STREAM / C::THREAD_COLUMNS;   // its passing tokens in a tile of scores

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
  __device__ Head(const Params& p, int b_, int h_)
      : b(b_), h(h_), q_gmem(p.q, b, h, p.seqlen_q),
        k_gmem(p.k, b, h / (p.heads_q / p.heads_k), p.seqlen_k), do_gmem(p.do_, b, h, p.seqlen_q),
        v_gmem(p.v, b, h / (p.heads_q / p.heads_k), p.seqlen_k) {}
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
    const bool empty = is_masked_score(*row_address<Accumulation>(p.lse, b, h, row));
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

// S = scale * Q K^T and dP = dO V^T on one tile; then P = exp(min(S - lse, 0)) into `weight` and
// dS = P * (dP - delta) into `ds`, both with the mask, times the inner part of scale in ds.
// On return the last chunks of the streamed operands lie in shared memory, unread chunks before
// them do not; the owned operands stay there if they fit into one chunk.
template <bool CAREFUL, bool OWN_IS_Q>
__device__ __forceinline__ void weights_of_tile(
    const Params& p, Smem<OWN_IS_Q>& smem, const Head& head,
    const typename Smem<OWN_IS_Q>::Tile& tile, bool partly, Accumulation (&weight)[ROWS][COLUMNS],
    Accumulation (&ds)[ROWS][COLUMNS], Accumulation& probe) {
  using Sum = typename Select<CAREFUL, double, Accumulation>::type;
  const Scale scale(p.scale, CAREFUL);
  Sum sum[ROWS][COLUMNS] = {}, dp[ROWS][COLUMNS] = {};
  const bool load_q = !OWN_IS_Q || CHUNKS > 1, load_k = OWN_IS_Q || CHUNKS > 1;
  const bool load_do = !OWN_IS_Q || CHUNKS_V > 1, load_v = OWN_IS_Q || CHUNKS_V > 1;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    if (chunk > 0) __syncthreads();  // the chunk before has been read by all
    if (load_q) load_tile(smem.q, head.q_gmem, tile.row0, chunk);
    if (load_k) load_tile(smem.k, head.k_gmem, tile.column0, chunk);
    if (chunk == 0) {
      if (load_do) load_tile(smem.do_, head.do_gmem, tile.row0, 0);
      if (load_v) load_tile(smem.v, head.v_gmem, tile.column0, 0);
      if (!OWN_IS_Q) load_rows(p, smem, head.b, head.h, tile.row0);
    }
    __syncthreads();  // q, k, do, v, lse, delta: written by all, read by all
    if (OWN_IS_Q)
      add_inner_products<C::HEAD_DIM>(sum, smem.q, smem.k, chunk, Sum(scale.inner));
    else
      add_inner_products<C::HEAD_DIM>(sum, smem.k, smem.q, chunk, Sum(scale.inner));
  }
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS_V; ++chunk) {
    if (chunk > 0) {
      __syncthreads();  // the chunk before has been read by all
      load_tile(smem.do_, head.do_gmem, tile.row0, chunk);
      load_tile(smem.v, head.v_gmem, tile.column0, chunk);
      __syncthreads();  // do, v: written by all, read by all
    }
    if (OWN_IS_Q)
      add_inner_products<C::HEAD_DIM_V>(dp, smem.do_, smem.v, chunk, Sum(1));
    else
      add_inner_products<C::HEAD_DIM_V>(dp, smem.v, smem.do_, chunk, Sum(1));
  }
  finish_scores<OWN_IS_Q>(p, tile, partly, scale.outer, sum, weight, probe);
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int row = OWN_IS_Q ? own_row(i) : stream_column(j);
      weight[i][j] = weigh_by_lse(weight[i][j], smem.lse[row]);
      const Sum change = (dp[i][j] - Sum(smem.delta[row])) * Sum(scale.inner);
      ds[i][j] = is_masked_weight(weight[i][j]) ? weight[i][j]
                                                : Accumulation(Sum(weight[i][j]) * change);
    }
}

// result += weights x, chunk by chunk of x; reload_tile(chunk) brings a chunk that is not there.
template <bool CAREFUL, int CHUNKS_, int ROWS, int COLUMNS, class Weights, class Stream, class Reload>
__device__ __forceinline__ void add_outer_products(
    Accumulation (&result)[CHUNKS_][ROWS][COLUMNS], const Weights& weights, const Stream& x,
    Reload reload) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_; ++chunk) {
    if (CHUNKS_ > 1) {
      __syncthreads();  // the chunk before has been read by all
      reload(chunk);
      __syncthreads();  // x: written by all, read by all
    }
    Accumulation product[ROWS][COLUMNS];  // the sum of a tile is rounded apart from the long one
    outer_products<CAREFUL>(product, weights, x);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) result[chunk][i][j] += product[i][j];
  }
}

// Adds 0 times every number to the probe: NaN if one is not finite.
template <int CHUNKS_, int ROWS, int COLUMNS>
__device__ __forceinline__ void probe_result(
    const Accumulation (&result)[CHUNKS_][ROWS][COLUMNS], Accumulation& probe) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_; ++chunk)
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
        probe = multiply_add(result[chunk][i][j], Accumulation(0), probe);
}

template <int CHUNK, int CHUNKS_, int ROWS, int COLUMNS, int WIDTH>
__device__ __forceinline__ void store_result(
    const Matrix<WIDTH>& x_gmem, long long token0,
    const Accumulation (&result)[CHUNKS_][ROWS][COLUMNS], Accumulation factor) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_; ++chunk)
#pragma unroll
      for (int j = 0; j < COLUMNS; j += VECTOR) {
        Vector vector;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) vector.at[e] = result[chunk][i][j + e] * factor;
        x_gmem.store(token0 + own_row(i), chunk * CHUNK + result_column(j), vector);
      }
}

// One tile of dk and dv, summed over the query heads of the group. Returns true, and stores
// nothing, where the careful path has to do it again (as in forward.cu).
template <bool CAREFUL>
__device__ __forceinline__ bool dk_dv_tile(
    const Params& p, Smem<false>& smem, int b, int head_k, long long column0) {
  // 1 coordinates, 2 state
  const int group = int(p.heads_q / p.heads_k);
  Accumulation dk_acc[CHUNKS][ROWS][COLUMNS_D] = {}, dv_acc[CHUNKS_V][ROWS][COLUMNS_DV] = {};
  Accumulation probe = 0;
  // 3 prologue: k and v that fit into one chunk stay in shared memory
  const Head first(p, b, head_k * group);
  if (CHUNKS == 1) load_tile(smem.k, first.k_gmem, column0, 0);
  if (CHUNKS_V == 1) load_tile(smem.v, first.v_gmem, column0, 0);
  for (int member = 0; member < group; ++member) {
    const Head head(p, b, head_k * group + member);
    const auto tile_at = [&](long long tile) {
      return Smem<false>::Tile{head.b, head.h, tile * STREAM, column0};
    };
    // 4, 5 over the query tiles that the mask does not skip
    Walk walk((p.seqlen_q + STREAM - 1) / STREAM);
    long long tile;
    bool partly;
    while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
      Accumulation weight[ROWS][COLUMNS], ds[ROWS][COLUMNS];
      weights_of_tile<CAREFUL, false>(p, smem, head, tile_at(tile), partly, weight, ds, probe);
      // dV += P^T dO
      store_weights(smem.weights, weight);
      __syncwarp();  // weights: written by this warp, read by this warp
      add_outer_products<CAREFUL>(dv_acc, smem.weights, smem.do_, [&](int chunk) {
        load_tile(smem.do_, head.do_gmem, tile * STREAM, chunk);
      });
      // dK += dS^T Q
      __syncwarp();  // weights: read by this warp, may be overwritten
      store_weights(smem.weights, ds);
      __syncwarp();  // weights: written by this warp, read by this warp
      add_outer_products<CAREFUL>(dk_acc, smem.weights, smem.q, [&](int chunk) {
        load_tile(smem.q, head.q_gmem, tile * STREAM, chunk);
      });
      __syncthreads();  // the tile has been read by all, the next may overwrite it
    }
  }
  // 6 is all of it finite? 7 store
  probe_result(dk_acc, probe);
  probe_result(dv_acc, probe);
  if (!CAREFUL && __syncthreads_or(!is_finite(probe))) return true;
  const Scale scale(p.scale, CAREFUL);
  const KMatrix dk_gmem(p.dk, b, head_k, p.seqlen_k);
  const VMatrix dv_gmem(p.dv, b, head_k, p.seqlen_k);
  store_result<C::CHUNK>(dk_gmem, column0, dk_acc, Accumulation(scale.outer));
  store_result<C::CHUNK_V>(dv_gmem, column0, dv_acc, Accumulation(1));
  return false;
}

// One tile of dq, by the same rules.
template <bool CAREFUL>
__device__ __forceinline__ bool dq_tile(
    const Params& p, Smem<true>& smem, int b, int h, long long row0) {
  // 1 coordinates, 2 state
  const Head head(p, b, h);
  Accumulation dq_acc[CHUNKS][ROWS][COLUMNS_D] = {};
  Accumulation probe = 0;
  // 3 prologue: q and do that fit into one chunk stay in shared memory
  if (CHUNKS == 1) load_tile(smem.q, head.q_gmem, row0, 0);
  if (CHUNKS_V == 1) load_tile(smem.do_, head.do_gmem, row0, 0);
  load_rows(p, smem, b, h, row0);
  // 4, 5 over the key tiles that the mask does not skip
  const auto tile_at = [&](long long tile) {
    return Smem<true>::Tile{b, h, row0, tile * STREAM};
  };
  Walk walk((p.seqlen_k + STREAM - 1) / STREAM);
  long long tile;
  bool partly;
  while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
    Accumulation weight[ROWS][COLUMNS], ds[ROWS][COLUMNS];
    weights_of_tile<CAREFUL, true>(p, smem, head, tile_at(tile), partly, weight, ds, probe);
    // dQ += dS K
    store_weights(smem.weights, ds);
    __syncwarp();  // weights: written by this warp, read by this warp
    add_outer_products<CAREFUL>(dq_acc, smem.weights, smem.k, [&](int chunk) {
      load_tile(smem.k, head.k_gmem, tile * STREAM, chunk);
    });
    __syncthreads();  // the tile has been read by all, the next may overwrite it
  }
  // 6 is all of it finite? 7 store
  probe_result(dq_acc, probe);
  if (!CAREFUL && __syncthreads_or(!is_finite(probe))) return true;
  const KMatrix dq_gmem(p.dq, b, h, p.seqlen_q);
  store_result<C::CHUNK>(dq_gmem, row0, dq_acc, Accumulation(Scale(p.scale, CAREFUL).outer));
  return false;
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
    if (dk_dv_tile<false>(p, smem, b, head_k, column0))
      dk_dv_tile<true>(p, smem, b, head_k, column0);
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
    if (dq_tile<false>(p, smem, b, h, row0)) dq_tile<true>(p, smem, b, h, row0);
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}
