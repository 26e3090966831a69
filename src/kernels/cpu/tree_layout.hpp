// Writing one request's tree in the layout of kdtree.h: shared by tree_build, tree_from_parents and
// tree_from_visibility. Nodes are put in slot order, then linked, then the rest is padded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../tree_slots.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cpu {

// Fills one slot but its links. The parent's slot (-1 for the root) must be filled already.
inline void put_node(const TreeSlots& t, int32_t slot, int32_t parent, int32_t token, float log_prob,
                     int32_t prefix_len) {
  t.tokens[slot] = token;
  t.parents[slot] = parent;
  t.log_probs[slot] = log_prob;
  uint64_t* row = t.row(slot);
  if (parent < 0) {
    t.depths[slot] = 0;
    std::fill_n(row, t.words, uint64_t{0});
  } else {
    t.depths[slot] = t.depths[parent] + 1;
    std::copy_n(t.row(parent), t.words, row);
  }
  t.positions[slot] = prefix_len + t.depths[slot];
  row[slot / 64] |= uint64_t{1} << (slot % 64);
}

// Links the children of slots 0..count-1 in ascending order and pads the slots from `count` on.
inline void finish_tree(const TreeSlots& t, int32_t count) {
  const int32_t padding = t.num_slots - count;
  std::fill_n(t.first_child, t.num_slots, -1);
  std::fill_n(t.next_sibling, t.num_slots, -1);
  for (int32_t slot = count - 1; slot > 0; --slot) {  // from the back: each goes to the front of its list
    t.next_sibling[slot] = t.first_child[t.parents[slot]];
    t.first_child[t.parents[slot]] = slot;
  }
  std::fill_n(t.tokens + count, padding, -1);
  std::fill_n(t.parents + count, padding, -1);
  std::fill_n(t.depths + count, padding, 0);
  std::fill_n(t.positions + count, padding, 0);
  std::fill_n(t.log_probs + count, padding, -std::numeric_limits<float>::infinity());
  for (int32_t slot = count; slot < t.num_slots; ++slot) std::fill_n(t.row(slot), t.words, uint64_t{0});
}

// Everything a dead request gets.
inline void put_dead_tree(const kdt_tree& tree, int64_t b) {
  finish_tree(TreeSlots(tree, b), 0);
  tree.node_count[b] = 0;
  if (tree.status != nullptr) tree.status[b] = 0;
}

// Clamps a number read from an array and notes in *status that it had to.
inline int32_t clamped(int32_t value, int32_t low, int32_t high, int32_t* status) {
  if (value < low || value > high) *status |= KDT_STATUS_CLAMPED;
  return std::clamp(value, low, high);
}

// Requests from here on are dead.
inline int64_t live_requests(const int32_t* num_live, int32_t batch_size) {
  return num_live == nullptr ? batch_size : std::clamp(*num_live, 0, batch_size);
}

}  // namespace kdt::cpu
