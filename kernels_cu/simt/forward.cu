// Forward of the simt family: o = softmax(scale * q k^T) v and lse, on any GPU, for any dtype.
//
// A block owns BLOCK_Q query rows of one head and streams the key tiles past them. Scores, weights
// and sums are float32 (float64 for float64); a head dimension wider than a chunk goes through
// shared memory chunk by chunk. Dao 2023, arXiv:2307.08691, Algorithm 1.
#include "../forward.cuh"
#include "scores.cuh"

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
static_assert(sizeof(Smem) == C::SHARED_BYTES, "cuflash/simt.py counts the same bytes");

// One tile of o and lse, or a segment of one. Where a result or an attended score is not finite it
// stores nothing and returns false: the careful path then has to do the tile.
__device__ __forceinline__ bool forward_tile(
    const Params& p, Smem& smem, const Head& head, Item item) {
  const long long row0 = item.tile * C::BLOCK_Q;
  const auto q_gmem = head.q(p), k_gmem = head.k(p);
  const auto v_gmem = head.v(p);
  // 2 state of this thread's rows
  RowState<Accumulation> row[ROWS];
  Accumulation o_acc[CHUNKS_V][ROWS][COLUMNS_V] = {};  // its part of [BLOCK_Q][head_dim_v]
  Accumulation probe = first_probe(p);

  // 3 prologue: a q that fits into one chunk stays in shared memory
  if (CHUNKS == 1) load_tile(smem.q, q_gmem, row0, 0);

  // 4, 5 over the key tiles that the mask does not skip, whole and partly attended ones
  Walk walk((p.seqlen_k + C::BLOCK_K - 1) / C::BLOCK_K, item.visits);
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
    Accumulation rescale = 1;
    if (!item.is_split()) rescale = include_sink(p, head.h, row[i]);
    probe = multiply_add(row[i].row_sum, Accumulation(0), probe);
    const Accumulation factor = row[i].row_sum == 0 ? 0 : rescale / row[i].row_sum;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
#pragma unroll
      for (int j = 0; j < COLUMNS_V; ++j) {
        probe = multiply_add(o_acc[chunk][i][j], Accumulation(0), probe);
        o_acc[chunk][i][j] *= factor;
      }
  }
  const bool is_bad = __syncthreads_or(!is_finite(probe));

  // 7 store
  if (item.is_split()) {
    const Partial<Natural> partial(p, item.slot);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (is_bad) row[i].row_sum = negative_infinity() - negative_infinity();
      if (thread_column() == 0) partial.row(own_row(i)) = row[i];
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_V; ++chunk)
      store_result(partial.o(), 0, chunk * C::CHUNK_V, o_acc[chunk]);
    return true;
  }
  if (is_bad) return false;
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

#if PART_MAIN
extern "C" __global__ void __launch_bounds__(THREADS, C::BLOCKS_PER_SM)
    forward(const __grid_constant__ Params p) {
  extern __shared__ Vector shared_memory[];
  Smem& smem = *(Smem*)shared_memory;
  const WorkList<Owned> list(p);
  const long long items = list.items(p);
  for (long long at = blockIdx.x; at < items; at += gridDim.x) {
    // 1 coordinates, the longest tile first
    const Item item = list.item(p, at);
    const Head head(p, item.b, item.head);
    if (!forward_tile(p, smem, head, item)) {
#pragma unroll 1
      for (int own = threadIdx.x / 32; own < C::BLOCK_Q; own += THREADS / 32)
        careful_forward(p, head, item.tile * C::BLOCK_Q, own);
    }
    __syncthreads();  // shared memory has been read by all, the next item may overwrite it
  }
}

#endif

#if HAS_ORDER && PART_COMBINE
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
  combine_segments<Natural>(p);
}
#endif
