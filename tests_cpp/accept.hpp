// Calls of tree_accept, in guarded memory.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "call.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"

namespace kdt_test {

struct AcceptInputs {
  int32_t batch_size, num_slots;
  std::vector<int32_t> tokens, first_child, next_sibling, node_count, target_tokens;
  std::optional<std::vector<int32_t>> max_tokens, stop_tokens, num_live;
  int32_t max_len;
};

struct Accepted {
  std::vector<int32_t> tokens, token_count, accept_index, accept_len, next_root, finished, status;
};

inline Accepted accept(const kdt_context* context, const AcceptInputs& in, int64_t slack = 0,
                       bool with_status = true) {
  using Ints = std::vector<int32_t>;
  const int64_t b = in.batch_size, n = in.num_slots, m = in.max_len;
  Guarded<int32_t> node_tokens({b, n}, in.tokens, {n + slack}), first_child({b, n}, in.first_child, {n + slack});
  Guarded<int32_t> next_sibling({b, n}, in.next_sibling, {n + slack}), node_count({b}, in.node_count);
  Guarded<int32_t> targets({b, n}, in.target_tokens, {n + 2 * slack});
  Guarded<int32_t> max_tokens({b}, in.max_tokens.value_or(Ints(static_cast<size_t>(b))));
  const Ints stops = in.stop_tokens.value_or(Ints());
  Guarded<int32_t> stop_tokens({static_cast<int64_t>(stops.size())}, stops);
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  Guarded<int32_t> tokens({b, m}, {m + slack}), accept_index({b, m}, {m + slack});
  Guarded<int32_t> token_count({b}), accept_len({b}), next_root({b}), finished({b}), status({b});

  auto tree = sized<kdt_tree>();
  tree.batch_size = in.batch_size;
  tree.num_slots = in.num_slots;
  tree.slot_stride = slack > 0 ? n + slack : 0;
  tree.tokens = node_tokens.data();
  tree.first_child = first_child.data();
  tree.next_sibling = next_sibling.data();
  tree.node_count = node_count.data();
  auto p = sized<kdt_tree_accept_params>();
  p.tree = &tree;
  p.target_tokens = targets.data();
  p.target_tokens_stride = slack > 0 ? n + 2 * slack : 0;
  p.max_tokens = in.max_tokens ? max_tokens.data() : nullptr;
  p.stop_tokens = in.stop_tokens ? stop_tokens.data() : nullptr;
  p.num_stop_tokens = static_cast<int32_t>(stops.size());
  p.max_len = in.max_len;
  p.num_live = in.num_live ? num_live.data() : nullptr;
  p.tokens = tokens.data();
  p.tokens_stride = slack > 0 ? m + slack : 0;
  p.accept_index = accept_index.data();
  p.accept_index_stride = slack > 0 ? m + slack : 0;
  p.token_count = token_count.data();
  p.accept_len = accept_len.data();
  p.next_root = next_root.data();
  p.finished = finished.data();
  p.status = with_status ? status.data() : nullptr;
  call(kdt_tree_accept_workspace_size, kdt_tree_accept, context, p,
       {&node_tokens, &first_child, &next_sibling, &node_count, &targets, &max_tokens, &stop_tokens, &num_live},
       {&tokens, &token_count, &accept_index, &accept_len, &next_root, &finished, &status});
  EXPECT_TRUE(with_status || status.unchanged()) << "status";
  return {tokens.values(),    token_count.values(), accept_index.values(), accept_len.values(),
          next_root.values(), finished.values(),    status.values()};
}

inline void expect_accepted(const Accepted& got, const Accepted& expected, bool with_status = true) {
  EXPECT_TRUE(same_bits(got.tokens, expected.tokens)) << "tokens";
  EXPECT_TRUE(same_bits(got.token_count, expected.token_count)) << "token_count";
  EXPECT_TRUE(same_bits(got.accept_index, expected.accept_index)) << "accept_index";
  EXPECT_TRUE(same_bits(got.accept_len, expected.accept_len)) << "accept_len";
  EXPECT_TRUE(same_bits(got.next_root, expected.next_root)) << "next_root";
  EXPECT_TRUE(same_bits(got.finished, expected.finished)) << "finished";
  if (with_status) {
    EXPECT_TRUE(same_bits(got.status, expected.status)) << "status";
  }
}

}  // namespace kdt_test
