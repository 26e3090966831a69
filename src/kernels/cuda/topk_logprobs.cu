// topk_logprobs on CUDA: two kernels, the first over parts of rows, the second over rows; one where a row is one
// part.
//
// Idea: a row is cut into parts, a part into chunks. A block holds a chunk in registers, so that the logits are
// read once: it sums the exponentials (each thread relative to its own largest logit) and picks the logits that may
// be among the K largest. The K-th largest of the threads' own maxima so far, cut to 16 bits, is reached by at
// least K logits of the part and by few more, for the threads share out the part's large logits. What reaches it is
// appended to a list of 64-bit keys (logit, then id), which makes ties exact. The second kernel joins the parts'
// lists and sums, and picks and sorts the K largest keys in the same way.
//
// Where the bound does not help (K above the number of threads, thousands of equal logits) the list fills up and is
// cut down to its K largest as often as it takes: slower, exact all the same.
//
// Sums are float32 within a thread's and a block's share, whose relative errors stay near 1e-7, and float64 across
// parts.
#include <cmath>

#include "key_list.cuh"
#include "launch.hpp"
#include "row_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 5;  // of 8 logits, a thread and chunk
constexpr int kChunk = kThreads * kVectors * kVectorSize;
constexpr int kMaxParts = 16;
constexpr int64_t kPartsPerMultiprocessor = 8;
constexpr int kSmallCapacity = 128;  // keys of a part, unless K is more
constexpr int kListSize = 3072;      // K at most, and a vector of each thread
static_assert(kListSize >= KDT_MAX_CANDIDATES + kThreads * kVectorSize);

using List = KeyList<kThreads, kListSize>;

// What the first kernel leaves of a part.
struct Part {
  float largest, sum;  // sum of exp(logit - largest); NaN when the row has a NaN or +inf
  int32_t count;       // of keys
  int32_t unused;
};

// The workspace: parts, then the keys, `capacity` for each part.
struct Scratch {
  Part* parts;     // [R, num_parts]
  uint64_t* keys;  // [R, num_parts, capacity]
  int32_t num_parts, capacity;
};

// As many as fill the chip a few times, of whole chunks.
int32_t num_parts_of(const kdt_context& context, int32_t num_rows, int32_t vocab_size) {
  const int64_t chunks = (int64_t{vocab_size} + kChunk - 1) / kChunk;
  const int64_t wanted = kPartsPerMultiprocessor * int64_t{context.multiprocessors} / std::max(num_rows, 1);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min({chunks, wanted, int64_t{kMaxParts}})));
}
int32_t capacity_of(const kdt_topk_logprobs_params& p) { return std::max(p.num_candidates, kSmallCapacity); }

__device__ uint64_t* part_keys(const Scratch& scratch, int64_t r, int32_t part) {
  return scratch.keys + (r * scratch.num_parts + part) * scratch.capacity;
}

// exp(a - b) for b = the larger; 1 where both are -inf.
__device__ float rescale(float a, float b) { return a == b ? 1.0f : exp2_fast((a - b) * kLog2E); }

struct Bound {
  alignas(16) uint16_t maxima[kThreads];
  uint32_t prefix;
};

// The largest 16-bit prefix of ordered logits that the maxima of at least k threads reach, 0 when k is more than
// the threads. `largest` is the calling thread's, as ordered bits. For all threads together.
__device__ uint32_t prefix_reached(Bound& bound, uint32_t largest, int32_t k) {
  if (k > kThreads) return 0;
  bound.maxima[threadIdx.x] = static_cast<uint16_t>(largest >> 16);
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    constexpr int kEach = kThreads / kWarpSize;
    static_assert(kEach * sizeof(uint16_t) == sizeof(uint4));
    const uint4 eight = *reinterpret_cast<const uint4*>(&bound.maxima[threadIdx.x * kEach]);
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    uint32_t own[kEach], low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i] = i % 2 == 0 ? pairs[i / 2] & 0xffffu : pairs[i / 2] >> 16;
      low = min(low, own[i]);
      high = max(high, own[i]);
    }
    low = __reduce_min_sync(kAllLanes, low);  // reached by all
    high = __reduce_max_sync(kAllLanes, high) + 1;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      uint32_t reach = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) reach += own[i] >= middle;
      if (__reduce_add_sync(kAllLanes, reach) >= static_cast<uint32_t>(k)) {
        low = middle;
      } else {
        high = middle;
      }
    }
    if (threadIdx.x == 0) bound.prefix = low;
  }
  __syncthreads();
  return bound.prefix;
}

