// tree_build against the reference, against an enumeration of all nodes, and the properties of its order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "tree_buffers.hpp"

namespace {

using namespace kdt_test;
using Ints = std::vector<int32_t>;

DraftRows rows_of(const Case& c) {
  const auto log_probs = c.get<float>("in/log_probs");
  DraftRows r;
  r.batch_size = static_cast<int32_t>(log_probs.dims[0]);
  r.depth = static_cast<int32_t>(log_probs.dims[1]);
  r.num_candidates = static_cast<int32_t>(log_probs.dims[2]);
  r.vocab_size = c.integer_or("vocab_size", 0);
  r.log_probs = log_probs.data;
  r.token_ids = c.ints("in/token_ids");
  r.root_tokens = c.ints("in/root_tokens");
  r.prefix_lens = c.ints("in/prefix_lens");
  r.budgets = c.optional_ints("in/budgets");
  r.max_depths = c.optional_ints("in/max_depths");
  r.num_live = c.optional_ints("in/num_live");
  return r;
}

DraftRows repeated(DraftRows r, int64_t times) {
  r.batch_size = static_cast<int32_t>(r.batch_size * times);
  r.log_probs = tiled(r.log_probs, times);
  r.token_ids = tiled(r.token_ids, times);
  r.root_tokens = tiled(r.root_tokens, times);
  r.prefix_lens = tiled(r.prefix_lens, times);
  r.budgets = tiled(r.budgets, times);
  r.max_depths = tiled(r.max_depths, times);
  return r;
}

// One hot row of a single request, ids by row and rank.
DraftRows one_request(const std::vector<std::vector<float>>& rows) {
  DraftRows r;
  r.depth = static_cast<int32_t>(rows.size());
  r.num_candidates = static_cast<int32_t>(rows[0].size());
  for (int32_t d = 0; d < r.depth; ++d) {
    for (int32_t rank = 0; rank < r.num_candidates; ++rank) {
      r.log_probs.push_back(rows[static_cast<size_t>(d)][static_cast<size_t>(rank)]);
      r.token_ids.push_back(100 * (d + 1) + rank);
    }
  }
  r.root_tokens = {7};
  r.prefix_lens = {50};
  return r;
}

// ---- Against the reference -------------------------------------------------------------------------

KDT_CASES(TreeBuildCases, "tree_build");

TEST_P(TreeBuildCases, EqualsReferenceInEveryBit) {
  const Case c(GetParam());
  const DraftRows rows = rows_of(c);
  const TreeValues expected = TreeValues::of(c, "out/");
  const int32_t budget = c.integer("budget");
  for (const Variant& variant : variants_of(rows.batch_size * (budget + 1) > 20000)) {
    SCOPED_TRACE(to_string(variant));
    // See min_requests in cpu/tree_build.cpp. A batch with num_live is not repeated: its end would move.
    const int64_t wanted = variant.num_threads * (1 + 512 / (budget + 1));
    const int64_t times =
        variant.many_requests && !rows.num_live && rows.batch_size > 0 ? wanted / rows.batch_size + 1 : 1;
    const TestContext context(variant.num_threads);
    const DraftRows batch = repeated(rows, times);
    TreeBuffers out(batch.batch_size, budget + 1, variant.slack, variant.with_status);
    build(context, batch, &out, variant.slack);
    out.expect(expected.repeated(times));
  }
}

// ---- Against an enumeration of all nodes -----------------------------------------------------------

// The definition in kdtree.h, taken literally: list every rank tuple, sort, cut, and lay out by searching.
TreeValues enumerate(const DraftRows& r, int32_t budget) {
  struct Node {
    std::vector<int32_t> ranks;
    double score;
  };
  Ints lengths;
  int32_t status = 0;
  for (int32_t d = 0; d < r.depth; ++d) {
    const auto entry = [&](int32_t i) { return static_cast<size_t>(d * r.num_candidates + i); };
    const auto usable = [&](int32_t i) {
      const float lp = r.log_probs[entry(i)];
      return std::isfinite(lp) && !(lp > 0) && (i == 0 || !(lp > r.log_probs[entry(i - 1)])) &&
             r.token_ids[entry(i)] >= 0 && (r.vocab_size == 0 || r.token_ids[entry(i)] < r.vocab_size);
    };
    int32_t length = 0;
    while (length < r.num_candidates && usable(length)) ++length;
    bool padding = true;
    for (int32_t i = length; i < r.num_candidates; ++i) {
      padding &= r.log_probs[entry(i)] == -std::numeric_limits<float>::infinity() && r.token_ids[entry(i)] == -1;
    }
    if (!padding) status = KDT_STATUS_ROW_TRUNCATED;
    lengths.push_back(length);
  }

  std::vector<Node> nodes, level = {{{}, 0.0}};
  for (int32_t d = 0; d < r.depth; ++d) {
    std::vector<Node> deeper;
    for (const Node& node : level) {
      for (int32_t rank = 0; rank < lengths[static_cast<size_t>(d)]; ++rank) {
        Node child = node;
        child.ranks.push_back(rank);
        child.score += static_cast<double>(r.log_probs[static_cast<size_t>(d * r.num_candidates + rank)]);
        deeper.push_back(child);
      }
    }
    nodes.insert(nodes.end(), deeper.begin(), deeper.end());
    level = deeper;
  }
  std::sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) {
    return a.score != b.score ? a.score > b.score : a.ranks < b.ranks;
  });
  nodes.resize(std::min(nodes.size(), static_cast<size_t>(budget)));
  nodes.insert(nodes.begin(), Node{{}, 0.0});

  const size_t slots = static_cast<size_t>(budget) + 1;
  TreeValues v;
  v.tokens = v.parents = v.first_child = v.next_sibling = Ints(slots, -1);
  v.depths = v.positions = Ints(slots, 0);
  v.log_probs.assign(slots, -std::numeric_limits<float>::infinity());
  for (size_t slot = 0; slot < nodes.size(); ++slot) {
    const std::vector<int32_t>& ranks = nodes[slot].ranks;
    const int32_t depth = static_cast<int32_t>(ranks.size());
    v.depths[slot] = depth;
    v.positions[slot] = r.prefix_lens[0] + depth;
    v.log_probs[slot] = static_cast<float>(nodes[slot].score);
    v.tokens[slot] = depth == 0 ? r.root_tokens[0]
                                : r.token_ids[static_cast<size_t>((depth - 1) * r.num_candidates + ranks.back())];
    for (size_t other = 0; other < nodes.size() && depth > 0; ++other) {
      if (std::vector<int32_t>(ranks.begin(), ranks.end() - 1) == nodes[other].ranks) {
        v.parents[slot] = static_cast<int32_t>(other);
      }
    }
  }
  for (size_t slot = nodes.size() - 1; slot > 0; --slot) {
    v.first_child[static_cast<size_t>(v.parents[slot])] = static_cast<int32_t>(slot);
    for (size_t later = nodes.size() - 1; later > slot; --later) {
      if (v.parents[later] == v.parents[slot]) v.next_sibling[slot] = static_cast<int32_t>(later);
    }
  }
  v.node_count = {static_cast<int32_t>(nodes.size())};
  v.visibility = visibility_of(v.parents, v.node_count, budget + 1);
  v.status = {status};
  return v;
}

