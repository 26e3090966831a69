// verify_attn on CUDA in float32 arithmetic: every type and shape, every chip from sm_80 on. It serves float32 and
// what the fast kernels do not take (rows that are not aligned to 16 bytes), and is what those are tested against.
//
// Idea: blocked attention with an online softmax (FlashAttention, arXiv 2205.14135), the rows of the cache split
// over blocks (Flash-Decoding). Two kernels:
//
// - attend: a block takes a tile of 16 query rows (query-major, head-minor) and a split. It walks over its share of
//   the cache in blocks of 16 rows, prefix first, then the tree, whose blocks start anew at slot 0.
// - combine: a warp a query row joins the splits in their order. Not launched when there is one.
//
// The number of splits follows from shapes alone, the rows of each from the lengths on the device.
//
// In attend a block of the cache is expanded to float32 in shared memory. Products of queries and keys: a warp has
// 8 x 4 of them, each lane adds up a 32nd of the 576 columns, and the lanes then add up theirs. Softmax: half a
// warp a query row. Values: a thread has two columns of all 16 rows. Every 32 blocks their running sums are folded
// into totals, so that float32 sums stay short: by the usual sqrt(n) estimate 262,144 rows in one are off by some
// 1e-5.
//
// A masked entry has weight 0, and 0 * NaN is NaN: cache rows that the tile does not see are never loaded, and a
// block that holds a NaN or infinity takes a slower path that skips masked entries.
//
// Limits: 76 KB of shared memory, so one block a multiprocessor on the chips with 99 KB; no matrix instructions and
// no copies in flight while it computes: this is the plain version that fast ones are tested against. Workspace:
// when there are splits, 32 KB for each of at most four tiles a multiprocessor.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "launch.hpp"
#include "verify_attn.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kTile = 16;                     // query rows a tile
constexpr int32_t kBlock = 16;                    // cache rows a block
constexpr int32_t kBlocksPerFold = 32;            // blocks between foldings into the totals
constexpr int32_t kThreads = 256;                 // two value columns a thread
constexpr int32_t kWarps = kThreads / kWarpSize;  // two query rows a warp in the softmax
constexpr int32_t kDotRows = 8, kDotColumns = 4;  // products a warp: one a lane, once they are added up
constexpr int64_t kTilesPerMultiprocessor = 2;    // wanted, by splitting
constexpr int64_t kMinSplitRows = 256;            // cache rows that are worth a split
static_assert(kVDim == 2 * kThreads && kTile == 2 * kWarps && kBlock == kWarpSize / 2);
static_assert(kDotRows * kDotColumns == kWarpSize && kDotRows * kDotColumns * kWarps == kTile * kBlock);

// The partial results of one tile and split.
struct Partial {
  State states[kTile];
  float values[kTile][kVDim];  // weighted sums; left unwritten when no query of the tile saw a row
};

__device__ bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// ---- attend ------------------------------------------------------------------------------------------

struct Shared {
  float q[kTile][kQkDim];
  float rows[kBlock][kQkDim];       // keys; their first 512 columns are the values
  float weights[kBlock][kTile];     // by cache row, so that a thread reads those of four query rows at once
  float scores[kTile][kBlock + 1];  // before the scale
  float factors[kTile];             // of the sums so far, when a maximum rose; at the end the normalizers
  int32_t loaded[kBlock];           // whether the row was seen by some query and is in the cache
};

// One warp: expands a row to float32. True when this lane met no NaN and no infinity.
template <class T>
__device__ bool load_row(const T* source, float* target, int32_t lane) {
  bool finite = true;
  if (reinterpret_cast<uintptr_t>(source) % sizeof(uint4) == 0) {
    constexpr int32_t kVector = sizeof(uint4) / sizeof(T);
#pragma unroll
    for (int32_t i = lane; i < kQkDim / kVector; i += kWarpSize) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(source) + i);
      T values[kVector];
      memcpy(values, &raw, sizeof raw);
#pragma unroll
      for (int32_t k = 0; k < kVector; ++k) {
        target[i * kVector + k] = to_float(values[k]);
        finite = finite && is_finite(to_float(values[k]));
      }
    }
  } else {
    for (int32_t d = lane; d < kQkDim; d += kWarpSize) {
      target[d] = to_float(source[d]);
      finite = finite && is_finite(target[d]);
    }
  }
  return finite;
}

