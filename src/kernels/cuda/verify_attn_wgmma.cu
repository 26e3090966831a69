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
// - A third warpgroup loads, with few registers: one thread the columns 0..255 of each block, one the others. Each
//   half is refilled when its reader is done. It runs ahead into the next piece of work, which is planned while the
//   queries of the piece before it are loaded.
// - The plan, partial results and their joining are those of verify_attn_parts.cuh. Blocks begin at multiples of 64
//   rows, so that a page of 64 rows or more holds a block whole.
//
// Masks: only the blocks that reach into the tree, or before kv_start, are masked. Boxes (pages, or 64 rows of one)
// that have no row of the request, or no page, are zeros; the other rows of a box come as they are and count as
// masked. A NaN or infinity in a row makes its scores no numbers in every query row; where that shows in a masked
// block it is taken out of the values, and poison() writes NaN where a query sees it.
//
// Limits: Hopper alone. Cache rows in units of 16 bytes, pages of at least 8 rows, query rows in units of 16 bytes;
// else verify_attn_mma.cu. One block a multiprocessor, 227 KB of shared memory.
//
// Figures, and what was tried and lost: plans/0007-verify-attn-wgmma.md.
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

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

using TheBlocks = Blocks<kBlock, true, kInStepBytesHopper>;
using Work = WorkOf<TheBlocks>;

// Named barriers. Among all consumers: group 0's products for its scores have begun; its weights are there; group
// 1's are. kGroup + 1: of group 1 alone.
enum : int { kFirstBegun = 1, kFirstWeights, kSecondWeights, kAll, kGroup };

// What loaders need of a piece.
struct Loads {
  int32_t count;  // of blocks; negative: there is no more
  int32_t unmasked;
  uint32_t first_row, first_masked_row;  // of the first blocks of either kind
  uint32_t begin_row, end_row;           // rows of the request
  uint32_t request;
};

struct Piece {
  Work work;
  Loads loads;
  int32_t wanted[TheBlocks::kMaxMasked];  // counted from work.first_masked
};

// How pages are cut into boxes.
struct Boxes {
  int32_t rows;       // of a box
  uint32_t row_mask;  // of a row in its page
  int32_t page_shift;
};

struct Shared {
  alignas(1024) unsigned char stages[kStages][kChunks][kChunkBytes];
  unsigned char queries[kVChunks][kChunkBytes];  // the last 64 columns are in registers
  unsigned char weights[2][kChunkBytes];
  float base[kTile];        // RowState::max
  float factors[2][kTile];  // by which a group's block changed the results' unit
  float sums[2][kTile];     // of the weights of a group's blocks
  int32_t seen[2][kTile];
  int32_t poisoned;
  int32_t rose;                                             // 1 + the last block of group 0 that raised a maximum
  alignas(8) uint64_t full[kStages][2], empty[kStages][2];  // of the halves of the columns
  uint64_t piece_full[2], piece_empty[2];
  Piece pieces[2];
  Cut cut;
  int64_t part;
};
static_assert(sizeof(Shared) <= kHopperShared);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define KDT_HOPPER 1
#endif
#ifdef KDT_HOPPER

constexpr int32_t kHalf = kVChunks / 2;
// Where dynamic shared memory begins on Hopper in a kernel without static shared memory: the first 1,024 bytes are
// the system's. As a constant, so that descriptors are constants; attend_hopper() checks it.
constexpr uint32_t kSharedBase = 1024;
constexpr int32_t kFoldEvery = 16;  // pairs between foldings of RowState::recent into weight
constexpr int32_t kConsumerRegisters = 240, kLoaderRegisters = 24;
constexpr int32_t kPlanner = kConsumers / kWarpSize - 1;  // a warp of the group that starts last

__device__ int32_t block_at(const Piece& piece, int32_t i) {
  const Work& w = piece.work;
  return i < w.unmasked ? w.first + i : w.first_masked + piece.wanted[i - w.unmasked];
}

// ---- planning, by one warp ---------------------------------------------------------------------------

