// Entry of verify_attn: the checks on its arguments.
#include <cmath>

#include "cache_args.hpp"
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

constexpr int32_t kQkDim = 576, kVDim = 512, kMaxHeads = 128, kMaxPageSize = 256;

int32_t unsupported(const char* fn, const char* name, int32_t expected, int32_t got) {
  return fail(KDT_ERR_UNSUPPORTED, fn, "argument '%s': expected %d, got %d", name, expected, got);
}

struct Call {
  using Params = kdt_verify_attn_params;
  Params p;
  kdt_kv_cache cache;
  kdt_tree tree;

  int32_t resolve(const char* fn, const kdt_context& context, const Params* given, Arrays arrays,
                  ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_reserved(fn, "qo_indptr", p.qo_indptr == nullptr));
    KDT_TRY(check_reserved(fn, "q_rope", p.q_rope == nullptr));
    KDT_TRY(check_reserved(fn, "kv_rope", p.kv_rope == nullptr));
    KDT_TRY(check_reserved(fn, "kv_scales", p.kv_scales == nullptr));
    KDT_TRY(check_reserved(fn, "split_len", p.split_len == 0));
    KDT_TRY(check_reserved(fn, "reserved0", p.reserved0 == 0));
    if (p.qk_dim != kQkDim) return unsupported(fn, "qk_dim", kQkDim, p.qk_dim);
    if (p.v_dim != kVDim) return unsupported(fn, "v_dim", kVDim, p.v_dim);
    KDT_TRY(check_float_dtype(fn, "q_dtype", p.q_dtype));
    if (p.kv_dtype != p.q_dtype) return unsupported(fn, "kv_dtype", p.q_dtype, p.kv_dtype);
    if (p.out_dtype != KDT_F32 && p.out_dtype != p.q_dtype)
      return unsupported(fn, "out_dtype", p.q_dtype, p.out_dtype);
    KDT_TRY(check_range(fn, "lse_base", p.lse_base, KDT_LSE_NATURAL, KDT_LSE_BASE2, KDT_ERR_INVALID_ARGUMENT));
    if (!std::isfinite(p.scale)) {
      return fail(KDT_ERR_INVALID_ARGUMENT, fn, "argument 'scale': expected a finite number, got %g",
                  static_cast<double>(p.scale));
    }
    KDT_TRY(check_dimension(fn, "batch_size", p.batch_size, 0, INT32_MAX));
    KDT_TRY(check_dimension(fn, "num_queries", p.num_queries, 1, KDT_MAX_BUDGET + 1));
    KDT_TRY(check_dimension(fn, "num_heads", p.num_heads, 1, kMaxHeads));
    const int64_t h = p.num_heads, rows = p.num_queries;
    KDT_TRY(settle_free_strides(fn, "q_head_stride", &p.q_head_stride, kQkDim, "q_row_stride", &p.q_row_stride, h,
                                "q_stride", &p.q_stride, rows));
    KDT_TRY(settle_free_strides(fn, "out_head_stride", &p.out_head_stride, kVDim, "out_row_stride",
                                &p.out_row_stride, h, "out_stride", &p.out_stride, rows));
    KDT_TRY(settle_free_strides(fn, "lse_head_stride", &p.lse_head_stride, 1, "lse_row_stride", &p.lse_row_stride,
                                h, "lse_stride", &p.lse_stride, rows));

    KDT_TRY(check_distinct(fn,
                           {{"out_head_stride", h, p.out_head_stride},
                            {"out_row_stride", rows, p.out_row_stride},
                            {"out_stride", p.batch_size, p.out_stride}},
                           kVDim));
    KDT_TRY(check_distinct(fn,
                           {{"lse_head_stride", h, p.lse_head_stride},
                            {"lse_row_stride", rows, p.lse_row_stride},
                            {"lse_stride", p.batch_size, p.lse_stride}},
                           1));

