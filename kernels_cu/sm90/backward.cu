// Backward of the sm90 family: dq, dk, dv from do, o and lse, on Hopper, for 16-bit inputs.
//
// `delta` prepares two numbers a query. `dk_dv` owns key tiles and has the query tiles of every head
// of the group pass. S^T = K Q^T and dP^T = V dO^T have keys in the rows of their registers, so P^T
// and dS^T are operands of dV += P^T dO and dK += dS^T Q as they are. For dq there are two ways:
//   IS_FUSED  dS^T goes through shared memory into dQ = dS K, and that by atomics into float32 sums,
//          which `round_dq` turns into dq: five products, but sums whose order differs from run to run
//   else   `dq` owns query tiles and computes S and dP again: seven products, and the same bits always
// Where the sums of dk and dv do not fit into one warpgroup's registers (PAIRED), two warpgroups share
// 64 keys: the first makes P and dv and gives P to the second, which makes dS and dk.
//
// Roles, barriers and the operand order follow Shah et al. 2024, arXiv:2407.08608, and the two ways
// Dao 2023, arXiv:2307.08691; the formulas' numbers are those of cuflash/reference.py.
#include "backward.cuh"
#include "rows.cuh"

#if PART_DK_DV
// A warpgroup that computes dk and dv of 64 keys of each owned tile; or one of a pair, which makes one
// of the two.
template <bool MAKES_DK, bool MAKES_DV, class Sums>
__device__ __forceinline__ void compute_dk_dv(const Params& p, Smem<false>& smem, Sums sums) {
  using S = Smem<false>;
  using Tile = S::Tile;
  constexpr int N = S::STREAM / 2, STREAM = S::STREAM;
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first = C::PAIRED ? 0 : 64 * warpgroup;  // of the keys of the tile
  const int own = warp * 16 + first + lane / 4, pass = lane % 4 * 2;
  const float c = C::SCALE_FIRST || HAS_SCORE ? LOG2_E : float(p.scale * EXACT_LOG2_E);
  const Operand k = Operand::at(&smem.own[0][0][first]).uniform();
  const Operand v = Operand::at(&smem.own_v[0][0][first]).uniform();
  const Operand q = Operand::at(smem.pass), do_ = Operand::at(smem.pass_v);
  const Operand q_columns = Operand::at(smem.pass, STREAM * PANEL_ROW);
  const Operand do_columns = Operand::at(smem.pass_v, STREAM * PANEL_ROW);
  // of the 64 x 64 numbers of dq that this warpgroup computes
  const int panel_q = warpgroup / PANELS, panel_d = warpgroup % PANELS;
  const Operand ds_columns = Operand::at(smem.ds[0][IS_FUSED ? panel_q : 0]).uniform();
  const Operand k_columns = Operand::at(smem.own[0][IS_FUSED ? panel_d : 0]).uniform();

  Reader<false> reader(smem);
  Place<1> given, verdict;  // of a pair: P; whether dv is finite
  float dk[WIDTH / 2], dv[WIDTH_V / 2];
#if IS_FUSED
  Place<3> written, read;  // of dS
  float* sums_before;      // of dq, for the dS that waits
  // dQ = dS K
  const auto start_dq = [&](float(&dq)[32]) {
    start_outer_product<S::OWN>(
        dq, ds_columns + read.stage() * int(sizeof(smem.ds[0])), k_columns + reader.at_own());
  };
  const auto add_dq = [&](const float(&dq)[32]) {
#pragma unroll
    for (int block = 0; block < 8; ++block)
      red_add_v4_f32(sums_before + block * 512, dq + 4 * block);
  };
#endif
  while (reader.next_order()) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < WIDTH_V / 2; ++i) dv[i] = 0;
    bool is_first = true, is_last;
    int head = -1;
    do {
      float s[N], dp[N];
      unsigned weights[N / 2], ds[N / 2];
      reader.next_visit();
      is_last = reader.is_last();
      const Tile tile = reader.tile();
      const bool partly = reader.visit & PARTLY_ATTENDED;
      const int stage = reader.place.stage();
      const int q_stage = reader.at_pass(), do_stage = reader.at_pass_v();
      const RowNumbers<false> lse2{&smem.lse2[stage][pass]};
      const RowNumbers<false> delta{&smem.delta[reader.place_v.stage()][pass]};
      // S^T = K Q^T, dP^T = V dO^T
      if constexpr (MAKES_DV)
        start_product<C::HEAD_DIM, S::OWN, STREAM>(s, k + reader.at_own(), q + q_stage);
      reader.wait_pass_v();
      if constexpr (MAKES_DK)
        start_product<C::HEAD_DIM_V, S::OWN, STREAM>(dp, v + reader.at_own_v(), do_ + do_stage);
#if HAS_PARAMS && IS_FUSED
      wgmma_wait_group<0>();
      hold(s);
      hold(dp);
      if (reader.head != head) sums.finish();
      head = reader.head;
      differentiate_params(p, tile, partly, own, pass, lse2, delta, s, dp, weights, ds, sums);
#else
      // P^T = exp(S^T - lse)
      if constexpr (MAKES_DV) {
        wgmma_wait_group<MAKES_DK>();
        hold(s);
        weigh(p, tile, partly, own, pass, c, lse2, s, weights);
        if (!HAS_SCORE && !MAKES_DK) round_to<Storage>(weights, s);
      }
      if constexpr (C::PAIRED) {
        if constexpr (MAKES_DV) {
          given.wait_empty(smem.given_pipeline);
#pragma unroll
          for (int block = 0; block < N / 4; ++block)
            smem.given[block][threadIdx.x % 128] =
                make_float4(s[4 * block], s[4 * block + 1], s[4 * block + 2], s[4 * block + 3]);
          given.fill(smem.given_pipeline);
        } else {
          given.wait_full(smem.given_pipeline);
#pragma unroll
          for (int block = 0; block < N / 4; ++block) {
            const float4 taken = smem.given[block][threadIdx.x % 128];
            s[4 * block] = taken.x;
            s[4 * block + 1] = taken.y;
            s[4 * block + 2] = taken.z;
            s[4 * block + 3] = taken.w;
          }
          given.release(smem.given_pipeline);
          given.advance();
        }
      }
      // dS^T = P^T (dP^T - delta)
      if constexpr (MAKES_DK) {
        wgmma_wait_group<0>();
        hold(dp);
        differentiate(delta, s, dp, weights, ds);
      }
#endif
#if IS_FUSED
      store_tile<S::OWN, N>(smem.ds[written.stage()], own, ds);
      fence_proxy_async_shared();
#endif
      // dV += P^T dO
      if constexpr (MAKES_DV)
        start_weighted_sum<STREAM, WIDTH_V>(dv, weights, do_columns + do_stage);
#if IS_FUSED
      // dQ of the tile before, so that no warpgroup waits for the dS of another; dK += dS^T Q
      float dq[32];
      if (!is_first) read.wait_full(smem.ds_pipeline);
      start_dq(dq);  // for the first tile in vain: wgmma suffers no branch
      start_weighted_sum<STREAM, WIDTH>(dk, ds, q_columns + q_stage);
      wgmma_wait_group<1>();
      hold(dv);
      hold(dq);
      reader.release_pass_v();
      if (!is_first) {
        add_dq(dq);
        read.advance();
      }
      written.fill(smem.ds_pipeline);
      sums_before = sums_of_dq(p, tile.b, tile.h, tile.row0 + 64 * panel_q, panel_d);
      sums_before += threadIdx.x % 128 * 4;
      is_first = false;
      wgmma_wait_group<0>();
      hold(dk);
#else
      // dK += dS^T Q
      if constexpr (MAKES_DK) start_weighted_sum<STREAM, WIDTH>(dk, ds, q_columns + q_stage);
      wgmma_wait_group<0>();
      if constexpr (MAKES_DV) hold(dv);
      if constexpr (MAKES_DK) hold(dk);
      reader.release_pass_v();
#endif
      reader.release_pass();
    } while (!is_last);