// Blocks of all requests.
__device__ int64_t count_blocks(const AttnRequest* requests, int64_t batch_size) {
  int64_t blocks = 0;
  for (int64_t b = threadIdx.x % kWarpSize; b < batch_size; b += kWarpSize) blocks += TheBlocks::count(requests[b]);
  return sum_of_lanes(blocks);
}

// Sets `work` to the first piece of a part. With `offsets` also writes the blocks before each request.
__device__ void find_first_work(Work& work, const AttnRequest* requests, int64_t batch_size, const Cut& cut,
                                int64_t part, int64_t* offsets) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t begin = cut.begin(part), wanted = begin - quotient(begin, cut.blocks) * cut.blocks;
  int64_t before = 0;
  for (int64_t first = 0; first < batch_size; first += kWarpSize) {
    const int64_t b = first + lane;
    const int64_t own = b < batch_size ? TheBlocks::count(requests[b]) : 0;
    const int64_t sum = sum_up_to_lane(own);
    const int64_t offset = before + sum - own;
    if (offset <= wanted && wanted < offset + own) {
      work.offset = offset;
      work.set(requests[b], b, cut, begin, cut.begin(part + 1));
    }
    if (offsets != nullptr && b < batch_size) offsets[b] = offset;
    before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    if (offsets == nullptr && before > wanted) break;
  }
  if (offsets != nullptr && lane == 0) offsets[batch_size] = cut.blocks;
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
    if (lane < 4 && seen != 0) piece.wanted[wanted + __popc(lanes & ((1u << lane) - 1))] = base + lane;
    wanted += __popc(lanes);
  }
  if (lane == 0) {
    w.unmasked = first_row < end_row ? w.first_masked - w.first : 0;
    w.count = w.unmasked + wanted;
    piece.loads = {w.count,
                   w.unmasked,
                   static_cast<uint32_t>(w.first_row(w.first)),
                   static_cast<uint32_t>(w.first_row(w.first_masked)),
                   static_cast<uint32_t>(w.request.kv_start),
                   static_cast<uint32_t>(w.request.prefix_len) + static_cast<uint32_t>(w.request.node_count),
                   static_cast<uint32_t>(w.b)};
  }
}

// Plans piece k of this thread block; the piece before it is planned, the one before that done with. `more`:
// whether there was one. Returns whether there is this one.
__device__ bool plan(Shared& s, uint32_t memory, uint32_t k, bool more, const kdt_verify_attn_params& p,
                     const kdt_tree& tree, const AttnRequest* requests, int64_t* offsets, int64_t tiles) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  Piece& piece = s.pieces[k % 2];
  if (k == 0) {
    const int64_t blocks = count_blocks(requests, p.batch_size);
    if (blocks == 0 && blockIdx.x == 0) {
      for (int64_t b = lane; b <= p.batch_size; b += kWarpSize) offsets[b] = 0;
    }
    const Cut cut(max(blocks, int64_t{1}), TheBlocks::kInStepFrom, tiles, gridDim.x);
    more = blocks > 0 && blockIdx.x < cut.parts;
    if (more) {
      const int64_t part = cut.part_of(blockIdx.x);
      if (lane == 0) {
        s.cut = cut;
        s.part = part;
      }
      find_first_work(piece.work, requests, p.batch_size, cut, part, blockIdx.x == 0 ? offsets : nullptr);
    }
  } else if (more) {
    if (k > 1) wait_for_phase(memory + offsetof(Shared, piece_empty) + k % 2 * 8, (k / 2 - 1) & 1);
    if (lane == 0) piece.work = s.pieces[(k - 1) % 2].work;
    __syncwarp();
    more = next_work(piece.work, requests, p.batch_size, s.cut, s.cut.begin(s.part + 1));
    __syncwarp();
  }
  if (more) {
    find_wanted(piece, p, tree);
  } else if (lane == 0) {
    piece.loads.count = -1;
  }
  __syncwarp();
  if (lane == 0) arrive(memory + offsetof(Shared, piece_full) + k % 2 * 8);
  return more;
}

// ---- loading, by one thread --------------------------------------------------------------------------

