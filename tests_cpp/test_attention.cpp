// verify_attn and merge_attn_states: against the reference, in closed form, and what they must not look at.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "attention.hpp"
#include "backend.hpp"
#include "call.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "rows.hpp"
#include "sparse_memory.hpp"

namespace {

using namespace kdt_test;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- Against the reference -------------------------------------------------------------------------

int32_t lse_base_of(const Case& c) { return c.attribute("lse_base") == "2" ? KDT_LSE_BASE2 : KDT_LSE_NATURAL; }

KDT_CASES(VerifyAttnCases, "verify_attn");

TEST_P(VerifyAttnCases, IsWithinToleranceOfReference) {
  const Case c(GetParam());
  const auto q = c.bytes("in/q"), cache = c.bytes("in/kv_cache");
  Attention in = {.batch_size = static_cast<int32_t>(q.dims[0]),
                  .num_queries = static_cast<int32_t>(q.dims[1]),
                  .num_heads = static_cast<int32_t>(q.dims[2]),
                  .dtype = c.dtype("in/q"),
                  .out_dtype = c.dtype("out/out"),
                  .lse_base = lse_base_of(c),
                  .scale = std::stof(c.text("scale")),
                  .q = q.data,
                  .cache = cache.data,
                  .num_pages = static_cast<int32_t>(cache.dims[0]),
                  .page_size = static_cast<int32_t>(cache.dims[1]),
                  .table = c.optional_ints("in/block_table"),
                  .prefix_lens = c.ints("in/prefix_lens"),
                  .kv_starts = c.optional_ints("in/kv_starts"),
                  .num_live = c.optional_ints("in/num_live")};
  if (c.has("in/tree.visibility")) {
    const auto visibility = c.get<uint64_t>("in/tree.visibility");
    in.num_slots = static_cast<int32_t>(visibility.dims[1]);
    in.visibility = visibility.data;
    in.node_count = c.ints("in/tree.node_count");
  }
  const Ints status = c.ints("out/status");
  const int64_t rows = std::accumulate(in.prefix_lens.begin(), in.prefix_lens.end(), int64_t{in.num_queries},
                                       [](int64_t sum, int32_t n) { return sum + std::clamp(n, 0, 100000); });
  std::optional<Attended> first;
  for (const Variant& variant : variants_of(rows * in.num_queries * in.num_heads > 50000)) {
    SCOPED_TRACE(to_string(variant));
    const TestContext context(variant.num_threads);
    const Attended got = attend(context, in, variant);
    if (!first) first = got;
    const int32_t precision = on_tensor_cores() ? in.dtype : in.out_dtype;
    EXPECT_TRUE(same_or_near(got, *first, in.out_dtype, precision)) << "of the first run";
    EXPECT_TRUE(outputs_near(got.out, c.bytes("out/out").data, in.out_dtype, precision)) << "out";
    EXPECT_TRUE(lse_near(got.lse, c.get<float>("out/lse").data)) << "lse";
    if (variant.with_status) {
      EXPECT_TRUE(same_bits(got.status, status)) << "status";
    }
  }
}

KDT_CASES(MergeAttnStatesCases, "merge_attn_states");

TEST_P(MergeAttnStatesCases, IsWithinToleranceOfReference) {
  const Case c(GetParam());
  const auto a = c.bytes("in/out_a"), b = c.bytes("in/out_b");
  const Merge plain = {static_cast<int32_t>(a.dims[0]),
                       static_cast<int32_t>(a.dims[1]),
                       static_cast<int32_t>(a.dims[2]),
                       {c.dtype("in/out_a"), a.data, c.get<float>("in/lse_a").data},
                       {c.dtype("in/out_b"), b.data, c.get<float>("in/lse_b").data},
                       c.dtype("out/out"),
                       lse_base_of(c),
                       c.optional_ints("in/num_live"),
                       c.integer_or("rows_per_request", 0)};
  std::optional<State> first;
  for (const Variant& variant : variants_of(false)) {
    SCOPED_TRACE(to_string(variant));
    // See rows_worth_a_thread in cpu/rows.hpp.
    const int64_t wanted = variant.num_threads * int64_t{1 + 50000 / (1 + plain.v_dim)};
    const int64_t times = variant.many_requests && !plain.num_live ? wanted / plain.num_rows + 1 : 1;
    Merge in = plain;
    in.num_rows = static_cast<int32_t>(plain.num_rows * times);
    for (State* side : {&in.a, &in.b}) {
      side->out = tiled(side->out, times);
      side->lse = tiled(side->lse, times);
    }
    const TestContext context(variant.num_threads);
    for (const Into into : {Into::kOwn, Into::kA, Into::kB}) {
      if (into == Into::kA && in.a.dtype != in.out_dtype) continue;
      if (into == Into::kB && in.b.dtype != in.out_dtype) continue;
      const State got = merged(context, in, variant, into);
      if (!first) first = got;
      EXPECT_TRUE(same_bits(got.out, tiled(first->out, times))) << "out of the first run";
      EXPECT_TRUE(same_bits(got.lse, tiled(first->lse, times))) << "lse of the first run";
    }
  }
  EXPECT_TRUE(outputs_near(first->out, c.bytes("out/out").data, plain.out_dtype)) << "out";
  EXPECT_TRUE(lse_near(first->lse, c.get<float>("out/lse").data)) << "lse";
}

// ---- Closed forms ----------------------------------------------------------------------------------

// One request of one head over a contiguous cache. Row j has `scores[j]` as its score, whatever the scale, with all
// queries, and `values[j]` in each of its 512 values.
Attention scored(const Floats& scores, const Floats& values, int32_t prefix_len) {
  const int32_t rows = static_cast<int32_t>(scores.size()), queries = rows - prefix_len;
  Floats q(static_cast<size_t>(queries * kQk)), cache(static_cast<size_t>(rows * kQk));
  for (int64_t i = 0; i < queries; ++i) q[static_cast<size_t>(i * kQk + kV)] = 2.0f;  // rope parts alone
  for (int64_t j = 0; j < rows; ++j) {
    std::fill_n(cache.begin() + j * kQk, kV, values[static_cast<size_t>(j)]);
    cache[static_cast<size_t>(j * kQk + kV)] = scores[static_cast<size_t>(j)];
  }
  return {.batch_size = 1,
          .num_queries = queries,
          .num_heads = 1,
          .scale = 0.5f,
          .q = encoded(q, KDT_F32),
          .cache = encoded(cache, KDT_F32),
          .num_pages = 1,
          .page_size = rows,
          .prefix_lens = {prefix_len}};
}

// Sees bit j of row i when see(i, j).
std::vector<uint64_t> mask_of(int32_t slots, const std::function<bool(int32_t, int32_t)>& see) {
  const int32_t words = (slots + 63) / 64;
  std::vector<uint64_t> rows(static_cast<size_t>(slots * words));
  for (int32_t i = 0; i < slots; ++i) {
    for (int32_t j = 0; j < slots; ++j) {
      if (see(i, j)) rows[static_cast<size_t>(i * words + j / 64)] |= uint64_t{1} << j % 64;
    }
  }
  return rows;
}

void set_tree(Attention* in, const std::function<bool(int32_t, int32_t)>& see) {
  in->num_slots = in->num_queries;
  in->visibility = mask_of(in->num_queries, see);
}

// Each of the 512 values of query i, and its lse.
void expect_attended(const Attended& got, size_t i, double value, double lse) {
  const Floats out = decoded(got.out, KDT_F32);
  for (size_t d = 0; d < kV; ++d) {
    const double v = static_cast<double>(out[i * kV + d]);
    ASSERT_TRUE(near(v, value, 1e-5 * std::abs(value))) << "query " << i << ", value " << d;
  }
  EXPECT_TRUE(near(static_cast<double>(got.lse[i]), lse, 1e-5 + 1e-6 * std::abs(lse))) << "lse of query " << i;
}

TEST(VerifyAttn, EqualScoresGiveTheMean) {
  // Two keys of value 1, one of value 0: two in the prefix, and the query's own.
  Attention in = scored({0, 0, 0}, {0, 1, 1}, 2);
  for (const int32_t base : {KDT_LSE_NATURAL, KDT_LSE_BASE2}) {
    in.lse_base = base;
    expect_attended(attend(TestContext(), in), 0, 2.0 / 3.0,
                    base == KDT_LSE_BASE2 ? std::log2(3.0) : std::log(3.0));
  }
}

// No bias may stand for a mask: rows that are not seen score above these by more than any such bias.
TEST(VerifyAttn, ScoresFarBelowAnyMaskBiasAreRight) {
  for (const float base : {-6e4f, -65504.0f, -1e5f, -1e38f, 6e4f, 1e5f}) {
    SCOPED_TRACE(base);
    Attention in = scored({base, base, 0, 1000, base}, {1, 2, 50, 60, 6}, 2);
    set_tree(&in, [](int32_t i, int32_t j) { return j == (i == 2 ? 2 : 9); });
    const Attended got = attend(TestContext(), in);
    expect_attended(got, 2, 3.0, static_cast<double>(base) + std::log(3.0));
    expect_attended(got, 0, 1.5, static_cast<double>(base) + std::log(2.0));  // the prefix alone
  }
  // And differences down there count.
  const Attention in = scored({-60000, -60001, -60002}, {0, 0, 1}, 2);
  const double sum = 1 + std::exp(-1.0) + std::exp(-2.0);
  expect_attended(attend(TestContext(), in), 0, std::exp(-2.0) / sum, -60000 + std::log(sum));
}

// The largest score comes last, first, and in between, with blocks of smaller ones: sums are rescaled.
TEST(VerifyAttn, WhereTheLargestScoreLiesDoesNotMatter) {
  constexpr int32_t kRows = 2500;
  for (const int32_t peak : {0, 63, 64, 1023, 1024, 1500, kRows - 1}) {
    Floats scores(kRows), values(kRows);
    double sum = 0, weighted = 0;
    for (int32_t j = 0; j < kRows; ++j) {
      const size_t i = static_cast<size_t>(j);
      scores[i] = j == peak ? 30.0f : -static_cast<float>(std::abs(j - peak)) / 100;
      values[i] = static_cast<float>(j % 7);
      sum += std::exp(static_cast<double>(scores[i]));
      weighted += std::exp(static_cast<double>(scores[i])) * (j % 7);
    }
    expect_attended(attend(TestContext(), scored(scores, values, kRows - 1)), 0, weighted / sum, std::log(sum));
  }
}

// A root that is not seen, and slots seen without their ancestors: the mask is not taken for a tree's.
TEST(VerifyAttn, TakesTheMaskBitForBit) {
  std::mt19937 random(43);
  for (const int32_t slots : {1, 2, 17, 64, 65, 129}) {
    Floats scores(static_cast<size_t>(slots) + 1), values(scores.size());
    for (size_t j = 0; j < scores.size(); ++j) {
      scores[j] = static_cast<float>(random() % 300) / 100;
      values[j] = static_cast<float>(random() % 50);
    }
    Attention in = scored(scores, values, 1);
    in.kv_starts = Ints{1};  // nothing of the prefix
    set_tree(&in, [&](int32_t i, int32_t) { return i % 5 != 4 && random() % 3 == 0; });
    const Attended got = attend(TestContext(), in);
    const int32_t words = (slots + 63) / 64;
    bool without_root = false;
    for (int32_t i = 0; i < slots; ++i) {
      double sum = 0, weighted = 0;
      for (int32_t j = 0; j < slots; ++j) {
        if (((*in.visibility)[static_cast<size_t>(i * words + j / 64)] >> j % 64 & 1) == 0) continue;
        const double weight = std::exp(static_cast<double>(scores[static_cast<size_t>(j) + 1]));
        sum += weight;
        weighted += weight * static_cast<double>(values[static_cast<size_t>(j) + 1]);
      }
      without_root |= ((*in.visibility)[static_cast<size_t>(i * words)] & 1) == 0 && sum > 0;
      expect_attended(got, static_cast<size_t>(i), sum > 0 ? weighted / sum : 0, std::log(sum));
    }
    EXPECT_TRUE(slots < 17 || without_root);
    ASSERT_FALSE(HasFailure()) << slots << " slots";
  }
}

TEST(VerifyAttn, QueriesThatSeeNothing) {
  const Floats scores(12, 1.0f), values(12, 5.0f);
  Attention in = scored(scores, values, 4);  // 8 queries
  set_tree(&in, [](int32_t i, int32_t) { return i == 2; });
  in.kv_starts = Ints{4};
  in.node_count = Ints{6};
  const Attended got = attend(TestContext(), in);
  for (size_t i = 0; i < 8; ++i) expect_attended(got, i, i == 2 ? 5 : 0, i == 2 ? 1 + std::log(6.0) : -HUGE_VAL);
  EXPECT_EQ(got.status, Ints{0});
  in.node_count = Ints{0};
  for (size_t i = 0; i < 8; ++i) expect_attended(attend(TestContext(), in), i, 0, -HUGE_VAL);
  Attention empty = scored({}, {}, -1);  // one query, a cache without rows
  EXPECT_EQ(empty.num_queries, 1);
  empty.prefix_lens = {0};
  empty.num_slots = 1;
  empty.node_count = Ints{0};
  expect_attended(attend(TestContext(), empty), 0, 0, -HUGE_VAL);
}

// ---- What must not matter --------------------------------------------------------------------------

constexpr int32_t kQueries = 17, kPageSize = 16, kColumns = 8;

// Two requests over a paged cache, with a window, and slots that nobody sees: 5 in each tree, and those from 14 on.
Attention windowed(int32_t dtype) {
  std::mt19937 random(47);
  std::normal_distribution<float> normal;
  const auto draw = [&](size_t n) {
    Floats values(n);
    for (float& v : values) v = normal(random);
    return values;
  };
  Attention in = {.batch_size = 2,
                  .num_queries = kQueries,
                  .num_heads = 3,
                  .dtype = dtype,
                  .out_dtype = dtype,
                  .scale = 0.1f,
                  .q = encoded(draw(2 * kQueries * 3 * kQk), dtype),
                  .cache = encoded(draw(2 * kColumns * kPageSize * kQk), dtype),
                  .num_pages = 2 * kColumns,
                  .page_size = kPageSize,
                  .table = Ints{9, 3, 14, 0, 7, 12, 5, 2, 1, 15, 4, 10, 6, 13, 8, 11},
                  .prefix_lens = {50, 33},
                  .kv_starts = Ints{20, 33},
                  .num_slots = kQueries,
                  .node_count = Ints{14, 14}};
  const std::vector<uint64_t> rows =
      mask_of(kQueries, [](int32_t i, int32_t j) { return j <= i && j != 5 && j % 3 != i % 2; });
  in.visibility = tiled(rows, 2);
  return in;
}

// Packed and with gaps.
std::vector<Attended> attend_both_ways(const Attention& in) {
  std::vector<Attended> results;
  for (const Variant& way : {kVariants[0], kVariants[4]}) {
    results.push_back(attend(TestContext(way.num_threads), in, way));
  }
  return results;
}

void expect_same(const Attention& in, const std::vector<Attended>& clean) {
  const std::vector<Attended> got = attend_both_ways(in);
  for (size_t way = 0; way < got.size(); ++way) {
    EXPECT_TRUE(same_bits(got[way].out, clean[way].out)) << "out";
    EXPECT_TRUE(same_bits(got[way].lse, clean[way].lse)) << "lse";
    EXPECT_EQ(got[way].status, clean[way].status);
  }
}

TEST(VerifyAttn, WhatNoQueryMaySeeNeverMatters) {
  for (const int32_t dtype : {KDT_F32, KDT_BF16}) {
    const Attention plain = windowed(dtype);
    const std::vector<Attended> clean = attend_both_ways(plain);
    ASSERT_EQ(clean[0].status, (Ints{0, 0}));
    ASSERT_TRUE(same_or_near(clean[1], clean[0], dtype));
    for (const float v : decoded(clean[0].out, dtype)) ASSERT_TRUE(std::isfinite(v));

    // Rows before the window, of slot 5, of slots beyond node_count, and behind the tree.
    Attention in = plain;
    int64_t seen = 0;
    for (const float poison : {kNaN, kInf}) {
      const Bytes row = encoded(Floats(kQk, poison), dtype);
      for (int32_t b = 0; b < 2; ++b) {
        const int32_t start = (*in.kv_starts)[static_cast<size_t>(b)],
                      prefix = in.prefix_lens[static_cast<size_t>(b)];
        for (int32_t j = 0; j < kColumns * kPageSize; ++j) {
          if (j >= start && j < prefix + 14 && j != prefix + 5) {
            ++seen;
            continue;
          }
          const int32_t page = (*in.table)[static_cast<size_t>(b * kColumns + j / kPageSize)];
          std::copy(row.begin(), row.end(),
                    in.cache.begin() + (page * kPageSize + j % kPageSize) * static_cast<ptrdiff_t>(row.size()));
        }
      }
      expect_same(in, clean);
    }
    EXPECT_EQ(seen, 2 * (30 + 13 + 0 + 13));

    // Pages before the window and behind the tree: ids that are none, and ids of other requests' pages.
    for (const int32_t garbage : {-1, 2 * kColumns, INT32_MIN, INT32_MAX, 9}) {
      (*in.table)[0] = garbage;                                                            // rows 0..15, start 20
      for (size_t column = 4; column < kColumns; ++column) (*in.table)[column] = garbage;  // from row 64 on
      for (size_t column : {0, 1}) (*in.table)[kColumns + column] = garbage;               // rows 0..31, start 33
      for (size_t column = 3; column < kColumns; ++column) (*in.table)[kColumns + column] = garbage;  // from 48 on
      expect_same(in, clean);
    }

    // Queries beyond node_count, and their rows of the mask and columns beyond it.
    for (size_t b = 0; b < 2; ++b) {
      for (size_t i = 0; i < kQueries; ++i) {
        uint64_t& bits = (*in.visibility)[b * kQueries + i];
        bits = i < 14 ? bits | ~uint64_t{0} << 14 : 0x5555555555555555;
        if (i < 14) continue;
        const Bytes garbage = encoded(Floats(3 * kQk, kNaN), dtype);
        std::copy(garbage.begin(), garbage.end(),
                  in.q.begin() + static_cast<ptrdiff_t>((b * kQueries + i) * garbage.size()));
      }
    }
    expect_same(in, clean);
  }
}

// A query's result is over the rows it sees: a NaN in a slot's row is that of the slot and its descendants alone.
TEST(VerifyAttn, WhatAQueryDoesNotSeeIsNotItsOwn) {
  const Attention plain = windowed(KDT_F32);
  const Attended clean = attend(TestContext(), plain);
  const size_t row = kV * 3 * sizeof(float);  // of a query
  for (const int32_t slot : {0, 1, 4, 13}) {
    Attention in = plain;
    const int32_t at = in.prefix_lens[0] + slot, page = (*in.table)[static_cast<size_t>(at / kPageSize)];
    const Bytes poison = encoded(Floats(kQk, kNaN), KDT_F32);
    std::copy(poison.begin(), poison.end(),
              in.cache.begin() + (page * kPageSize + at % kPageSize) * static_cast<ptrdiff_t>(poison.size()));
    const Attended got = attend(TestContext(), in);
    for (size_t i = 0; i < 14; ++i) {
      const Bytes out(got.out.begin() + static_cast<ptrdiff_t>(i * row),
                      got.out.begin() + static_cast<ptrdiff_t>((i + 1) * row));
      const Bytes expected(clean.out.begin() + static_cast<ptrdiff_t>(i * row),
                           clean.out.begin() + static_cast<ptrdiff_t>((i + 1) * row));
      if (((*in.visibility)[i] >> slot & 1) != 0) {
        for (const float v : decoded(out, KDT_F32))
          ASSERT_TRUE(std::isnan(v)) << "query " << i << ", slot " << slot;
      } else {
        EXPECT_TRUE(outputs_near(out, expected, KDT_F32)) << "query " << i << ", slot " << slot;
      }
    }
  }
}

TEST(VerifyAttn, NeighboursOfARequestDoNotMatter) {
  const Attention plain = windowed(KDT_F32);
  const Attended clean = attend(TestContext(), plain);
  Attention in = plain;
  std::fill(in.q.begin(), in.q.begin() + static_cast<ptrdiff_t>(in.q.size() / 2), 0xff);  // NaN
  const Attended got = attend(TestContext(), in);
  EXPECT_TRUE(std::equal(got.out.begin() + static_cast<ptrdiff_t>(got.out.size() / 2), got.out.end(),
                         clean.out.begin() + static_cast<ptrdiff_t>(clean.out.size() / 2)));
  in.num_live = Ints{1};
  in.q = plain.q;
  const Attended dead = attend(TestContext(), in);
  const auto of_first = [](const Attended& a) -> Attended {
    return {Bytes(a.out.begin(), a.out.begin() + static_cast<ptrdiff_t>(a.out.size() / 2)),
            Floats(a.lse.begin(), a.lse.begin() + static_cast<ptrdiff_t>(a.lse.size() / 2)),
            {}};
  };
  // A neighbour's length may move the other requests within tolerance on CUDA.
  EXPECT_TRUE(same_or_near(of_first(dead), of_first(clean), KDT_F32));
  for (size_t i = dead.lse.size() / 2; i < dead.lse.size(); ++i) EXPECT_EQ(dead.lse[i], -kInf);
  EXPECT_EQ(Bytes(dead.out.begin() + static_cast<ptrdiff_t>(dead.out.size() / 2), dead.out.end()),
            Bytes(dead.out.size() / 2, 0));
}

// Every array ends where its memory does: 17 slots have one mask word a row, and not a byte more.
TEST(VerifyAttn, ReadsNoArrayBeyondItsEnd) {
  for (const int32_t dtype : {KDT_F32, KDT_BF16}) {
    Attention plain = windowed(dtype);
    // The last row of the mask is read, and the last row of the highest page.
    plain.node_count = Ints{14, kQueries};
    plain.prefix_lens = {50, 3 * kPageSize - kQueries};
    plain.kv_starts = Ints{20, 3};
    (*plain.table)[kColumns + 2] = 2 * kColumns - 1;
    (*plain.table)[kColumns + 1] = 4;
    plain.num_slots = kQueries;
    const Attended expected = attend(TestContext(), plain);
    const AtTheEnd<uint8_t> q(plain.q), rows(plain.cache);
    const AtTheEnd<uint64_t> visibility(*plain.visibility);
    const AtTheEnd<int32_t> table(*plain.table), prefix_lens(plain.prefix_lens), kv_starts(*plain.kv_starts);
    const AtTheEnd<int32_t> node_count(*plain.node_count);
    const AtTheEnd<uint8_t> out(Bytes(expected.out.size()));
    const AtTheEnd<float> lse(Floats(expected.lse.size()));
    auto cache = sized<kdt_kv_cache>();
    cache.data = rows.data();
    cache.num_layers = 1;
    cache.num_pages = plain.num_pages;
    cache.page_size = kPageSize;
    cache.row_width = static_cast<int32_t>(kQk);
    cache.element_size = static_cast<int32_t>(dtype_size(dtype));
    cache.block_table = table.data();
    cache.max_pages = kColumns;
    auto tree = sized<kdt_tree>();
    tree.batch_size = 2;
    tree.num_slots = kQueries;
    tree.visibility = visibility.data();
    tree.node_count = node_count.data();
    auto p = sized<kdt_verify_attn_params>();
    p.batch_size = 2;
    p.num_queries = kQueries;
    p.num_heads = 3;
    p.qk_dim = static_cast<int32_t>(kQk);
    p.v_dim = static_cast<int32_t>(kV);
    p.q_dtype = p.kv_dtype = p.out_dtype = dtype;
    p.scale = plain.scale;
    p.q = q.data();
    p.cache = &cache;
    p.prefix_lens = prefix_lens.data();
    p.kv_starts = kv_starts.data();
    p.tree = &tree;
    p.out = out.data();
    p.lse = lse.data();
    size_t size = 0;
    const TestContext context;
    ASSERT_EQ(kdt_verify_attn_workspace_size(context, &p, &size), KDT_OK) << kdt_last_error();
    const AtTheEnd<uint8_t> workspace((Bytes(size)));
    ASSERT_EQ(kdt_verify_attn(context, &p, workspace.data(), size, nullptr), KDT_OK) << kdt_last_error();
    EXPECT_TRUE(same_or_near({out.values(), lse.values(), {}}, expected, dtype));
  }
}

// ---- 64-bit offsets --------------------------------------------------------------------------------

// Pages beyond 2^31 and 2^32 elements: offsets wrapped to 32 bits would point to memory that is not there.
TEST(VerifyAttn, PagesMayLieBeyond32BitOffsets) {
  constexpr int32_t kPage = 32, kPages = 240000;
  constexpr size_t kPageBytes = size_t{kPage} * kQk * 2;
  const Ints far = {116509, 7, 233017, kPages - 1};  // 116509 * 32 * 576 > 2^31, 233017 * 32 * 576 > 2^32
  Attention in = windowed(KDT_BF16);
  in.batch_size = 1;
  in.q.resize(in.q.size() / 2);
  in.visibility->resize(kQueries);
  in.node_count->resize(1);
  in.kv_starts.reset();
  in.page_size = kPage;
  in.num_pages = static_cast<int32_t>(far.size());
  in.cache.resize(far.size() * kPageBytes);
  in.table = Ints{0, 1, 2, 3};
  in.prefix_lens = {4 * kPage - kQueries};
  const Attended expected = attend(TestContext(), in);

  const SparseMemory memory(kPages * kPageBytes);
  for (size_t i = 0; i < far.size(); ++i) {
    memory.put(static_cast<size_t>(far[i]) * kPageBytes, &in.cache[i * kPageBytes], kPageBytes);
  }
  auto q = guarded_bytes({1, kQueries, 3, kQk}, in.q, 2);
  Guarded<int32_t> table({1, 4}, far), prefix_lens({1}, in.prefix_lens), node_count({1}, *in.node_count);
  Guarded<uint64_t> visibility({1, kQueries, 1}, *in.visibility);
  auto out = guarded_bytes({1, kQueries, 3, kV}, 2);
  Guarded<float> lse({1, kQueries, 3});
  Guarded<int32_t> status({1});
  auto cache = sized<kdt_kv_cache>();
  cache.data = memory.data();
  cache.num_layers = 1;
  cache.num_pages = kPages;
  cache.page_size = kPage;
  cache.row_width = static_cast<int32_t>(kQk);
  cache.element_size = 2;
  cache.block_table = table.data();
  cache.max_pages = static_cast<int32_t>(far.size());
  auto tree = sized<kdt_tree>();
  tree.batch_size = 1;
  tree.num_slots = kQueries;
  tree.visibility = visibility.data();
  tree.node_count = node_count.data();
  auto p = sized<kdt_verify_attn_params>();
  p.batch_size = 1;
  p.num_queries = kQueries;
  p.num_heads = 3;
  p.qk_dim = static_cast<int32_t>(kQk);
  p.v_dim = static_cast<int32_t>(kV);
  p.q_dtype = p.kv_dtype = p.out_dtype = KDT_BF16;
  p.scale = in.scale;
  p.q = q.data();
  p.cache = &cache;
  p.prefix_lens = prefix_lens.data();
  p.tree = &tree;
  p.out = out.data();
  p.lse = lse.data();
  p.status = status.data();
  call(kdt_verify_attn_workspace_size, kdt_verify_attn, TestContext(), p,
       {&q, &table, &prefix_lens, &node_count, &visibility}, {&out, &lse, &status});
  EXPECT_EQ(status.values(), Ints{0});
  EXPECT_TRUE(same_or_near({out.values(), lse.values(), {}}, expected, KDT_BF16));
}

// ---- Merging ---------------------------------------------------------------------------------------

// One (row, head) of two values a side.
State merge_two(Floats a, float a_lse, Floats b, float b_lse, int32_t base = KDT_LSE_NATURAL) {
  const int32_t d = static_cast<int32_t>(a.size());
  return merged(
      TestContext(),
      {1, 1, d, {KDT_F32, encoded(a, KDT_F32), {a_lse}}, {KDT_F32, encoded(b, KDT_F32), {b_lse}}, KDT_F32, base});
}

TEST(MergeAttnStates, WeighsBothSidesByTheirSums) {
  const State natural = merge_two({1, 4}, std::log(3.0f), {5, 0}, 0.0f);
  EXPECT_TRUE(outputs_near(natural.out, encoded({2, 3}, KDT_F32), KDT_F32));
  EXPECT_TRUE(lse_near(natural.lse, {std::log(4.0f)}));
  const State base2 = merge_two({1, 4}, std::log2(3.0f), {5, 0}, 0.0f, KDT_LSE_BASE2);
  EXPECT_TRUE(outputs_near(base2.out, encoded({2, 3}, KDT_F32), KDT_F32));
  EXPECT_TRUE(lse_near(base2.lse, {2.0f}));
  const State far = merge_two({1, 4}, -1e30f, {5, 0}, 1e30f);  // no difference overflows
  EXPECT_TRUE(same_bits(far.out, encoded({5, 0}, KDT_F32)));
  EXPECT_EQ(far.lse[0], 1e30f);
}

TEST(MergeAttnStates, OfTwoEmptySidesIsEmpty) {
  for (const int32_t base : {KDT_LSE_NATURAL, KDT_LSE_BASE2}) {
    for (const float a : {-kInf, kInf}) {
      for (const float b : {-kInf, kInf}) {
        const State got = merge_two({kNaN, 1}, a, {2, kInf}, b, base);
        EXPECT_TRUE(same_bits(got.out, encoded({0, 0}, KDT_F32))) << a << " " << b;
        EXPECT_EQ(got.lse[0], -kInf);
      }
    }
  }
}

TEST(MergeAttnStates, NeverUsesTheOutOfAnEmptySide) {
  for (const float empty : {-kInf, kInf}) {
    for (const float garbage : {kNaN, kInf}) {
      const State a = merge_two({garbage, garbage}, empty, {3, -4}, 2.0f);
      const State b = merge_two({3, -4}, 2.0f, {garbage, garbage}, empty);
      for (const State* got : {&a, &b}) {
        EXPECT_TRUE(same_bits(got->out, encoded({3, -4}, KDT_F32)));
        EXPECT_EQ(got->lse[0], 2.0f);
      }
    }
  }
}

TEST(MergeAttnStates, PropagatesNaN) {
  for (const bool swap : {false, true}) {
    for (const float other : {1.0f, -kInf, kInf}) {
      const State got = swap ? merge_two({1, 1}, other, {1, 1}, kNaN) : merge_two({1, 1}, kNaN, {1, 1}, other);
      for (const float v : decoded(got.out, KDT_F32)) EXPECT_TRUE(std::isnan(v)) << other;
      EXPECT_TRUE(std::isnan(got.lse[0])) << other;
    }
    const State got = swap ? merge_two({1, 1}, 0, {kNaN, 1}, 0) : merge_two({kNaN, 1}, 0, {1, 1}, 0);
    const Floats out = decoded(got.out, KDT_F32);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_EQ(out[1], 1.0f);
  }
}

// Attention over the prefix and over the tree alone, merged, is attention over both.
TEST(MergeAttnStates, OfPrefixAndTreeIsTheWhole) {
  const TestContext context;
  for (const int32_t base : {KDT_LSE_NATURAL, KDT_LSE_BASE2}) {
    Attention whole = windowed(KDT_F32), prefix = whole, tree = whole;
    whole.lse_base = prefix.lse_base = tree.lse_base = base;
    prefix.visibility = std::vector<uint64_t>(whole.visibility->size());
    tree.kv_starts = whole.prefix_lens;
    const Attended a = attend(context, prefix), b = attend(context, tree), expected = attend(context, whole);
    const State got = merged(context, {2 * kQueries,
                                       3,
                                       static_cast<int32_t>(kV),
                                       {KDT_F32, a.out, a.lse},
                                       {KDT_F32, b.out, b.lse},
                                       KDT_F32,
                                       base});
    EXPECT_TRUE(outputs_near(got.out, expected.out, KDT_F32));
    EXPECT_TRUE(lse_near(got.lse, expected.lse));
  }
}

}  // namespace
