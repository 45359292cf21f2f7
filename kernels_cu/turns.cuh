// Who works what, where blocks stay on their SM and work one item of a list after the other. Each
// begins with the item of its own number; then, whoever is done takes the next. (Fixed turns, even of
// items of one length, were 4 % slower: SMs are not equally fast.)
//
// The count of items taken lies in the workspace, which holds anything when the kernel starts, and a
// launch to clear it would cost as much as the smallest problems do. So block 0 clears it and then
// writes the number of this launch, which no other launch has, beside it; others wait for that
// number before they count. The last block takes the number away: a graph launches with the same one
// again.
#pragma once
#include "params.cuh"

class Turns {
 public:
  __device__ Turns(const Params& p, long long items)
      : p_(p), items_(items), at_(blockIdx.x) {}

  // The item of this block's first turn, -1 if there is none. By a whole warp, one of the block.
  __device__ __forceinline__ long long first() {
    if (items_ > gridDim.x && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      state()->taken = state()->finished = 0;
      __threadfence();  // others that see the number see the zeros
      atomicExch(&state()->number, (Word)p_.launch);
    }
    return at_ < items_ ? at_ : -1;
  }

  // The item of its next turn, -1 after the last.
  __device__ __forceinline__ long long next() {
    if (items_ > gridDim.x && at_ < items_) {
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

  __device__ __forceinline__ State* state() const { return (State*)p_.turns; }

  __device__ __forceinline__ long long take() {
    while (at_ == blockIdx.x && atomicAdd(&state()->number, 0) != (Word)p_.launch) {
    }
    __threadfence();
    const long long at = gridDim.x + atomicAdd(&state()->taken, 1);
    if (at >= items_ && atomicAdd(&state()->finished, 1) == gridDim.x - 1)
      atomicExch(&state()->number, 0);
    return at;
  }

  const Params& p_;
  long long items_, at_;
};
