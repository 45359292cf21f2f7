// Forward of the sm90 family: o = softmax(scale * q k^T) v and lse, on Hopper, for 16-bit inputs.
//
// A block stays on its SM and works one owned tile of BLOCK_Q queries after the other. One warp
// loads (the copy engine does the work) and decides which key tiles pass; WARPGROUPS of 4 warps
// compute, 64 queries each: while the tensor cores multiply the next scores and the weights before,
// the warps work out the softmax between. Roles, barriers and the overlap follow Shah et al. 2024,
// arXiv:2407.08608; that a maximum is followed only once it has grown by 2^LAZY is from the notes of
// FlashAttention-4 (2025).
#include "../forward.cuh"
#include "../turns.cuh"
#include "scores.cuh"
#include "softmax.cuh"

constexpr int STAGES = C::STAGES;

struct alignas(1024) Smem {
  Storage q[PANELS][C::BLOCK_Q][PANEL];
  Storage k[STAGES][PANELS][C::BLOCK_K][PANEL];
  Storage v[STAGES][PANELS_V][C::BLOCK_K][PANEL];
  Pipeline<1> q_pipeline;
  Pipeline<STAGES> k_pipeline, v_pipeline;
  Order order;         // with q
  int visits[STAGES];  // with k
  float never;
};
static_assert(sizeof(Smem) <= C::SHARED_BYTES, "cuflash/sm90.py counts as many bytes");

// The warp that loads: for each owned tile its queries, then the key tiles that its walk finds. The
// values of a tile follow the keys of the next: that is the order in which they are used.
__device__ __forceinline__ void load(const Params& p, Smem& smem) {
  const WorkList<Owned> list(p);
  Turns turns(p, list.items(p));
  const bool is_leader = threadIdx.x % 32 == 0;
  const int group = int(p.heads_q / p.heads_k);
  Place<1> q_place;
  Place<STAGES> k_place, v_place;
  for (long long at = turns.first(), next = -1; at >= 0; at = next) {
    Item item = list.item(p, at);
    const int head_k = item.head / group;
    const long long row0 = item.tile * C::BLOCK_Q;
    q_place.wait_empty(smem.q_pipeline);
    if (is_leader) {
      unsigned long long* full = &smem.q_pipeline.full[0];
      smem.order = {item.b, item.head, int(item.tile), item.is_split() ? int(item.slot) : -1};
      mbarrier_arrive_expect_tx(full, sizeof(smem.q));
      load_panels<C::BOX_Q>(smem.q, p.map_q, full, row0, item.head, item.b);
    }
    q_place.advance();

    long long pending = -1;  // the tile whose values have to follow
    const auto load_v = [&]() {
      if (pending < 0) return;
      v_place.wait_empty(smem.v_pipeline);
      if (is_leader) {
        unsigned long long* full = &smem.v_pipeline.full[v_place.stage()];
        mbarrier_arrive_expect_tx(full, sizeof(smem.v[0]));
        load_panels<C::BOX_K>(
            smem.v[v_place.stage()], p.map_v, full, pending * C::BLOCK_K, head_k, item.b);
      }
      v_place.advance();
    };
    const auto load_k = [&](long long tile, int how) {
      k_place.wait_empty(smem.k_pipeline);
      if (is_leader) {
        unsigned long long* full = &smem.k_pipeline.full[k_place.stage()];
        smem.visits[k_place.stage()] = int(4 * tile) | how;
        mbarrier_arrive_expect_tx(full, sizeof(smem.k[0]));
        load_panels<C::BOX_K>(smem.k[k_place.stage()], p.map_k, full, tile * C::BLOCK_K, head_k, item.b);
      }
      k_place.advance();
      load_v();
      pending = tile;
    };
    Walk walk((p.seqlen_k + C::BLOCK_K - 1) / C::BLOCK_K, item.visits);
    const auto state_of = [&](long long other) {
      return Tile{item.b, item.head, row0, other * C::BLOCK_K}.state(p, HAS_SCORE);
    };
    long long tile;
    bool partly, is_more = walk.next(state_of, tile, partly);
    if (!is_more) {  // rows without keys are computed as rows of a tile that is masked
      tile = 0;
      partly = is_more = true;
    }
    while (is_more) {
      const long long found = tile;
      const int how = partly ? PARTLY_ATTENDED : 0;
      is_more = walk.next(state_of, tile, partly);
      if (!is_more) next = turns.next();  // before it is needed: the answer takes its time
      load_k(found, is_more ? how : how | LAST);
    }
    load_v();
  }
  q_place.wait_empty(smem.q_pipeline);
  if (is_leader) {
    smem.order.b = -1;
    mbarrier_arrive(&smem.q_pipeline.full[0]);
  }
}

