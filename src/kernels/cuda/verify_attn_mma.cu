// verify_attn on the tensor cores of every chip from sm_80 on (mma.sync, cp.async), for 16-bit types.
//
// Idea: FlashAttention-2 (arXiv 2307.08691) shaped for MLA, whose rows are too wide for the usual layout: 64 query
// rows take 72 KB as operands and 128 KB as float32 results, and the block has 99 KB of shared memory. So both stay
// in registers (but for a sixth of the operands), and shared memory holds little but the cache rows in flight:
//
// - A block has 64 query rows (query-major, head-minor) as two groups of 32, four warps each. The groups share the
//   cache blocks of 32 rows, but are otherwise apart: one's softmax hides behind the other's products.
// - Queries times keys: a pair of warps has 16 of the query rows, each warp half of the 576 columns, so that a
// query
//   value is in one thread only. They swap sums through shared memory, so that each has eight query rows; lanes
//   keep their places in the fragments, and nothing is shuffled.
// - Softmax in base 2. The maximum that is subtracted follows the true one only when that has risen by more than
// 2^8
//   (as in FlashAttention-4), which spares most rescalings of the results.
// - Weights times values: each warp has all 32 query rows and a quarter of the 512 columns, 128 results a thread.
// - Loads: the group that finishes a cache block last loads the next one into its place. Nobody waits for the
// other.
//
// The cache rows of a tile of query rows are split over blocks by a plan that every block makes for itself from the
// lengths on the device: all work in one line, cut evenly into as many parts as there are multiprocessors. The line
// runs tile by tile; where the cache is large, all tiles of a request run in step instead (Cut). Tiles that are cut
// write float32 partial results, which `combine` joins in their order.
//
// Blocks of 32 cache rows start at kv_start and run through prefix and tree; only those that reach into the tree
// are masked, and those that no query row of the tile sees are left out. A masked entry has weight 0, and 0 * NaN
// is NaN: rows that the tile does not see are not loaded (zeros stand for them), and where a masked block holds a
// NaN or infinity that counts as 0 in the products. Then `poison` writes NaN where a query sees one: its weight is
// NaN, or 0 for a score of -inf, so NaN is what the product would have given.
//
// Limits: cache rows in units of 16 bytes, query rows of 4 (else verify_attn_plain.cu). Registers (252 to 255)
// allow one block a multiprocessor. 98 KB of shared memory. Workspace: up to 257 KB a multiprocessor.
//
// Tried and lost (plans/0006-verify-attn-mma.md has the figures): each warp a quarter of the columns of all 32
// query rows (three times the sums to swap, too many registers: spills, operands not loaded ahead); rows copied in
// bulk by one warp (the copies of a warp are issued one after another, while seven warps wait); rows padded to
// 1,168 bytes instead of swizzled; five cache blocks in flight; finding the next rows' places ahead, in one warp or
// in all; the 128-byte L2 hint of cp.async.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "mma.cuh"
#include "verify_attn_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kGroups = 2, kGroupRows = kTile / kGroups;
constexpr int32_t kStages = 2;  // blocks in flight or in use
constexpr int32_t kBlock = 32;  // cache rows a step
constexpr int32_t kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
constexpr int32_t kWarps = kGroups * kGroupWarps, kThreads = kWarps * kWarpSize;
constexpr int32_t kStageBytes = kBlock * kRowBytes;
constexpr int32_t kQSteps = kQkDim / 16 / 2;           // 16-column steps of the first product, a warp
constexpr int32_t kQShared = 3;                        // of them in shared memory instead of registers
constexpr int32_t kVSteps = kVDim / 16 / kGroupWarps;  // 16-column pieces of the second's result, a warp
using TheBlocks = Blocks<kBlock, false, kInStepBytes>;
using Work = WorkOf<TheBlocks>;
constexpr int32_t kMaxMasked = TheBlocks::kMaxMasked;
constexpr int32_t kFoldEvery = 64;  // blocks between foldings of RowState::recent into weight

