// What the ways of building a tree on CUDA share: rows in shared memory, the order of rank tuples, the tree written
// out.
#pragma once

#include "common.cuh"

namespace kdt::cuda {

inline constexpr uint16_t kNone = 0xffff;
inline constexpr int32_t kTruncated = 1 << 30;  // in a row's length: more than padding follows its end

// What all threads of the block know of their request. Rows and ids lie in shared or in global memory.
struct Request {
  const float* rows;
  const int32_t* ids;
  int64_t row_stride, ids_row_stride;
  int32_t budget, depth;  // depth: rows before the first empty one

  __device__ float log_prob(int32_t depth, int32_t rank) const { return rows[depth * row_stride + rank]; }
  __device__ int32_t id(int32_t depth, int32_t rank) const { return ids[depth * ids_row_stride + rank]; }
};

// Magnitude of a score, monotone in it: scores are <= 0.
__device__ inline float magnitude(double score) { return fabsf(static_cast<float>(score)); }

// The code of a rank tuple in 64 bits, in the order of tuples: a rank r is 1, then k ones and a zero for k =
// floor(log2(r + 1)), then the k low bits of r + 1; behind the last there are zeros, so that a proper prefix comes
// first. (r1 .. rd) is among the first 1,024 nodes only if (r1 + 1) .. (rd + 1) <= 1,024, so it takes at most 2 d +
// 20 bits. What does not fit is cut off: then different tuples may look alike, but never in the wrong order.
__device__ inline uint64_t prepend_rank(int32_t rank, uint64_t code) {
  const int k = 31 - __clz(rank + 1), length = 2 * k + 2;
  const uint64_t value = (((uint64_t{2} << k) - 1) << (k + 1)) | static_cast<uint64_t>(rank + 1 - (1 << k));
  return value << (64 - length) | code >> length;
}

// Compares the rank tuples of two nodes, each given by its parent's place and its own rank: whether that of a comes
// first. A proper prefix comes first; a and b must differ.
template <class Pool>
__device__ bool tuple_before(const Pool& pool, int32_t parent_a, int32_t rank_a, int32_t parent_b, int32_t rank_b) {
  int depth_a = pool.depth[parent_a], depth_b = pool.depth[parent_b];
  const bool a_shallower = depth_a < depth_b;
  const auto up = [&](int32_t& parent, int32_t& rank) {
    rank = pool.rank[parent];
    parent = pool.parent[parent];
  };
  for (; depth_a > depth_b; --depth_a) up(parent_a, rank_a);
  for (; depth_b > depth_a; --depth_b) up(parent_b, rank_b);
  while (parent_a != parent_b) {
    up(parent_a, rank_a);
    up(parent_b, rank_b);
  }
  return rank_a != rank_b ? rank_a < rank_b : a_shallower;
}

// A warp a row: its length into shared memory (with kTruncated where that goes for it), and its first `use` ranks,
// when `keep`. Does not depend on any number of the request.
template <int kThreads, bool kKeepIds>
__device__ void read_rows(const Request& q, int32_t num_rows, int32_t k, uint32_t id_limit, int32_t use, bool keep,
                          int32_t* lengths, float* kept_rows, int32_t* kept_ids) {
  constexpr int kPieces = 2;  // of 32 entries, loaded together
  const int lane = threadIdx.x % kWarpSize;
  for (int32_t d = threadIdx.x / kWarpSize; d < num_rows; d += kThreads / kWarpSize) {
    int32_t length = k;
    bool more = false;     // something that is not padding follows the end
    float carried = 0.0f;  // the entry before this piece
    for (int32_t first = 0; first < k; first += kPieces * kWarpSize) {
      float values[kPieces];
      int32_t ids[kPieces];
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int32_t i = first + j * kWarpSize + lane;
        values[j] = i < k ? q.rows[d * q.row_stride + i] : 0.0f;
        ids[j] = i < k ? q.ids[d * q.ids_row_stride + i] : 0;
      }
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int32_t i = first + j * kWarpSize + lane;
        if (keep && i < use) {
          kept_rows[d * use + i] = values[j];
          if (kKeepIds) kept_ids[d * use + i] = ids[j];
        }
        float before = __shfl_up_sync(kAllLanes, values[j], 1);
        if (lane == 0) before = carried;
        carried = __shfl_sync(kAllLanes, values[j], kWarpSize - 1);
        const bool good =
            values[j] <= before && values[j] > negative_infinity() && static_cast<uint32_t>(ids[j]) < id_limit;
        const unsigned bad = __ballot_sync(kAllLanes, i < k && !good);
        if (length == k && bad != 0) length = first + j * kWarpSize + __ffs(bad) - 1;
        const bool padding = values[j] == negative_infinity() && ids[j] == -1;
        more |= __any_sync(kAllLanes, i < k && i >= length && !padding);
      }
    }
    if (lane == 0) lengths[d] = length | (more ? kTruncated : 0);
  }
}

