// tree_build on CUDA: a block a request; the whole tree is made in shared memory.
//
// Idea: best-first search takes one node after another, `budget` dependent steps. Instead the block generates all
// nodes whose score reaches a threshold, level by level and in parallel, and sorts those. The threshold is always
// one that all of the tree's nodes reach, and rises as more nodes are known.
//
//   1. Rows come into shared memory; where each ends, and whether more than padding follows.
//   2. Family: some hundreds of nodes that are cheap to score, namely (s, 0, .., 0, r) for a few s and many r. The
//      budget-th best of them bounds the score of the tree's last node (`limit`). The range from 0 to the limit is
//      cut into bins.
//   3. Levels: a node's children are the first ranks of the next row, as many as reach the threshold, for rows
//   descend.
//      (r1 .. rd) has (r1 + 1) .. (rd + 1) - 1 nodes before it, which limits ranks too (`quota`). Nodes are counted
//      into the bins; the threshold is the highest bin such that `budget` nodes are counted in it and above. Where
//      a level would be large, its nodes are counted first, and those generated that are left.
//   4. What reaches the last threshold, `budget` nodes and a few percent more, is sorted into its bins; a node's
//   slot
//      is the number of nodes in higher bins plus the number in its own bin that come before it in the exact order.
//   5. Links, visibility and the rest follow from slots.
//
// Everything that decides is exact: scores are float64 sums in depth order, bins are a monotone function of them,
// ties are settled on the rank tuples. Where children end and what the family scores is float32, with margins on
// the safe side. Nodes get places in the pool in no fixed order, but no result depends on places.
//
// Limits: those of the header. Where ties defeat the threshold (zeros everywhere: any number of nodes with one
// score) one warp builds the tree node by node, exact too, but slower: see plans/0005-cuda.md for all figures.
//
// Tried and lost (same page): best-first search by one warp with two slots a lane in registers (500 cycles a node);
// rounds of a few ranks for groups of lanes (3 times as many steps); a threshold bisected with block-wide votes
// (100 cycles a vote); one thread storing all children of a node; ties settled by walking up two paths for every
// pair.
#include "launch.hpp"
#include "tree_build.cuh"
#include "tree_build_search.cuh"
#include "tree_layout.cuh"

namespace kdt::cuda {
namespace {

constexpr int kBins = 256;
constexpr int kMaxSpines = 8;

// Sizes for trees of up to kBudget nodes. kPool nodes may be generated, kRoomy of them in a level that is not
// counted first, kFinal reach the last threshold, kRows candidates are kept in shared memory (more stay where they
// are).
struct Small {
  static constexpr int kBudget = 64, kThreads = 512, kFamily = 512, kPool = 1024, kRoomy = 512, kFinal = 256,
                       kRows = 4096;
  static constexpr bool kKeepIds = true;
};
struct Medium {
  static constexpr int kBudget = 256, kThreads = 512, kFamily = 2048, kPool = 2560, kRoomy = 1024, kFinal = 768,
                       kRows = 4096;
  static constexpr bool kKeepIds = true;
};
struct Large {
  static constexpr int kBudget = KDT_MAX_BUDGET, kThreads = 1024, kFamily = 4096, kPool = 4480, kRoomy = 512,
                       kFinal = 2048, kRows = 4096;
  static constexpr bool kKeepIds = false;
};

template <class Size>
struct Shared {
  // The nodes generated; place 0 is the root. Children of one node have consecutive places, by rank. `slot` is a
  // node's slot once those are known, before that its quota.
  struct Pool {
    double score[Size::kPool];
    uint16_t parent[Size::kPool];  // its place
    uint16_t rank[Size::kPool];
    union {
      uint16_t quota[Size::kPool];
      uint16_t slot[Size::kPool];
    };
    uint8_t depth[Size::kPool];
  } pool;
  union {
    float rows[Size::kRows];
    uint64_t code[Size::kFinal];  // the tuples of what is sorted
  };
  int32_t ids[Size::kKeepIds ? Size::kRows : 1];
  uint16_t sorted[Size::kFinal];       // places by bin
  alignas(16) uint32_t count[kBins];   // nodes of a bin
  uint32_t start[kBins];               // nodes of all higher ones
  uint16_t place[Size::kBudget + 1];   // of each slot
  uint16_t parent[Size::kBudget + 1];  // of each slot, a slot
  uint16_t first_child[Size::kBudget + 1], next_sibling[Size::kBudget + 1];
  int32_t lengths[KDT_MAX_DEPTH];
  int32_t pool_count, threshold;
};

// Bins of magnitudes from 0 to `limit`; the better, the higher.
struct Bins {
  float limit, per_unit;