    int64_t layer_extent;
    KDT_TRY(read_cache(fn, kCacheNames, p.cache, p.batch_size, &cache, &layer_extent));
    p.cache = &cache;
    const int64_t element = float_dtype_size(p.kv_dtype);
    KDT_TRY(check_range(fn, kCacheNames.num_layers, cache.num_layers, 1, 1, KDT_ERR_SHAPE));
    KDT_TRY(check_range(fn, kCacheNames.row_width, cache.row_width, kQkDim, kQkDim, KDT_ERR_SHAPE));
    KDT_TRY(
        check_range(fn, kCacheNames.element_size, cache.element_size, element, element, KDT_ERR_INVALID_ARGUMENT));
    if (cache.layer_data != nullptr) {
      return fail(KDT_ERR_UNSUPPORTED, fn, "argument '%s': expected NULL, one layer by data",
                  kCacheNames.layer_data);
    }
    const bool power_of_two = (cache.page_size & (cache.page_size - 1)) == 0;
    if (cache.block_table != nullptr && (!power_of_two || cache.page_size > kMaxPageSize)) {
      return fail(KDT_ERR_LIMIT, fn, "argument '%s': expected a power of two up to %d, got %d",
                  kCacheNames.page_size, kMaxPageSize, cache.page_size);
    }
    if (p.tree != nullptr) {
      KDT_TRY(read_tree(fn, p.tree, &tree));
      p.tree = &tree;
      KDT_TRY(check_range(fn, "tree.batch_size", tree.batch_size, p.batch_size, p.batch_size, KDT_ERR_SHAPE));
      KDT_TRY(check_range(fn, "num_queries", p.num_queries, 1, tree.num_slots, KDT_ERR_SHAPE));
    }
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const int64_t b = p.batch_size;
    const auto add = [&](const char* name, const void* array, Use use, int64_t stride, int64_t row_stride,
                         int64_t head_stride, int64_t width, int32_t dtype) -> int32_t {
      int64_t extent;
      KDT_TRY(nested_extent(fn, name, rows, row_stride, h, head_stride, width, &extent));
      return checker->add_floats(name, array, dtype, use, b, stride, extent);
    };
    KDT_TRY(add("q", p.q, Use::kIn, p.q_stride, p.q_row_stride, p.q_head_stride, kQkDim, p.q_dtype));
    KDT_TRY(add_cache(fn, kCacheNames, context, cache, layer_extent, p.batch_size, Use::kIn, checker));
    if (reinterpret_cast<uintptr_t>(cache.data) % static_cast<uintptr_t>(element) != 0) {
      return fail(KDT_ERR_ALIGNMENT, fn, "argument '%s': expected a pointer aligned to %d bytes, got %p",
                  kCacheNames.data, static_cast<int>(element), cache.data);
    }
    KDT_TRY(checker->add("prefix_lens", p.prefix_lens, Use::kIn, b));
    KDT_TRY(checker->add("kv_starts", p.kv_starts, Use::kOptionalIn, b));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    if (p.tree != nullptr) {
      const int64_t n = tree.num_slots, words = (n + 63) / 64;
      KDT_TRY(checker->add("tree.visibility", tree.visibility, Use::kOptionalIn, b, tree.visibility_stride,
                           (n - 1) * tree.visibility_pitch + words));
      KDT_TRY(checker->add("tree.node_count", tree.node_count, Use::kOptionalIn, b));
    }
    KDT_TRY(add("out", p.out, Use::kOut, p.out_stride, p.out_row_stride, p.out_head_stride, kVDim, p.out_dtype));
    KDT_TRY(add("lse", p.lse, Use::kOut, p.lse_stride, p.lse_row_stride, p.lse_head_stride, 1, KDT_F32));
    return checker->add("status", p.status, Use::kOptionalOut, b);
  }

  size_t workspace_size(const kdt_context& context) const { return cpu::verify_attn_workspace_size(context, p); }
  void run(const kdt_context& context, void* workspace) const { cpu::verify_attn(context, p, workspace); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_verify_attn_workspace_size(const kdt_context* context, const kdt_verify_attn_params* params,
                                       size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_verify_attn_workspace_size", context, params, size);
}

int32_t kdt_verify_attn(const kdt_context* context, const kdt_verify_attn_params* params, void* workspace,
                        size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_verify_attn", context, params, workspace, workspace_size, stream);
}
