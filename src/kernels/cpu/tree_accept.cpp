// tree_accept on the CPU: follow the links. A request takes a few hops, so threads pay off only for very large
// batches; the walk is bounded by N hops whatever the links say.
#include <algorithm>
#include <cstdint>

#include "ops.hpp"
#include "parallel.hpp"
#include "tree_layout.hpp"

namespace kdt::cpu {
namespace {

void accept_one(const kdt_tree_accept_params& p, int64_t b, bool live) {
  const kdt_tree& tree = *p.tree;
  const int32_t* node_tokens = tree.tokens + b * tree.slot_stride;
  const int32_t* first_child = tree.first_child + b * tree.slot_stride;
  const int32_t* next_sibling = tree.next_sibling + b * tree.slot_stride;
  const int32_t* targets = p.target_tokens + b * p.target_tokens_stride;
  int32_t* tokens = p.tokens + b * p.tokens_stride;
  int32_t* accept_index = p.accept_index + b * p.accept_index_stride;

  int32_t status = 0, finished = 0, emitted = 0, hops = 0;
  const int32_t node_count = live ? clamped(tree.node_count[b], 0, tree.num_slots, &status) : 0;
  const int32_t max_tokens = live && p.max_tokens != nullptr ? p.max_tokens[b] : INT32_MAX;

  // The first child of `slot` whose token is `token`, or -1.
  const auto find_child = [&](int32_t slot, int32_t token) -> int32_t {
    for (int32_t child = first_child[slot]; child != -1; child = next_sibling[child]) {
      if (child <= slot || child >= node_count || hops == tree.num_slots) {
        status |= KDT_STATUS_BAD_TREE;
        return -1;
      }
      ++hops;
      if (node_tokens[child] == token) return child;
    }
    return -1;
  };

  if (node_count > 0 && max_tokens <= 0) finished = 2;
  for (int32_t slot = 0; node_count > 0 && finished == 0 && emitted < p.max_len;) {
    const int32_t token = targets[slot];
    if (token < 0) {
      status |= KDT_STATUS_BAD_TARGET;
      break;
    }
    const int32_t child = find_child(slot, token);
    tokens[emitted] = token;
    accept_index[emitted++] = slot;
    if (std::find(p.stop_tokens, p.stop_tokens + p.num_stop_tokens, token) != p.stop_tokens + p.num_stop_tokens) {
      finished = 1;
    } else if (emitted == max_tokens) {
      finished = 2;
    } else if (child < 0) {
      break;
    }
    slot = child;
  }
  std::fill(tokens + emitted, tokens + p.max_len, -1);
  std::fill(accept_index + emitted, accept_index + p.max_len, -1);
  p.token_count[b] = emitted;
  p.accept_len[b] = emitted;
  p.next_root[b] = emitted > 0 ? tokens[emitted - 1] : node_count > 0 ? node_tokens[0] : -1;
  p.finished[b] = finished;
  if (p.status != nullptr) p.status[b] = status;
}

}  // namespace

void tree_accept(const kdt_context& context, const kdt_tree_accept_params& p) {
  const int32_t batch_size = p.tree->batch_size;
  const int64_t live = live_requests(p.num_live, batch_size);
  const int64_t min_requests = 1 + 65536 / (int64_t{p.max_len} + p.num_stop_tokens + 64);  // about 50 us
  parallel_for(context.num_threads, batch_size, min_requests, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t b = begin; b < end; ++b) accept_one(p, b, b < live);
  });
}

}  // namespace kdt::cpu
