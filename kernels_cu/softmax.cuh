// Online softmax of one row, and the only home of the -inf rule.
//
// A masked score is -inf, put there by selection, never by adding; its weight is 0. A row whose
// scores are all -inf sees no key: o = 0, lse = -inf, no gradient.
#pragma once
#include "math.cuh"

template <class Number>
__device__ __forceinline__ bool is_masked(Number s) {
  return s == negative_infinity<Number>();
}

// In which units a kernel holds scores: s itself, or s * log2(e) where exp2 is an instruction.
struct Natural {
  template <class Number>
  __device__ static Number exp(Number s) { return natural_exp(s); }
  template <class Number>
  __device__ static Number from_natural(Number s) { return s; }
  template <class Number>
  __device__ static Number lse(Number row_max, Number row_sum) {
    return row_max + natural_log(row_sum);
  }
};
struct Binary {
  __device__ static float exp(float s) { return ex2_approx_ftz_f32(s); }
  __device__ static float from_natural(float s) { return s * LOG2_E; }
  __device__ static float lse(float row_max, float row_sum) {
    return (row_max + log2f(row_sum)) * LN_2;
  }
};

// The state of a row after some of its keys. Threads may share a row: then row_max is the same in
// all of them, and row_sum is the sum over each one's own keys.
template <class Number, class Units = Natural>
struct RowState {
  Number row_max, row_sum;
  __device__ RowState() : row_max(negative_infinity<Number>()), row_sum(0) {}

  // The number that is subtracted before exp; 0 as long as every score was masked.
  __device__ Number reference() const { return is_masked(row_max) ? Number(0) : row_max; }

  // Raises the maximum to that of new scores. Returns exp(old - new), the factor for earlier sums.
  __device__ Number raise(Number new_max) {
    const Number old_max = row_max;
    row_max = new_max > old_max ? new_max : old_max;
    const Number rescale = Units::exp(old_max - reference());
    row_sum *= rescale;
    return rescale;
  }

  // p = exp(s - m). The difference comes first: it is exact near the maximum at any logit size.
  __device__ Number weigh(Number s) const { return Units::exp(s - reference()); }

  // Adds a logit without a value, a sink. Returns the factor for earlier sums, as raise does.
  __device__ Number include(Number logit) {
    const Number rescale = raise(logit);
    row_sum += weigh(logit);
    return rescale;
  }

  // Adds other keys of the same row.
  __device__ void merge(const RowState& other) {
    raise(other.row_max);
    row_sum += other.row_sum * weigh(other.row_max);
  }

  // The state of a row whose keys are spread over the lanes of a warp, each with its own maximum.
  __device__ RowState over_lanes() const {
    RowState all;
    all.row_max = lanes_max<32>(row_max);
    all.row_sum = lanes_sum<32>(row_sum * Units::exp(row_max - all.reference()));
    return all;
  }

  // lse = m + log(l), once row_sum is the sum over all keys.
  __device__ Number lse() const {
    return row_sum == Number(0) ? negative_infinity<Number>() : Units::lse(row_max, row_sum);
  }
};

// Backward: p = exp(min(s - lse, 0)). The minimum keeps it finite where s was summed in another
// order than in forward; written so that NaN stays NaN. An empty row (lse = -inf) has no weights.
template <class Number>
__device__ __forceinline__ Number weigh_by_lse(Number s, Number lse) {
  const Number exponent = s - lse > Number(0) ? Number(0) : s - lse;
  return natural_exp(is_masked(s) || is_masked(lse) ? negative_infinity<Number>() : exponent);
}
