// verify_attn on Hopper (sm_90a) for 16-bit types: products by warpgroups (wgmma), cache rows by TMA.
//
// Idea: 64 query rows against blocks of 64 cache rows, as FlashMLA has it ("seesaw" scheduling, DeepSeek's deep
// dive of 2025-04-22): the float32 results of 64 x 512 fill the registers of two warpgroups, one for the left and
// one for the right half of the columns. Blocks come in pairs. Each group works out the scores and weights of one
// block of the pair and multiplies both blocks' weights with its half of the values, so that one's softmax hides
// behind the other's products.
//
// - The weights of a group's own block are operands in its registers; the other group has them from shared memory.
// - Softmax in base 2. The maximum that is subtracted, one for both groups, follows the true one only when that has
//   risen by more than 2^8: then the results so far are rescaled, which is rare.
// - A third warpgroup, with few registers, does the rest. One thread loads the columns 0..255 of queries and of
//   blocks, one the others; each half of a block is refilled when its reader is done, and read as its columns
//   arrive, 64 by 64. A warp plans, a piece of work ahead, and lets loads begin before it knows which blocks of the
//   tree are seen. A warp works out what the query rows see of the blocks that are masked.
// - Partial results and their joining are those of verify_attn_parts.cuh; in float16 where the results are rounded
//   to bfloat16 anyway. Blocks begin at multiples of 64 rows, so that a page of 64 rows or more holds a block
//   whole.
//
// Masks: only the blocks that reach into the tree, or before kv_start, or that lack a page are masked. Boxes
// (pages, or 64 rows of one) that have no row of the request, or no page, are zeros; the other rows of a box come
// as they are and count as masked. A NaN or infinity in a row makes its scores no numbers in every query row; where
// that shows in a masked block it is taken out of the values, and poison() writes NaN where a query sees it.
//
// Limits: Hopper alone. Cache rows in units of 16 bytes, pages of at least 8 rows, query rows in units of 16 bytes
// and evenly spaced or heads in eights, a scale above 0; else verify_attn_mma.cu. One block a multiprocessor, 227
// KB of shared memory.
//
// Figures, and what was tried and lost: plans/0007-verify-attn-wgmma.md.
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "verify_attn_parts.cuh"
#include "wgmma.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kBlock = 64;  // cache rows a step of one group
constexpr int32_t kStages = 2;  // blocks in shared memory: the pair's first is that of group 0
constexpr int32_t kGroupThreads = 128, kConsumers = 2 * kGroupThreads, kThreads = kConsumers + kGroupThreads;
constexpr uint32_t kChunkBytes = kBlock * 128;  // 64 rows by 64 columns
constexpr int32_t kChunks = kQkDim / 64, kVChunks = kVDim / 64;
constexpr size_t kHopperShared = 232448;
constexpr int32_t kHead = 4;  // blocks that a further piece of work costs: queries, results, an empty pipeline

using TheBlocks = Blocks<kBlock, true, kInStepBytesHopper>;
using Work = WorkOf<TheBlocks>;

// Named barriers. Among all consumers: group 0's products for its scores have begun; its weights are there; group
// 1's are. kGroup + 1: of group 1 alone.
enum : int { kFirstBegun = 1, kFirstWeights, kSecondWeights, kAll, kGroup };

// What loaders need of a piece.
struct Loads {
  int32_t unmasked;                      // blocks; negative: there is no more work
  uint32_t first_row, first_masked_row;  // of the first blocks of either kind
  uint32_t begin_row, end_row;           // rows of the request
  uint32_t request;
  uint32_t first_query;  // query row, query-major, head-minor
};

struct Piece {
  Work work;
  Loads loads;
  int32_t lacks_rows;                     // a page that it needs is missing
  uint8_t wanted[TheBlocks::kMaxMasked];  // counted from work.first_masked
};

// How pages and queries are cut into boxes.
struct Boxes {
  int32_t rows;       // of a box
  uint32_t row_mask;  // of a row in its page
  int32_t page_shift;
  int32_t query_rows;   // of a box
  uint32_t query_line;  // query rows that lie at one distance
};

struct Shared {
  alignas(1024) unsigned char stages[kStages][kChunks][kChunkBytes];
  unsigned char queries[kVChunks][kChunkBytes];  // the last 64 columns are in registers
  unsigned char weights[2][kChunkBytes];         // the second at first has the last 64 columns of the queries
  uint64_t masks[kStages][kTile];                // what each query row sees of a block, where that is masked
  float base[kTile];                             // RowState::max
  float factors[2][kTile];   // by which a group's block changed the results' unit, for warps with `rose`
  float sums[2][kTile];      // of the weights of a group's blocks; negative: none of their rows is seen
  uint32_t masked[kStages];  // Masked, a byte each; 0 where nothing is
  int32_t rose[2];           // 1 + a group's last block that raised a maximum
  int32_t warp_rose[2][4];   // the same of the group's warps
  int32_t poisoned;
  uint64_t full[kStages][kChunks];  // columns of a block
  uint64_t empty[kStages][2];       // halves of a block
  uint64_t masks_full[kStages];
  uint64_t queries_full, queries_empty;
  uint64_t piece_full[2], wanted_full[2], piece_empty[2];
  Piece pieces[2];
  Cut cut;
  Share share;
  int32_t streams;  // cache rows need not stay in the L2 cache
};
static_assert(sizeof(Shared) <= kHopperShared);

