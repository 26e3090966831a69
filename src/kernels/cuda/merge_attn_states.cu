// merge_attn_states on CUDA: a warp a (row, head).
//
// Idea: bound by memory, so each lane moves eight neighbouring values at a time, with 16-byte vectors when all
// three arrays allow them; types are told apart at run time, which costs nothing beside the loads. A weight is the
// exponential of a difference of two lse, in their own base, so that the larger side's weight is exactly 1; sums
// are float32.
//
// In place is safe: a value is read by the lane that writes it, before it does; lse are read by the whole warp
// before its first lane writes.
//
// Limits: rows of fewer than 256 values leave lanes idle. Weights below 2^-149 are 0.
#include <cstdint>

#include "common.cuh"
#include "launch.hpp"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kVector = 8;  // values a lane takes at a time

// One of the three arrays of values, at one (row, head).
struct Values {
  void* first;
  int32_t dtype;
};

__device__ Values values_at(const void* base, int32_t dtype, int64_t index) {
  const int64_t size = dtype == KDT_F32 ? 4 : 2;
  return {const_cast<char*>(static_cast<const char*>(base)) + index * size, dtype};
}

__device__ float load_value(const Values& v, int64_t d) {
  if (v.dtype == KDT_F32) return static_cast<const float*>(v.first)[d];
  if (v.dtype == KDT_F16) return to_float(static_cast<const __half*>(v.first)[d]);
  return to_float(static_cast<const __nv_bfloat16*>(v.first)[d]);
}

__device__ void store_value(const Values& v, int64_t d, float value) {
  if (v.dtype == KDT_F32) {
    static_cast<float*>(v.first)[d] = value;
  } else if (v.dtype == KDT_F16) {
    static_cast<__half*>(v.first)[d] = from_float<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(v.first)[d] = from_float<__nv_bfloat16>(value);
  }
}

// kVector values as they lie in memory; `high` is theirs when they are float32.
struct Vector {
  uint4 low, high;
};

// d is a multiple of kVector here and in store_vector.
__device__ Vector load_vector(const Values& v, int64_t d) {
  Vector result = {};
  if (v.dtype == KDT_F32) {
    const uint4* source = static_cast<const uint4*>(v.first) + d / 4;
    result = {source[0], source[1]};
  } else {
    result.low = static_cast<const uint4*>(v.first)[d / 8];
  }
  return result;
}

__device__ void expand(const Vector& vector, int32_t dtype, float (&values)[kVector]) {
  const uint32_t low[4] = {vector.low.x, vector.low.y, vector.low.z, vector.low.w};
  const uint32_t high[4] = {vector.high.x, vector.high.y, vector.high.z, vector.high.w};
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    if (dtype == KDT_F32) {
      values[i] = __uint_as_float(low[i]);
      values[4 + i] = __uint_as_float(high[i]);
    } else if (dtype == KDT_F16) {
      values[2 * i] = to_float(__ushort_as_half(static_cast<unsigned short>(low[i])));
      values[2 * i + 1] = to_float(__ushort_as_half(static_cast<unsigned short>(low[i] >> 16)));
    } else {
      values[2 * i] = __uint_as_float(low[i] << 16);
      values[2 * i + 1] = __uint_as_float(low[i] & 0xffff0000u);
    }
  }
}

__device__ uint32_t narrow_pair(float first, float second, int32_t dtype) {
  if (dtype == KDT_F16) {
    return __half_as_ushort(from_float<__half>(first)) |
           static_cast<uint32_t>(__half_as_ushort(from_float<__half>(second))) << 16;
  }
  return __bfloat16_as_ushort(from_float<__nv_bfloat16>(first)) |
         static_cast<uint32_t>(__bfloat16_as_ushort(from_float<__nv_bfloat16>(second))) << 16;
}