TEST(TreeBuild, AgreesWithAnEnumerationOfAllNodes) {
  const TestContext context;
  std::mt19937 random(20260412);
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  const std::vector<float> palettes[] = {
      {0.0f, -1.0f},                                      // nearly everything ties
      {0.0f, -0.5f, -1.0f, -1.5f, -2.0f},                 // many sums tie exactly
      {-0.1f, -0.2f, -0.3f, -0.4f, -0.7f},                // sums tie in decimals, not in float64
      {-1e-7f, -1.0f, -1.0000001f, -2.0f, -16777216.0f},  // sums that float32 could not hold
      {0.0f, -0.0f, -1e-45f, -3e38f},
  };
  for (int32_t i = 0; i < 3000; ++i) {
    DraftRows r;
    r.depth = below(5);
    r.num_candidates = below(6);
    const std::vector<float>& palette = palettes[below(5)];
    for (int32_t d = 0; d < r.depth; ++d) {
      std::vector<float> row;
      for (int32_t rank = 0; rank < r.num_candidates; ++rank) {
        row.push_back(palette[static_cast<size_t>(below(static_cast<uint32_t>(palette.size())))]);
      }
      std::sort(row.begin(), row.end(), std::greater<>());
      r.log_probs.insert(r.log_probs.end(), row.begin(), row.end());
      for (int32_t rank = 0; rank < r.num_candidates; ++rank) r.token_ids.push_back(below(4));
    }
    if (!r.log_probs.empty() && below(4) == 0) {  // a fault somewhere, or padding from there on
      const float values[] = {NAN, INFINITY, -INFINITY, 0.5f, 0.0f};
      const size_t at = static_cast<size_t>(below(static_cast<uint32_t>(r.log_probs.size())));
      if (below(2) == 0) {
        r.log_probs[at] = values[below(5)];
      } else {
        for (size_t j = at; j == at || j % static_cast<size_t>(r.num_candidates) != 0; ++j) {
          r.log_probs[j] = -INFINITY;
          r.token_ids[j] = -1;
        }
      }
      if (below(4) == 0) r.token_ids[at] = below(2) == 0 ? -1 : 3;
    }
    r.vocab_size = below(2) == 0 ? 0 : 3 + below(2);
    r.root_tokens = {below(9)};
    r.prefix_lens = {below(1000)};
    const int32_t budget = below(3) == 0 ? below(8) : below(80);
    TreeBuffers out(1, budget + 1);
    build(context, r, &out);
    out.expect(enumerate(r, budget));
    ASSERT_FALSE(HasFailure()) << "case " << i << ": D " << r.depth << ", K " << r.num_candidates << ", budget "
                               << budget << ", vocabulary " << r.vocab_size << ", log_probs "
                               << testing::PrintToString(r.log_probs) << ", ids "
                               << testing::PrintToString(r.token_ids);
  }
}

