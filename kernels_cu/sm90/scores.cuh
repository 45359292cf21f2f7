// From products to scores, in the registers of a warp: mask and score. A thread holds two owned rows
// of a tile (fragments.cuh): queries in forward and dq, keys in dk_dv.
#pragma once
#include "../scores.cuh"
#include "fragments.cuh"

// The query and the key of a thread's score `i`, counted from those of the tile; `own` is its first
// owned token, `pass` its first passing one.
template <bool OWN_IS_Q>
__device__ __forceinline__ int query_of(int i, int own, int pass) {
  return OWN_IS_Q ? own + i / 2 % 2 * 8 : pass + i / 4 * 8 + i % 2;
}
template <bool OWN_IS_Q>
__device__ __forceinline__ int key_of(int i, int own, int pass) {
  return query_of<!OWN_IS_Q>(i, own, pass);
}

// Where each query attends an interval of keys, the mask is two comparisons a score: the interval of
// a query of a tile, counted from key `key` of the tile.
struct Attended {
  int first = 0, end;
  template <class Tile>
  __device__ __forceinline__ Attended(const Params& p, const Tile& tile, int row, int key) {
    const long long start = tile.column0 + key;
    long long from = 0, to = p.seqlen_k;
#if HAS_MASK
    long long at = tile.row0 + row;
    if (at >= p.seqlen_q) at = p.seqlen_q - 1;
    mask_interval(p, tile.b, tile.h, at, from, to);
    if (to > p.seqlen_k) to = p.seqlen_k;
    if (INTERVAL_HAS_FIRST) first = place(from - start);
#endif
    if (HAS_SCORE && tile.row0 + row >= p.seqlen_q) to = 0;  // a score may read arrays
    end = place(to - start);
  }
  __device__ __forceinline__ bool operator()(int key) const {
    return key < end && (!INTERVAL_HAS_FIRST || key >= first);
  }

 private:
  __device__ __forceinline__ static int place(long long at) {
    return int(at < 0 ? 0 : at > 256 ? 256 : at);  // tiles have 256 keys at most
  }
};

// Calls visit(i, attended) for a thread's scores FIRST to FIRST + COUNT - 1.
template <bool OWN_IS_Q, int FIRST, int COUNT, class Tile, class Visit>
__device__ __forceinline__ void visit_intervals(
    const Params& p, const Tile& tile, int own, int pass, Visit visit) {
  if constexpr (OWN_IS_Q) {
    const Attended upper(p, tile, own, pass), lower(p, tile, own + 8, pass);
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i)
      visit(i, (i / 2 % 2 ? lower : upper)(i / 4 * 8 + i % 2));
  } else {
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; i += i % 2 ? 3 : 1) {
      const Attended attended(p, tile, query_of<false>(i, own, pass), own);
      visit(i, attended(0));
      visit(i + 2, attended(8));
    }
  }
}

template <bool OWN_IS_Q, int N, class Tile>
__device__ __forceinline__ void cut_scores(
    const Params& p, const Tile& tile, int own, int pass, float (&s)[N]) {
  visit_intervals<OWN_IS_Q, 0, N>(p, tile, own, pass, [&](int i, bool attended) {
    if (!attended) s[i] = negative_infinity();
  });
}

// 32 of a thread's scores, those from 32 * WORD on: bit i says whether pair 32 * WORD + i is attended.
template <bool OWN_IS_Q, int WORD, int N, class Tile>
__device__ __forceinline__ unsigned allowed_pairs(
    const Params& p, const Tile& tile, int own, int pass) {
  constexpr int COUNT = N - 32 * WORD < 32 ? N - 32 * WORD : 32;
  unsigned allowed = 0;
  if constexpr (MASK_IS_INTERVAL) {
    visit_intervals<OWN_IS_Q, 32 * WORD, COUNT>(p, tile, own, pass, [&](int i, bool attended) {
      allowed |= unsigned(attended) << (i - 32 * WORD);
    });
  } else {
#pragma unroll 1  // the text of a mask may be long
    for (int block = 0; block < COUNT / 4; ++block)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * (8 * WORD + block) + e;
        const bool allows =
            tile.allows(p, query_of<OWN_IS_Q>(i, own, pass), key_of<OWN_IS_Q>(i, own, pass));
        allowed |= unsigned(allows) << (4 * block + e);
      }
  }
  return allowed;
}

// Of all N scores of a thread, 32 a word.
template <bool OWN_IS_Q, int N, int WORD = 0, class Tile>
__device__ __forceinline__ void find_allowed(
    const Params& p, const Tile& tile, bool partly, int own, int pass,
    unsigned (&allowed)[(N + 31) / 32]) {
  if constexpr (32 * WORD < N) {
    allowed[WORD] = partly ? allowed_pairs<OWN_IS_Q, WORD, N>(p, tile, own, pass) : ~0u;
    find_allowed<OWN_IS_Q, N, WORD + 1>(p, tile, partly, own, pass, allowed);
  }
}

// s = score(scale * x), or x itself where the scale waits for the exponent; -inf where masked.
template <bool OWN_IS_Q, int N, class Tile>
__device__ __forceinline__ void finish_scores(
    const Params& p, const Tile& tile, bool partly, int own, int pass, float (&s)[N]) {
  constexpr bool HAS_VALUE = HAS_SCORE || Config::SCALE_FIRST;
  unsigned allowed[(N + 31) / 32];
  find_allowed<OWN_IS_Q, N>(p, tile, partly, own, pass, allowed);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = HAS_VALUE ? s[i] * float(p.scale) : s[i];
    s[i] = negative_infinity();
    if (allowed[i / 32] >> i % 32 & 1)
      s[i] =
          score_at(p, tile, query_of<OWN_IS_Q>(i, own, pass), key_of<OWN_IS_Q>(i, own, pass), x);
  }
}
