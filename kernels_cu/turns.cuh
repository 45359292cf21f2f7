// Who works what, where blocks stay on their SM and work one item of a list after the other. Each
// begins with the item of its own number. Where items differ in length, whoever is done takes the
// next one; where they do not, the block that many blocks further.
//
// The count of items taken lies in the workspace, which holds anything when the kernel starts, and a
// launch to clear it would cost as much as the smallest problems do. So block 0 clears it and then
// writes the number of this launch, which no other launch has, beside it; others wait for that
// number before they count. The last block takes the number away: a graph launches with the same one
// again.
#pragma once
#include "params.cuh"

template <bool DIFFER>
class Turns {
 public:
  __device__ Turns(const Params& p, long long items)
      : state_((State*)p.turns), number_((Word)p.launch), items_(items), at_(blockIdx.x) {}

  // The item of this block's first turn, -1 if there is none. By a whole warp, one of the block.
  __device__ __forceinline__ long long first() {
    if (DIFFER && items_ > gridDim.x && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      state_->taken = state_->finished = 0;
      __threadfence();  // others that see the number see the zeros
      atomicExch(&state_->number, number_);
    }
    return at_ < items_ ? at_ : -1;
  }

  // The item of its next turn, -1 after the last.
  __device__ __forceinline__ long long next() {
    if (DIFFER && items_ > gridDim.x && at_ < items_) {
      if (threadIdx.x % 32 == 0) at_ = take();
      at_ = __shfl_sync(ALL_LANES, at_, 0);
    } else {
      at_ += gridDim.x;
    }
    return at_ < items_ ? at_ : -1;
  }

 private:
  using Word = unsigned long long;
  struct State {
    Word number, taken, finished;
  };

  __device__ __forceinline__ long long take() {
    while (at_ == blockIdx.x && atomicAdd(&state_->number, 0) != number_) {
    }
    __threadfence();
    const long long at = gridDim.x + atomicAdd(&state_->taken, 1);
    if (at >= items_ && atomicAdd(&state_->finished, 1) == gridDim.x - 1)
      atomicExch(&state_->number, 0);
    return at;
  }

  State* state_;
  Word number_;
  long long items_, at_;
};
