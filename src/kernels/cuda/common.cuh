// What the kernels share: types of logits, ordering floats as integers, dead requests, warps and blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kdtree/kdtree.h"

namespace kdt::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

inline constexpr int32_t kMaxSlots = KDT_MAX_BUDGET + 1;  // N

__device__ inline float negative_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }
__device__ inline float positive_infinity() { return __int_as_float(0x7f800000); }
__device__ inline float quiet_nan() { return __int_as_float(0x7fc00000); }

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Calls use(T()) with the C++ type of a KDT_* dtype, which the entry has checked.
template <class Use>
auto dispatch_dtype(int32_t dtype, Use&& use) {
  switch (dtype) {
    case KDT_F32:
      return use(float());
    case KDT_F16:
      return use(__half());
    default:
      return use(__nv_bfloat16());
  }
}

// A float's bits as an unsigned integer in the same order; -0 and +0 become one. NaN has no place in the order.
__device__ inline uint32_t ordered_bits(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits ^ (static_cast<int32_t>(bits) < 0 ? 0xffffffffu : 0x80000000u);
}

__device__ inline float from_ordered_bits(uint32_t order) {
  return __uint_as_float(order ^ (static_cast<int32_t>(order) < 0 ? 0x80000000u : 0xffffffffu));
}

// Requests from here on are dead; rows from rows_per_request times that on.
__device__ inline int64_t live_requests(const int32_t* num_live, int64_t batch_size) {
  if (num_live == nullptr) return batch_size;
  const int64_t live = *num_live;
  return live < 0 ? 0 : live < batch_size ? live : batch_size;
}
__device__ inline int64_t live_rows(const int32_t* num_live, int64_t num_rows, int32_t rows_per_request) {
  if (num_live == nullptr) return num_rows;
  return live_requests(num_live, num_rows / rows_per_request) * rows_per_request;
}

// Clamps a number read from an array and notes in *status that it had to.
__device__ inline int32_t clamped(int32_t value, int32_t low, int32_t high, int32_t* status) {
  if (value < low || value > high) *status |= KDT_STATUS_CLAMPED;
  return min(max(value, low), high);
}

// Programmatic dependent launch, of use from Hopper on. A kernel that others may follow early calls
// trigger_dependents(); one launched After::kTriggered calls wait_for_primary(), in every thread, before it reads
// what the kernel before it wrote and before it ends. See launch.hpp.
__device__ inline void trigger_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kdt::cuda
