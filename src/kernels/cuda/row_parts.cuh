// The largest logit of a row, by parts: shared by argmax and sample.
#pragma once

#include <algorithm>

#include "../context.hpp"
#include "common.cuh"
#include "launch.hpp"
#include "rows.cuh"

namespace kdt::cuda {

inline constexpr int32_t kMaxRowParts = 32;  // a warp joins them

// Blocks that share a row: several where there are too few rows to fill the chip, but each with enough to do.
inline int32_t parts_per_row(const kdt_context& context, int32_t num_rows, int32_t vocab_size) {
  constexpr int64_t kBlocksPerMultiprocessor = 4, kFewestLogits = 8192;
  const int64_t wanted = context.multiprocessors * kBlocksPerMultiprocessor / std::max(num_rows, 1);
  return static_cast<int32_t>(
      std::max<int64_t>(1, std::min({wanted, int64_t{kMaxRowParts}, vocab_size / kFewestLogits})));
}

// Parts to have room for: at least num_rows * parts_per_row where a row has several, and never less for more rows.
inline size_t parts_in_workspace(const kdt_context& context, int32_t num_rows, int32_t vocab_size) {
  if (num_rows == 0 || parts_per_row(context, 1, vocab_size) == 1) return 0;
  return static_cast<size_t>(
      std::min<int64_t>(int64_t{num_rows} * kMaxRowParts, int64_t{context.multiprocessors} * 4));
}

// Puts an operation on the stream: start(parts, num_parts) launches the kernel over parts; where rows have several,
// a warp a row of `join`, in blocks of `threads`, follows it.
template <class Part, class Params, class Start>
int32_t launch_by_parts(const Session& session, const char* what, const Params& p, void* workspace, int32_t threads,
                        void (*join)(Params, const Part*, int32_t), Start&& start) {
  const int32_t num_parts = parts_per_row(session.context(), p.num_rows, p.vocab_size);
  Part* parts = reinterpret_cast<Part*>(workspace_begin(workspace));
  KDT_TRY(start(parts, num_parts));
  if (num_parts == 1) return KDT_OK;
  const int64_t blocks = (int64_t{p.num_rows} * kWarpSize + threads - 1) / threads;
  return launch_kernel<0>(session, what, join, blocks, threads, After::kTriggered, p, parts, num_parts);
}

// One of a row's parts.
__device__ inline VectorRange part_of_row(int64_t vocab_size, int64_t part, int32_t num_parts) {
  const int64_t vectors = (vocab_size + kVectorSize - 1) / kVectorSize;
  const int64_t each = (vectors + num_parts - 1) / num_parts;
  return {min(part * each, vectors), min((part + 1) * each, vectors)};
}

// The largest of a vector, and whether it has a NaN (then the largest is -inf: nothing but the NaN counts).
__device__ inline float largest_of(const Vector<float>& v, bool* nan) {
  float largest = negative_infinity();
#pragma unroll
  for (int e = 0; e < kVectorSize; ++e) {
    largest = fmaxf(largest, v[e]);
    *nan |= isnan(v[e]);
  }
  return largest;
}

// Two at a time; the maximum of a pair with a NaN is NaN.
template <class Pair, class T>
__device__ float largest_of_pairs(const Vector<T>& v, bool* nan) {
  Pair pairs[kVectorSize / 2];
  memcpy(pairs, v.words, sizeof pairs);
  const Pair all = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
  const float low = to_float(all.x), high = to_float(all.y);
  if (isnan(low) || isnan(high)) {
    *nan = true;
    return negative_infinity();
  }
  return fmaxf(low, high);
}
__device__ inline float largest_of(const Vector<__half>& v, bool* nan) { return largest_of_pairs<__half2>(v, nan); }
__device__ inline float largest_of(const Vector<__nv_bfloat16>& v, bool* nan) {
  return largest_of_pairs<__nv_bfloat162>(v, nan);
}

// What a thread remembers of its vectors.
struct ThreadMax {
  float value = negative_infinity();
  int32_t index = INT32_MAX;  // of the first logit of that value
  bool nan = false;

  // Vectors come in ascending order. Returns the vector's largest, as largest_of does.
  template <class T>
  __device__ float add(const Vector<T>& v, int32_t vector) {
    const float largest = largest_of(v, &nan);
    if (largest > value) {
#pragma unroll
      for (int e = kVectorSize - 1; e >= 0; --e) {
        if (v[e] == largest) {
          value = v[e];  // -0 or +0, as it stands there
          index = vector * kVectorSize + e;
        }
      }
    }
    return largest;
  }
};

struct RowMax {
  float value;     // the largest logit, NaN when there is a NaN
  int32_t index;   // the first such logit's, where there is one above -inf
  int32_t finite;  // whether there is a finite logit
};

// What the lanes of a warp found, as one; right in all of them.
__device__ inline void join_lanes(RowMax* found) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, found->value, step);
    const int32_t index = __shfl_xor_sync(kAllLanes, found->index, step);
    found->finite |= __shfl_xor_sync(kAllLanes, found->finite, step);
    if (isnan(value) || value > found->value || (value == found->value && index < found->index)) {
      found->value = value;
      found->index = index;
    }
  }
}

template <int kThreads>
struct RowMaxShared {
  RowMax warps[kThreads / kWarpSize];
};

// The largest logit of a range from what the block's threads remember: for all threads together, right in all.
template <int kThreads, class T>
__device__ RowMax block_max(const ThreadMax& mine, const T* row, int64_t vocab_size, const VectorRange& range,
                            RowMaxShared<kThreads>& shared) {
  constexpr int kWarps = kThreads / kWarpSize;
  RowMax found = {mine.nan ? quiet_nan() : mine.value, mine.index, isfinite(mine.value)};
  join_lanes(&found);
  if (threadIdx.x % kWarpSize == 0) shared.warps[threadIdx.x / kWarpSize] = found;
  __syncthreads();
  found = shared.warps[threadIdx.x % kWarps];
  join_lanes(&found);
  if (found.value == positive_infinity()) {  // rare: look for a finite one
    bool finite = false;
    for (int64_t i = range.begin * kVectorSize + threadIdx.x; i < min(range.end * kVectorSize, vocab_size);
         i += kThreads) {
      finite |= isfinite(to_float(row[i]));
    }
    found.finite = __syncthreads_or(finite);
  }
  __syncthreads();  // shared may be written again
  return found;
}

}  // namespace kdt::cuda
