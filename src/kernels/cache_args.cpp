#include "cache_args.hpp"

#include <algorithm>

namespace kdt {
namespace {

constexpr int32_t kMaxElementSize = 64;

}  // namespace

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
  // Layers, pages and rows may be nested in any order; check_distinct sees to it that no two share an element.
  const auto settle = [&](const char* name, int64_t* stride, int64_t count, int64_t unit) -> int32_t {
    if (*stride == 0 && __builtin_mul_overflow(count, unit, stride)) {
      return fail(KDT_ERR_STRIDE, fn, "argument '%s': the packed cache does not fit in the address space", name);
    }
    if (count == 0 && *stride == 0) return KDT_OK;  // packed, of nothing
    return settle_stride(fn, name, stride, c->row_width);
  };
  KDT_TRY(settle(names.row_stride, &c->row_stride, 1, c->row_width));
  KDT_TRY(settle(names.page_stride, &c->page_stride, c->page_size, c->row_stride));
  if (c->layer_data != nullptr) c->layer_stride = 0;  // ignored
  KDT_TRY(settle(names.layer_stride, &c->layer_stride, c->num_pages, c->page_stride));

  *layer_extent = 0;
  if (c->num_pages == 0 || c->page_size == 0) return KDT_OK;
  KDT_TRY(check_distinct(fn,
                         {{names.row_stride, c->page_size, c->row_stride},
                          {names.page_stride, c->num_pages, c->page_stride},
                          {names.layer_stride, c->layer_data == nullptr ? c->num_layers : 1, c->layer_stride}},
                         c->row_width));
  return nested_extent(fn, names.self, c->num_pages, c->page_stride, c->page_size, c->row_stride, c->row_width,
                       layer_extent);
}

int32_t add_cache(const char* fn, const CacheNames& names, const kdt_context& context, const kdt_kv_cache& c,
                  int64_t layer_extent, int32_t batch_size, ArrayChecker::Use use, ArrayChecker* checker) {
  using Use = ArrayChecker::Use;
  if (batch_size == 0) return KDT_OK;
  if (layer_extent > 0 && (c.data != nullptr) == (c.layer_data != nullptr)) {
    return fail(c.data == nullptr ? KDT_ERR_NULL_POINTER : KDT_ERR_INVALID_ARGUMENT, fn,
                "argument '%s': expected either data or layer_data, got %s", names.self,
                c.data == nullptr ? "neither" : "both");
  }
  if (c.layer_data == nullptr) {
    KDT_TRY(
        checker->add_bytes(names.data, c.data, use, c.num_layers, c.layer_stride, layer_extent, c.element_size, 1));
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

}  // namespace kdt
