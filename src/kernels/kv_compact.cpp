// Entry of kv_compact: the checks on its arguments.
#include "cache_args.hpp"
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_kv_compact_params;
  Params p;
  kdt_kv_cache cache;
  kdt_kv_cache destination;

  int32_t resolve(const char* fn, const kdt_context& context, const Params* given, Arrays arrays,
                  ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_reserved(fn, "reserved0", p.reserved0 == 0));
    KDT_TRY(check_dimension(fn, "batch_size", p.batch_size, 0, INT32_MAX));
    KDT_TRY(check_dimension(fn, "num_slots", p.num_slots, 1, KDT_MAX_BUDGET + 1));
    KDT_TRY(check_dimension(fn, "max_len", p.max_len, 1, INT32_MAX));
    KDT_TRY(settle_stride(fn, "accept_index_stride", &p.accept_index_stride, p.max_len));
    int64_t cache_extent, destination_extent = 0;
    KDT_TRY(read_cache(fn, kCacheNames, p.cache, p.batch_size, &cache, &cache_extent));
    p.cache = &cache;
    if (p.destination != nullptr) {
      KDT_TRY(read_cache(fn, kDestinationNames, p.destination, p.batch_size, &destination, &destination_extent));
      p.destination = &destination;
      const auto same = [&](const char* name, int32_t expected, int32_t got) -> int32_t {
        return check_range(fn, name, got, expected, expected, KDT_ERR_SHAPE);
      };
      KDT_TRY(same(kDestinationNames.num_layers, cache.num_layers, destination.num_layers));
      KDT_TRY(same(kDestinationNames.row_width, cache.row_width, destination.row_width));
      KDT_TRY(same(kDestinationNames.element_size, cache.element_size, destination.element_size));
    }
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const int64_t b = p.batch_size;
    KDT_TRY(add_cache(fn, kCacheNames, context, cache, cache_extent, p.batch_size,
                      p.destination == nullptr ? Use::kOut : Use::kIn, checker));
    if (p.destination != nullptr) {
      KDT_TRY(add_cache(fn, kDestinationNames, context, destination, destination_extent, p.batch_size, Use::kOut,
                        checker));
    }
    KDT_TRY(checker->add("accept_index", p.accept_index, Use::kIn, b, p.accept_index_stride, p.max_len));
    KDT_TRY(checker->add("accept_len", p.accept_len, Use::kIn, b));
    KDT_TRY(checker->add("prefix_lens", p.prefix_lens, Use::kIn, b));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    return checker->add("status", p.status, Use::kOptionalOut, b);
  }

  size_t workspace_size(const kdt_context& context) const { return cpu::kv_compact_workspace_size(context, p); }
  void run(const kdt_context& context, void* workspace) const { cpu::kv_compact(context, p, workspace); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_kv_compact_workspace_size(const kdt_context* context, const kdt_kv_compact_params* params,
                                      size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_kv_compact_workspace_size", context, params, size);
}

int32_t kdt_kv_compact(const kdt_context* context, const kdt_kv_compact_params* params, void* workspace,
                       size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_kv_compact", context, params, workspace, workspace_size, stream);
}