__device__ float logit_at(const kdt_topk_logprobs_params& p, int64_t r, int32_t id) {
  const int64_t at = r * p.logits_stride + id;
  switch (p.logits_dtype) {
    case KDT_F32:
      return static_cast<const float*>(p.logits)[at];
    case KDT_F16:
      return to_float(static_cast<const __half*>(p.logits)[at]);
    default:
      return to_float(static_cast<const __nv_bfloat16*>(p.logits)[at]);
  }
}

// What is left to do when a row's lse is known and its list holds the K largest keys: for all threads together.
__device__ void finish_row(const kdt_topk_logprobs_params& p, int64_t r, bool live, double lse, List& list) {
  const int32_t k = p.num_candidates;
  int32_t status = 0, count = 0;
  if (live) {
    if (isnan(lse) || (p.raw == 0 && isinf(lse))) {
      status = KDT_STATUS_ROW_INVALID;
    } else {
      list.cut(k, max(k, kThreads));
      list.sort();
      count = min(list.count, k);
    }
  }
  const float lse32 = static_cast<float>(lse);
  for (int32_t i = threadIdx.x; i < k; i += kThreads) {
    float value = negative_infinity();
    int32_t id = -1;
    if (i < count) {
      id = static_cast<int32_t>(candidate_id(list.keys[i]));
      // Raw logits as they stand in the row: a key knows -0 as +0.
      value = p.raw != 0 ? logit_at(p, r, id) : fminf(0.0f, candidate_logit(list.keys[i]) - lse32);
      id += p.id_offset;
    }
    p.log_probs[r * p.log_probs_stride + i] = value;
    p.token_ids[r * p.token_ids_stride + i] = id;
  }
  if (threadIdx.x == 0) {
    if (p.lse != nullptr) p.lse[r] = lse;
    if (p.status != nullptr) p.status[r] = status;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) topk_parts_kernel(kdt_topk_logprobs_params p, Scratch scratch) {
  __shared__ List list;
  __shared__ Bound shared_bound;
  __shared__ float warp_largest[kThreads / kWarpSize], warp_sum[kThreads / kWarpSize];
  __shared__ double row_lse;
  trigger_dependents();
  const int tid = threadIdx.x;
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int64_t chunks = (int64_t{p.vocab_size} + kChunk - 1) / kChunk;
  const int32_t k = p.num_candidates;
  const double nothing = -static_cast<double>(positive_infinity());
  for (int64_t item = blockIdx.x; item < int64_t{p.num_rows} * scratch.num_parts; item += gridDim.x) {
    const int64_t r = item / scratch.num_parts;
    if (r >= live) {
      if (scratch.num_parts == 1) finish_row(p, r, false, nothing, list);
      continue;
    }
    const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
    const bool aligned = is_aligned(row);
    float largest = negative_infinity(), sum = 0.0f;  // of this thread
    float bound = negative_infinity();                // reached by k logits of the part, once it is more
    int32_t seen = 0;                                 // chunks
    list.clear();
    for (int64_t chunk = item % scratch.num_parts; chunk < chunks; chunk += scratch.num_parts) {
      const auto first_of = [&](int j) { return chunk * kChunk + (j * kThreads + tid) * int64_t{kVectorSize}; };
      Vector<T> vectors[kVectors];
      if (aligned && (chunk + 1) * kChunk <= p.vocab_size) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) vectors[j] = load_whole_vector(row, first_of(j));
      } else {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) vectors[j] = load_vector(row, first_of(j), p.vocab_size);
      }
      float vector_largest[kVectors];
      float chunk_largest = negative_infinity();
      bool nan = false;  // then the row is bad, and the sum tells so
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        vector_largest[j] = largest_of(vectors[j], &nan);
        chunk_largest = fmaxf(chunk_largest, vector_largest[j]);
      }
      const float top = fmaxf(largest, chunk_largest);
      sum *= rescale(largest, top);
      largest = top;
      // Nothing above -inf: 2^(-inf - 0) = 0, and a NaN stays one. +inf - +inf is NaN.
      const float base = top == negative_infinity() ? 0.0f : top;
      float part = 0.0f;
      if (fabsf(base) <= 65536.0f) {
        const float shift = base * kLog2E;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll
          for (int e = 0; e < kVectorSize; ++e) part += exp2_fast(fmaf(vectors[j][e], kLog2E, -shift));
        }
        part *= exp2f(-fmaf(base, kLog2E, -shift));  // the rounding of the shift put all of them off alike
      } else {                                       // there that would be off by more than a factor can put right
#pragma unroll 1
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll 1
          for (int64_t i = first_of(j); i < min(first_of(j) + kVectorSize, int64_t{p.vocab_size}); ++i) {
            part += exp2_fast((to_float(row[i]) - base) * kLog2E);
          }
        }
      }
      sum += part;
      if (k == 0) continue;

      // A better bound after 1, 2, 4, .. chunks: later ones add little to what the threads have seen.
      ++seen;
      if ((seen & (seen - 1)) == 0) {
        const uint32_t prefix = prefix_reached(shared_bound, ordered_bits(largest), k);
        if (prefix > ordered_bits(negative_infinity()) >> 16) bound = fmaxf(bound, from_ordered_bits(prefix << 16));
      }
      const int32_t listed = list.count;
      __syncthreads();
      // Beyond the row's end there is nothing but -inf, which no other bound lets through.
      if (bound > negative_infinity()) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (vector_largest[j] < bound) continue;
          unsigned reach = 0;
