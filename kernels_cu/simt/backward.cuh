// What the kernels of dq and of dk_dv share: types, and the weights of one tile of scores.
#pragma once
#include "../backward.cuh"
#include "scores.cuh"

constexpr int CHUNKS = (C::HEAD_DIM + C::CHUNK - 1) / C::CHUNK;
constexpr int CHUNKS_V = (C::HEAD_DIM_V + C::CHUNK_V - 1) / C::CHUNK_V;
constexpr int COLUMNS_D = C::CHUNK / C::THREAD_COLUMNS;     // a thread's part of a chunk of dq, dk
constexpr int COLUMNS_DV = C::CHUNK_V / C::THREAD_COLUMNS;  // and of dv

// A block owns BLOCK_Q tokens and BLOCK_K pass: queries and keys in dq, keys and queries in dk_dv.
constexpr int OWN = C::OWN_Q, STREAM = C::STREAM_K;
static_assert(OWN == C::OWN_K && STREAM == C::STREAM_Q, "one tile for both kernels");
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
  using Tile = typename Ownership<OWN_IS_Q, OWN, STREAM>::Tile;
};

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

// P = exp(min(S - lse, 0)) and dX = score'(X) * P * (dP - delta) on one tile, from X = scale * Q K^T,
// S = score(X) and dP = dO V^T; both 0 where masked. Without a score X is S. `sums` gets what the
// pairs add to parameters. On return the last chunk of each operand is in shared memory.
template <bool OWN_IS_Q, class Sums>
__device__ __forceinline__ void weights_of_tile(
    const Params& p, Smem<OWN_IS_Q>& smem, const Head& head,
    const typename Smem<OWN_IS_Q>::Tile& tile, bool partly, Accumulation (&p_acc)[ROWS][COLUMNS],
    Accumulation (&ds_acc)[ROWS][COLUMNS], Accumulation& probe, Sums& sums) {
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
#if HAS_SCORE
  Accumulation x_acc[ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) x_acc[i][j] = s_acc[i][j] * Accumulation(p.scale);
#endif
  finish_scores<OWN_IS_Q>(p, tile, partly, s_acc, probe);
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int row = OWN_IS_Q ? own_row(i) : stream_column(j);
      const bool masked = is_masked(s_acc[i][j]) || is_masked(smem.lse[row]);
      p_acc[i][j] = weigh_by_lse(s_acc[i][j], smem.lse[row]);
      ds_acc[i][j] = masked ? 0 : p_acc[i][j] * (dp_acc[i][j] - smem.delta[row]);
#if HAS_SCORE
      if (masked) continue;
      const long long at = tile.row0 + row;
      const long long key = tile.column0 + (OWN_IS_Q ? stream_column(j) : own_row(i));
      sums.add_pair(tile.b, tile.h, at, key, x_acc[i][j], ds_acc[i][j]);
      ds_acc[i][j] *= score_slope(p, tile.b, tile.h, at, key, x_acc[i][j]);
#endif
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

// A tile's result times a factor, to global memory.
template <int CHUNKS_, int COLUMNS_, int WIDTH, class Storage>
__device__ __forceinline__ void store_chunks(
    const Matrix<WIDTH, Storage>& x, long long token0,
    const Accumulation (&result)[CHUNKS_][ROWS][COLUMNS_], Accumulation factor) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_; ++chunk)
    store_result(x, token0, chunk * COLUMNS_ * C::THREAD_COLUMNS, result[chunk], factor);
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
