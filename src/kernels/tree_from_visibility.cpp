// Entry of tree_from_visibility: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_tree_from_visibility_params;
  Params p;
  kdt_tree tree;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(read_tree(fn, p.tree, &tree));
    p.tree = &tree;
    const int64_t b = tree.batch_size, n = tree.num_slots;
    KDT_TRY(settle_nested_strides(fn, "mask_row_stride", &p.mask_row_stride, n, "mask_stride", &p.mask_stride, n));
    KDT_TRY(settle_stride(fn, "tokens_stride", &p.tokens_stride, n));
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    KDT_TRY(checker->add("mask", p.mask, Use::kIn, b, p.mask_stride, (n - 1) * p.mask_row_stride + n));
    KDT_TRY(checker->add("tokens", p.tokens, Use::kIn, b, p.tokens_stride, n));
    KDT_TRY(checker->add("node_counts", p.node_counts, Use::kIn, b));
    KDT_TRY(checker->add("prefix_lens", p.prefix_lens, Use::kIn, b));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    return checker->add_output_tree(tree);
  }

  size_t workspace_size(const kdt_context&) const { return 0; }
  void run(const kdt_context& context, void*) const { cpu::tree_from_visibility(context, p); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_tree_from_visibility_workspace_size(const kdt_context* context,
                                                const kdt_tree_from_visibility_params* params, size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_tree_from_visibility_workspace_size", context, params, size);
}

int32_t kdt_tree_from_visibility(const kdt_context* context, const kdt_tree_from_visibility_params* params,
                                 void* workspace, size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_tree_from_visibility", context, params, workspace, workspace_size, stream);
}
