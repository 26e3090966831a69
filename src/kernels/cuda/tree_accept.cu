// tree_accept on CUDA: a block a request.
//
// Idea: a walk is a chain of dependent loads, so what can be done beside it is done before. The block brings all
// that the walk may touch (tokens, links, targets: 16 bytes a slot) into shared memory in one round trip, whether
// or not the request turns out to be live, and writes the padding meanwhile. One warp walks. Its lanes go the same
// way; they share out the test against the stop tokens.
//
// Limits: those of the header. 16.4 KB of static shared memory. The walk is bounded by N hops whatever the links
// say.
#include "common.cuh"
#include "launch.hpp"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 128;

// What a walk needs of a slot, in one load.
struct alignas(16) Slot {
  int32_t token, first_child, next_sibling, target;
};

// What a walk ends with.
struct Outcome {
  int32_t emitted, finished, next_root, status;
};

// One warp follows the links from the root and writes the tokens and slots it accepts.
__device__ Outcome walk(const kdt_tree_accept_params& p, const Slot* slots, int32_t num_slots, int32_t node_count,
                        int32_t max_tokens, int32_t my_stop, int32_t* tokens, int32_t* accept_index) {
  const int lane = threadIdx.x;
  Slot at = slots[0];
  Outcome o = {0, max_tokens <= 0 ? 2 : 0, at.token, 0};
  int32_t slot = 0, hops = 0;
  while (o.finished == 0 && o.emitted < p.max_len) {
    const int32_t token = at.target;
    if (token < 0) {
      o.status |= KDT_STATUS_BAD_TARGET;
      break;
    }
    // The first child whose token is the target's.
    int32_t child = at.first_child;
    while (child != -1) {
      if (child <= slot || child >= node_count || hops == num_slots) {
        o.status |= KDT_STATUS_BAD_TREE;
        child = -1;
        break;
      }
      ++hops;
      at = slots[child];
      if (at.token == token) break;
      child = at.next_sibling;
    }
    if (lane == 0) {
      tokens[o.emitted] = token;
      accept_index[o.emitted] = slot;
    }
    o.next_root = token;
    ++o.emitted;
    bool stop = my_stop == token;
    for (int64_t i = kWarpSize + lane; i < p.num_stop_tokens; i += kWarpSize) stop |= p.stop_tokens[i] == token;
    if (__any_sync(kAllLanes, stop)) {
      o.finished = 1;
    } else if (o.emitted == max_tokens) {
      o.finished = 2;
    } else if (child < 0) {
      break;
    }
    slot = child;
  }
  return o;
}

__global__ void __launch_bounds__(kThreads) tree_accept_kernel(kdt_tree_accept_params p, kdt_tree tree) {
  __shared__ Slot slots[kMaxSlots];
  const int lane = threadIdx.x % kWarpSize;
  const int32_t my_stop = lane < p.num_stop_tokens ? p.stop_tokens[lane] : -1;  // no target is -1
  const int64_t live = live_requests(p.num_live, tree.batch_size);
  for (int64_t b = blockIdx.x; b < tree.batch_size; b += gridDim.x) {
    const int32_t given_count = tree.node_count[b];
    const int32_t max_tokens = p.max_tokens != nullptr ? p.max_tokens[b] : INT32_MAX;
    const int64_t row = b * tree.slot_stride;
    for (int32_t i = threadIdx.x; i < tree.num_slots; i += kThreads) {
      slots[i] = {tree.tokens[row + i], tree.first_child[row + i], tree.next_sibling[row + i],
                  p.target_tokens[b * p.target_tokens_stride + i]};
    }
    int32_t* tokens = p.tokens + b * p.tokens_stride;
    int32_t* accept_index = p.accept_index + b * p.accept_index_stride;
    for (int64_t i = threadIdx.x; i < p.max_len; i += kThreads) {
      tokens[i] = -1;
      accept_index[i] = -1;
    }
    __syncthreads();  // also: what the walk writes comes after the padding
    if (threadIdx.x < kWarpSize) {
      int32_t status = 0;
      const int32_t node_count = b < live ? clamped(given_count, 0, tree.num_slots, &status) : 0;
      Outcome o = {0, 0, -1, 0};
      if (node_count > 0) {
        o = walk(p, slots, tree.num_slots, node_count, max_tokens, my_stop, tokens, accept_index);
      }
      if (threadIdx.x == 0) {
        p.token_count[b] = o.emitted;
        p.accept_len[b] = o.emitted;
        p.next_root[b] = o.next_root;
        p.finished[b] = o.finished;
        if (p.status != nullptr) p.status[b] = status | o.status;
      }
    }
    __syncthreads();  // the next request's slots come into the same memory
  }
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_tree_accept_params&) { return 0; }

int32_t enqueue(const Session& session, const kdt_tree_accept_params& p, void*) {
  return launch_kernel<0>(session, "tree_accept", tree_accept_kernel, p.tree->batch_size, kThreads,
                          After::kFinished, p, *p.tree);
}

}  // namespace kdt::cuda