// ---- The order -------------------------------------------------------------------------------------

// Rank tuples in emission order, read back from ids that encode row and rank.
std::vector<Ints> order_of(const std::vector<std::vector<float>>& rows, int32_t budget) {
  TreeBuffers out(1, budget + 1);
  build(TestContext(), one_request(rows), &out);
  const TreeValues v = out.values();
  std::vector<Ints> order;
  for (int32_t slot = 1; slot < v.node_count[0]; ++slot) {
    Ints ranks;
    for (int32_t at = slot; at > 0; at = v.parents[static_cast<size_t>(at)]) {
      ranks.insert(ranks.begin(), v.tokens[static_cast<size_t>(at)] % 100);
    }
    order.push_back(ranks);
  }
  return order;
}

// The worked cases of the design, and the published builder's order on them.
TEST(TreeBuild, OrderOfPublishedCases) {
  using Order = std::vector<Ints>;
  EXPECT_EQ(order_of({{-1, -1}, {-1, -1}, {-1, -1}}, 6), (Order{{0}, {1}, {0, 0}, {0, 1}, {1, 0}, {1, 1}}));
  EXPECT_EQ(order_of({{0, 0, 0}, {0, 0, 0}}, 6), (Order{{0}, {0, 0}, {0, 1}, {0, 2}, {1}, {1, 0}}));
  EXPECT_EQ(order_of({{-1, -2}, {-1, -2}}, 5), (Order{{0}, {0, 0}, {1}, {0, 1}, {1, 0}}));
}

TEST(TreeBuild, ScoresAreFloat64SumsInDepthOrder) {
  using Order = std::vector<Ints>;
  // In float32 (0,1) and (1) would tie, and (0,1) come first.
  EXPECT_EQ(order_of({{-16777216.0f, -16777218.0f}, {-0.5f, -2.5f}}, 4), (Order{{0}, {0, 0}, {1}, {0, 1}}));
  // Each small term is lost when added to the large one, but their sum would not be: from the leaf up, (1) would
  // come before (0,0,0).
  const float large = -1073741824.0f, small = -1.0f / 8388608.0f;
  EXPECT_EQ(order_of({{large, large}, {small, -9.0f}, {small, -9.0f}}, 4), (Order{{0}, {0, 0}, {0, 0, 0}, {1}}));
}

