// topk_logprobs on the CPU: one pass finds the largest logit, bad values and the K best candidates, a second sums
// the exponentials in float64.
//
// A candidate is one 64-bit key, the logit's order-preserving bits above the complement of its id, so that the
// larger key comes first and no two are equal. Candidates above the current threshold go to a buffer of 2K; when it
// is full, the K best stay and the threshold rises. Even on ascending rows that is O(V).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>

#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace kdt::cpu {
namespace {

uint64_t key_of(float logit, int64_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes +0
  const uint32_t order = bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

int64_t id_of(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

class BestK {
 public:
  explicit BestK(int32_t k) : k_(k) {}

  void offer(float logit, int64_t id) {
    const uint64_t key = key_of(logit, id);
    if (key <= threshold_ || k_ == 0) return;
    keys_[count_++] = key;
    if (count_ == 2 * k_) keep_best();
  }

  // The keys in order; their number is returned.
  int32_t finish(const uint64_t** keys) {
    if (count_ > k_) keep_best();
    std::sort(keys_, keys_ + count_, std::greater<>());
    *keys = keys_;
    return count_;
  }

 private:
  void keep_best() {
    std::nth_element(keys_, keys_ + k_ - 1, keys_ + count_, std::greater<>());
    threshold_ = keys_[k_ - 1];
    count_ = k_;
  }

  int32_t k_, count_ = 0;
  uint64_t threshold_ = 0;
  uint64_t keys_[2 * KDT_MAX_CANDIDATES];
};

void topk_row(const kdt_topk_logprobs_params& p, int64_t r, bool live) {
  float* log_probs = p.log_probs + r * p.log_probs_stride;
  int32_t* ids = p.token_ids + r * p.token_ids_stride;
  const void* row = element(p.logits, p.logits_dtype, r * p.logits_stride);
  const int32_t k = p.num_candidates;

  float largest = kNegInf;
  bool bad = false;
  double lse = -std::numeric_limits<double>::infinity();
  const uint64_t* keys = nullptr;
  int32_t count = 0, status = 0;
  BestK best(k);
  if (live) {
    for_each_piece(row, p.logits_dtype, p.vocab_size, [&](const float* values, int64_t first, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        bad |= !(values[i] < kPosInf);
        largest = std::max(largest, values[i]);
        best.offer(values[i], first + i);
      }
    });
    if (bad) {
      lse = std::numeric_limits<double>::quiet_NaN();
    } else if (largest > kNegInf) {
      double sum = 0.0;
      for_each_piece(row, p.logits_dtype, p.vocab_size, [&](const float* values, int64_t, int64_t n) {
        for (int64_t i = 0; i < n; ++i)
          sum += std::exp(static_cast<double>(values[i]) - static_cast<double>(largest));
      });
      lse = static_cast<double>(largest) + std::log(sum);
    }
    if (bad || (p.raw == 0 && largest == kNegInf)) {
      status = KDT_STATUS_ROW_INVALID;
    } else {
      count = best.finish(&keys);
    }
  }
  const float lse32 = static_cast<float>(lse);
  for (int32_t i = 0; i < count; ++i) {
    const int64_t id = id_of(keys[i]);
    const float logit = load_float(row, p.logits_dtype, id);
    log_probs[i] = p.raw != 0 ? logit : std::min(0.0f, logit - lse32);
    ids[i] = static_cast<int32_t>(id + p.id_offset);
  }
  std::fill(log_probs + count, log_probs + k, kNegInf);
  std::fill(ids + count, ids + k, -1);
  if (p.lse != nullptr) p.lse[r] = lse;
  if (p.status != nullptr) p.status[r] = status;
}

}  // namespace

void topk_logprobs(const kdt_context& context, const kdt_topk_logprobs_params& p) {
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  parallel_for(context.num_threads, p.num_rows, rows_worth_a_thread(p.vocab_size, 10),
               [&](int64_t begin, int64_t end, int64_t) {
                 for (int64_t r = begin; r < end; ++r) topk_row(p, r, r < live);
               });
}

}  // namespace kdt::cpu
