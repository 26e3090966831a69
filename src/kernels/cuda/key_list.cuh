// Keeping the largest of many 64-bit keys in shared memory: a block's list that keys are appended to, cut down to
// its largest when it fills up, and sorted at the end. Keys differ from each other and from 0.
#pragma once

#include "common.cuh"

namespace kdt::cuda {

// A candidate token: the order of its logit above the complement of its id, so that the larger key comes first.
__device__ inline uint64_t candidate_key(float logit, uint32_t id) {
  return static_cast<uint64_t>(ordered_bits(logit)) << 32 | static_cast<uint32_t>(~id);
}
__device__ inline uint32_t candidate_id(uint64_t key) { return ~static_cast<uint32_t>(key); }
__device__ inline float candidate_logit(uint64_t key) {
  return from_ordered_bits(static_cast<uint32_t>(key >> 32));
}

template <int kThreads, int kCapacity>
struct KeyList {
  uint64_t keys[kCapacity];
  int32_t count;
  int32_t reached[64];

  // The functions are for all threads of the block together, begin and end with all of them in step, and take and
  // return numbers that are the same for all. Between them, threads may append.

  __device__ void clear() {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
  }

  // By any thread; the caller sees to it that the list does not overflow.
  __device__ void append(uint64_t key) { keys[atomicAdd(&count, 1)] = key; }

  // Leaves out what has no room, and counts it: count is then more than the capacity.
  __device__ void append_if_room(uint64_t key) {
    const int32_t at = atomicAdd(&count, 1);
    if (at < kCapacity) keys[at] = key;
  }

  // Drops small keys until at most `most` are left; the k <= most largest stay. Where it drops some, it returns a
  // key that k keys reach, else 0.
  __device__ __noinline__ uint64_t cut(int32_t k, int32_t most) {
    __syncthreads();
    const int32_t n = count;
    __syncthreads();  // all have read it; appending may go on
    if (n <= most) return 0;
    if (threadIdx.x < 64) reached[threadIdx.x] = 0;
    __syncthreads();
    // Bit by bit from the top, the largest bound that at least k keys reach; early when that is few enough.
    uint64_t bound = 0;
    for (int bit = 63; bit >= 0; --bit) {
      const uint64_t tried = bound | uint64_t{1} << bit;
      unsigned mine = 0;
      for (int32_t i = threadIdx.x; i < n; i += kThreads) mine += keys[i] >= tried;
      mine = __reduce_add_sync(kAllLanes, mine);
      if (threadIdx.x % kWarpSize == 0 && mine > 0) atomicAdd(&reached[bit], static_cast<int>(mine));
      __syncthreads();
      if (reached[bit] >= k) {
        bound = tried;
        if (reached[bit] <= most) break;
      }
    }
    // Strip by strip: what stays never goes beyond what has been read.
    if (threadIdx.x == 0) count = 0;
    for (int32_t first = 0; first < n; first += kThreads) {
      const int32_t i = first + static_cast<int32_t>(threadIdx.x);
      const uint64_t key = i < n ? keys[i] : 0;
      __syncthreads();
      if (key >= bound && key != 0) append(key);
    }
    __syncthreads();
    return bound;
  }

  // Sorts what is there in descending order.
  __device__ void sort() {
    __syncthreads();
    const int32_t n = count;
    if (n <= kThreads) {  // a key's place is the number of larger ones
      const uint64_t key = threadIdx.x < n ? keys[threadIdx.x] : 0;
      int32_t place = 0;
      if (threadIdx.x < n) {
#pragma unroll 8
        for (int32_t i = 0; i < n; ++i) place += keys[i] > key;
      }
      __syncthreads();
      if (threadIdx.x < n) keys[place] = key;
      __syncthreads();
      return;
    }
    int32_t size = kThreads;  // a power of two: a bitonic sort
    while (size < n) size *= 2;
    for (int32_t i = n + static_cast<int32_t>(threadIdx.x); i < size; i += kThreads) keys[i] = 0;
    for (int32_t run = 2; run <= size; run *= 2) {
      for (int32_t step = run / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int32_t i = threadIdx.x; i < size / 2; i += kThreads) {
          const int32_t low = i / step * step * 2 + i % step, high = low + step;
          const uint64_t a = keys[low], b = keys[high];
          if ((a < b) == ((low & run) == 0)) {
            keys[low] = b;
            keys[high] = a;
          }
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace kdt::cuda