__device__ void clear_row(float* target, int32_t lane) {
  for (int32_t d = lane; d < kQkDim; d += kWarpSize) target[d] = 0.0f;
}

// Adds up 32 values over the lanes of a warp: in the end lane l has the total of values[l] in values[0]. Each step
// halves what a lane is in charge of.
template <int32_t kStep = kWarpSize / 2>
__device__ void add_up_transposed(float (&values)[kWarpSize], int32_t lane) {
  const bool upper = (lane & kStep) != 0;
#pragma unroll
  for (int32_t i = 0; i < kStep; ++i) {
    const float kept = upper ? values[i + kStep] : values[i];
    const float given = upper ? values[i] : values[i + kStep];
    values[i] = kept + __shfl_xor_sync(kAllLanes, given, kStep);
  }
  if constexpr (kStep > 1) add_up_transposed<kStep / 2>(values, lane);
}

// One warp: its share of the products of all query rows with all cache rows.
__device__ void dot_products(Shared& s, int32_t warp, int32_t lane) {
  const int32_t row = warp / (kBlock / kDotColumns) * kDotRows,
                column = warp % (kBlock / kDotColumns) * kDotColumns;
  float sums[kWarpSize] = {};
#pragma unroll 3
  for (int32_t step = 0; step < kQkDim / (2 * kWarpSize); ++step) {
    const int32_t d = (step * kWarpSize + lane) * 2;
    float2 keys[kDotColumns];
#pragma unroll
    for (int32_t c = 0; c < kDotColumns; ++c) keys[c] = *reinterpret_cast<const float2*>(&s.rows[column + c][d]);
#pragma unroll
    for (int32_t r = 0; r < kDotRows; ++r) {
      const float2 query = *reinterpret_cast<const float2*>(&s.q[row + r][d]);
#pragma unroll
      for (int32_t c = 0; c < kDotColumns; ++c) {
        float& sum = sums[r * kDotColumns + c];
        sum = fmaf(query.y, keys[c].y, fmaf(query.x, keys[c].x, sum));
      }
    }
  }
  add_up_transposed(sums, lane);
  s.scores[row + lane / kDotColumns][column + lane % kDotColumns] = sums[0];
}

// Half a warp: turns the scores of one query row into weights and carries its state on. `mask` has the cache rows
// that it sees; lane is that in the half.
__device__ void soften(Shared& s, State* state, int32_t row, int32_t lane, uint32_t mask, float scale) {
  constexpr int32_t kHalf = kWarpSize / 2;
  const bool seen = (mask >> lane & 1) != 0;
  const float score = s.scores[row][lane] * scale;
  float top = seen ? score : negative_infinity();
  float nans = seen && isnan(score) ? 1.0f : 0.0f;
#pragma unroll
  for (int32_t step = kHalf / 2; step > 0; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));  // of a NaN and a number, the number
    nans += __shfl_xor_sync(kAllLanes, nans, step);
  }
  top = fmaxf(top, state->max);
  const bool broken = nans != 0.0f || top == positive_infinity();  // softmax has no value
  if (broken) top = state->max;
  const float factor = top == state->max ? 1.0f : expf(state->max - top);
  // Scores of -inf alone leave a maximum of -inf, and weights of 0.
  float weight = seen && top != negative_infinity() ? expf(score - top) : 0.0f;
  if (broken) weight = quiet_nan();
  s.weights[lane][row] = weight;
  if (lane == 0) s.factors[row] = factor;
