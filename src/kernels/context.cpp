// Contexts, devices, versions: everything of the C ABI that is no operation on data.
#include "context.hpp"

#include <cstdlib>
#include <string_view>
#include <utility>

#include "args.hpp"
#include "cpu/device.hpp"
#include "cuda/device.hpp"
#include "error.hpp"

#define KDT_STRINGIFY_(x) #x
#define KDT_STRINGIFY(x) KDT_STRINGIFY_(x)

int32_t kdt_abi_version(void) { return KDT_ABI_MAJOR * 1000 + KDT_ABI_MINOR; }

const char* kdt_version(void) { return KDT_VERSION; }

const char* kdt_build_info(void) {
  // KDT_COMPILER, KDT_BUILD_TYPE and KDT_CUDA_ARCHITECTURES come from CMakeLists.txt.
  return "{\"version\": \"" KDT_VERSION "\", \"abi\": \"" KDT_STRINGIFY(KDT_ABI_MAJOR) "." KDT_STRINGIFY(
      KDT_ABI_MINOR) "\", \"compiler\": \"" KDT_COMPILER "\", \"build_type\": \"" KDT_BUILD_TYPE
#ifdef KDT_WITH_CUDA
                     "\", \"cuda\": true, \"cuda_architectures\": \"" KDT_CUDA_ARCHITECTURES "\"}";
#else
                     "\", \"cuda\": false, \"cuda_architectures\": \"\"}";
#endif
}

namespace kdt {
namespace {

constexpr int32_t kMaxThreads = 1024;

int32_t check_backend(const char* function, int32_t backend) {
  if (backend == KDT_BACKEND_CPU || backend == KDT_BACKEND_CUDA) return KDT_OK;
  return fail(KDT_ERR_INVALID_ARGUMENT, function,
              "argument 'backend': expected KDT_BACKEND_CPU (0) or KDT_BACKEND_CUDA (1), got %d", backend);
}

int32_t device_count(const char* function, int32_t backend, int32_t* count) {
  KDT_TRY(check_backend(function, backend));
  if (backend == KDT_BACKEND_CUDA) return cuda::device_count(function, count);
  *count = 1;
  return KDT_OK;
}

int32_t check_device(const char* function, int32_t backend, int32_t device) {
  int32_t count = 0;
  KDT_TRY(device_count(function, backend, &count));
  return check_range(function, "device", device, 0, count - 1, KDT_ERR_INVALID_ARGUMENT);
}

int32_t read_attention_kernel(const char* function, AttentionKernel* kernel) {
  constexpr std::pair<std::string_view, AttentionKernel> kNames[] = {{"auto", AttentionKernel::kAuto},
                                                                     {"plain", AttentionKernel::kPlain},
                                                                     {"mma", AttentionKernel::kMma},
                                                                     {"wgmma", AttentionKernel::kWgmma}};
  *kernel = AttentionKernel::kAuto;
  const char* given = std::getenv("KDTREE_VERIFY_ATTN");
  if (given == nullptr || *given == '\0') return KDT_OK;
  for (const auto& [name, value] : kNames) {
    if (name != given) continue;
    *kernel = value;
    return KDT_OK;
  }
  return fail(KDT_ERR_INVALID_ARGUMENT, function,
              "environment variable KDTREE_VERIFY_ATTN: expected auto, plain, mma or wgmma, got \"%s\"", given);
}

}  // namespace
}  // namespace kdt

int32_t kdt_context_create(const kdt_context_params* params, kdt_context** context) {
  constexpr const char* fn = "kdt_context_create";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "context", context));
    *context = nullptr;
    kdt_context_params p = {};
    p.struct_size = sizeof p;
    if (params != nullptr) KDT_TRY(kdt::read_struct(fn, "params", params, &p));
    KDT_TRY(kdt::check_reserved(fn, "reserved0", p.reserved0 == 0));
    KDT_TRY(kdt::check_device(fn, p.backend, p.device));
    KDT_TRY(kdt::check_range(fn, "num_threads", p.num_threads, 0, kdt::kMaxThreads, KDT_ERR_INVALID_ARGUMENT));
    if (p.num_threads == 0) p.num_threads = kdt::cpu::usable_threads();
    kdt_context settled = {};
    settled.backend = p.backend;
    settled.device = p.device;
    settled.num_threads = p.num_threads;
    KDT_TRY(kdt::read_attention_kernel(fn, &settled.attention));
    KDT_TRY(kdt::cpu::read_isa(fn, &settled.isa));
    if (p.backend == KDT_BACKEND_CUDA) KDT_TRY(kdt::cuda::describe_device(fn, &settled));
    *context = new kdt_context(settled);
    return KDT_OK;
  });
}

void kdt_context_destroy(kdt_context* context) { delete context; }

int32_t kdt_context_get(const kdt_context* context, kdt_context_params* params) {
  constexpr const char* fn = "kdt_context_get";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "context", context));
    kdt_context_params p = {};
    KDT_TRY(kdt::read_struct(fn, "params", params, &p));
    params->backend = context->backend;
    params->device = context->device;
    params->num_threads = context->num_threads;
    params->reserved0 = 0;
    return KDT_OK;
  });
}

int32_t kdt_device_count(int32_t backend, int32_t* count) {
  constexpr const char* fn = "kdt_device_count";
  return kdt::guarded(fn, [&]() -> int32_t {
    KDT_TRY(kdt::check_not_null(fn, "count", count));
    *count = 0;
    return kdt::device_count(fn, backend, count);
  });
}

int32_t kdt_device_query(int32_t backend, int32_t device, kdt_device_info* info) {
  constexpr const char* fn = "kdt_device_query";
  return kdt::guarded(fn, [&]() -> int32_t {
    kdt_device_info found = {};
    KDT_TRY(kdt::read_struct(fn, "info", info, &found));
    KDT_TRY(kdt::check_device(fn, backend, device));
    found = {};
    found.struct_size = info->struct_size;
    if (backend == KDT_BACKEND_CUDA) {
      KDT_TRY(kdt::cuda::device_query(fn, device, &found));
    } else {
      KDT_TRY(kdt::cpu::device_query(fn, &found));
    }
    *info = found;
    return KDT_OK;
  });
}