// Whether partial results are float16 (Partial).
__host__ __device__ bool has_half_partials(const kdt_verify_attn_params& p) {
  return p.q_dtype == KDT_BF16 && p.out_dtype == KDT_BF16;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define KDT_HOPPER 1
#endif
#ifdef KDT_HOPPER

constexpr int32_t kHalf = kVChunks / 2;
// Where dynamic shared memory begins on Hopper in a kernel without static shared memory: the first 1,024 bytes are
// the system's. As a constant, so that descriptors are constants; attend_hopper() checks it.
constexpr uint32_t kSharedBase = 1024;
constexpr int32_t kEarlyWeights = 2;  // of the four parts of a group's weights: stored before it waits for values
constexpr int32_t kFoldEvery = 16;    // pairs between foldings of RowState::recent into weight
constexpr int32_t kConsumerRegisters = 240, kLoaderRegisters = 24;
// Warps of the third group.
enum : int { kLeftLoader, kRightLoader, kMasker, kPlanner };
constexpr int32_t kConsumerWarps = kConsumers / kWarpSize;

// ---- planning, by one warp ---------------------------------------------------------------------------

// The numbers of the requests.
struct Requests {
  const kdt_verify_attn_params& p;
  const kdt_kv_cache& cache;
  const kdt_tree& tree;
  int64_t live;

  __device__ AttnRequest operator[](int64_t b) const {
    int32_t status = 0;
    return b < live ? read_request(p, cache, tree, b, &status) : AttnRequest{0, 0, 0, 0};
  }
  // Of request `first` and this lane's number.
  __device__ AttnRequest of_lane(int64_t first) const { return (*this)[first + threadIdx.x % kWarpSize]; }
};

// Blocks of all requests, how many have some, and the most of one. `mine` are the numbers of request `lane`.
template <class Int>
struct Counts {
  Int blocks, requests;
  int32_t longest;
};
template <class Int>
__device__ Counts<Int> count_blocks(const Requests& requests, int64_t batch_size, const AttnRequest& mine) {
  Counts<Int> counts = {0, 0, 0};
  int32_t own = TheBlocks::count(mine);
  for (int64_t first = 0;;) {
    counts.blocks += __reduce_add_sync(kAllLanes, own);  // at most 2^31 / 64 a request
    counts.longest = max(counts.longest, __reduce_max_sync(kAllLanes, own));
    counts.requests += __popc(__ballot_sync(kAllLanes, own > 0));
    first += kWarpSize;
    if (first >= batch_size) return counts;
    own = TheBlocks::count(requests.of_lane(first));
  }
}

// Finds the first piece of a part: the lane that has it gives it to take().
template <class Int, class Take>
__device__ void find_first_work(const Requests& requests, int64_t batch_size, AttnRequest mine, const Cut& cut,
                                const Share& share, const Take& take) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const Int wanted = static_cast<Int>(share.begin) - share.tile * static_cast<Int>(cut.blocks);
  Int before = 0;
  for (int64_t first = 0;;) {
    const int32_t own = cut.length(TheBlocks::count(mine)), sum = sum_up_to_lane(own);
    const Int offset = before + (sum - own);
    if (offset <= wanted && wanted < offset + own) {
      Work work;
      work.offset = offset;
      work.set(mine, first + lane, cut, share.tile, static_cast<Int>(share.begin), static_cast<Int>(share.end));
      take(work);
    }
    before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    if (before > wanted) break;
    first += kWarpSize;
    if (first >= batch_size) break;
    mine = requests.of_lane(first);
  }
  __syncwarp();
}

// Works out which masked blocks some query row of the tile sees. A tile without nodes sees none at all.
__device__ void find_wanted(Piece& piece, const kdt_verify_attn_params& p, const kdt_tree& tree) {
  Work& w = piece.work;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t first_row = w.tile * kTile, end_row = min(first_row + kTile, w.node_rows(p.num_heads));
  const int32_t masked = w.end - w.first_masked, m = lane % 4;  // four blocks at once, eight queries
  int32_t wanted = 0;
  for (int32_t base = 0; base < masked; base += 4) {
    uint32_t seen = 0;
    if (base + m < masked) {
      const int32_t slot = w.first_slot(w.first_masked + base + m);
      for (int32_t i = first_row / p.num_heads + lane / 4; i * p.num_heads < end_row; i += kWarpSize / 4) {
        seen |= seen_bits(tree, w.b, i, slot, w.request.node_count) |
                seen_bits(tree, w.b, i, slot + 32, w.request.node_count);
      }
    }
#pragma unroll
    for (int32_t step = 4; step < kWarpSize; step *= 2) seen |= __shfl_xor_sync(kAllLanes, seen, step);
    const unsigned lanes = __ballot_sync(kAllLanes, seen != 0) & 0xf;
    if (lane < 4 && seen != 0) {
      piece.wanted[wanted + __popc(lanes & ((1u << lane) - 1))] = static_cast<uint8_t>(base + lane);
    }
    wanted += __popc(lanes);
  }
  if (lane == 0) w.count = w.unmasked + wanted;
}

// One thread tells all others of piece k, which is in its place but for what follows from that, or that there is
// none.
__device__ void tell(Shared& s, uint32_t memory, uint32_t k, bool is, Work& w, int32_t num_heads) {
  Piece& piece = s.pieces[k % 2];
  piece.loads.unmasked = -1;
  if (is) {
    const int32_t first_query = w.tile * kTile;
    w.unmasked = first_query < w.node_rows(num_heads) ? w.first_masked - w.first : 0;
    piece.lacks_rows = 0;
    piece.loads = {w.unmasked,
                   static_cast<uint32_t>(w.first_row(w.first)),
                   static_cast<uint32_t>(w.first_row(w.first_masked)),
                   static_cast<uint32_t>(w.request.kv_start),
                   static_cast<uint32_t>(w.request.prefix_len) + static_cast<uint32_t>(w.request.node_count),
                   static_cast<uint32_t>(w.b),
                   static_cast<uint32_t>(first_query)};
  }
  if (&w != &piece.work) piece.work = w;
  arrive(memory + offsetof(Shared, piece_full) + k % 2 * 8);
}

// Plans the first piece of this thread block, and tells. Returns whether there is one.
template <class Int>
__device__ bool plan_first(Shared& s, uint32_t memory, const kdt_verify_attn_params& p, const Requests& requests,
                           Int tiles) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const AttnRequest mine = requests.of_lane(0);
  const int32_t most = static_cast<int32_t>(gridDim.x), block = static_cast<int32_t>(blockIdx.x);
  const int32_t column = static_cast<int32_t>(quotient<Int>(most, tiles)),
                row = static_cast<int32_t>(quotient<Int>(block, tiles));
  const Counts<Int> counts = count_blocks<Int>(requests, p.batch_size, mine);
  const bool even = counts.requests * counts.longest == counts.blocks;
  const Cut cut(max(counts.blocks, Int{1}), counts.requests, even, kHead, static_cast<Int>(TheBlocks::kInStepFrom),
                tiles, most, column);
  if (counts.blocks == 0 || block >= cut.parts) {
    if (lane == 0) tell(s, memory, 0, false, s.pieces[0].work, p.num_heads);
    return false;
  }
  const Share share = cut.share<Int>(block, row);
  bool is = false;
  find_first_work<Int>(requests, p.batch_size, mine, cut, share, [&](Work& work) {
    is = !work.empty();
    s.cut = cut;
    s.share = share;
    s.streams = tiles == 1 || int64_t{counts.blocks} * (kBlock * kRowBytes) <= kStreamBytesHopper ? 1 : 0;
    tell(s, memory, 0, is, work, p.num_heads);
  });
  return __any_sync(kAllLanes, is);
}
// Rarely, and not in the way of the other's instructions.
__device__ __noinline__ bool plan_first_of_many(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                                const Requests& requests, int64_t tiles) {
  return plan_first<int64_t>(s, memory, p, requests, tiles);
}

// Plans piece k > 0, and tells; the piece before it is planned. Returns whether there is one.
__device__ bool plan_next(Shared& s, uint32_t memory, uint32_t k, const kdt_verify_attn_params& p,
                          const Requests& requests) {
  Work& w = s.pieces[k % 2].work;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  if (k > 1) wait_for_phase(memory + offsetof(Shared, piece_empty) + k % 2 * 8, (k / 2 - 1) & 1);
  if (first_lane) w = s.pieces[(k - 1) % 2].work;
  __syncwarp();
  const bool is = next_work(w, requests, p.batch_size, s.cut, s.share.end);
  if (first_lane) tell(s, memory, k, is, w, p.num_heads);
  __syncwarp();
  return is;
}

