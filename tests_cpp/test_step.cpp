// The operations one after another, each fed with what the one before it gave: draft logits, tree, attention,
// target logits, accepted path, compacted cache.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "accept.hpp"
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
    build(context, {b, d, k, 0, best.log_probs, best.token_ids, root_tokens, prefix_lens, {}, {}, {}}, &drafted);
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

    const Accepted accepted = accept(context, {b,
                                               n,
                                               tree.tokens,
                                               tree.first_child,
                                               tree.next_sibling,
                                               tree.node_count,
                                               targets,
                                               {},
                                               c.integers("stop_tokens"),
                                               {},
                                               n});
    const auto ints = [&](const char* name) { return c.ints(std::string("out/accepted.") + name); };
    expect_accepted(accepted, {ints("tokens"), ints("token_count"), ints("accept_index"), ints("accept_len"),
                               ints("next_root"), ints("finished"), ints("status")});

    auto cache_rows = guarded_bytes({rows.dims[0], rows.dims[1], kQk}, rows.data, dtype_size(dtype));
    Guarded<int32_t> block_table(table.dims, table.data), lens({b}, prefix_lens), status({b});
    Guarded<int32_t> accept_index({b, n}, accepted.accept_index), accept_len({b}, accepted.accept_len);
    auto cache = sized<kdt_kv_cache>();
    cache.data = cache_rows.data();
    cache.num_layers = 1;
    cache.num_pages = attention.num_pages;
    cache.page_size = attention.page_size;
    cache.row_width = static_cast<int32_t>(kQk);
    cache.element_size = static_cast<int32_t>(dtype_size(dtype));
    cache.block_table = block_table.data();
    cache.max_pages = static_cast<int32_t>(table.dims[1]);
    auto compact = sized<kdt_kv_compact_params>();
    compact.batch_size = b;
    compact.num_slots = n;
    compact.max_len = n;
    compact.cache = &cache;
    compact.accept_index = accept_index.data();
    compact.accept_len = accept_len.data();
    compact.prefix_lens = lens.data();
    compact.status = status.data();
    call(kdt_kv_compact_workspace_size, kdt_kv_compact, context, compact,
         {&block_table, &lens, &accept_index, &accept_len}, {&cache_rows, &status});
    EXPECT_TRUE(same_bits(cache_rows.values(), c.bytes("out/cache").data)) << "cache";
    EXPECT_EQ(status.values(), Ints(static_cast<size_t>(b), 0));
  }
}

}  // namespace
