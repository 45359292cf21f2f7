// Tiles of 16-bit numbers in shared memory as wgmma reads them, and its results in registers.
//
// A tile lies in panels of 64 columns, [panel][row][64], each row 128 bytes in the 128-byte swizzle
// that the copy engine writes. A warpgroup's product of 64 rows and N columns is N / 2 numbers a
// thread: fragment[4 * block + 2 * half + e] is row 16 * warp + lane / 4 + 8 * half and column
// 8 * block + 2 * (lane % 4) + e (PTX ISA 9.7.15.5).
#pragma once
#include "../matrix.cuh"
#include "../pipeline.cuh"

using Storage = Config::dtype;
constexpr int PANEL = Config::PANEL;  // columns
constexpr int PANEL_ROW = PANEL * 2;  // bytes
constexpr int PANELS = (Config::HEAD_DIM + PANEL - 1) / PANEL;
constexpr int PANELS_V = (Config::HEAD_DIM_V + PANEL - 1) / PANEL;
// of results in registers, like q and k and like v
constexpr int WIDTH = Config::WIDTH, WIDTH_V = Config::WIDTH_V;

// Tokens from `row` on of one head, a box of BOX tokens and a panel at a time, by one thread.
template <int BOX, int ROWS, int PANELS_>
__device__ __forceinline__ void load_panels(
    Storage (&to)[PANELS_][ROWS][PANEL], const TensorMap& map, unsigned long long* full,
    long long row, int head, int b) {
#pragma unroll
  for (int panel = 0; panel < PANELS_; ++panel)
#pragma unroll
    for (int at = 0; at < ROWS; at += BOX)
      cp_async_bulk_tensor_4d(
          to[panel][at], &map, full, panel * PANEL, int(row) + at, head, b);
}

// A value that all lanes of a warp have, so that the compiler knows it: around wgmma it accepts no
// branch that lanes might take differently, and addresses that it knows are cheaper.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(ALL_LANES, value, 0); }

// An operand in shared memory, as the lower word of its matrix descriptor (PTX ISA 9.7.15.5.1): its
// address in units of 16 bytes, so that a step is an addition; the fields above hold no more than
// bytes from a panel to the next (used where the operand is read transposed).
struct Operand {
  unsigned low;
  __device__ __forceinline__ static Operand at(const void* start, int panel_bytes = 16) {
    return {shared_address(start) >> 4 | unsigned(panel_bytes >> 4) << 16};
  }
  __device__ __forceinline__ Operand uniform() const { return {unsigned(::uniform(int(low)))}; }
  __device__ __forceinline__ Operand operator+(int bytes) const { return {low + (bytes >> 4)}; }
  // with 8 rows a group, in the 128-byte swizzle
  __device__ __forceinline__ unsigned long long descriptor() const {
    return (unsigned long long)(1u << 30 | 8 * PANEL_ROW >> 4) << 32 | low;
  }
};

// What a number that is not negative depends on is computed before what follows. ptxas would wait for
// P V first and then compute the softmax, which is there to run meanwhile: it moves no wait across a
// fence, and no store, be it one that never happens.
__device__ __forceinline__ void keep_before(float number, float& never) {
  st_shared_if_negative(shared_address(&never), number);
  fence_acq_rel_cta();
}

// sum = A B^T: both operands [.][DEPTH] with the depth along the rows of their tiles; A's tile has
// A_ROWS rows, B's has N.
template <int DEPTH, int A_ROWS, int N>
__device__ __forceinline__ void start_product(float (&sum)[N / 2], Operand a, Operand b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < (DEPTH + 15) / 16; ++step) {
    const int panel = step / 4, bytes = step % 4 * 32;
    wgmma_ss(
        sum, (a + (panel * A_ROWS * PANEL_ROW + bytes)).descriptor(),
        (b + (panel * N * PANEL_ROW + bytes)).descriptor(), step > 0);
  }
  wgmma_commit_group();
}

