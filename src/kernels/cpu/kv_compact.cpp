// kv_compact on the CPU: check a request's rows once, then move them layer by layer. Accepted slots ascend, so
// row k never lands on a row that a later k still has to read: moving in ascending order is safe in place.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../cache.hpp"
#include "ops.hpp"
#include "parallel.hpp"
#include "tree_layout.hpp"
#include "workspace.hpp"

namespace kdt::cpu {
namespace {

std::byte* layer_base(const kdt_kv_cache& c, int64_t layer) {
  if (c.layer_data != nullptr) return static_cast<std::byte*>(c.layer_data[layer]);
  return static_cast<std::byte*>(c.data) + layer * c.layer_stride * c.element_size;
}

struct Move {
  int64_t from, to;  // elements within a layer
};

// Writes the moves of one request behind `moves` and adds their number to *count. False, and none added, when its
// path or its rows are bad.
bool plan_moves(const kdt_kv_compact_params& p, int64_t b, Move* moves, int64_t* count) {
  const kdt_kv_cache& from = *p.cache;
  const kdt_kv_cache& to = p.destination != nullptr ? *p.destination : *p.cache;
  const int32_t* accept_index = p.accept_index + b * p.accept_index_stride;
  const int32_t length = p.accept_len[b];
  if (length < 0 || length > p.max_len) return false;
  int64_t planned = *count;
  int32_t previous = -1;
  for (int32_t k = 0; k < length; ++k) {
    const int32_t slot = accept_index[k];
    if (slot <= previous || slot >= p.num_slots) return false;  // so k < num_slots
    const int64_t source = row_offset(from, b, int64_t{p.prefix_lens[b]} + slot);
    const int64_t target = row_offset(to, b, int64_t{p.prefix_lens[b]} + k);
    if (source < 0 || target < 0) return false;
    if (p.destination != nullptr || slot != k) moves[planned++] = {source, target};
    previous = slot;
  }
  *count = planned;
  return true;
}

}  // namespace

size_t kv_compact_workspace_size(const kdt_context&, const kdt_kv_compact_params& p) {
  if (p.batch_size == 0) return 0;
  const size_t moves = static_cast<size_t>(p.batch_size) * static_cast<size_t>(std::min(p.num_slots, p.max_len));
  return workspace_for(moves * sizeof(Move));
}

void kv_compact(const kdt_context& context, const kdt_kv_compact_params& p, void* workspace) {
  const kdt_kv_cache& from = *p.cache;
  const kdt_kv_cache& to = p.destination != nullptr ? *p.destination : *p.cache;
  const int64_t live = live_requests(p.num_live, p.batch_size);
  const size_t row_bytes = static_cast<size_t>(from.row_width) * static_cast<size_t>(from.element_size);
  Move* moves = reinterpret_cast<Move*>(workspace_begin(workspace));
  int64_t count = 0;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const bool bad = b < live && !plan_moves(p, b, moves, &count);
    if (p.status != nullptr) p.status[b] = bad ? KDT_STATUS_BAD_TREE : 0;
  }
  if (count == 0) return;
  const int64_t min_layers =
      1 + (int64_t{1} << 19) / (count * static_cast<int64_t>(row_bytes));  // 50 us at 10 GB/s
  parallel_for(context.num_threads, from.num_layers, min_layers, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t layer = begin; layer < end; ++layer) {
      const std::byte* source = layer_base(from, layer);
      std::byte* target = layer_base(to, layer);
      for (int64_t i = 0; i < count; ++i) {  // memmove: a table that names one page twice must not hurt us
        std::memmove(target + moves[i].to * to.element_size, source + moves[i].from * from.element_size, row_bytes);
      }
    }
  });
}

}  // namespace kdt::cpu
