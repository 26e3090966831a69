// float16 and bfloat16 as bits, and float32: exact widening, rounding to nearest even.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "../args.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cpu {

// Always inlined, so that loops compiled for one instruction set (attn_tile.cpp) leave no function of theirs
// behind.
[[gnu::always_inline]] inline float float_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

[[gnu::always_inline]] inline float float_from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, magnitude = uint32_t{bits & 0x7fffu} << 13;
  // Exponent bias 15 to 127 by a multiplication, which is right for subnormals too; then infinity and NaN.
  uint32_t result = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if (magnitude >= 0x7c00u << 13) result |= 0x7f800000u;
  return std::bit_cast<float>(sign | result);
}

inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline uint16_t f16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: 0.5 has the float16 subnormals' unit as its last place
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3f000000u));
  }
  magnitude += 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u) >> 13);
}

// n numbers of a KDT_* dtype at `source`, as float32.
inline void load_floats(const void* source, int32_t dtype, int64_t n, float* result) {
  const uint16_t* halves = static_cast<const uint16_t*>(source);
  if (dtype == KDT_F32) {
    std::memcpy(result, source, static_cast<size_t>(n) * sizeof(float));
  } else if (dtype == KDT_BF16) {
    for (int64_t i = 0; i < n; ++i) result[i] = float_from_bf16(halves[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) result[i] = float_from_f16(halves[i]);
  }
}

inline float load_float(const void* source, int32_t dtype, int64_t index) {
  float result;
  load_floats(static_cast<const char*>(source) + index * float_dtype_size(dtype), dtype, 1, &result);
  return result;
}

inline void store_floats(const float* source, int64_t n, int32_t dtype, void* result) {
  uint16_t* halves = static_cast<uint16_t*>(result);
  if (dtype == KDT_F32) {
    std::memcpy(result, source, static_cast<size_t>(n) * sizeof(float));
  } else if (dtype == KDT_BF16) {
    for (int64_t i = 0; i < n; ++i) halves[i] = bf16_from_float(source[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) halves[i] = f16_from_float(source[i]);
  }
}

// Start of a strided array's element, for arrays whose dtype is a run-time value.
inline const void* element(const void* base, int32_t dtype, int64_t index) {
  return static_cast<const char*>(base) + index * float_dtype_size(dtype);
}
inline void* element(void* base, int32_t dtype, int64_t index) {
  return static_cast<char*>(base) + index * float_dtype_size(dtype);
}

}  // namespace kdt::cpu