  // All scores 0, or nearly, or beyond float32: one bin.
  __device__ explicit Bins(float limit) : limit(limit), per_unit(static_cast<float>(kBins) / limit) {
    if (!(per_unit < positive_infinity())) per_unit = 0.0f;
  }
  __device__ int of(float magnitude) const {
    return kBins - 1 - min(kBins - 1, static_cast<int>(magnitude * per_unit));
  }
  // The magnitudes of a bin and all better ones lie below it (to float32 rounding).
  __device__ float edge(int bin) const {
    return per_unit == 0.0f || bin == 0 ? limit : min(limit, static_cast<float>(kBins - bin) / per_unit);
  }
};

// One warp's work: for each bin the number of nodes in higher ones, and as the threshold the highest bin such that
// `enough` nodes are in it and above, or 0.
template <class Size>
__device__ void add_up(Shared<Size>& s, int32_t enough) {
  constexpr int kEach = kBins / kWarpSize;
  const int lane = threadIdx.x;
  uint32_t counts[kEach], total = 0;
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(&s.count[lane * kEach + i]);
    counts[i] = four.x;
    counts[i + 1] = four.y;
    counts[i + 2] = four.z;
    counts[i + 3] = four.w;
    total += four.x + four.y + four.z + four.w;
  }
  uint32_t above = total;  // of this lane's bins and those of higher lanes
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint32_t other = __shfl_down_sync(kAllLanes, above, step);
    if (lane + step < kWarpSize) above += other;
  }
  uint32_t sum = above - total;
  int highest = -1;
#pragma unroll
  for (int i = kEach - 1; i >= 0; --i) {
    s.start[lane * kEach + i] = sum;
    sum += counts[i];
    if (highest < 0 && sum >= static_cast<uint32_t>(enough)) highest = lane * kEach + i;
  }
  const unsigned lanes = __ballot_sync(kAllLanes, highest >= 0);
  if (lanes == 0) {
    if (lane == 0) s.threshold = 0;
  } else if (lane == kWarpSize - 1 - __clz(static_cast<int>(lanes))) {
    s.threshold = highest;
  }
}

