// tree_from_visibility on the CPU: row i's parent is its highest slot below i, and a closure has row i = that
// parent's row plus i. So each row is packed to bits and compared with the row the tree layout would give it.
#include <algorithm>
#include <cstdint>

#include "ops.hpp"
#include "parallel.hpp"
#include "tree_layout.hpp"

namespace kdt::cpu {
namespace {

// Packs mask[0..count) to bits.
void pack_row(const uint8_t* mask, int32_t count, uint64_t* bits) {
  std::fill_n(bits, (count + 63) / 64, uint64_t{0});
  for (int32_t j = 0; j < count; ++j) bits[j / 64] |= static_cast<uint64_t>(mask[j] != 0) << (j % 64);
}

// Highest set bit below `slot`, or -1.
int32_t parent_of(const uint64_t* bits, int32_t slot) {
  for (int32_t word = slot / 64; word >= 0; --word) {
    uint64_t below = bits[word];
    if (word == slot / 64) below &= (uint64_t{1} << (slot % 64)) - 1;
    if (below != 0) return word * 64 + 63 - __builtin_clzll(below);
  }
  return -1;
}

void build_one(const kdt_tree_from_visibility_params& p, int64_t b) {
  const kdt_tree& tree = *p.tree;
  const TreeSlots t(tree, b);
  const int32_t* tokens = p.tokens + b * p.tokens_stride;
  const uint8_t* mask = p.mask + b * p.mask_stride;

  int32_t status = 0;
  const int32_t prefix_len = clamped(p.prefix_lens[b], 0, INT32_MAX - t.num_slots, &status);
  int32_t count = p.node_counts[b];
  bool good = count >= 0 && count <= t.num_slots;
  uint64_t bits[(KDT_MAX_BUDGET + 64) / 64];
  put_node(t, 0, -1, tokens[0], 0.0f, prefix_len);
  for (int32_t slot = 0; good && slot < count; ++slot) {
    pack_row(mask + slot * p.mask_row_stride, count, bits);
    if (slot > 0) {
      const int32_t parent = parent_of(bits, slot);
      good = parent >= 0;
      if (good) put_node(t, slot, parent, tokens[slot], 0.0f, prefix_len);
    }
    good = good && std::equal(bits, bits + (count + 63) / 64, t.row(slot));
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

void tree_from_visibility(const kdt_context& context, const kdt_tree_from_visibility_params& p) {
  const int32_t batch_size = p.tree->batch_size;
  const int64_t live = live_requests(p.num_live, batch_size);
  const int64_t slots = p.tree->num_slots;
  const int64_t min_requests = 1 + 65536 / (slots * slots);  // about 50 us at 1 ns a mask entry
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
