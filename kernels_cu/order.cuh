// In which order owned tiles are worked, and which of them several blocks share: for masks whose
// tiles differ in length (Expression.is_band says which do not; these and dense ones have no list).
//
// Longest first, so that what is left for the end is short, and a tile of very many visits is cut
// into segments, so that no block is still at it when all others are done. Before the kernel that
// does the work, on the caller's stream:
//   count    a block a row of the list (an owned tile; one row stands for every batch item or head
//            that the mask does not tell apart): its visits, by the same bounds as the walk, and
//            in which of 64 slices of the passing tiles they are, so that the walk tests no others
//   arrange  a warp a bucket of lengths: the list, longest bucket first, each in ascending order
// and after it:
//   combine  a warp a token of a split tile: its result from those of the segments, in their order
// The list is made anew in every call. A kept one would be wrong where captured arrays change in
// place, and it is cheap: a bound a lane a tile of scores, once for all heads, against 2 products.
//
// Lengths are cut by the unit U = max(LEAST_VISITS, visits of all / slots): a tile of 2 U and more
// goes into as many segments as it has whole units. So the segments of all tiles never outnumber
// the slots that the host reserved, whatever the mask, and no block makes 2 U visits or more. A
// segment is a range of visits, not of tiles: even for any mask; it finds its first visit by walking
// there, 32 tiles at a time.
#pragma once
#include "visit.cuh"

// One block's work: the owned tile, its head, which of its visits. A split tile's block leaves its
// result in `slot` of the workspace; -1: the tile is not split.
struct Item {
  int b, head;
  long long tile, slot;
  Visits visits;
  __device__ bool is_first() const { return visits.skip == 0; }
  __device__ bool is_split() const { return HAS_ORDER && slot >= 0; }
};

// The tiles that a kernel owns, OWN queries or keys each. STREAM tokens of the other side pass at a
// time, of every query head of the group where keys are owned.
template <bool OWN_IS_Q_, int OWN_, int STREAM>
struct Ownership {
  static constexpr bool OWN_IS_Q = OWN_IS_Q_;
  static constexpr int OWN = OWN_;
  using Tile = ScoreTile<OWN_IS_Q ? OWN : STREAM, OWN_IS_Q ? STREAM : OWN>;
  long long tiles, passing;  // of a head: owned tiles, tiles that pass
  long long heads;           // that own tiles
  int members;               // query heads of a group that pass
  __device__ explicit Ownership(const Params& p)
      : tiles(((OWN_IS_Q ? p.seqlen_q : p.seqlen_k) + OWN - 1) / OWN),
        passing(((OWN_IS_Q ? p.seqlen_k : p.seqlen_q) + STREAM - 1) / STREAM),
        heads(OWN_IS_Q ? p.heads_q : p.heads_k),
        members(OWN_IS_Q ? 1 : int(p.heads_q / p.heads_k)) {}

  __device__ static Tile tile_at(int b, int h, long long own, long long passing) {
    if (OWN_IS_Q) return {b, h, own * OWN, passing * STREAM};
    return {b, h, passing * STREAM, own * OWN};
  }

  // By rule, the longest tile of a causal mask first: the last queries, the first keys. Of a group of
  // heads whose passing tiles fit into the L2 cache together, all heads' first tiles come first.
  __device__ Item in_order(const Params& p, long long at) const {
    const long long group = OWN_IS_Q ? p.group : 1, all = p.batch * heads;
    const long long first = quotient(at, group * tiles) * group, rest = at - first * tiles;
    const long long members = all - first < group ? all - first : group;
    const long long rank = quotient(rest, members), which = first + rest - rank * members;
    const long long tile = OWN_IS_Q ? tiles - 1 - rank : rank, b = quotient(which, heads);
    return {int(b), int(which - b * heads), tile, -1, Visits()};
  }
};

#if !HAS_ORDER

template <class Owned>
struct WorkList {
  Owned owned;
  __device__ explicit WorkList(const Params& p) : owned(p) {}
  __device__ long long items(const Params& p) const { return p.batch * owned.heads * owned.tiles; }
  __device__ Item item(const Params& p, long long at) const { return owned.in_order(p, at); }
};

#else

struct Segment {
  long long row, slot;
  Visits visits;
};
struct Split {
  long long row, slot, segments;  // in the slots from `slot` on
};

