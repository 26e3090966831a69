// topk_merge on the CPU: collect a row's entries in (shard, place) order, drop repeated ids, sort the rest.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"
#include "workspace.hpp"

namespace kdt::cpu {
namespace {

struct Entry {
  int32_t id;
  int32_t place;  // shard * K + rank
  float logit;
};

void merge_row(const kdt_topk_merge_params& p, int64_t r, bool live, Entry* entries) {
  float* log_probs = p.log_probs + r * p.log_probs_stride;
  int32_t* ids = p.token_ids + r * p.token_ids_stride;
  const int32_t k = p.num_candidates;

  double lse = -std::numeric_limits<double>::infinity();
  int32_t count = 0, status = 0;
  if (live) {
    bool bad = false;
    double largest = lse;
    for (int64_t s = 0; s < p.num_shards; ++s) {
      const double shard_lse = p.shard_lse[s * p.shard_lse_stride + r];
      bad |= !(shard_lse < std::numeric_limits<double>::infinity());
      largest = std::max(largest, shard_lse);
      const float* logits = p.logits + s * p.logits_stride + r * p.logits_row_stride;
      const int32_t* shard_ids =
          p.shard_token_ids + s * p.shard_token_ids_stride + r * p.shard_token_ids_row_stride;
      for (int32_t i = 0; i < k; ++i) {
        if (shard_ids[i] < 0) continue;
        bad |= !(logits[i] < kPosInf);
        entries[count++] = {shard_ids[i], static_cast<int32_t>(s * k + i), logits[i]};
      }
    }
    if (bad || largest == lse) {
      lse = bad ? std::numeric_limits<double>::quiet_NaN() : lse;
      status = KDT_STATUS_ROW_INVALID;
      count = 0;
    } else {
      double sum = 0.0;
      for (int64_t s = 0; s < p.num_shards; ++s) sum += std::exp(p.shard_lse[s * p.shard_lse_stride + r] - largest);
      lse = largest + std::log(sum);
    }
  }
  std::sort(entries, entries + count,
            [](const Entry& a, const Entry& b) { return a.id != b.id ? a.id < b.id : a.place < b.place; });
  count = static_cast<int32_t>(
      std::unique(entries, entries + count, [](const Entry& a, const Entry& b) { return a.id == b.id; }) - entries);
  std::sort(entries, entries + count,
            [](const Entry& a, const Entry& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
  count = std::min(count, k);
  for (int32_t i = 0; i < count; ++i) {
    log_probs[i] = std::min(0.0f, entries[i].logit - static_cast<float>(lse));
    ids[i] = entries[i].id;
  }
  std::fill(log_probs + count, log_probs + k, kNegInf);
  std::fill(ids + count, ids + k, -1);
  if (p.lse != nullptr) p.lse[r] = lse;
  if (p.status != nullptr) p.status[r] = status;
}

}  // namespace

size_t topk_merge_workspace_size(const kdt_context& context, const kdt_topk_merge_params& p) {
  const size_t entries = static_cast<size_t>(p.num_shards) * static_cast<size_t>(p.num_candidates);
  const size_t threads = static_cast<size_t>(std::min(context.num_threads, p.num_rows));
  return p.num_rows == 0 ? 0 : workspace_for(threads * entries * sizeof(Entry));
}

void topk_merge(const kdt_context& context, const kdt_topk_merge_params& p, void* workspace) {
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int64_t entries = int64_t{p.num_shards} * p.num_candidates;
  Entry* all = reinterpret_cast<Entry*>(workspace_begin(workspace));
  parallel_for(context.num_threads, p.num_rows, rows_worth_a_thread(entries, 100),
               [&](int64_t begin, int64_t end, int64_t worker) {
                 for (int64_t r = begin; r < end; ++r) merge_row(p, r, r < live, all + worker * entries);
               });
}

}  // namespace kdt::cpu