#pragma unroll
          for (int e = 0; e < kVectorSize; ++e) reach |= vectors[j][e] >= bound ? 1u << e : 0u;
          for (; reach != 0; reach &= reach - 1) {
            const int e = __ffs(static_cast<int>(reach)) - 1;
            list.append_if_room(candidate_key(vectors[j].at(e), static_cast<uint32_t>(first_of(j) + e)));
          }
        }
        __syncthreads();
        if (list.count <= kListSize) continue;
        __syncthreads();
        if (tid == 0) list.count = listed;
      }
      // Too many, or nothing is known yet: vector by vector, with a better bound whenever the list is full.
#pragma unroll 1
      for (int j = 0; j < kVectors; ++j) {
        __syncthreads();
        const uint64_t kth = list.cut(k, kListSize - kThreads * kVectorSize);
        if (kth != 0) bound = fmaxf(bound, candidate_logit(kth));  // fmaxf: kth may be below all logits, NaN here
#pragma unroll 1
        for (int64_t i = first_of(j); i < min(first_of(j) + kVectorSize, int64_t{p.vocab_size}); ++i) {
          const float x = to_float(row[i]);
          if (x >= bound) list.append(candidate_key(x, static_cast<uint32_t>(i)));
        }
      }
      __syncthreads();
    }
    const int warp = tid / kWarpSize, lane = tid % kWarpSize;
    float top = largest;
    for (int step = kWarpSize / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    sum *= rescale(largest, top);
    for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane == 0) {
      warp_largest[warp] = top;
      warp_sum[warp] = sum;
    }
    __syncthreads();
    float part_largest = 0.0f, part_sum = 0.0f;
    if (tid == 0) {
      for (int w = 0; w < kThreads / kWarpSize; ++w) top = fmaxf(top, warp_largest[w]);
      sum = 0.0f;
      for (int w = 0; w < kThreads / kWarpSize; ++w) sum += warp_sum[w] * rescale(warp_largest[w], top);
      part_sum = sum;
      part_largest = top;
      // All -inf: 0 there, and -inf here. NaN stays NaN.
      row_lse = sum == 0.0f ? nothing : static_cast<double>(top) + log(static_cast<double>(sum));
    }
    __syncthreads();
    if (scratch.num_parts == 1) {
      finish_row(p, r, true, row_lse, list);
    } else {
      list.cut(k, scratch.capacity);
      if (tid == 0) scratch.parts[item] = {part_largest, part_sum, list.count, 0};
      for (int32_t i = tid; i < list.count; i += kThreads) scratch.keys[item * scratch.capacity + i] = list.keys[i];
    }
    __syncthreads();  // the next item's list comes into the same memory
  }
}