// Loads one half of the columns (the last 64 belong to the right one) of all blocks.
template <int32_t kHalfIndex>
__device__ __forceinline__ void load(Shared& s, uint32_t memory, const kdt_kv_cache& cache, const CUtensorMap& map,
                                     const Boxes& boxes) {
  constexpr int32_t kBegin = kHalfIndex * kHalf, kEnd = kHalfIndex == 0 ? kHalf : kChunks;
  uint32_t loaded = 0;  // bit s: stage s has been; bit 2 + s: the parity of its next release
  for (uint32_t k = 0;; ++k) {
    wait_for_phase(memory + offsetof(Shared, piece_full) + k % 2 * 8, k / 2 & 1);
    const Piece& piece = s.pieces[k % 2];
    const Loads& loads = piece.loads;
    const int32_t count = loads.count;
    if (count < 0) return;
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t stage = i % 2;
      uint32_t row = loads.first_row + static_cast<uint32_t>(i) * kBlock;
      if (i >= loads.unmasked) {
        row = loads.first_masked_row + static_cast<uint32_t>(piece.wanted[i - loads.unmasked]) * kBlock;
      }
      uint32_t target = memory + stage * static_cast<uint32_t>(kChunks * kChunkBytes) + kBegin * kChunkBytes;
      const uint32_t full = memory + offsetof(Shared, full) + (stage * 2 + kHalfIndex) * 8;
      const auto page_of = [&]() -> int32_t {
        if (row >= loads.end_row || row + boxes.rows <= loads.begin_row) return -1;
        if (cache.block_table == nullptr) return static_cast<int32_t>(loads.request);
        const int32_t column = static_cast<int32_t>(row >> boxes.page_shift);
        return column < cache.max_pages ? cache.block_table[loads.request * cache.block_table_stride + column] : -1;
      };
      int32_t page = page_of();
      if ((loaded >> stage & 1) != 0) {
        wait_for_phase(memory + offsetof(Shared, empty) + (stage * 2 + kHalfIndex) * 8, loaded >> (2 + stage) & 1);
        loaded ^= 4u << stage;
      }
      loaded |= 1u << stage;
      arrive_expecting(full, (kEnd - kBegin) * kChunkBytes);
#pragma unroll 1
      for (int32_t r = 0;;) {
#pragma unroll
        for (int32_t c = 0; c < kEnd - kBegin; ++c) {
          copy_box(target + c * kChunkBytes, map, full, (kBegin + c) * 64,
                   static_cast<int32_t>(row & boxes.row_mask), page);
        }
        r += boxes.rows;
        if (r >= kBlock) break;
        row += boxes.rows;
        target += boxes.rows * 128;
        page = page_of();
      }
    }
    arrive(memory + offsetof(Shared, piece_empty) + k % 2 * 8);
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

// What the query of a row of the tile sees of 32 rows of a block, from `from` on; one warp.
__device__ __forceinline__ uint32_t mask_of(const Work& w, const kdt_verify_attn_params& p,
                                            const kdt_kv_cache& cache, const kdt_tree& tree, int32_t row,
                                            int32_t block, int32_t from) {
  const int32_t tile_row = w.tile * kTile + row;
  const int64_t first_row = w.first_row(block) + from;
  uint32_t mask = 0;
  if (tile_row < w.node_rows(p.num_heads)) {
    mask = seen_bits(tree, w.b, tile_row / p.num_heads, w.first_slot(block) + from, w.request.node_count);
  }
  const int64_t before = w.request.kv_start - first_row;
  if (before > 0) mask = before < 32 ? mask & ~0u << before : 0;
  if (w.request.lacks_rows != 0) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    mask &= __ballot_sync(kAllLanes, row_offset(cache, w.b, first_row + lane) >= 0);
  }
  return mask;
}

