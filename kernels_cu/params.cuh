// The parameter block: the one by-value argument of every kernel. Every field is 8 bytes wide, and
// gpu/launch.py packs them in this order (a test compares the two).
#pragma once

// (batch, seqlen, heads, head_dim); strides in elements, of any sign, 0 too.
struct Tensor {
  void* pointer;
  long long stride_b, stride_s, stride_h, stride_d;
};

// One number a query row: (batch, heads_q, seqlen_q). A null pointer means that there is none.
struct Rows {
  void* pointer;
  long long stride_b, stride_h, stride_s;
};

#if HAS_TENSOR_MAPS
// What Hopper's copy engine has to know of an array (cuflash/gpu/tensor_map.py).
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};
#endif

struct Params {
#if HAS_TENSOR_MAPS
  TensorMap map_q, map_k, map_v;
#if IS_BACKWARD
  TensorMap map_do;
#endif
#endif
  Tensor q, k, v, o;
  Rows lse;
  Tensor do_, dq, dk, dv;  // backward only; `do` alone is a C++ keyword
  Rows dlse, delta, lse2;  // lse2 = lse * log2(e), of the sm90 family
  // Addresses of the work lists and of the results of split tiles, and how many of these fit in;
  // 0 where there are none (order.cuh).
  long long order_q, order_k, partials, slots;
  // Addresses of the sums for gradients of parameters and of their greatest values (gradients.cuh).
  long long sums, maxima;
  // Address of the state of turns.cuh; of the sums that become dq (sm90/rows.cuh).
  long long turns, dq_sums;
  long long batch, heads_q, heads_k, seqlen_q, seqlen_k;
  long long q_offset;  // the logical index of query row r is r + q_offset; of key column c it is c
  long long group;  // heads whose keys and values fit into the L2 cache together
  long long launch;  // a number that no other launch has
  double scale;
  long long words[Config::WORDS > 0 ? Config::WORDS : 1];  // operands of the mask's expression
};

template <class Number>
__device__ __forceinline__ Number* row_address(
    const Rows& rows, long long b, long long h, long long row) {
  return (Number*)rows.pointer + b * rows.stride_b + h * rows.stride_h + row * rows.stride_s;
}