__device__ void store_vector(const Values& v, int64_t d, const float (&values)[kVector]) {
  if (v.dtype == KDT_F32) {
    float4* target = static_cast<float4*>(v.first) + d / 4;
    target[0] = make_float4(values[0], values[1], values[2], values[3]);
    target[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else {
    static_cast<uint4*>(v.first)[d / 8] =
        make_uint4(narrow_pair(values[0], values[1], v.dtype), narrow_pair(values[2], values[3], v.dtype),
                   narrow_pair(values[4], values[5], v.dtype), narrow_pair(values[6], values[7], v.dtype));
  }
}

// The share of each side; of an empty side 0, and `use` says so. NaN when an lse is.
struct Shares {
  bool use_a, use_b;
  float a, b, lse;
};

__device__ Shares share(float lse_a, float lse_b, bool base2) {
  Shares s = {!isinf(lse_a), !isinf(lse_b), 0.0f, 0.0f, negative_infinity()};
  if (!s.use_a && !s.use_b) return s;
  const auto power = [&](float x) { return base2 ? exp2f(x) : expf(x); };
  const float top = !s.use_b ? lse_a : !s.use_a ? lse_b : fmaxf(lse_a, lse_b);  // of a NaN and a number, the number
  const float weight_a = s.use_a ? power(lse_a - top) : 0.0f, weight_b = s.use_b ? power(lse_b - top) : 0.0f;
  const float total = weight_a + weight_b;
  s.a = weight_a / total;
  s.b = weight_b / total;
  s.lse = top + (base2 ? log2f(total) : logf(total));
  return s;
}

// fmaf after a product is the sum of both sides; a side that is not in use is not multiplied, it may be anything.
__device__ float merged(const Shares& s, float a, float b) {
  const float sum = s.use_a ? s.a * a : 0.0f;
  return s.use_b ? fmaf(s.b, b, sum) : sum;
}

__global__ void __launch_bounds__(kThreads) merge_states(const kdt_merge_attn_states_params p, bool vectors) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % kWarpSize);
  const int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize;
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int64_t items = int64_t{p.num_rows} * p.num_heads;
  const int64_t in_vectors = vectors ? p.v_dim / kVector * kVector : 0;

  for (int64_t item = warp; item < items; item += int64_t{gridDim.x} * kWarps) {
    const int64_t row = item / p.num_heads, head = item % p.num_heads;
    float lse_a = negative_infinity(), lse_b = negative_infinity();
    if (row < live) {
      lse_a = p.a_lse[row * p.a_lse_row_stride + head * p.a_lse_head_stride];
      lse_b = p.b_lse[row * p.b_lse_row_stride + head * p.b_lse_head_stride];
    }
    const Shares s = share(lse_a, lse_b, p.lse_base == KDT_LSE_BASE2);
    __syncwarp();  // all lanes have read the lse that the first one may write
    if (lane == 0) p.lse[row * p.lse_row_stride + head * p.lse_head_stride] = s.lse;

    const Values a = values_at(p.a, p.a_dtype, row * p.a_row_stride + head * p.a_head_stride);
    const Values b = values_at(p.b, p.b_dtype, row * p.b_row_stride + head * p.b_head_stride);
    const Values out = values_at(p.out, p.out_dtype, row * p.out_row_stride + head * p.out_head_stride);
    for (int64_t d = int64_t{lane} * kVector; d < in_vectors; d += kWarpSize * kVector) {
      const Vector raw_a = s.use_a ? load_vector(a, d) : Vector{};
      const Vector raw_b = s.use_b ? load_vector(b, d) : Vector{};
      float of_a[kVector], of_b[kVector];
      expand(raw_a, a.dtype, of_a);
      expand(raw_b, b.dtype, of_b);
#pragma unroll
      for (int32_t i = 0; i < kVector; ++i) of_a[i] = merged(s, of_a[i], of_b[i]);
      store_vector(out, d, of_a);
    }
    for (int64_t d = in_vectors + lane; d < p.v_dim; d += kWarpSize) {
      const float of_a = s.use_a ? load_value(a, d) : 0.0f;
      const float of_b = s.use_b ? load_value(b, d) : 0.0f;
      store_value(out, d, merged(s, of_a, of_b));
    }
  }
}

// Whether every (row, head) of an array starts at a multiple of 16 bytes.
bool allows_vectors(const void* base, int32_t dtype, int64_t row_stride, int64_t head_stride) {
  const int64_t unit = 16 / float_dtype_size(dtype);
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_stride % unit == 0 && head_stride % unit == 0;
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_merge_attn_states_params&) { return 0; }

int32_t enqueue(const Session& session, const kdt_merge_attn_states_params& p, void*) {
  const bool vectors = allows_vectors(p.a, p.a_dtype, p.a_row_stride, p.a_head_stride) &&
                       allows_vectors(p.b, p.b_dtype, p.b_row_stride, p.b_head_stride) &&
                       allows_vectors(p.out, p.out_dtype, p.out_row_stride, p.out_head_stride);
  const int64_t items = int64_t{p.num_rows} * p.num_heads;
  return launch_kernel<0>(session, "merge_attn_states", merge_states, (items + kWarps - 1) / kWarps, kThreads,
                          After::kFinished, p, vectors);
}

}  // namespace kdt::cuda
