// Entry of tree_build: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_tree_build_params;
  Params p;
  kdt_tree tree;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_reserved(fn, "spine_len", p.spine_len == 0));
    KDT_TRY(check_reserved(fn, "reserved0", p.reserved0 == 0));
    KDT_TRY(check_reserved(fn, "min_scores", p.min_scores == nullptr));
    KDT_TRY(check_reserved(fn, "depth_costs", p.depth_costs == nullptr));
    KDT_TRY(check_dimension(fn, "depth", p.depth, 0, KDT_MAX_DEPTH));
    KDT_TRY(check_dimension(fn, "num_candidates", p.num_candidates, 0, KDT_MAX_CANDIDATES));
    KDT_TRY(check_dimension(fn, "budget", p.budget, 0, KDT_MAX_BUDGET));
    KDT_TRY(check_range(fn, "vocab_size", p.vocab_size, 0, INT32_MAX, KDT_ERR_INVALID_ARGUMENT));
    KDT_TRY(read_tree(fn, p.tree, &tree));
    p.tree = &tree;
    if (tree.num_slots != p.budget + 1) {
      return fail(KDT_ERR_SHAPE, fn, "argument 'tree.num_slots': expected budget + 1 = %d, got %d", p.budget + 1,
                  tree.num_slots);
    }
    const int64_t rows = p.depth, k = p.num_candidates;
    const bool empty = rows == 0 || k == 0;
    KDT_TRY(settle_free_strides(fn, "log_probs_row_stride", &p.log_probs_row_stride, empty ? 0 : k,
                                "log_probs_stride", &p.log_probs_stride, rows));
    KDT_TRY(settle_free_strides(fn, "token_ids_row_stride", &p.token_ids_row_stride, empty ? 0 : k,
                                "token_ids_stride", &p.token_ids_stride, rows));
    if (empty) p.log_probs_stride = p.token_ids_stride = 0;  // nothing there to step over
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const int64_t b = tree.batch_size;
    int64_t log_probs_extent, token_ids_extent;
    KDT_TRY(
        nested_extent(fn, "log_probs", b, p.log_probs_stride, rows, p.log_probs_row_stride, k, &log_probs_extent));
    KDT_TRY(
        nested_extent(fn, "token_ids", b, p.token_ids_stride, rows, p.token_ids_row_stride, k, &token_ids_extent));
    KDT_TRY(checker->add("log_probs", p.log_probs, Use::kIn, 1, 1, log_probs_extent));
    KDT_TRY(checker->add("token_ids", p.token_ids, Use::kIn, 1, 1, token_ids_extent));
    KDT_TRY(checker->add("root_tokens", p.root_tokens, Use::kIn, b));
    KDT_TRY(checker->add("prefix_lens", p.prefix_lens, Use::kIn, b));
    KDT_TRY(checker->add("budgets", p.budgets, Use::kOptionalIn, b));
    KDT_TRY(checker->add("max_depths", p.max_depths, Use::kOptionalIn, b));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    return checker->add_output_tree(tree);
  }

  size_t workspace_size(const kdt_context& context) const { return cpu::tree_build_workspace_size(context, p); }
  void run(const kdt_context& context, void* workspace) const { cpu::tree_build(context, p, workspace); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_tree_build_workspace_size(const kdt_context* context, const kdt_tree_build_params* params,
                                      size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_tree_build_workspace_size", context, params, size);
}

int32_t kdt_tree_build(const kdt_context* context, const kdt_tree_build_params* params, void* workspace,
                       size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_tree_build", context, params, workspace, workspace_size, stream);
}
