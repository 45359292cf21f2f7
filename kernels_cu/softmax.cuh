// Online softmax of one row, and the only home of the -inf rule.
//
// A masked score is -inf, put there by selection, never by adding. Its weight is minus zero: that
// multiplies as zero, and the careful path can tell it from a weight that underflowed to zero.
// A row whose scores are all -inf sees no key: o = 0, lse = -inf, no gradient.
#pragma once
#include "math.cuh"

__device__ __forceinline__ bool is_masked_score(Accumulation s) { return s == negative_infinity(); }
__device__ __forceinline__ bool is_masked_weight(Accumulation weight) {
  return is_minus_zero(weight);
}

// The state of a row after some of its keys. Each of the threads that share a row holds the same
// row_max, and the sum over its own columns in row_sum.
struct RowState {
  Accumulation row_max, row_sum;
  __device__ RowState() : row_max(negative_infinity()), row_sum(0) {}

  // The number that is subtracted before exp; 0 as long as every score was masked.
  __device__ Accumulation reference() const {
    return is_masked_score(row_max) ? Accumulation(0) : row_max;
  }

  // Raise the maximum to that of new scores. Returns exp(old - new), the factor for earlier sums.
  __device__ Accumulation raise(Accumulation new_max) {
    const Accumulation old_max = row_max;
    row_max = new_max > old_max ? new_max : old_max;
    const Accumulation rescale = natural_exp(old_max - reference());
    row_sum *= rescale;
    return rescale;
  }

  // p = exp(s - m). The difference comes first: it is exact near the maximum at any logit size.
  __device__ Accumulation weigh(Accumulation s) const {
    return is_masked_score(s) ? -Accumulation(0) : natural_exp(s - reference());
  }

  // lse = m + log(l), where row_sum, summed over the threads of the row, is damp * l.
  __device__ Accumulation lse(Accumulation damp) const {
    return row_sum == Accumulation(0) ? negative_infinity() : row_max + natural_log(row_sum / damp);
  }
};

// Backward: p = exp(min(s - lse, 0)). The minimum keeps it finite where s was summed in another
// order than in forward; written so that NaN stays NaN. An empty row (lse = -inf) has no weights.
__device__ __forceinline__ Accumulation weigh_by_lse(Accumulation s, Accumulation lse) {
  if (is_masked_score(s) || is_masked_score(lse)) return -Accumulation(0);
  const Accumulation exponent = s - lse;
  return natural_exp(exponent > Accumulation(0) ? Accumulation(0) : exponent);
}
