// Entry of tree_build: argument checks and the choice of backend.
#include "args.hpp"
#include "cpu/ops.hpp"

namespace kdt {
namespace {

int32_t resolve(const char* fn, const kdt_context* context, const kdt_tree_build_params* given, Arrays arrays,
                kdt_tree_build_params* p, kdt_tree* tree, ArrayChecker* checker) {
  KDT_TRY(check_not_null(fn, "context", context));
  KDT_TRY(read_struct(fn, "params", given, p));
  KDT_TRY(check_reserved(fn, "spine_len", p->spine_len == 0));
  KDT_TRY(check_reserved(fn, "reserved0", p->reserved0 == 0));
  KDT_TRY(check_reserved(fn, "min_scores", p->min_scores == nullptr));
  KDT_TRY(check_reserved(fn, "depth_costs", p->depth_costs == nullptr));
  KDT_TRY(check_dimension(fn, "depth", p->depth, 0, KDT_MAX_DEPTH));
  KDT_TRY(check_dimension(fn, "num_candidates", p->num_candidates, 0, KDT_MAX_CANDIDATES));
  KDT_TRY(check_dimension(fn, "budget", p->budget, 0, KDT_MAX_BUDGET));
  KDT_TRY(check_range(fn, "vocab_size", p->vocab_size, 0, INT32_MAX, KDT_ERR_INVALID_ARGUMENT));
  KDT_TRY(read_tree(fn, p->tree, tree));
  p->tree = tree;
  if (tree->num_slots != p->budget + 1) {
    return fail(KDT_ERR_SHAPE, fn, "argument 'tree.num_slots': expected budget + 1 = %d, got %d", p->budget + 1,
                tree->num_slots);
  }
  const int64_t rows = p->depth, k = p->num_candidates;
  const auto settle = [&](const char* row_name, const char* name, int64_t* row_stride, int64_t* stride) -> int32_t {
    KDT_TRY(settle_stride(fn, row_name, row_stride, k));
    int64_t minimum;
    if (__builtin_mul_overflow(rows, *row_stride, &minimum)) {
      return fail(KDT_ERR_STRIDE, fn, "argument '%s': the rows do not fit in the address space", row_name);
    }
    return settle_stride(fn, name, stride, minimum);
  };
  KDT_TRY(settle("log_probs_row_stride", "log_probs_stride", &p->log_probs_row_stride, &p->log_probs_stride));
  KDT_TRY(settle("token_ids_row_stride", "token_ids_stride", &p->token_ids_row_stride, &p->token_ids_stride));
  if (arrays == Arrays::kIgnore) return KDT_OK;

  using Use = ArrayChecker::Use;
  const int64_t b = tree->batch_size;
  const auto extent = [&](int64_t row_stride) { return rows == 0 || k == 0 ? 0 : (rows - 1) * row_stride + k; };
  KDT_TRY(
      checker->add("log_probs", p->log_probs, Use::kIn, b, p->log_probs_stride, extent(p->log_probs_row_stride)));
  KDT_TRY(
      checker->add("token_ids", p->token_ids, Use::kIn, b, p->token_ids_stride, extent(p->token_ids_row_stride)));
  KDT_TRY(checker->add("root_tokens", p->root_tokens, Use::kIn, b));
  KDT_TRY(checker->add("prefix_lens", p->prefix_lens, Use::kIn, b));
  KDT_TRY(checker->add("budgets", p->budgets, Use::kOptionalIn, b));
  KDT_TRY(checker->add("max_depths", p->max_depths, Use::kOptionalIn, b));
  KDT_TRY(checker->add("num_live", p->num_live, Use::kOptionalIn, 1));
  return checker->add_output_tree(*tree);
}

}  // namespace
}  // namespace kdt

int32_t kdt_tree_build_workspace_size(const kdt_context* context, const kdt_tree_build_params* params,
                                      size_t* size) {
  constexpr const char* fn = "kdt_tree_build_workspace_size";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "size", size));
    *size = 0;
    kdt_tree_build_params p;
    kdt_tree tree;
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kIgnore, &p, &tree, nullptr));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    *size = kdt::cpu::tree_build_workspace_size(*context, p);
    return KDT_OK;
  });
}

int32_t kdt_tree_build(const kdt_context* context, const kdt_tree_build_params* params, void* workspace,
                       size_t workspace_size, void* stream) {
  constexpr const char* fn = "kdt_tree_build";
  return kdt::guarded(fn, [&]() -> int32_t {
    kdt_tree_build_params p;
    kdt_tree tree;
    kdt::ArrayChecker checker(fn);
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kCheck, &p, &tree, &checker));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    const size_t needed = kdt::cpu::tree_build_workspace_size(*context, p);
    KDT_TRY(kdt::check_call(fn, *context, stream, workspace, workspace_size, needed, &checker));
    kdt::cpu::tree_build(*context, p, workspace);
    return KDT_OK;
  });
}