// Tells all others what is seen of the tree in piece k, and the joining kernel where the piece is.
__device__ void tell_wanted(Shared& s, uint32_t memory, uint32_t k, const kdt_verify_attn_params& p,
                            const kdt_tree& tree, const Plan& plan) {
  Piece& piece = s.pieces[k % 2];
  find_wanted(piece, p, tree);
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) {
    arrive(memory + offsetof(Shared, wanted_full) + k % 2 * 8);
    plan.write_range(piece.work, s.cut, s.share.part);
  }
}

// One warp of each thread block: the statuses of its share of the requests, and which of them have no work.
__device__ void write_statuses(const kdt_verify_attn_params& p, const kdt_kv_cache& cache, const kdt_tree& tree,
                               int64_t live, const Plan& plan) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int64_t b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
    int32_t status = 0;
    AttnRequest request = {0, 0, 0, 0};
    if (b < live) request = read_request(p, cache, tree, b, &status);
    if (request.node_count == 0) plan.write_none<kWarpSize>(b, lane);
    if (p.status == nullptr) continue;
    if (__any_sync(kAllLanes, lacks_rows<kWarpSize>(cache, tree, b, request, lane))) status |= KDT_STATUS_CLAMPED;
    if (lane == 0) p.status[b] = status;
  }
}

// ---- blocks, one after another ------------------------------------------------------------------------

// A walk over the blocks of all pieces, for those who prepare them: a thread or a warp.
class Walk {
 public:
  __device__ Walk(Shared& s, uint32_t memory) : s_(s), memory_(memory) {}

  // The next piece, or nullptr after the last.
  __device__ __forceinline__ Piece* next_piece() {
    wait_for_phase(memory_ + offsetof(Shared, piece_full) + k_ % 2 * 8, k_ / 2 & 1);
    Piece& piece = s_.pieces[k_ % 2];
    i_ = -1;
    count_ = piece.loads.unmasked;
    in_tree = false;
    return count_ < 0 ? nullptr : &piece;
  }
  // The next block of a piece. False after the last one.
  __device__ __forceinline__ bool next_block(const Piece& piece) {
    if (++i_ == count_) {
      if (in_tree) return false;
      wait_for_phase(memory_ + offsetof(Shared, wanted_full) + k_ % 2 * 8, k_ / 2 & 1);
      in_tree = true;
      count_ = piece.work.count;
      if (i_ == count_) return false;
    }
    stage = i_ % 2;
    const Loads& loads = piece.loads;
    row = in_tree ? loads.first_masked_row + uint32_t{piece.wanted[i_ - loads.unmasked]} * kBlock
                  : loads.first_row + static_cast<uint32_t>(i_) * kBlock;
    return true;
  }
  // Waits until the block before in the same stage has been used, in one half of its columns.
  __device__ __forceinline__ void wait_until_free(int32_t half) {
    if ((used_ >> stage & 1) != 0) {
      wait_for_phase(memory_ + offsetof(Shared, empty) + (stage * 2 + half) * 8, used_ >> (2 + stage) & 1);
      used_ ^= 4u << stage;
    }
    used_ |= 1u << stage;
  }
  // One thread tells.
  __device__ __forceinline__ void leave_piece(bool tells = true) {
    if (tells) arrive(memory_ + offsetof(Shared, piece_empty) + k_ % 2 * 8);
    ++k_;
  }
  __device__ uint32_t piece_number() const { return k_; }

  uint32_t stage, row;  // the first row of the block
  bool in_tree;         // the block reaches into the tree

 private:
  Shared& s_;
  const uint32_t memory_;
  uint32_t k_ = 0, used_ = 0;  // bit s: stage s has been; bit 2 + s: the parity of its next release
  int32_t i_, count_;
};

// The page of the box that begins with this row: -1 for none. `wanted`: the request has rows there.
struct PageOf {
  int32_t page;
  bool wanted;
};
__device__ __forceinline__ PageOf page_of(const kdt_kv_cache& cache, const Boxes& boxes, const Loads& loads,
                                          uint32_t row) {
  if (row >= loads.end_row || row + boxes.rows <= loads.begin_row) return {-1, false};
  if (cache.block_table == nullptr) return {static_cast<int32_t>(loads.request), true};
  const int32_t column = static_cast<int32_t>(row >> boxes.page_shift);
  return {column < cache.max_pages ? cache.block_table[loads.request * cache.block_table_stride + column] : -1,
          true};
}

// One thread: loads one half of the columns (the last 64 belong to the right one) of all queries and blocks.
template <int32_t kHalfIndex>
__device__ __forceinline__ void load(Shared& s, uint32_t memory, const kdt_kv_cache& cache, const CUtensorMap& map,
                                     const CUtensorMap& query_map, const Boxes& boxes) {
  constexpr int32_t kBegin = kHalfIndex * kHalf, kEnd = kHalfIndex == 0 ? kHalf : kChunks;
  const uint64_t policy = policy_once();
  Walk walk(s, memory);
  while (const Piece* const piece = walk.next_piece()) {
    const Loads& loads = piece->loads;
    const bool streams = s.streams != 0;
    if (walk.piece_number() > 0) {
      wait_for_phase(memory + offsetof(Shared, queries_empty), (walk.piece_number() - 1) & 1);
    }
    // Its page is asked for before the queries, to be there after them.
    bool is_block = walk.next_block(*piece);
    int32_t page = is_block ? page_of(cache, boxes, loads, walk.row).page : -1;
    const uint32_t queries_full = memory + offsetof(Shared, queries_full);
    arrive_expecting(queries_full, (kEnd - kBegin) * kChunkBytes);
#pragma unroll 1
    for (int32_t r = 0; r < kTile; r += boxes.query_rows) {
      const uint32_t row = loads.first_query + r, line = row / boxes.query_line;
#pragma unroll
      for (int32_t c = kBegin; c < kEnd; ++c) {
        const uint32_t target = static_cast<uint32_t>(c < kVChunks ? offsetof(Shared, queries) + c * kChunkBytes
                                                                   : offsetof(Shared, weights) + kChunkBytes);
        copy_box(memory + target + r * 128, query_map, queries_full, c * 64,
                 static_cast<int32_t>(row - line * boxes.query_line), static_cast<int32_t>(line),
                 static_cast<int32_t>(loads.request));
      }
    }
    while (is_block) {
      uint32_t row = walk.row;
      const uint32_t full = memory + offsetof(Shared, full) + walk.stage * (kChunks * 8);
      uint32_t target = memory + walk.stage * static_cast<uint32_t>(kChunks * kChunkBytes);
      walk.wait_until_free(kHalfIndex);
      int32_t r = 0;
#pragma unroll 1
      for (;;) {
#pragma unroll
        for (int32_t c = kBegin; c < kEnd; ++c) {
          if (r == 0) arrive_expecting(full + c * 8, kChunkBytes);
          const int32_t box_row = static_cast<int32_t>(row & boxes.row_mask);
          if (streams) {
            copy_box(target + c * kChunkBytes, map, full + c * 8, c * 64, box_row, page, policy);
          } else {
            copy_box(target + c * kChunkBytes, map, full + c * 8, c * 64, box_row, page);
          }
        }
        r += boxes.rows;
        if (r >= kBlock) break;
        row += boxes.rows;
        target += boxes.rows * 128;
        page = page_of(cache, boxes, loads, row).page;
      }
      is_block = walk.next_block(*piece);
      if (is_block) page = page_of(cache, boxes, loads, walk.row).page;
    }
    walk.leave_piece();
  }
}

