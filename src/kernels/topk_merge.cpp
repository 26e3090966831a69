// Entry of topk_merge: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_topk_merge_params;
  Params p;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_dimension(fn, "num_shards", p.num_shards, 1, KDT_MAX_SHARDS));
    KDT_TRY(check_dimension(fn, "num_rows", p.num_rows, 0, INT32_MAX));
    KDT_TRY(check_dimension(fn, "num_candidates", p.num_candidates, 0, KDT_MAX_CANDIDATES));
    KDT_TRY(settle_rows_per_request(fn, p.num_rows, &p.rows_per_request));
    const int64_t s = p.num_shards, r = p.num_rows, k = p.num_candidates;
    KDT_TRY(settle_nested_strides(fn, "logits_row_stride", &p.logits_row_stride, k, "logits_stride",
                                  &p.logits_stride, r));
    KDT_TRY(settle_nested_strides(fn, "shard_token_ids_row_stride", &p.shard_token_ids_row_stride, k,
                                  "shard_token_ids_stride", &p.shard_token_ids_stride, r));
    KDT_TRY(settle_stride(fn, "shard_lse_stride", &p.shard_lse_stride, r));
    KDT_TRY(settle_stride(fn, "log_probs_stride", &p.log_probs_stride, k));
    KDT_TRY(settle_stride(fn, "token_ids_stride", &p.token_ids_stride, k));
    if (p.num_candidates == 0) {  // nothing there to step over
      p.log_probs_stride = p.token_ids_stride = 0;
      p.logits_stride = p.logits_row_stride = p.shard_token_ids_stride = p.shard_token_ids_row_stride = 0;
    }
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const auto extent = [&](int64_t row_stride) { return r == 0 || k == 0 ? 0 : (r - 1) * row_stride + k; };
    KDT_TRY(checker->add("logits", p.logits, Use::kIn, s, p.logits_stride, extent(p.logits_row_stride)));
    KDT_TRY(checker->add("shard_token_ids", p.shard_token_ids, Use::kIn, s, p.shard_token_ids_stride,
                         extent(p.shard_token_ids_row_stride)));
    KDT_TRY(checker->add("shard_lse", p.shard_lse, Use::kIn, s, p.shard_lse_stride, r));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    KDT_TRY(checker->add("log_probs", p.log_probs, Use::kOut, r, p.log_probs_stride, k));
    KDT_TRY(checker->add("token_ids", p.token_ids, Use::kOut, r, p.token_ids_stride, k));
    KDT_TRY(checker->add("lse", p.lse, Use::kOptionalOut, r));
    return checker->add("status", p.status, Use::kOptionalOut, r);
  }

  size_t workspace_size(const kdt_context& context) const { return cpu::topk_merge_workspace_size(context, p); }
  void run(const kdt_context& context, void* workspace) const { cpu::topk_merge(context, p, workspace); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_topk_merge_workspace_size(const kdt_context* context, const kdt_topk_merge_params* params,
                                      size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_topk_merge_workspace_size", context, params, size);
}

int32_t kdt_topk_merge(const kdt_context* context, const kdt_topk_merge_params* params, void* workspace,
                       size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_topk_merge", context, params, workspace, workspace_size, stream);
}