#if IS_FUSED
    float dq[32];
    read.wait_full(smem.ds_pipeline);
    start_dq(dq);
    wgmma_wait_group<0>();
    hold(dq);
    add_dq(dq);
    read.advance();
#endif
    sums.finish();
    const Order order = reader.order;
    reader.release_order();
    const long long column0 = (long long)order.tile * S::OWN;
    const float scale = float(p.scale), probe = first_probe(p);
    if (HAS_ORDER && order.slot >= 0) {
      const Partial partial(p, order.slot);
      if constexpr (MAKES_DK) store_partial(partial.dk(), own, dk, scale, probe);
      if constexpr (MAKES_DV) store_partial(partial.dv(), own, dv, 1, probe);
      continue;
    }
    const KMatrix dk_gmem(p.dk, order.b, order.head, p.seqlen_k);
    const VMatrix dv_gmem(p.dv, order.b, order.head, p.seqlen_k);
    bool is_good = true;
    if constexpr (MAKES_DK) is_good &= store_result(dk_gmem, column0, own, dk, scale, probe);
    if constexpr (MAKES_DV) is_good &= store_result(dv_gmem, column0, own, dv, 1, probe);
    if constexpr (C::PAIRED) {  // the second does both again, where either was bad
      if constexpr (MAKES_DV) {
        verdict.wait_empty(smem.verdict_pipeline);
        if (lane == 0) smem.is_bad[warp] = !is_good;
        verdict.fill(smem.verdict_pipeline);
        is_good = true;
      } else {
        verdict.wait_full(smem.verdict_pipeline);
        is_good = is_good && !smem.is_bad[warp];
        verdict.release(smem.verdict_pipeline);
        verdict.advance();
      }
    }
    if (!is_good) {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) careful_dk_dv(p, order.b, order.head, column0, own - lane / 4 + i);
    }
  }
}