// Long words of the workspace (schedule.py counts them): how many segments and splits there are,
// the visits and the slices of each row, the segments, the splits.
template <class Owned>
struct WorkList {
  Owned owned;
  long long rows, copies, slots;  // of the list; a row has as many copies as heads it stands for
  long long* words;               // null: the problem is too small for a list to matter

  __device__ explicit WorkList(const Params& p)
      : owned(p), rows(owned.tiles), copies(1),
        words((long long*)(Owned::OWN_IS_Q ? p.order_q : p.order_k)) {
    (MASK_BY_BATCH ? rows : copies) *= p.batch;
    (MASK_BY_HEAD ? rows : copies) *= owned.heads;
    slots = p.slots / copies;
  }
  __device__ long long* visits() const { return words + 2; }
  __device__ long long* slices() const { return words + 2 + rows; }
  __device__ Segment* segments() const { return (Segment*)(words + 2 + 2 * rows); }
  __device__ Split* splits() const { return (Split*)(segments() + rows + slots); }

  __device__ long long items(const Params& p) const {
    return words == nullptr ? p.batch * owned.heads * owned.tiles : words[0] * copies;
  }

  // The copies of a segment follow each other: the longest of all heads come first.
  __device__ Item item(const Params& p, long long at) const {
    if (words == nullptr) return owned.in_order(p, at);
    const Segment segment = segments()[at / copies];
    const long long copy = at % copies;
    Item item = place(segment.row, copy);
    item.visits = segment.visits;
    item.slot = segment.slot < 0 ? -1 : segment.slot * copies + copy;
    return item;
  }

  // Where a copy of a row is: rows are (batch, head, tile), without what the mask does not read.
  __device__ Item place(long long row, long long copy) const {
    const long long plane = row / owned.tiles, own_heads = MASK_BY_HEAD ? owned.heads : 1;
    const long long copy_heads = MASK_BY_HEAD ? 1 : owned.heads;
    const long long b = MASK_BY_BATCH ? plane / own_heads : copy / copy_heads;
    const long long head = MASK_BY_HEAD ? plane % own_heads : copy % copy_heads;
    return {int(b), int(head), row % owned.tiles, -1, Visits()};
  }
};

// The visits and the slices of every row, a block a row, a warp a slice.
template <class Owned>
__device__ __forceinline__ void count_visits(const Params& p) {
  const WorkList<Owned> list(p);
  if (list.words == nullptr) return;
  using Word = unsigned long long;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int members = MASK_BY_HEAD ? list.owned.members : 1;
  const long long passing = list.owned.passing, width = 32ll * tests_of_slice(passing);
  for (long long row = blockIdx.x; row < list.rows; row += gridDim.x) {
    const Item item = list.place(row, 0);
    Word visits = 0, slices = 0;
    for (int slice = threadIdx.x / 32; slice < Config::SLICES; slice += warps) {
      const long long end = larger(0ll, passing - slice * width);  // of the tiles from the slice on
      for (int member = 0; member < members; ++member)
        for (long long test = 0; test < width && test < end; test += 32) {
          const int h = item.head * list.owned.members + member;
          const long long at = slice * width + test + lane;
          const bool visited =
              at < passing && Owned::tile_at(item.b, h, item.tile, at).state(p) != SKIP;
          const unsigned found = __ballot_sync(ALL_LANES, visited);
          visits += __popc(found);
          if (found != 0) slices |= Word(1) << slice;
        }
    }
    if (threadIdx.x == 0) list.visits()[row] = list.slices()[row] = 0;
    __syncthreads();  // the sums: set to 0 by one thread, added to by all warps
    if (lane == 0 && visits != 0) {
      atomicAdd((Word*)&list.visits()[row], visits * (list.owned.members / members));
      atomicAdd((Word*)&list.slices()[row], slices);  // no two warps share a slice
    }
  }
}