// What load_block() needs of it.
struct alignas(16) Loading {
  uint32_t request;
  uint32_t first_row;         // of the first block
  int32_t unmasked;           // blocks
  uint32_t first_masked_row;  // of the first masked block
};

// The cache as load_block() addresses it, in units of 16 bytes.
struct Where {
  const uint4* data;
  const int32_t* table;  // nullptr: contiguous
  int64_t table_stride;
  uint32_t page_stride, row_stride, num_pages;
  uint32_t page_shift, row_mask;
};

struct Shared {
  alignas(128) unsigned char stages[kStages][kStageBytes];  // 16-byte chunk c of row r at c ^ (r % 8)
  float4 inbox[kWarps][2][kWarpSize];  // sums over the other half of the columns, from a warp's partner
  // Of the eight query rows of a warp: pairs of cache rows, eight rows each.
  uint32_t weights[kGroups][kGroupWarps][4][kWarpSize];
  uint4 queries[kWarps][kQShared][kWarpSize];
  float factors[kGroups][kGroupRows];  // of the sums so far, when a maximum rose; at the end the normalizers
  uint32_t unions[kMaxMasked];         // what the tile sees of each masked block
  int32_t wanted[kMaxMasked];          // those of which it sees something, counted from the first masked one
  uint32_t finished[kStages];          // warps that are through with a stage, ever
  alignas(8) uint64_t full[kStages];
  int64_t sums[kWarps];
  Cut cut;
  Share share;
  Work work;
  Loading loading;
};

// Adds up the blocks of all requests. All threads.
__device__ int64_t count_blocks(Shared& s, const AttnRequest* requests, int64_t batch_size) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  int64_t blocks = 0;
  for (int64_t b = thread; b < batch_size; b += kThreads) blocks += TheBlocks::count(requests[b]);
  blocks = sum_of_lanes(blocks);
  if (thread % kWarpSize == 0) s.sums[thread / kWarpSize] = blocks;
  __syncthreads();
  blocks = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) blocks += s.sums[warp];
  return blocks;
}

// Sets s.work to the first piece of a part; all threads.
__device__ void find_first_work(Shared& s, const AttnRequest* requests, int64_t batch_size, const Cut& cut,
                                const Share& share) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int64_t wanted = share.begin - share.tile * cut.blocks;
  int64_t before = 0;
  for (int64_t first = 0; first < batch_size; first += kThreads) {
    const int64_t b = first + thread;
    const int64_t own = b < batch_size ? int64_t{cut.length(TheBlocks::count(requests[b]))} : 0;
    const int64_t sum = sum_up_to_lane(own);
    __syncthreads();  // the sums before these have been read
    if (lane == kWarpSize - 1) s.sums[thread / kWarpSize] = sum;
    __syncthreads();
    int64_t all = 0, of_warps_before = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp == thread / kWarpSize) of_warps_before = all;
      all += s.sums[warp];
    }
    const int64_t offset = before + of_warps_before + sum - own;
    if (offset <= wanted && wanted < offset + own) {
      s.work.offset = offset;
      s.work.set(requests[b], b, cut, share.tile, share.begin, share.end);
    }
    before += all;
  }
}

// A thread's place: its warp in the group, its row and column in the fragments (mma.cuh).
struct Place {
  int32_t group, warp, lane, g, t;
};

