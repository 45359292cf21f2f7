// What the kernels of dq and of dk_dv share on Hopper: stages of shared memory, the warp that loads,
// and the weights of a tile of scores. Both own tokens whose two operands stay in shared memory (keys
// and values, or queries and do) while those of the other side pass.
#pragma once
#include "../backward.cuh"
#include "../turns.cuh"
#include "scores.cuh"

static_assert(
    C::ROWS_STEP % C::STREAM_Q == 0 && C::ROWS_STEP % C::OWN_Q == 0, "no tile ends between");

// Queries of a head in arrays of numbers a query.
__device__ __forceinline__ long long padded_rows(const Params& p) {
  return (p.seqlen_q + C::ROWS_STEP - 1) / C::ROWS_STEP * C::ROWS_STEP;
}

template <bool OWN_IS_Q>
struct alignas(1024) Smem {
  static constexpr int OWN = OWN_IS_Q ? C::OWN_Q : C::OWN_K;
  static constexpr int STREAM = OWN_IS_Q ? C::STREAM_K : C::STREAM_Q;
  static constexpr int STAGES = OWN_IS_Q ? C::DQ_STAGES : C::STAGES;
  static constexpr int STAGES_V = OWN_IS_Q ? C::DQ_STAGES_V : C::STAGES;
  using Owned = Ownership<OWN_IS_Q, OWN, STREAM>;
  using Tile = typename Owned::Tile;
  static constexpr bool HAS_DS = IS_FUSED && !OWN_IS_Q, GIVES = C::PAIRED && !OWN_IS_Q;
  static constexpr int OWN_STAGES = OWN_IS_Q ? C::DQ_OWN_STAGES : C::OWN_STAGES;
  Storage own[OWN_STAGES][PANELS][OWN][PANEL];      // q or k
  Storage own_v[OWN_STAGES][PANELS_V][OWN][PANEL];  // do or v
  Storage pass[STAGES][PANELS][STREAM][PANEL];                   // k or q
  Storage pass_v[STAGES_V][PANELS_V][STREAM][PANEL];             // v or do
  Storage ds[HAS_DS ? 3 : 1][HAS_DS ? STREAM / PANEL : 1][HAS_DS ? OWN : 1][PANEL];
  float4 given[GIVES ? STREAM / 8 : 1][GIVES ? 128 : 1];  // by a thread of a pair to its partner
  float lse2[STAGES][OWN_IS_Q ? 4 : STREAM], delta[STAGES_V][OWN_IS_Q ? 4 : STREAM];  // if q passes
  Pipeline<OWN_STAGES> own_pipeline;
  Pipeline<STAGES> pass_pipeline;
  Pipeline<STAGES_V> pass_v_pipeline;
  Pipeline<3> ds_pipeline;
  Pipeline<1> given_pipeline, verdict_pipeline;
  Order order[OWN_STAGES];            // with own
  int visits[STAGES], heads[STAGES];  // with pass
  int is_bad[4];                      // by the warps of the first of a pair
};

