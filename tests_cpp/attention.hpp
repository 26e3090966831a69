// Calls of verify_attn and merge_attn_states, in guarded memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "rows.hpp"

namespace kdt_test {

inline constexpr int64_t kQk = 576, kV = 512;

struct Attention {
  int32_t batch_size, num_queries, num_heads;
  int32_t dtype = KDT_F32, out_dtype = KDT_F32, lse_base = KDT_LSE_NATURAL;
  float scale = 1.0f;
  Bytes q, cache;  // [B, Q, H, 576], [pages, page_size, 576]
  int32_t num_pages, page_size;
  std::optional<Ints> table = {};
  Ints prefix_lens;
  std::optional<Ints> kv_starts = {}, num_live = {};
  int32_t num_slots = 0;  // 0: no tree
  std::optional<std::vector<uint64_t>> visibility = {};
  std::optional<Ints> node_count = {};
};

struct Attended {
  Bytes out;
  Floats lse;
  Ints status;
};

// With slack, all strides differ from packed ones and heads lie outside queries.
inline Attended attend(const kdt_context* context, const Attention& in, const Variant& way = {}) {
  const int64_t b = in.batch_size, q_rows = in.num_queries, h = in.num_heads, s = way.slack;
  const int64_t size = dtype_size(in.dtype), out_size = dtype_size(in.out_dtype);
  using Strides = std::vector<int64_t>;
  // From request to request, query to query, head to head.
  const auto strides = [&](int64_t width) -> Strides {
    if (s == 0) return {0, 0, 0};
    const int64_t row = width + s, head = row * q_rows + s;
    return {head * h + 2 * s, row, head};
  };
  const Strides qs = strides(kQk), os = strides(kV), ls = strides(1);
  auto q = guarded_bytes({b, q_rows, h, kQk}, in.q, size, qs);
  const int64_t row = s > 0 ? kQk + s : 0, page = s > 0 ? in.page_size * row + s : 0;
  auto rows = guarded_bytes({in.num_pages, in.page_size, kQk}, in.cache, size, {page, row});
  const int64_t columns = in.table ? static_cast<int64_t>(in.table->size()) / std::max<int64_t>(b, 1) : 0;
  const int64_t n = in.num_slots, words = (n + 63) / 64, pitch = words + s;
  Guarded<int32_t> table({b, columns}, in.table.value_or(Ints()), {columns + s});
  Guarded<int32_t> prefix_lens({b}, in.prefix_lens), kv_starts({b}, in.kv_starts.value_or(in.prefix_lens));
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  Guarded<int32_t> node_count({b}, in.node_count.value_or(in.prefix_lens)), status({b});
  const size_t all_words = static_cast<size_t>(b * n * words);
  Guarded<uint64_t> visibility({b, n, words}, in.visibility.value_or(std::vector<uint64_t>(all_words)),
                               {n * pitch + s, pitch});
  auto out = guarded_bytes({b, q_rows, h, kV}, out_size, os);
  Guarded<float> lse({b, q_rows, h, 1}, ls);

  auto cache = sized<kdt_kv_cache>();
  cache.data = rows.data();
  cache.num_layers = 1;
  cache.num_pages = in.num_pages;
  cache.page_size = in.page_size;
  cache.row_width = static_cast<int32_t>(kQk);
  cache.element_size = static_cast<int32_t>(size);
  cache.page_stride = page;
  cache.row_stride = row;
  cache.block_table = in.table ? table.data() : nullptr;
  cache.max_pages = static_cast<int32_t>(columns);
  cache.block_table_stride = s > 0 ? columns + s : 0;
  auto tree = sized<kdt_tree>();
  tree.batch_size = in.batch_size;
  tree.num_slots = in.num_slots;
  tree.visibility = in.visibility ? visibility.data() : nullptr;
  tree.visibility_pitch = s > 0 ? pitch : 0;
  tree.visibility_stride = s > 0 ? n * pitch + s : 0;
  tree.node_count = in.node_count ? node_count.data() : nullptr;
  auto p = sized<kdt_verify_attn_params>();
  p.batch_size = in.batch_size;
  p.num_queries = in.num_queries;
  p.num_heads = in.num_heads;
  p.qk_dim = static_cast<int32_t>(kQk);
  p.v_dim = static_cast<int32_t>(kV);
  p.q_dtype = p.kv_dtype = in.dtype;
  p.out_dtype = in.out_dtype;
  p.lse_base = in.lse_base;
  p.scale = in.scale;
  p.q = q.data();
  p.q_stride = qs[0];
  p.q_row_stride = qs[1];
  p.q_head_stride = qs[2];
  p.cache = &cache;
  p.prefix_lens = prefix_lens.data();
  p.kv_starts = in.kv_starts ? kv_starts.data() : nullptr;
  p.tree = in.num_slots > 0 ? &tree : nullptr;
  p.num_live = in.num_live ? num_live.data() : nullptr;
  p.out = out.data();
  p.out_stride = os[0];
  p.out_row_stride = os[1];
  p.out_head_stride = os[2];
  p.lse = lse.data();
  p.lse_stride = ls[0];
  p.lse_row_stride = ls[1];
  p.lse_head_stride = ls[2];
  p.status = way.with_status ? status.data() : nullptr;
  call(kdt_verify_attn_workspace_size, kdt_verify_attn, context, p,
       {&q, &rows, &table, &prefix_lens, &kv_starts, &num_live, &node_count, &visibility}, {&out, &lse, &status});
  EXPECT_TRUE(way.with_status || status.unchanged());
  return {out.values(), lse.values(), status.values()};
}

// One side of a merge.
struct State {
  int32_t dtype;
  Bytes out;
  Floats lse;
};

struct Merge {
  int32_t num_rows, num_heads, v_dim;
  State a, b;
  int32_t out_dtype = KDT_F32, lse_base = KDT_LSE_NATURAL;
  std::optional<Ints> num_live = {};
  int32_t rows_per_request = 0;
};

// Where the result goes.
enum class Into { kOwn, kA, kB };

inline State merged(const kdt_context* context, const Merge& in, const Variant& way = {}, Into into = Into::kOwn) {
  const int64_t r = in.num_rows, h = in.num_heads, d = in.v_dim, s = way.slack;
  using Strides = std::vector<int64_t>;
  const auto strides = [&](int64_t width, int64_t slack) -> Strides {
    if (s == 0) return {0, 0};
    return {width + slack, (width + slack) * r + slack};  // heads lie outside rows
  };
  const Strides as = strides(d, s), bs = strides(d, 2 * s), als = strides(1, s), bls = strides(1, 2 * s);
  const Strides os = into == Into::kA ? as : into == Into::kB ? bs : strides(d, 3 * s);
  const Strides ls = into == Into::kA ? als : into == Into::kB ? bls : strides(1, 3 * s);
  auto a = guarded_bytes({r, h, d}, in.a.out, dtype_size(in.a.dtype), as);
  auto b = guarded_bytes({r, h, d}, in.b.out, dtype_size(in.b.dtype), bs);
  Guarded<float> a_lse({r, h, 1}, in.a.lse, als), b_lse({r, h, 1}, in.b.lse, bls);
  auto own = guarded_bytes({r, h, d}, dtype_size(in.out_dtype), os);
  Guarded<float> own_lse({r, h, 1}, ls);
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  auto& out = into == Into::kA ? a : into == Into::kB ? b : own;
  auto& lse = into == Into::kA ? a_lse : into == Into::kB ? b_lse : own_lse;
  auto p = sized<kdt_merge_attn_states_params>();
  p.num_rows = in.num_rows;
  p.num_heads = in.num_heads;
  p.v_dim = in.v_dim;
  p.lse_base = in.lse_base;
  p.a_dtype = in.a.dtype;
  p.b_dtype = in.b.dtype;
  p.out_dtype = in.out_dtype;
  p.rows_per_request = in.rows_per_request;
  p.a = a.data();
  p.a_row_stride = as[0];
  p.a_head_stride = as[1];
  p.a_lse = a_lse.data();
  p.a_lse_row_stride = als[0];
  p.a_lse_head_stride = als[1];
  p.b = b.data();
  p.b_row_stride = bs[0];
  p.b_head_stride = bs[1];
  p.b_lse = b_lse.data();
  p.b_lse_row_stride = bls[0];
  p.b_lse_head_stride = bls[1];
  p.out = out.data();
  p.out_row_stride = os[0];
  p.out_head_stride = os[1];
  p.lse = lse.data();
  p.lse_row_stride = ls[0];
  p.lse_head_stride = ls[1];
  p.num_live = in.num_live ? num_live.data() : nullptr;
  call(kdt_merge_attn_states_workspace_size, kdt_merge_attn_states, context, p, {&num_live}, {&out, &lse});
  for (const GuardedBytes* input : std::initializer_list<const GuardedBytes*>{&a, &b, &a_lse, &b_lse}) {
    EXPECT_TRUE(input == &out || input == &lse || input->unchanged()) << "an input was written";
  }
  return {in.out_dtype, out.values(), lse.values()};
}

// ---- Comparisons -----------------------------------------------------------------------------------

inline double tolerance_of(int32_t dtype) { return dtype == KDT_F32 ? 1e-5 : dtype == KDT_BF16 ? 2.5e-3 : 6e-4; }

// The same NaN and infinities, and ||got - expected|| <= tolerance ||expected||.
inline testing::AssertionResult outputs_near(const Floats& got, const Floats& expected, double tolerance) {
  if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " elements";
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = static_cast<double>(got[i]), e = static_cast<double>(expected[i]);
    if (!std::isfinite(e) || !std::isfinite(g)) {
      if (std::isnan(e) ? std::isnan(g) : g == e) continue;
      return testing::AssertionFailure() << "element " << i << " is " << g << ", expected " << e;
    }
    difference += (g - e) * (g - e);
    norm += e * e;
  }
  if (std::sqrt(difference) <= tolerance * std::sqrt(norm)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "relative error " << std::sqrt(difference / norm) << ", at most "
                                     << tolerance;
}
// As documented for the dtype, or for another that the inputs had.
inline testing::AssertionResult outputs_near(const Bytes& got, const Bytes& expected, int32_t dtype,
                                             std::optional<int32_t> precision = std::nullopt) {
  return outputs_near(decoded(got, dtype), decoded(expected, dtype), tolerance_of(precision.value_or(dtype)));
}

inline testing::AssertionResult lse_near(const Floats& got, const Floats& expected) {
  if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " elements";
  for (size_t i = 0; i < got.size(); ++i) {
    const double e = static_cast<double>(expected[i]);
    const auto result = near(static_cast<double>(got[i]), e, 1e-5 + 1e-6 * std::abs(e));
    if (!result) return testing::AssertionFailure() << "element " << i << " is " << result.message();
  }
  return testing::AssertionSuccess();
}

// The bits of another run that differs in strides, alignment or what lies around: on CUDA these may choose another
// way to split the sums, so there it is within tolerance.
inline testing::AssertionResult same_or_near(const Attended& got, const Attended& other, int32_t out_dtype,
                                             std::optional<int32_t> precision = std::nullopt) {
  const auto out =
      on_cuda() ? outputs_near(got.out, other.out, out_dtype, precision) : same_bits(got.out, other.out);
  if (!out) return testing::AssertionFailure() << "out: " << out.message();
  const auto lse = on_cuda() ? lse_near(got.lse, other.lse) : same_bits(got.lse, other.lse);
  if (!lse) return testing::AssertionFailure() << "lse: " << lse.message();
  return testing::AssertionSuccess();
}

}  // namespace kdt_test
