// Entry of argmax: argument checks and the choice of backend.
#include "args.hpp"
#include "cpu/ops.hpp"

namespace kdt {
namespace {

int32_t resolve(const char* fn, const kdt_context* context, const kdt_argmax_params* given, Arrays arrays,
                kdt_argmax_params* p, ArrayChecker* checker) {
  KDT_TRY(check_not_null(fn, "context", context));
  KDT_TRY(read_struct(fn, "params", given, p));
  KDT_TRY(check_reserved(fn, "reserved0", p->reserved0 == 0));
  KDT_TRY(check_reserved(fn, "allowed", p->allowed == nullptr));
  KDT_TRY(check_logits(fn, p->num_rows, p->vocab_size, p->logits_dtype, p->id_offset, &p->logits_stride));
  KDT_TRY(settle_rows_per_request(fn, p->num_rows, &p->rows_per_request));
  if (arrays == Arrays::kIgnore) return KDT_OK;

  using Use = ArrayChecker::Use;
  const int64_t r = p->num_rows, element = float_dtype_size(p->logits_dtype);
  KDT_TRY(checker->add_bytes("logits", p->logits, Use::kIn, r, p->logits_stride, p->vocab_size, element,
                             static_cast<size_t>(element)));
  KDT_TRY(checker->add("num_live", p->num_live, Use::kOptionalIn, 1));
  KDT_TRY(checker->add("tokens", p->tokens, Use::kOut, r));
  KDT_TRY(checker->add("values", p->values, Use::kOptionalOut, r));
  return checker->add("status", p->status, Use::kOptionalOut, r);
}

}  // namespace
}  // namespace kdt

int32_t kdt_argmax_workspace_size(const kdt_context* context, const kdt_argmax_params* params, size_t* size) {
  constexpr const char* fn = "kdt_argmax_workspace_size";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "size", size));
    *size = 0;
    kdt_argmax_params p;
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kIgnore, &p, nullptr));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    return KDT_OK;  // the CPU needs none
  });
}

int32_t kdt_argmax(const kdt_context* context, const kdt_argmax_params* params, void* workspace,
                   size_t workspace_size, void* stream) {
  constexpr const char* fn = "kdt_argmax";
  return kdt::guarded(fn, [&]() -> int32_t {
    kdt_argmax_params p;
    kdt::ArrayChecker checker(fn);
    KDT_TRY(kdt::resolve(fn, context, params, kdt::Arrays::kCheck, &p, &checker));
    if (context->backend != KDT_BACKEND_CPU) return kdt::no_cuda_kernel(fn);
    KDT_TRY(kdt::check_call(fn, *context, stream, workspace, workspace_size, 0, &checker));
    kdt::cpu::argmax(*context, p);
    return KDT_OK;
  });
}
