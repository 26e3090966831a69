// What verify_attn's tensor-core kernels share: the plan that cuts all work into a part for each multiprocessor,
// what a query sees of a block of cache rows, partial results and how they are joined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attn_choice.hpp"
#include "launch.hpp"
#include "mma.cuh"
#include "verify_attn.cuh"

namespace kdt::cuda {

inline constexpr int32_t kTile = 64;  // query rows a thread block works on, query-major, head-minor
inline constexpr int32_t kRowBytes = kQkDim * 2;
inline constexpr float kLazyMax = 8.0f;  // how far a maximum may rise, in base 2, before it is followed

// ---- softmax -----------------------------------------------------------------------------------------

// What the softmax of a query row has come to. Scores of -inf alone leave max at -inf and weights of 0.
struct RowState {
  float max;     // of the scores before the scale, or a little less (kLazyMax)
  float weight;  // sum of 2^(kUnit + (score - max) scale), scale in base 2
  float recent;  // weights that are not in `weight` yet, so that float32 sums stay short
  int32_t seen;  // the query saw a row

  // What is subtracted from scores.
  __device__ float base() const { return max == negative_infinity() ? 0.0f : max; }
};

// Weights are up to 2^(kUnit + kLazyMax). float16 has room above 1 and too little below it: a long tail of small
// weights beside a large one would be lost.
template <class T>
inline constexpr float kUnit = __is_same(T, __half) ? 7.0f : 0.0f;

// Of scores, in base 2; the sign is the queries'.
__device__ inline float scale_of(const kdt_verify_attn_params& p) { return fabsf(p.scale) * 1.4426950408889634f; }

// As store_lse() takes it; `one` is what a weight of 1 counts as.
__device__ inline State in_base_e(const kdt_verify_attn_params& p, double weight, float max, int32_t seen,
                                  float one) {
  return {weight / static_cast<double>(one), max * fabsf(p.scale), seen};
}

// Of a tile that was cut.
struct Partial {
  // Weighted sums, as they lie in registers: of 16 rows and 8 columns each lane l has, with g = l / 4 and t = l %
  // 4, those at (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
  union {
    float4 values[kTile / 16][kVDim / 8][kWarpSize];
    // The same in float16, in units of 2^exponents[column / 256][row]: half the bytes to write and to read. For
    // results that are rounded to bfloat16 in the end, which has an eighth of the precision.
    uint2 halves[kTile / 16][kVDim / 8][kWarpSize];
  };
  RowState states[kTile];
  int32_t exponents[2][kTile];

  __device__ void set_nan(int32_t row, int32_t column, bool are_halves) {
    const int32_t warp = row / 16, eight = column / 8, lane = row % 8 * 4 + column % 8 / 2;
    const int32_t number = row / 8 % 2 * 2 + column % 2;
    if (are_halves) {
      reinterpret_cast<__half*>(&halves[warp][eight][lane])[number] = __float2half(quiet_nan());
    } else {
      reinterpret_cast<float*>(&values[warp][eight][lane])[number] = quiet_nan();
    }
  }
};

// The exponent in whose units float16 holds numbers up to `largest` as well as it can.
__device__ inline int32_t exponent_for(float largest) {
  return max((__float_as_int(largest) >> 23) - (127 + 14), -120);
}
__device__ inline float power_of_two(int32_t exponent) { return __int_as_float((exponent + 127) << 23); }

// ---- the plan ----------------------------------------------------------------------------------------

// How a kernel cuts a request's cache rows into blocks of kRows: from kv_start on or, aligned, from the multiple of
// kRows before it. Beyond kInStepFrom of them the tiles of a request are worked on in step (Cut).
template <int32_t kBlockRows, bool kAligned, int64_t kInStepBytesOfRows>
struct Blocks {
  static constexpr int32_t kRows = kBlockRows;
  static constexpr int64_t kInStepFrom = kInStepBytesOfRows / (kRows * kRowBytes);
  static constexpr int32_t kMaxMasked = (KDT_MAX_BUDGET + 1 + kRows - 1) / kRows + 1;  // that reach into the tree

