// The two exported functions of every operation, from one description of a call:
//
//   struct Call {
//     using Params = kdt_X_params;
//     Params p;                         // the caller's parameters, checked; structs they point to are copied, too
//     int32_t resolve(const char* fn, const kdt_context& context, const Params* given, Arrays arrays,
//                     ArrayChecker* checker);
//     size_t workspace_size(const kdt_context& context) const;
//     void run(const kdt_context& context, void* workspace) const;
//   };
//
// workspace_size and run are the CPU's. The CUDA backend takes the checked parameters themselves (cuda/ops.hpp).
#pragma once

#include "args.hpp"
#include "cuda/ops.hpp"

namespace kdt {

template <class Call>
size_t needed_workspace(const kdt_context& context, const Call& call) {
  return context.backend == KDT_BACKEND_CUDA ? cuda::workspace_size(context, call.p) : call.workspace_size(context);
}

template <class Call>
int32_t query_workspace(const char* fn, const kdt_context* context, const typename Call::Params* params,
                        size_t* size) noexcept {
  return guarded(fn, [&]() -> int32_t {
    KDT_TRY(check_not_null(fn, "size", size));
    *size = 0;
    KDT_TRY(check_not_null(fn, "context", context));
    Call call;
    KDT_TRY(call.resolve(fn, *context, params, Arrays::kIgnore, nullptr));
    *size = needed_workspace(*context, call);
    return KDT_OK;
  });
}

template <class Call>
int32_t launch(const char* fn, const kdt_context* context, const typename Call::Params* params, void* workspace,
               size_t workspace_size, void* stream) noexcept {
  return guarded(fn, [&]() -> int32_t {
    KDT_TRY(check_not_null(fn, "context", context));
    Call call;
    ArrayChecker checker(fn);
    KDT_TRY(call.resolve(fn, *context, params, Arrays::kCheck, &checker));
    const size_t needed = needed_workspace(*context, call);
    KDT_TRY(check_call(fn, *context, stream, workspace, workspace_size, needed, &checker));
    if (context->backend == KDT_BACKEND_CUDA) {
      cuda::Session session;
      KDT_TRY(session.open(fn, *context, stream, checker));
      return cuda::enqueue(session, call.p, workspace);
    }
    call.run(*context, workspace);
    return KDT_OK;
  });
}

}  // namespace kdt
