// The inner loops of verify_attn on the CPU, for each instruction set: products of a tile of query rows with a
// block of cache rows, the softmax between them.
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace kdt::cpu {

inline constexpr int32_t kQkDim = 576, kVDim = 512;
inline constexpr int32_t kTile = 32;   // query rows
inline constexpr int32_t kBlock = 64;  // cache rows: one mask word

// float32 throughout. Matrices are row-major, rows of q at kQkDim, of scores at kBlock, of sums at kVDim.
struct AttnTile {
  // scores[r][c] = <q[r], keys[c]>, for query rows 0..count-1, count a multiple of 4.
  void (*multiply)(const float* q, const float* const* keys, int32_t count, float* scores);
  // sums[r] += sum over c of weights[r][c] keys[c][0..kVDim-1].
  void (*add)(const float* weights, const float* const* keys, int32_t count, float* sums);
  // The same for one row, to the bit, of the keys of `mask` alone: the others may be anything.
  void (*add_some)(const float* weights, const float* const* keys, uint64_t mask, float* sums);
  // x[i] *= factor for the bits of `mask`, -inf for the others. Returns the largest of these and `least`, apart
  // from NaN; *nan says whether there is one.
  float (*scale_and_mask)(float* x, uint64_t mask, float factor, float least, bool* nan);
  // x[i] = exp(x[i] - top) for the bits of `mask`, 0 for the others; returns their sum. x - top <= 0, no NaN.
  // Relative error at most 2.5e-7; 0 below exp(-87.3).
  double (*exponentiate)(float* x, uint64_t mask, float top);
  // All of them are neither infinite nor NaN.
  bool (*are_finite)(const float* x, int32_t count);
  // y[i] *= factor
  void (*scale)(float* y, int32_t count, float factor);
  // 16-bit values to float32.
  void (*widen_bf16)(const uint16_t* from, int32_t count, float* to);
  void (*widen_f16)(const uint16_t* from, int32_t count, float* to);
};

const AttnTile& attn_tile(Isa isa);

}  // namespace kdt::cpu
