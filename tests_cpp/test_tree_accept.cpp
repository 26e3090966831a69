// tree_accept against the reference, on links of another project, and on whole paths of built trees.
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <vector>

#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"

namespace {

using namespace kdt_test;
using Ints = std::vector<int32_t>;

struct Inputs {
  int32_t batch_size, num_slots;
  Ints tokens, first_child, next_sibling, node_count, target_tokens;
  std::optional<Ints> max_tokens, stop_tokens, num_live;
  int32_t max_len;
};

struct Accepted {
  Ints tokens, token_count, accept_index, accept_len, next_root, finished, status;
};

// Runs one call into guarded memory and compares every field.
void expect_accepted(const kdt_context* context, const Inputs& in, const Accepted& expected, int64_t slack = 0,
                     bool with_status = true) {
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
  size_t size = 0;
  ASSERT_EQ(kdt_tree_accept_workspace_size(context, &p, &size), KDT_OK) << kdt_last_error();
  Guarded<uint8_t> workspace({static_cast<int64_t>(size)});
  ASSERT_EQ(kdt_tree_accept(context, &p, workspace.data(), size, nullptr), KDT_OK) << kdt_last_error();

  EXPECT_TRUE(same_bits(tokens.values(), expected.tokens)) << "tokens";
  EXPECT_TRUE(same_bits(token_count.values(), expected.token_count)) << "token_count";
  EXPECT_TRUE(same_bits(accept_index.values(), expected.accept_index)) << "accept_index";
  EXPECT_TRUE(same_bits(accept_len.values(), expected.accept_len)) << "accept_len";
  EXPECT_TRUE(same_bits(next_root.values(), expected.next_root)) << "next_root";
  EXPECT_TRUE(same_bits(finished.values(), expected.finished)) << "finished";
  if (with_status) {
    EXPECT_TRUE(same_bits(status.values(), expected.status)) << "status";
  } else {
    EXPECT_TRUE(status.unchanged()) << "status";
  }
  for (const GuardedBytes* output : std::initializer_list<const GuardedBytes*>{
           &tokens, &token_count, &accept_index, &accept_len, &next_root, &finished, &status, &workspace}) {
    EXPECT_TRUE(output->guards_intact());
  }
  for (const GuardedBytes* input :
       std::initializer_list<const GuardedBytes*>{&node_tokens, &first_child, &next_sibling, &node_count, &targets,
                                                  &max_tokens, &stop_tokens, &num_live}) {
    EXPECT_TRUE(input->unchanged());
  }
}

KDT_CASES(TreeAcceptCases, "tree_accept");

TEST_P(TreeAcceptCases, EqualsReferenceInEveryBit) {
  const Case c(GetParam());
  const auto slots = c.get<int32_t>("in/tree.tokens");
  const auto num_live = c.optional_ints("in/num_live");
  const int32_t max_len = c.integer_or("max_len", static_cast<int32_t>(slots.dims[1]));
  for (const Variant& variant : variants_of(false)) {
    SCOPED_TRACE(to_string(variant));
    const int64_t wanted = variant.num_threads * int64_t{1 + 65536 / (max_len + 64)};  // cpu/tree_accept.cpp
    const int64_t times = variant.many_requests && !num_live ? wanted / slots.dims[0] + 1 : 1;
    const auto ints = [&](const char* role) { return tiled(c.ints(role), times); };
    const Inputs in = {static_cast<int32_t>(slots.dims[0] * times),
                       static_cast<int32_t>(slots.dims[1]),
                       ints("in/tree.tokens"),
                       ints("in/tree.first_child"),
                       ints("in/tree.next_sibling"),
                       ints("in/tree.node_count"),
                       ints("in/target_tokens"),
                       tiled(c.optional_ints("in/max_tokens"), times),
                       c.integers("stop_tokens"),
                       num_live,
                       max_len};
    const Accepted expected = {ints("out/tokens"),     ints("out/token_count"), ints("out/accept_index"),
                               ints("out/accept_len"), ints("out/next_root"),   ints("out/finished"),
                               ints("out/status")};
    const TestContext context(variant.num_threads);
    expect_accepted(context, in, expected, variant.slack, variant.with_status);
  }
}

// Two requests as another project's greedy walk accepts them. The second links its children in descending order.
TEST(TreeAccept, WalkOfAnotherImplementation) {
  const Inputs in = {2,
                     6,
                     {0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12},
                     {1, 2, -1, 4, 5, -1, 4, 2, 3, -1, 5, -1},
                     {-1, 3, -1, -1, -1, -1, -1, -1, -1, -1, 1, -1},
                     {6, 6},
                     {3, 18, 18, 4, 5, 18, 11, 18, 18, 18, 12, 18},
                     {},
                     {},
                     {},
                     4};
  const Accepted expected = {
      {3, 4, 5, 18, 11, 12, 18, -1}, {4, 3}, {0, 3, 4, 5, 0, 4, 5, -1}, {4, 3}, {18, 18}, {0, 0}, {0, 0}};
  expect_accepted(TestContext(), in, expected);
}

// Random trees with distinct tokens among siblings: a target that spells a path accepts that path and its bonus.
TEST(TreeAccept, TakesThePathThatTheTargetSpells) {
  const TestContext context;
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    const int32_t n = 1 + static_cast<int32_t>(random() % 70);
    const size_t slots = static_cast<size_t>(n);
    Ints parents(slots, -1), tokens(slots), first_child(slots, -1), next_sibling(slots, -1);
    for (int32_t slot = n - 1; slot > 0; --slot) {
      const int32_t parent = static_cast<int32_t>(random() % static_cast<uint32_t>(slot));
      parents[static_cast<size_t>(slot)] = parent;
      tokens[static_cast<size_t>(slot)] = slot - 1;  // so 0 is a token like any other
      next_sibling[static_cast<size_t>(slot)] = first_child[static_cast<size_t>(parent)];
      first_child[static_cast<size_t>(parent)] = slot;
    }
    tokens[0] = 5;
    for (int32_t last = 0; last < n; ++last) {
      Ints targets(slots, 1000), path;
      for (int32_t at = last; at >= 0; at = parents[static_cast<size_t>(at)]) path.insert(path.begin(), at);
      Accepted expected = {Ints(slots, -1), {}, Ints(slots, -1), {}, {1000}, {0}, {0}};
      for (size_t k = 0; k < path.size(); ++k) {
        expected.accept_index[k] = path[k];
        expected.tokens[k] = k + 1 < path.size() ? tokens[static_cast<size_t>(path[k + 1])] : 1000;
        targets[static_cast<size_t>(path[k])] = expected.tokens[k];
      }
      expected.token_count = expected.accept_len = {static_cast<int32_t>(path.size())};
      expect_accepted(context, {1, n, tokens, first_child, next_sibling, {n}, targets, {}, {}, {}, n}, expected);
      ASSERT_FALSE(HasFailure()) << "tree " << i << ", path to slot " << last;
    }
  }
}

}  // namespace
