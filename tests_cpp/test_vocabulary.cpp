// topk_logprobs, topk_merge, argmax and sample: against the reference, and the properties that make them exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend.hpp"
#include "call.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "kernels/philox.hpp"
#include "rows.hpp"
#include "sparse_memory.hpp"

namespace {

using namespace kdt_test;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- Against the reference -------------------------------------------------------------------------

Logits logits_in(const Case& c) {
  const auto values = c.bytes("in/logits");
  return {static_cast<int32_t>(values.dims[0]),
          static_cast<int32_t>(values.dims[1]),
          c.dtype("in/logits"),
          values.data,
          c.integer_or("id_offset", 0),
          c.optional_ints("in/num_live"),
          c.integer_or("rows_per_request", 0)};
}

// Enough rows for each thread; see rows_worth_a_thread in cpu/rows.hpp.
int64_t times_of(const Variant& variant, const std::optional<Ints>& num_live, int64_t rows, int64_t vocab_size) {
  if (!variant.many_requests || num_live) return 1;
  return variant.num_threads * (1 + 50000 / (1 + vocab_size)) / rows + 1;
}

Logits repeated(Logits in, int64_t times) {
  in.num_rows = static_cast<int32_t>(in.num_rows * times);
  in.values = tiled(in.values, times);
  return in;
}

bool is_large(const Logits& in) { return in.values.size() > 1000000; }

// The bound of |lse| that the inputs alone give.
double lse_bound(const Logits& in) {
  return largest_magnitude(decoded(in.values, in.dtype)) + std::log(std::max(in.vocab_size, 1));
}

// Floats of the first run, in each repetition of the batch. On CUDA the sums may be split by sizes and alignment.
void expect_same_run(const TopK& got, const TopK& first, int64_t times, bool with_lse) {
  if (on_cuda()) return;
  EXPECT_TRUE(same_bits(got.log_probs, tiled(first.log_probs, times))) << "log_probs of the first run";
  if (with_lse) {
    EXPECT_TRUE(same_bits(got.lse, tiled(first.lse, times))) << "lse of the first run";
  }
}

KDT_CASES(TopkLogprobsCases, "topk_logprobs");

TEST_P(TopkLogprobsCases, HasTheIdsOfTheReferenceAndItsLogProbs) {
  const Case c(GetParam());
  const Logits in = logits_in(c);
  const bool raw = c.integer_or("raw", 0) != 0;
  const TopK expected = {c.get<float>("out/log_probs").data, c.ints("out/token_ids"),
                         raw ? c.get<double>("out/lse").data : std::vector<double>(), c.ints("out/status")};
  std::optional<TopK> first;
  for (const Variant& variant : variants_of(is_large(in))) {
    SCOPED_TRACE(to_string(variant));
    const int64_t times = times_of(variant, in.num_live, in.num_rows, in.vocab_size);
    const TestContext context(variant.num_threads);
    const TopK got = topk(context, repeated(in, times), c.integer("k"), raw, variant);
    if (!first) first = got;  // of the plain variant
    EXPECT_TRUE(same_bits(got.token_ids, tiled(expected.token_ids, times))) << "token_ids";
    if (raw) {
      EXPECT_TRUE(same_bits(got.log_probs, tiled(expected.log_probs, times))) << "logits";
      EXPECT_TRUE(lse64_near(got.lse, tiled(expected.lse, times))) << "lse";
    } else {
      EXPECT_TRUE(log_probs_near(got.log_probs, tiled(expected.log_probs, times), lse_bound(in))) << "log_probs";
    }
    if (variant.with_status) {
      EXPECT_TRUE(same_bits(got.status, tiled(expected.status, times))) << "status";
    }
    expect_same_run(got, *first, times, variant.with_status);
  }
}

KDT_CASES(TopkMergeCases, "topk_merge");

TEST_P(TopkMergeCases, HasTheIdsOfTheReferenceAndItsLogProbs) {
  const Case c(GetParam());
  const auto logits = c.get<float>("in/logits");
  const Ints ids = c.ints("in/token_ids");
  const std::vector<double> lse = c.get<double>("in/lse").data;
  const int32_t shards = static_cast<int32_t>(logits.dims[0]), rows = static_cast<int32_t>(logits.dims[1]);
  const int32_t k = static_cast<int32_t>(logits.dims[2]);
  double bound = 0;
  for (const double l : lse) bound = std::isfinite(l) ? std::max(bound, std::abs(l) + std::log(shards)) : bound;
  const Floats expected = c.get<float>("out/log_probs").data;
  const Ints expected_ids = c.ints("out/token_ids"), expected_status = c.ints("out/status");
  std::optional<TopK> first;
  for (const Variant& variant : variants_of(false)) {
    SCOPED_TRACE(to_string(variant));
    const auto num_live = c.optional_ints("in/num_live");
    const int64_t times = times_of(variant, num_live, rows, shards * k);
    Shards in = {shards,   static_cast<int32_t>(rows * times), k, {}, {}, {},
                 num_live, c.integer_or("rows_per_request", 0)};
    for (ptrdiff_t s = 0; s < shards; ++s) {  // rows lie within shards
      const auto append = [&](auto* to, const auto& from, ptrdiff_t width) {
        const std::vector shard(from.begin() + s * rows * width, from.begin() + (s + 1) * rows * width);
        const auto many = tiled(shard, times);
        to->insert(to->end(), many.begin(), many.end());
      };
      append(&in.logits, logits.data, k);
      append(&in.token_ids, ids, k);
      append(&in.lse, lse, 1);
    }
    const TestContext context(variant.num_threads);
    const TopK got = merge(context, in, variant);
    if (!first) first = got;
    EXPECT_TRUE(same_bits(got.token_ids, tiled(expected_ids, times))) << "token_ids";
    EXPECT_TRUE(log_probs_near(got.log_probs, tiled(expected, times), bound)) << "log_probs";
    if (variant.with_status) {
      EXPECT_TRUE(same_bits(got.status, tiled(expected_status, times))) << "status";
    }
    expect_same_run(got, *first, times, variant.with_status);
  }
}

// Runs a case of argmax or sample; gives the values of the first run.
template <class Run>
Floats expect_chosen(const Case& c, const Logits& in, Run&& run) {
  const Ints tokens = c.ints("out/tokens"), status = c.ints("out/status");
  std::optional<Chosen> first;
  for (const Variant& variant : variants_of(is_large(in))) {
    SCOPED_TRACE(to_string(variant));
    const int64_t times = times_of(variant, in.num_live, in.num_rows, in.vocab_size);
    const TestContext context(variant.num_threads);
    const Chosen got = run(context, repeated(in, times), times, variant);
    if (!first) first = got;
    EXPECT_TRUE(same_bits(got.tokens, tiled(tokens, times))) << "tokens";
    if (variant.with_status) {
      EXPECT_TRUE(same_bits(got.status, tiled(status, times))) << "status";
      EXPECT_TRUE(same_bits(got.values, tiled(first->values, times))) << "values of the first run";
    }
  }
  return first->values;
}

KDT_CASES(ArgmaxCases, "argmax");

TEST_P(ArgmaxCases, EqualsReference) {
  const Case c(GetParam());
  const Floats values =
      expect_chosen(c, logits_in(c), [](const kdt_context* context, const Logits& in, int64_t, const Variant& v) {
        return argmax(context, in, v);
      });
  const Floats expected = c.get<float>("out/values").data;
  for (size_t r = 0; r < expected.size(); ++r) {
    EXPECT_TRUE(near(static_cast<double>(values[r]), static_cast<double>(expected[r]), 0)) << "value of row " << r;
  }
}

KDT_CASES(SampleCases, "sample");

TEST_P(SampleCases, HasTheTokensOfTheReferenceAndItsValues) {
  const Case c(GetParam());
  const Logits in = logits_in(c);
  const Draws draws = {std::stoull(c.text("seed")), c.get<float>("in/temperatures").data, c.ints("in/positions"),
                       c.get<int64_t>("in/request_ids").data};
  const Floats values =
      expect_chosen(c, in, [&](const kdt_context* context, const Logits& many, int64_t times, const Variant& v) {
        return sample(context, many,
                      {draws.seed, tiled(draws.temperatures, times), tiled(draws.positions, times),
                       tiled(draws.request_ids, times)},
                      v);
      });
  const Floats expected = c.get<float>("out/values").data, logits = decoded(in.values, in.dtype);
  for (size_t r = 0; r < expected.size(); ++r) {
    const size_t v = static_cast<size_t>(in.vocab_size);
    const Floats row(logits.begin() + static_cast<ptrdiff_t>(r * v),
                     logits.begin() + static_cast<ptrdiff_t>((r + 1) * v));
    const double temperature = static_cast<double>(draws.temperatures[r]);
    // Without noise (temperature 0, or none that is legal) the value is a logit.
    const double tolerance = temperature > 0 ? 1e-5 * std::max(1.0, largest_magnitude(row) / temperature) : 0.0;
    EXPECT_TRUE(near(static_cast<double>(values[r]), static_cast<double>(expected[r]), tolerance))
        << "value of row " << r;
  }
}

// ---- Top-k -----------------------------------------------------------------------------------------

// Ids and logits of the K best of a row, by a stable sort.
std::pair<Ints, Floats> sorted(const Floats& row, int32_t k) {
  Ints ids(row.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)]; });
  ids.resize(static_cast<size_t>(k), -1);
  Floats logits;
  for (const int32_t id : ids) logits.push_back(id >= 0 ? row[static_cast<size_t>(id)] : -kInf);
  return {ids, logits};
}

