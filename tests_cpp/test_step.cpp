// The operations one after another, each fed with what the one before it gave: draft logits, tree, attention,
// target logits, accepted path, compacted cache.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "rows.hpp"
#include "tree_buffers.hpp"

namespace {

using namespace kdt_test;

KDT_CASES(StepCases, "step");

TEST_P(StepCases, EachStageEqualsThatOfTheReference) {
  const Case c(GetParam());
  const auto draft = c.bytes("in/draft_logits"), q = c.bytes("in/q"), rows = c.bytes("in/cache");
  const auto table = c.get<int32_t>("in/block_table");
  const auto target_logits = c.bytes("in/target_logits");
  const int32_t dtype = c.dtype("in/q"), k = c.integer("k"), n = c.integer("budget") + 1;
  const int32_t b = static_cast<int32_t>(draft.dims[0]), d = static_cast<int32_t>(draft.dims[1]);
  const int32_t v = static_cast<int32_t>(draft.dims[2]), heads = static_cast<int32_t>(q.dims[2]);
  const Ints root_tokens = c.ints("in/root_tokens"), prefix_lens = c.ints("in/prefix_lens");

  for (const int32_t num_threads : {1, 2, 7}) {
    SCOPED_TRACE(num_threads);
    const TestContext context(num_threads);
    const Logits draft_rows = {b * d, v, dtype, draft.data};
    const TopK best = topk(context, draft_rows, k);
    const double bound = largest_magnitude(decoded(draft.data, dtype)) + std::log(v);
    EXPECT_TRUE(same_bits(best.token_ids, c.ints("out/topk.token_ids"))) << "topk.token_ids";
    EXPECT_TRUE(log_probs_near(best.log_probs, c.get<float>("out/topk.log_probs").data, bound)) << "topk.log_probs";

    TreeBuffers drafted(b, n);
    auto build = sized<kdt_tree_build_params>();
    build.depth = d;
    build.num_candidates = k;
    build.budget = n - 1;
    build.log_probs = best.log_probs.data();
    build.token_ids = best.token_ids.data();
    build.root_tokens = root_tokens.data();
    build.prefix_lens = prefix_lens.data();
    build.tree = &drafted.tree;
    call(kdt_tree_build_workspace_size, kdt_tree_build, context, build, {}, {});
    // Path sums have the tolerance of their terms.
    TreeValues expected = TreeValues::of(c, "out/tree.");
    const TreeValues tree = drafted.values();
    for (size_t i = 0; i < tree.log_probs.size(); ++i) {
      const double lp = static_cast<double>(expected.log_probs[i]);
      EXPECT_TRUE(near(static_cast<double>(tree.log_probs[i]), lp,
                       tree.depths[i] * (2e-6 + 1.2e-7 * bound) + 1e-6 * std::abs(lp)));
    }
    expected.log_probs = tree.log_probs;
    drafted.expect(expected);

    const Attention attention = {.batch_size = b,
                                 .num_queries = n,
                                 .num_heads = heads,
                                 .dtype = dtype,
                                 .out_dtype = dtype,
                                 .scale = std::stof(c.text("scale")),
                                 .q = q.data,
                                 .cache = rows.data,
                                 .num_pages = static_cast<int32_t>(rows.dims[0]),
                                 .page_size = static_cast<int32_t>(rows.dims[1]),
                                 .table = table.data,
                                 .prefix_lens = prefix_lens,
                                 .num_slots = n,
                                 .visibility = tree.visibility,
                                 .node_count = tree.node_count};
    const Attended attended = attend(context, attention);
    EXPECT_TRUE(outputs_near(attended.out, c.bytes("out/out").data, dtype)) << "out";
    EXPECT_TRUE(lse_near(attended.lse, c.get<float>("out/lse").data)) << "lse";

    // The target's logits after a node depend on its depth alone.
    Logits target_rows = {b * n, v, dtype, {}};
    const ptrdiff_t row_bytes = v * static_cast<ptrdiff_t>(dtype_size(dtype));
    for (int32_t i = 0; i < b * n; ++i) {
      const auto row =
          target_logits.data.begin() + (i / n * (d + 1) + tree.depths[static_cast<size_t>(i)]) * row_bytes;
      target_rows.values.insert(target_rows.values.end(), row, row + row_bytes);
    }
    const Ints targets = argmax(context, target_rows).tokens;
    EXPECT_TRUE(same_bits(targets, c.ints("out/target_tokens"))) << "target_tokens";

    const Ints stops = c.integers("stop_tokens").value_or(Ints());
    Guarded<int32_t> tokens({b, n}), accept_index({b, n}), token_count({b}), accept_len({b}), next_root({b});
    Guarded<int32_t> finished({b}), status({b});
    auto accept = sized<kdt_tree_accept_params>();
    accept.tree = &drafted.tree;
    accept.target_tokens = targets.data();
    accept.stop_tokens = stops.data();
    accept.num_stop_tokens = static_cast<int32_t>(stops.size());
    accept.max_len = n;
    accept.tokens = tokens.data();
    accept.accept_index = accept_index.data();
    accept.token_count = token_count.data();
    accept.accept_len = accept_len.data();
    accept.next_root = next_root.data();
    accept.finished = finished.data();
    accept.status = status.data();
    call(kdt_tree_accept_workspace_size, kdt_tree_accept, context, accept, {}, {&tokens, &accept_index});
    for (const auto& [name, got] :
         {std::pair{"tokens", &tokens}, std::pair{"accept_index", &accept_index},
          std::pair{"token_count", &token_count}, std::pair{"accept_len", &accept_len},
          std::pair{"next_root", &next_root}, std::pair{"finished", &finished}, std::pair{"status", &status}}) {
      EXPECT_TRUE(same_bits(got->values(), c.ints("out/accepted." + std::string(name)))) << name;
    }

    auto cache_rows = guarded_bytes({rows.dims[0], rows.dims[1], kQk}, rows.data, dtype_size(dtype));
    auto cache = sized<kdt_kv_cache>();
    cache.data = cache_rows.data();
    cache.num_layers = 1;
    cache.num_pages = attention.num_pages;
    cache.page_size = attention.page_size;
    cache.row_width = static_cast<int32_t>(kQk);
    cache.element_size = static_cast<int32_t>(dtype_size(dtype));
    cache.block_table = table.data.data();
    cache.max_pages = static_cast<int32_t>(table.dims[1]);
    auto compact = sized<kdt_kv_compact_params>();
    compact.batch_size = b;
    compact.num_slots = n;
    compact.max_len = n;
    compact.cache = &cache;
    compact.accept_index = accept_index.data();
    compact.accept_len = accept_len.data();
    compact.prefix_lens = prefix_lens.data();
    compact.status = status.data();
    call(kdt_kv_compact_workspace_size, kdt_kv_compact, context, compact, {}, {&cache_rows});
    EXPECT_TRUE(same_bits(cache_rows.values(), c.bytes("out/cache").data)) << "cache";
    EXPECT_EQ(status.values(), Ints(static_cast<size_t>(b), 0));
  }
}

}  // namespace