// Queries times keys of the group's block, the left chunks or the right ones, each for themselves: tensor cores
// round down when they add, and the scores are nearer when two shorter sums are added.
template <class T, int32_t kBegin, int32_t kEnd>
__device__ __forceinline__ void multiply_chunks(uint32_t memory, int32_t stage, uint32_t parity,
                                                const Weights& last, Scores& scores) {
  constexpr int32_t kHalfIndex = kBegin == 0 ? 0 : 1;
  const uint32_t keys = tile_by_rows(memory + stage * static_cast<uint32_t>(kChunks * kChunkBytes));
  const uint32_t queries = tile_by_rows(memory + static_cast<uint32_t>(offsetof(Shared, queries)));
  wait_for_phase(memory + offsetof(Shared, full) + (stage * 2 + kHalfIndex) * 8, parity);
  begin_products();
#pragma unroll
  for (int32_t c = kBegin; c < kEnd; ++c) {
#pragma unroll
    for (int32_t k = 0; k < 4; ++k) {
      const uint32_t key = further(keys, c * kChunkBytes + k * 32);
      if (c == kBegin && k == 0) {
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

__device__ __forceinline__ void rescale(Results& results, float upper, float lower) {
#pragma unroll
  for (int32_t j = 0; j < 32; ++j) {
    results[4 * j] *= upper;
    results[4 * j + 1] *= upper;
    results[4 * j + 2] *= lower;
    results[4 * j + 3] *= lower;
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

// What the softmax of the two rows of a thread has come to, of this group's blocks.
struct Sums {
  float weight[2], recent[2];
  bool seen[2];

  __device__ void rescale(float upper, float lower) {
    weight[0] *= upper;
    recent[0] *= upper;
    weight[1] *= lower;
    recent[1] *= lower;
  }
};

// Scores to weights. Returns whether the maximum of some row of this warp rose; `factors` are 1 for those that did
// not.
template <class T>
__device__ __forceinline__ bool softmax(Shared& s, const kdt_verify_attn_params& p, const kdt_kv_cache& cache,
                                        const kdt_tree& tree, const Piece& piece, const Place& at, int32_t i,
                                        Scores& scores, Weights& weights, Sums& sums, float (&factors)[2]) {
  const Work& w = piece.work;
  const int32_t block = block_at(piece, i);
  const bool masked = i >= w.unmasked || w.request.lacks_rows != 0 || w.first_row(block) < w.request.kv_start;
  if (masked) {
    bool bad = false;
#pragma unroll
    for (int32_t k = 0; k < 32; ++k) bad |= !(fabsf(scores[k]) < positive_infinity());
    uint32_t masks[2][2] = {};  // of rows row and row + 8: the block's halves
#pragma unroll 1
    for (int32_t n = 0; n < 4; ++n) {
      const uint32_t mask = mask_of(w, p, cache, tree, at.row + n / 2 * 8, block, n % 2 * 32);
#pragma unroll
      for (int32_t m = 0; m < 4; ++m) masks[m / 2][m % 2] = m == n ? mask : masks[m / 2][m % 2];
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      sums.seen[h] |= (masks[h][0] | masks[h][1]) != 0;
#pragma unroll
      for (int32_t j = 0; j < 8; ++j) {
        const int32_t k = 4 * j + 2 * h;
        const uint32_t two = masks[h][j / 4] >> (8 * (j % 4) + 2 * at.t);
        if ((two & 1) == 0) scores[k] = negative_infinity();
        if ((two & 2) == 0) scores[k + 1] = negative_infinity();
      }
    }
    if (sync_part_or<kGroupThreads>(kGroup + at.group, bad)) {
      clean<T>(s.stages[i % 2][0]);
      s.poisoned = 1;
      sync_part<kGroupThreads>(kGroup + at.group);
    }
  } else {
    sums.seen[0] = sums.seen[1] = true;
  }
  float top[2] = {scores[0], scores[2]}, base[2];
#pragma unroll
  for (int32_t j = 0; j < 8; ++j) {
    top[0] = fmaxf(top[0], fmaxf(scores[4 * j], scores[4 * j + 1]));
    top[1] = fmaxf(top[1], fmaxf(scores[4 * j + 2], scores[4 * j + 3]));
  }
  const float scale = scale_of(p);
  bool rise = false;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    base[h] = s.base[at.row + h * 8];
    factors[h] = 1.0f;
    rise |= (top[h] - base[h]) * scale > kLazyMax;
  }
  rise = __any_sync(kAllLanes, rise);
  if (rise) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 2));
      if ((top[h] - base[h]) * scale > kLazyMax) {
        factors[h] = exp2_approx((base[h] - top[h]) * scale);
        base[h] = top[h];
      }
    }
  }
  if (rise && at.group == 0 && at.lane == 0) s.rose = i + 1;
  __syncwarp();  // all have read the old maxima
  if (at.t == 0) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      s.factors[at.group][at.row + h * 8] = factors[h];
      if (rise) s.base[at.row + h * 8] = base[h];
    }
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    if (base[h] == negative_infinity()) base[h] = 0.0f;
    if (rise) {
      sums.weight[h] *= factors[h];
      sums.recent[h] *= factors[h];
    }
  }
