// tree_build on the CPU: best-first search with a binary heap, one request at a time (DDTree, arXiv 2604.12989).
//
// Idea: every node but the first candidate has one predecessor that comes before it in the order: its previous
// sibling, or, for a first child, its parent (log-probs are <= 0 and rounding is monotone). So a heap that
// starts with (0) and, for each node taken, receives its next sibling and its first child yields the exact order
// and never holds more than budget + 1 entries. Scores are float64 sums in depth order; a parent's sum plus one
// log-prob is that sum. Ties are settled on the rank tuples themselves, by walking both paths up to where they
// meet; they are common (bf16 logits), and paths are short.
//
// Limits: those of the header; O(budget * (log budget + depth on ties) + D * K + budget * N / 64) a request.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../args.hpp"
#include "ops.hpp"
#include "parallel.hpp"
#include "tree_layout.hpp"
#include "workspace.hpp"

namespace kdt::cpu {
namespace {

// A node that may be taken next. Its parent is in the tree already.
struct Candidate {
  double score;
  int32_t parent;  // slot
  int32_t rank;    // in the row of its depth
};

// One thread's scratch.
struct Scratch {
  Candidate* heap;  // [N]
  double* scores;   // [N] float64 path sums by slot
  int32_t* ranks;   // [N] rank of each slot in its row
};

size_t scratch_bytes(int64_t num_slots) {
  const size_t bytes = static_cast<size_t>(num_slots) * (sizeof(Candidate) + sizeof(double) + sizeof(int32_t));
  return round_up(bytes);
}

Scratch scratch_of(void* workspace, int64_t worker, int64_t num_slots) {
  std::byte* begin = workspace_begin(workspace) + static_cast<size_t>(worker) * scratch_bytes(num_slots);
  Scratch s;
  s.heap = reinterpret_cast<Candidate*>(begin);
  s.scores = reinterpret_cast<double*>(s.heap + num_slots);
  s.ranks = reinterpret_cast<int32_t*>(s.scores + num_slots);
  return s;
}

// Number of usable entries of a row, and whether what follows them is more than padding.
int32_t row_length(const float* log_probs, const int32_t* ids, int32_t k, uint32_t id_limit, int32_t* status) {
  float previous = 0.0f;  // so a positive first entry is "larger than the one before"
  int32_t length = 0;
  while (length < k && log_probs[length] <= previous && std::isfinite(log_probs[length]) &&
         static_cast<uint32_t>(ids[length]) < id_limit) {
    previous = log_probs[length++];
  }
  for (int32_t i = length; i < k; ++i) {
    if (!(std::isinf(log_probs[i]) && log_probs[i] < 0 && ids[i] == -1)) {
      *status |= KDT_STATUS_ROW_TRUNCATED;
      break;
    }
  }
  return length;
}

// The rank tuple of a comes after that of b. Paths are walked up to equal depth, then on to their fork.
bool tuple_after(const Candidate& a, const Candidate& b, const TreeSlots& t, const int32_t* ranks) {
  int32_t parent_a = a.parent, rank_a = a.rank, parent_b = b.parent, rank_b = b.rank;
  const auto up = [&](int32_t& parent, int32_t& rank) {
    rank = ranks[parent];
    parent = t.parents[parent];
  };
  const int32_t depth_a = t.depths[parent_a], depth_b = t.depths[parent_b];
  for (int32_t d = depth_a; d > depth_b; --d) up(parent_a, rank_a);
  for (int32_t d = depth_b; d > depth_a; --d) up(parent_b, rank_b);
  while (parent_a != parent_b) {
    up(parent_a, rank_a);
    up(parent_b, rank_b);
  }
  return rank_a > rank_b;  // never equal: no candidate is another's ancestor, for it is not in the tree yet
}

void build_one(const kdt_tree_build_params& p, int64_t b, const Scratch& s) {
  const kdt_tree& tree = *p.tree;
  const TreeSlots t(tree, b);
  const float* log_probs = p.log_probs + b * p.log_probs_stride;
  const int32_t* ids = p.token_ids + b * p.token_ids_stride;
  const uint32_t id_limit = p.vocab_size > 0 ? static_cast<uint32_t>(p.vocab_size) : uint32_t{1} << 31;

  int32_t status = 0;
  const int32_t prefix_len = clamped(p.prefix_lens[b], 0, INT32_MAX - p.depth, &status);
  const int32_t budget = p.budgets == nullptr ? p.budget : clamped(p.budgets[b], 0, p.budget, &status);
  const int32_t max_depth = p.max_depths == nullptr ? p.depth : clamped(p.max_depths[b], 0, p.depth, &status);

  int32_t lengths[KDT_MAX_DEPTH];
  int32_t usable_depth = max_depth;  // rows before the first empty one
  for (int32_t d = max_depth - 1; d >= 0; --d) {
    lengths[d] = row_length(log_probs + d * p.log_probs_row_stride, ids + d * p.token_ids_row_stride,
                            p.num_candidates, id_limit, &status);
    if (lengths[d] == 0) usable_depth = d;
  }

  const auto log_prob = [&](int32_t depth, int32_t rank) {  // depth counts from 1
    return static_cast<double>(log_probs[(depth - 1) * p.log_probs_row_stride + rank]);
  };
  const auto comes_after = [&](const Candidate& a, const Candidate& c) {
    return a.score != c.score ? a.score < c.score : tuple_after(a, c, t, s.ranks);
  };

  put_node(t, 0, -1, p.root_tokens[b], 0.0f, prefix_len);
  s.scores[0] = 0.0;
  s.ranks[0] = 0;
  int32_t count = 1, heap_size = 0;
  const auto push = [&](int32_t parent, int32_t depth, int32_t rank) {
    s.heap[heap_size++] = {s.scores[parent] + log_prob(depth, rank), parent, rank};
    std::push_heap(s.heap, s.heap + heap_size, comes_after);
  };
  if (usable_depth > 0 && budget > 0) push(0, 1, 0);
  while (heap_size > 0 && count <= budget) {
    std::pop_heap(s.heap, s.heap + heap_size, comes_after);
    const Candidate best = s.heap[--heap_size];
    const int32_t slot = count++, depth = t.depths[best.parent] + 1;
    s.scores[slot] = best.score;
    s.ranks[slot] = best.rank;
    put_node(t, slot, best.parent, ids[(depth - 1) * p.token_ids_row_stride + best.rank],
             static_cast<float>(best.score), prefix_len);
    if (best.rank + 1 < lengths[depth - 1]) push(best.parent, depth, best.rank + 1);
    if (depth < usable_depth) push(slot, depth + 1, 0);
  }
  finish_tree(t, count);
  tree.node_count[b] = count;
  if (tree.status != nullptr) tree.status[b] = status;
}

}  // namespace

size_t tree_build_workspace_size(const kdt_context& context, const kdt_tree_build_params& p) {
  if (p.tree->batch_size == 0) return 0;
  const int32_t threads = std::min(context.num_threads, p.tree->batch_size);
  return workspace_for(static_cast<size_t>(threads) * scratch_bytes(p.budget + 1));
}

void tree_build(const kdt_context& context, const kdt_tree_build_params& p, void* workspace) {
  const int32_t batch_size = p.tree->batch_size;
  const int64_t live = live_requests(p.num_live, batch_size);
  const int64_t min_requests = 1 + 512 / (p.budget + 1);  // about 50 us at 0.1 us a node
  parallel_for(context.num_threads, batch_size, min_requests, [&](int64_t begin, int64_t end, int64_t worker) {
    const Scratch scratch = scratch_of(workspace, worker, p.budget + 1);
    for (int64_t b = begin; b < end; ++b) {
      if (b < live) {
        build_one(p, b, scratch);
      } else {
        put_dead_tree(*p.tree, b);
      }
    }
  });
}

}  // namespace kdt::cpu
