// Stages of shared memory between the warp that loads and the warpgroups that compute.
#pragma once
#include "ptx_sm90.cuh"

constexpr int WARPS = 4 * Config::WARPGROUPS;  // that compute

// What the warp that loads tells the others of an owned tile.
struct Order {
  int b, head, tile, slot;  // b < 0: there is nothing left to do
};
// And of a passing one, which a stage holds: 4 * tile, and how.
enum Visit { PARTLY_ATTENDED = 1, LAST = 2 };

// The barriers of STAGES buffers: one says that a buffer is full, one that it is empty again.
template <int STAGES>
struct Pipeline {
  unsigned long long full[STAGES], empty[STAGES];

  // By one thread. A stage is full once `writers` have arrived (and the bytes that they expect), and
  // empty once `readers` warps have released it.
  __device__ __forceinline__ void init(int readers, int writers = 1) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&full[stage], writers);
      mbarrier_init(&empty[stage], readers);
    }
  }
};

__device__ __forceinline__ void wait(unsigned long long* barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// One side's place in a pipeline: the buffer that it is at, and how often it has been around.
template <int STAGES>
class Place {
 public:
  __device__ __forceinline__ int stage() const { return STAGES == 1 ? 0 : stage_; }
  __device__ __forceinline__ void advance() {
    if (STAGES == 1 || ++stage_ == STAGES) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }
  __device__ __forceinline__ void wait_full(Pipeline<STAGES>& pipeline) const {
    wait(&pipeline.full[stage()], parity_);
  }
  __device__ __forceinline__ void wait_empty(Pipeline<STAGES>& pipeline) const {
    wait(&pipeline.empty[stage()], parity_ ^ 1);
  }
  // By every warp that writes, where it is warps that do.
  __device__ __forceinline__ void fill(Pipeline<STAGES>& pipeline) {
    __syncwarp();  // all lanes have written
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&pipeline.full[stage()]);
    advance();
  }
  // By every warp that reads, once it has read.
  __device__ __forceinline__ void release(Pipeline<STAGES>& pipeline) const {
    __syncwarp();  // all lanes have read
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&pipeline.empty[stage()]);
  }

 private:
  int stage_ = 0, parity_ = 0;
};