// How rows are cut and which bucket a segment belongs to: one function of the visits of all rows,
// which every warp works out for itself.
class Cut {
 public:
  // By one warp.
  template <class Owned>
  __device__ explicit Cut(const WorkList<Owned>& list) : unit_(0) {
    long long total = 0, longest = 0;
#pragma unroll 4
    for (long long row = threadIdx.x % 32; row < list.rows; row += 32) {
      total += list.visits()[row];
      longest = larger(longest, list.visits()[row]);
    }
    longest = lanes_max<32>(longest);
    if (list.slots > 0) {
      total = lanes_sum<32>(total);
      const long long unit = (total + list.slots - 1) / list.slots;
      unit_ = unsigned(larger(unit, (long long)Config::LEAST_VISITS));
      if (longest >= 2ll * unit_) longest = 2ll * unit_ - 1;
    }
    buckets_a_visit_ = float(Config::BUCKETS - 1) / float(larger(longest, 1ll));
  }
  __device__ unsigned segments(unsigned visits) const {
    return unit_ != 0 && visits / 2 >= unit_ ? visits / unit_ : 1;
  }
  __device__ int bucket(unsigned visits) const {
    return int(float(visits / segments(visits)) * buckets_a_visit_);
  }

 private:
  unsigned unit_;  // 0: nothing is split
  float buckets_a_visit_;
};

// Writes the segments of one bucket to their place in the list. By one warp a bucket: each finds
// its place by itself, from the rows of longer buckets.
template <class Owned>
__device__ __forceinline__ void arrange_bucket(
    const WorkList<Owned>& list, const Cut& cut, int bucket) {
  const long long lane = threadIdx.x % 32;
  long long segments = 0, slots = 0, splits = 0;  // that come before
#pragma unroll 4
  for (long long row = lane; row < list.rows; row += 32) {
    const unsigned visits = unsigned(list.visits()[row]), pieces = cut.segments(visits);
    if (cut.bucket(visits) <= bucket) continue;
    segments += pieces;
    slots += pieces > 1 ? pieces : 0;
    splits += pieces > 1;
  }
  segments = lanes_sum<32>(segments);
  slots = lanes_sum<32>(slots);
  splits = lanes_sum<32>(splits);
  for (long long first = 0; first < list.rows; first += 32) {
    const long long row = first + lane, visits = row < list.rows ? list.visits()[row] : 0;
    const bool here = row < list.rows && cut.bucket(unsigned(visits)) == bucket;
    if (__ballot_sync(ALL_LANES, here) == 0) continue;
    const long long pieces = here ? cut.segments(unsigned(visits)) : 0;
    const long long shared = pieces > 1 ? pieces : 0;
    const auto slices = here ? (unsigned long long)list.slices()[row] : 0;
    const long long segment0 = segments + lanes_before(pieces);
    const long long slot0 = slots + lanes_before(shared);
    const long long split = splits + lanes_before(shared > 0);
    for (long long piece = 0; piece < pieces; ++piece) {
      const long long skip = visits * piece / pieces, end = visits * (piece + 1) / pieces;
      list.segments()[segment0 + piece] = {
          row, shared > 0 ? slot0 + piece : -1, {int(skip), int(end - skip), slices}};
    }
    if (shared > 0) list.splits()[split] = {row, slot0, pieces};
    segments += lanes_sum<32>(pieces);
    slots += lanes_sum<32>(shared);
    splits += lanes_sum<32>((long long)(shared > 0));
  }
  if (bucket == 0 && lane == 0) {  // the shortest: all have been counted
    list.words[0] = segments;
    list.words[1] = splits;
  }
}

template <class Owned>
__device__ __forceinline__ void arrange_rows(const Params& p) {
  const WorkList<Owned> list(p);
  if (list.words == nullptr) return;
  const Cut cut(list);
  const int warps = gridDim.x * (blockDim.x / 32);
  for (int bucket = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; bucket < Config::BUCKETS;
       bucket += warps)
    arrange_bucket(list, cut, bucket);
}

// Calls combine(item, own, slots) for each token of a split tile, `own` its place in the tile. By
// one warp a token.
struct Slots {
  long long first, step, count;
  __device__ long long operator[](long long segment) const { return first + segment * step; }
};
template <class Owned, class Combine>
__device__ __forceinline__ void combine_tokens(const Params& p, Combine combine) {
  const WorkList<Owned> list(p);
  if (list.words == nullptr) return;
  const long long warps = (long long)gridDim.x * (blockDim.x / 32);
  const long long tokens = list.words[1] * list.copies * Owned::OWN;
  for (long long at = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; at < tokens;
       at += warps) {
    const long long copy = at / Owned::OWN % list.copies;
    const Split split = list.splits()[at / Owned::OWN / list.copies];
    const Slots slots{split.slot * list.copies + copy, list.copies, split.segments};
    combine(list.place(split.row, copy), int(at % Owned::OWN), slots);
  }
}

#endif