#pragma unroll
  for (int32_t k = 0; k < 32; ++k) {
    const int32_t h = k / 2 % 2;
    scores[k] = exp2_approx(fmaf(scores[k] - base[h], scale, kUnit<T>));
    sums.recent[h] += scores[k];
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

__device__ __forceinline__ void store_weights(uint32_t target, const Place& at, const Weights& weights) {
  const int32_t row = at.warp * 16 + at.lane % 16;
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    store_matrices(target + row * 128 + (((2 * k + at.lane / 16) ^ row % 8) * 16), weights[k]);
  }
  fence_for_products();
}

// The other group's factors of this thread's rows; false when all in the warp are 1.
__device__ __forceinline__ bool read_factors(const Shared& s, int32_t group, const Place& at, float (&factors)[2]) {
  factors[0] = s.factors[group][at.row];
  factors[1] = s.factors[group][at.row + 8];
  return __any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f);
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
                                            const kdt_kv_cache& cache, const kdt_tree& tree, const Piece& piece,
                                            const Place& at, const Weights& last, uint32_t& loaded, int32_t i,
                                            Scores& scores, Scores& right, Results& results, Sums& sums) {
  const uint32_t left0 = memory, left1 = memory + kChunks * kChunkBytes;
  const uint32_t weights0 = memory + offsetof(Shared, weights), weights1 = weights0 + kChunkBytes;
  Weights weights;
  float factors[2];
  wait_for_products<0>();
  add_right(scores, right);
  hold(results);
  if (softmax<T>(s, p, cache, tree, piece, at, i, scores, weights, sums, factors)) {
    rescale(results, factors[0], factors[1]);
  }
  // Group 1 has multiplied the weights before these: it then freed its half of the stage, which has been filled
  // since.
  store_weights(weights0, at, weights);
  arrive_part<kConsumers>(kFirstWeights);
  add_values<T>(left0, weights, results);
  wait_for_products<0>();
  hold(results);
  hold(weights);
  release(memory, at, 0);
  if constexpr (kHasSecond) {
    sync_part<kConsumers>(kSecondWeights);
    if (read_factors(s, 1, at, factors)) {
      rescale(results, factors[0], factors[1]);
      sums.rescale(factors[0], factors[1]);
    }
    add_values<T>(left1, weights1, results);
    if constexpr (kIsMore) {
      multiply_chunks<T, 0, kHalf>(memory, 0, loaded & 1, last, scores);
      wait_for_products<1>();
      release(memory, at, 1);
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
                                             const kdt_kv_cache& cache, const kdt_tree& tree, const Piece& piece,
                                             const Place& at, const Weights& last, uint32_t& loaded,
                                             Results& results, Sums& sums) {
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
    attend_pair<T, true, true>(s, memory, p, cache, tree, piece, at, last, loaded, i, scores, right, results, sums);
  }
  if (i + 1 < count) {
    attend_pair<T, true, false>(s, memory, p, cache, tree, piece, at, last, loaded, i, scores, right, results,
                                sums);
  } else {
    attend_pair<T, false, false>(s, memory, p, cache, tree, piece, at, last, loaded, i, scores, right, results,
                                 sums);
  }
}

// The second group.
template <class T>
__device__ __forceinline__ void attend_second(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                              const kdt_kv_cache& cache, const kdt_tree& tree, const Piece& piece,
                                              const Place& at, const Weights& last, uint32_t& loaded,
                                              Results& results, Sums& sums) {
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
    multiply_chunks<T, 0, kHalf>(memory, 1, loaded & 1, last, scores);
    multiply_chunks<T, kHalf, kChunks>(memory, 1, loaded & 1, last, right);
    ++loaded;
    sync_part<kConsumers>(kFirstWeights);
    if (uniform(s.rose) == i + 1) {  // the same for all warps, as waits must be
      read_factors(s, 0, at, factors);
      wait_for_products<0>();
      hold(results);
      rescale(results, factors[0], factors[1]);
      sums.rescale(factors[0], factors[1]);
    }
    add_values<T>(right0, weights0, results);
    wait_for_products<1>();
    add_right(scores, right);
    const bool rose = softmax<T>(s, p, cache, tree, piece, at, i + 1, scores, weights, sums, factors);
    store_weights(weights1, at, weights);
    arrive_part<kConsumers>(kSecondWeights);
    wait_for_products<0>();
    hold(results);
    release(memory, at, 0);
    if (rose) rescale(results, factors[0], factors[1]);
    add_values<T>(right1, weights, results);
    wait_for_products<0>();
    hold(results);
    hold(weights);
    release(memory, at, 1);
  }
  if (i < count) {
    sync_part<kConsumers>(kFirstBegun);
    sync_part<kConsumers>(kFirstWeights);
    if (read_factors(s, 0, at, factors)) {
      rescale(results, factors[0], factors[1]);
      sums.rescale(factors[0], factors[1]);
    }
    add_values<T>(right0, weights0, results);
    wait_for_products<0>();
    hold(results);
    release(memory, at, 0);
  }
}

