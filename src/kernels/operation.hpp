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
#pragma once

#include "args.hpp"

namespace kdt {

template <class Call>
int32_t query_workspace(const char* fn, const kdt_context* context, const typename Call::Params* params,
                        size_t* size) noexcept {
  return guarded(fn, [&]() -> int32_t {
    KDT_TRY(check_not_null(fn, "size", size));
    *size = 0;
    KDT_TRY(check_not_null(fn, "context", context));
    Call call;
    KDT_TRY(call.resolve(fn, *context, params, Arrays::kIgnore, nullptr));
    if (context->backend != KDT_BACKEND_CPU) return no_cuda_kernel(fn);
    *size = call.workspace_size(*context);
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
    if (context->backend != KDT_BACKEND_CPU) return no_cuda_kernel(fn);
    KDT_TRY(check_call(fn, *context, stream, workspace, workspace_size, call.workspace_size(*context), &checker));
    call.run(*context, workspace);
    return KDT_OK;
  });
}

}  // namespace kdt
