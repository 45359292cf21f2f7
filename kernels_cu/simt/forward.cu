// Forward of the simt family: o = softmax(scale * q k^T) v and lse, on any GPU, for any dtype.
//
// A block owns BLOCK_Q query rows of one head and streams the key tiles past them. Scores, weights
// and sums are float32 (float64 for float64); a head dimension wider than a chunk goes through
// shared memory chunk by chunk. Dao 2023, arXiv:2307.08691, Algorithm 1.
#include "../order.cuh"
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
// row. A row_sum of NaN: something was not finite, the careful path has to do the row.
struct Partial {
  Accumulation* start;
  __device__ Partial(const Params& p, long long slot)
      : start((Accumulation*)p.partials + slot * C::PARTIAL_NUMBERS) {}
  __device__ Matrix<C::HEAD_DIM_V, Accumulation> o() const {
    const Tensor rows{start, 0, C::HEAD_DIM_V, 0, 1};
    return Matrix<C::HEAD_DIM_V, Accumulation>(rows, 0, 0, C::BLOCK_Q);
  }
  __device__ RowState<Accumulation>& row(int own) const {
    return ((RowState<Accumulation>*)(start + C::BLOCK_Q * C::HEAD_DIM_V))[own];
  }
};
static_assert(C::PARTIAL_NUMBERS == C::BLOCK_Q * (C::HEAD_DIM_V + 2), "as cuflash/plan.py says");

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
    const Partial partial(p, item.slot);
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

// One row of that by the definition: lse first, then o with normalised weights. By a warp.
__device__ __noinline__ void careful_forward(
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

#if HAS_ORDER && PART_ORDER
extern "C" __global__ void __launch_bounds__(THREADS) count(const __grid_constant__ Params p) {
  count_visits<Owned>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) arrange(const __grid_constant__ Params p) {
  arrange_rows<Owned>(p);
}

#endif

#if HAS_ORDER && PART_COMBINE
// o and lse of split tiles. The maximum and the sum of each segment, not its lse, are merged: the
// difference of two maxima is exact at any size of s.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
  combine_tokens<Owned>(p, [&](const Item& item, int own, const Slots& slots) {
    const Head head(p, item.b, item.head);
    const long long at = item.tile * C::BLOCK_Q + own;
    const int lane = threadIdx.x % 32;
    if (at >= p.seqlen_q) return;
    RowState<Accumulation> mine;
    for (long long segment = lane; segment < slots.count; segment += 32)
      mine.merge(Partial(p, slots[segment]).row(own));
    RowState<Accumulation> row = mine.over_lanes();
    include_sink(p, head.h, row);
    if (!is_finite(row.row_sum)) return careful_forward(p, head, item.tile * C::BLOCK_Q, own);
    const auto o_gmem = head.o(p);
    const Accumulation factor = row.row_sum == 0 ? 0 : Accumulation(1) / row.row_sum;
    for (int column = lane; column < C::HEAD_DIM_V; column += 32) {
      Accumulation sum = 0;
      for (long long segment = 0; segment < slots.count; ++segment) {
        const Partial partial(p, slots[segment]);
        const RowState<Accumulation> part = partial.row(own);
        const Accumulation weight = part.row_sum * row.weigh(part.row_max) * factor;
        sum = multiply_add(weight, partial.o().at(own, column), sum);
      }
      o_gmem.set(at, column, sum);
    }
    if (p.lse.pointer != nullptr && lane == 0)
      *row_address<Accumulation>(p.lse, head.b, head.h, at) = row.lse();
  });
}
#endif