// Loads the queries of a tile, zeros where there are none: 512 columns to where they are used, the last 64 to where
// the first weights will be. A warp has eight rows.
template <class T>
__device__ __forceinline__ void load_queries(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                             const Work& w, int32_t first_row, int32_t node_rows) {
  constexpr int32_t kRows = kTile / (kConsumers / kWarpSize), kPieces = kQkDim / 8;  // of 16 bytes, a row
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t warp_row = static_cast<int32_t>(threadIdx.x) / kWarpSize * kRows;
  const int32_t own = first_row + warp_row + lane % kRows;  // the row whose place this lane works out
  const int64_t place =
      own < node_rows ? own / p.num_heads * p.q_row_stride + own % p.num_heads * p.q_head_stride : -1;
  const T* const queries = static_cast<const T*>(p.q) + w.b * p.q_stride;
#pragma unroll 6
  for (int32_t n = lane; n < kRows * kPieces; n += kWarpSize) {
    const int32_t r = n / kPieces, piece = n % kPieces, row = warp_row + r;
    const int64_t from = __shfl_sync(kAllLanes, place, r);
    const uint32_t tile = static_cast<uint32_t>(
        piece < kVDim / 8 ? offsetof(Shared, queries) + piece / 8 * kChunkBytes : offsetof(Shared, weights));
    copy_async(memory + tile + row * 128 + ((piece % 8 ^ row % 8) * 16),
               queries + max(from, int64_t{0}) + piece * 8, from >= 0);
  }
  wait_for_copies();
  if (p.scale < 0.0f) {  // its sign goes to the queries
#pragma unroll 1
    for (int32_t n = lane; n < kRows * kPieces; n += kWarpSize) {
      const int32_t piece = n % kPieces, row = warp_row + n / kPieces;
      unsigned char* const tile = piece < kVDim / 8 ? s.queries[piece / 8] : s.weights[0];
      uint4& eight = *reinterpret_cast<uint4*>(tile + row * 128 + ((piece % 8 ^ row % 8) * 16));
      eight = {eight.x ^ 0x80008000u, eight.y ^ 0x80008000u, eight.z ^ 0x80008000u, eight.w ^ 0x80008000u};
    }
  }
}