__device__ Place place_of(int32_t thread) {
  const int32_t lane = thread % kWarpSize;
  return {thread / kGroupThreads, thread / kWarpSize % kGroupWarps, lane, lane / 4, lane % 4};
}
// The same value, of which the compiler does not know that: what is derived from it in a loop stays there, instead
// of taking registers around it.
__device__ int32_t opaque(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ int32_t fragment_row(const Place& at, int32_t m, int32_t half) { return m * 16 + half * 8 + at.g; }
__device__ int32_t fragment_column(const Place& at, int32_t n) {
  return (n / 2 * kGroupWarps + at.warp) * 16 + n % 2 * 8 + at.t * 2;
}

// Works out which masked blocks some query row of the tile sees; all threads. A tile without nodes sees none at
// all.
__device__ void find_wanted(Shared& s, const kdt_verify_attn_params& p, const kdt_kv_cache& cache,
                            const kdt_tree& tree) {
  Work& w = s.work;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int32_t first_row = w.tile * kTile, end_row = min(first_row + kTile, w.node_rows(p.num_heads));
  const int32_t masked = w.end - w.first_masked;
  for (int32_t m = thread / kWarpSize; m < masked; m += kWarps) {
    uint32_t seen = 0;
    for (int32_t i = first_row / p.num_heads + lane; i * p.num_heads < end_row; i += kWarpSize) {
      seen |= seen_bits(tree, w.b, i, w.first_slot(w.first_masked + m), w.request.node_count);
    }
    seen = __reduce_or_sync(kAllLanes, seen);
    const int64_t there = capacity_of(cache) - w.first_row(w.first_masked + m);  // rows beyond count as unseen
    if (lane == 0) s.unions[m] = there <= 0 ? 0 : seen & static_cast<uint32_t>(bits_below(there));
  }
  __syncthreads();
  if (thread < kWarpSize) {
    int32_t wanted = 0;
    for (int32_t base = 0; base < masked; base += kWarpSize) {
      const bool mine = base + lane < masked && s.unions[base + lane] != 0;
      const unsigned lanes = __ballot_sync(kAllLanes, mine);
      if (mine) s.wanted[wanted + __popc(lanes & ((1u << lane) - 1))] = base + lane;
      wanted += __popc(lanes);
    }
    if (lane == 0) {
      w.unmasked = first_row < end_row ? w.first_masked - w.first : 0;
      w.count = w.unmasked + wanted;
      s.loading = {static_cast<uint32_t>(w.b), static_cast<uint32_t>(w.first_row(w.first)), w.unmasked,
                   static_cast<uint32_t>(w.first_row(w.first_masked))};
    }
  }
}

__device__ int32_t block_at(const Shared& s, int32_t i) {
  return i < s.work.unmasked ? s.work.first + i : s.work.first_masked + s.wanted[i - s.work.unmasked];
}

// What the query row of a lane's softmax sees of a masked block. One warp.
__device__ uint32_t mask_of(const Shared& s, const kdt_verify_attn_params& p, const kdt_kv_cache& cache,
                            const kdt_tree& tree, const Place& at, int32_t block) {
  const Work& w = s.work;
  const int32_t row = w.tile * kTile + at.group * kGroupRows + at.warp * 8 + at.g;
  uint32_t mask = 0;
  if (row < w.node_rows(p.num_heads)) {
    mask = seen_bits(tree, w.b, row / p.num_heads, w.first_slot(block), w.request.node_count);
  }
  if (w.request.lacks_rows != 0) {
    mask &= __ballot_sync(kAllLanes, row_offset(cache, w.b, w.first_row(block) + at.lane) >= 0);
  }
  return mask;
}

// One group loads the i-th block of its work, eight threads a row. Rows that the tile does not see or that are not
// there become zeros.
__device__ void load_block(uint32_t memory, const Where& where, int32_t i, uint32_t stage) {
  constexpr int32_t kThreadsPerRow = 8, kRowsAtOnce = kGroupThreads / kThreadsPerRow, kLoads = kBlock / kRowsAtOnce;
  const int32_t thread = opaque(static_cast<int32_t>(threadIdx.x)) % kGroupThreads;
  const int32_t lane = thread % kThreadsPerRow, first = thread / kThreadsPerRow;
  const uint4 what = load_shared_uint4(memory + offsetof(Shared, loading));  // as Loading has it
  const uint32_t request = what.x;
  uint32_t row = what.y + static_cast<uint32_t>(i) * kBlock + first, seen = ~0u;
  if (const int32_t masked = i - static_cast<int32_t>(what.z); masked >= 0) {
    const uint32_t m = load_shared(memory + offsetof(Shared, wanted) + masked * 4);
    row = what.w + m * kBlock + first;
    seen = load_shared(memory + offsetof(Shared, unions) + m * 4);
  }
  const uint32_t full = memory + offsetof(Shared, full) + stage * 8;
  const uint32_t target = memory + stage * kStageBytes + first * kRowBytes + ((lane ^ first % 8) * 16);
  uint32_t pages[kLoads];
#pragma unroll
  for (int32_t k = 0; k < kLoads; ++k) {
    pages[k] = request;
    if (where.table != nullptr && (seen >> (first + k * kRowsAtOnce) & 1) != 0) {
      pages[k] = static_cast<uint32_t>(
          where.table[request * where.table_stride + ((row + k * kRowsAtOnce) >> where.page_shift)]);
    }
  }
#pragma unroll
  for (int32_t k = 0; k < kLoads; ++k) {
    const bool present = (seen >> (first + k * kRowsAtOnce) & 1) != 0 && pages[k] < where.num_pages;
    const uint4* source = where.data;
    if (present) {
      source += static_cast<uint64_t>(pages[k]) * where.page_stride +
                static_cast<uint64_t>((row + k * kRowsAtOnce) & where.row_mask) * where.row_stride + lane;
    }
#pragma unroll
    for (int32_t c = 0; c < kRowBytes / 16; c += kThreadsPerRow) {
      copy_async(target + k * kRowsAtOnce * kRowBytes + c * 16, source + c, present);
    }
  }
  arrive_after_copies(full);
}

// This thread's share of the search of a group for a NaN or infinity in a block.
template <class T>
__device__ bool holds_nonfinite(const unsigned char* stage) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kGroupThreads;
  bool found = false;
#pragma unroll 2
  for (int32_t i = thread; i < kBlock * kVDim / 8; i += kGroupThreads) {  // 16 bytes each
    const uint4 chunk = *reinterpret_cast<const uint4*>(stage + i / (kVDim / 8) * kRowBytes + i % (kVDim / 8) * 16);
    found |= finite_or_zero<T>(chunk.x) != chunk.x || finite_or_zero<T>(chunk.y) != chunk.y ||
             finite_or_zero<T>(chunk.z) != chunk.z || finite_or_zero<T>(chunk.w) != chunk.w;
  }
  return found;
}