#pragma unroll
  for (int32_t step = kHalf / 2; step > 0; step /= 2) weight += __shfl_xor_sync(kAllLanes, weight, step);
  state->weight = state->weight * static_cast<double>(factor) + static_cast<double>(weight);
  state->max = top;
  state->seen |= mask != 0;
}

// Adds the weighted values of two columns to the sums of all query rows. Lane r of each warp has row r's mask,
// which counts only when kSkip: what a query does not see is then left out, instead of multiplied with 0.
template <bool kSkip>
__device__ void add_values(const Shared& s, int32_t column, uint32_t mask, float2 (&sums)[kTile]) {
#pragma unroll 4
  for (int32_t c = 0; c < kBlock; ++c) {
    const float2 value = *reinterpret_cast<const float2*>(&s.rows[c][column]);
#pragma unroll
    for (int32_t r0 = 0; r0 < kTile; r0 += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&s.weights[c][r0]);
      const float weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int32_t r = 0; r < 4; ++r) {
        if (kSkip && (__shfl_sync(kAllLanes, mask, r0 + r) >> c & 1) == 0) continue;
        sums[r0 + r].x = fmaf(weights[r], value.x, sums[r0 + r].x);
        sums[r0 + r].y = fmaf(weights[r], value.y, sums[r0 + r].y);
      }
    }
  }
}