extern "C" __global__ void __launch_bounds__(C::THREADS, 1)
    dk_dv(const __grid_constant__ Params p) {
  extern __shared__ Smem<false> shared_of_dk_dv[];
  Smem<false>& smem = shared_of_dk_dv[0];
  static_assert(sizeof(smem) <= C::SHARED_BYTES, "cuflash/sm90.py counts as many bytes");
  run<false>(p, smem, [&]() {
    if constexpr (C::PAIRED) {
      if (uniform(threadIdx.x / 128) == 1)
        compute_dk_dv<false, true>(p, smem, NoSums());
      else
        compute_dk_dv<true, false>(p, smem, NoSums());
    } else {
#if HAS_PARAMS && IS_FUSED
      compute_dk_dv<true, true>(p, smem, ParamSums<ADD>(p, first_probe(p)));
#else
      compute_dk_dv<true, true>(p, smem, NoSums());
#endif
    }
  });
}
#endif

#if (PART_MAIN || PART_GREATEST) && !IS_FUSED
// A warpgroup that computes dq of 64 queries of each owned tile.
template <class Sums>
__device__ __forceinline__ void compute_dq(const Params& p, Smem<true>& smem, Sums sums) {
  using S = Smem<true>;
  constexpr int N = S::STREAM / 2, STREAM = S::STREAM;
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const int own = threadIdx.x / 32 % 4 * 16 + 64 * warpgroup + lane / 4, pass = lane % 4 * 2;
  const float c = C::SCALE_FIRST || HAS_SCORE ? LOG2_E : float(p.scale * EXACT_LOG2_E);
  const Operand q = Operand::at(&smem.own[0][0][64 * warpgroup]).uniform();
  const Operand do_ = Operand::at(&smem.own_v[0][0][64 * warpgroup]).uniform();
  const Operand k = Operand::at(smem.pass), v = Operand::at(smem.pass_v);
  const Operand k_columns = Operand::at(smem.pass, STREAM * PANEL_ROW);

  Reader<true> reader(smem);
  float dq[WIDTH / 2];
  while (reader.next_order()) {
    const Order order = reader.order;
    const long long row0 = (long long)order.tile * S::OWN;
    RowNumbers<true> lse2{}, delta{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long row = row0 + own + 8 * half;
      lse2.own[half] = *row_address<float>(p.lse2, order.b, order.head, row);
      delta.own[half] = *row_address<float>(p.delta, order.b, order.head, row);
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) dq[i] = 0;
    bool is_last;
    do {
      float s[N], dp[N];
      unsigned weights[N / 2], ds[N / 2];
      reader.next_visit();
      is_last = reader.is_last();
      const auto tile = reader.tile();
      const bool partly = reader.visit & PARTLY_ATTENDED;
      const int k_stage = reader.at_pass(), v_stage = reader.at_pass_v();
      // S = Q K^T, dP = dO V^T
      start_product<C::HEAD_DIM, S::OWN, STREAM>(s, q + reader.at_own(), k + k_stage);
      reader.wait_pass_v();
      start_product<C::HEAD_DIM_V, S::OWN, STREAM>(dp, do_ + reader.at_own_v(), v + v_stage);
#if HAS_PARAMS
      wgmma_wait_group<0>();
      hold(s);
      hold(dp);
      reader.release_pass_v();
      differentiate_params(p, tile, partly, own, pass, lse2, delta, s, dp, weights, ds, sums);
#else
      wgmma_wait_group<1>();
      hold(s);
      weigh(p, tile, partly, own, pass, c, lse2, s, weights);
      wgmma_wait_group<0>();
      hold(dp);
      reader.release_pass_v();
      differentiate(delta, s, dp, weights, ds);
#endif
      // dQ += dS K
      start_weighted_sum<STREAM, WIDTH>(dq, ds, k_columns + k_stage);
      wgmma_wait_group<0>();
      hold(dq);
      reader.release_pass();
    } while (!is_last);
    sums.finish();
    reader.release_order();
    const float scale = float(p.scale), probe = first_probe(p);
    if (HAS_ORDER && order.slot >= 0) {
      store_partial(Partial(p, order.slot).dq(), own, dq, scale, probe);
      continue;
    }
    if (!store_result(KMatrix(p.dq, order.b, order.head, p.seqlen_q), row0, own, dq, scale, probe)) {
      const Head head(p, order.b, order.head, int(order.head / (p.heads_q / p.heads_k)));
#pragma unroll 1
      for (int i = 0; i < 16; ++i) careful_dq(p, head, row0, own - lane / 4 + i);
    }
  }
}

template <class Sums>
__device__ __forceinline__ void dq_of_all(const Params& p, const Sums& sums) {
  extern __shared__ Smem<true> shared_of_dq[];
  Smem<true>& smem = shared_of_dq[0];
  static_assert(sizeof(smem) <= C::SHARED_BYTES, "cuflash/sm90.py counts as many bytes");
  run<true>(p, smem, [&]() { compute_dq(p, smem, sums); });
}

#if PART_MAIN
extern "C" __global__ void __launch_bounds__(C::THREADS, 1) dq(const __grid_constant__ Params p) {
#if HAS_PARAMS
  dq_of_all(p, ParamSums<IS_DETERMINISTIC ? FIXED : ADD>(p, first_probe(p)));
#else
  dq_of_all(p, NoSums());
#endif
}
#endif

#if PART_GREATEST && HAS_PARAMS && IS_DETERMINISTIC
// Finds the greatest values that dq will add (and makes dq, to be made again).
extern "C" __global__ void __launch_bounds__(C::THREADS, 1)
    greatest(const __grid_constant__ Params p) {
  dq_of_all(p, ParamSums<GREATEST>(p, first_probe(p)));
}
#endif
#endif