// The warp that loads: for each owned tile its two operands, then the tiles that its walks find, one
// walk a query head of the group where keys are owned.
template <bool OWN_IS_Q>
__device__ __forceinline__ void load(const Params& p, Smem<OWN_IS_Q>& smem) {
  using S = Smem<OWN_IS_Q>;
  constexpr int OWN_BOX = OWN_IS_Q ? C::BOX_Q : C::BOX_K, PASS_BOX = OWN_IS_Q ? C::BOX_K : C::BOX_Q;
  const WorkList<typename S::Owned> list(p);
  Turns turns(p, list.items(p));
  const bool is_leader = threadIdx.x % 32 == 0;
  const int group = int(p.heads_q / p.heads_k), members = OWN_IS_Q ? 1 : group;
  const long long padded = padded_rows(p);
  Place<S::OWN_STAGES> own_place;
  Place<S::STAGES> place;
  Place<S::STAGES_V> place_v;
  const TensorMap& map_own = OWN_IS_Q ? p.map_q : p.map_k;
  const TensorMap& map_own_v = OWN_IS_Q ? p.map_do : p.map_v;
  const TensorMap& map_pass = OWN_IS_Q ? p.map_k : p.map_q;
  const TensorMap& map_pass_v = OWN_IS_Q ? p.map_v : p.map_do;
  for (long long at = turns.first(), next = -1; at >= 0; at = next) {
    Item item = list.item(p, at);
    const long long own0 = item.tile * S::OWN;
    own_place.wait_empty(smem.own_pipeline);
    if (is_leader) {
      const int stage = own_place.stage();
      unsigned long long* full = &smem.own_pipeline.full[stage];
      smem.order[stage] = {item.b, item.head, int(item.tile), item.is_split() ? int(item.slot) : -1};
      mbarrier_arrive_expect_tx(full, sizeof(smem.own[0]) + sizeof(smem.own_v[0]));
      load_panels<OWN_BOX>(smem.own[stage], map_own, full, own0, item.head, item.b);
      load_panels<OWN_BOX>(smem.own_v[stage], map_own_v, full, own0, item.head, item.b);
    }
    own_place.advance();

    const auto load_tile = [&](long long tile, int head_q, int how) {
      const int head = OWN_IS_Q ? head_q / group : head_q;
      const long long row = ((long long)item.b * p.heads_q + head_q) * padded + tile * S::STREAM;
      place.wait_empty(smem.pass_pipeline);
      if (is_leader) {
        const int stage = place.stage();
        unsigned long long* full = &smem.pass_pipeline.full[stage];
        smem.visits[stage] = int(4 * tile) | how;
        smem.heads[stage] = head_q;
        mbarrier_arrive_expect_tx(
            full, sizeof(smem.pass[0]) + (OWN_IS_Q ? 0 : sizeof(smem.lse2[0])));
        load_panels<PASS_BOX>(smem.pass[stage], map_pass, full, tile * S::STREAM, head, item.b);
        if (!OWN_IS_Q)
          cp_async_bulk(
              smem.lse2[stage], (float*)p.lse2.pointer + row, sizeof(smem.lse2[0]), full);
      }
      place.advance();
      place_v.wait_empty(smem.pass_v_pipeline);
      if (is_leader) {
        const int stage = place_v.stage();
        unsigned long long* full = &smem.pass_v_pipeline.full[stage];
        mbarrier_arrive_expect_tx(
            full, sizeof(smem.pass_v[0]) + (OWN_IS_Q ? 0 : sizeof(smem.delta[0])));
        load_panels<PASS_BOX>(smem.pass_v[stage], map_pass_v, full, tile * S::STREAM, head, item.b);
        if (!OWN_IS_Q)
          cp_async_bulk(
              smem.delta[stage], (float*)p.delta.pointer + row, sizeof(smem.delta[0]), full);
      }
      place_v.advance();
    };
    // One visit late, so that the last one is known; without any, a tile is computed as masked.
    const int first_head = item.head * members;
    long long found = 0;
    int found_head = first_head, found_how = -1;
    for (int member = 0; member < members; ++member) {
      const int head_q = first_head + member;
      Walk walk(((OWN_IS_Q ? p.seqlen_k : p.seqlen_q) + S::STREAM - 1) / S::STREAM, item.visits);
      long long tile;
      bool partly;
      while (walk.next(
          [&](long long other) {
            return S::Owned::tile_at(item.b, head_q, item.tile, other).state(p, HAS_SCORE);
          },
          tile, partly)) {
        if (found_how >= 0) load_tile(found, found_head, found_how);
        found = tile;
        found_head = head_q;
        found_how = partly ? PARTLY_ATTENDED : 0;
      }
    }
    next = turns.next();
    load_tile(found, found_head, (found_how < 0 ? int(PARTLY_ATTENDED) : found_how) | LAST);
  }
  own_place.wait_empty(smem.own_pipeline);
  if (is_leader) {
    smem.order[own_place.stage()].b = -1;
    mbarrier_arrive(&smem.own_pipeline.full[own_place.stage()]);
  }
}

// A warp's side of the pipelines: what to work on next.
template <bool OWN_IS_Q>
struct Reader {
  using S = Smem<OWN_IS_Q>;
  S& smem;
  Order order;
  int visit, head;
  Place<S::OWN_STAGES> own_place;
  Place<S::STAGES> place;
  Place<S::STAGES_V> place_v;
  __device__ __forceinline__ explicit Reader(S& smem_) : smem(smem_) {}

  // Moves to the next owned tile; false where there is none.
  __device__ __forceinline__ bool next_order() {
    own_place.wait_full(smem.own_pipeline);
    order = smem.order[own_place.stage()];
    return uniform(order.b) >= 0;
  }
  __device__ __forceinline__ void release_order() {
    own_place.release(smem.own_pipeline);
    own_place.advance();
  }
  __device__ __forceinline__ void next_visit() {
    place.wait_full(smem.pass_pipeline);
    visit = uniform(smem.visits[place.stage()]);
    head = uniform(smem.heads[place.stage()]);
  }
  __device__ __forceinline__ bool is_last() const { return visit & LAST; }
  __device__ __forceinline__ typename S::Tile tile() const {
    return S::Owned::tile_at(order.b, head, order.tile, visit / 4);
  }
  // Bytes from the start of an operand to what is worked on now.
  __device__ __forceinline__ int at_own() const { return own_place.stage() * int(sizeof(smem.own[0])); }
  __device__ __forceinline__ int at_own_v() const {
    return own_place.stage() * int(sizeof(smem.own_v[0]));
  }
  __device__ __forceinline__ int at_pass() const { return place.stage() * int(sizeof(smem.pass[0])); }
  __device__ __forceinline__ int at_pass_v() const {
    return place_v.stage() * int(sizeof(smem.pass_v[0]));
  }
  __device__ __forceinline__ void wait_pass_v() { place_v.wait_full(smem.pass_v_pipeline); }
  __device__ __forceinline__ void release_pass() {
    place.release(smem.pass_pipeline);
    place.advance();
  }
  __device__ __forceinline__ void release_pass_v() {
    place_v.release(smem.pass_v_pipeline);
    place_v.advance();
  }
};