// One warp: what the query rows see of each block, where that is not everything.
__device__ __forceinline__ void mask(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                     const kdt_kv_cache& cache, const kdt_tree& tree, const Boxes& boxes) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  Walk walk(s, memory);
  while (Piece* const piece = walk.next_piece()) {
    const Loads& loads = piece->loads;
    while (walk.next_block(*piece)) {
      bool lacking = false;
      if (lane * boxes.rows < kBlock) {
        const PageOf box = page_of(cache, boxes, loads, walk.row + lane * boxes.rows);
        lacking = box.wanted && (box.page < 0 || box.page >= cache.num_pages);
        if (cache.block_table == nullptr) lacking = min(walk.row + kBlock, loads.end_row) > cache.page_size;
      }
      lacking = __any_sync(kAllLanes, lacking);
      const bool masked = lacking || walk.in_tree || walk.row < loads.begin_row;
      walk.wait_until_free(0);
      if (masked) {
        const Work& w = piece->work;
        uint64_t there = ~uint64_t{0};
        if (lacking) {
          const unsigned low = __ballot_sync(kAllLanes, row_offset(cache, w.b, int64_t{walk.row} + lane) >= 0);
          const unsigned high =
              __ballot_sync(kAllLanes, row_offset(cache, w.b, int64_t{walk.row} + 32 + lane) >= 0);
          there = uint64_t{high} << 32 | low;
          if (lane == 0) piece->lacks_rows = 1;
        }
        if (walk.row < loads.begin_row) there &= ~bits_below(loads.begin_row - walk.row);
        const int32_t slot = static_cast<int32_t>(walk.row - static_cast<uint32_t>(w.request.prefix_len));
#pragma unroll 1
        for (int32_t r = lane; r < kTile; r += kWarpSize) {
          const int32_t row = static_cast<int32_t>(loads.first_query) + r;
          uint64_t seen = 0;
          if (row < w.node_rows(p.num_heads)) {
            const int32_t query = row / p.num_heads;
            seen = uint64_t{seen_bits(tree, w.b, query, slot + 32, w.request.node_count)} << 32 |
                   seen_bits(tree, w.b, query, slot, w.request.node_count);
          }
          s.masks[walk.stage][r] = seen & there;
        }
      }
      if (lane == 0) {
        const int32_t rows = piece->work.node_rows(p.num_heads) - static_cast<int32_t>(loads.first_query);
        const uint32_t queries = static_cast<uint32_t>(min(rows, kTile));
        const uint32_t begin = loads.begin_row > walk.row ? min(loads.begin_row - walk.row, uint32_t{kBlock}) : 0;
        const uint32_t end = min(loads.end_row - walk.row, uint32_t{kBlock});
        s.masked[walk.stage] = masked ? 1 | queries << 8 | begin << 16 | end << 24 : 0;
      }
      __syncwarp();
      if (lane == 0) arrive(memory + offsetof(Shared, masks_full) + walk.stage * 8);
    }
    __syncwarp();
    walk.leave_piece(lane == 0);
  }
}

// ---- attending, by two warpgroups --------------------------------------------------------------------

using Scores = float[32];
using Results = float[128];
using Weights = uint32_t[4][4];

// What is in registers that products have written is used after the wait for them, not before.
template <int32_t kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void hold(Weights& d) {
#pragma unroll
  for (int32_t i = 0; i < 16; ++i) asm volatile("" : "+r"(d[i / 4][i % 4])::"memory");
}

// The same value, which the compiler then knows to be one for the whole warp: products must not be where it thinks
// that lanes go apart.
__device__ __forceinline__ int32_t uniform(int32_t value) { return __shfl_sync(kAllLanes, value, 0); }

// A thread's place: rows row and row + 8 of the tile, columns 8 j + 2 t and the next of each eight.
struct Place {
  int32_t group, warp, lane, row, t;
};

// Queries times keys of the group's block, some of its chunks. The left and the right ones are two sums: tensor
// cores round down when they add, and the scores are nearer when two shorter sums are added.
template <class T, int32_t kBegin, int32_t kEnd>
__device__ __forceinline__ void multiply_chunks(uint32_t memory, int32_t stage, uint32_t parity,
                                                const Weights& last, Scores& scores) {
  constexpr int32_t kFirst = kBegin < kHalf ? 0 : kHalf;  // of the sum
  const uint32_t keys = tile_by_rows(memory + stage * static_cast<uint32_t>(kChunks * kChunkBytes));
  const uint32_t queries = tile_by_rows(memory + static_cast<uint32_t>(offsetof(Shared, queries)));
#pragma unroll
  for (int32_t c = kBegin; c < kEnd; ++c) {
    wait_for_phase(memory + offsetof(Shared, full) + (stage * kChunks + c) * 8, parity);
    begin_products();
#pragma unroll
    for (int32_t k = 0; k < 4; ++k) {
      const uint32_t key = further(keys, c * kChunkBytes + k * 32);
      if (c == kFirst && k == 0) {
        multiply_64<T>(scores, further(queries, c * kChunkBytes), key);
      } else if (c < kVChunks) {
        multiply_add_64<T>(scores, further(queries, c * kChunkBytes + k * 32), key);
      } else {
        multiply_add_64<T>(scores, last[k], key);
      }
    }
  }
  end_products();
}

__device__ __forceinline__ void add_right(Scores& scores, Scores& right) {
  hold(scores);
  hold(right);
#pragma unroll
  for (int32_t k = 0; k < 32; ++k) scores[k] += right[k];
}

// Weights times the group's half of the values of a stage.
template <class T>
__device__ __forceinline__ void add_values(uint32_t values_at, const Weights& weights, Results& results) {
  const uint32_t values = tile_by_columns<kChunkBytes>(values_at);
  begin_products();
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    multiply_add_256<T>(results, weights[k], further(values, k * 2048));
  }
  end_products();
}
template <class T>
__device__ __forceinline__ void add_values(uint32_t values_at, uint32_t weights_at, Results& results) {
  const uint32_t values = tile_by_columns<kChunkBytes>(values_at), weights = tile_by_rows(weights_at);
  begin_products();
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    multiply_add_256<T>(results, further(weights, k * 32), further(values, k * 2048));
  }
  end_products();
}

__device__ __forceinline__ void rescale(Results& results, const float (&factors)[2]) {
#pragma unroll
  for (int32_t j = 0; j < 32; ++j) {
    results[4 * j] *= factors[0];
    results[4 * j + 1] *= factors[0];
    results[4 * j + 2] *= factors[1];
    results[4 * j + 3] *= factors[1];
  }
}

