// Checks on the KV caches among an operation's arguments.
#pragma once

#include <cstdint>

#include "args.hpp"

namespace kdt {

// What error texts call the fields of a cache.
struct CacheNames {
  const char *self, *data, *layer_data, *num_layers, *num_pages, *page_size, *row_width, *element_size, *max_pages,
      *layer_stride, *page_stride, *row_stride, *block_table, *block_table_stride;
};
#define KDT_CACHE_NAMES(x) \
  {x,                      \
   x ".data",              \
   x ".layer_data",        \
   x ".num_layers",        \
   x ".num_pages",         \
   x ".page_size",         \
   x ".row_width",         \
   x ".element_size",      \
   x ".max_pages",         \
   x ".layer_stride",      \
   x ".page_stride",       \
   x ".row_stride",        \
   x ".block_table",       \
   x ".block_table_stride"}

inline constexpr CacheNames kCacheNames = KDT_CACHE_NAMES("cache");
inline constexpr CacheNames kDestinationNames = KDT_CACHE_NAMES("destination");

// Reads one cache struct and settles its strides. *layer_extent is the span of one layer in elements.
int32_t read_cache(const char* fn, const CacheNames& names, const kdt_kv_cache* given, int32_t batch_size,
                   kdt_kv_cache* c, int64_t* layer_extent);

// Hands the cache's arrays to the checker.
int32_t add_cache(const char* fn, const CacheNames& names, const kdt_context& context, const kdt_kv_cache& c,
                  int64_t layer_extent, int32_t batch_size, ArrayChecker::Use use, ArrayChecker* checker);

}  // namespace kdt