  __device__ static int32_t start(const AttnRequest& r) {
    return kAligned ? r.kv_start - r.kv_start % kRows : r.kv_start;
  }
  __device__ static int32_t of_prefix(const AttnRequest& r) {  // whole ones
    return static_cast<int32_t>(static_cast<uint32_t>(r.prefix_len - start(r)) / kRows);
  }
  __device__ static int32_t count(const AttnRequest& r) {
    const uint32_t rows = static_cast<uint32_t>(r.prefix_len - start(r)) + static_cast<uint32_t>(r.node_count);
    return r.node_count == 0 ? 0 : static_cast<int32_t>((rows + (kRows - 1)) / kRows);
  }
};

// a / b of numbers >= 0, of which most are small.
template <class Int>
__device__ Int quotient(Int a, Int b) {
  if (sizeof(Int) > 4 && (static_cast<int64_t>(a | b) >> 32) != 0) return a / b;
  return static_cast<Int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// A warp's sums: of all lanes, and of the lanes up to this one.
__device__ inline int64_t sum_of_lanes(int64_t value) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
template <class Int>
__device__ Int sum_up_to_lane(Int value) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const Int before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// A thread block's part of all work, on the line of Cut.
struct Share {
  int64_t part, begin, end;
  int32_t tile;  // where it begins
};

// All work as one line of blocks, tile by tile and in each request by request, cut into parts of one length.
// Neighbouring thread blocks have neighbouring parts, or, in step, the same part of neighbouring tiles. Each
// request begins with `head` blocks that are none: what a further piece of work costs a part besides its blocks.
//
// In what is a template, Int holds what is worked out: 64 bits always do, and take a warp that plans alone twice as
// long; 32 where the line, times one more than the number of parts, does not reach 2^31 (fits_32_bits()).
struct Cut {
  int64_t blocks;  // of one tile, over all requests, heads included
  int64_t parts;
  int64_t tiles;
  int32_t head;
  int32_t in_column;  // parts of one tile, where they are in step, else 0

  Cut() = default;
  // Of so many blocks of a tile, over so many requests that have some; `column` is most_parts / tiles. `even`: the
  // requests are of one length, and are cut into the same number of parts each if that leaves few thread blocks
  // idle: then nobody has pieces of two.
  template <class Int>
  __device__ Cut(Int blocks, Int requests, bool even, int32_t most_head, Int in_step_from, Int tiles,
                 int32_t most_parts, int32_t column)
      : tiles(tiles), head(0), in_column(0) {
    const auto is_enough = [&](Int parts) {
      return static_cast<float>(parts) >= (1.0f - kMostIdle) * static_cast<float>(most_parts);
    };
    if (even && requests > 1 && column >= requests) {
      const int32_t aligned = column - static_cast<int32_t>(column % static_cast<int32_t>(requests));
      if (is_enough(aligned * tiles)) {
        column = aligned;
        most_head = 0;
      }
    }
    column = max(1, static_cast<int32_t>(min(Int{column}, blocks / kFewestBlocks)));
    Int parts = max(Int{1}, min(Int{most_parts}, blocks * tiles / kFewestBlocks));
    const Int busy = column * tiles;
    if (blocks > in_step_from && busy <= most_parts && is_enough(busy)) {
      in_column = column;
      parts = busy;
    }
    // With one request a part has one piece. Heads are small beside a part, so that every part has some work.
    if (requests > 1 && most_head > 0) {
      head = static_cast<int32_t>(min(Int{most_head}, quotient<Int>(blocks * tiles, parts) / 4));
    }
    this->parts = parts;
    this->blocks = blocks + head * requests;
  }
  // Of a request of so many blocks, on the line.
  __device__ int32_t length(int32_t request_blocks) const { return request_blocks > 0 ? request_blocks + head : 0; }
  // Of a thread block; `row` is block / tiles.
  template <class Int>
  __device__ Share share(int32_t block, int32_t row) const {
    const Int blocks = static_cast<Int>(this->blocks);
    if (in_column > 0) {
      const int32_t tile = block - row * static_cast<int32_t>(tiles);
      const Int line = tile * blocks;
      return {tile * in_column + row, line + quotient<Int>(row * blocks, in_column),
              line + quotient<Int>((row + 1) * blocks, in_column), tile};
    }
    const Int all = blocks * static_cast<Int>(tiles), parts = static_cast<Int>(this->parts);
    const Int begin = quotient<Int>(block * all, parts);
    return {block, begin, quotient<Int>((block + Int{1}) * all, parts),
            static_cast<int32_t>(quotient<Int>(begin, blocks))};
  }
  __device__ int64_t part_with(int64_t at) const { return quotient((at + 1) * parts - 1, blocks * tiles); }
};

// A tile's part of a request. In shared memory, since registers are full.
template <class TheBlocks>
struct WorkOf {
  AttnRequest request;
  int32_t request_blocks;
  int32_t first, end;    // blocks
  int32_t first_masked;  // blocks from here on reach into the tree
  int32_t tile;
  int64_t b;
  int64_t offset;    // on the line, of its request in its tile
  int64_t position;  // on the line, of what comes after it

  // `at`, in this tile, and `line_end` are positions on the line, `offset` is set. A line that ends in the
  // request's head leaves an empty piece, the last of its part.
  template <class Int>
  __device__ void set(const AttnRequest& of, int64_t request_index, const Cut& cut, int32_t at_tile, Int at,
                      Int line_end) {
    request = of;
    request_blocks = TheBlocks::count(of);
    b = request_index;
    tile = at_tile;
    const Int request_at = tile * static_cast<Int>(cut.blocks) + static_cast<Int>(offset),
              place = min(line_end, request_at + cut.length(request_blocks));
    position = place;
    first = static_cast<int32_t>(max(at - request_at - cut.head, Int{0}));
    end = static_cast<int32_t>(max(place - request_at - cut.head, Int{0}));
    first_masked = min(max(TheBlocks::of_prefix(of), first), end);
  }
  // The blocks that some query row of the tile sees, one after another: those before first_masked, then
  // the wanted ones of the masked blocks.
  int32_t unmasked, count;

  __device__ bool empty() const { return first == end; }
  __device__ bool whole() const { return first == 0 && end == request_blocks; }
  __device__ int32_t node_rows(int32_t num_heads) const { return request.node_count * num_heads; }
  __device__ int64_t first_row(int32_t block) const {
    return int64_t{TheBlocks::start(request)} + int64_t{block} * TheBlocks::kRows;
  }
  __device__ int32_t first_slot(int32_t block) const {
    return static_cast<int32_t>(first_row(block) - request.prefix_len);
  }
};

// Turns a piece of work into the next one, which is in the next request that has blocks. False when there is none.
// One warp. `requests` has the numbers of request b at [b].
template <class TheBlocks, class Requests>
__device__ bool next_work(WorkOf<TheBlocks>& w, const Requests& requests, int64_t batch_size, const Cut& cut,
                          int64_t line_end) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t position = w.position;
  if (position >= line_end) return false;
  int64_t offset = w.offset + cut.length(w.request_blocks),
          b = w.b + 1;                      // the piece before this one ended its request
  const bool turns = offset == cut.blocks;  // and its tile
  if (turns) offset = b = 0;
  for (unsigned lanes = 0;; b += kWarpSize) {
    lanes = __ballot_sync(kAllLanes, b + lane < batch_size && TheBlocks::count(requests[b + lane]) > 0);
    if (lanes == 0) continue;
    b += __ffs(static_cast<int>(lanes)) - 1;
    break;
  }
  __syncwarp();
  if (lane == 0) {
    w.offset = offset;
    w.set(requests[b], b, cut, w.tile + (turns ? 1 : 0), position, line_end);
  }
  __syncwarp();
  return !w.empty();
}

// ---- what a query sees -------------------------------------------------------------------------------

// What query i sees of the 32 cache rows from slot j0 on; negative slots are the prefix.
__device__ inline uint32_t seen_bits(const kdt_tree& tree, int64_t b, int32_t i, int32_t j0, int32_t node_count) {
  if (j0 <= -32) return ~0u;
  const int32_t from = max(j0, 0), shift = from % 64;
  uint64_t word = tree_mask(tree, b, i, from - shift, node_count) >> shift;
  if (shift > 32) word |= tree_mask(tree, b, i, from - shift + 64, node_count) << (64 - shift);
  const uint32_t bits = static_cast<uint32_t>(word);
  return j0 >= 0 ? bits : bits << -j0 | ((1u << -j0) - 1);
}

// ---- values that are no numbers ----------------------------------------------------------------------

// A masked entry has weight 0, and 0 * NaN is NaN. So where a masked block holds a NaN or infinity that counts as 0
// in the products, and poison() then writes NaN where a query sees one: its weight is NaN, or 0 for a score of
// -inf, so NaN is what the product would have given.

// Of a pair of 16-bit values those that are finite, and 0 for the others.
template <class T>
__device__ uint32_t finite_or_zero(uint32_t pair) {
  constexpr uint32_t kExponent = __is_same(T, __nv_bfloat16) ? 0x7f80u : 0x7c00u;
  if ((pair & kExponent) == kExponent) pair &= 0xffff0000u;
  if ((pair >> 16 & kExponent) == kExponent) pair &= 0xffffu;
  return pair;
}

// kThreads threads, of which this is number `thread`: write NaN into the results of `rows` query rows of the tile
// from `first` on (in `partial`, or the final ones) where a query sees a NaN or infinity in the blocks from `block`
// to `end_block`. What is slow here is rare: a number that is none.
template <class T, int32_t kThreads, class TheBlocks>
__device__ __noinline__ void poison(const WorkOf<TheBlocks>& w, int32_t block, int32_t end_block,
                                    const kdt_verify_attn_params& p, const kdt_kv_cache& cache,
                                    const kdt_tree& tree, int32_t first, int32_t rows, int32_t thread,
                                    Partial* partial, bool are_halves) {
  const int32_t tile_row = w.tile * kTile + first;
  for (; block < end_block; ++block) {
    for (int32_t r = 0; r < TheBlocks::kRows; ++r) {
      const int64_t row = w.first_row(block) + r;
      if (row < w.request.kv_start || row >= int64_t{w.request.prefix_len} + w.request.node_count) continue;
      const int64_t place = row_offset(cache, w.b, row);
      if (place < 0) continue;
      const int32_t slot = w.first_slot(block) + r;
      for (int32_t d = thread; d < kVDim; d += kThreads) {
        if (isfinite(to_float(static_cast<const T*>(cache.data)[place + d]))) continue;
        for (int32_t i = 0; i < rows && tile_row + i < w.node_rows(p.num_heads); ++i) {
          const int32_t query = (tile_row + i) / p.num_heads;
          const bool sees =
              slot < 0 || (tree_mask(tree, w.b, query, slot / 64 * 64, w.request.node_count) >> slot % 64 & 1) != 0;
          if (!sees) continue;
          if (partial != nullptr) {
            partial->set_nan(first + i, d, are_halves);
          } else {
            store_out(p, out_index(p, w.b, query, (tile_row + i) % p.num_heads) + d, quiet_nan());
          }
        }
      }
    }
  }
}

// ---- results -----------------------------------------------------------------------------------------

__device__ inline void store_pair(const kdt_verify_attn_params& p, int64_t index, float low, float high,
                                  bool aligned) {
  if (p.out_dtype == KDT_F32) {
    float* out = static_cast<float*>(p.out) + index;
    if (aligned) {
      *reinterpret_cast<float2*>(out) = make_float2(low, high);
    } else {
      out[0] = low;
      out[1] = high;
    }
    return;
  }
  const uint32_t packed = p.out_dtype == KDT_F16 ? pack<__half>(low, high) : pack<__nv_bfloat16>(low, high);
  uint16_t* out = static_cast<uint16_t*>(p.out) + index;
  if (aligned) {
    *reinterpret_cast<uint32_t*>(out) = packed;
  } else {
    out[0] = static_cast<uint16_t>(packed);
    out[1] = static_cast<uint16_t>(packed >> 16);
  }
}

// Whether store_pair() may write both values at once.
inline bool pairs_are_aligned(const kdt_verify_attn_params& p) {
  const uintptr_t bytes = p.out_dtype == KDT_F32 ? 8 : 4;
  return reinterpret_cast<uintptr_t>(p.out) % bytes == 0 && p.out_head_stride % 2 == 0 &&
         p.out_row_stride % 2 == 0 && p.out_stride % 2 == 0;
}

// ---- the host side -----------------------------------------------------------------------------------

inline int64_t tiles_of(const kdt_verify_attn_params& p) {
  return (int64_t{p.num_queries} * p.num_heads + kTile - 1) / kTile;
}

// Of a cache with a block table, whose page sizes are powers of two: row >> page_shift is the row's column there.
inline int32_t page_shift_of(const kdt_kv_cache& cache) {
  int32_t shift = 0;
  while (cache.page_size >> shift > 1) ++shift;
  return shift;
}

// Whether all positions on the line of Cut, times one more than most_parts, are below 2^31, whatever the lengths
// are.
template <class TheBlocks>
bool fits_32_bits(const kdt_verify_attn_params& p, const kdt_kv_cache& cache, int32_t head, int32_t most_parts) {
  const int64_t most_rows =
      std::max(std::min(capacity_of(cache), int64_t{INT32_MAX}), int64_t{p.num_queries});  // nodes need no room
  const int64_t most_blocks = most_rows / TheBlocks::kRows + 2 + head;
  return static_cast<double>(most_blocks) * static_cast<double>(p.batch_size) * static_cast<double>(tiles_of(p)) *
             (most_parts + 1.0) <
         2147483648.0;
}

// What the joining kernel knows of the plan: [batch_size, tiles], the first and the last part that have blocks of a
// request in a tile. Written by the first of them; 0 and -1 for requests without blocks.
struct Plan {
  int2* ranges;
  int64_t tiles;

