// The CUDA backend's own side of contexts and calls: devices, streams, whose memory a pointer is.
#pragma once

#include <cstdint>

#include "../args.hpp"
#include "../context.hpp"
#include "../error.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cuda {

#ifdef KDT_WITH_CUDA

int32_t device_count(const char* function, int32_t* count);
int32_t device_query(const char* function, int32_t device, kdt_device_info* info);

// Fills in what kernels are sized by. context->device must exist.
int32_t describe_device(const char* function, kdt_context* context);

// One call on the CUDA backend: makes the context's device current, and the caller's again when it goes.
class Session {
 public:
  Session() = default;
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Also checks that the stream and every array belong to the context's device. Nothing here synchronises or may
  // not be called while a stream is captured.
  int32_t open(const char* function, const kdt_context& context, void* stream, const ArrayChecker& arrays);

  const char* function() const { return function_; }
  const kdt_context& context() const { return *context_; }
  void* stream() const { return stream_; }

 private:
  const char* function_ = nullptr;
  const kdt_context* context_ = nullptr;
  void* stream_ = nullptr;
  int restore_ = -1;  // the caller's device, when it was another
};

#else

inline int32_t built_without(const char* function) {
  return fail(KDT_ERR_NO_BACKEND, function, "this library was built without CUDA");
}
inline int32_t device_count(const char* function, int32_t*) { return built_without(function); }
inline int32_t device_query(const char* function, int32_t, kdt_device_info*) { return built_without(function); }
inline int32_t describe_device(const char* function, kdt_context*) { return built_without(function); }

class Session {
 public:
  int32_t open(const char* function, const kdt_context&, void*, const ArrayChecker&) {
    return built_without(function);
  }
};

#endif

}  // namespace kdt::cuda
