// CUDA on one CPU thread: each thread of a block is a fiber, and barriers switch between fibers.
// Enough for the simt kernels. A barrier that not all threads reach is reported, and shared memory
// starts as NaN, so that what is read before it is written shows.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define CUFLASH_EMULATE
#define __device__
#define __global__
#define __constant__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulator {

enum Wait { RUNS, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Wait wait;
  unsigned long long slot[2];  // what a warp exchanges; two, so that the next one may start early
  int turn;
  int flag;
};

struct Dim {
  unsigned x, y, z;
};

std::vector<Fiber> fibers;
std::function<void()> body;
ucontext_t scheduler;
unsigned current;
int block_or;

inline void wait_as(Wait wait) {
  fibers[current].wait = wait;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void enter() {
  body();
  wait_as(DONE);
}

}  // namespace emulator

emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

// The value of every lane's `bits`, seen by all lanes of the warp.
inline unsigned long long exchange(unsigned long long bits, unsigned lane) {
  Fiber& fiber = fibers[current];
  const int turn = fiber.turn;
  fiber.slot[turn] = bits;
  fiber.turn = 1 - turn;
  wait_as(AT_WARP);
  return fibers[current / 32 * 32 + lane].slot[turn];
}

inline void resume(unsigned thread) {
  current = thread;
  threadIdx.x = thread;
  swapcontext(&scheduler, &fibers[thread].context);
}

// Runs one warp until all of its threads wait for the block or are done.
inline bool run_warp(unsigned first, bool reverse) {
  for (;;) {
    for (unsigned n = 0; n < 32; ++n) {
      const unsigned thread = first + (reverse ? 31 - n : n);
      if (fibers[thread].wait == RUNS) resume(thread);
    }
    unsigned at_warp = 0;
    for (unsigned n = 0; n < 32; ++n) at_warp += fibers[first + n].wait == AT_WARP;
    if (at_warp == 0) return true;
    if (at_warp != 32) return false;  // lanes of a warp wait for different things
    for (unsigned n = 0; n < 32; ++n) fibers[first + n].wait = RUNS;
  }
}

inline bool run_block(unsigned threads, bool reverse) {
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.wait = RUNS;
    fiber.turn = fiber.flag = 0;
  }
  for (;;) {
    for (unsigned n = 0; n < threads; n += 32)
      if (!run_warp(reverse ? threads - 32 - n : n, reverse)) return false;
    unsigned at_block = 0;
    block_or = 0;
    for (Fiber& fiber : fibers) {
      at_block += fiber.wait == AT_BLOCK;
      block_or |= fiber.flag;
    }
    if (at_block == 0) return true;
    if (at_block != threads) return false;  // some threads never come to the barrier
    for (Fiber& fiber : fibers) fiber.wait = RUNS;
  }
}

// Every block of a launch. `reverse` runs threads in the opposite order: a missing barrier then
// gives other numbers. Returns 0, or 1 for a barrier that not all threads reached.
inline int run(
    std::function<void()> kernel, unsigned grid, unsigned threads, bool reverse, void* shared,
    size_t shared_bytes) {
  fibers.resize(threads);
  for (Fiber& fiber : fibers) fiber.stack.resize(1 << 17);
  body = kernel;
  gridDim = {grid, 1, 1};
  blockDim = {threads, 1, 1};
  for (unsigned block = 0; block < grid; ++block) {
    blockIdx = {block, 0, 0};
    std::memset(shared, 0xff, shared_bytes);
    if (!run_block(threads, reverse)) return 1;
  }
  return 0;
}

template <class To, class From>
To bits_as(From from) {
  To to = 0;
  std::memcpy(&to, &from, sizeof(from) < sizeof(to) ? sizeof(from) : sizeof(to));
  return to;
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::fibers[emulator::current].flag = 0;
  emulator::wait_as(emulator::AT_BLOCK);
}
inline int __syncthreads_or(int flag) {
  emulator::fibers[emulator::current].flag = flag != 0;
  emulator::wait_as(emulator::AT_BLOCK);
  return emulator::block_or;
}
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0, 0); }

inline unsigned __ballot_sync(unsigned, int flag) {
  const unsigned lane = threadIdx.x % 32;
  emulator::exchange(flag != 0, lane);
  const int turn = 1 - emulator::fibers[emulator::current].turn;
  unsigned ballot = 0;
  for (unsigned n = 0; n < 32; ++n)
    ballot |= unsigned(emulator::fibers[emulator::current / 32 * 32 + n].slot[turn]) << n;
  return ballot;
}
template <class Number>
Number __shfl_sync(unsigned, Number value, int lane) {
  const auto bits = emulator::bits_as<unsigned long long>(value);
  return emulator::bits_as<Number>(emulator::exchange(bits, lane));
}
template <class Number>
Number __shfl_xor_sync(unsigned mask, Number value, int offset) {
  return __shfl_sync(mask, value, (threadIdx.x % 32) ^ offset);
}
template <class Number>
Number __shfl_up_sync(unsigned mask, Number value, int offset) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane < offset ? lane : lane - offset);
}

inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clzll(long long bits) { return bits ? __builtin_clzll(bits) : 64; }
inline float __uint_as_float(unsigned bits) { return emulator::bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulator::bits_as<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return emulator::bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return emulator::bits_as<long long>(value); }
template <class Number>
Number atomicAdd(Number* at, Number value) {
  const Number old = *at;
  *at += value;
  return old;
}
template <class Number>
Number atomicMax(Number* at, Number value) {
  const Number old = *at;
  *at = value > old ? value : old;
  return old;
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fmul_rn(float a, float b) { return a * b; }

// What ptx.cuh has for a GPU.
inline float cvt_f32_f16(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = exponent == 0    ? std::ldexp(float(fraction), -24)
                : exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : std::ldexp(float(fraction + 1024), exponent - 25);
  return bits >> 15 ? -value : value;
}
inline float ex2_approx_ftz_f32(float x) { return std::exp2(x); }
inline unsigned short cvt_rn_f16_f32(float value) {
  const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-05f) return sign | (unsigned short)std::lrint(std::ldexp(size, 24));
  int exponent;
  const float fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  const long rounded = std::lrint(std::ldexp(fraction, 11));
  return sign | (unsigned short)(((exponent + 14) << 10) + (rounded - 1024));
}