// partials == nullptr: there is one split, and its results are final.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attend(const kdt_verify_attn_params p, const kdt_kv_cache cache, const kdt_tree tree,
           const AttnRequest* requests, Partial* partials, int64_t tiles, int64_t splits) {
  extern __shared__ float4 dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int64_t query_rows = int64_t{p.num_queries} * p.num_heads;
  const T* q = static_cast<const T*>(p.q);

  for (int64_t work = blockIdx.x; work < p.batch_size * tiles * splits; work += gridDim.x) {
    const int64_t split = work % splits, b = work / splits / tiles, first = work / splits % tiles * kTile;
    const AttnRequest request = requests[b];
    const auto is_row = [&](int32_t r) { return first + r < query_rows; };
    const auto query_of = [&](int32_t r) { return static_cast<int32_t>((first + r) / p.num_heads); };
    const auto head_of = [&](int32_t r) { return static_cast<int32_t>((first + r) % p.num_heads); };

    __syncthreads();  // the tile before this one is done with shared memory
    for (int32_t r = warp; r < kTile; r += kWarps) {
      if (is_row(r) && query_of(r) < request.node_count) {
        load_row(q + b * p.q_stride + query_of(r) * p.q_row_stride + head_of(r) * p.q_head_stride, s.q[r], lane);
      } else {
        clear_row(s.q[r], lane);
      }
    }

    // Lanes 0..15 of every warp look after the masks of the 16 query rows, half a warp after the state of one.
    const int32_t mask_query = lane < kTile && is_row(lane) ? query_of(lane) : p.num_queries;
    const bool has_mask = mask_query < request.node_count;
    const int32_t state_row = warp * 2 + lane / kBlock;
    State state = {0.0, negative_infinity(), 0};
    float2 sums[kTile], totals[kTile];
#pragma unroll
    for (int32_t r = 0; r < kTile; ++r) sums[r] = totals[r] = make_float2(0.0f, 0.0f);
    int32_t since_fold = 0;

    const int64_t prefix_blocks = (int64_t{request.prefix_len} - request.kv_start + kBlock - 1) / kBlock;
    const int64_t blocks = prefix_blocks + (request.node_count + kBlock - 1) / kBlock;
    const bool any = __ballot_sync(kAllLanes, has_mask) != 0;  // some query of the tile is a node
    const int64_t end = any ? blocks * (split + 1) / splits : 0;
    for (int64_t block = blocks * split / splits; block < end; ++block) {
      int64_t row0;  // the block's first logical row
      uint32_t mask = 0;
      if (block < prefix_blocks) {
        row0 = request.kv_start + block * kBlock;
        if (has_mask) mask = static_cast<uint32_t>(bits_below(min(int64_t{kBlock}, request.prefix_len - row0)));
      } else {
        const int32_t j0 = static_cast<int32_t>(block - prefix_blocks) * kBlock;
        row0 = int64_t{request.prefix_len} + j0;
        if (has_mask) {
          const uint64_t word = tree_mask(tree, b, mask_query, j0 / 64 * 64, request.node_count);
          mask = static_cast<uint32_t>(word >> (j0 % 64) & bits_below(kBlock));
        }
      }
      const uint32_t wanted = __reduce_or_sync(kAllLanes, mask);
      if (wanted == 0) continue;  // the same in every warp

      __syncthreads();  // the block before this one has been used
      bool finite = true;
      for (int32_t c = warp; c < kBlock; c += kWarps) {
        const int64_t offset = (wanted >> c & 1) != 0 ? row_offset(cache, b, row0 + c) : -1;
        if (offset >= 0) {
          finite = load_row(static_cast<const T*>(cache.data) + offset, s.rows[c], lane) && finite;
        } else {
          clear_row(s.rows[c], lane);
        }
        if (lane == 0) s.loaded[c] = offset >= 0;
      }
      finite = __syncthreads_and(finite) != 0;

      dot_products(s, warp, lane);
      mask &= __ballot_sync(kAllLanes, lane < kBlock && s.loaded[lane % kBlock] != 0);
      __syncthreads();

      soften(s, &state, state_row, lane % kBlock, __shfl_sync(kAllLanes, mask, state_row), p.scale);
      __syncthreads();

#pragma unroll
      for (int32_t r = 0; r < kTile; ++r) {
        const float factor = s.factors[r];
        if (factor == 1.0f) continue;
        sums[r] = make_float2(sums[r].x * factor, sums[r].y * factor);
        totals[r] = make_float2(totals[r].x * factor, totals[r].y * factor);
      }
      if (finite) {
        add_values<false>(s, thread * 2, mask, sums);
      } else {
        add_values<true>(s, thread * 2, mask, sums);
      }
      if (++since_fold == kBlocksPerFold) {
        since_fold = 0;
#pragma unroll
        for (int32_t r = 0; r < kTile; ++r) {
          totals[r] = make_float2(totals[r].x + sums[r].x, totals[r].y + sums[r].y);
          sums[r] = make_float2(0.0f, 0.0f);
        }
      }
    }
#pragma unroll
    for (int32_t r = 0; r < kTile; ++r) {
      totals[r] = make_float2(totals[r].x + sums[r].x, totals[r].y + sums[r].y);
    }

    if (partials != nullptr) {
      Partial& partial = partials[work];
      if (lane % kBlock == 0) partial.states[state_row] = state;
      if (__syncthreads_or(state.seen) == 0) continue;
#pragma unroll
      for (int32_t r = 0; r < kTile; ++r) {
        *reinterpret_cast<float2*>(&partial.values[r][thread * 2]) = totals[r];
      }
    } else {
      __syncthreads();  // the last block's factors have been used
      if (lane % kBlock == 0) {
        s.factors[state_row] = normalizer(state);
        if (is_row(state_row)) store_lse(p, b, query_of(state_row), head_of(state_row), state);
      }
      __syncthreads();
#pragma unroll
      for (int32_t r = 0; r < kTile; ++r) {
        if (!is_row(r)) continue;
        const int64_t at = out_index(p, b, query_of(r), head_of(r)) + thread * 2;
        store_out(p, at, totals[r].x * s.factors[r]);
        store_out(p, at + 1, totals[r].y * s.factors[r]);
      }
    }
  }
}

