// Calls of the operations on vocabulary rows, in guarded memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "backend.hpp"
#include "call.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"

namespace kdt_test {

using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

inline int64_t dtype_size(int32_t dtype) { return dtype == KDT_F32 ? 4 : 2; }

// Numbers of a KDT_* dtype as float32.
inline Floats decoded(const Bytes& bytes, int32_t dtype) {
  Floats values(bytes.size() / static_cast<size_t>(dtype_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == KDT_F32) {
      std::memcpy(&values[i], &bytes[i * 4], 4);
      continue;
    }
    uint16_t bits;
    std::memcpy(&bits, &bytes[i * 2], 2);
    if (dtype == KDT_BF16) {
      const uint32_t wide = uint32_t{bits} << 16;
      std::memcpy(&values[i], &wide, 4);
    } else {
      const int exponent = bits >> 10 & 31, fraction = bits & 1023;
      const float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                              : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                               : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
      values[i] = (bits & 0x8000) != 0 ? -magnitude : magnitude;
    }
  }
  return values;
}

// float32 values as float32, or cut off to bfloat16.
inline Bytes encoded(const Floats& values, int32_t dtype) {
  const size_t size = static_cast<size_t>(dtype_size(dtype));
  Bytes bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {  // little endian: the upper half comes last
    std::memcpy(&bytes[i * size], reinterpret_cast<const uint8_t*>(&values[i]) + 4 - size, size);
  }
  return bytes;
}

// An array of a dtype known at run time; dims and strides count elements.
inline Guarded<uint8_t> guarded_bytes(std::vector<int64_t> dims, const Bytes& values, int64_t size,
                                      std::vector<int64_t> strides = {}) {
  dims.back() *= size;
  for (int64_t& stride : strides) stride *= size;
  return Guarded<uint8_t>(dims, values, strides);
}
inline Guarded<uint8_t> guarded_bytes(std::vector<int64_t> dims, int64_t size, std::vector<int64_t> strides = {}) {
  dims.back() *= size;
  for (int64_t& stride : strides) stride *= size;
  return Guarded<uint8_t>(dims, strides);
}

// ---- Inputs ----------------------------------------------------------------------------------------

// What the operations on logits share.
struct Logits {
  int32_t num_rows, vocab_size, dtype = KDT_F32;
  Bytes values;
  int32_t id_offset = 0;
  std::optional<Ints> num_live = {};
  int32_t rows_per_request = 0;
};

inline Logits logits_of(const Floats& values, int32_t num_rows, int32_t dtype = KDT_F32) {
  return {num_rows, static_cast<int32_t>(values.size()) / num_rows, dtype, encoded(values, dtype)};
}

// Fills in the fields that the parameter structs share.
template <class Params>
void set_logits(Params* p, const Logits& in, Guarded<uint8_t>* values, Guarded<int32_t>* num_live, int64_t stride) {
  p->num_rows = in.num_rows;
  p->vocab_size = in.vocab_size;
  p->logits_dtype = in.dtype;
  p->logits = values->data();
  p->logits_stride = stride;
  p->id_offset = in.id_offset;
  p->num_live = in.num_live ? num_live->data() : nullptr;
  p->rows_per_request = in.rows_per_request;
}

// ---- Calls -----------------------------------------------------------------------------------------

struct TopK {
  Floats log_probs;
  Ints token_ids;
  std::vector<double> lse;
  Ints status;
};

inline TopK topk(const kdt_context* context, const Logits& in, int32_t k, bool raw = false,
                 const Variant& way = {}) {
  const int64_t r = in.num_rows, v = in.vocab_size, s = way.slack;
  auto logits = guarded_bytes({r, v}, in.values, dtype_size(in.dtype), {v + s});
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  Guarded<float> log_probs({r, k}, {k + s});
  Guarded<int32_t> token_ids({r, k}, {k + 2 * s}), status({r});
  Guarded<double> lse({r});
  auto p = sized<kdt_topk_logprobs_params>();
  set_logits(&p, in, &logits, &num_live, s > 0 ? v + s : 0);
  p.num_candidates = k;
  p.raw = raw ? 1 : 0;
  p.log_probs = log_probs.data();
  p.log_probs_stride = s > 0 ? k + s : 0;
  p.token_ids = token_ids.data();
  p.token_ids_stride = s > 0 ? k + 2 * s : 0;
  p.lse = raw || way.with_status ? lse.data() : nullptr;
  p.status = way.with_status ? status.data() : nullptr;
  call(kdt_topk_logprobs_workspace_size, kdt_topk_logprobs, context, p, {&logits, &num_live},
       {&log_probs, &token_ids, &lse, &status});
  EXPECT_TRUE(way.with_status || status.unchanged());
  return {log_probs.values(), token_ids.values(), lse.values(), status.values()};
}

struct Shards {
  int32_t num_shards, num_rows, num_candidates;
  Floats logits;
  Ints token_ids;
  std::vector<double> lse;
  std::optional<Ints> num_live = {};
  int32_t rows_per_request = 0;
};

inline TopK merge(const kdt_context* context, const Shards& in, const Variant& way = {}) {
  const int64_t n = in.num_shards, r = in.num_rows, k = in.num_candidates, s = way.slack;
  const int64_t row_a = s > 0 ? k + s : 0, shard_a = s > 0 ? r * row_a + s : 0;
  const int64_t row_b = s > 0 ? k + 2 * s : 0, shard_b = s > 0 ? r * row_b + 3 * s : 0;
  Guarded<float> logits({n, r, k}, in.logits, {shard_a, row_a});
  Guarded<int32_t> shard_ids({n, r, k}, in.token_ids, {shard_b, row_b});
  Guarded<double> shard_lse({n, r}, in.lse, {r + s});
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1)));
  Guarded<float> log_probs({r, k}, {k + s});
  Guarded<int32_t> token_ids({r, k}, {k + 2 * s}), status({r});
  Guarded<double> lse({r});
  auto p = sized<kdt_topk_merge_params>();
  p.num_shards = in.num_shards;
  p.num_rows = in.num_rows;
  p.num_candidates = in.num_candidates;
  p.rows_per_request = in.rows_per_request;
  p.logits = logits.data();
  p.logits_stride = shard_a;
  p.logits_row_stride = row_a;
  p.shard_token_ids = shard_ids.data();
  p.shard_token_ids_stride = shard_b;
  p.shard_token_ids_row_stride = row_b;
  p.shard_lse = shard_lse.data();
  p.shard_lse_stride = s > 0 ? r + s : 0;
  p.log_probs = log_probs.data();
  p.log_probs_stride = s > 0 ? k + s : 0;
  p.token_ids = token_ids.data();
  p.token_ids_stride = s > 0 ? k + 2 * s : 0;
  p.lse = way.with_status ? lse.data() : nullptr;
  p.num_live = in.num_live ? num_live.data() : nullptr;
  p.status = way.with_status ? status.data() : nullptr;
  call(kdt_topk_merge_workspace_size, kdt_topk_merge, context, p, {&logits, &shard_ids, &shard_lse, &num_live},
       {&log_probs, &token_ids, &lse, &status});
  EXPECT_TRUE(way.with_status || (status.unchanged() && lse.unchanged()));
  return {log_probs.values(), token_ids.values(), lse.values(), status.values()};
}

