// argmax on the CPU: one pass over each row (row_max in rows.hpp).
#include <cstdint>

#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace kdt::cpu {
namespace {

void argmax_row(const kdt_argmax_params& p, int64_t r, bool live) {
  RowMax m;
  if (live) m = row_max(element(p.logits, p.logits_dtype, r * p.logits_stride), p.logits_dtype, p.vocab_size);
  const bool good = live && m.is_distribution();
  p.tokens[r] = good ? static_cast<int32_t>(m.index + p.id_offset) : -1;
  if (p.values != nullptr) p.values[r] = m.value();
  if (p.status != nullptr) p.status[r] = live && !good ? KDT_STATUS_ROW_INVALID : 0;
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
