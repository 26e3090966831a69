// Which kernel a verify_attn takes, and its sizes, by chip. Apart from the kernels, so that a number can be changed
// for one chip with its reason beside it. But for Hopper's the numbers are by reasoning so far, not by timing.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "../context.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cuda {

// A part of a tile's cache rows is at least so many blocks: each part costs its query rows' loading, 128 KB of
// partial results written, and their reading.
inline constexpr int32_t kFewestBlocks = 2;

// Beyond this many bytes of cache rows the tiles of a request are worked on in step, so that its rows come from
// device memory once: half of the L2 cache of an H200 (50 MB), a quarter of that of an RTX PRO 6000 (128 MB).
inline constexpr int64_t kInStepBytes = int64_t{25} << 20;
// On Hopper always: a block then has one piece of work where it can, and a second one costs it some 20 us of
// loading queries and storing results (plans/0007-verify-attn-wgmma.md).
inline constexpr int64_t kInStepBytesHopper = 0;
// ... unless that leaves more than this share of the multiprocessors without work.
inline constexpr float kMostIdle = 0.15f;

// Up to this many bytes of cache rows, of all requests, they are the first to leave Hopper's L2 cache, so that
// partial results stay there and, where the same rows are read again and again, so does a share of them: twice the
// L2 cache of an H200. With more, the tiles of a request, which share its rows, come to be further apart.
inline constexpr int64_t kStreamBytesHopper = int64_t{100} << 20;

// Whether the tensor-core kernel takes a call: 16-bit types, cache rows of 16-byte units, pairs of query columns,
// and a scale that leaves float32 room: it subtracts before it multiplies.
inline bool takes_mma(const kdt_context& context, const kdt_verify_attn_params& p) {
  if (context.attention == AttentionKernel::kPlain || p.q_dtype == KDT_F32) return false;
  const kdt_kv_cache& cache = *p.cache;
  const bool rows = reinterpret_cast<uintptr_t>(cache.data) % 16 == 0 && cache.row_stride % 8 == 0 &&
                    cache.page_stride % 8 == 0 && cache.row_stride / 8 <= UINT32_MAX &&
                    cache.page_stride / 8 <= UINT32_MAX;
  const bool queries = reinterpret_cast<uintptr_t>(p.q) % 4 == 0 && p.q_head_stride % 2 == 0 &&
                       p.q_row_stride % 2 == 0 && p.q_stride % 2 == 0;
  const bool scale = std::fabs(p.scale) >= 1e-30f && std::fabs(p.scale) <= 1e30f;
  return rows && queries && scale;
}

// Whether the query rows of a request lie at one distance from each other.
inline bool has_flat_queries(const kdt_verify_attn_params& p) {
  return p.num_queries == 1 || p.num_heads == 1 || p.q_row_stride == p.num_heads * p.q_head_stride;
}

// Whether Hopper's does. It runs where code for sm_90a is in the library and on the chip, copies query rows in
// units of 16 bytes and pages by boxes of 8 rows or more, and leaves scores their sign.
inline bool takes_wgmma(const kdt_context& context, const kdt_verify_attn_params& p) {
  constexpr bool kCompiled = std::string_view(KDT_CUDA_ARCHITECTURES).find("sm_90a") != std::string_view::npos;
  if (!kCompiled || context.kernel_architecture != 90 || context.attention == AttentionKernel::kMma) return false;
  const bool queries = reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_head_stride % 8 == 0 &&
                       p.q_row_stride % 8 == 0 && p.q_stride % 8 == 0 &&
                       (has_flat_queries(p) || p.num_heads % 8 == 0);
  return queries && p.scale > 0.0f && (p.cache->block_table == nullptr || p.cache->page_size >= 8) &&
         takes_mma(context, p);
}

}  // namespace kdt::cuda