struct Chosen {
  Ints tokens;
  Floats values;
  Ints status;
};

inline Chosen argmax(const kdt_context* context, const Logits& in, const Variant& way = {}) {
  const int64_t r = in.num_rows, v = in.vocab_size, s = way.slack;
  auto logits = guarded_bytes({r, v}, in.values, dtype_size(in.dtype), {v + s});
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1))), tokens({r}), status({r});
  Guarded<float> values({r});
  auto p = sized<kdt_argmax_params>();
  set_logits(&p, in, &logits, &num_live, s > 0 ? v + s : 0);
  p.tokens = tokens.data();
  p.values = way.with_status ? values.data() : nullptr;
  p.status = way.with_status ? status.data() : nullptr;
  call(kdt_argmax_workspace_size, kdt_argmax, context, p, {&logits, &num_live}, {&tokens, &values, &status});
  EXPECT_TRUE(way.with_status || (status.unchanged() && values.unchanged()));
  return {tokens.values(), values.values(), status.values()};
}

// Of each row.
struct Draws {
  uint64_t seed;
  Floats temperatures;
  Ints positions;
  std::vector<int64_t> request_ids;
};

inline Chosen sample(const kdt_context* context, const Logits& in, const Draws& draws, const Variant& way = {}) {
  const int64_t r = in.num_rows, v = in.vocab_size, s = way.slack;
  auto logits = guarded_bytes({r, v}, in.values, dtype_size(in.dtype), {v + s});
  Guarded<float> temperatures({r}, draws.temperatures), values({r});
  Guarded<int32_t> positions({r}, draws.positions), num_live({1}, in.num_live.value_or(Ints(1)));
  Guarded<int64_t> request_ids({r});
  request_ids.fill(draws.request_ids);  // as an argument they would be strides
  Guarded<int32_t> tokens({r}), status({r});
  auto p = sized<kdt_sample_params>();
  set_logits(&p, in, &logits, &num_live, s > 0 ? v + s : 0);
  p.seed = draws.seed;
  p.temperatures = temperatures.data();
  p.positions = positions.data();
  p.request_ids = request_ids.data();
  p.tokens = tokens.data();
  p.values = way.with_status ? values.data() : nullptr;
  p.status = way.with_status ? status.data() : nullptr;
  call(kdt_sample_workspace_size, kdt_sample, context, p,
       {&logits, &temperatures, &positions, &request_ids, &num_live}, {&tokens, &values, &status});
  EXPECT_TRUE(way.with_status || (status.unchanged() && values.unchanged()));
  return {tokens.values(), values.values(), status.values()};
}