void expect_stable_sort(const std::vector<Floats>& rows, int32_t k) {
  Floats all;
  for (const Floats& row : rows) all.insert(all.end(), row.begin(), row.end());
  const Logits in = logits_of(all, static_cast<int32_t>(rows.size()));
  const TestContext context;
  const TopK raw = topk(context, in, k, true), got = topk(context, in, k);
  Ints ids, raw_ids;
  Floats logits;
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto [row_ids, row_logits] = sorted(rows[r], k);
    const bool valid = std::any_of(rows[r].begin(), rows[r].end(), [](float v) { return std::isfinite(v); });
    EXPECT_EQ(got.status[r], valid ? 0 : KDT_STATUS_ROW_INVALID);
    raw_ids.insert(raw_ids.end(), row_ids.begin(), row_ids.end());
    logits.insert(logits.end(), row_logits.begin(), row_logits.end());
    const Ints none(static_cast<size_t>(k), -1);
    const Ints& expected = valid ? row_ids : none;
    ids.insert(ids.end(), expected.begin(), expected.end());
  }
  EXPECT_TRUE(same_bits(got.token_ids, ids)) << "K " << k;
  EXPECT_TRUE(same_bits(raw.token_ids, raw_ids)) << "K " << k << ", raw";
  EXPECT_TRUE(same_bits(raw.log_probs, logits)) << "K " << k << ", raw";
  EXPECT_EQ(raw.status, Ints(rows.size(), 0)) << "a shard may be all -inf";
}

