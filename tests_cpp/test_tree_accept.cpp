// tree_accept against the reference, on links of another project, and on whole paths of built trees.
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <vector>

#include "accept.hpp"
#include "fixture.hpp"
#include "kdtree/kdtree.h"

namespace {

using namespace kdt_test;
using Ints = std::vector<int32_t>;

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
    const AcceptInputs in = {static_cast<int32_t>(slots.dims[0] * times),
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
    expect_accepted(accept(context, in, variant.slack, variant.with_status), expected, variant.with_status);
  }
}

// Two requests as another project's greedy walk accepts them. The second links its children in descending order.
TEST(TreeAccept, WalkOfAnotherImplementation) {
  const AcceptInputs in = {2,
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
  expect_accepted(accept(TestContext(), in), expected);
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
      expect_accepted(accept(context, {1, n, tokens, first_child, next_sibling, {n}, targets, {}, {}, {}, n}),
                      expected);
      ASSERT_FALSE(HasFailure()) << "tree " << i << ", path to slot " << last;
    }
  }
}

}  // namespace