// ---- Comparisons -----------------------------------------------------------------------------------

// Equal where the expected value is NaN or infinite, else within a tolerance.
inline testing::AssertionResult near(double got, double expected, double tolerance) {
  const bool same = std::isnan(expected)   ? std::isnan(got)
                    : std::isinf(expected) ? got == expected
                                           : std::abs(got - expected) <= tolerance;
  return same ? testing::AssertionSuccess()
              : testing::AssertionFailure() << got << ", expected " << expected << " within " << tolerance;
}

// lse in float64: GPU kernels may sum exponentials in float32 (see plans/0003-numerics.md).
inline testing::AssertionResult lse64_near(const std::vector<double>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " elements";
  for (size_t i = 0; i < got.size(); ++i) {
    const auto result = near(got[i], expected[i], on_cuda() ? 2e-6 : 1e-9 * std::max(1.0, std::abs(expected[i])));
    if (!result) return testing::AssertionFailure() << "element " << i << " is " << result.message();
  }
  return testing::AssertionSuccess();
}

// Log-probs of rows whose |lse| is at most `lse_bound`.
inline testing::AssertionResult log_probs_near(const Floats& got, const Floats& expected, double lse_bound) {
  if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " elements";
  for (size_t i = 0; i < got.size(); ++i) {
    const double tolerance = 2e-6 + 1e-6 * std::abs(static_cast<double>(expected[i])) + 1.2e-7 * lse_bound;
    const auto result = near(static_cast<double>(got[i]), static_cast<double>(expected[i]), tolerance);
    if (!result) return testing::AssertionFailure() << "element " << i << " is " << result.message();
  }
  return testing::AssertionSuccess();
}

// Of finite numbers.
inline double largest_magnitude(const Floats& values) {
  double largest = 0.0;
  for (const float v : values) {
    if (std::isfinite(v)) largest = std::max(largest, std::abs(static_cast<double>(v)));
  }
  return largest;
}

}  // namespace kdt_test
