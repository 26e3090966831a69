// Entry of tree_from_visibility: argument checks and the choice of backend.
#include "args.hpp"
#include "cpu/ops.hpp"

namespace kdt {
namespace {

int32_t resolve(const char* fn, const kdt_context* context, const kdt_tree_from_visibility_params* given,
                Arrays arrays, kdt_tree_from_visibility_params* p, kdt_tree* tree, ArrayChecker* checker) {
  KDT_TRY(check_not_null(fn, "context", context));
  KDT_TRY(read_struct(fn, "params", given, p));
  KDT_TRY(read_tree(fn, p->tree, tree));
  p->tree = tree;
  const int64_t b = tree->batch_size, n = tree->num_slots;
  KDT_TRY(settle_nested_strides(fn, "mask_row_stride", &p->mask_row_stride, n, "mask_stride", &p->mask_stride, n));
  KDT_TRY(settle_stride(fn, "tokens_stride", &p->tokens_stride, n));
  if (arrays == Arrays::kIgnore) return KDT_OK;

  using Use = ArrayChecker::Use;
  KDT_TRY(checker->add("mask", p->mask, Use::kIn, b, p->mask_stride, (n - 1) * p->mask_row_stride + n));
  KDT_TRY(checker->add("tokens", p->tokens, Use::kIn, b, p->tokens_stride, n));
  KDT_TRY(checker->add("node_counts", p->node_counts, Use::kIn, b));
  KDT_TRY(checker->add("prefix_lens", p->prefix_lens, Use::kIn, b));
  KDT_TRY(checker->add("num_live", p->num_live, Use::kOptionalIn, 1));
  return checker->add_output_tree(*tree);
}

}  // namespace
}  // namespace kdt

int32_t kdt_tree_from_visibility_workspace_size(const kdt_context* context,
                                                const kdt_tree_from_visibility_params* params, size_t* size) {
  constexpr const char* fn = "kdt_tree_from_visibility_workspace_size";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "size", size));
    *size = 0;
    kdt_tree_from_visibility_params p;
    kdt_tree tree;
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kIgnore, &p, &tree, nullptr));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    return KDT_OK;  // the CPU needs none
  });
}

int32_t kdt_tree_from_visibility(const kdt_context* context, const kdt_tree_from_visibility_params* params,
                                 void* workspace, size_t workspace_size, void* stream) {
  constexpr const char* fn = "kdt_tree_from_visibility";
  return kdt::guarded(fn, [&]() -> int32_t {
    kdt_tree_from_visibility_params p;
    kdt_tree tree;
    kdt::ArrayChecker checker(fn);
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kCheck, &p, &tree, &checker));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    KDT_TRY(kdt::check_call(fn, *context, stream, workspace, workspace_size, 0, &checker));
    kdt::cpu::tree_from_visibility(*context, p);
    return KDT_OK;
  });
}