TEST(TreeBuild, TreeOfASmallerBudgetComesFirst) {
  const TestContext context;
  std::mt19937 random(7);
  DraftRows r;
  r.depth = 6;
  r.num_candidates = 5;
  for (int32_t d = 0; d < r.depth; ++d) {
    float log_prob = 0;
    for (int32_t rank = 0; rank < r.num_candidates; ++rank) {
      log_prob -= 0.25f * static_cast<float>(random() % 4);
      r.log_probs.push_back(log_prob);
      r.token_ids.push_back(rank);
    }
  }
  r.root_tokens = r.prefix_lens = {0};
  TreeBuffers large(1, 201);
  build(context, r, &large);
  const TreeValues whole = large.values();
  ASSERT_EQ(whole.node_count[0], 201);
  for (int32_t budget = 0; budget <= 200; ++budget) {
    TreeBuffers own(1, budget + 1), capped(1, 201);
    build(context, r, &own);
    r.budgets = Ints{budget};
    build(context, r, &capped);
    r.budgets.reset();
    const size_t n = static_cast<size_t>(budget) + 1;
    for (const TreeBuffers* out : {&own, &capped}) {
      const TreeValues v = out->values();
      EXPECT_EQ(v.node_count[0], budget + 1);
      EXPECT_TRUE(std::equal(v.tokens.begin(), v.tokens.begin() + static_cast<ptrdiff_t>(n), whole.tokens.begin()));
      EXPECT_TRUE(
          std::equal(v.parents.begin(), v.parents.begin() + static_cast<ptrdiff_t>(n), whole.parents.begin()));
    }
    ASSERT_FALSE(HasFailure()) << budget;
  }
}

// ---- Calls -----------------------------------------------------------------------------------------

TEST(TreeBuild, TakesAWorkspaceOfAnyAlignment) {
  const TestContext context;
  const DraftRows rows = one_request({{-0.5f, -1.0f, -1.5f}, {-0.25f, -0.5f, -2.0f}});
  const TreeValues expected = enumerate(rows, 9);
  for (size_t misalignment = 0; misalignment <= 64; ++misalignment) {
    TreeBuffers out(1, 10);
    build(context, rows, &out, 0, misalignment);
    out.expect(expected);
  }
}

TEST(TreeBuild, TakesTheLargestSizes) {
  DraftRows r;
  r.depth = KDT_MAX_DEPTH;
  r.num_candidates = KDT_MAX_CANDIDATES;
  r.log_probs.assign(size_t{KDT_MAX_DEPTH} * KDT_MAX_CANDIDATES, -1.0f);
  r.token_ids.assign(r.log_probs.size(), 3);
  r.root_tokens = r.prefix_lens = {0};
  TreeBuffers out(1, KDT_MAX_BUDGET + 1);
  build(TestContext(), r, &out);
  const TreeValues v = out.values();
  EXPECT_EQ(v.node_count[0], KDT_MAX_BUDGET + 1);
  EXPECT_EQ(v.depths[KDT_MAX_BUDGET], 1);  // 1024 equal first tokens, all before any second
  EXPECT_EQ(v.status[0], 0);
}

TEST(TreeBuild, OneContextServesManyThreads) {
  const TestContext context(2);
  const DraftRows rows = one_request({{-0.5f, -1.0f, -1.5f}, {-0.25f, -0.5f, -2.0f}, {-1.0f, -1.0f, -1.0f}});
  const DraftRows batch = repeated(rows, 100);
  const TreeValues expected = enumerate(rows, 30).repeated(100);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        TreeBuffers out(batch.batch_size, 31);
        build(context, batch, &out);
        out.expect(expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
