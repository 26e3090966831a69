#pragma once

#include <cstdint>

#include "../error.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cuda {

#ifdef KDT_WITH_CUDA

int32_t device_count(const char* function, int32_t* count);
int32_t device_query(const char* function, int32_t device, kdt_device_info* info);

#else

inline int32_t device_count(const char* function, int32_t*) {
  return fail(KDT_ERR_NO_BACKEND, function, "this library was built without CUDA");
}
inline int32_t device_query(const char* function, int32_t, kdt_device_info*) {
  return fail(KDT_ERR_NO_BACKEND, function, "this library was built without CUDA");
}

#endif

}  // namespace kdt::cuda
