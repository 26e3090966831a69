// merge_attn_states on the CPU: two weights a (row, head), then one pass over the values, in float64.
// Everything of a (row, head) is read before any of it is written, so either side may be the output.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace kdt::cpu {
namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

void merge_one(const kdt_merge_attn_states_params& p, int64_t row, int64_t head, bool live) {
  const double unit = p.lse_base == KDT_LSE_BASE2 ? std::log(2.0) : 1.0;
  const auto natural = [&](const float* lse, int64_t row_stride, int64_t head_stride) {
    const double value = static_cast<double>(lse[row * row_stride + head * head_stride]);
    return std::isinf(value) ? kEmpty : value * unit;  // +inf means empty too
  };
  double lse_a = kEmpty, lse_b = kEmpty;
  if (live) {
    lse_a = natural(p.a_lse, p.a_lse_row_stride, p.a_lse_head_stride);
    lse_b = natural(p.b_lse, p.b_lse_row_stride, p.b_lse_head_stride);
  }
  const bool use_a = lse_a != kEmpty, use_b = lse_b != kEmpty;
  const double top = std::max(lse_a, lse_b);
  const double weight_a = use_a ? std::exp(lse_a - top) : 0.0, weight_b = use_b ? std::exp(lse_b - top) : 0.0;
  const double total = weight_a + weight_b;  // NaN when either lse is
  const double factor_a = weight_a / total, factor_b = weight_b / total;
  const double lse = use_a || use_b ? (top + std::log(total)) / unit : kEmpty;

  const void* a = element(p.a, p.a_dtype, row * p.a_row_stride + head * p.a_head_stride);
  const void* b = element(p.b, p.b_dtype, row * p.b_row_stride + head * p.b_head_stride);
  void* out = element(p.out, p.out_dtype, row * p.out_row_stride + head * p.out_head_stride);
  constexpr int64_t kPiece = 512;
  float values[kPiece];
  double sum[kPiece];
  for (int64_t first = 0; first < p.v_dim; first += kPiece) {
    const int64_t n = std::min<int64_t>(kPiece, p.v_dim - first);
    std::fill_n(sum, n, 0.0);
    if (use_a) {
      load_floats(element(a, p.a_dtype, first), p.a_dtype, n, values);
      for (int64_t d = 0; d < n; ++d) sum[d] += factor_a * static_cast<double>(values[d]);
    }
    if (use_b) {
      load_floats(element(b, p.b_dtype, first), p.b_dtype, n, values);
      for (int64_t d = 0; d < n; ++d) sum[d] += factor_b * static_cast<double>(values[d]);
    }
    for (int64_t d = 0; d < n; ++d) values[d] = static_cast<float>(sum[d]);
    store_floats(values, n, p.out_dtype, element(out, p.out_dtype, first));
  }
  p.lse[row * p.lse_row_stride + head * p.lse_head_stride] = static_cast<float>(lse);
}

}  // namespace

void merge_attn_states(const kdt_context& context, const kdt_merge_attn_states_params& p) {
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int64_t items = int64_t{p.num_rows} * p.num_heads;
  parallel_for(context.num_threads, items, rows_worth_a_thread(p.v_dim, 2),
               [&](int64_t begin, int64_t end, int64_t) {
                 for (int64_t i = begin; i < end; ++i)
                   merge_one(p, i / p.num_heads, i % p.num_heads, i / p.num_heads < live);
               });
}

}  // namespace kdt::cpu