// ---- attend ------------------------------------------------------------------------------------------

// The results of a warp: 32 query rows by eight pieces of 16 columns, piece j from column 16 (4 j + warp) on.
using Results = float[2][2 * kVSteps][4];

// Weights times values, from where this lane's share of them begins (see attend). With kFiniteOnly a NaN or
// infinity counts as 0.
template <class T, bool kFiniteOnly>
__device__ void add_values(uint32_t weights_at, uint32_t values_at, Results& results) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    uint32_t weights[2][4];
#pragma unroll
    for (int32_t m = 0; m < 2; ++m) {
#pragma unroll
      for (int32_t k = 0; k < 4; ++k) {
        constexpr int32_t kWords = 4 * kWarpSize;  // of a warp
        weights[m][k] = load_shared(weights_at + ((m * 2 + k % 2) * kWords + (2 * h + k / 2) * kWarpSize) * 4);
      }
    }
#pragma unroll
    for (int32_t j = 0; j < kVSteps; ++j) {
      uint32_t values[4];
      load_matrices<true>(values, values_at + h * 16 * kRowBytes + j * 128);
      if (kFiniteOnly) {
#pragma unroll
        for (int32_t k = 0; k < 4; ++k) values[k] = finite_or_zero<T>(values[k]);
      }
#pragma unroll
      for (int32_t m = 0; m < 2; ++m) {
        multiply_add<T>(results[m][2 * j], weights[m], values[0], values[1]);
        multiply_add<T>(results[m][2 * j + 1], weights[m], values[2], values[3]);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ kdt_verify_attn_params p, const __grid_constant__ kdt_kv_cache cache,
           const __grid_constant__ kdt_tree tree, const AttnRequest* requests, Plan plan, Partial* partials,
           int64_t tiles, const __grid_constant__ Where where, bool out_pairs) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  const uint32_t memory = shared_address(dynamic_shared);
  Work& w = s.work;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int32_t group = thread / kGroupThreads;

  if (thread < kStages) {
    s.finished[thread] = 0;
    init_barrier(memory + offsetof(Shared, full) + thread * 8, kGroupThreads);
  }
  wait_for_primary();
  const int64_t blocks_in_all = count_blocks(s, requests, p.batch_size);
  if (blocks_in_all == 0) return;
  const int32_t blocks_at_once = static_cast<int32_t>(gridDim.x);
  const Cut cut(blocks_in_all, int64_t{1}, false, 0, TheBlocks::kInStepFrom, tiles, blocks_at_once,  // no heads
                static_cast<int32_t>(blocks_at_once / tiles));
  const bool working = blockIdx.x < cut.parts;
  const Share share = cut.share<int64_t>(working ? static_cast<int32_t>(blockIdx.x) : 0,
                                         working ? static_cast<int32_t>(blockIdx.x / tiles) : 0);
  if (!working) return;
  find_first_work(s, requests, p.batch_size, cut, share);
  if (thread == 0) {
    s.cut = cut;
    s.share = share;
  }

  uint32_t stage = 0, phase = 0;  // of the stages, which go round
  while (true) {
    __syncthreads();  // the piece of work is known
    if (thread == 0) plan.write_range(w, s.cut, s.share.part);
    find_wanted(s, p, cache, tree);
    __syncthreads();
    __syncthreads();  // once more: after one of them racecheck at times takes find_wanted()'s writes for unfinished
    const Place place = place_of(opaque(thread));
    const int32_t group_row = w.tile * kTile + group * kGroupRows;
    const bool group_works = group_row < w.node_rows(p.num_heads);
    const int32_t count = w.count, masked_from = w.request.lacks_rows != 0 ? 0 : w.unmasked;

    // ---- the first loads, and the queries
#pragma unroll 1
    for (int32_t i = group; i < kStages && i < count; i += kGroups) {
      load_block(memory, where, i, (stage + i) % kStages);
    }
    uint32_t queries[kQSteps][4];
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = group_row + fragment_row(place, place.warp / 2, half);
      const int32_t query = row / p.num_heads, head = row % p.num_heads;
      const T* source = static_cast<const T*>(p.q) + w.b * p.q_stride + query * p.q_row_stride +
                        head * p.q_head_stride + place.t * 2;
      const bool present = row < w.node_rows(p.num_heads);
      const uint32_t flip = p.scale < 0.0f ? 0x80008000u : 0;  // the scale's sign
#pragma unroll
      for (int32_t j = 0; j < kQSteps; ++j) {
        const int32_t column = (j * 2 + place.warp % 2) * 16;
        queries[j][half] = present ? *reinterpret_cast<const uint32_t*>(source + column) ^ flip : 0;
        queries[j][half + 2] = present ? *reinterpret_cast<const uint32_t*>(source + column + 8) ^ flip : 0;
      }
    }
#pragma unroll
    for (int32_t j = 0; j < kQShared; ++j) {  // read by this lane alone
      s.queries[thread / kWarpSize][j][lane] =
          make_uint4(queries[j][0], queries[j][1], queries[j][2], queries[j][3]);
    }
    Results results;
#pragma unroll
    for (int32_t m = 0; m < 2; ++m) {
#pragma unroll
      for (int32_t n = 0; n < 2 * kVSteps; ++n) {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) results[m][n][e] = 0.0f;
      }
    }
    // The softmax of the query row that this lane and three more look after.
    RowState state = {negative_infinity(), 0.0f, 0.0f, 0};
    bool poisoned = false;  // a masked block held a NaN or infinity

    // ---- over the cache
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const Place at = place_of(opaque(thread));
      const uint32_t data = memory + stage * kStageBytes;
      wait_for_phase(memory + offsetof(Shared, full) + stage * 8, phase);
      if (group_works) {
        const bool masked = i >= masked_from;
        // Queries times keys: 16 query rows, 32 cache rows, half of the columns.
        float sums[4][4] = {};
        {
          const uint32_t keys_at = data + (at.lane / 16 * 8 + at.lane % 8) * kRowBytes +
                                   ((2 * (at.warp % 2) + at.lane / 8 % 2) ^ at.lane % 8) * 16;
          const uint32_t queries_at = memory + offsetof(Shared, queries) +
                                      thread / kWarpSize * sizeof(s.queries[0]) + at.lane * sizeof(uint4);
#pragma unroll
          for (int32_t j = 0; j < kQSteps; ++j) {
            uint32_t query[4];
            if (j < kQShared) {
              const uint4 four = load_shared_uint4(queries_at + j * sizeof(s.queries[0][0]));
              query[0] = four.x;
              query[1] = four.y;
              query[2] = four.z;
              query[3] = four.w;
            } else {
#pragma unroll
              for (int32_t k = 0; k < 4; ++k) query[k] = queries[j][k];
            }
#pragma unroll
            for (int32_t h = 0; h < 2; ++h) {
              uint32_t keys[4];
              load_matrices<false>(keys, (keys_at ^ j % 2 * 64) + h * 16 * kRowBytes + j / 2 * 128);
              multiply_add<T>(sums[2 * h], query, keys[0], keys[1]);
              multiply_add<T>(sums[2 * h + 1], query, keys[2], keys[3]);
            }
          }
        }

        // Softmax. Of its 16 query rows a warp gives eight to its partner.
        bool rescale = false, nonfinite = false;
        {
          const bool lower = at.warp % 2 != 0;
          constexpr uint32_t kInbox = sizeof(s.inbox[0]), kHalf = sizeof(s.inbox[0][0]);
          const uint32_t inbox = memory + offsetof(Shared, inbox) + at.lane * sizeof(float4);
          const int32_t warp = at.group * kGroupWarps + at.warp;
#pragma unroll
          for (int32_t h = 0; h < 2; ++h) {
            const float (&a)[4] = sums[2 * h], (&b)[4] = sums[2 * h + 1];
            store_shared(
                inbox + (warp ^ 1) * kInbox + h * kHalf,
                make_float4(lower ? a[0] : a[2], lower ? a[1] : a[3], lower ? b[0] : b[2], lower ? b[1] : b[3]));
          }
          sync_part<2 * kWarpSize>(1 + kGroups + warp / 2);
          float scores[8];  // before the scale
#pragma unroll
          for (int32_t h = 0; h < 2; ++h) {
            const float4 other = load_shared_float4(inbox + warp * kInbox + h * kHalf);
            const float (&a)[4] = sums[2 * h], (&b)[4] = sums[2 * h + 1];
            scores[h * 4] = (lower ? a[2] : a[0]) + other.x;
            scores[h * 4 + 1] = (lower ? a[3] : a[1]) + other.y;
            scores[h * 4 + 2] = (lower ? b[2] : b[0]) + other.z;
            scores[h * 4 + 3] = (lower ? b[3] : b[1]) + other.w;
          }
          uint32_t mask = ~0u;
          if (masked) {
            mask = mask_of(s, p, cache, tree, at, block_at(s, i));
#pragma unroll
            for (int32_t k = 0; k < 8; ++k) {
              if ((mask >> (k / 2 * 8 + at.t * 2 + k % 2) & 1) == 0) scores[k] = negative_infinity();
            }
            nonfinite = holds_nonfinite<T>(s.stages[stage]);
          }
          state.seen |= mask != 0;
          float top = scores[0];
#pragma unroll
          for (int32_t k = 1; k < 8; ++k) top = fmaxf(top, scores[k]);
          const float scale = scale_of(p);
          float factor = 1.0f;
          if (__any_sync(kAllLanes, (top - state.max) * scale > kLazyMax)) {
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
            if ((top - state.max) * scale > kLazyMax) {
              factor = exp2_approx((state.max - top) * scale);
              state.max = top;
              state.weight *= factor;
              state.recent *= factor;
              rescale = true;
            }
          }
          if (at.t == 0) s.factors[at.group][at.warp * 8 + at.g] = factor;
          const float base = state.base();
          const uint32_t target = memory + offsetof(Shared, weights) + warp * sizeof(s.weights[0][0]) + at.lane * 4;
#pragma unroll
          for (int32_t k = 0; k < 8; k += 2) {
            const float low = exp2_approx(fmaf(scores[k] - base, scale, kUnit<T>));
            const float high = exp2_approx(fmaf(scores[k + 1] - base, scale, kUnit<T>));
            state.recent += low + high;
            store_shared(target + k / 2 * sizeof(s.weights[0][0][0]), pack<T>(low, high));
          }
          if (i % kFoldEvery == kFoldEvery - 1) {
            state.weight += state.recent;
            state.recent = 0.0f;
          }
        }
        rescale = sync_part_or<kGroupThreads>(1 + group, rescale);
        if (masked) {
          nonfinite = sync_part_or<kGroupThreads>(1 + group, nonfinite);
          poisoned |= nonfinite;
        }

        // Weights times values.
        if (rescale) {
#pragma unroll
          for (int32_t m = 0; m < 2; ++m) {
#pragma unroll
            for (int32_t half = 0; half < 2; ++half) {
              const float factor = s.factors[at.group][fragment_row(at, m, half)];
#pragma unroll
              for (int32_t n = 0; n < 2 * kVSteps; ++n) {
                results[m][n][half * 2] *= factor;
                results[m][n][half * 2 + 1] *= factor;
              }
            }
          }
        }
        const uint32_t values_at = data + (at.lane / 8 % 2 * 8 + at.lane % 8) * kRowBytes +
                                   ((2 * at.warp + at.lane / 16) ^ at.lane % 8) * 16;
        const uint32_t weights_at = memory + offsetof(Shared, weights) + group * sizeof(s.weights[0]) + at.lane * 4;
        if (!nonfinite) {
          add_values<T, false>(weights_at, values_at, results);
        } else {
          add_values<T, true>(weights_at, values_at, results);
        }
      }

      // The group that is last with this stage loads the next block into it.
      __syncwarp();
      bool last = false;
      if (at.lane == 0) {
        last = count_up(memory + offsetof(Shared, finished) + stage * 4) % kWarps == kWarps - 1;
      }
      last = sync_part_or<kGroupThreads>(1 + group, last);
      if (last && i + kStages < count) load_block(memory, where, i + kStages, stage);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }

    // ---- results
    const Place at = place_of(opaque(thread));
    if (group_row + at.warp * 8 + at.g >= w.node_rows(p.num_heads)) state = {negative_infinity(), 0.0f, 0.0f, 0};
    state.weight += state.recent;
    state.weight += __shfl_xor_sync(kAllLanes, state.weight, 1);
    state.weight += __shfl_xor_sync(kAllLanes, state.weight, 2);
    Partial* const partial = w.whole() ? nullptr : &partials[s.share.part * 2 + (w.first == 0 ? 1 : 0)];
    const int32_t query_rows = p.num_queries * p.num_heads;
    if (at.t == 0) {
      const int32_t own_row = at.warp * 8 + at.g;
      const int32_t row = group_row + own_row;
      if (partial != nullptr) {
        partial->states[at.group * kGroupRows + own_row] = state;
      } else {
        s.factors[at.group][own_row] = state.seen != 0 ? 1.0f / state.weight : 0.0f;
        if (row < query_rows) {
          store_lse(p, w.b, row / p.num_heads, row % p.num_heads,
                    in_base_e(p, state.weight, state.max, state.seen, exp2f(kUnit<T>)));
        }
      }
    }
    sync_part<kGroupThreads>(1 + at.group);
