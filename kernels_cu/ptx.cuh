// One function an instruction, named after it: the only inline assembly of the package.
#pragma once

#ifndef CUFLASH_EMULATE  // tests/emulator brings its own, to run the kernels on a CPU

// PTX ISA 9.7.9.21 (cvt): binary16 to binary32, exact.
__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// PTX ISA 9.7.9.21 (cvt): binary32 to binary16, to the nearest, ties to even.
__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// PTX ISA 9.7.3.21 (ex2): 2^x to 2 ulp, subnormal numbers as zero.
__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