// A warp's 16 rows of o and lse. Where something is not finite, or a reference so large that its
// rounding shows in the weights, nothing is stored: the careful path does the rows.
__device__ __forceinline__ void finish_rows(
    const Params& p, const Order& order, int own, float (&o)[WIDTH_V / 2], Softmax& softmax,
    bool is_suspect) {
  const Head head(p, order.b, order.head);
  const long long row0 = (long long)order.tile * C::BLOCK_Q;
  const bool is_split = HAS_ORDER && order.slot >= 0;
  const int lane = threadIdx.x % 32;
  float probe = first_probe(p), factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto& row = softmax.row[half];
    row.row_sum = lanes_sum<4>(row.row_sum);
    if (is_suspect && row.row_sum == 0) probe = negative_infinity() - negative_infinity();
    const float rescale = is_split ? 1.0f : include_sink(p, head.h, row);
    probe = multiply_add(row.row_sum, 0.0f, probe);
    factor[half] = row.row_sum == 0 ? 0 : rescale / row.row_sum;
    const float reference = row.reference();
    if (reference > 134217728.0f || reference < -134217728.0f)  // 2^27
      probe = negative_infinity() - negative_infinity();
  }
  probe += probe_of(o);
#pragma unroll
  for (int i = 0; i < WIDTH_V / 2; ++i) o[i] *= factor[i / 2 % 2];
  const bool is_bad = __any_sync(ALL_LANES, !is_finite(probe));
  if (is_split) {
#if HAS_ORDER
    const Partial<Binary> partial(p, order.slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_bad) softmax.row[half].row_sum = negative_infinity() - negative_infinity();
      if (lane % 4 == 0) partial.row(own + 8 * half) = softmax.row[half];
    }
    store_sums(partial.o(), own, o);
#endif
    return;
  }
  if (is_bad) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i) careful_forward(p, head, row0, own - lane / 4 + i);
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long at = row0 + own + 8 * half;
    const bool is_row = at < p.seqlen_q;
    if (p.lse.pointer != nullptr && is_row && lane % 4 == 0)
      *row_address<float>(p.lse, head.b, head.h, at) = softmax.row[half].lse();
  }
  store_rows(head.o(p), row0 + own, o);
}

