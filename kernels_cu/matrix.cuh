// Tokens of one head in global memory, of any strides: loads and stores in the type of the sums.
#pragma once
#include "math.cuh"
#include "params.cuh"

constexpr int VECTOR = 16 / sizeof(Accumulation);  // numbers in a 16-byte access of shared memory
using Vector = Pack<Accumulation, VECTOR>;

// One head of one batch item in global memory: tokens x WIDTH.
template <int WIDTH, class Storage_ = Config::dtype>
struct Matrix {
  using Storage = Storage_;
  using Piece = Pack<Storage, VECTOR>;
  Storage* start;
  long long tokens, stride_s, stride_d;
  bool aligned;  // every VECTOR-th number of a row starts a piece that one instruction may access

  __device__ Matrix(const Tensor& tensor, long long b, long long h, long long tokens_)
      : start((Storage*)tensor.pointer + b * tensor.stride_b + h * tensor.stride_h),
        tokens(tokens_), stride_s(tensor.stride_s), stride_d(tensor.stride_d) {
    aligned = WIDTH % VECTOR == 0 && stride_d == 1 && stride_s % VECTOR == 0 &&
              (unsigned long long)start % sizeof(Piece) == 0;
  }

  __device__ __forceinline__ Accumulation at(long long token, int column) const {
    return widen(start[token * stride_s + column * stride_d]);
  }

  __device__ __forceinline__ void set(long long token, int column, Accumulation x) const {
    narrow(x, start[token * stride_s + column * stride_d]);
  }

  // VECTOR numbers of one token from `column` on; zero beyond the ends, so that padding is finite.
  template <bool ALIGNED>
  __device__ __forceinline__ Piece load(long long token, int column) const {
    Piece piece = {};
    if (token >= tokens) return piece;
    const Storage* row = start + token * stride_s;
    if (ALIGNED) {
      if (column < WIDTH) piece = *(const Piece*)(row + column);
    } else {
#pragma unroll
      for (int e = 0; e < VECTOR; ++e)
        if (column + e < WIDTH) piece.at[e] = row[(column + e) * stride_d];
    }
    return piece;
  }

  __device__ __forceinline__ void store(long long token, int column, const Vector& x) const {
    if (token >= tokens) return;
    Storage* row = start + token * stride_s;
    Piece piece;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) narrow(x.at[e], piece.at[e]);
    if (aligned) {
      if (column < WIDTH) *(Piece*)(row + column) = piece;
    } else {
#pragma unroll
      for (int e = 0; e < VECTOR; ++e)
        if (column + e < WIDTH) row[(column + e) * stride_d] = piece.at[e];
    }
  }
};