// Step 2: a magnitude that the tree's nodes do not exceed, `use` being the ranks that may be of use. Scores are
// rough here, and rounded up.
template <class Size>
__device__ float find_limit(Shared<Size>& s, const Request& q, int32_t use) {
  constexpr int kThreads = Size::kThreads;
  constexpr int kShift = 19;                          // bins of 1/16 of an octave,
  constexpr int kFirst = (127 - 8) << (23 - kShift);  // from 2^-8 to 2^8
  const int tid = threadIdx.x, lane = tid % kWarpSize;
  // Where the first row alone has enough, its part of the family is good enough for a small tree.
  if (Size::kBudget <= 64 && s.lengths[0] >= q.budget) return fabsf(q.log_prob(0, q.budget - 1));
  for (int i = tid; i < kBins; i += kThreads) s.count[i] = 0;
  __syncthreads();
  // Every warp for itself: the sums of the first entries of rows 1 .. d - 1, d = lane and lane + 32.
  float spine[2];
  float before = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int d = half * kWarpSize + lane;
    const float own = d > 0 && d < q.depth ? -q.log_prob(d, 0) : 0.0f;
    float sum = own;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    spine[half] = before + sum - own;
    before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    if (q.depth <= kWarpSize) break;
  }
  const int32_t ranks = min(use, max(1, Size::kFamily / q.depth));
  const int32_t spines = min(min(s.lengths[0], kMaxSpines), max(1, Size::kFamily / (q.depth * ranks)));
  const int32_t total = q.depth * ranks * spines;
  const float per_rank = 1.0f / static_cast<float>(ranks), per_depth = 1.0f / static_cast<float>(q.depth);
  for (int32_t base = 0; base < total; base += kThreads) {
    const int32_t i = base + tid;
    // Quotients of numbers below 2^13: exact in float32 with half a unit added.
    const int32_t line = static_cast<int32_t>((static_cast<float>(i) + 0.5f) * per_rank), r = i - line * ranks;
    const int32_t first = static_cast<int32_t>((static_cast<float>(line) + 0.5f) * per_depth);
    const int32_t d = line - first * q.depth;
    float above = __shfl_sync(kAllLanes, spine[0], d % kWarpSize);
    if (q.depth > kWarpSize) {
      const float deeper = __shfl_sync(kAllLanes, spine[1], d % kWarpSize);
      if (d >= kWarpSize) above = deeper;
    }
    if (i < total && (first == 0 || d > 0) && r < s.lengths[d] && (r + 1) * (first + 1) <= q.budget) {
      float m = fabsf(q.log_prob(d, r));
      if (d > 0) m += above - q.log_prob(0, first);
      m *= 1.00002f;
      const int bin = (static_cast<int>(__float_as_uint(m) >> kShift)) - kFirst;
      atomicAdd(&s.count[kBins - 1 - min(max(bin, 0), kBins - 1)], 1u);
    }
  }
  __syncthreads();
  if (tid < kWarpSize) add_up(s, q.budget);
  __syncthreads();
  const int threshold = s.threshold;
  __syncthreads();
  if (threshold > 0) return __uint_as_float(static_cast<uint32_t>(kBins - threshold + kFirst) << kShift);
  double score = 0.0;  // few candidates, or far apart: the worst node there is
  for (int32_t d = 0; d < q.depth; ++d) score += static_cast<double>(q.log_prob(d, s.lengths[d] - 1));
  return magnitude(score);
}

// Visits the children of the nodes begin..end-1 that lie in row d and have at most a magnitude of `edge`: for a
// thread of its own those of a node with up to three, by light(parent, number); for a whole warp those of a
// node with more, by heavy(parent, number) with lanes in step. Children are the first ranks.
template <class Size, class Light, class Heavy>
__device__ void visit_children(const Shared<Size>& s, const Request& q, int32_t d, int32_t begin, int32_t end,
                               float edge, Light&& light, Heavy&& heavy) {
  constexpr int kFew = 3;
  const int lane = threadIdx.x % kWarpSize;
  const float* row = q.rows + d * q.row_stride;
  const int32_t length = s.lengths[d];
  // Neighbours go to different warps: those with many children are often together.
  constexpr int kWarps = Size::kThreads / kWarpSize;
  for (int32_t base = begin + static_cast<int32_t>(threadIdx.x) / kWarpSize; base < end; base += Size::kThreads) {
    const int32_t parent = base + lane * kWarps;
    int32_t most = 0;
    float own = 0.0f;
    if (parent < end) {
      most = min(length, static_cast<int32_t>(s.pool.quota[parent]));
      own = magnitude(s.pool.score[parent]);
    }
    int32_t number = 0;
#pragma unroll
    for (int32_t r = 0; r <= kFew; ++r) number += r < most && !(-row[r] > edge - own);  // beyond float32: inf - inf
    if (number > 0 && number <= kFew) light(parent, number);
    for (unsigned rest = __ballot_sync(kAllLanes, number > kFew); rest != 0; rest &= rest - 1) {
      const int source = __ffs(static_cast<int>(rest)) - 1;
      const float its_own = __shfl_sync(kAllLanes, own, source);
      const int32_t its_most = __shfl_sync(kAllLanes, most, source);
      int32_t its_number = 0;
      for (int32_t first = 0; first < its_most; first += kWarpSize) {
        const int32_t r = first + lane;
        const unsigned fit = __ballot_sync(kAllLanes, r < its_most && !(-row[r] > edge - its_own));
        its_number += __popc(fit);
        if (fit != kAllLanes) break;
      }
      heavy(base + source * kWarps, its_number);
    }
  }
}

