// Writing one request's tree in the layout of kdtree.h with a block of threads: for tree_from_parents and
// tree_from_visibility (tree_build has its own, in tree_build.cuh, but for put_request). A tree is worked out in
// shared memory, and every entry of the layout is then written once.
#pragma once

#include <cstdint>

#include "../tree_slots.hpp"
#include "common.cuh"
#include "kdtree/kdtree.h"

namespace kdt::cuda {

// A tree's slots 0..count-1 in shared memory.
struct SharedTree {
  int32_t parents[kMaxSlots], depths[kMaxSlots], first_child[kMaxSlots];
};

// One warp: links the children of each slot in ascending order. Reads parents; writes first_child for slots
// 0..count-1, and the tree's next_sibling with its padding.
__device__ inline void link_children(const TreeSlots& t, SharedTree& s, int32_t count) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % kWarpSize);
  for (int32_t slot = lane; slot < count; slot += kWarpSize) s.first_child[slot] = -1;
  // From the back, a warp's width at a time. Among its slots a sibling is a lane with the same parent; beyond them
  // it is the first child found so far.
  for (int32_t first = (t.num_slots - 1) / kWarpSize * kWarpSize; first >= 0; first -= kWarpSize) {
    __syncwarp();
    const int32_t slot = first + lane;
    const bool child = slot > 0 && slot < count;
    const int32_t parent = child ? s.parents[slot] : -1;
    const unsigned siblings = __match_any_sync(kAllLanes, parent);
    const unsigned after = siblings & ~(0xffffffffu >> (kWarpSize - 1 - lane));
    int32_t next = -1;
    if (child) next = after != 0 ? first + __ffs(static_cast<int>(after)) - 1 : s.first_child[parent];
    __syncwarp();
    if (child && __ffs(static_cast<int>(siblings)) - 1 == lane) s.first_child[parent] = slot;
    if (slot < t.num_slots) t.next_sibling[slot] = next;
  }
}

// Writes everything of a tree but its siblings' links, visibility, node_count and status: slots 0..count-1 from
// `s`, then padding.
__device__ inline void put_slots(const TreeSlots& t, const SharedTree& s, int32_t count, const int32_t* tokens,
                                 int32_t prefix_len) {
  for (int32_t slot = static_cast<int32_t>(threadIdx.x); slot < t.num_slots;
       slot += static_cast<int32_t>(blockDim.x)) {
    const bool node = slot < count;
    t.tokens[slot] = node ? tokens[slot] : -1;
    t.parents[slot] = node ? s.parents[slot] : -1;
    t.first_child[slot] = node ? s.first_child[slot] : -1;
    t.depths[slot] = node ? s.depths[slot] : 0;
    t.positions[slot] = node ? prefix_len + s.depths[slot] : 0;
    t.log_probs[slot] = node ? 0.0f : negative_infinity();
  }
}

// Zeroes the visibility rows from slot `count` on.
__device__ inline void pad_rows(const TreeSlots& t, int32_t count) {
  const int32_t entries = (t.num_slots - count) * t.words;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < entries; i += static_cast<int32_t>(blockDim.x)) {
    t.row(count + i / t.words)[i % t.words] = 0;
  }
}

__device__ inline void put_request(const kdt_tree& tree, int64_t b, int32_t node_count, int32_t status) {
  if (threadIdx.x != 0) return;
  tree.node_count[b] = node_count;
  if (tree.status != nullptr) tree.status[b] = status;
}

// Everything a dead request gets.
__device__ inline void put_dead_tree(const kdt_tree& tree, int64_t b) {
  const TreeSlots t(tree, b);
  for (int32_t slot = static_cast<int32_t>(threadIdx.x); slot < t.num_slots;
       slot += static_cast<int32_t>(blockDim.x)) {
    t.tokens[slot] = t.parents[slot] = t.first_child[slot] = t.next_sibling[slot] = -1;
    t.depths[slot] = t.positions[slot] = 0;
    t.log_probs[slot] = negative_infinity();
  }
  pad_rows(t, 0);
  put_request(tree, b, 0, 0);
}

}  // namespace kdt::cuda
