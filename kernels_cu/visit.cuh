// Which tiles of scores a block visits, and how: the answers of the generated interval functions
// (mask_state, mask_allows), and the ends of the sequences.
#pragma once
#include "math.cuh"
#include "params.cuh"

#if !HAS_MASK
constexpr bool MASK_IS_INTERVAL = true, INTERVAL_HAS_FIRST = false;  // of the keys that there are
#endif

enum TileState { SKIP = 0, PARTLY = 1, WHOLE = 2 };

// A tile of scores: BLOCK_Q rows from row0 on, BLOCK_K columns from column0 on.
template <int BLOCK_Q, int BLOCK_K>
struct ScoreTile {
  int b, h;
  long long row0, column0;

  // WHOLE: every pair is attended. SKIP: none is. PARTLY: the mask must be asked pair by pair. Rows
  // beyond the end of the queries may not count: what becomes of them is then never stored.
  __device__ int state(const Params& p, bool rows_count = true) const {
    long long row1 = row0 + BLOCK_Q - 1, column1 = column0 + BLOCK_K - 1;
    const bool overhangs = (rows_count && row1 >= p.seqlen_q) || column1 >= p.seqlen_k;
    if (row1 >= p.seqlen_q) row1 = p.seqlen_q - 1;
    if (column1 >= p.seqlen_k) column1 = p.seqlen_k - 1;
#if HAS_MASK
    const int state = mask_state(p, b, h, row0, row1, column0, column1);
#else
    const int state = WHOLE;
#endif
    return state == WHOLE && overhangs ? PARTLY : state;
  }

  // Whether the pair is attended. Padding beyond the ends never is.
  __device__ bool allows(const Params& p, int row, int column) const {
    if (row0 + row >= p.seqlen_q || column0 + column >= p.seqlen_k) return false;
#if HAS_MASK
    return mask_allows(p, b, h, row0 + row, column0 + column);
#else
    return true;
#endif
  }
};

// Which of an owned tile's visits, counted along its walk, one block makes: it leaves out `skip` of
// them and makes `left`. All of them, unless the tile is split (order.cuh). Bit s: whether any visit
// lies in slice s of the tiles that pass, so that a walk need not test the others.
struct Visits {
  int skip = 0, left = 0x7fffffff;
  unsigned long long slices = ~0ull;
};

// Tests of 32 tiles that make a slice.
__device__ __forceinline__ int tests_of_slice(long long tiles) {
  return int((tiles - 1) / (32 * Config::SLICES)) + 1;
}

// A walk over the tiles that are not skipped, in ascending order. A warp tests 32 tiles at a time,
// a lane a tile, and a ballot gives the answers to all: no list in memory, no host. Every warp of
// the block makes the same walk, so nothing has to be shared. Walks of one owned tile (the heads of
// a group) use up the same visits.
class Walk {
 public:
  __device__ Walk(long long tiles, Visits& visits) : tiles_(tiles), visits_(visits) {}

  // Moves to the next tile, false at the end. state_of(tile) must not depend on the thread.
  template <class StateOf>
  __device__ bool next(StateOf state_of, long long& tile, bool& partly) {
#if !HAS_MASK
    tile = ++first_;
    if (tile >= tiles_) return false;
    partly = state_of(tile) == PARTLY;
    return true;
#else
#if HAS_ORDER
    if (visits_.left == 0) return false;
#endif
    while (visited_ == 0) {
      first_ += 32;
#if HAS_ORDER
      pass_slices();
#endif
      if (first_ >= tiles_) return false;
      const long long mine = first_ + threadIdx.x % 32;
      const int state = mine < tiles_ ? state_of(mine) : int(SKIP);
      visited_ = __ballot_sync(ALL_LANES, state != SKIP);
      partly_ = __ballot_sync(ALL_LANES, state == PARTLY);
#if HAS_ORDER
      for (; visited_ != 0 && visits_.skip > 0; --visits_.skip) visited_ &= visited_ - 1;
#endif
    }
    const int bit = __ffs(visited_) - 1;
    visited_ &= visited_ - 1;
    tile = first_ + bit;
    partly = partly_ >> bit & 1u;
#if HAS_ORDER
    --visits_.left;
#endif
    return true;
#endif
  }

 private:
  // Moves first_ on to a slice that holds visits, to the end where there is none.
  __device__ void pass_slices() {
    const unsigned tests = tests_of_slice(tiles_), slice = unsigned(first_ / 32) / tests;
    const unsigned long long rest = slice < Config::SLICES ? visits_.slices >> slice : 0;
    if (rest & 1) return;
    first_ = rest == 0 ? tiles_ : 32ll * tests * (slice + __ffsll((long long)rest) - 1);
  }

  long long tiles_, first_ = HAS_MASK ? -32 : -1;
  Visits& visits_;
  unsigned visited_ = 0, partly_ = 0;  // bit t: the tile first_ + t
};