// Step 3. False when the pool is too small for what reaches the threshold.
template <class Size>
__device__ bool generate(Shared<Size>& s, const Request& q, const Bins& bins) {
  constexpr int kThreads = Size::kThreads;
  constexpr float kMargin = 2e-6f;  // float32 sums and edges are off by less
  const int tid = threadIdx.x, lane = tid % kWarpSize;
  auto& pool = s.pool;
  for (int i = tid; i < kBins; i += kThreads) s.count[i] = 0;
  if (tid == 0) {
    pool.score[0] = 0.0;
    pool.parent[0] = 0;
    pool.rank[0] = 0;
    pool.depth[0] = 0;
    pool.quota[0] = static_cast<uint16_t>(q.budget);
    s.pool_count = 1;
    s.threshold = 0;
  }
  __syncthreads();
  int32_t begin = 0, end = 1, threshold = 0;
  for (int32_t d = 0; d < q.depth && begin < end; ++d) {
    for (int counted = 0;; ++counted) {
      const float edge = bins.edge(threshold) * (1.0f + kMargin);
      const auto place_child = [&](int32_t place, int32_t parent, int32_t rank) {
        if (place >= Size::kPool) return;
        pool.parent[place] = static_cast<uint16_t>(parent);
        pool.rank[place] = static_cast<uint16_t>(rank);
      };
      visit_children(
          s, q, d, begin, end, edge,
          [&](int32_t parent, int32_t number) {
            const int32_t place = atomicAdd(&s.pool_count, number);
            for (int32_t r = 0; r < number; ++r) place_child(place + r, parent, r);
          },
          [&](int32_t parent, int32_t number) {
            int32_t place = 0;
            if (lane == 0) place = atomicAdd(&s.pool_count, number);
            place = __shfl_sync(kAllLanes, place, 0);
            for (int32_t r = lane; r < number; r += kWarpSize) place_child(place + r, parent, r);
          });
      __syncthreads();
      const int32_t wanted = s.pool_count;
      const int32_t roomy = counted == 0 ? Size::kRoomy : counted == 1 ? q.budget + q.budget / 4 : Size::kPool;
      if (wanted <= Size::kPool && wanted - end <= roomy) break;
      if (counted == 2) return false;
      // Many: count some of them, the first ranks of each node (the second time: all), on top of the nodes counted
      // for good (which s.start saves), in bins that are not too high.
      for (int i = tid; i < kBins; i += kThreads) s.start[i] = s.count[i];
      __syncthreads();
      const int32_t few = counted == 0 ? max(8, 4 * q.budget / (end - begin)) : KDT_MAX_CANDIDATES;
      for (int32_t parent = begin + tid; parent < end; parent += kThreads) {
        const int32_t most = min(min(s.lengths[d], few), static_cast<int32_t>(pool.quota[parent]));
        const float own = magnitude(pool.score[parent]);
        for (int32_t r = 0; r < most; ++r) {
          const float m = (own - q.log_prob(d, r)) * (1.0f + kMargin);
          if (m > edge || m > bins.limit) break;
          atomicAdd(&s.count[bins.of(m)], 1u);
        }
      }
      __syncthreads();
      uint32_t saved = 0;
      if (tid < kBins) saved = s.start[tid];
      __syncthreads();
      if (tid < kWarpSize) add_up(s, q.budget);
      __syncthreads();
      threshold = max(threshold, s.threshold);
      if (tid < kBins) s.count[tid] = saved;
      if (tid == 0) s.pool_count = end;
      __syncthreads();
    }
    const int32_t placed = s.pool_count;
    for (int32_t place = end + tid; place < placed; place += kThreads) {
      const int32_t parent = pool.parent[place], rank = pool.rank[place];
      const double score = pool.score[parent] + static_cast<double>(q.log_prob(d, rank));
      // quota / (rank + 1), exact for numbers this small
      const float quota = __fdividef(static_cast<float>(pool.quota[parent]) + 0.5f, static_cast<float>(rank + 1));
      pool.score[place] = score;
      pool.quota[place] = static_cast<uint16_t>(static_cast<int>(quota));
      pool.depth[place] = static_cast<uint8_t>(d + 1);
      const float m = magnitude(score);
      if (m <= bins.limit) atomicAdd(&s.count[bins.of(m)], 1u);
    }
    __syncthreads();
    if (placed - end >= q.budget / 8) {  // else it would hardly rise
      if (tid < kWarpSize) add_up(s, q.budget);
      __syncthreads();
      threshold = max(threshold, s.threshold);
    }
    begin = end;
    end = placed;
  }
  return true;
}