template <class T>
__device__ __forceinline__ void consume(Shared& s, uint32_t memory, const kdt_verify_attn_params& p,
                                        const kdt_kv_cache& cache, const kdt_tree& tree,
                                        const AttnRequest* requests, int64_t* offsets, Partial* partials,
                                        int64_t tiles, bool out_pairs) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int32_t warp = uniform(thread / kWarpSize % 4);
  const Place at = {uniform(thread / kGroupThreads), warp, lane, warp * 16 + lane / 4, lane % 4};
  const int32_t query_rows = p.num_queries * p.num_heads;
  const bool plans = uniform(thread / kWarpSize) == kPlanner;
  uint32_t loaded = 0;
  bool planned = plans && plan(s, memory, 0, true, p, tree, requests, offsets, tiles);
  for (uint32_t k = 0;; ++k) {
    wait_for_phase(memory + offsetof(Shared, piece_full) + k % 2 * 8, k / 2 & 1);
    const Piece& piece = s.pieces[k % 2];
    const Work& w = piece.work;
    if (uniform(piece.loads.count) < 0) return;

    // ---- the queries
    const int32_t first_row = w.tile * kTile, node_rows = w.node_rows(p.num_heads);
    load_queries<T>(s, memory, p, w, first_row, node_rows);
    if (thread < kTile) s.base[thread] = negative_infinity();
    if (thread == 0) s.poisoned = s.rose = 0;
    fence_for_products();
    if (plans) planned = plan(s, memory, k + 1, planned, p, tree, requests, offsets, tiles);
    sync_part<kConsumers>(kAll);
    Weights last;  // queries, their last 64 columns
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      load_matrices<false>(last[j], memory + static_cast<uint32_t>(offsetof(Shared, weights)) +
                                        (warp * 16 + lane % 16) * 128 + (((2 * j + lane / 16) ^ lane % 8) * 16));
    }
    // Group 0 writes its weights there when all have read this: group 1 then has, or had to before its next
    // barrier.
    sync_part<kConsumers>(kAll);

    // ---- over the cache
    Results results;
#pragma unroll
    for (int32_t i = 0; i < 128; ++i) results[i] = 0.0f;
    Sums sums = {};
    if (at.group == 0) {
      attend_first<T>(s, memory, p, cache, tree, piece, at, last, loaded, results, sums);
    } else {
      attend_second<T>(s, memory, p, cache, tree, piece, at, last, loaded, results, sums);
    }

    // ---- results
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float weight = sums.weight[h] + sums.recent[h];
      weight += __shfl_xor_sync(kAllLanes, weight, 1);
      weight += __shfl_xor_sync(kAllLanes, weight, 2);
      if (at.t == 0) {
        s.sums[at.group][at.row + h * 8] = weight;
        s.seen[at.group][at.row + h * 8] = sums.seen[h] ? 1 : 0;
      }
    }
    sync_part<kConsumers>(kAll);
    Partial* const partial = w.whole() ? nullptr : &partials[s.part * 2 + (w.first == 0 ? 1 : 0)];
    if (partial != nullptr) {
      float4* const target = &partial->values[warp][at.group * (kVDim / 8 / 2)][lane];
#pragma unroll
      for (int32_t j = 0; j < 32; ++j) {
        target[j * kWarpSize] =
            make_float4(results[4 * j], results[4 * j + 1], results[4 * j + 2], results[4 * j + 3]);
      }
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t tile_row = at.row + h * 8, row = first_row + tile_row;
      RowState state = {s.base[tile_row], s.sums[0][tile_row] + s.sums[1][tile_row], 0.0f,
                        s.seen[0][tile_row] | s.seen[1][tile_row]};
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
      const bool all = w.request.lacks_rows != 0;
      const int32_t end = all ? w.first_masked : w.first_row(w.first) < w.request.kv_start ? w.first + 1 : w.first;
      poison<T, kConsumers>(w, w.first, min(end, w.first_masked), p, cache, tree, 0, kTile, thread, partial);
      poison<T, kConsumers>(w, w.first_masked, w.end, p, cache, tree, 0, kTile, thread, partial);
    }
    sync_part<kConsumers>(kAll);  // shared memory has been read
  }
}

