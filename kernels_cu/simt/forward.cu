// Forward of the simt family: o = softmax(scale * q k^T) v and lse, on any GPU, for any dtype.
//
// A block owns BLOCK_Q query rows of one head and streams the key tiles past them. Scores, weights
// and sums are float32 (float64 for float64); a head dimension wider than a chunk goes through
// shared memory chunk by chunk. Dao 2023, arXiv:2307.08691, Algorithm 1.
#include "careful.cuh"

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

using Tile = ScoreTile<C::BLOCK_Q, C::BLOCK_K>;

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

// One tile of o and lse. Where a result or an attended score is not finite it stores nothing and
// returns false: the careful path then has to do the tile.
__device__ __forceinline__ bool forward_tile(
    const Params& p, Smem& smem, const Head& head, long long row0) {
  const auto q_gmem = head.q(p), k_gmem = head.k(p);
  const auto v_gmem = head.v(p);
  // 2 state of this thread's rows
  RowState<Accumulation> row[ROWS];
  Accumulation o_acc[CHUNKS_V][ROWS][COLUMNS_V] = {};  // its part of [BLOCK_Q][head_dim_v]
  Accumulation probe = first_probe(p);

  // 3 prologue: a q that fits into one chunk stays in shared memory
  if (CHUNKS == 1) load_tile(smem.q, q_gmem, row0, 0);

  // 4, 5 over the key tiles that the mask does not skip, whole and partly attended ones
  Walk walk((p.seqlen_k + C::BLOCK_K - 1) / C::BLOCK_K);
  const auto tile_at = [&](long long tile) {
    return Tile{head.b, head.h, row0, tile * C::BLOCK_K};
  };
  long long tile;
  bool partly;
  while (walk.next([&](long long at) { return tile_at(at).state(p); }, tile, partly)) {
    const long long column0 = tile * C::BLOCK_K;
    // S = scale * Q K^T, -inf where masked
    Accumulation s_acc[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (chunk > 0) __syncthreads();  // the chunk before has been read by all
      if (CHUNKS > 1) load_tile(smem.q, q_gmem, row0, chunk);
      load_tile(smem.k, k_gmem, column0, chunk);
      if (chunk == 0) load_tile(smem.v, v_gmem, column0, 0);
      __syncthreads();  // q, k, v: written by all, read by all
      add_inner_products<C::HEAD_DIM>(s_acc, smem.q, smem.k, chunk);
    }
    finish_scores<true>(p, tile_at(tile), partly, s_acc, probe);

    // m = max(m, rowmax S);  P = exp(S - m);  l, O *= exp(m_old - m);  l += rowsum P
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      Accumulation tile_max = s_acc[i][0];
#pragma unroll
      for (int j = 1; j < COLUMNS; ++j) tile_max = larger(tile_max, s_acc[i][j]);
      const Accumulation rescale = row[i].raise(lanes_max<C::THREAD_COLUMNS>(tile_max));
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        s_acc[i][j] = row[i].weigh(s_acc[i][j]);
        row[i].row_sum += s_acc[i][j];
      }
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
#pragma unroll
        for (int j = 0; j < COLUMNS_V; ++j) o_acc[chunk][i][j] *= rescale;
    }
    store_weights(smem.p, s_acc);
    __syncwarp();  // p: written by this warp, read by this warp

    // O += P V
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk) {
      if (chunk > 0) {
        __syncthreads();  // the chunk before has been read by all
        load_tile(smem.v, v_gmem, column0, chunk);
        __syncthreads();  // v: written by all, read by all
      }
      add_outer_products(o_acc[chunk], smem.p, smem.v);
    }
    __syncthreads();  // the tile has been read by all, the next may overwrite it
  }

  // 6 finalize: o = O / l, lse = m + log l; and is all of it finite?
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    row[i].row_sum = lanes_sum<C::THREAD_COLUMNS>(row[i].row_sum);
    probe = multiply_add(row[i].row_sum, Accumulation(0), probe);
    const Accumulation factor = row[i].row_sum == 0 ? 0 : Accumulation(1) / row[i].row_sum;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
#pragma unroll
      for (int j = 0; j < COLUMNS_V; ++j) {
        probe = multiply_add(o_acc[chunk][i][j], Accumulation(0), probe);
        o_acc[chunk][i][j] *= factor;
      }
  }
  if (__syncthreads_or(!is_finite(probe))) return false;

  // 7 store
  const auto o_gmem = head.o(p);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const long long at = row0 + own_row(i);
    if (p.lse.pointer != nullptr && at < p.seqlen_q && thread_column() == 0)
      *row_address<Accumulation>(p.lse, head.b, head.h, at) = row[i].lse();
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
    store_result(o_gmem, row0, chunk * C::CHUNK_V, o_acc[chunk]);
  return true;
}

// The same tile by the definition: lse first, then o with normalised weights; a warp a row.
__device__ __forceinline__ void careful_forward(
    const Params& p, const Head& head, long long row0) {
  const auto q_gmem = head.q(p), k_gmem = head.k(p);
  const auto v_gmem = head.v(p);
  const auto tile_at = [&](long long tile) {
    return Tile{head.b, head.h, row0, tile * C::BLOCK_K};
  };
  const long long tiles = (p.seqlen_k + C::BLOCK_K - 1) / C::BLOCK_K;
#pragma unroll 1
  for (int own = threadIdx.x / 32; own < C::BLOCK_Q; own += THREADS / 32) {
    const long long at = row0 + own;
    if (at >= p.seqlen_q) break;
    double lse = 0;
    CarefulSum<C::HEAD_DIM_V> o;
    RowState<double> row;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      visit_tokens<true, C::BLOCK_K>(
          p, tiles, tile_at, own, [&](long long key0, long long key, bool attended) {
            double s = negative_infinity<double>();
            if (attended) s = careful_product(q_gmem, at, k_gmem, key, p.scale);
            if (pass == 0) {
              row.raise(s);
              row.row_sum += row.weigh(s);
            } else {
              o.add(v_gmem, key0, natural_exp(s - lse), !is_masked(s));
            }
          });
      if (pass == 0) lse = row.over_lanes().lse();
    }
    o.store(head.o(p), at);
    if (p.lse.pointer != nullptr && threadIdx.x % 32 == 0)
      *row_address<Accumulation>(p.lse, head.b, head.h, at) = Accumulation(lse);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    forward(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_memory[];
  Smem& smem = *(Smem*)shared_memory;
  const long long tiles = (p.seqlen_q + C::BLOCK_Q - 1) / C::BLOCK_Q;
  const long long items = p.batch * p.heads_q * tiles;
  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    // 1 coordinates. The last tile of a head comes first: under a causal mask it is the longest.
    const int b = int(item / tiles / p.heads_q), h = int(item / tiles % p.heads_q);
    const long long row0 = (tiles - 1 - item % tiles) * C::BLOCK_Q;
    const Head head(p, b, h);
    if (!forward_tile(p, smem, head, row0)) careful_forward(p, head, row0);
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}