// Step 4. Returns the number of nodes, or -1 when too many reach the threshold.
template <class Size>
__device__ int32_t select(Shared<Size>& s, const Request& q, const Bins& bins) {
  const int tid = threadIdx.x;
  auto& pool = s.pool;
  __syncthreads();
  if (tid < kWarpSize) add_up(s, q.budget);
  __syncthreads();
  const int32_t threshold = s.threshold, generated = s.pool_count;
  const int32_t total = static_cast<int32_t>(s.start[threshold] + s.count[threshold]);
  if (total > Size::kFinal) return -1;
  __syncthreads();
  for (int i = tid; i < kBins; i += Size::kThreads) s.count[i] = 0;
  __syncthreads();
  for (int32_t place = 1 + tid; place < generated; place += Size::kThreads) {
    const float m = magnitude(pool.score[place]);
    const int bin = bins.of(m);
    if (m <= bins.limit && bin >= threshold) {
      s.sorted[s.start[bin] + atomicAdd(&s.count[bin], 1u)] = static_cast<uint16_t>(place);
    }
  }
  __syncthreads();
  for (int32_t i = tid; i < total; i += Size::kThreads) {
    uint64_t code = 0;
    for (int32_t place = s.sorted[i]; place != 0; place = pool.parent[place]) {
      code = prepend_rank(pool.rank[place], code);
    }
    s.code[i] = code;
  }
  __syncthreads();
  const int32_t nodes = min(total, q.budget);
  for (int32_t i = tid; i < total; i += Size::kThreads) {
    const int32_t place = s.sorted[i];
    const double score = pool.score[place];
    const uint64_t code = s.code[i];
    const int bin = bins.of(magnitude(score));
    const int32_t begin = static_cast<int32_t>(s.start[bin]), end = begin + static_cast<int32_t>(s.count[bin]);
    int32_t slot = begin + 1;
    for (int32_t j = begin; j < end; ++j) {
      const int32_t other = s.sorted[j];
      const double other_score = pool.score[other];
      bool before = other_score > score;
      if (other_score == score && other != place) {
        const uint64_t other_code = s.code[j];
        before = other_code < code;
        if (other_code == code) {  // cut off
          before = tuple_before(pool, pool.parent[other], pool.rank[other], pool.parent[place], pool.rank[place]);
        }
      }
      slot += before;
    }
    if (slot <= nodes) {
      s.place[slot] = static_cast<uint16_t>(place);
      pool.slot[place] = static_cast<uint16_t>(slot);
    }
  }
  for (int32_t slot = tid; slot <= nodes; slot += Size::kThreads) {
    s.first_child[slot] = kNone;
    s.next_sibling[slot] = kNone;
  }
  if (tid == 0) pool.slot[0] = 0;
  __syncthreads();
  for (int32_t slot = 1 + tid; slot <= nodes; slot += Size::kThreads) {
    const int32_t place = s.place[slot];
    const uint16_t parent = pool.slot[pool.parent[place]];
    s.parent[slot] = parent;
    if (pool.rank[place] == 0) {
      s.first_child[parent] = static_cast<uint16_t>(slot);
    } else {  // the sibling one rank better has the place before
      s.next_sibling[pool.slot[place - 1]] = static_cast<uint16_t>(slot);
    }
  }
  __syncthreads();
  return nodes;
}

