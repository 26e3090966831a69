// The arrays of one request of a batch of trees. Host and device code alike.
#pragma once

#include <cstdint>

#include "host_device.hpp"
#include "kdtree/kdtree.h"

namespace kdt {

struct TreeSlots {
  KDT_HOST_DEVICE TreeSlots(const kdt_tree& tree, int64_t b)
      : tokens(tree.tokens + b * tree.slot_stride),
        parents(tree.parents + b * tree.slot_stride),
        first_child(tree.first_child + b * tree.slot_stride),
        next_sibling(tree.next_sibling + b * tree.slot_stride),
        depths(tree.depths + b * tree.slot_stride),
        positions(tree.positions + b * tree.slot_stride),
        log_probs(tree.log_probs + b * tree.slot_stride),
        visibility(tree.visibility + b * tree.visibility_stride),
        pitch(tree.visibility_pitch),
        words((tree.num_slots + 63) / 64),
        num_slots(tree.num_slots) {}

  int32_t *tokens, *parents, *first_child, *next_sibling, *depths, *positions;
  float* log_probs;
  uint64_t* visibility;
  int64_t pitch;
  int32_t words;
  int32_t num_slots;

  KDT_HOST_DEVICE uint64_t* row(int32_t slot) const { return visibility + slot * pitch; }
};

}  // namespace kdt