#pragma unroll
    for (int32_t m = 0; m < 2; ++m) {
      if (partial != nullptr) {
        float4(*const target)[kWarpSize] = partial->values[at.group * 2 + m];
#pragma unroll
        for (int32_t n = 0; n < 2 * kVSteps; ++n) {
          const float (&four)[4] = results[m][n];
          target[fragment_column(at, n) / 8][at.lane] = make_float4(four[0], four[1], four[2], four[3]);
        }
        continue;
      }
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t group_at = fragment_row(at, m, half);
        const int32_t row = group_row + group_at;
        if (row >= query_rows) continue;
        const float factor = s.factors[at.group][group_at];
        const int64_t index = out_index(p, w.b, row / p.num_heads, row % p.num_heads);
#pragma unroll
        for (int32_t n = 0; n < 2 * kVSteps; ++n) {
          const float low = results[m][n][half * 2], high = results[m][n][half * 2 + 1];
          store_pair(p, index + fragment_column(at, n), factor != 0.0f ? low * factor : 0.0f,
                     factor != 0.0f ? high * factor : 0.0f, out_pairs);
        }
      }
    }
    if (poisoned) {
      sync_part<kGroupThreads>(1 + at.group);  // the results are there
      poison<T, kGroupThreads>(w, w.request.lacks_rows != 0 ? w.first : w.first_masked, w.end, p, cache, tree,
                               at.group * kGroupRows, kGroupRows, thread % kGroupThreads, partial, false);
    }

    // ---- on to the next request that has rows
    __syncthreads();
    bool more = false;
    if (thread < kWarpSize) more = next_work(w, requests, p.batch_size, s.cut, s.share.end);
    if (__syncthreads_or(more) == 0) break;
  }
  trigger_dependents();
}