  // A request without blocks; by kThreads threads, of which this is number `thread`.
  template <int32_t kThreads>
  __device__ void write_none(int64_t b, int32_t thread) const {
    for (int64_t tile = thread; tile < tiles; tile += kThreads) ranges[b * tiles + tile] = make_int2(0, -1);
  }
  template <class TheBlocks>
  __device__ void write_range(const WorkOf<TheBlocks>& w, const Cut& cut, int64_t part) const {
    if (w.first != 0) return;
    int64_t last = part;
    if (!w.whole()) last = cut.part_with(w.tile * cut.blocks + w.offset + cut.length(w.request_blocks) - 1);
    ranges[w.b * tiles + w.tile] = make_int2(static_cast<int32_t>(part), static_cast<int32_t>(last));
  }
};

// The scratch of both kernels: the plan, and two partial results a part.
struct Scratch {
  Plan plan;
  Partial* partials;
};
size_t plan_bytes(const kdt_verify_attn_params& p);
Scratch scratch_of(void* workspace, const kdt_verify_attn_params& p);

// Launches the kernel that joins the parts of rows whose tile was cut and writes those of requests without rows,
// after one that was launched on as many blocks as there are multiprocessors. `are_halves`: how that left them.
int32_t enqueue_combine(const Session& session, const kdt_verify_attn_params& p, const Scratch& scratch,
                        bool are_halves);

}  // namespace kdt::cuda