// lse * log2(e) and delta of the queries of a thread's scores: of its two rows where queries are
// owned, else of those that pass, two in each block of 8.
template <bool OWN_IS_Q>
struct RowNumbers {
  const float* passing;
  float own[2];
  // Of scores 4 * block to 4 * block + 3.
  __device__ __forceinline__ void of_block(int block, float (&number)[4]) const {
    const float2 pair = OWN_IS_Q ? make_float2(own[0], own[1]) : *(const float2*)(passing + 8 * block);
#pragma unroll
    for (int e = 0; e < 4; ++e) number[e] = (OWN_IS_Q ? e / 2 : e % 2) == 0 ? pair.x : pair.y;
  }
};

// What a thread's pairs are in a problem with a score.
#if HAS_SCORE
template <bool OWN_IS_Q, int N, class Tile>
class Pairs {
 public:
  __device__ __forceinline__ Pairs(
      const Params& p, const Tile& tile, bool partly, int own, int pass)
      : p_(p), tile_(tile), own_(own), pass_(pass), scale_(float(p.scale)) {
    find_allowed<OWN_IS_Q, N>(p, tile, partly, own, pass, allowed_);
  }
  // From x = <q, k> of pair i its weight P, and score'(x) P. What the pair adds to parameters waits
  // for dS: visit(row, key, x) is called for it.
  template <class Visit>
  __device__ __forceinline__ void operator()(
      int i, float product, float reference, float& weight, float& sloped, Visit visit) const {
    const long long row = tile_.row0 + query_of<OWN_IS_Q>(i, own_, pass_);
    const long long key = tile_.column0 + key_of<OWN_IS_Q>(i, own_, pass_);
    const float x = product * scale_;
    weight = sloped = 0;
    if (!(allowed_[i / 32] >> i % 32 & 1)) return;
    const float value = score(p_, tile_.b, tile_.h, row, key, x);
    weight = ex2_approx_ftz_f32(multiply_add(value, LOG2_E, -reference));
    if (is_masked(value)) return;
    visit(row, key, x);
    sloped = weight * score_slope(p_, tile_.b, tile_.h, row, key, x);
  }

 private:
  const Params& p_;
  const Tile& tile_;
  int own_, pass_;
  float scale_;
  unsigned allowed_[(N + 31) / 32];
};
#endif

// P = exp(S - lse), in place of X. With a score what dP - delta is to be multiplied by, score'(X) P, is
// in place of X, and P in `pairs`, rounded.
template <bool OWN_IS_Q, int N, class Tile>
__device__ __forceinline__ void weigh(
    const Params& p, const Tile& tile, bool partly, int own, int pass, float c,
    const RowNumbers<OWN_IS_Q>& lse2, float (&s)[N], unsigned (&pairs)[N / 2]) {
#if HAS_SCORE
  const Pairs<OWN_IS_Q, N, Tile> pair(p, tile, partly, own, pass);
#pragma unroll
  for (int block = 0; block < N / 4; ++block) {
    float reference[4], weight[4];
    lse2.of_block(block, reference);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 4 * block + e;
      pair(i, s[i], reference[e], weight[e], s[i], [](long long, long long, float) {});
    }
    pairs[2 * block] = cvt_rn_x2(weight[0], weight[1], Storage());
    pairs[2 * block + 1] = cvt_rn_x2(weight[2], weight[3], Storage());
  }
#else
  if (C::SCALE_FIRST || (partly && !MASK_IS_INTERVAL))
    finish_scores<OWN_IS_Q>(p, tile, partly, own, pass, s);
  else if (partly)
    cut_scores<OWN_IS_Q>(p, tile, own, pass, s);
#pragma unroll
  for (int block = 0; block < N / 4; ++block) {
    float reference[4];
    lse2.of_block(block, reference);
#pragma unroll
    for (int i = 4 * block; i < 4 * block + 4; ++i)
      s[i] = ex2_approx_ftz_f32(multiply_add(s[i], c, -reference[i % 4]));
  }
#endif
}