// ---- combine -----------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    combine(const kdt_verify_attn_params p, const Partial* partials, int64_t tiles, int64_t splits) {
  constexpr int32_t kColumns = kVDim / kWarpSize;  // a lane's: neighbours lie in neighbouring lanes
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t query_rows = int64_t{p.num_queries} * p.num_heads;
  const int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize;

  for (int64_t item = warp; item < p.batch_size * query_rows; item += int64_t{gridDim.x} * kWarps) {
    const int64_t b = item / query_rows, row = item % query_rows;
    const Partial* splits_of_tile = partials + (b * tiles + row / kTile) * splits;
    State total = {0.0, negative_infinity(), 0};
    for (int64_t i = 0; i < splits; ++i) total.max = fmaxf(total.max, splits_of_tile[i].states[row % kTile].max);

    float sums[kColumns] = {};
    for (int64_t i = 0; i < splits; ++i) {
      const State state = splits_of_tile[i].states[row % kTile];
      if (state.seen == 0) continue;
      const float factor = state.max == total.max ? 1.0f : expf(state.max - total.max);
      const float* values = splits_of_tile[i].values[row % kTile];
#pragma unroll
      for (int32_t k = 0; k < kColumns; ++k) sums[k] = fmaf(factor, values[k * kWarpSize + lane], sums[k]);
      total.weight += static_cast<double>(factor) * state.weight;
      total.seen = 1;
    }

    const int64_t query = row / p.num_heads, head = row % p.num_heads;
    const float factor = normalizer(total);
    const int64_t at = out_index(p, b, query, head);
#pragma unroll
    for (int32_t k = 0; k < kColumns; ++k) store_out(p, at + k * kWarpSize + lane, sums[k] * factor);
    if (lane == 0) store_lse(p, b, query, head, total);
  }
}

// ---- launching ---------------------------------------------------------------------------------------

// How a call is cut up, from its shapes and the device's size.
struct Plan {
  int64_t tiles;     // of a request
  int64_t splits;    // of a tile
  int64_t partials;  // to make room for; never less for a larger call
};

Plan plan_of(const kdt_context& context, const kdt_verify_attn_params& p) {
  Plan plan = {};
  plan.tiles = (int64_t{p.num_queries} * p.num_heads + kTile - 1) / kTile;
  const int64_t all_tiles = p.batch_size * plan.tiles;
  const int64_t wanted = kTilesPerMultiprocessor * context.multiprocessors;
  const int64_t most_splits = std::max<int64_t>(1, capacity_of(*p.cache) / kMinSplitRows);
  plan.splits = std::min(most_splits, (wanted + all_tiles - 1) / all_tiles);
  if (most_splits >
      1) {  // n tiles times ceil(wanted / n) are less than n + wanted, and from n = wanted on not split
    const int64_t split_tiles = std::min(all_tiles, wanted);
    plan.partials = std::min(split_tiles * most_splits, split_tiles + wanted);
  }
  return plan;
}

}  // namespace

size_t plain_workspace_size(const kdt_context& context, const kdt_verify_attn_params& p) {
  return static_cast<size_t>(plan_of(context, p).partials) * sizeof(Partial);
}

int32_t enqueue_plain(const Session& session, const AttnCall& call, const AttnRequest* requests, void* workspace) {
  const kdt_verify_attn_params& p = call.p;
  const Plan plan = plan_of(session.context(), p);
  Partial* partials = plan.splits > 1 ? static_cast<Partial*>(workspace) : nullptr;
  KDT_TRY(dispatch_dtype(p.q_dtype, [&](auto type) {
    return launch_kernel<sizeof(Shared)>(session, "verify_attn", attend<decltype(type)>,
                                         p.batch_size * plan.tiles * plan.splits, kThreads, After::kFinished, p,
                                         call.cache, call.tree, requests, partials, plan.tiles, plan.splits);
  }));
  if (partials == nullptr) return KDT_OK;
  const int64_t query_rows = int64_t{p.batch_size} * p.num_queries * p.num_heads;
  return launch_kernel<0>(session, "verify_attn, splits", combine, (query_rows + kWarps - 1) / kWarps, kThreads,
                          After::kFinished, p, partials, plan.tiles, plan.splits);
}

}  // namespace kdt::cuda