// All rows of up to six logits with ties, both zeros and -inf, for each K up to beyond V.
TEST(TopK, OfEveryPatternOfTiesIsAStableSort) {
  const Floats palette = {0.0f, -0.0f, 1.0f, -kInf};
  for (size_t v = 1; v <= 6; ++v) {
    std::vector<Floats> rows;
    for (size_t pattern = 0; pattern < size_t{1} << 2 * v; ++pattern) {
      Floats row;
      for (size_t i = 0; i < v; ++i) row.push_back(palette[pattern >> 2 * i & 3]);
      rows.push_back(row);
    }
    for (int32_t k = 0; k <= static_cast<int32_t>(v) + 1; ++k) expect_stable_sort(rows, k);
  }
}

// Rows on which a bounded list of candidates fills and empties: rising, falling, constant, random with ties.
TEST(TopK, OfLongRowsIsAStableSort) {
  std::mt19937 random(17);
  std::vector<Floats> rows(6, Floats(3001));
  for (size_t i = 0; i < rows[0].size(); ++i) {
    rows[0][i] = static_cast<float>(i) / 7;
    rows[1][i] = -static_cast<float>(i);
    rows[2][i] = -3.0f;
    rows[3][i] = static_cast<float>(random() % 5);
    rows[4][i] = static_cast<float>(random() % 1000) - 2000.0f;
    rows[5][i] = i % 3 == 0 ? std::numeric_limits<float>::denorm_min() * static_cast<float>(i) : -0.0f;
  }
  for (const int32_t k : {1, 2, 63, 64, 65, 1000, KDT_MAX_CANDIDATES}) expect_stable_sort(rows, k);
}

