// tree_from_parents on CUDA: a block a request.
//
// Idea: the words of a visibility row are found without waiting for the parent's row. First each slot walks up to
// the ancestors in its own run of 64 slots (at most 63 steps, all slots at once): that is one word, and the nearest
// ancestor before the run. Then each slot follows these nearest ancestors (at most 16 steps) and takes the word of
// each; the words between are 0. So a chain of 1,025 slots costs some 80 steps in shared memory.
// Meanwhile one warp links the siblings.
//
// Limits: 25 KB of shared memory, whatever N.
#include <cstdint>

#include "common.cuh"
#include "launch.hpp"
#include "tree_layout.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kRun = 64;  // slots a word

__global__ void __launch_bounds__(kThreads)
    build_from_parents(const kdt_tree_from_parents_params p, const kdt_tree tree) {
  __shared__ SharedTree s;
  __shared__ uint64_t own_word[kMaxSlots];   // the slot and its ancestors in its run
  __shared__ int32_t before_run[kMaxSlots];  // the nearest ancestor in an earlier run, or -1
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int64_t live = live_requests(p.num_live, tree.batch_size);

  for (int64_t b = blockIdx.x; b < tree.batch_size; b += gridDim.x) {
    int32_t count = p.node_counts[b];
    if (b >= live || count == 0) {
      put_dead_tree(tree, b);
      continue;
    }
    const TreeSlots t(tree, b);
    const int32_t* parents = p.parents + b * p.parents_stride;
    int32_t status = 0;
    const int32_t prefix_len = clamped(p.prefix_lens[b], 0, INT32_MAX - t.num_slots, &status);

    bool bad = count < 0 || count > t.num_slots;
    if (!bad) {
      for (int32_t slot = thread; slot < count; slot += kThreads) {
        const int32_t parent = parents[slot];
        s.parents[slot] = parent;
        bad = bad || (slot == 0 ? parent != -1 : parent < 0 || parent >= slot);
      }
    }
    if (__syncthreads_or(bad) != 0) {
      status |= KDT_STATUS_BAD_TREE;
      count = 1;
      if (thread == 0) s.parents[0] = -1;
      __syncthreads();
    }

    for (int32_t slot = thread; slot < count; slot += kThreads) {
      const int32_t run = slot / kRun * kRun;
      uint64_t word = 0;
      int32_t ancestor = slot;
      for (; ancestor >= run; ancestor = s.parents[ancestor]) word |= uint64_t{1} << (ancestor - run);
      own_word[slot] = word;
      before_run[slot] = ancestor;
    }
    __syncthreads();

    if (thread / kWarpSize == kThreads / kWarpSize - 1)
      link_children(t, s, count);  // the warp with the fewest slots
    for (int32_t slot = thread; slot < count; slot += kThreads) {
      uint64_t* row = t.row(slot);
      int32_t ancestor = slot, depth = -1;
      for (int32_t word = t.words - 1; word >= 0; --word) {
        uint64_t bits = 0;
        if (ancestor >= word * kRun) {
          bits = own_word[ancestor];
          ancestor = before_run[ancestor];
        }
        row[word] = bits;
        depth += __popcll(bits);
      }
      s.depths[slot] = depth;
    }
    pad_rows(t, count);
    __syncthreads();

    put_slots(t, s, count, p.tokens + b * p.tokens_stride, prefix_len);
    put_request(tree, b, count, status);
    __syncthreads();  // the next request's tree takes the place of this one
  }
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_tree_from_parents_params&) { return 0; }

int32_t enqueue(const Session& session, const kdt_tree_from_parents_params& p, void*) {
  return launch_kernel<0>(session, "tree_from_parents", build_from_parents, p.tree->batch_size, kThreads,
                          After::kFinished, p, *p.tree);
}

}  // namespace kdt::cuda
