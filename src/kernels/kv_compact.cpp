// Entry of kv_compact: argument checks and the choice of backend.
#include <cinttypes>

#include "args.hpp"
#include "cpu/ops.hpp"

namespace kdt {
namespace {

constexpr int32_t kMaxElementSize = 64;

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
constexpr CacheNames kCacheNames = KDT_CACHE_NAMES("cache");
constexpr CacheNames kDestinationNames = KDT_CACHE_NAMES("destination");

// Reads one cache struct and settles its strides. *layer_extent is the span of one layer in elements.
int32_t read_cache(const char* fn, const CacheNames& names, const kdt_kv_cache* given, int32_t batch_size,
                   kdt_kv_cache* c, int64_t* layer_extent) {
  KDT_TRY(read_struct(fn, names.self, given, c));
  const bool paged = c->block_table != nullptr;
  KDT_TRY(check_dimension(fn, names.num_layers, c->num_layers, 1, INT32_MAX));
  KDT_TRY(check_dimension(fn, names.num_pages, c->num_pages, paged ? 0 : batch_size, INT32_MAX));
  KDT_TRY(check_dimension(fn, names.page_size, c->page_size, paged ? 1 : 0, INT32_MAX));
  KDT_TRY(check_dimension(fn, names.row_width, c->row_width, 1, INT32_MAX));
  KDT_TRY(check_range(fn, names.element_size, c->element_size, 1, kMaxElementSize, KDT_ERR_INVALID_ARGUMENT));
  KDT_TRY(check_dimension(fn, names.max_pages, c->max_pages, 0, INT32_MAX));
  KDT_TRY(settle_stride(fn, names.block_table_stride, &c->block_table_stride, c->max_pages));
  // Layers, pages and rows may be interleaved in any order, so a stride is only held to the width of a row.
  const auto settle = [&](const char* name, int64_t* stride, int64_t count, int64_t unit) -> int32_t {
    if (*stride == 0 && __builtin_mul_overflow(count, unit, stride)) {
      return fail(KDT_ERR_STRIDE, fn, "argument '%s': the packed cache does not fit in the address space", name);
    }
    if (count == 0) *stride = std::max<int64_t>(*stride, c->row_width);
    return settle_stride(fn, name, stride, c->row_width);
  };
  KDT_TRY(settle(names.row_stride, &c->row_stride, 1, c->row_width));
  KDT_TRY(settle(names.page_stride, &c->page_stride, c->page_size, c->row_stride));
  KDT_TRY(settle(names.layer_stride, &c->layer_stride, c->num_pages, c->page_stride));

  int64_t rows;
  if (c->num_pages == 0 || c->page_size == 0) {
    *layer_extent = 0;
  } else if (__builtin_mul_overflow(c->page_size - int64_t{1}, c->row_stride, &rows) ||
             __builtin_mul_overflow(c->num_pages - int64_t{1}, c->page_stride, layer_extent) ||
             __builtin_add_overflow(*layer_extent, rows, layer_extent) ||
             __builtin_add_overflow(*layer_extent, c->row_width, layer_extent)) {
    return fail(KDT_ERR_STRIDE, fn, "argument '%s': a layer does not fit in the address space", names.self);
  }
  return KDT_OK;
}

int32_t add_cache(const char* fn, const CacheNames& names, const kdt_context& context, const kdt_kv_cache& c,
                  int64_t layer_extent, int32_t batch_size, ArrayChecker::Use use, ArrayChecker* checker) {
  using Use = ArrayChecker::Use;
  if (batch_size > 0 && (c.data != nullptr) == (c.layer_data != nullptr)) {
    return fail(c.data == nullptr ? KDT_ERR_NULL_POINTER : KDT_ERR_INVALID_ARGUMENT, fn,
                "argument '%s': expected either data or layer_data, got %s", names.self,
                c.data == nullptr ? "neither" : "both");
  }
  if (c.layer_data == nullptr) {
    KDT_TRY(checker->add_bytes(names.data, c.data, use, batch_size == 0 ? 0 : c.num_layers, c.layer_stride,
                               layer_extent, c.element_size, 1));
  } else {
    KDT_TRY(checker->add(names.layer_data, c.layer_data, Use::kIn, c.num_layers));
    if (context.backend == KDT_BACKEND_CPU) {  // elsewhere the pointers are in device memory
      for (int32_t layer = 0; layer < c.num_layers; ++layer) {
        KDT_TRY(
            checker->add_bytes(names.layer_data, c.layer_data[layer], use, 1, 1, layer_extent, c.element_size, 1));
      }
    }
  }
  return checker->add(names.block_table, c.block_table, Use::kOptionalIn, batch_size, c.block_table_stride,
                      c.max_pages);
}

// Copies and checks the parameters; *p then points to *cache and (unless in place) *destination.
int32_t resolve(const char* fn, const kdt_context* context, const kdt_kv_compact_params* given, Arrays arrays,
                kdt_kv_compact_params* p, kdt_kv_cache* cache, kdt_kv_cache* destination, ArrayChecker* checker) {
  KDT_TRY(check_not_null(fn, "context", context));
  KDT_TRY(read_struct(fn, "params", given, p));
  KDT_TRY(check_reserved(fn, "reserved0", p->reserved0 == 0));
  KDT_TRY(check_dimension(fn, "batch_size", p->batch_size, 0, INT32_MAX));
  KDT_TRY(check_dimension(fn, "num_slots", p->num_slots, 1, KDT_MAX_BUDGET + 1));
  KDT_TRY(check_dimension(fn, "max_len", p->max_len, 1, INT32_MAX));
  KDT_TRY(settle_stride(fn, "accept_index_stride", &p->accept_index_stride, p->max_len));
  int64_t cache_extent, destination_extent = 0;
  KDT_TRY(read_cache(fn, kCacheNames, p->cache, p->batch_size, cache, &cache_extent));
  p->cache = cache;
  if (p->destination != nullptr) {
    KDT_TRY(read_cache(fn, kDestinationNames, p->destination, p->batch_size, destination, &destination_extent));
    p->destination = destination;
    const auto same = [&](const char* name, int32_t expected, int32_t got) -> int32_t {
      return check_range(fn, name, got, expected, expected, KDT_ERR_SHAPE);
    };
    KDT_TRY(same(kDestinationNames.num_layers, cache->num_layers, destination->num_layers));
    KDT_TRY(same(kDestinationNames.row_width, cache->row_width, destination->row_width));
    KDT_TRY(same(kDestinationNames.element_size, cache->element_size, destination->element_size));
  }
  if (arrays == Arrays::kIgnore) return KDT_OK;

  using Use = ArrayChecker::Use;
  const int64_t b = p->batch_size;
  KDT_TRY(add_cache(fn, kCacheNames, *context, *cache, cache_extent, p->batch_size,
                    p->destination == nullptr ? Use::kOut : Use::kIn, checker));
  if (p->destination != nullptr) {
    KDT_TRY(add_cache(fn, kDestinationNames, *context, *destination, destination_extent, p->batch_size, Use::kOut,
                      checker));
  }
  KDT_TRY(checker->add("accept_index", p->accept_index, Use::kIn, b, p->accept_index_stride, p->max_len));
  KDT_TRY(checker->add("accept_len", p->accept_len, Use::kIn, b));
  KDT_TRY(checker->add("prefix_lens", p->prefix_lens, Use::kIn, b));
  KDT_TRY(checker->add("num_live", p->num_live, Use::kOptionalIn, 1));
  return checker->add("status", p->status, Use::kOptionalOut, b);
}

}  // namespace
}  // namespace kdt

int32_t kdt_kv_compact_workspace_size(const kdt_context* context, const kdt_kv_compact_params* params,
                                      size_t* size) {
  constexpr const char* fn = "kdt_kv_compact_workspace_size";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "size", size));
    *size = 0;
    kdt_kv_compact_params p;
    kdt_kv_cache cache, destination;
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kIgnore, &p, &cache, &destination, nullptr));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    return KDT_OK;  // the CPU needs none
  });
}

int32_t kdt_kv_compact(const kdt_context* context, const kdt_kv_compact_params* params, void* workspace,
                       size_t workspace_size, void* stream) {
  constexpr const char* fn = "kdt_kv_compact";
  return kdt::guarded(fn, [&]() -> int32_t {
    kdt_kv_compact_params p;
    kdt_kv_cache cache, destination;
    kdt::ArrayChecker checker(fn);
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kCheck, &p, &cache, &destination, &checker));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    KDT_TRY(kdt::check_call(fn, *context, stream, workspace, workspace_size, 0, &checker));
    kdt::cpu::kv_compact(*context, p);
    return KDT_OK;
  });
}