// A warpgroup that computes: 64 rows of each owned tile.
__device__ __forceinline__ void compute(const Params& p, Smem& smem) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const int own = threadIdx.x / 32 % 4 * 16 + 64 * warpgroup + lane / 4;  // this thread's first row
  const int column = lane % 4 * 2;
  const float c = C::SCALE_FIRST || HAS_SCORE ? LOG2_E : float(p.scale * EXACT_LOG2_E);
  const Operand q_tile = Operand::at(&smem.q[0][64 * warpgroup]).uniform();
  const Operand k_tile = Operand::at(smem.k);
  const Operand v_tile = Operand::at(smem.v, C::BLOCK_K * PANEL_ROW);
  Place<1> q_place;
  Place<STAGES> k_place, v_place;
  // Two warpgroups take turns: one's products run during the softmax of the other.
  const auto take_turn = [&]() {
    if (C::PINGPONG) bar_sync(1 + warpgroup, 256);
  };
  const auto give_turn = [&]() {
    if (C::PINGPONG) bar_arrive(1 + (warpgroup ^ 1), 256);
  };
  if (warpgroup == 1) give_turn();

  float o[WIDTH_V / 2], s[C::BLOCK_K / 2];
  unsigned weights[C::BLOCK_K / 4];
  Softmax softmax;
  Order order;
  bool is_suspect;  // all keys of a tile were attended: a row without weights overflowed
  int visit;
  // Moves to the next owned tile; false where there is none.
  const auto next_order = [&]() {
    q_place.wait_full(smem.q_pipeline);
    q_place.advance();
    order = smem.order;
    return uniform(order.b) >= 0;
  };
  const auto next_visit = [&]() {
    k_place.wait_full(smem.k_pipeline);
    return uniform(smem.visits[k_place.stage()]);
  };
  // S = Q K^T
  const auto start_scores = [&]() {
    start_product<C::HEAD_DIM, C::BLOCK_Q, C::BLOCK_K>(
        s, q_tile, k_tile + k_place.stage() * int(sizeof(smem.k[0])));
  };
  // O += P V
  const auto start_output = [&]() {
    v_place.wait_full(smem.v_pipeline);
    start_weighted_sum<C::BLOCK_K, WIDTH_V>(
        o, weights, v_tile + v_place.stage() * int(sizeof(smem.v[0])));
  };
  // The scores have been computed: new keys, after the last ones new queries, may come.
  const auto release_keys = [&]() {
    k_place.release(smem.k_pipeline);
    k_place.advance();
    if (visit & LAST) q_place.release(smem.q_pipeline);
  };
  const auto release_values = [&]() {
    v_place.release(smem.v_pipeline);
    v_place.advance();
  };
  // P = softmax(S), in place
  const auto weigh = [&]() {
    const bool partly = visit & PARTLY_ATTENDED;
    const Tile tile{order.b, order.head, (long long)order.tile * C::BLOCK_Q,
                    (long long)(visit / 4) * C::BLOCK_K};
    if (HAS_SCORE || C::SCALE_FIRST || (partly && !MASK_IS_INTERVAL))
      finish_scores<true>(p, tile, partly, own, column, s);
    else if (partly)
      cut_scores<true>(p, tile, own, column, s);
    is_suspect |= !HAS_SCORE && !partly;
    softmax(s, c);
  };

  while (next_order()) {
    softmax = Softmax();
    is_suspect = false;
#pragma unroll
    for (int i = 0; i < WIDTH_V / 2; ++i) o[i] = 0;
    visit = next_visit();
    take_turn();
    start_scores();
    give_turn();
    wgmma_wait_group<0>();
    hold(s);
    release_keys();
    weigh();
    round_to<Storage>(weights, s);
    while (!(visit & LAST)) {
      visit = next_visit();
      take_turn();
      start_scores();
      start_output();
      give_turn();
      wgmma_wait_group<1>();
      hold(s);
      release_keys();
      weigh();  // while P V of the tile before runs
      hold(s);
      keep_before(softmax.row[0].row_sum + softmax.row[1].row_sum, smem.never);
      wgmma_wait_group<0>();
      hold(o);
      release_values();
      round_to<Storage>(weights, s);
      softmax.correct(o);
    }
    start_output();
    wgmma_wait_group<0>();
    hold(o);
    release_values();
    finish_rows(p, order, own, o, softmax, is_suspect);
  }
}

#if PART_MAIN
extern "C" __global__ void __launch_bounds__(C::THREADS, 1)
    forward(const __grid_constant__ Params p) {
  extern __shared__ Smem shared_memory[];
  Smem& smem = shared_memory[0];
  if (threadIdx.x == 0) {
    smem.q_pipeline.init(WARPS);
    smem.k_pipeline.init(WARPS);
    smem.v_pipeline.init(WARPS);
    fence_mbarrier_init();
    prefetch_tensormap(&p.map_q);
    prefetch_tensormap(&p.map_k);
    prefetch_tensormap(&p.map_v);
  }
  __syncthreads();  // barriers: set by one thread, used by all
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::REGISTERS_LOAD>();
    if (threadIdx.x < 32) load(p, smem);
  } else {
    setmaxnreg_inc<C::REGISTERS_COMPUTE>();
    compute(p, smem);
  }
}
#endif

#if HAS_ORDER && PART_COMBINE
extern "C" __global__ void __launch_bounds__(C::THREADS) combine(const __grid_constant__ Params p) {
  combine_segments<Binary>(p);
}
#endif