// What is read of a request besides its rows.
struct Numbers {
  int32_t prefix_len, budget, max_depth, root_token, status;

  __device__ Numbers(const kdt_tree_build_params& p, int64_t b) : status(0) {
    const int32_t given_prefix = p.prefix_lens[b];
    const int32_t given_budget = p.budgets == nullptr ? p.budget : p.budgets[b];
    const int32_t given_depth = p.max_depths == nullptr ? p.depth : p.max_depths[b];
    root_token = p.root_tokens[b];
    prefix_len = clamped(given_prefix, 0, INT32_MAX - p.depth, &status);
    budget = clamped(given_budget, 0, p.budget, &status);
    max_depth = clamped(given_depth, 0, p.depth, &status);
  }
};

__device__ Request request_of(const kdt_tree_build_params& p, int64_t b) {
  return {p.log_probs + b * p.log_probs_stride,
          p.token_ids + b * p.token_ids_stride,
          p.log_probs_row_stride,
          p.token_ids_row_stride,
          0,
          0};
}

__device__ uint32_t id_limit(const kdt_tree_build_params& p) {
  return p.vocab_size > 0 ? static_cast<uint32_t>(p.vocab_size) : 1u << 31;
}

template <class Size>
__global__ void __launch_bounds__(Size::kThreads, 1) tree_build_kernel(kdt_tree_build_params p, kdt_tree tree) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared<Size>& s = *reinterpret_cast<Shared<Size>*>(memory);
  constexpr int kThreads = Size::kThreads;
  const int64_t live = live_requests(p.num_live, tree.batch_size);
  for (int64_t b = blockIdx.x; b < tree.batch_size; b += gridDim.x) {
    const Numbers n(p, b);
    Request q = request_of(p, b);
    const int32_t use = min(p.num_candidates, p.budget);
    const bool keep = p.depth * use <= Size::kRows;
    read_rows<kThreads, Size::kKeepIds>(q, p.depth, p.num_candidates, id_limit(p), use, keep, s.lengths, s.rows,
                                        s.ids);
    if (threadIdx.x == 0) s.first_child[0] = s.next_sibling[0] = kNone;
    __syncthreads();
    int32_t nodes = -1, status = n.status;
    if (b < live) {
      nodes = 0;
      q.budget = n.budget;
      q.depth = usable_depth(s.lengths, n.max_depth, &status);
      if (keep) {
        q.rows = s.rows;
        q.row_stride = use;
        if (Size::kKeepIds) {
          q.ids = s.ids;
          q.ids_row_stride = use;
        }
      }
      __syncthreads();
      // Ranks beyond `use` cannot be in the tree, and were not kept.
      if (threadIdx.x < p.depth) s.lengths[threadIdx.x] = min(s.lengths[threadIdx.x] & ~kTruncated, use);
      __syncthreads();
      if (n.budget > 0 && q.depth > 0) {
        const Bins bins(find_limit(s, q, min(p.num_candidates, n.budget)));
        nodes = generate(s, q, bins) ? select(s, q, bins) : -1;
        if (nodes < 0) nodes = search<Size>(s, q);
      }
    }
    write_tree<kThreads>(s, q, tree, b, nodes, n.root_token, n.prefix_len, reinterpret_cast<uint64_t*>(&s.pool),
                         sizeof s.pool / sizeof(uint64_t));
    put_request(tree, b, nodes + 1, b < live ? status : 0);
    __syncthreads();  // the next request comes into the same memory
  }
}

template <class Size>
int32_t launch(const Session& session, const kdt_tree_build_params& p) {
  return launch_kernel<sizeof(Shared<Size>)>(session, "tree_build", tree_build_kernel<Size>, p.tree->batch_size,
                                             Size::kThreads, After::kFinished, p, *p.tree);
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_tree_build_params&) { return 0; }

int32_t enqueue(const Session& session, const kdt_tree_build_params& p, void*) {
  if (p.budget <= Small::kBudget) return launch<Small>(session, p);
  if (p.budget <= Medium::kBudget) return launch<Medium>(session, p);
  return launch<Large>(session, p);
}

}  // namespace kdt::cuda
