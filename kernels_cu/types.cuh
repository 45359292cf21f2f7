// Storage types and their conversions, without any CUDA header (so none has to be installed).
#pragma once
#include "ptx.cuh"

// 16-bit floats are distinct types over their bits.
struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(float16 value) { return cvt_f32_f16(value.bits); }
// Integer arithmetic for bfloat16: Turing has no instruction for it.
__device__ __forceinline__ float to_float(bfloat16 value) {
  return __uint_as_float((unsigned)value.bits << 16);
}

// Storage type -> the type that sums are held in, exact.
__device__ __forceinline__ double widen(double value) { return value; }
template <class Storage>
__device__ __forceinline__ float widen(Storage value) {
  return to_float(value);
}

// Sum -> storage type, to the nearest, ties to even.
__device__ __forceinline__ void narrow(double value, double& stored) { stored = value; }
__device__ __forceinline__ void narrow(float value, float& stored) { stored = value; }
__device__ __forceinline__ void narrow(float value, float16& stored) {
  stored.bits = cvt_rn_f16_f32(value);
}
__device__ __forceinline__ void narrow(float value, bfloat16& stored) {
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  stored.bits = (unsigned short)(value != value ? 0x7fffu : rounded >> 16);
}

// N numbers that move as one. Aligned, so that one instruction loads or stores them.
template <class Type, int N>
struct alignas(N * sizeof(Type)) Pack {
  Type at[N];
};