// ---- launching ---------------------------------------------------------------------------------------

Where where_of(const kdt_kv_cache& cache) {
  Where where = {static_cast<const uint4*>(cache.data), cache.block_table, cache.block_table_stride};
  where.page_stride = static_cast<uint32_t>(cache.page_stride / 8);  // takes_mma() has seen that it fits
  where.row_stride = static_cast<uint32_t>(cache.row_stride / 8);
  where.num_pages = static_cast<uint32_t>(cache.num_pages);
  where.row_mask = ~0u;
  if (cache.block_table != nullptr) {
    where.row_mask = static_cast<uint32_t>(cache.page_size) - 1;
    where.page_shift = static_cast<uint32_t>(page_shift_of(cache));
  }
  return where;
}

template <class T>
int32_t launch_attend(const Session& session, const AttnCall& call, const AttnRequest* requests,
                      const Scratch& scratch) {
  const kdt_verify_attn_params& p = call.p;
  return launch_kernel<sizeof(Shared)>(session, "verify_attn", attend<T>, session.context().multiprocessors,
                                       kThreads, After::kTriggered, p, call.cache, call.tree, requests,
                                       scratch.plan, scratch.partials, tiles_of(p), where_of(call.cache),
                                       pairs_are_aligned(p));
}

}  // namespace

