// kv_compact on the CPU: check a request's rows once, then move them layer by layer. Accepted slots ascend, so
// row k never lands on a row that a later k still has to read: moving in ascending order is safe in place.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops.hpp"
#include "parallel.hpp"
#include "tree_layout.hpp"

namespace kdt::cpu {
namespace {

// Element offset of a logical row within a layer, or -1 when the table or the cache does not hold it.
int64_t row_offset(const kdt_kv_cache& c, int64_t b, int64_t row) {
  if (row < 0) return -1;
  int64_t page = b;
  if (c.block_table != nullptr) {
    const int64_t column = row / c.page_size;
    if (column >= c.max_pages) return -1;
    page = c.block_table[b * c.block_table_stride + column];
    row %= c.page_size;
  } else if (row >= c.page_size) {
    return -1;
  }
  if (page < 0 || page >= c.num_pages) return -1;
  return page * c.page_stride + row * c.row_stride;
}

std::byte* layer_base(const kdt_kv_cache& c, int64_t layer) {
  if (c.layer_data != nullptr) return static_cast<std::byte*>(c.layer_data[layer]);
  return static_cast<std::byte*>(c.data) + layer * c.layer_stride * c.element_size;
}

struct Move {
  int64_t from, to;  // elements within a layer
};

// Appends the moves of one request. False, and none appended, when its path or its rows are bad.
bool plan_moves(const kdt_kv_compact_params& p, int64_t b, std::vector<Move>* moves) {
  const kdt_kv_cache& from = *p.cache;
  const kdt_kv_cache& to = p.destination != nullptr ? *p.destination : *p.cache;
  const int32_t* accept_index = p.accept_index + b * p.accept_index_stride;
  const int32_t length = p.accept_len[b];
  if (length < 0 || length > p.max_len) return false;
  const size_t before = moves->size();
  int32_t previous = -1;
  for (int32_t k = 0; k < length; ++k) {
    const int32_t slot = accept_index[k];
    const int64_t source = row_offset(from, b, int64_t{p.prefix_lens[b]} + slot);
    const int64_t target = row_offset(to, b, int64_t{p.prefix_lens[b]} + k);
    if (slot <= previous || slot >= p.num_slots || source < 0 || target < 0) {
      moves->resize(before);
      return false;
    }
    if (p.destination != nullptr || slot != k) moves->push_back({source, target});
    previous = slot;
  }
  return true;
}

}  // namespace

void kv_compact(const kdt_context& context, const kdt_kv_compact_params& p) {
  const kdt_kv_cache& from = *p.cache;
  const kdt_kv_cache& to = p.destination != nullptr ? *p.destination : *p.cache;
  const int64_t live = live_requests(p.num_live, p.batch_size);
  const size_t row_bytes = static_cast<size_t>(from.row_width) * static_cast<size_t>(from.element_size);

  // Every request is checked, and all memory is had, before the first row moves.
  std::vector<Move> moves;
  std::vector<bool> good(static_cast<size_t>(live));
  for (int64_t b = 0; b < live; ++b) good[static_cast<size_t>(b)] = plan_moves(p, b, &moves);
  if (p.status != nullptr) {
    for (int64_t b = 0; b < p.batch_size; ++b) {
      p.status[b] = b < live && !good[static_cast<size_t>(b)] ? KDT_STATUS_BAD_TREE : 0;
    }
  }
  const int64_t layer_bytes = static_cast<int64_t>(moves.size() * row_bytes);
  const int64_t min_layers = 1 + (int64_t{1} << 19) / std::max<int64_t>(layer_bytes, 1);  // about 50 us at 10 GB/s
  parallel_for(context.num_threads, from.num_layers, min_layers, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t layer = begin; layer < end; ++layer) {
      const std::byte* source = layer_base(from, layer);
      std::byte* target = layer_base(to, layer);
      for (const Move& move : moves) {  // memmove: a table that names one page twice must not hurt us
        std::memmove(target + move.to * to.element_size, source + move.from * from.element_size, row_bytes);
      }
    }
  });
}

}  // namespace kdt::cpu