// A group takes what is no number out of the values of a block.
template <class T>
__device__ __forceinline__ void clean(unsigned char* stage) {
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % kGroupThreads;
       i < static_cast<int32_t>(kVChunks * kChunkBytes / 4); i += kGroupThreads) {
    uint32_t& pair = reinterpret_cast<uint32_t*>(stage)[i];
    pair = finite_or_zero<T>(pair);
  }
  fence_for_products();
}

// Whether a block is masked; the rows of the tile that are queries, from the first; the rows of the block that are
// of the request.
struct Masked {
  bool block;
  int32_t queries, begin, end;
};

// What the softmax of the two rows of a thread has come to.
struct Sums {
  float base[2];               // RowState::max, the same in both groups
  float weight[2], recent[2];  // of this group's blocks
  uint32_t seen;               // bit h: this group's blocks have a row that row h sees

  __device__ void rescale(const float (&factors)[2]) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      weight[h] *= factors[h];
      recent[h] *= factors[h];
    }
  }
};

// All of them, without long chains.
template <class Join>
__device__ __forceinline__ float in_pairs(const float (&x)[8], const Join& join) {
  return join(join(join(x[0], x[1]), join(x[2], x[3])), join(join(x[4], x[5]), join(x[6], x[7])));
}

// Of the block that this group has in its stage.
__device__ __forceinline__ Masked masked_of(const Shared& s, uint32_t memory, const Place& at, uint32_t parity) {
  wait_for_phase(memory + offsetof(Shared, masks_full) + at.group * 8, parity);
  const uint32_t packed = static_cast<uint32_t>(uniform(static_cast<int32_t>(s.masked[at.group])));
  return {packed != 0, static_cast<int32_t>(packed >> 8 & 0xff), static_cast<int32_t>(packed >> 16 & 0xff),
          static_cast<int32_t>(packed >> 24)};
}

// Scores to weights, of block i. Returns whether the maximum of some row of this warp rose; `factors` are 1 for
// those that did not.
template <class T>
__device__ __forceinline__ bool softmax(Shared& s, const kdt_verify_attn_params& p, const Place& at, int32_t i,
                                        const Masked& masked, Scores& scores, Weights& weights, Sums& sums,
                                        float (&factors)[2]) {
  const int32_t stage = at.group;
  if (masked.block) {
    uint32_t bad = 0;  // scores of queries, which show where a row of the cache is no number; bits
#pragma unroll
    for (int32_t k = 0; k < 32; ++k) {
      const bool is_query = at.row + k / 2 % 2 * 8 < masked.queries;
      if (is_query && !(fabsf(scores[k]) < positive_infinity())) bad |= 1u << k;
    }
    if (sync_part_or<kGroupThreads>(kGroup + at.group, bad != 0)) {
      // Memory around the request's rows may hold anything; that needs no poison().
      const uint64_t rows = bits_below(masked.end) & ~bits_below(masked.begin);
      bool poisoned = false;
#pragma unroll 1
      for (int32_t j = 0; j < 8; ++j) {  // of every eight rows of the block the thread's two
        const uint32_t two = static_cast<uint32_t>(rows >> (8 * j + 2 * at.t)) & 3;
        poisoned |= (bad >> (4 * j) & (two | two << 2)) != 0;
      }
      if (poisoned) s.poisoned = 1;
      clean<T>(s.stages[stage][0]);
      sync_part<kGroupThreads>(kGroup + at.group);
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const uint64_t mask = s.masks[stage][at.row + h * 8];
      if (mask != 0) sums.seen |= 1u << h;
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const uint32_t bits = static_cast<uint32_t>(mask >> (32 * half)) >> (2 * at.t);
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) {
          const int32_t k = 4 * (half * 4 + j) + 2 * h;
          if ((bits >> (8 * j) & 1) == 0) scores[k] = negative_infinity();
          if ((bits >> (8 * j) & 2) == 0) scores[k + 1] = negative_infinity();
        }
      }
    }
  } else {
    sums.seen = 3;
  }
  float top[2];
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    float some[8];
#pragma unroll
    for (int32_t j = 0; j < 8; ++j) some[j] = fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]);
    top[h] = in_pairs(some, [](float x, float y) { return fmaxf(x, y); });
  }
  const float scale = scale_of(p);
  bool rise = false;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    factors[h] = 1.0f;
    rise |= (top[h] - sums.base[h]) * scale > kLazyMax;
  }
  rise = __any_sync(kAllLanes, rise);
  if (rise) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 2));
      if ((top[h] - sums.base[h]) * scale > kLazyMax) {
        factors[h] = exp2_approx((sums.base[h] - top[h]) * scale);
        sums.base[h] = top[h];
      }
      if (at.t == 0) {
        s.factors[at.group][at.row + h * 8] = factors[h];
        s.base[at.row + h * 8] = sums.base[h];
      }
    }
    sums.rescale(factors);
    if (at.lane == 0) s.rose[at.group] = s.warp_rose[at.group][at.warp] = i + 1;
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const float base = sums.base[h] == negative_infinity() ? 0.0f : sums.base[h];
    float some[8];
#pragma unroll
    for (int32_t j = 0; j < 8; ++j) {
      float& low = scores[4 * j + 2 * h];
      float& high = scores[4 * j + 2 * h + 1];
      low = exp2_approx(fmaf(low - base, scale, kUnit<T>));
      high = exp2_approx(fmaf(high - base, scale, kUnit<T>));
      some[j] = low + high;
    }
    sums.recent[h] += in_pairs(some, [](float x, float y) { return x + y; });
  }
#pragma unroll
  for (int32_t k = 0; k < 16; ++k) weights[k / 4][k % 4] = pack<T>(scores[2 * k], scores[2 * k + 1]);
  if (i / 2 % kFoldEvery == kFoldEvery - 1) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      sums.weight[h] += sums.recent[h];
      sums.recent[h] = 0.0f;
    }
  }
  return rise;
}

// Takes over what the other group's block i made of the maxima of this thread's rows. For when s.rose says so.
__device__ __forceinline__ void follow(const Shared& s, int32_t group, int32_t i, const Place& at, Sums& sums,
                                       float (&factors)[2]) {
  factors[0] = factors[1] = 1.0f;
  if (s.warp_rose[group][at.warp] != i + 1) return;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    factors[h] = s.factors[group][at.row + h * 8];
    sums.base[h] = s.base[at.row + h * 8];
  }
  sums.rescale(factors);
}

// Columns 16 kBegin .. 16 kEnd - 1.
template <int32_t kBegin, int32_t kEnd>
__device__ __forceinline__ void store_weights(uint32_t target, const Place& at, const Weights& weights) {
  const int32_t row = at.warp * 16 + at.lane % 16;
#pragma unroll
  for (int32_t k = kBegin; k < kEnd; ++k) {
    store_matrices(target + row * 128 + (((2 * k + at.lane / 16) ^ row % 8) * 16), weights[k]);
  }
}

