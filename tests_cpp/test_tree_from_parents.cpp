// tree_from_parents against the reference, and on trees of other projects.
#include <gtest/gtest.h>

#include <optional>
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
  Ints tokens, parents, node_counts, prefix_lens;
  std::optional<Ints> num_live;
};

void convert(const kdt_context* context, const Inputs& in, TreeBuffers* out, int64_t slack = 0) {
  const int64_t b = in.batch_size, n = in.num_slots;
  Guarded<int32_t> tokens({b, n}, in.tokens, {n + slack}), parents({b, n}, in.parents, {n + 2 * slack});
  Guarded<int32_t> node_counts({b}, in.node_counts), prefix_lens({b}, in.prefix_lens);
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  auto p = sized<kdt_tree_from_parents_params>();
  p.tokens = tokens.data();
  p.tokens_stride = slack > 0 ? n + slack : 0;
  p.parents = parents.data();
  p.parents_stride = slack > 0 ? n + 2 * slack : 0;
  p.node_counts = node_counts.data();
  p.prefix_lens = prefix_lens.data();
  p.num_live = in.num_live ? num_live.data() : nullptr;
  p.tree = &out->tree;
  call(kdt_tree_from_parents_workspace_size, kdt_tree_from_parents, context, p,
       {&tokens, &parents, &node_counts, &prefix_lens, &num_live}, {});
}

KDT_CASES(TreeFromParentsCases, "tree_from_parents");

TEST_P(TreeFromParentsCases, EqualsReferenceInEveryBit) {
  const Case c(GetParam());
  const auto tokens = c.get<int32_t>("in/tokens");
  const auto num_live = c.optional_ints("in/num_live");
  const TreeValues expected = TreeValues::of(c, "out/");
  for (const Variant& variant : variants_of(false)) {
    SCOPED_TRACE(to_string(variant));
    const int64_t wanted = variant.num_threads * (1 + 2048 / tokens.dims[1]);  // cpu/tree_from_parents.cpp
    const int64_t times = variant.many_requests && !num_live ? wanted / tokens.dims[0] + 1 : 1;
    const Inputs in = {static_cast<int32_t>(tokens.dims[0] * times),
                       static_cast<int32_t>(tokens.dims[1]),
                       tiled(tokens.data, times),
                       tiled(c.ints("in/parents"), times),
                       tiled(c.ints("in/node_counts"), times),
                       tiled(c.ints("in/prefix_lens"), times),
                       num_live};
    const TestContext context(variant.num_threads);
    TreeBuffers out(in.batch_size, in.num_slots, variant.slack, variant.with_status);
    convert(context, in, &out, variant.slack);
    out.expect(expected.repeated(times));
  }
}

// Two trees and their layout as an independent implementation gives it; visibility is one byte a row, LSB first.
TEST(TreeFromParents, LayoutOfAnotherImplementation) {
  const Inputs in = {2,
                     8,
                     {29974, 29896, 29906, 29889, 29974, 29946, 29896, 29946,  //
                      13, 13, 22550, 4136, 16492, 8439, 29871, 29941},
                     {-1, 0, 0, 1, 2, 3, 4, 5,  //
                      -1, 0, 1, 1, 1, 1, 3, 6},
                     {8, 8},
                     {5, 10},
                     {}};
  TreeBuffers out(2, 8);
  convert(TestContext(), in, &out);
  TreeValues expected;
  expected.tokens = in.tokens;
  expected.parents = in.parents;
  expected.first_child = {1, 3, 4, 5, 6, 7, -1, -1, 1, 2, -1, 6, -1, -1, 7, -1};
  expected.next_sibling = {-1, 2, -1, -1, -1, -1, -1, -1, -1, -1, 3, 4, 5, -1, -1, -1};
  expected.depths = {0, 1, 1, 2, 2, 3, 3, 4, 0, 1, 2, 2, 2, 2, 3, 4};
  expected.positions = {5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14};
  expected.log_probs.assign(16, 0.0f);
  expected.visibility = {1, 3, 5, 11, 21, 43, 85, 171, 1, 3, 7, 11, 19, 35, 75, 203};
  expected.node_count = {8, 8};
  expected.status = {0, 0};
  out.expect(expected);
}

TEST(TreeFromParents, TakesAChainOfTheLargestSize) {
  constexpr int32_t kSlots = KDT_MAX_BUDGET + 1;
  Inputs in = {1, kSlots, Ints(kSlots, 5), {}, {kSlots}, {INT32_MAX - kSlots}, {}};
  for (int32_t slot = 0; slot < kSlots; ++slot) in.parents.push_back(slot - 1);
  TreeBuffers out(1, kSlots);
  convert(TestContext(), in, &out);
  const TreeValues v = out.values();
  EXPECT_EQ(v.node_count[0], kSlots);
  EXPECT_EQ(v.status[0], 0);
  EXPECT_EQ(v.depths[KDT_MAX_BUDGET], KDT_MAX_BUDGET);
  EXPECT_EQ(v.positions[KDT_MAX_BUDGET], INT32_MAX - 1);
  EXPECT_TRUE(same_bits(v.visibility, visibility_of(in.parents, in.node_counts, kSlots)));
}

}  // namespace
