// Who works what, where blocks stay on their SM and work one item of a list after the other: each
// begins with the item of its own number, and whoever is done takes the next.
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
      : state_((State*)p.turns), number_((Word)p.launch), items_(items) {}

  // The item of this block's next turn, -1 after the last. By a whole warp, one of the block.
  __device__ __forceinline__ long long next() {
    long long item = blockIdx.x;
    if (items_ > gridDim.x) {
      if (threadIdx.x % 32 == 0 && is_first_ && blockIdx.x == 0) {
        state_->taken = state_->finished = 0;
        __threadfence();  // others that see the number see the zeros
        atomicExch(&state_->number, number_);
      }
      if (threadIdx.x % 32 == 0 && !is_first_) item = gridDim.x + take();
      item = __shfl_sync(ALL_LANES, item, 0);
    } else if (!is_first_) {
      item = items_;
    }
    is_first_ = false;
    return item < items_ ? item : -1;
  }

 private:
  using Word = unsigned long long;
  struct State {
    Word number, taken, finished;
  };

  __device__ __forceinline__ long long take() {
    while (atomicAdd(&state_->number, 0) != number_) {
    }
    __threadfence();
    const long long taken = atomicAdd(&state_->taken, 1);
    if (gridDim.x + taken >= items_ && atomicAdd(&state_->finished, 1) == gridDim.x - 1)
      atomicExch(&state_->number, 0);
    return taken;
  }

  State* state_;
  Word number_;
  long long items_;
  bool is_first_ = true;
};