// This warp is done with its half of a stage.
__device__ __forceinline__ void release(uint32_t memory, const Place& at, int32_t stage) {
  if (at.lane == 0) arrive(memory + offsetof(Shared, empty) + (stage * 2 + at.group) * 8);
}

// Both groups take the blocks in their order: what block i adds to the results is in the unit of the maximum after
// it.
//
// What runs when, on the tensor cores and beside them (a bar is some 500 cycles; S scores, W weights times values):
//   group 0   |  soft0  | W0  |     | W1  | S2      |  soft2  | ..
//   group 1   | S1      | W0  soft1 | W1  |         | S3      | ..
// Group 1's W0 is under way while its softmax works: results are touched only where a maximum rose, after a wait.

// One pair of the first group, whose scores are on their way; begins those of the next pair when there kIsMore. A
// last pair may have no second block.
template <class T, bool kHasSecond, bool kIsMore>
__device__ __forceinline__ void attend_pair(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                            const Place& at, const Weights& last, uint32_t& loaded, int32_t i,
                                            Scores& scores, Scores& right, Results& results, Sums& sums) {
  const uint32_t left0 = memory, left1 = memory + kChunks * kChunkBytes;
  const uint32_t weights0 = memory + offsetof(Shared, weights), weights1 = weights0 + kChunkBytes;
  Weights weights;
  float factors[2];
  const Masked masked = masked_of(s, memory, at, (loaded - 1) & 1);
  wait_for_products<0>();
  add_right(scores, right);
  hold(results);
  if (softmax<T>(s, p, at, i, masked, scores, weights, sums, factors)) rescale(results, factors);
  // Group 1 has multiplied the weights before these: it then freed its half of the stage, which has been filled
  // since.
  store_weights<0, 4>(weights0, at, weights);
  fence_for_products();
  arrive_part<kConsumers>(kFirstWeights);
  add_values<T>(left0, weights, results);
  wait_for_products<0>();
  hold(results);
  hold(weights);
  release(memory, at, 0);
  if constexpr (kHasSecond) {
    sync_part<kConsumers>(kSecondWeights);
    if (uniform(s.rose[1]) == i + 2) {
      follow(s, 1, i + 1, at, sums, factors);
      rescale(results, factors);
    }
    add_values<T>(left1, weights1, results);
    if constexpr (kIsMore) {
      multiply_chunks<T, 0, 1>(memory, 0, loaded & 1, last, scores);
      wait_for_products<1>();  // values before scores, so that they can be refilled
      release(memory, at, 1);
      multiply_chunks<T, 1, kHalf>(memory, 0, loaded & 1, last, scores);
      multiply_chunks<T, kHalf, kChunks>(memory, 0, loaded & 1, last, right);
      ++loaded;
      arrive_part<kConsumers>(kFirstBegun);
    } else {
      wait_for_products<0>();
      hold(results);
      release(memory, at, 1);
    }
  }
}

// The first group, over all pairs of a piece.
template <class T>
__device__ __forceinline__ void attend_first(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                             const Piece& piece, const Place& at, const Weights& last,
                                             uint32_t& loaded, Results& results, Sums& sums) {
  const int32_t count = uniform(piece.work.count);
  if (count == 0) return;
  Scores scores, right;
  multiply_chunks<T, 0, kHalf>(memory, 0, loaded & 1, last, scores);
  multiply_chunks<T, kHalf, kChunks>(memory, 0, loaded & 1, last, right);
  ++loaded;
  arrive_part<kConsumers>(kFirstBegun);
  int32_t i = 0;
#pragma unroll 1
  for (; i + 2 < count; i += 2) {
    attend_pair<T, true, true>(s, memory, p, at, last, loaded, i, scores, right, results, sums);
  }
  if (i + 1 < count) {
    attend_pair<T, true, false>(s, memory, p, at, last, loaded, i, scores, right, results, sums);
  } else {
    attend_pair<T, false, false>(s, memory, p, at, last, loaded, i, scores, right, results, sums);
  }
}

// The second group.
template <class T>
__device__ __forceinline__ void attend_second(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                              const Piece& piece, const Place& at, const Weights& last,
                                              uint32_t& loaded, Results& results, Sums& sums) {
  const int32_t count = uniform(piece.work.count);
  const uint32_t right0 = memory + kHalf * kChunkBytes, right1 = right0 + kChunks * kChunkBytes;
  const uint32_t weights0 = memory + offsetof(Shared, weights), weights1 = weights0 + kChunkBytes;
  Scores scores, right;
  Weights weights;
  float factors[2];
  int32_t i = 0;
#pragma unroll 1
  for (; i + 1 < count; i += 2) {
    sync_part<kConsumers>(kFirstBegun);
    const uint32_t parity = loaded & 1;
    multiply_chunks<T, 0, kHalf>(memory, 1, parity, last, scores);
    multiply_chunks<T, kHalf, kChunks>(memory, 1, parity, last, right);
    ++loaded;
    const Masked masked = masked_of(s, memory, at, parity);
    sync_part<kConsumers>(kFirstWeights);
    if (uniform(s.rose[0]) == i + 1) {  // the same for all warps, as waits must be
      wait_for_products<0>();
      hold(results);
      follow(s, 0, i, at, sums, factors);
      rescale(results, factors);
    }
    add_values<T>(right0, weights0, results);
    wait_for_products<1>();
    add_right(scores, right);
    const bool rose = softmax<T>(s, p, at, i + 1, masked, scores, weights, sums, factors);
    // The first block's values have been used by about now; sooner, the wait would hold up the softmax.
    store_weights<0, kEarlyWeights>(weights1, at, weights);
    wait_for_products<0>();
    hold(results);
    release(memory, at, 0);
    store_weights<kEarlyWeights, 4>(weights1, at, weights);
    fence_for_products();
    arrive_part<kConsumers>(kSecondWeights);
    if (rose) rescale(results, factors);
    add_values<T>(right1, weights, results);
    wait_for_products<0>();
    hold(results);
    hold(weights);
    release(memory, at, 1);
  }
  if (i < count) {
    sync_part<kConsumers>(kFirstBegun);
    sync_part<kConsumers>(kFirstWeights);
    if (uniform(s.rose[0]) == i + 1) {
      follow(s, 0, i, at, sums, factors);
      rescale(results, factors);
    }
    add_values<T>(right0, weights0, results);
    wait_for_products<0>();
    hold(results);
    release(memory, at, 0);
  }
}

// A group's results to its half of the columns of a partial result.
__device__ __forceinline__ void store_halves(Partial& partial, const Place& at, const Results& results) {
  float units[2];
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    float some[4] = {};  // the largest of them, but for those that are no numbers
#pragma unroll
    for (int32_t k = 0; k < 64; ++k) {
      const float size = fabsf(results[k / 2 * 4 + 2 * h + k % 2]);
      some[k % 4] = fmaxf(some[k % 4], size < positive_infinity() ? size : 0.0f);
    }
    float largest = fmaxf(fmaxf(some[0], some[1]), fmaxf(some[2], some[3]));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const int32_t exponent = exponent_for(largest);
    units[h] = power_of_two(-exponent);
    if (at.t == 0) partial.exponents[at.group][at.row + h * 8] = exponent;
  }
  uint2* const target = &partial.halves[at.warp][at.group * (kVDim / 8 / 2)][at.lane];
