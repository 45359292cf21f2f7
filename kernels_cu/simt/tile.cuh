// Tiles: from global to shared memory, products of shared tiles into registers, and back.
//
// Every kernel owns the rows of some tokens (their results stay in registers) and streams the
// others past them. The THREADS of a block form a grid of THREAD_ROWS x THREAD_COLUMNS; the
// columns of one thread row are neighbouring lanes of one warp. A thread holds ROWS owned rows and
//   * of a tile of scores [OWN][STREAM]: every THREAD_COLUMNS-th column,
//   * of a result [OWN][head_dim chunk]: vectors, every THREAD_COLUMNS-th.
#pragma once
#include "../matrix.cuh"

constexpr int THREADS = Config::THREADS;
static_assert(32 % Config::THREAD_COLUMNS == 0, "a thread row lies in one warp");
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");

__device__ __forceinline__ int thread_row() { return threadIdx.x / Config::THREAD_COLUMNS; }
__device__ __forceinline__ int thread_column() { return threadIdx.x % Config::THREAD_COLUMNS; }

// This thread's row i of the owned tile: vectors of neighbouring rows, dealt out in turn.
__device__ __forceinline__ int own_row(int i) {
  return (i / VECTOR * Config::THREAD_ROWS + thread_row()) * VECTOR + i % VECTOR;
}
// This thread's column j of a tile of scores.
__device__ __forceinline__ int stream_column(int j) {
  return j * Config::THREAD_COLUMNS + thread_column();
}
// This thread's column j of a chunk of the result.
__device__ __forceinline__ int result_column(int j) {
  return (j / VECTOR * Config::THREAD_COLUMNS + thread_column()) * VECTOR + j % VECTOR;
}

// A tile in shared memory, held in the type of the sums. One vector of padding a row makes the
// row an odd number of vectors long: the same column of 8 rows then covers all 32 banks.
template <int ROWS_, int COLUMNS_>
struct SharedTile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static_assert(COLUMNS % (2 * VECTOR) == 0, "padding makes the length of a row odd");
  alignas(16) Accumulation at[ROWS][COLUMNS + VECTOR];

  __device__ __forceinline__ Vector load(int row, int column) const {
    return *(const Vector*)&at[row][column];
  }
  __device__ __forceinline__ void store(int row, int column, const Vector& vector) {
    *(Vector*)&at[row][column] = vector;
  }
};

template <bool ALIGNED, class Tile, int WIDTH>
__device__ __forceinline__ void load_tile_as(
    Tile& tile, const Matrix<WIDTH>& x, long long token0, int column0) {
  constexpr int PIECES = Tile::COLUMNS / VECTOR;  // of one row
  constexpr int BATCH = ALIGNED ? 4 : 1;  // pieces that a thread loads before it stores the first
#pragma unroll 1
  for (int start = threadIdx.x; start < Tile::ROWS * PIECES; start += BATCH * THREADS) {
    typename Matrix<WIDTH>::Piece piece[BATCH];
#pragma unroll
    for (int step = 0; step < BATCH; ++step) {
      const int index = start + step * THREADS;
      if (index < Tile::ROWS * PIECES)
        piece[step] = x.template load<ALIGNED>(
            token0 + index / PIECES, column0 + index % PIECES * VECTOR);
    }
#pragma unroll
    for (int step = 0; step < BATCH; ++step) {
      const int index = start + step * THREADS;
      if (index >= Tile::ROWS * PIECES) break;
      Vector vector;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) vector.at[e] = widen(piece[step].at[e]);
      tile.store(index / PIECES, index % PIECES * VECTOR, vector);
    }
  }
}

// Tokens from token0 on, one chunk of their numbers, into a shared tile. By the whole block; the
// caller puts barriers before (earlier readers) and after (readers to come).
template <class Tile, int WIDTH>
__device__ __forceinline__ void load_tile(
    Tile& tile, const Matrix<WIDTH>& x, long long token0, int chunk) {
  if (x.aligned)
    load_tile_as<true>(tile, x, token0, chunk * Tile::COLUMNS);
  else
    load_tile_as<false>(tile, x, token0, chunk * Tile::COLUMNS);
}

// sum[i][j] += <own row i, stream column j> over one chunk of WIDTH numbers a token.
template <int WIDTH, int ROWS, int COLUMNS, class Own, class Stream>
__device__ __forceinline__ void add_inner_products(
    Accumulation (&sum)[ROWS][COLUMNS], const Own& own, const Stream& stream, int chunk) {
  constexpr int DEPTH = (WIDTH + VECTOR - 1) / VECTOR * VECTOR;  // beyond WIDTH both are zero
  const int rest = DEPTH - chunk * Own::COLUMNS, depth = rest < Own::COLUMNS ? rest : Own::COLUMNS;
#pragma unroll 1
  for (int at = 0; at < depth; at += VECTOR) {
    Vector column[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) column[j] = stream.load(stream_column(j), at);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const Vector row = own.load(own_row(i), at);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
          sum[i][j] = multiply_add(row.at[e], column[j].at[e], sum[i][j]);
    }
  }
}

// result[i][j] += sum over the streamed tokens of weight[token][own row i] * x[token][column j].
// The sum of a tile is rounded apart from the long one, which so has far fewer terms.
template <int ROWS, int COLUMNS, class Weights, class Stream>
__device__ __forceinline__ void add_outer_products(
    Accumulation (&result)[ROWS][COLUMNS], const Weights& weights, const Stream& x) {
  Accumulation sum[ROWS][COLUMNS] = {};
#pragma unroll 2
  for (int token = 0; token < Stream::ROWS; ++token) {
    Vector weight[ROWS / VECTOR], column[COLUMNS / VECTOR];
#pragma unroll
    for (int i = 0; i < ROWS / VECTOR; ++i) weight[i] = weights.load(token, own_row(i * VECTOR));
#pragma unroll
    for (int j = 0; j < COLUMNS / VECTOR; ++j)
      column[j] = x.load(token, result_column(j * VECTOR));
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
        sum[i][j] = multiply_add(
            weight[i / VECTOR].at[i % VECTOR], column[j / VECTOR].at[j % VECTOR], sum[i][j]);
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) result[i][j] += sum[i][j];
}

// A tile of weights for add_outer_products: [streamed token][own row]. Read only by the warp that
// wrote them (a thread row lies in one warp), so __syncwarp orders both.
template <int ROWS, int COLUMNS, class Weights>
__device__ __forceinline__ void store_weights(
    Weights& weights, const Accumulation (&weight)[ROWS][COLUMNS]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int i = 0; i < ROWS; i += VECTOR) {
      Vector vector;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) vector.at[e] = weight[i + e][j];
      weights.store(stream_column(j), own_row(i), vector);
    }
}

// This thread's part of a chunk of results, times a factor, to global memory.
template <int WIDTH, class Storage, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_result(
    const Matrix<WIDTH, Storage>& x, long long token0, int column0,
    const Accumulation (&result)[ROWS][COLUMNS], Accumulation factor = 1) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; j += VECTOR) {
      Vector vector;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) vector.at[e] = result[i][j + e] * factor;
      x.store(token0 + own_row(i), column0 + result_column(j), vector);
    }
}
