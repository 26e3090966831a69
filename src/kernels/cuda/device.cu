// Which GPUs are there, does our device code load on them, and what a call needs to know before it launches.
//
// device_query runs one kernel that reports the architecture it was compiled for. On a chip with native code
// in the library that is the chip's own (90 for sm_90a, 120 for sm_120a); elsewhere it is 80, the portable PTX
// compiled by the driver. A library that lacks code for the chip fails here, with CUDA's own words, and not
// in the middle of a decode step.
#include <cuda_runtime.h>

#include <cstdio>

#include "device.hpp"
#include "launch.hpp"

namespace kdt::cuda {
namespace {

__global__ void report_architecture(int32_t* architecture) {
#ifdef __CUDA_ARCH__
  *architecture = __CUDA_ARCH__ / 10;
#endif
}

// Makes `device` current and puts the caller's device back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess) error_ = cudaSetDevice(device);
  }
  ~DeviceGuard() {
    if (previous_ >= 0) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = -1;
  cudaError_t error_;
};

struct DeviceMemory {
  void* pointer = nullptr;
  ~DeviceMemory() {
    if (pointer != nullptr) (void)cudaFree(pointer);
  }
};

// Device memory (managed memory, too) of `device`.
int32_t check_memory(const char* function, const char* name, const void* array, int device) {
  cudaPointerAttributes attributes = {};
  KDT_CUDA_TRY(function, cudaPointerGetAttributes(&attributes, array));
  if (attributes.type == cudaMemoryTypeManaged) return KDT_OK;
  if (attributes.type != cudaMemoryTypeDevice) {
    return fail(KDT_ERR_INVALID_ARGUMENT, function,
                "argument '%s': expected memory of device %d, got host memory %p", name, device, array);
  }
  if (attributes.device != device) {
    return fail(KDT_ERR_INVALID_ARGUMENT, function,
                "argument '%s': expected memory of device %d, got %p of device %d", name, device, array,
                attributes.device);
  }
  return KDT_OK;
}

}  // namespace

int32_t cuda_failed(const char* function, const char* what, cudaError_t error) {
  (void)cudaGetLastError();  // clear it: it is reported here
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
      error == cudaErrorSystemDriverMismatch) {
    return fail(KDT_ERR_NO_DEVICE, function, "no device: %s", cudaGetErrorString(error));
  }
  return fail(error == cudaErrorMemoryAllocation ? KDT_ERR_OUT_OF_MEMORY : KDT_ERR_CUDA, function, "%s failed: %s",
              what, cudaGetErrorString(error));
}

int32_t allow_shared_memory(const Session& session, const void* kernel, size_t bytes) {
  KDT_CUDA_TRY(session.function(),
               cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  return KDT_OK;
}

int32_t device_count(const char* function, int32_t* count) {
  int found = 0;
  KDT_CUDA_TRY(function, cudaGetDeviceCount(&found));
  if (found == 0) return fail(KDT_ERR_NO_DEVICE, function, "no device: the driver lists none");
  *count = found;
  return KDT_OK;
}

int32_t device_query(const char* function, int32_t device, kdt_device_info* info) {
  cudaDeviceProp properties;
  KDT_CUDA_TRY(function, cudaGetDeviceProperties(&properties, device));
  DeviceGuard guard(device);
  KDT_CUDA_TRY(function, guard.error());

  int32_t architecture = 0;
  DeviceMemory memory;
  KDT_CUDA_TRY(function, cudaMalloc(&memory.pointer, sizeof architecture));
  report_architecture<<<1, 1>>>(static_cast<int32_t*>(memory.pointer));
  KDT_CUDA_TRY(function, cudaGetLastError());
  KDT_CUDA_TRY(function, cudaMemcpy(&architecture, memory.pointer, sizeof architecture, cudaMemcpyDeviceToHost));

  std::snprintf(info->name, sizeof info->name, "%s", properties.name);
  info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info->compute_capability = properties.major * 10 + properties.minor;
  info->kernel_architecture = architecture;
  info->multiprocessors = properties.multiProcessorCount;
  info->max_shared_memory_bytes = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  return KDT_OK;
}

int32_t describe_device(const char* function, kdt_context* context) {
  DeviceGuard guard(context->device);
  KDT_CUDA_TRY(function, guard.error());
  cudaFuncAttributes attributes = {};  // fails where the library has no code for the chip
  KDT_CUDA_TRY(function, cudaFuncGetAttributes(&attributes, report_architecture));
  KDT_CUDA_TRY(function,
               cudaDeviceGetAttribute(&context->multiprocessors, cudaDevAttrMultiProcessorCount, context->device));
  context->kernel_architecture = attributes.ptxVersion;  // binaryVersion is the chip's, also for PTX compiled there
  return KDT_OK;
}

int32_t Session::open(const char* function, const kdt_context& context, void* stream, const ArrayChecker& arrays) {
  function_ = function;
  context_ = &context;
  stream_ = stream;
  int current = -1;
  KDT_CUDA_TRY(function, cudaGetDevice(&current));
  if (current != context.device) {
    restore_ = current;
    KDT_CUDA_TRY(function, cudaSetDevice(context.device));
  }
  if (stream != nullptr) {
    // A capturing stream may not be asked for its device; on a wrong one the launch fails.
    const cudaStream_t given = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    KDT_CUDA_TRY(function, cudaStreamIsCapturing(given, &capture));
    int device = context.device;
    if (capture == cudaStreamCaptureStatusNone) KDT_CUDA_TRY(function, cudaStreamGetDevice(given, &device));
    if (device != context.device) {
      return fail(KDT_ERR_INVALID_ARGUMENT, function,
                  "argument 'stream': expected a stream of device %d, got one of device %d", context.device,
                  device);
    }
  }
  return arrays.for_each_array(
      [&](const char* name, const void* array) { return check_memory(function, name, array, context.device); });
}

Session::~Session() {
  if (restore_ >= 0) (void)cudaSetDevice(restore_);
}

}  // namespace kdt::cuda