// sum += A B: A in registers as 16-bit pairs, 64 x ROWS; B [ROWS][width of sum].
template <int ROWS, int WIDTH>
__device__ __forceinline__ void start_weighted_sum(
    float (&sum)[WIDTH / 2], const unsigned (&a)[ROWS / 4], Operand b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < ROWS / 16; ++step)
    wgmma_rs(sum, a + 4 * step, (b + step * 16 * PANEL_ROW).descriptor(), 1);
  wgmma_commit_group();
}

// sum = A^T B, of 64 columns of A and of B; both [ROWS][.].
template <int ROWS>
__device__ __forceinline__ void start_outer_product(float (&sum)[32], Operand a, Operand b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < ROWS / 16; ++step)
    wgmma_ss_columns(
        sum, (a + step * 16 * PANEL_ROW).descriptor(), (b + step * 16 * PANEL_ROW).descriptor(),
        step > 0);
  wgmma_commit_group();
}

// A product in registers, rounded: it then is the A operand of another one.
template <class Storage, int N>
__device__ __forceinline__ void round_to(unsigned (&pairs)[N / 2], const float (&fragment)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    pairs[i] = cvt_rn_x2(fragment[2 * i], fragment[2 * i + 1], Storage());
}

// A warp's 16 rows of a product, rounded, to a tile in shared memory whose rows are those of the
// product, as wgmma reads it; `own` is this thread's first row.
template <int ROWS, int N>
__device__ __forceinline__ void store_tile(
    Storage (&to)[N / 32][ROWS][PANEL], int own, const unsigned (&pairs)[N / 2]) {
  const int lane = threadIdx.x % 32;
  const int row = own - lane / 4 + lane % 16;  // of blocks 0 and 1 of stmatrix, above each other
#pragma unroll
  for (int block = 0; block < N / 4; block += 2) {
    const int piece = (block + lane / 16) % 8 ^ row % 8;  // of 16 bytes, in the 128-byte swizzle
    stmatrix_x4(shared_address(&to[block / 8][row][8 * piece]), pairs + 2 * block);
  }
}

// Four lanes hold the pairs of a row in 4 blocks of 8 columns. Before: pair[j] is this lane's pair in
// block j. After: it is pair j of the block of this lane's number.
__device__ __forceinline__ void transpose_quad(unsigned (&pair)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool is_upper = threadIdx.x & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const unsigned given = is_upper ? pair[j] : pair[j | bit];
      const unsigned taken = __shfl_xor_sync(ALL_LANES, given, bit);
      (is_upper ? pair[j] : pair[j | bit]) = taken;
    }
  }
}

// Whether a thread's numbers are finite: 0 times all of them, NaN if one is not.
template <int N>
__device__ __forceinline__ float probe_of(const float (&fragment)[N]) {
  float chain[4] = {};  // several, so that one need not wait for the other
#pragma unroll
  for (int i = 0; i < N; ++i) chain[i % 4] = multiply_add(fragment[i], 0.0f, chain[i % 4]);
  return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

// A warp's 16 rows to global memory, 16 bytes a lane; `token` is this thread's first.
template <int COLUMNS, int N>
__device__ __forceinline__ void store_rows(
    const Matrix<COLUMNS>& x, long long token, const float (&fragment)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long at = token + 8 * half;
#pragma unroll
    for (int block = 0; block < N / 4; block += 4) {
      unsigned pair[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (block + j) + 2 * half;
        pair[j] = cvt_rn_x2(fragment[i], fragment[i + 1], Storage());
      }
      transpose_quad(pair);
      const int column = 8 * (block + lane % 4);
      if (at < x.tokens && column < COLUMNS)
        *(uint4*)(x.start + at * x.stride_s + column) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
  }
}

// The same in the type of the sums, of a tile that other blocks share: the sums of a segment.
template <int COLUMNS, int N>
__device__ __forceinline__ void store_sums(
    const Matrix<COLUMNS, float>& x, int own, const float (&fragment)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2;
    if (column < COLUMNS)
      *(float2*)(x.start + (own + i / 2 % 2 * 8) * COLUMNS + column) =
          make_float2(fragment[i], fragment[i + 1]);
  }
}
