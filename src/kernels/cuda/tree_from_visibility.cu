// tree_from_visibility on CUDA: a block a request.
//
// Idea: the warps pack the mask's rows to bits, straight into the tree's visibility, and find each row's parent,
// its highest bit below the diagonal. Then all rows are compared at once: row i must be its parent's row plus bit
// i. Row 0 being bit 0 alone, the rows are the tree's own visibility when all of them pass, by induction over i;
// when one fails, the root alone is written over them.
//
// Limits: one multiprocessor packs a request's mask, so N = 1,025 (1 MB of mask) is bound by what one can load. 12
// KB of shared memory.
#include <cstdint>

#include "common.cuh"
#include "launch.hpp"
#include "tree_layout.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 512;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kBatch = 8;  // mask entries a lane loads at once

// One warp: packs mask[0..count) to bits. Lane w gets word w.
__device__ uint64_t pack_row(const uint8_t* mask, int32_t count, int32_t lane) {
  uint64_t word = 0;
  for (int32_t first = 0; first < count; first += kBatch * kWarpSize) {
    uint8_t entries[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t j = first + i * kWarpSize + lane;
      entries[i] = j < count ? mask[j] : uint8_t{0};
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const uint64_t bits = __ballot_sync(kAllLanes, entries[i] != 0);
      const int32_t half = first / kWarpSize + i;
      if (lane == half / 2) word |= bits << (half % 2 * 32);
    }
  }
  return word;
}

// One warp, lane w with word w: the highest set bit below `slot`, or -1.
__device__ int32_t parent_of(uint64_t word, int32_t slot, int32_t lane) {
  const int32_t bits_below = slot - lane * 64;
  if (bits_below <= 0) word = 0;
  if (bits_below > 0 && bits_below < 64) word &= (uint64_t{1} << bits_below) - 1;
  const int32_t highest = word == 0 ? -1 : lane * 64 + 63 - __clzll(static_cast<long long>(word));
  return __reduce_max_sync(kAllLanes, highest);
}

__global__ void __launch_bounds__(kThreads)
    build_from_visibility(const kdt_tree_from_visibility_params p, const kdt_tree tree) {
  __shared__ SharedTree s;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int64_t live = live_requests(p.num_live, tree.batch_size);

  for (int64_t b = blockIdx.x; b < tree.batch_size; b += gridDim.x) {
    int32_t count = p.node_counts[b];
    if (b >= live || count == 0) {
      put_dead_tree(tree, b);
      continue;
    }
    const TreeSlots t(tree, b);
    const uint8_t* mask = p.mask + b * p.mask_stride;
    int32_t status = 0;
    const int32_t prefix_len = clamped(p.prefix_lens[b], 0, INT32_MAX - t.num_slots, &status);

    bool bad = count < 0 || count > t.num_slots;
    if (!bad) {
      for (int32_t slot = warp; slot < count; slot += kWarps) {
        const uint64_t word = pack_row(mask + slot * p.mask_row_stride, count, lane);
        const int32_t parent = parent_of(word, slot, lane);
        if (lane < t.words) t.row(slot)[lane] = word;
        if (lane == 0) s.parents[slot] = parent;
        bad = bad || (parent < 0) != (slot == 0);
      }
    }
    bad = __syncthreads_or(bad) != 0;  // from here on every slot but the root has a parent, or the tree is bad

    if (!bad) {
      for (int32_t slot = warp; slot < count; slot += kWarps) {
        uint64_t word = 0, expected = 0;
        if (lane < t.words) {
          word = t.row(slot)[lane];
          if (slot > 0) expected = t.row(s.parents[slot])[lane];
          if (slot / 64 == lane) expected |= uint64_t{1} << (slot % 64);
        }
        bad = bad || word != expected;
        const uint32_t nodes = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(__popcll(word)));
        if (lane == 0) s.depths[slot] = static_cast<int32_t>(nodes) - 1;
      }
    }
    if (__syncthreads_or(bad) != 0) {
      status |= KDT_STATUS_BAD_TREE;
      count = 1;
      if (thread == 0) {
        s.parents[0] = -1;
        s.depths[0] = 0;
      }
      if (thread < t.words) t.row(0)[thread] = thread == 0 ? 1 : 0;
      __syncthreads();
    }

    if (warp == kWarps - 1) link_children(t, s, count);
    pad_rows(t, count);
    __syncthreads();

    put_slots(t, s, count, p.tokens + b * p.tokens_stride, prefix_len);
    put_request(tree, b, count, status);
    __syncthreads();  // the next request's tree takes the place of this one
  }
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_tree_from_visibility_params&) { return 0; }

int32_t enqueue(const Session& session, const kdt_tree_from_visibility_params& p, void*) {
  return launch_kernel<0>(session, "tree_from_visibility", build_from_visibility, p.tree->batch_size, kThreads,
                          After::kFinished, p, *p.tree);
}

}  // namespace kdt::cuda