// Any cut of a vocabulary into shards, even and uneven, with shards smaller than K, empty, and all -inf.
TEST(TopK, OfShardsMergedIsThatOfTheWhole) {
  const TestContext context;
  std::mt19937 random(23);
  constexpr int32_t kRows = 5, kVocabulary = 257;
  for (int i = 0; i < 60; ++i) {
    Floats logits(size_t{kRows} * kVocabulary);
    for (float& v : logits) v = static_cast<float>(random() % (i % 2 == 0 ? 7 : 5000)) / 64.0f - 3.0f;
    const int32_t k = 1 + static_cast<int32_t>(random() % 40), shards = 1 + static_cast<int32_t>(random() % 9);
    Ints cuts = {0, kVocabulary};
    for (int32_t s = 1; s < shards; ++s) cuts.push_back(static_cast<int32_t>(random() % (kVocabulary + 1)));
    std::sort(cuts.begin(), cuts.end());
    // The first shard of row 0 has no token that is possible.
    std::fill_n(logits.begin(), cuts[1], cuts[1] < kVocabulary ? -kInf : 0.0f);

    Shards in = {shards, kRows, k, {}, {}, {}};
    for (size_t s = 0; s < static_cast<size_t>(shards); ++s) {
      Floats shard;
      for (ptrdiff_t r = 0; r < kRows; ++r) {
        shard.insert(shard.end(), logits.begin() + r * kVocabulary + cuts[s],
                     logits.begin() + r * kVocabulary + cuts[s + 1]);
      }
      Logits part = logits_of(shard, kRows);
      part.id_offset = cuts[s];
      const TopK raw = topk(context, part, k, true);
      in.logits.insert(in.logits.end(), raw.log_probs.begin(), raw.log_probs.end());
      in.token_ids.insert(in.token_ids.end(), raw.token_ids.begin(), raw.token_ids.end());
      in.lse.insert(in.lse.end(), raw.lse.begin(), raw.lse.end());
    }
    const Logits whole = logits_of(logits, kRows);
    const TopK expected = topk(context, whole, k), got = merge(context, in);
    EXPECT_TRUE(same_bits(got.token_ids, expected.token_ids));
    EXPECT_TRUE(log_probs_near(got.log_probs, expected.log_probs, lse_bound(whole)));
    EXPECT_EQ(got.status, expected.status);
    EXPECT_TRUE(lse64_near(got.lse, expected.lse));
    ASSERT_FALSE(HasFailure()) << "K " << k << ", cuts " << testing::PrintToString(cuts);
  }
}

TEST(TopKMerge, KeepsTheFirstOfEqualIds) {
  // Id 7 comes from both shards, and twice from the first: its first logit counts, though others are larger.
  const Shards in = {2, 1, 3, {2.0f, 1.0f, 5.0f, 9.0f, 1.0f, -kInf}, {7, 4, 7, 7, 3, -1}, {3.0, 3.0}};
  const TopK got = merge(TestContext(), in);
  EXPECT_EQ(got.token_ids, (Ints{7, 3, 4}));
  const double lse = 3.0 + std::log(2.0);
  EXPECT_TRUE(log_probs_near(
      got.log_probs, {static_cast<float>(2.0 - lse), static_cast<float>(1.0 - lse), static_cast<float>(1.0 - lse)},
      lse));
}

