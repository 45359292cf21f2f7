// The kernels before and after those of dk_dv and dq: two numbers a query; sums to dq.
#pragma once
#include "backward.cuh"

// The float32 sums of 64 queries and 64 columns of dq, in the order of a product's registers.
__device__ __forceinline__ float* sums_of_dq(
    const Params& p, long long b, long long h, long long row, int panel) {
  const long long block = ((b * p.heads_q + h) * padded_rows(p) + row) / 64;
  return (float*)p.dq_sums + (block * PANELS + panel) * (64 * 64);
}

#if PART_MAIN
// delta_i = <do_i, o_i> - dlse_i and lse_i * log2(e), a few lanes a row. A row that sees no key, or
// lies beyond the end, has delta 0 and lse +inf, which makes all its weights 0. An lse that is not
// finite, or so large that exp2 of a rounded difference says nothing, becomes NaN: the careful path
// has to do its tiles, unless do and dlse are 0: then the row adds nothing, like an empty one (rows of
// padding that an additive mask of large numbers leaves). The sums of dq are zeroed on the way.
extern "C" __global__ void __launch_bounds__(C::THREADS) delta(const __grid_constant__ Params p) {
  constexpr int LANES = 32 / C::DELTA_ROWS;
  const int lane = threadIdx.x % 32, place = lane % LANES;
  const long long warps = (long long)gridDim.x * (C::THREADS / 32), padded = padded_rows(p);
  const long long rows = p.batch * p.heads_q * padded;
  const long long warp = (long long)blockIdx.x * (C::THREADS / 32) + threadIdx.x / 32;
  for (long long first = warp * C::DELTA_ROWS; first < rows; first += warps * C::DELTA_ROWS) {
    const long long at = first + lane / LANES;
    const long long plane = quotient(at, padded), row = at - plane * padded;
    const long long b = quotient(plane, p.heads_q), h = plane - b * p.heads_q;
    const bool inside = at < rows && row < p.seqlen_q;
    float sum = 0;
    bool is_zero = true;  // do and dlse
    if (inside && 8 * place < C::HEAD_DIM_V) {
      using Piece = Pack<Storage, 8>;
      const VMatrix do_gmem(p.do_, b, h, p.seqlen_q), o_gmem(p.o, b, h, p.seqlen_q);
      const Piece x = *(const Piece*)(do_gmem.start + row * do_gmem.stride_s + 8 * place);
      const Piece y = *(const Piece*)(o_gmem.start + row * o_gmem.stride_s + 8 * place);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        sum = multiply_add(widen(x.at[e]), widen(y.at[e]), sum);
        is_zero = is_zero && widen(x.at[e]) == 0;
      }
    }
    sum = lanes_sum<LANES>(sum);
    is_zero = lanes_max<LANES>(is_zero ? 0.0f : 1.0f) == 0;
    if (at < rows && place == 0) {
      const float infinity = -negative_infinity();
      float lse2 = infinity;
      if (inside) {
        if (p.dlse.pointer != nullptr) {
          const float dlse = *row_address<float>(p.dlse, b, h, row);
          sum -= dlse;
          is_zero = is_zero && dlse == 0;
        }
        const float lse = *row_address<float>(p.lse, b, h, row), scaled = lse * LOG2_E;
        const bool is_fine = scaled < 1048576.0f && scaled > -1048576.0f;  // 2^20
        if (!is_masked(lse)) lse2 = is_fine ? scaled : is_zero ? infinity : infinity - infinity;
      }
      const bool is_empty = lse2 == infinity;
      *row_address<float>(p.delta, b, h, row) = is_empty ? 0 : sum;
      *row_address<float>(p.lse2, b, h, row) = lse2;
    }
#if IS_FUSED
    if (at < rows)
      for (int i = place; i < PANELS * PANEL / 4; i += LANES)
        ((float4*)p.dq_sums)[at * (PANELS * PANEL / 4) + i] = make_float4(0, 0, 0, 0);
#endif
  }
}
#endif

#if PART_MAIN && IS_FUSED
// dq from its sums, a warp 16 rows.
extern "C" __global__ void __launch_bounds__(C::THREADS) round_dq(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32;
  const long long warps = (long long)gridDim.x * (C::THREADS / 32), padded = padded_rows(p);
  const long long units = p.batch * p.heads_q * (padded / 16);
  for (long long at = (long long)blockIdx.x * (C::THREADS / 32) + threadIdx.x / 32; at < units;
       at += warps) {
    const long long plane = quotient(at, padded / 16), row0 = (at - plane * (padded / 16)) * 16;
    const int b = int(quotient(plane, p.heads_q)), h = int(plane - b * p.heads_q);
    if (row0 >= p.seqlen_q) continue;
    float dq[PANELS * 32];
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const float4* from = (const float4*)sums_of_dq(p, b, h, row0, panel) + row0 / 16 % 4 * 32 + lane;
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        const float4 sum = from[block * 128];
        float* const to = dq + 32 * panel + 4 * block;
        to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
      }
    }
    if (store_result(
            KMatrix(p.dq, b, h, p.seqlen_q), row0, lane / 4, dq, float(p.scale), first_probe(p)))
      continue;
    const Head head(p, b, h, int(h / (p.heads_q / p.heads_k)));
    const long long tile0 = row0 / C::OWN_Q * C::OWN_Q;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) careful_dq(p, head, tile0, int(row0 - tile0) + i);
  }
}
#endif