__global__ void __launch_bounds__(kThreads) topk_rows_kernel(kdt_topk_logprobs_params p, Scratch scratch) {
  __shared__ List list;
  __shared__ Bound shared_bound;
  __shared__ double row_lse;
  wait_for_primary();
  const int tid = threadIdx.x;
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int32_t k = p.num_candidates;
  for (int64_t r = blockIdx.x; r < p.num_rows; r += gridDim.x) {
    list.clear();
    double lse = -static_cast<double>(positive_infinity());
    if (r < live) {
      const Part* parts = scratch.parts + r * scratch.num_parts;
      if (tid < kWarpSize) {
        Part part = {negative_infinity(), 0.0f, 0, 0};
        if (tid < scratch.num_parts) part = parts[tid];
        float top = part.largest;
        for (int step = kWarpSize / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
        double sum = part.sum;
        if (part.largest != top) sum *= exp(static_cast<double>(part.largest) - static_cast<double>(top));
        for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        // All -inf: 0 there, and -inf here. NaN stays NaN.
        if (tid == 0) row_lse = sum == 0.0 ? lse : static_cast<double>(top) + log(sum);
      }
      if (k <= kThreads / 2) {  // hold the keys in registers and append what may count
        constexpr int kEach = kMaxParts * kSmallCapacity / kThreads;
        constexpr int kPartThreads = kThreads / kMaxParts;
        const int32_t part = tid / kPartThreads;
        uint64_t keys[kEach];
        uint32_t largest = 0;
        const int32_t n = part < scratch.num_parts ? parts[part].count : 0;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int32_t i = tid % kPartThreads + j * kPartThreads;
          keys[j] = i < n ? part_keys(scratch, r, part)[i] : 0;
          largest = max(largest, static_cast<uint32_t>(keys[j] >> 32));
        }
        const uint32_t prefix = prefix_reached(shared_bound, largest, k);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (keys[j] != 0 && keys[j] >> 48 >= prefix) list.append(keys[j]);
        }
        __syncthreads();
      } else {  // a warp a part, of as many parts at once as the list has room for besides k keys
        const int32_t at_once = min(kThreads / kWarpSize, (kListSize - KDT_MAX_CANDIDATES) / scratch.capacity);
        for (int32_t first = 0; first < scratch.num_parts; first += at_once) {
          list.cut(k, kListSize - at_once * scratch.capacity);
          const int32_t part = first + tid / kWarpSize;
          if (tid / kWarpSize < at_once && part < scratch.num_parts) {
            for (int32_t i = tid % kWarpSize; i < parts[part].count; i += kWarpSize) {
              list.append(part_keys(scratch, r, part)[i]);
            }
          }
          __syncthreads();
        }
      }
      lse = row_lse;
    }
    finish_row(p, r, r < live, lse, list);
    __syncthreads();
  }
}

}  // namespace

size_t workspace_size(const kdt_context& context, const kdt_topk_logprobs_params& p) {
  // Room for the parts of rows that have several, and never less for more rows.
  if (num_parts_of(context, 1, p.vocab_size) == 1) return 0;
  const size_t parts = static_cast<size_t>(std::min(int64_t{p.num_rows} * num_parts_of(context, 1, p.vocab_size),
                                                    kPartsPerMultiprocessor * int64_t{context.multiprocessors}));
  return workspace_for(round_up(parts * sizeof(Part)) +
                       parts * static_cast<size_t>(capacity_of(p)) * sizeof(uint64_t));
}

int32_t enqueue(const Session& session, const kdt_topk_logprobs_params& p, void* workspace) {
  Scratch scratch = {};
  scratch.num_parts = num_parts_of(session.context(), p.num_rows, p.vocab_size);
  scratch.capacity = capacity_of(p);
  const int64_t parts = int64_t{p.num_rows} * scratch.num_parts;
  if (scratch.num_parts > 1) {
    scratch.parts = reinterpret_cast<Part*>(workspace_begin(workspace));
    scratch.keys = reinterpret_cast<uint64_t*>(workspace_begin(workspace) +
                                               round_up(static_cast<size_t>(parts) * sizeof(Part)));
  }
  KDT_TRY(dispatch_dtype(p.logits_dtype, [&](auto zero) {
    return launch_kernel<0>(session, "topk_logprobs", topk_parts_kernel<decltype(zero)>, parts, kThreads,
                            After::kFinished, p, scratch);
  }));
  if (scratch.num_parts == 1) return KDT_OK;
  return launch_kernel<0>(session, "topk_logprobs", topk_rows_kernel, p.num_rows, kThreads, After::kTriggered, p,
                          scratch);
}

}  // namespace kdt::cuda
