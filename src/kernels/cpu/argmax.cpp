// argmax on the CPU: one pass; a strict comparison keeps the lowest id of equal logits.
#include <cmath>
#include <cstdint>

#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace kdt::cpu {
namespace {

void argmax_row(const kdt_argmax_params& p, int64_t r, bool live) {
  float largest = kNegInf;
  int64_t token = -1;
  bool nan = false, finite = false;
  if (live) {
    const void* row = element(p.logits, p.logits_dtype, r * p.logits_stride);
    for_each_piece(row, p.logits_dtype, p.vocab_size, [&](const float* values, int64_t first, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        nan |= std::isnan(values[i]);
        finite |= std::isfinite(values[i]);
        if (values[i] > largest) {
          largest = values[i];
          token = first + i;
        }
      }
    });
  }
  const bool invalid = live && (nan || !finite);
  p.tokens[r] = live && !invalid ? static_cast<int32_t>(token + p.id_offset) : -1;
  if (p.values != nullptr) p.values[r] = nan ? std::numeric_limits<float>::quiet_NaN() : largest;
  if (p.status != nullptr) p.status[r] = invalid ? KDT_STATUS_ROW_INVALID : 0;
}

}  // namespace

void argmax(const kdt_context& context, const kdt_argmax_params& p) {
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  parallel_for(context.num_threads, p.num_rows, rows_worth_a_thread(p.vocab_size, 1),
               [&](int64_t begin, int64_t end, int64_t) {
                 for (int64_t r = begin; r < end; ++r) argmax_row(p, r, r < live);
               });
}

}  // namespace kdt::cpu
