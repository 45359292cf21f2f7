// Forward of the simt family: o = softmax(scale * q k^T) v and lse, on any GPU, for any dtype.
//
// A block owns BLOCK_Q query rows of one head and streams the key tiles past them. Scores, weights
// and sums are float32 (float64 for float64); a head dimension wider than a chunk goes through
// shared memory chunk by chunk. Dao 2023, arXiv:2307.08691, Algorithm 1.
#include "scores.cuh"

using C = Config;
constexpr int ROWS = C::BLOCK_Q / C::THREAD_ROWS;          // query rows of one thread
constexpr int COLUMNS = C::BLOCK_K / C::THREAD_COLUMNS;    // its keys in a tile of scores
constexpr int COLUMNS_V = C::CHUNK_V / C::THREAD_COLUMNS;  // its columns in a chunk of o
constexpr int CHUNKS = (C::HEAD_DIM + C::CHUNK - 1) / C::CHUNK;
constexpr int CHUNKS_V = (C::HEAD_DIM_V + C::CHUNK_V - 1) / C::CHUNK_V;

struct Smem {
  SharedTile<C::BLOCK_Q, C::CHUNK> q;
  SharedTile<C::BLOCK_K, C::CHUNK> k;
  SharedTile<C::BLOCK_K, C::CHUNK_V> v;
  SharedTile<C::BLOCK_K, C::BLOCK_Q> p;  // weights, a column a query row
};
static_assert(sizeof(Smem) == C::SHARED_BYTES, "cuflash/plan.py counts the same bytes");

// One tile of o and lse. Where a result or an attended score is not finite it stores nothing and
// returns true: the careful path then does the tile again. That one leaves masked pairs out of
// every product (0 * NaN), and sums scores in double with the scale inside (overflow).
template <bool CAREFUL>
__device__ __forceinline__ bool forward_tile(
    const Params& p, Smem& smem, int b, int h, long long row0) {
  using Sum = typename Select<CAREFUL, double, Accumulation>::type;
  // 1 coordinates
  const long long head_k = h / (p.heads_q / p.heads_k);
  const Matrix<C::HEAD_DIM> q_gmem(p.q, b, h, p.seqlen_q), k_gmem(p.k, b, head_k, p.seqlen_k);
  const Matrix<C::HEAD_DIM_V> v_gmem(p.v, b, head_k, p.seqlen_k), o_gmem(p.o, b, h, p.seqlen_q);
  const Scale scale(p.scale, CAREFUL);
  // A power of two below 1 / seqlen_k: sums of damped weights times values cannot overflow.
  const Accumulation damp =
      CAREFUL ? Accumulation(1) / Accumulation(1ull << (64 - __clzll(p.seqlen_k))) : 1;

  // 2 state of this thread's rows
  RowState row[ROWS];
  Accumulation o_acc[CHUNKS_V][ROWS][COLUMNS_V] = {};  // its part of [BLOCK_Q][head_dim_v]
  Accumulation probe = 0;

  // 3 prologue: a q that fits into one chunk stays in shared memory
  if (CHUNKS == 1) load_tile(smem.q, q_gmem, row0, 0);

  // 4, 5 over the key tiles that the mask does not skip, whole and partly attended ones
  using Tile = ScoreTile<C::BLOCK_Q, C::BLOCK_K>;
  const auto tile_at = [&](long long tile) { return Tile{b, h, row0, tile * C::BLOCK_K}; };
  Walk walk((p.seqlen_k + C::BLOCK_K - 1) / C::BLOCK_K);
  long long tile;
  bool partly;
  while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
    const long long column0 = tile * C::BLOCK_K;
    // S = scale * Q K^T
    Sum sum[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (chunk > 0) __syncthreads();  // the chunk before has been read by all
      if (CHUNKS > 1) load_tile(smem.q, q_gmem, row0, chunk);
      load_tile(smem.k, k_gmem, column0, chunk);
      if (chunk == 0) load_tile(smem.v, v_gmem, column0, 0);
      __syncthreads();  // q, k, v: written by all, read by all
      add_inner_products<C::HEAD_DIM>(sum, smem.q, smem.k, chunk, Sum(scale.inner));
    }
    Accumulation s_acc[ROWS][COLUMNS];
    finish_scores<true>(p, tile_at(tile), partly, scale.outer, sum, s_acc, probe);

    // m = max(m, rowmax S);  P = exp(S - m);  l, O *= exp(m_old - m);  l += rowsum P
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      Accumulation tile_max = s_acc[i][0];
#pragma unroll
      for (int j = 1; j < COLUMNS; ++j) tile_max = larger(tile_max, s_acc[i][j]);
      const Accumulation rescale = row[i].raise(lanes_max<C::THREAD_COLUMNS>(tile_max));
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        s_acc[i][j] = row[i].weigh(s_acc[i][j]) * damp;
        row[i].row_sum += s_acc[i][j];
      }
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
#pragma unroll
        for (int j = 0; j < COLUMNS_V; ++j) o_acc[chunk][i][j] *= rescale;
    }
    store_weights(smem.p, s_acc);
    __syncwarp();  // p: written by this warp, read by this warp

    // O += P V. The sum of a tile is rounded apart from the long one.
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk) {
      if (chunk > 0) {
        __syncthreads();  // the chunk before has been read by all
        load_tile(smem.v, v_gmem, column0, chunk);
        __syncthreads();  // v: written by all, read by all
      }
      Accumulation pv[ROWS][COLUMNS_V];
      outer_products<CAREFUL>(pv, smem.p, smem.v);
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_V; ++j) o_acc[chunk][i][j] += pv[i][j];
    }
    __syncthreads();  // the tile has been read by all, the next may overwrite it
  }

  // 6 finalize: o = O / l, lse = m + log l; and is all of it finite?
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const Accumulation total = lanes_sum<C::THREAD_COLUMNS>(row[i].row_sum);
    row[i].row_sum = total;
    const Accumulation factor = total == 0 ? Accumulation(0) : Accumulation(1) / total;
    probe = multiply_add(total, Accumulation(0), probe);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
#pragma unroll
      for (int j = 0; j < COLUMNS_V; ++j) {
        probe = multiply_add(o_acc[chunk][i][j], Accumulation(0), probe);
        o_acc[chunk][i][j] *= factor;
      }
  }
  if (!CAREFUL && __syncthreads_or(!is_finite(probe))) return true;

  // 7 store
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const long long at = row0 + own_row(i);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
#pragma unroll
      for (int j = 0; j < COLUMNS_V; j += VECTOR) {
        Vector vector;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) vector.at[e] = o_acc[chunk][i][j + e];
        o_gmem.store(at, chunk * C::CHUNK_V + result_column(j), vector);
      }
    if (p.lse.pointer != nullptr && at < p.seqlen_q && thread_column() == 0)
      *row_address<Accumulation>(p.lse, b, h, at) = row[i].lse(damp);
  }
  return false;
}

extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    forward(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_memory[];
  Smem& smem = *(Smem*)shared_memory;
  const long long tiles = (p.seqlen_q + C::BLOCK_Q - 1) / C::BLOCK_Q;
  const long long items = p.batch * p.heads_q * tiles;
  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    // The last tile of a head comes first: under a causal mask it is the longest.
    const int b = int(item / tiles / p.heads_q), h = int(item / tiles % p.heads_q);
    const long long row0 = (tiles - 1 - item % tiles) * C::BLOCK_Q;
    if (forward_tile<false>(p, smem, b, h, row0)) forward_tile<true>(p, smem, b, h, row0);
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}
