// Where a logical row of a request lies in a KV cache.
#pragma once

#include <cstdint>

#include "host_device.hpp"
#include "kdtree/kdtree.h"

namespace kdt {

// Element offset of a logical row within a layer, or -1 when the table or the cache does not hold it.
KDT_HOST_DEVICE inline int64_t row_offset(const kdt_kv_cache& c, int64_t b, int64_t row) {
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

}  // namespace kdt