// dS = P * (dP - delta) from what `weigh` leaves, and P, rounded: the A operands of products.
template <bool OWN_IS_Q, int N>
__device__ __forceinline__ void differentiate(
    const RowNumbers<OWN_IS_Q>& delta, const float (&weight)[N], const float (&dp)[N],
    unsigned (&pairs)[N / 2], unsigned (&ds_pairs)[N / 2]) {
#pragma unroll
  for (int block = 0; block < N / 4; ++block) {
    float subtracted[4], ds[4];
    delta.of_block(block, subtracted);
#pragma unroll
    for (int e = 0; e < 4; ++e) ds[e] = weight[4 * block + e] * (dp[4 * block + e] - subtracted[e]);
    if (!HAS_SCORE) {
      pairs[2 * block] = cvt_rn_x2(weight[4 * block], weight[4 * block + 1], Storage());
      pairs[2 * block + 1] = cvt_rn_x2(weight[4 * block + 2], weight[4 * block + 3], Storage());
    }
    ds_pairs[2 * block] = cvt_rn_x2(ds[0], ds[1], Storage());
    ds_pairs[2 * block + 1] = cvt_rn_x2(ds[2], ds[3], Storage());
  }
}

#if HAS_PARAMS
// Both at once, and what the pairs add to parameters.
template <bool OWN_IS_Q, int N, class Tile, class Sums>
__device__ __forceinline__ void differentiate_params(
    const Params& p, const Tile& tile, bool partly, int own, int pass,
    const RowNumbers<OWN_IS_Q>& lse2, const RowNumbers<OWN_IS_Q>& delta, const float (&s)[N],
    const float (&dp)[N], unsigned (&pairs)[N / 2], unsigned (&ds_pairs)[N / 2], Sums& sums) {
  const Pairs<OWN_IS_Q, N, Tile> pair(p, tile, partly, own, pass);
#pragma unroll
  for (int block = 0; block < N / 4; ++block) {
    float reference[4], subtracted[4], weight[4], ds[4];
    lse2.of_block(block, reference);
    delta.of_block(block, subtracted);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 4 * block + e;
      const float change = dp[i] - subtracted[e];
      pair(i, s[i], reference[e], weight[e], ds[e], [&](long long row, long long key, float x) {
        sums.add_pair(tile.b, tile.h, row, key, x, weight[e] * change);
      });
      ds[e] *= change;
    }
    pairs[2 * block] = cvt_rn_x2(weight[0], weight[1], Storage());
    pairs[2 * block + 1] = cvt_rn_x2(weight[2], weight[3], Storage());
    ds_pairs[2 * block] = cvt_rn_x2(ds[0], ds[1], Storage());
    ds_pairs[2 * block + 1] = cvt_rn_x2(ds[2], ds[3], Storage());
  }
}
#endif

// A warp's 16 owned rows of a result, times a factor. False where something is not finite: then the
// careful path has to do them.
template <int COLUMNS, int N>
__device__ __forceinline__ bool store_result(
    const Matrix<COLUMNS>& x, long long row0, int own, float (&sum)[N], float factor, float probe) {
  probe += probe_of(sum);
  if (__any_sync(ALL_LANES, !is_finite(probe))) return false;
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] *= factor;
  store_rows(x, row0 + own, sum);
  return true;
}

// The same of a tile that others share. What is not finite is left so, for `combine`.
template <int COLUMNS, int N>
__device__ __forceinline__ void store_partial(
    const Matrix<COLUMNS, float>& x, int own, float (&sum)[N], float factor, float probe) {
  probe += probe_of(sum);
  if (__any_sync(ALL_LANES, !is_finite(probe))) factor = negative_infinity() - negative_infinity();
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] *= factor;
  store_sums(x, own, sum);
}

// The roles of a block: one warpgroup loads, the others compute.
template <bool OWN_IS_Q, class Compute>
__device__ __forceinline__ void run(const Params& p, Smem<OWN_IS_Q>& smem, Compute compute) {
  if (threadIdx.x == 0) {
    smem.own_pipeline.init(WARPS);
    smem.pass_pipeline.init(WARPS);
    smem.pass_v_pipeline.init(WARPS);
    smem.ds_pipeline.init(WARPS, WARPS);
    smem.given_pipeline.init(4, 4);
    smem.verdict_pipeline.init(4, 4);
    fence_mbarrier_init();
    prefetch_tensormap(&p.map_q);
    prefetch_tensormap(&p.map_k);
    prefetch_tensormap(&p.map_v);
    prefetch_tensormap(&p.map_do);
  }
  __syncthreads();  // barriers: set by one thread, used by all
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::REGISTERS_LOAD>();
    if (threadIdx.x < 32) load(p, smem);
  } else {
    setmaxnreg_inc<C::REGISTERS_COMPUTE>();
    compute();
  }
}
