// sample on the CPU: Gumbel-max with the noise of each token computed from its own Philox counter, in float64.
// One Philox block serves four consecutive ids.
#include <cmath>
#include <cstdint>

#include "../philox.hpp"
#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace kdt::cpu {
namespace {

void sample_row(const kdt_sample_params& p, int64_t r, bool live) {
  int64_t token = -1;
  float value = kNegInf;
  if (live) {
    const void* row = element(p.logits, p.logits_dtype, r * p.logits_stride);
    const float temperature = p.temperatures[r];
    const RowMax m = row_max(row, p.logits_dtype, p.vocab_size);  // also settles what needs no noise
    value = m.value();
    if (m.is_distribution() && temperature >= 0.0f) token = m.index;
    if (token >= 0 && temperature > 0.0f && m.largest < kPosInf) {
      const uint64_t request_id = static_cast<uint64_t>(p.request_ids[r]);
      PhiloxBlock noise = {};
      int64_t noise_block = -1;
      double best = -std::numeric_limits<double>::infinity();
      for_each_piece(row, p.logits_dtype, p.vocab_size, [&](const float* values, int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          if (values[i] == kNegInf) continue;  // never drawn
          const int64_t id = first + i + p.id_offset;
          if (id / 4 != noise_block) {
            noise_block = id / 4;
            noise = philox4x32({{static_cast<uint32_t>(noise_block), static_cast<uint32_t>(p.positions[r]),
                                 static_cast<uint32_t>(request_id), static_cast<uint32_t>(request_id >> 32)}},
                               p.seed);
          }
          const double uniform = (static_cast<double>(noise.words[id % 4]) + 0.5) * 0x1p-32;
          const double score =
              static_cast<double>(values[i]) / static_cast<double>(temperature) - std::log(-std::log(uniform));
          if (score > best) {
            best = score;
            token = first + i;
          }
        }
      });
      value = static_cast<float>(best);
    }
  }
  const bool invalid = live && token < 0;
  p.tokens[r] = token >= 0 ? static_cast<int32_t>(token + p.id_offset) : -1;
  if (p.values != nullptr) p.values[r] = value;
  if (p.status != nullptr) p.status[r] = invalid ? KDT_STATUS_ROW_INVALID : 0;
}

}  // namespace

void sample(const kdt_context& context, const kdt_sample_params& p) {
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  parallel_for(context.num_threads, p.num_rows, rows_worth_a_thread(p.vocab_size, 30),
               [&](int64_t begin, int64_t end, int64_t) {
                 for (int64_t r = begin; r < end; ++r) sample_row(p, r, r < live);
               });
}

}  // namespace kdt::cpu
