// Output trees in guarded memory, what they are compared with, and calls of tree_build.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "call.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"

namespace kdt_test {

// Rows of a visibility matrix from parents, by following them from each slot.
inline std::vector<uint64_t> visibility_of(const std::vector<int32_t>& parents,
                                           const std::vector<int32_t>& node_count, int64_t num_slots) {
  const size_t words = static_cast<size_t>((num_slots + 63) / 64), n = static_cast<size_t>(num_slots);
  std::vector<uint64_t> rows(node_count.size() * n * words);
  for (size_t b = 0; b < node_count.size(); ++b) {
    for (int32_t slot = 0; slot < node_count[b]; ++slot) {
      for (int32_t seen = slot; seen >= 0; seen = parents[b * n + static_cast<size_t>(seen)]) {
        rows[(b * n + static_cast<size_t>(slot)) * words + static_cast<size_t>(seen) / 64] |= uint64_t{1}
                                                                                              << (seen % 64);
      }
    }
  }
  return rows;
}

// A batch of trees, packed.
struct TreeValues {
  std::vector<int32_t> tokens, parents, first_child, next_sibling, depths, positions;
  std::vector<float> log_probs;
  std::vector<uint64_t> visibility;
  std::vector<int32_t> node_count, status;

  // A fixture's arrays named PREFIX + field.
  static TreeValues of(const Case& c, const std::string& prefix) {
    const auto ints = [&](const char* field) { return c.ints(prefix + field); };
    return {ints("tokens"),
            ints("parents"),
            ints("first_child"),
            ints("next_sibling"),
            ints("depths"),
            ints("positions"),
            c.get<float>(prefix + "log_probs").data,
            c.get<uint64_t>(prefix + "visibility").data,
            ints("node_count"),
            ints("status")};
  }

  TreeValues repeated(int64_t times) const {
    return {tiled(tokens, times),       tiled(parents, times),    tiled(first_child, times),
            tiled(next_sibling, times), tiled(depths, times),     tiled(positions, times),
            tiled(log_probs, times),    tiled(visibility, times), tiled(node_count, times),
            tiled(status, times)};
  }
};

// Poisoned memory for a batch of trees with `slack` unused elements after each row.
struct TreeBuffers {
  TreeBuffers(int32_t batch_size, int32_t slots, int64_t slack = 0, bool status_given = true)
      : num_slots(slots),
        with_status(status_given),
        words((slots + 63) / 64),
        tokens({batch_size, slots}, {slots + slack}),
        parents({batch_size, slots}, {slots + slack}),
        first_child({batch_size, slots}, {slots + slack}),
        next_sibling({batch_size, slots}, {slots + slack}),
        depths({batch_size, slots}, {slots + slack}),
        positions({batch_size, slots}, {slots + slack}),
        log_probs({batch_size, slots}, {slots + slack}),
        visibility({batch_size, slots, words}, {slots * (words + slack) + slack, words + slack}),
        node_count({batch_size}),
        status({batch_size}),
        tree(sized<kdt_tree>()) {
    tree.batch_size = batch_size;
    tree.num_slots = slots;
    if (slack > 0) {
      tree.slot_stride = slots + slack;
      tree.visibility_pitch = words + slack;
      tree.visibility_stride = slots * (words + slack) + slack;
    }
    tree.tokens = tokens.data();
    tree.parents = parents.data();
    tree.first_child = first_child.data();
    tree.next_sibling = next_sibling.data();
    tree.depths = depths.data();
    tree.positions = positions.data();
    tree.log_probs = log_probs.data();
    tree.visibility = visibility.data();
    tree.node_count = node_count.data();
    tree.status = with_status ? status.data() : nullptr;
  }
  TreeBuffers(const TreeBuffers&) = delete;
  TreeBuffers& operator=(const TreeBuffers&) = delete;

  TreeValues values() const {
    return {tokens.values(),    parents.values(),   first_child.values(), next_sibling.values(), depths.values(),
            positions.values(), log_probs.values(), visibility.values(),  node_count.values(),   status.values()};
  }

  std::vector<const GuardedBytes*> arrays() const {
    return {&tokens,    &parents,   &first_child, &next_sibling, &depths,
            &positions, &log_probs, &visibility,  &node_count,   &status};
  }

