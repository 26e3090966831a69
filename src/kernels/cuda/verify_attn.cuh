// What the kernels of verify_attn share: a request's numbers, masks, results; the kernels' host sides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "../cache.hpp"
#include "common.cuh"
#include "device.hpp"

namespace kdt::cuda {

inline constexpr int32_t kQkDim = 576, kVDim = 512;

// The clamped numbers of one request.
struct AttnRequest {
  int32_t node_count, prefix_len, kv_start;  // of a dead request all 0
  int32_t lacks_rows;                        // some query must see a row that the table or the cache does not hold
};

// What the softmax of one query row has come to, over the rows of one split or of all.
struct State {
  double weight;  // sum of exp(score - max)
  float max;
  int32_t seen;  // the query saw a row
};

// ---- what a query sees -------------------------------------------------------------------------------

__host__ __device__ inline int64_t capacity_of(const kdt_kv_cache& c) {
  return c.block_table != nullptr ? int64_t{c.max_pages} * c.page_size : c.page_size;
}

__device__ inline uint64_t bits_below(int64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// Bits j0..j0+63 of what query i sees of the tree; j0 is a multiple of 64.
__device__ inline uint64_t tree_mask(const kdt_tree& tree, int64_t b, int32_t i, int32_t j0, int32_t node_count) {
  if (j0 >= node_count) return 0;
  const uint64_t limit = bits_below(node_count - j0);
  if (tree.visibility == nullptr) return i < j0 ? 0 : limit & bits_below(i - j0 + 1);
  return limit & tree.visibility[b * tree.visibility_stride + i * tree.visibility_pitch + j0 / 64];
}

// ---- the numbers of a request ------------------------------------------------------------------------

__device__ inline AttnRequest read_request(const kdt_verify_attn_params& p, const kdt_kv_cache& cache,
                                           const kdt_tree& tree, int64_t b, int32_t* status) {
  // Read at once, not one after the other.
  const int32_t prefix_len = p.prefix_lens[b];
  const int32_t node_count = tree.node_count != nullptr ? tree.node_count[b] : p.num_queries;
  const int32_t kv_start = p.kv_starts != nullptr ? p.kv_starts[b] : 0;
  AttnRequest r = {clamped(node_count, 0, p.num_queries, status), 0, 0, 0};
  const int64_t room = min(max(capacity_of(cache) - r.node_count, int64_t{0}), int64_t{INT32_MAX});
  r.prefix_len = clamped(prefix_len, 0, static_cast<int32_t>(room), status);
  r.kv_start = clamped(kv_start, 0, r.prefix_len, status);
  return r;
}

// Of kThreads threads, whole warps, the share of number `thread` in the search for rows that some query must see
// and the cache does not hold.
template <int32_t kThreads>
__device__ bool lacks_rows(const kdt_kv_cache& cache, const kdt_tree& tree, int64_t b, const AttnRequest& r,
                           int32_t thread) {
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  bool lacking = false;
  if (r.node_count == 0) return lacking;
  if (cache.block_table != nullptr && r.kv_start < r.prefix_len) {  // prefix_len is at most the capacity
    const int32_t* table = cache.block_table + b * cache.block_table_stride;
    const int64_t last = (r.prefix_len - 1) / cache.page_size;
#pragma unroll 8
    for (int64_t i = r.kv_start / cache.page_size + thread; i <= last; i += kThreads) {
      const int32_t page = table[i];  // whatever was found before, so that loads do not wait for each other
      lacking |= page < 0 || page >= cache.num_pages;
    }
  }
  for (int32_t j0 = warp * 64; j0 < r.node_count; j0 += kThreads / kWarpSize * 64) {
    uint64_t seen = 0;
    for (int32_t i = lane; i < r.node_count; i += kWarpSize) seen |= tree_mask(tree, b, i, j0, r.node_count);
    const uint32_t halves[2] = {__reduce_or_sync(kAllLanes, static_cast<uint32_t>(seen)),
                                __reduce_or_sync(kAllLanes, static_cast<uint32_t>(seen >> 32))};
    for (int32_t half = 0; half < 2; ++half) {
      if ((halves[half] >> lane & 1) == 0) continue;
      lacking = lacking || row_offset(cache, b, int64_t{r.prefix_len} + j0 + half * 32 + lane) < 0;
    }
  }
  return lacking;
}

// ---- results -----------------------------------------------------------------------------------------

// What the weighted sums of a query row are to be multiplied with.
__device__ inline float normalizer(const State& s) {
  return s.seen != 0 ? static_cast<float>(1.0 / s.weight) : 0.0f;
}

// A query that saw rows, all with score -inf, has a weight of 0 and gets NaN; one that saw none gets 0 and -inf.
__device__ inline void store_lse(const kdt_verify_attn_params& p, int64_t b, int64_t query, int64_t head,
                                 const State& s) {
  float lse = negative_infinity();
  if (s.seen != 0) {
    const double natural = static_cast<double>(s.max) + log(s.weight);
    lse = s.weight == 0.0
              ? quiet_nan()
              : static_cast<float>(p.lse_base == KDT_LSE_BASE2 ? natural * 1.4426950408889634 : natural);
  }
  p.lse[b * p.lse_stride + query * p.lse_row_stride + head * p.lse_head_stride] = lse;
}

__device__ inline void store_out(const kdt_verify_attn_params& p, int64_t index, float value) {
  if (p.out_dtype == KDT_F32) {
    static_cast<float*>(p.out)[index] = value;
  } else if (p.out_dtype == KDT_F16) {
    static_cast<__half*>(p.out)[index] = from_float<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(p.out)[index] = from_float<__nv_bfloat16>(value);
  }
}

__device__ inline int64_t out_index(const kdt_verify_attn_params& p, int64_t b, int64_t query, int64_t head) {
  return b * p.out_stride + query * p.out_row_stride + head * p.out_head_stride;
}

// ---- the kernels -------------------------------------------------------------------------------------

// A call as the kernels take it, structs that the caller's parameters point to included.
struct AttnCall {
  kdt_verify_attn_params p;
  kdt_kv_cache cache;
  kdt_tree tree;  // all NULL without one
};

// verify_attn_plain.cu: float32 arithmetic, every type.
size_t plain_workspace_size(const kdt_context& context, const kdt_verify_attn_params& p);
int32_t enqueue_plain(const Session& session, const AttnCall& call, const AttnRequest* requests, void* workspace);

// verify_attn_mma.cu: warp-wide matrix products, 16-bit types.
size_t mma_workspace_size(const kdt_context& context, const kdt_verify_attn_params& p);
int32_t enqueue_mma(const Session& session, const AttnCall& call, const AttnRequest* requests, void* workspace);

// verify_attn_wgmma.cu: the same on Hopper, in the workspace of verify_attn_mma.cu; it finds the requests' numbers
// itself. Nothing where the driver cannot describe the cache or the queries to the copy engine.
std::optional<int32_t> enqueue_wgmma(const Session& session, const AttnCall& call, void* workspace);

}  // namespace kdt::cuda
