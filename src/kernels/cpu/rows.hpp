// Rows of logits on the CPU: reading them as float32 piece by piece, and which of them are dead.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "floats.hpp"

namespace kdt::cpu {

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();
inline constexpr float kPosInf = std::numeric_limits<float>::infinity();

// Calls use(values, first, count) for consecutive pieces of a row; values[i] is the logit of id first + i.
template <class Use>
void for_each_piece(const void* row, int32_t dtype, int64_t vocab_size, Use&& use) {
  if (dtype == KDT_F32) {
    use(static_cast<const float*>(row), int64_t{0}, vocab_size);
    return;
  }
  constexpr int64_t kPiece = 2048;
  float buffer[kPiece];
  for (int64_t first = 0; first < vocab_size; first += kPiece) {
    const int64_t count = std::min(kPiece, vocab_size - first);
    load_floats(element(row, dtype, first), dtype, count, buffer);
    use(buffer, first, count);
  }
}

// What argmax needs to know of a row.
struct RowMax {
  float largest = kNegInf;  // not counting NaN
  int64_t index = -1;       // where it first is; -1 when nothing is above -inf
  bool nan = false, finite = false;

  bool is_distribution() const { return !nan && finite; }
  float value() const { return nan ? std::numeric_limits<float>::quiet_NaN() : largest; }
};

inline RowMax row_max(const void* row, int32_t dtype, int64_t vocab_size) {
  RowMax m;
  for_each_piece(row, dtype, vocab_size, [&](const float* values, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      m.nan |= std::isnan(values[i]);
      m.finite |= std::isfinite(values[i]);
      if (values[i] > m.largest) {  // strictly: the lowest of equal ones stays
        m.largest = values[i];
        m.index = first + i;
      }
    }
  });
  return m;
}

// Rows from here on are dead.
inline int64_t live_rows(const int32_t* num_live, int32_t num_rows, int32_t rows_per_request) {
  if (num_live == nullptr) return num_rows;
  return int64_t{std::clamp(*num_live, 0, num_rows / rows_per_request)} * rows_per_request;
}

// Rows that stand for about 50 us of work at `ns` nanoseconds a logit.
inline int64_t rows_worth_a_thread(int64_t vocab_size, int64_t ns) { return 1 + 50000 / (1 + vocab_size * ns); }

}  // namespace kdt::cpu