  void expect(const TreeValues& expected) const {
    const TreeValues got = values();
    EXPECT_TRUE(same_bits(got.tokens, expected.tokens)) << "tokens";
    EXPECT_TRUE(same_bits(got.parents, expected.parents)) << "parents";
    EXPECT_TRUE(same_bits(got.first_child, expected.first_child)) << "first_child";
    EXPECT_TRUE(same_bits(got.next_sibling, expected.next_sibling)) << "next_sibling";
    EXPECT_TRUE(same_bits(got.depths, expected.depths)) << "depths";
    EXPECT_TRUE(same_bits(got.positions, expected.positions)) << "positions";
    EXPECT_TRUE(same_bits(got.log_probs, expected.log_probs)) << "log_probs";
    EXPECT_TRUE(same_bits(got.visibility, expected.visibility)) << "visibility";
    EXPECT_TRUE(same_bits(got.node_count, expected.node_count)) << "node_count";
    if (with_status) {
      EXPECT_TRUE(same_bits(got.status, expected.status)) << "status";
    } else {
      EXPECT_TRUE(status.unchanged()) << "status";
    }
    for (const GuardedBytes* array : arrays()) EXPECT_TRUE(array->guards_intact());
  }

  int32_t num_slots;
  bool with_status;
  int64_t words;
  Guarded<int32_t> tokens, parents, first_child, next_sibling, depths, positions;
  Guarded<float> log_probs;
  Guarded<uint64_t> visibility;
  Guarded<int32_t> node_count, status;
  kdt_tree tree;
};

// Inputs of tree_build, packed.
struct DraftRows {
  int32_t batch_size = 1, depth = 0, num_candidates = 0, vocab_size = 0;
  std::vector<float> log_probs;
  std::vector<int32_t> token_ids, root_tokens, prefix_lens;
  std::optional<std::vector<int32_t>> budgets, max_depths, num_live;
};

// Builds into `out` and checks that no input changed.
inline void build(const kdt_context* context, const DraftRows& r, TreeBuffers* out, int64_t slack = 0,
                  size_t misalignment = 3) {
  using Ints = std::vector<int32_t>;
  const int64_t b = r.batch_size, d = r.depth, k = r.num_candidates;
  const int64_t row_a = slack > 0 ? k + slack : 0, request_a = slack > 0 ? d * row_a + 2 * slack : 0;
  const int64_t row_b = slack > 0 ? k + slack + 1 : 0, request_b = slack > 0 ? d * row_b + slack : 0;
  Guarded<float> log_probs({b, d, k}, r.log_probs, {request_a, row_a});
  Guarded<int32_t> token_ids({b, d, k}, r.token_ids, {request_b, row_b});
  Guarded<int32_t> root_tokens({b}, r.root_tokens), prefix_lens({b}, r.prefix_lens);
  Guarded<int32_t> budgets({b}, r.budgets.value_or(Ints(static_cast<size_t>(b))));
  Guarded<int32_t> max_depths({b}, r.max_depths.value_or(Ints(static_cast<size_t>(b))));
  Guarded<int32_t> num_live({1}, r.num_live.value_or(Ints(1)));

  auto p = sized<kdt_tree_build_params>();
  p.depth = r.depth;
  p.num_candidates = r.num_candidates;
  p.budget = out->num_slots - 1;
  p.vocab_size = r.vocab_size;
  p.log_probs = log_probs.data();
  p.log_probs_stride = request_a;
  p.log_probs_row_stride = row_a;
  p.token_ids = token_ids.data();
  p.token_ids_stride = request_b;
  p.token_ids_row_stride = row_b;
  p.root_tokens = root_tokens.data();
  p.prefix_lens = prefix_lens.data();
  p.budgets = r.budgets ? budgets.data() : nullptr;
  p.max_depths = r.max_depths ? max_depths.data() : nullptr;
  p.num_live = r.num_live ? num_live.data() : nullptr;
  p.tree = &out->tree;
  call(kdt_tree_build_workspace_size, kdt_tree_build, context, p,
       {&log_probs, &token_ids, &root_tokens, &prefix_lens, &budgets, &max_depths, &num_live}, {}, misalignment);
}

}  // namespace kdt_test