TEST(TopKMerge, RowsThatAreInvalid) {
  constexpr double kNegative = -std::numeric_limits<double>::infinity();
  const auto row = [&](Floats logits, Ints ids, std::vector<double> lse) {
    const TopK got = merge(TestContext(), {2, 1, 2, logits, ids, lse});
    if (got.status[0] != 0) {
      EXPECT_EQ(got.token_ids, (Ints{-1, -1}));
      EXPECT_EQ(got.log_probs, (Floats{-kInf, -kInf}));
    }
    return got.status[0];
  };
  const Floats good = {1, 0, 1, 0};
  const Ints ids = {0, 1, 2, 3};
  EXPECT_EQ(row(good, ids, {1, 1}), 0);
  EXPECT_EQ(row(good, ids, {1, kNegative}), 0);
  EXPECT_EQ(row(good, ids, {kNegative, kNegative}), KDT_STATUS_ROW_INVALID);
  EXPECT_EQ(row(good, ids, {1, -kNegative}), KDT_STATUS_ROW_INVALID);
  EXPECT_EQ(row(good, ids, {std::nan(""), 1}), KDT_STATUS_ROW_INVALID);
  for (const float bad : {kNaN, kInf}) {
    EXPECT_EQ(row({1, 0, 1, bad}, ids, {1, 1}), KDT_STATUS_ROW_INVALID);
    EXPECT_EQ(row({1, 0, 1, bad}, {0, 1, 2, -1}, {1, 1}), 0) << "padding is not looked at";
  }
  EXPECT_EQ(row({1, 0, 1, -kInf}, ids, {1, 1}), 0) << "-inf is an ordinary logit";
}

// ---- argmax and sampling ---------------------------------------------------------------------------

// Joins the shards' results by the largest value, the first of equal ones.
Chosen joined(const std::vector<Chosen>& shards) {
  Chosen best = shards[0];
  for (const Chosen& shard : shards) {
    for (size_t r = 0; r < best.tokens.size(); ++r) {
      if (shard.values[r] > best.values[r]) {
        best.values[r] = shard.values[r];
        best.tokens[r] = shard.tokens[r];
      }
    }
  }
  return best;
}

TEST(Choice, OfShardsJoinedByValuesIsThatOfTheWhole) {
  const TestContext context;
  std::mt19937 random(29);
  constexpr int32_t kRows = 8, kVocabulary = 1001;
  const Draws draws = {42, Floats(kRows, 0.8f), {0, 1, 2, 3, 4, 5, 6, 7}, {9, 9, 9, 9, -9, -9, -9, 1}};
  for (int i = 0; i < 20; ++i) {
    Floats logits(size_t{kRows} * kVocabulary);
    for (float& v : logits) v = static_cast<float>(random() % 9);
    Ints cuts = {0, kVocabulary};
    for (int s = 0; s < 5; ++s) cuts.push_back(static_cast<int32_t>(random() % kVocabulary));
    std::sort(cuts.begin(), cuts.end());
    std::vector<Chosen> largest, drawn;
    for (size_t s = 0; s + 1 < cuts.size(); ++s) {
      Floats shard;
      for (ptrdiff_t r = 0; r < kRows; ++r) {
        shard.insert(shard.end(), logits.begin() + r * kVocabulary + cuts[s],
                     logits.begin() + r * kVocabulary + cuts[s + 1]);
      }
      Logits part = logits_of(shard, kRows);
      part.id_offset = cuts[s];
      largest.push_back(argmax(context, part));
      drawn.push_back(sample(context, part, draws));
    }
    const Logits whole = logits_of(logits, kRows);
    EXPECT_EQ(joined(largest).tokens, argmax(context, whole).tokens);
    EXPECT_EQ(joined(drawn).tokens, sample(context, whole, draws).tokens);
    EXPECT_TRUE(same_bits(joined(drawn).values, sample(context, whole, draws).values));
    ASSERT_FALSE(HasFailure()) << "cuts " << testing::PrintToString(cuts);
  }
}