#pragma unroll
  for (int32_t j = 0; j < 32; ++j) {
    target[j * kWarpSize] = make_uint2(pack<__half>(results[4 * j] * units[0], results[4 * j + 1] * units[0]),
                                       pack<__half>(results[4 * j + 2] * units[1], results[4 * j + 3] * units[1]));
  }
}

template <class T>
__device__ __forceinline__ void consume(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                        const kdt_kv_cache& cache, const kdt_tree& tree, Partial* partials,
                                        bool out_pairs) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int32_t warp = uniform(thread / kWarpSize % 4);
  const Place at = {uniform(thread / kGroupThreads), warp, lane, warp * 16 + lane / 4, lane % 4};
  const int32_t query_rows = p.num_queries * p.num_heads;
  uint32_t loaded = 0;
  for (uint32_t k = 0;; ++k) {
    wait_for_phase(memory + offsetof(Shared, piece_full) + k % 2 * 8, k / 2 & 1);
    const Piece& piece = s.pieces[k % 2];
    const Work& w = piece.work;
    if (uniform(piece.loads.unmasked) < 0) return;
    const int32_t first_row = w.tile * kTile, node_rows = w.node_rows(p.num_heads);

    // ---- the queries
    if (thread == 0) s.poisoned = 0;  // before a barrier that all wait at who may set it
    wait_for_phase(memory + offsetof(Shared, queries_full), k & 1);
    // Their last 64 columns. Group 1 has its weights there later, a warp where it has read these, when group 0 has,
    // too.
    Weights last;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      load_matrices<false>(last[j], memory + static_cast<uint32_t>(offsetof(Shared, weights)) + kChunkBytes +
                                        (warp * 16 + lane % 16) * 128 + (((2 * j + lane / 16) ^ lane % 8) * 16));
    }
    wait_for_phase(memory + offsetof(Shared, wanted_full) + k % 2 * 8, k / 2 & 1);

    // ---- over the cache
    Results results;
#pragma unroll
    for (int32_t i = 0; i < 128; ++i) results[i] = 0.0f;
    Sums sums = {{negative_infinity(), negative_infinity()}, {}, {}, 0};
    if (at.group == 0) {
      attend_first<T>(s, memory, p, piece, at, last, loaded, results, sums);
    } else {
      attend_second<T>(s, memory, p, piece, at, last, loaded, results, sums);
    }
    if (lane == 0) arrive(memory + offsetof(Shared, queries_empty));

    // ---- results
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float weight = sums.weight[h] + sums.recent[h];
      weight += __shfl_xor_sync(kAllLanes, weight, 1);
      weight += __shfl_xor_sync(kAllLanes, weight, 2);
      if (at.t == 0) {
        s.sums[at.group][at.row + h * 8] = (sums.seen >> h & 1) != 0 ? weight : -1.0f;
      }
    }
    sync_part<kConsumers>(kAll);
    if (thread < 2) s.rose[thread] = 0;
    if (thread < 8) s.warp_rose[thread / 4][thread % 4] = 0;
    Partial* const partial = w.whole() ? nullptr : &partials[s.share.part * 2 + (w.first == 0 ? 1 : 0)];
    const bool are_halves = has_half_partials(p);
    if (partial != nullptr && first_row + warp * 16 < query_rows) {
      if (are_halves) {
        store_halves(*partial, at, results);
      } else {
        float4* const target = &partial->values[warp][at.group * (kVDim / 8 / 2)][lane];
#pragma unroll
        for (int32_t j = 0; j < 32; ++j) {
          target[j * kWarpSize] =
              make_float4(results[4 * j], results[4 * j + 1], results[4 * j + 2], results[4 * j + 3]);
        }
      }
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t tile_row = at.row + h * 8, row = first_row + tile_row;
      const float own = s.sums[0][tile_row], other = s.sums[1][tile_row];  // of the groups; NaN is seen
      const bool seen[2] = {own != -1.0f, other != -1.0f};
      RowState state = {sums.base[h], (seen[0] ? own : 0.0f) + (seen[1] ? other : 0.0f), 0.0f,
                        seen[0] || seen[1] ? 1 : 0};
      if (row >= node_rows) state = {negative_infinity(), 0.0f, 0.0f, 0};
      const bool writes_state = at.group == 0 && at.t == 0;
      if (partial != nullptr) {
        if (writes_state) partial->states[tile_row] = state;
      } else if (row < query_rows) {
        if (writes_state) {
          store_lse(p, w.b, row / p.num_heads, row % p.num_heads,
                    in_base_e(p, state.weight, state.max, state.seen, exp2f(kUnit<T>)));
        }
        const float factor = state.seen != 0 ? 1.0f / state.weight : 0.0f;
        const int64_t index =
            out_index(p, w.b, row / p.num_heads, row % p.num_heads) + at.group * (kVDim / 2) + at.t * 2;
#pragma unroll
        for (int32_t j = 0; j < 32; ++j) {
          const float low = results[4 * j + 2 * h], high = results[4 * j + 2 * h + 1];
          store_pair(p, index + j * 8, factor != 0.0f ? low * factor : 0.0f, factor != 0.0f ? high * factor : 0.0f,
                     out_pairs);
        }
      }
    }
    const bool poisoned = s.poisoned != 0;
    if (poisoned) {
      sync_part<kConsumers>(kAll);  // the results are there
      // Of masked blocks: where pages are missing all are, else those that reach into the tree or before kv_start.
      const bool all = piece.lacks_rows != 0;
      const int32_t end = all ? w.first_masked : w.first_row(w.first) < w.request.kv_start ? w.first + 1 : w.first;
      poison<T, kConsumers>(w, w.first, min(end, w.first_masked), p, cache, tree, 0, kTile, thread, partial,
                            are_halves);
      poison<T, kConsumers>(w, w.first_masked, w.end, p, cache, tree, 0, kTile, thread, partial, are_halves);
    }
    sync_part<kConsumers>(kAll);  // shared memory has been read
    if (lane == 0) arrive(memory + offsetof(Shared, piece_empty) + k % 2 * 8);
  }
}

