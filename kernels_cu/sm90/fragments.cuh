// Tiles of 16-bit numbers in shared memory as wgmma reads them, and its results in registers.
//
// A tile lies in panels of 64 columns, [panel][row][64], each row 128 bytes in the 128-byte swizzle
// that the copy engine writes. A warpgroup's product of 64 rows and N columns is N / 2 numbers a
// thread: fragment[4 * block + 2 * half + e] is row 16 * warp + lane / 4 + 8 * half and column
// 8 * block + 2 * (lane % 4) + e (PTX ISA 9.7.15.5).
#pragma once
#include "../math.cuh"
#include "../ptx_sm90.cuh"

constexpr int PANEL = 64;             // columns
constexpr int PANEL_ROW = PANEL * 2;  // bytes

__host__ __device__ constexpr int round_up(int n, int step) { return (n + step - 1) / step * step; }

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

// Reads and writes of these registers stay on their side of this line.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

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
  for (int step = 0; step < round_up(DEPTH, 16) / 16; ++step) {
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

// A product in registers, rounded: it then is the A operand of another one.
template <class Storage, int N>
__device__ __forceinline__ void round_to(unsigned (&pairs)[N / 2], const float (&fragment)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    pairs[i] = cvt_rn_x2(fragment[2 * i], fragment[2 * i + 1], Storage());
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
