// Entry of argmax: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

struct Call {
  using Params = kdt_argmax_params;
  Params p;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_reserved(fn, "reserved0", p.reserved0 == 0));
    KDT_TRY(check_reserved(fn, "allowed", p.allowed == nullptr));
    KDT_TRY(check_logits(fn, p.num_rows, p.vocab_size, p.logits_dtype, p.id_offset, &p.logits_stride));
    KDT_TRY(settle_rows_per_request(fn, p.num_rows, &p.rows_per_request));
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const int64_t r = p.num_rows;
    KDT_TRY(checker->add_floats("logits", p.logits, p.logits_dtype, Use::kIn, r, p.logits_stride, p.vocab_size));
    KDT_TRY(checker->add("num_live", p.num_live, Use::kOptionalIn, 1));
    KDT_TRY(checker->add("tokens", p.tokens, Use::kOut, r));
    KDT_TRY(checker->add("values", p.values, Use::kOptionalOut, r));
    return checker->add("status", p.status, Use::kOptionalOut, r);
  }

  size_t workspace_size(const kdt_context&) const { return 0; }
  void run(const kdt_context& context, void*) const { cpu::argmax(context, p); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_argmax_workspace_size(const kdt_context* context, const kdt_argmax_params* params, size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_argmax_workspace_size", context, params, size);
}

int32_t kdt_argmax(const kdt_context* context, const kdt_argmax_params* params, void* workspace,
                   size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_argmax", context, params, workspace, workspace_size, stream);
}
