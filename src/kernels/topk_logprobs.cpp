// Entry of topk_logprobs: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_topk_logprobs_params;
  Params p;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_reserved(fn, "reserved0", p.reserved0 == 0));
    KDT_TRY(check_reserved(fn, "allowed", p.allowed == nullptr));
    KDT_TRY(check_logits(fn, p.num_rows, p.vocab_size, p.logits_dtype, p.id_offset, &p.logits_stride));
    KDT_TRY(check_dimension(fn, "num_candidates", p.num_candidates, 0, KDT_MAX_CANDIDATES));
    KDT_TRY(check_range(fn, "raw", p.raw, 0, 1, KDT_ERR_INVALID_ARGUMENT));
    KDT_TRY(settle_rows_per_request(fn, p.num_rows, &p.rows_per_request));
    KDT_TRY(settle_stride(fn, "log_probs_stride", &p.log_probs_stride, p.num_candidates));
    KDT_TRY(settle_stride(fn, "token_ids_stride", &p.token_ids_stride, p.num_candidates));
    if (p.num_candidates == 0) {  // nothing there to step over
      p.log_probs_stride = p.token_ids_stride = 0;
    }
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const int64_t r = p.num_rows, k = p.num_candidates;
    KDT_TRY(checker->add_floats("logits", p.logits, p.logits_dtype, Use::kIn, r, p.logits_stride, p.vocab_size));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    KDT_TRY(checker->add("log_probs", p.log_probs, Use::kOut, r, p.log_probs_stride, k));
    KDT_TRY(checker->add("token_ids", p.token_ids, Use::kOut, r, p.token_ids_stride, k));
    KDT_TRY(checker->add("lse", p.lse, p.raw != 0 ? Use::kOut : Use::kOptionalOut, r));
    return checker->add("status", p.status, Use::kOptionalOut, r);
  }

  size_t workspace_size(const kdt_context&) const { return 0; }
  void run(const kdt_context& context, void*) const { cpu::topk_logprobs(context, p); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_topk_logprobs_workspace_size(const kdt_context* context, const kdt_topk_logprobs_params* params,
                                         size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_topk_logprobs_workspace_size", context, params, size);
}

int32_t kdt_topk_logprobs(const kdt_context* context, const kdt_topk_logprobs_params* params, void* workspace,
                          size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_topk_logprobs", context, params, workspace, workspace_size, stream);
}