// Rows before the first empty one, and ROW_TRUNCATED: every warp for itself.
__device__ inline int32_t usable_depth(const int32_t* lengths, int32_t max_depth, int32_t* status) {
  int32_t depth = max_depth;
  for (int first = 0; first < max_depth; first += kWarpSize) {
    const int d = first + static_cast<int>(threadIdx.x) % kWarpSize;
    const int32_t length = d < max_depth ? lengths[d] : 1;
    if (__any_sync(kAllLanes, (length & kTruncated) != 0)) *status |= KDT_STATUS_ROW_TRUNCATED;
    const unsigned empty = __ballot_sync(kAllLanes, (length & ~kTruncated) == 0);
    if (empty != 0) depth = min(depth, first + __ffs(empty) - 1);
  }
  return depth;
}

// The tree of slots 0..nodes as the header lays it out; nodes = -1: a dead request's padding. `s` has for each slot
// its place, its parent's slot and its links, and by place score, rank and depth. `tile` is scratch, of which the
// nodes are no longer needed once the first part is through.
template <int kThreads, class S>
__device__ void write_tree(const S& s, const Request& q, const kdt_tree& tree, int64_t b, int32_t nodes,
                           int32_t root_token, int32_t prefix_len, uint64_t* tile, int32_t tile_words) {
  const int tid = threadIdx.x;
  const auto& pool = s.pool;
  const int64_t row = b * tree.slot_stride;
  const auto link = [](uint16_t slot) { return slot == kNone ? -1 : static_cast<int32_t>(slot); };
  for (int32_t slot = tid; slot < tree.num_slots; slot += kThreads) {
    int32_t token = -1, parent = -1, first_child = -1, next_sibling = -1, depth = 0, position = 0;
    float log_prob = negative_infinity();
    if (slot <= nodes) {
      token = root_token;
      log_prob = 0.0f;
      if (slot > 0) {
        const int32_t place = s.place[slot];
        depth = pool.depth[place];
        token = q.id(depth - 1, pool.rank[place]);
        parent = s.parent[slot];
        log_prob = static_cast<float>(pool.score[place]);
      }
      first_child = link(s.first_child[slot]);
      next_sibling = link(s.next_sibling[slot]);
      position = prefix_len + depth;
    }
    tree.tokens[row + slot] = token;
    tree.parents[row + slot] = parent;
    tree.first_child[row + slot] = first_child;
    tree.next_sibling[row + slot] = next_sibling;
    tree.depths[row + slot] = depth;
    tree.positions[row + slot] = position;
    tree.log_probs[row + slot] = log_prob;
  }
  // Visibility, some slots at a time: a thread walks from its slot to the root. Slots fall on the way, so the words
  // of a row come one after another.
  const int32_t words = (tree.num_slots + 63) / 64;
  uint64_t* visibility = tree.visibility + b * tree.visibility_stride;
  const int32_t at_once = min(tile_words / words, kThreads);
  for (int32_t first = 0; first < tree.num_slots; first += at_once) {
    __syncthreads();
    const int32_t here = min(at_once, tree.num_slots - first);
    if (tid < here) {
      int32_t at = first + tid <= nodes ? first + tid : -1;
      for (int32_t word = words - 1; word >= 0; --word) {
        uint64_t bits = 0;
        for (; at >= word * 64; at = at == 0 ? -1 : s.parent[at]) bits |= uint64_t{1} << (at % 64);
        tile[tid * words + word] = bits;
      }
    }
    __syncthreads();
    for (int32_t i = tid; i < here * words; i += kThreads) {
      const int32_t slot = i / words;
      visibility[(first + slot) * tree.visibility_pitch + (i - slot * words)] = tile[i];
    }
  }
}

}  // namespace kdt::cuda