TEST(Argmax, OfEveryPatternOfTiesIsTheFirst) {
  const Floats palette = {0.0f, -0.0f, 1.0f, -kInf, kInf, kNaN};
  Floats logits;
  Ints tokens, status;
  for (int pattern = 0; pattern < 6 * 6 * 6 * 6; ++pattern) {
    Floats row;
    for (int rest = pattern, i = 0; i < 4; ++i, rest /= 6) row.push_back(palette[static_cast<size_t>(rest % 6)]);
    const bool nan = std::any_of(row.begin(), row.end(), [](float v) { return std::isnan(v); });
    const bool finite = std::any_of(row.begin(), row.end(), [](float v) { return std::isfinite(v); });
    const auto best = std::max_element(row.begin(), row.end());  // the first of equal ones
    tokens.push_back(nan || !finite ? -1 : static_cast<int32_t>(best - row.begin()));
    status.push_back(nan || !finite ? KDT_STATUS_ROW_INVALID : 0);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  const Chosen got = argmax(TestContext(), logits_of(logits, static_cast<int32_t>(tokens.size())));
  EXPECT_EQ(got.tokens, tokens);
  EXPECT_EQ(got.status, status);
}

// Vectors of the Random123 distribution, philox4x32-10.
TEST(Philox, KnownAnswers) {
  const auto words = [](std::vector<uint32_t> counter, uint64_t key) {
    const kdt::PhiloxBlock block = kdt::philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key);
    return std::vector<uint32_t>(std::begin(block.words), std::end(block.words));
  };
  using Words = std::vector<uint32_t>;
  EXPECT_EQ(words({0, 0, 0, 0}, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t all = 0xffffffff;
  EXPECT_EQ(words({all, all, all, all}, ~uint64_t{0}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

constexpr int32_t kDrawn = 24, kChoices = 500;

// Different rows, each with a request and a position of its own.
struct Batch {
  Logits logits;
  Draws draws;

  Batch() {
    std::mt19937 random(31);
    Floats values(size_t{kDrawn} * kChoices);
    for (float& v : values) v = static_cast<float>(random() % 4096) / 1024.0f;
    logits = logits_of(values, kDrawn);
    draws.seed = 0x0123456789abcdef;
    for (int32_t r = 0; r < kDrawn; ++r) {
      draws.temperatures.push_back(r % 5 == 0 ? 0.0f : 0.3f * static_cast<float>(r % 7 + 1));
      draws.positions.push_back(r / 3 * 1000);
      draws.request_ids.push_back((r % 3 - 1) * int64_t{0x100000001});
    }
  }

  // Rows in another order, some of them again or not at all.
  Batch rows(const Ints& order) const {
    Batch other = *this;
    other.logits.num_rows = static_cast<int32_t>(order.size());
    other.logits.values.clear();
    other.draws.temperatures.clear();
    other.draws.positions.clear();
    other.draws.request_ids.clear();
    for (const int32_t row : order) {
      const size_t r = static_cast<size_t>(row);
      const auto first = logits.values.begin() + row * kChoices * 4;
      other.logits.values.insert(other.logits.values.end(), first, first + kChoices * 4);
      other.draws.temperatures.push_back(draws.temperatures[r]);
      other.draws.positions.push_back(draws.positions[r]);
      other.draws.request_ids.push_back(draws.request_ids[r]);
    }
    return other;
  }
};

TEST(Sample, DependsOnNeitherBatchNorSlot) {
  const TestContext context;
  const Batch batch;
  const Chosen expected = sample(context, batch.logits, batch.draws);
  std::mt19937 random(37);
  for (const size_t size : {size_t{1}, size_t{7}, size_t{kDrawn}, size_t{100}}) {
    Ints order(size);
    for (int32_t& row : order) row = static_cast<int32_t>(random() % kDrawn);
    const Batch other = batch.rows(order);
    const Chosen got = sample(context, other.logits, other.draws);
    for (size_t r = 0; r < size; ++r) {
      EXPECT_EQ(got.tokens[r], expected.tokens[static_cast<size_t>(order[r])]) << "row " << order[r] << " at " << r;
      EXPECT_EQ(got.values[r], expected.values[static_cast<size_t>(order[r])]) << "row " << order[r] << " at " << r;
    }
  }
}

TEST(Sample, DeadRequestsChangeNoOther) {
  const TestContext context;
  Batch batch;
  const Chosen expected = sample(context, batch.logits, batch.draws);
  batch.logits.rows_per_request = 3;
  for (const int32_t live : {-1, 0, 1, 5, 8, 9}) {
    batch.logits.num_live = Ints{live};
    const Chosen got = sample(context, batch.logits, batch.draws), best = argmax(context, batch.logits);
    for (int32_t r = 0; r < kDrawn; ++r) {
      const size_t i = static_cast<size_t>(r);
      EXPECT_EQ(got.tokens[i], r / 3 < live ? expected.tokens[i] : -1) << "row " << r << ", " << live << " live";
      EXPECT_EQ(got.values[i], r / 3 < live ? expected.values[i] : -kInf);
      EXPECT_EQ(got.status[i], 0);
      EXPECT_EQ(best.tokens[i] < 0, r / 3 >= live);
    }
  }
}

// The nodes of a tree, many at each position, draw what a chain draws where its logits are the same.
TEST(Sample, OfATreeIsThatOfAChainAtTheSamePositions) {
  const TestContext context;
  Batch batch;
  batch.draws.request_ids.assign(kDrawn, 77);
  const Ints depths = {0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5}, path = {0, 2, 5, 8, 9, 11};
  Batch tree = batch.rows({0, 1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13});
  tree.draws.temperatures.assign(depths.size(), 1.0f);
  for (size_t i = 0; i < depths.size(); ++i) tree.draws.positions[i] = 100 + depths[i] + 1;
  Batch chain = tree.rows(path);
  const Chosen of_tree = sample(context, tree.logits, tree.draws);
  const Chosen of_chain = sample(context, chain.logits, chain.draws);
  for (size_t i = 0; i < path.size(); ++i) {
    EXPECT_EQ(of_chain.tokens[i], of_tree.tokens[static_cast<size_t>(path[i])]) << "depth " << i;
  }
  // The position is what counts: all nodes of one depth with equal logits draw one token, at other depths others.
  Batch equal = tree.rows(Ints(depths.size(), 3));
  equal.draws.positions = tree.draws.positions;
  const Ints tokens = sample(context, equal.logits, equal.draws).tokens;
  std::map<int32_t, int32_t> by_depth;
  for (size_t i = 0; i < depths.size(); ++i) {
    EXPECT_EQ(by_depth.emplace(depths[i], tokens[i]).first->second, tokens[i]) << "slot " << i;
  }
  EXPECT_GT(std::set<int32_t>(tokens.begin(), tokens.end()).size(), 1u);
}

// Each word of seed, request id and position, and the id, moves the noise.
TEST(Sample, DependsOnEveryWordOfItsKeyAndCounter) {
  const TestContext context;
  const Logits flat = logits_of(Floats(4000, 1.0f), 1);
  const auto drawn = [&](uint64_t seed, int32_t position, int64_t request, int32_t offset = 0) {
    Logits in = flat;
    in.id_offset = offset;
    return sample(context, in, {seed, {1.0f}, {position}, {request}}).tokens[0] - offset;
  };
  const int32_t plain = drawn(1, 2, 3);
  EXPECT_EQ(drawn(1, 2, 3), plain);
  EXPECT_NE(drawn(2, 2, 3), plain);
  EXPECT_NE(drawn(1 + (uint64_t{1} << 32), 2, 3), plain);
  EXPECT_NE(drawn(1, 3, 3), plain);
  EXPECT_NE(drawn(1, 2, 4), plain);
  EXPECT_NE(drawn(1, 2, 3 + (int64_t{1} << 32)), plain);
  EXPECT_NE(drawn(1, 2, 3, 4000), plain);
}

// A temperature as high as can be makes all finite logits equally likely, and -inf never comes.
TEST(Sample, NeverDrawsMinusInfinity) {
  const TestContext context;
  Floats logits(200 * 8, -kInf);
  for (size_t r = 0; r < 200; ++r) logits[r * 8 + 2] = -50.0f, logits[r * 8 + 5] = 50.0f;
  Ints positions(200);
  std::iota(positions.begin(), positions.end(), 0);
  const Chosen got =
      sample(context, logits_of(logits, 200), {5, Floats(200, kInf), positions, std::vector<int64_t>(200, 1)});
  const auto twos = std::count(got.tokens.begin(), got.tokens.end(), 2);
  EXPECT_EQ(twos + std::count(got.tokens.begin(), got.tokens.end(), 5), 200);
  EXPECT_NEAR(static_cast<double>(twos), 100.0, 35.0);  // five standard deviations
}

// ---- Where logits may lie --------------------------------------------------------------------------

// Operations on logits somewhere in memory say the same as on those of guarded arrays.
void expect_same_results(const Logits& in, const void* logits, int64_t stride) {
  const TestContext context;
  constexpr int32_t kBest = 10;
  const size_t rows = static_cast<size_t>(in.num_rows);
  Draws draws = {3, Floats(rows, 1.0f), Ints(rows), std::vector<int64_t>(rows, 5)};
  std::iota(draws.positions.begin(), draws.positions.end(), 1);
  Guarded<float> temperatures({in.num_rows}, draws.temperatures), log_probs({in.num_rows, kBest});
  Guarded<int32_t> positions({in.num_rows}, draws.positions), tokens({in.num_rows}), ids({in.num_rows, kBest});
  Guarded<int64_t> request_ids({in.num_rows});
  request_ids.fill(draws.request_ids);
  const auto set = [&](auto* p) {
    p->num_rows = in.num_rows;
    p->vocab_size = in.vocab_size;
    p->logits_dtype = in.dtype;
    p->logits = logits;
    p->logits_stride = stride;
  };
  auto a = sized<kdt_argmax_params>();
  set(&a);
  a.tokens = tokens.data();
  call(kdt_argmax_workspace_size, kdt_argmax, context, a, {}, {&tokens});
  EXPECT_EQ(tokens.values(), argmax(context, in).tokens);
  auto s = sized<kdt_sample_params>();
  set(&s);
  s.seed = draws.seed;
  s.temperatures = temperatures.data();
  s.positions = positions.data();
  s.request_ids = request_ids.data();
  s.tokens = tokens.data();
  call(kdt_sample_workspace_size, kdt_sample, context, s, {&temperatures, &positions, &request_ids}, {&tokens});
  EXPECT_EQ(tokens.values(), sample(context, in, draws).tokens);
  auto t = sized<kdt_topk_logprobs_params>();
  set(&t);
  t.num_candidates = kBest;
  t.log_probs = log_probs.data();
  t.token_ids = ids.data();
  call(kdt_topk_logprobs_workspace_size, kdt_topk_logprobs, context, t, {}, {&log_probs, &ids});
  const TopK best = topk(context, in, kBest);
  EXPECT_EQ(ids.values(), best.token_ids);
  if (on_cuda()) {  // alignment may choose how sums are split
    EXPECT_TRUE(log_probs_near(log_probs.values(), best.log_probs, lse_bound(in)));
  } else {
    EXPECT_TRUE(same_bits(log_probs.values(), best.log_probs));
  }
}

Logits random_logits(int32_t rows, int32_t vocab_size, int32_t dtype) {
  std::mt19937 random(41);
  Floats values(static_cast<size_t>(rows) * static_cast<size_t>(vocab_size));
  for (float& v : values) v = static_cast<float>(random() % 200);
  return logits_of(values, rows, dtype);
}

// Rows of any length and thus of any alignment; behind the last there is no memory.
TEST(Rows, AreNotReadBeyondTheirEnd) {
  for (const int32_t dtype : {KDT_F32, KDT_BF16}) {
    for (const int32_t vocab_size : {1, 2, 7, 15, 16, 17, 31, 33, 63, 65, 127, 1001, 2047, 2049}) {
      const Logits in = random_logits(3, vocab_size, dtype);
      const AtTheEnd<uint8_t> memory(in.values);
      expect_same_results(in, memory.data(), 0);
      ASSERT_FALSE(HasFailure()) << "V " << vocab_size;
    }
  }
}

// The last row begins beyond 2^32 elements. Wrapped to 32 bits its offset would point to memory that is not there.
TEST(Rows, MayLieBeyond32BitOffsets) {
  constexpr int32_t kRows = 3, kVocabulary = 1000;
  constexpr size_t kStride = (size_t{3} << 30) + 4096, kRowBytes = kVocabulary * 2;
  const SparseMemory memory(kStride * (kRows - 1) * 2 + kRowBytes);
  const Logits in = random_logits(kRows, kVocabulary, KDT_BF16);
  for (size_t r = 0; r < kRows; ++r) {
    memory.put(kStride * r * 2, &in.values[r * kRowBytes], kRowBytes);
  }
  expect_same_results(in, memory.data(), kStride);
}

}  // namespace