#endif  // KDT_HOPPER

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend_hopper(const __grid_constant__ kdt_verify_attn_params p, const __grid_constant__ kdt_kv_cache cache,
                  const __grid_constant__ kdt_tree tree, const AttnRequest* requests, int64_t* offsets,
                  Partial* partials, int64_t tiles, const __grid_constant__ CUtensorMap map,
                  const __grid_constant__ Boxes boxes, bool out_pairs) {
#ifdef KDT_HOPPER
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  constexpr uint32_t memory = kSharedBase;
  if (shared_address(dynamic_shared) % (1u << 24) != kSharedBase) __trap();
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kStages * 2; ++i) {
      init_barrier(memory + offsetof(Shared, full) + i * 8, 1);
      init_barrier(memory + offsetof(Shared, empty) + i * 8, 4);
    }
    for (int32_t i = 0; i < 2; ++i) {
      init_barrier(memory + offsetof(Shared, piece_full) + i * 8, 1);
      init_barrier(memory + offsetof(Shared, piece_empty) + i * 8, 2);
    }
    fence_barriers();
  }
  trigger_dependents();  // all blocks run at once, so those of the next kernel take nothing from them
  wait_for_primary();
  __syncthreads();
  if (uniform(static_cast<int32_t>(threadIdx.x) / kGroupThreads) < 2) {
    take_registers<kConsumerRegisters>();
    consume<T>(s, memory, p, cache, tree, requests, offsets, partials, tiles, out_pairs);
  } else {
    give_registers<kLoaderRegisters>();
    const uint32_t thread = threadIdx.x - kConsumers;
    if (thread == 0) load<0>(s, memory, cache, map, boxes);
    if (thread == kWarpSize) load<1>(s, memory, cache, map, boxes);
  }
#endif
}

// ---- launching ---------------------------------------------------------------------------------------

Boxes boxes_of(const kdt_kv_cache& cache) {
  Boxes boxes = {kBlock, ~0u, 0};
  if (cache.block_table == nullptr) return boxes;
  boxes.rows = std::min(static_cast<int32_t>(cache.page_size), kBlock);
  boxes.row_mask = static_cast<uint32_t>(cache.page_size) - 1;
  boxes.page_shift = page_shift_of(cache);
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

// The cache as boxes of 64 columns and up to 64 rows of a page. False where it cannot be had so.
bool map_cache(const kdt_kv_cache& cache, int32_t dtype, CUtensorMap* map) {
  static const Encode encode = find_encode();  // once, not in every call
  if (encode == nullptr) return false;
  const cuuint64_t sizes[3] = {kQkDim, static_cast<cuuint64_t>(cache.page_size),
                               static_cast<cuuint64_t>(cache.num_pages)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(cache.row_stride) * 2,
                                 static_cast<cuuint64_t>(cache.page_stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(boxes_of(cache).rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(map, dtype == KDT_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
                const_cast<void*>(cache.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T>
int32_t launch_attend(const Session& session, const AttnCall& call, const AttnRequest* requests,
                      const Scratch& scratch, const CUtensorMap& map) {
  return launch_kernel<sizeof(Shared), kHopperShared>(
      session, "verify_attn", attend_hopper<T>, session.context().multiprocessors, kThreads, After::kTriggered,
      call.p, call.cache, call.tree, requests, scratch.offsets, scratch.partials, tiles_of(call.p), map,
      boxes_of(call.cache), pairs_are_aligned(call.p));
}

}  // namespace

std::optional<int32_t> enqueue_wgmma(const Session& session, const AttnCall& call, const AttnRequest* requests,
                                     void* workspace) {
  CUtensorMap map;
  if (!map_cache(call.cache, call.p.q_dtype, &map)) return std::nullopt;
  const Scratch scratch = scratch_of(workspace, call.p.batch_size);
  const auto start = call.p.q_dtype == KDT_BF16 ? launch_attend<__nv_bfloat16> : launch_attend<__half>;
  KDT_TRY(start(session, call, requests, scratch, map));
  return enqueue_combine(session, call.p, scratch, TheBlocks::kInStepFrom);
}

}  // namespace kdt::cuda
