// One function an instruction of Hopper, named after it. The wgmma instructions that a Config needs
// are printed behind these (cuflash/gpu/wgmma.py).
#pragma once
#include "ptx.cuh"

using SharedAddress = unsigned;  // in the window of shared memory

__device__ __forceinline__ SharedAddress shared_address(const void* at) {
  return (SharedAddress)__cvta_generic_to_shared(at);
}

// PTX ISA 9.7.13.15 (mbarrier).
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned long long* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned long long* barrier, int parity) {
  unsigned done;
  asm volatile(
      "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// PTX ISA 9.7.9.27 (cp.async.bulk.tensor): a box of a tensor of 4 axes to shared memory.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(
    void* to, const void* tensor_map, unsigned long long* barrier, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
// The same of bytes that follow each other, a multiple of 16 (PTX ISA 9.7.9.25.4.1, cp.async.bulk).
__device__ __forceinline__ void cp_async_bulk(
    void* to, const void* from, int bytes, unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

// PTX ISA 9.7.13.1 (bar): `threads` threads meet, or let the others go on.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// PTX ISA 9.7.19.5 (setmaxnreg).
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// PTX ISA 9.7.15.7 (wgmma): order of registers, groups of products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void fence_acq_rel_cta() {
  asm volatile("fence.acq_rel.cta;" ::: "memory");
}

// Reads and writes of these registers stay on their side of this line.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// What this thread has written to shared memory is there for wgmma, behind the next barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// PTX ISA 9.7.9.17 (stmatrix): four 8 x 8 blocks of 16-bit numbers; lane n brings the address of row
// n % 8 of block n / 8.
__device__ __forceinline__ void stmatrix_x4(SharedAddress row, const unsigned* pairs) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// PTX ISA 9.7.13.7 (red): adds four numbers that lie side by side in global memory.
__device__ __forceinline__ void red_add_v4_f32(float* at, const float* x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ void st_shared_if_negative(SharedAddress at, float number) {
  asm volatile(
      "{ .reg .pred negative; setp.lt.f32 negative, %1, 0f00000000;\n"
      "  @negative st.shared.f32 [%0], %1; }" ::"r"(at),
      "f"(number)
      : "memory");
}

// PTX ISA 9.7.9.21 (cvt): two numbers to the nearest, ties to even, the first in the lower half.
__device__ __forceinline__ unsigned cvt_rn_x2(float low, float high, float16) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned cvt_rn_x2(float low, float high, bfloat16) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
