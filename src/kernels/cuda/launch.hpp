// Launching kernels: the one way the .cu files do it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../args.hpp"
#include "device.hpp"
#include "ops.hpp"

namespace kdt::cuda {

// Shared memory a block may have on every chip we ship code for (sm_86, sm_89 and sm_120 have the least). Static
// shared memory is at most 48 KB by the language, and kernels with dynamic shared memory keep their static part
// below kStaticShared (tools/kernel-resources checks the compiled code), so that each launch's sum is known here.
inline constexpr size_t kSharedLimit = 101376;
inline constexpr size_t kStaticShared = 1024;

inline constexpr int64_t kMaxGridX = 2147483647;

// The status of a CUDA error, with CUDA's text recorded. `what` failed.
int32_t cuda_failed(const char* function, const char* what, cudaError_t error);

#define KDT_CUDA_TRY(function, call)                                                                     \
  do {                                                                                                   \
    if (cudaError_t error_ = (call); error_ != cudaSuccess) return cuda_failed(function, #call, error_); \
  } while (0)

// Raises the limit of `kernel` to `bytes` of dynamic shared memory on the current device.
int32_t allow_shared_memory(const Session& session, const void* kernel, size_t bytes);

// How a kernel starts relative to the one before it on its stream.
enum class After {
  kFinished,   // when that has finished
  kTriggered,  // when that, be it ours or the caller's, has passed (or ended without) trigger_dependents(): the
               // kernel calls wait_for_primary() before it reads what that wrote or writes what that may read.
               // Where kernels were not compiled for Hopper or newer this is kFinished: their wait_for_primary() is
               // empty, on whatever chip they run.
};

// Launches a kernel of ours; an error is that of this launch. `what` names it in the error text.
template <size_t kDynamicShared, size_t kLimit = kSharedLimit, class... Parameters, class... Arguments>
int32_t launch_kernel(const Session& session, const char* what, void (*kernel)(Parameters...), int64_t grid,
                      int32_t block, After after, Arguments&&... arguments) {
  static_assert(kDynamicShared == 0 || kDynamicShared + (kLimit == kSharedLimit ? kStaticShared : 0) <= kLimit,
                "more shared memory than a block has on sm_86, sm_89 and sm_120");
  if (grid == 0) return KDT_OK;
  if constexpr (kDynamicShared > 48 * 1024) {
    KDT_TRY(allow_shared_memory(session, reinterpret_cast<const void*>(kernel), kDynamicShared));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(grid, kMaxGridX)));  // kernels stride over what is more
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = kDynamicShared;
  config.stream = static_cast<cudaStream_t>(session.stream());
  cudaLaunchAttribute attribute = {};
  if (after == After::kTriggered && session.context().kernel_architecture >= 90) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, static_cast<std::decay_t<Parameters>>(arguments)...);
  return error == cudaSuccess ? KDT_OK : cuda_failed(session.function(), what, error);
}

// Our scratch begins at the first multiple of this in a caller's workspace, which may have any alignment.
inline constexpr size_t kWorkspaceAlign = 256;

constexpr size_t round_up(size_t bytes) {
  return (bytes + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
}
constexpr size_t workspace_for(size_t bytes) { return bytes == 0 ? 0 : kWorkspaceAlign - 1 + bytes; }
inline std::byte* workspace_begin(void* workspace) {
  return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(workspace)));
}

}  // namespace kdt::cuda
