// tree_from_visibility against the reference, and as the inverse of a tree's own visibility.
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <vector>

#include "call.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "tree_buffers.hpp"

namespace {

using namespace kdt_test;
using Ints = std::vector<int32_t>;

struct Inputs {
  int32_t batch_size, num_slots;
  std::vector<uint8_t> mask;
  Ints tokens, node_counts, prefix_lens;
  std::optional<Ints> num_live;
};

void convert(const kdt_context* context, const Inputs& in, TreeBuffers* out, int64_t slack = 0) {
  const int64_t b = in.batch_size, n = in.num_slots, row = n + slack, request = n * row + slack;
  Guarded<uint8_t> mask({b, n, n}, in.mask, {request, row});
  Guarded<int32_t> tokens({b, n}, in.tokens, {n + 2 * slack});
  Guarded<int32_t> node_counts({b}, in.node_counts), prefix_lens({b}, in.prefix_lens);
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  auto p = sized<kdt_tree_from_visibility_params>();
  p.mask = mask.data();
  p.mask_stride = slack > 0 ? request : 0;
  p.mask_row_stride = slack > 0 ? row : 0;
  p.tokens = tokens.data();
  p.tokens_stride = slack > 0 ? n + 2 * slack : 0;
  p.node_counts = node_counts.data();
  p.prefix_lens = prefix_lens.data();
  p.num_live = in.num_live ? num_live.data() : nullptr;
  p.tree = &out->tree;
  call(kdt_tree_from_visibility_workspace_size, kdt_tree_from_visibility, context, p,
       {&mask, &tokens, &node_counts, &prefix_lens, &num_live}, {});
}

KDT_CASES(TreeFromVisibilityCases, "tree_from_visibility");

TEST_P(TreeFromVisibilityCases, EqualsReferenceInEveryBit) {
  const Case c(GetParam());
  const auto tokens = c.get<int32_t>("in/tokens");
  const auto num_live = c.optional_ints("in/num_live");
  const TreeValues expected = TreeValues::of(c, "out/");
  for (const Variant& variant : variants_of(false)) {
    SCOPED_TRACE(to_string(variant));
    const int64_t slots = tokens.dims[1];
    const int64_t wanted = variant.num_threads * (1 + 65536 / (slots * slots));  // cpu/tree_from_visibility.cpp
    // The smallest trees would need a batch of 65537 for a second thread: the others show that.
    const int64_t times =
        variant.many_requests && !num_live && slots > 4 ? std::min<int64_t>(wanted / tokens.dims[0] + 1, 2000) : 1;
    Inputs in = {static_cast<int32_t>(tokens.dims[0] * times),
                 static_cast<int32_t>(slots),
                 tiled(c.get<uint8_t>("in/visibility").data, times),
                 tiled(tokens.data, times),
                 tiled(c.ints("in/node_counts"), times),
                 tiled(c.ints("in/prefix_lens"), times),
                 num_live};
    for (uint8_t& entry : in.mask)
      entry = entry != 0 && variant.slack > 0 ? 0x80 : entry;  // any byte but 0 is true
    const TestContext context(variant.num_threads);
    TreeBuffers out(in.batch_size, in.num_slots, variant.slack, variant.with_status);
    convert(context, in, &out, variant.slack);
    out.expect(expected.repeated(times));
  }
}

// Links and positions that an independent implementation recovers from a mask.
TEST(TreeFromVisibility, LayoutOfAnotherImplementation) {
  const Inputs in = {1,
                     4,
                     {1, 0, 0, 0,  //
                      1, 1, 0, 0,  //
                      1, 0, 1, 0,  //
                      1, 0, 1, 1},
                     {40, 41, 42, 43},
                     {4},
                     {12},
                     {}};
  TreeBuffers out(1, 4);
  convert(TestContext(), in, &out);
  const TreeValues v = out.values();
  EXPECT_EQ(v.parents, (Ints{-1, 0, 0, 2}));
  EXPECT_EQ(v.first_child, (Ints{1, -1, 3, -1}));
  EXPECT_EQ(v.next_sibling, (Ints{-1, 2, -1, -1}));
  EXPECT_EQ(v.positions, (Ints{12, 13, 13, 14}));
  EXPECT_EQ(v.status[0], 0);
}

// Sizes around every word boundary up to the largest: parents come back from the visibility they make.
TEST(TreeFromVisibility, InvertsVisibility) {
  const TestContext context;
  std::mt19937 random(11);
  for (const int32_t n : {5, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025}) {
    Ints parents = {-1};
    for (int32_t slot = 1; slot < n; ++slot) {
      // Near parents make deep trees, far ones make links across words.
      const uint32_t reach = random() % 2 == 0 ? 2u : static_cast<uint32_t>(slot);
      parents.push_back(std::max(0, slot - 1 - static_cast<int32_t>(random() % reach)));
    }
    Inputs in = {1, n, {}, Ints(static_cast<size_t>(n), 1), {n}, {0}, {}};
    const std::vector<uint64_t> rows = visibility_of(parents, {n}, n);
    const size_t words = static_cast<size_t>((n + 63) / 64);
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      for (size_t j = 0; j < static_cast<size_t>(n); ++j)
        in.mask.push_back(rows[i * words + j / 64] >> (j % 64) & 1);
    }
    TreeBuffers out(1, n);
    convert(context, in, &out);
    const TreeValues v = out.values();
    EXPECT_EQ(v.parents, parents) << n;
    EXPECT_TRUE(same_bits(v.visibility, rows)) << n;
    EXPECT_EQ(v.status[0], 0) << n;
  }
}

// Each entry of a mask is looked at: a changed one makes another tree's mask, or none.
TEST(TreeFromVisibility, EveryChangedEntryIsSeen) {
  const TestContext context;
  const Ints parents = {-1, 0, 0, 1, 2, 2, 4};
  const int32_t n = 7;
  const std::vector<uint64_t> rows = visibility_of(parents, {n}, n);
  for (int32_t changed = 0; changed < n * n; ++changed) {
    Inputs in = {1, n, {}, Ints(7, 1), {n}, {0}, {}};
    for (int32_t i = 0; i < n * n; ++i) {
      const bool visible = rows[static_cast<size_t>(i / n)] >> (i % n) & 1;
      in.mask.push_back(visible != (i == changed) ? 0xFF : 0);
    }
    TreeBuffers out(1, n);
    convert(context, in, &out);
    const TreeValues v = out.values();
    if (v.status[0] == 0) {
      EXPECT_NE(v.parents, parents) << changed;
    } else {
      EXPECT_EQ(v.status[0], KDT_STATUS_BAD_TREE) << changed;
      EXPECT_EQ(v.node_count[0], 1) << changed;
    }
  }
}

}  // namespace