size_t mma_workspace_size(const kdt_context& context, const kdt_verify_attn_params& p) {
  // A part has at most two tiles that other parts have a share of. Fewer parts where even a full cache is little
  // work; each factor is cut first, so that their product stays small.
  const int64_t most = context.multiprocessors, enough = most * kFewestBlocks;
  const int64_t rows = std::min(capacity_of(*p.cache), int64_t{INT32_MAX}) + p.num_queries;
  const int64_t blocks = std::min<int64_t>(p.batch_size, enough) *
                         std::min<int64_t>((rows + kBlock - 1) / kBlock, enough) * std::min(tiles_of(p), enough);
  const int64_t parts = std::min(most, blocks / kFewestBlocks + 1);
  return plan_bytes(p) + static_cast<size_t>(2 * parts) * sizeof(Partial);
}

int32_t enqueue_mma(const Session& session, const AttnCall& call, const AttnRequest* requests, void* workspace) {
  const kdt_verify_attn_params& p = call.p;
  const Scratch scratch = scratch_of(workspace, p);
  const auto start = p.q_dtype == KDT_BF16 ? launch_attend<__nv_bfloat16> : launch_attend<__half>;
  KDT_TRY(start(session, call, requests, scratch));
  return enqueue_combine(session, p, scratch, false);
}

}  // namespace kdt::cuda
