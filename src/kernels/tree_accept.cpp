// Entry of tree_accept: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_tree_accept_params;
  Params p;
  kdt_tree tree;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_reserved(fn, "target_log_probs", p.target_log_probs == nullptr));
    KDT_TRY(check_reserved(fn, "log_probs", p.log_probs == nullptr));
    KDT_TRY(read_tree(fn, p.tree, &tree));
    p.tree = &tree;
    KDT_TRY(check_dimension(fn, "num_stop_tokens", p.num_stop_tokens, 0, INT32_MAX));
    KDT_TRY(check_dimension(fn, "max_len", p.max_len, 1, INT32_MAX));
    const int64_t b = tree.batch_size, n = tree.num_slots, m = p.max_len;
    KDT_TRY(settle_stride(fn, "target_tokens_stride", &p.target_tokens_stride, n));
    KDT_TRY(settle_stride(fn, "tokens_stride", &p.tokens_stride, m));
    KDT_TRY(settle_stride(fn, "accept_index_stride", &p.accept_index_stride, m));
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    KDT_TRY(checker->add("tree.tokens", tree.tokens, Use::kIn, b, tree.slot_stride, n));
    KDT_TRY(checker->add("tree.first_child", tree.first_child, Use::kIn, b, tree.slot_stride, n));
    KDT_TRY(checker->add("tree.next_sibling", tree.next_sibling, Use::kIn, b, tree.slot_stride, n));
    KDT_TRY(checker->add("tree.node_count", tree.node_count, Use::kIn, b));
    KDT_TRY(checker->add("target_tokens", p.target_tokens, Use::kIn, b, p.target_tokens_stride, n));
    KDT_TRY(checker->add("max_tokens", p.max_tokens, Use::kOptionalIn, b));
    KDT_TRY(checker->add("stop_tokens", p.stop_tokens, Use::kIn, b == 0 ? 0 : p.num_stop_tokens));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    KDT_TRY(checker->add("tokens", p.tokens, Use::kOut, b, p.tokens_stride, m));
    KDT_TRY(checker->add("accept_index", p.accept_index, Use::kOut, b, p.accept_index_stride, m));
    KDT_TRY(checker->add("token_count", p.token_count, Use::kOut, b));
    KDT_TRY(checker->add("accept_len", p.accept_len, Use::kOut, b));
    KDT_TRY(checker->add("next_root", p.next_root, Use::kOut, b));
    KDT_TRY(checker->add("finished", p.finished, Use::kOut, b));
    return checker->add("status", p.status, Use::kOptionalOut, b);
  }

  size_t workspace_size(const kdt_context&) const { return 0; }
  void run(const kdt_context& context, void*) const { cpu::tree_accept(context, p); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_tree_accept_workspace_size(const kdt_context* context, const kdt_tree_accept_params* params,
                                       size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_tree_accept_workspace_size", context, params, size);
}

int32_t kdt_tree_accept(const kdt_context* context, const kdt_tree_accept_params* params, void* workspace,
                        size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_tree_accept", context, params, workspace, workspace_size, stream);
}
