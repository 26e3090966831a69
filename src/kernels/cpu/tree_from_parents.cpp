// tree_from_parents on the CPU: one pass that checks each parent as it fills the slot, then the links.
// A malformed tree is found in the middle of that pass; the root alone is then written over it.
#include <cstdint>

#include "ops.hpp"
#include "parallel.hpp"
#include "tree_layout.hpp"

namespace kdt::cpu {
namespace {

void build_one(const kdt_tree_from_parents_params& p, int64_t b) {
  const kdt_tree& tree = *p.tree;
  const TreeSlots t(tree, b);
  const int32_t* tokens = p.tokens + b * p.tokens_stride;
  const int32_t* parents = p.parents + b * p.parents_stride;

  int32_t status = 0;
  const int32_t prefix_len = clamped(p.prefix_lens[b], 0, INT32_MAX - t.num_slots, &status);
  int32_t count = p.node_counts[b];
  bool good = count >= 0 && count <= t.num_slots && parents[0] == -1;
  put_node(t, 0, -1, tokens[0], 0.0f, prefix_len);
  for (int32_t slot = 1; good && slot < count; ++slot) {
    good = parents[slot] >= 0 && parents[slot] < slot;
    if (good) put_node(t, slot, parents[slot], tokens[slot], 0.0f, prefix_len);
  }
  if (!good) {
    status |= KDT_STATUS_BAD_TREE;
    count = 1;
  }
  finish_tree(t, count);
  tree.node_count[b] = count;
  if (tree.status != nullptr) tree.status[b] = status;
}

}  // namespace

void tree_from_parents(const kdt_context& context, const kdt_tree_from_parents_params& p) {
  const int32_t batch_size = p.tree->batch_size;
  const int64_t live = live_requests(p.num_live, batch_size);
  const int64_t min_requests = 1 + 2048 / p.tree->num_slots;  // about 50 us
  parallel_for(context.num_threads, batch_size, min_requests, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t b = begin; b < end; ++b) {
      if (b < live && p.node_counts[b] != 0) {
        build_one(p, b);
      } else {
        put_dead_tree(*p.tree, b);
      }
    }
  });
}

}  // namespace kdt::cpu
