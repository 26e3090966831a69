// Best-first search by one warp, one node after another: for what defeats the threshold of tree_build.cu. For each
// slot it keeps the best child that is not in the tree yet, and takes the best of those; a lane looks after every
// 32nd slot. Places are slots here.
#pragma once

#include "tree_build.cuh"

namespace kdt::cuda {

template <class Size, class Shared>
__device__ int32_t search(Shared& s, const Request& q) {
  auto& pool = s.pool;
  static_assert(Size::kPool >= 2 * (Size::kBudget + 1), "the upper half of the pool holds the children");
  double* child_score = pool.score + Size::kBudget + 1;    // of each slot's best child that is not in the tree
  uint16_t* child_rank = pool.rank + Size::kBudget + 1;    // kNone: there is none
  uint16_t* last_child = pool.parent + Size::kBudget + 1;  // the sibling before it
  const int lane = threadIdx.x;
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const auto better = [&](int32_t a, int32_t b) {  // the child of slot a comes before that of b
      if (b < 0) return true;
      if (child_score[a] != child_score[b]) return child_score[a] > child_score[b];
      return tuple_before(pool, a, child_rank[a], b, child_rank[b]);
    };
    const auto offer = [&](int32_t slot, int32_t rank) {  // by one lane
      const int32_t d = pool.depth[slot];
      if (d < q.depth && rank < s.lengths[d]) {
        child_score[slot] = pool.score[slot] + static_cast<double>(q.log_prob(d, rank));
        child_rank[slot] = static_cast<uint16_t>(rank);
      } else {
        child_rank[slot] = kNone;
      }
    };
    if (lane == 0) {
      pool.score[0] = 0.0;
      pool.parent[0] = 0;
      pool.rank[0] = 0;
      pool.depth[0] = 0;
      s.first_child[0] = kNone;
      s.next_sibling[0] = kNone;
      offer(0, 0);
    }
    __syncwarp();
    int32_t count = 1;
    int32_t mine = lane == 0 && child_rank[0] != kNone ? 0 : -1;  // the best of this lane's slots
    while (count <= q.budget) {
      int32_t best = mine;
      for (int step = kWarpSize / 2; step > 0; step /= 2) {
        const int32_t other = __shfl_xor_sync(kAllLanes, best, step);
        if (other >= 0 && better(other, best)) best = other;
      }
      best = __shfl_sync(kAllLanes, best, 0);
      if (best < 0) break;
      const int32_t slot = count++;
      __syncwarp();  // all have looked before anything changes
      if (lane == 0) {
        const int32_t rank = child_rank[best];
        pool.score[slot] = child_score[best];
        pool.parent[slot] = static_cast<uint16_t>(best);
        pool.rank[slot] = static_cast<uint16_t>(rank);
        pool.depth[slot] = static_cast<uint8_t>(pool.depth[best] + 1);
        s.place[slot] = static_cast<uint16_t>(slot);
        s.parent[slot] = static_cast<uint16_t>(best);
        s.first_child[slot] = kNone;
        s.next_sibling[slot] = kNone;
        (rank == 0 ? s.first_child[best] : s.next_sibling[last_child[best]]) = static_cast<uint16_t>(slot);
        last_child[best] = static_cast<uint16_t>(slot);
        offer(best, rank + 1);
        offer(slot, 0);
      }
      __syncwarp();
      if (best % kWarpSize == lane) {  // its child is another now: look through all
        mine = -1;
        for (int32_t i = lane; i < count; i += kWarpSize) {
          if (child_rank[i] != kNone && better(i, mine)) mine = i;
        }
      } else if (slot % kWarpSize == lane && child_rank[slot] != kNone && better(slot, mine)) {
        mine = slot;
      }
    }
    if (lane == 0) s.pool_count = count;
  }
  __syncthreads();
  return s.pool_count - 1;
}

}  // namespace kdt::cuda