#endif  // KDT_HOPPER

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend_hopper(const __grid_constant__ kdt_verify_attn_params p, const __grid_constant__ kdt_kv_cache cache,
                  const __grid_constant__ kdt_tree tree, const __grid_constant__ Plan plan, Partial* partials,
                  const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap query_map,
                  const __grid_constant__ Boxes boxes, bool out_pairs, bool is_small) {
#ifdef KDT_HOPPER
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  constexpr uint32_t memory = kSharedBase;
  if (shared_address(dynamic_shared) % (1u << 24) != kSharedBase) __trap();
  if (threadIdx.x < 2) s.rose[threadIdx.x] = 0;
  if (threadIdx.x < 8) s.warp_rose[threadIdx.x / 4][threadIdx.x % 4] = 0;
  const int32_t warp = uniform(static_cast<int32_t>(threadIdx.x) / kWarpSize);
  const int32_t role = warp - kConsumerWarps, lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  if (role == kMasker && lane == 0) {
    prefetch(map);
    prefetch(query_map);
  }
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kStages * kChunks; ++i) init_barrier(memory + offsetof(Shared, full) + i * 8, 1);
    for (int32_t i = 0; i < kStages * 2; ++i) init_barrier(memory + offsetof(Shared, empty) + i * 8, 4);
    for (int32_t i = 0; i < 2; ++i) {
      init_barrier(memory + offsetof(Shared, piece_full) + i * 8, 1);
      init_barrier(memory + offsetof(Shared, wanted_full) + i * 8, 1);
      init_barrier(memory + offsetof(Shared, piece_empty) + i * 8, 3 + kConsumerWarps);
      init_barrier(memory + offsetof(Shared, masks_full) + i * 8, 1);
    }
    init_barrier(memory + offsetof(Shared, queries_full), 2);
    init_barrier(memory + offsetof(Shared, queries_empty), kConsumerWarps);
    fence_barriers();
  }
  __syncthreads();
  wait_for_primary();
  trigger_dependents();  // all blocks run at once, so those of the next kernel take nothing from them
  if (warp < kConsumerWarps) {
    take_registers<kConsumerRegisters>();
    consume<T>(s, memory, p, cache, tree, partials, out_pairs);
    return;
  }
  const Requests requests = {p, cache, tree, live_requests(p.num_live, p.batch_size)};
  bool planned = false;
  if (role == kPlanner) {
    planned = is_small ? plan_first<int32_t>(s, memory, p, requests, static_cast<int32_t>(plan.tiles))
                       : plan_first_of_many(s, memory, p, requests, plan.tiles);
    if (planned) tell_wanted(s, memory, 0, p, tree, plan);
  }
  give_registers<kLoaderRegisters>();
  if (role == kLeftLoader && lane == 0) load<0>(s, memory, cache, map, query_map, boxes);
  if (role == kRightLoader && lane == 0) load<1>(s, memory, cache, map, query_map, boxes);
  if (role == kMasker) mask(s, memory, p, cache, tree, boxes);
  if (role == kPlanner) {
    const auto go_on = [&](uint32_t k) {
      planned = plan_next(s, memory, k, p, requests);
      if (planned) tell_wanted(s, memory, k, p, tree, plan);
    };
    if (planned) go_on(1);
    write_statuses(p, cache, tree, requests.live, plan);  // the next piece has to wait anyway
    for (uint32_t k = 2; planned; ++k) go_on(k);
  }
#endif
}

// ---- launching ---------------------------------------------------------------------------------------

Boxes boxes_of(const kdt_verify_attn_params& p, const kdt_kv_cache& cache) {
  Boxes boxes = {kBlock, ~0u, 0, kTile, static_cast<uint32_t>(p.num_queries) * static_cast<uint32_t>(p.num_heads)};
  if (cache.block_table != nullptr) {
    boxes.rows = std::min(static_cast<int32_t>(cache.page_size), kBlock);
    boxes.row_mask = static_cast<uint32_t>(cache.page_size) - 1;
    boxes.page_shift = page_shift_of(cache);
  }
  if (!has_flat_queries(p)) {
    boxes.query_rows = std::gcd(kTile, p.num_heads);
    boxes.query_line = static_cast<uint32_t>(p.num_heads);
  }
  return boxes;
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function that describes a tensor to the copy engine, or nullptr.
Encode find_encode() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = {};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
}

// A tensor of rows as boxes of 64 columns and so many rows. Sizes and strides, in values, from rows on. False where
// it cannot be had so.
template <int32_t kDimensions>
bool map_rows(const void* data, int32_t dtype, const int64_t (&sizes)[kDimensions - 1],
              const int64_t (&strides)[kDimensions - 1], int32_t box_rows, CUtensorMap* map) {
  static const Encode encode = find_encode();  // once, not in every call
  if (encode == nullptr) return false;
  cuuint64_t all_sizes[kDimensions] = {kQkDim}, bytes[kDimensions - 1];
  cuuint32_t box[kDimensions] = {64, static_cast<cuuint32_t>(box_rows)}, steps[kDimensions] = {1, 1};
  for (int32_t i = 1; i < kDimensions; ++i) {
    all_sizes[i] = static_cast<cuuint64_t>(sizes[i - 1]);
    bytes[i - 1] = static_cast<cuuint64_t>(strides[i - 1]) * 2;
    steps[i] = 1;
    if (i > 1) box[i] = 1;
  }
  return encode(map, dtype == KDT_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                kDimensions, const_cast<void*>(data), all_sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool map_cache(const AttnCall& call, const Boxes& boxes, CUtensorMap* map) {
  const kdt_kv_cache& cache = call.cache;
  return map_rows<3>(cache.data, call.p.q_dtype, {cache.page_size, cache.num_pages},
                     {cache.row_stride, cache.page_stride}, boxes.rows, map);
}

// By evenly spaced query rows, lines of those, requests.
bool map_queries(const kdt_verify_attn_params& p, const Boxes& boxes, CUtensorMap* map) {
  const int64_t lines = int64_t{p.num_queries} * p.num_heads / boxes.query_line;
  return map_rows<4>(p.q, p.q_dtype, {boxes.query_line, lines, p.batch_size},
                     {p.num_heads == 1 ? p.q_row_stride : p.q_head_stride, p.q_row_stride, p.q_stride},
                     boxes.query_rows, map);
}

template <class T>
int32_t launch_attend(const Session& session, const AttnCall& call, const Scratch& scratch, const CUtensorMap& map,
                      const CUtensorMap& query_map, const Boxes& boxes) {
  const int32_t grid = session.context().multiprocessors;
  return launch_kernel<sizeof(Shared), kHopperShared>(
      session, "verify_attn", attend_hopper<T>, grid, kThreads, After::kTriggered, call.p, call.cache, call.tree,
      scratch.plan, scratch.partials, map, query_map, boxes, pairs_are_aligned(call.p),
      fits_32_bits<TheBlocks>(call.p, call.cache, kHead, grid));
}

}  // namespace

std::optional<int32_t> enqueue_wgmma(const Session& session, const AttnCall& call, void* workspace) {
  const Boxes boxes = boxes_of(call.p, call.cache);
  CUtensorMap map, query_map;
  if (!map_cache(call, boxes, &map) || !map_queries(call.p, boxes, &query_map)) return std::nullopt;
  const Scratch scratch = scratch_of(workspace, call.p);
  const auto start = call.p.q_dtype == KDT_BF16 ? launch_attend<__nv_bfloat16> : launch_attend<__half>;
  KDT_TRY(start(session, call, scratch, map, query_map, boxes));
  return enqueue_combine(session, call.p, scratch, has_half_partials(call.p));
}

}  // namespace kdt::cuda
