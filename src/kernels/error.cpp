#include "error.hpp"

#include <cstdarg>
#include <cstdio>

#include "kdtree/kdtr.h"

namespace kdt {
namespace {

// Fixed size: recording an error must work when memory is out. Longer texts are cut.
thread_local char last_error[1024] = "";

}  // namespace

int32_t fail(int32_t status, const char* function, const char* format, ...) noexcept {
  int used = std::snprintf(last_error, sizeof last_error, "%s: ", function);
  if (used < 0 || static_cast<size_t>(used) >= sizeof last_error) return status;
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_error + used, sizeof last_error - static_cast<size_t>(used), format, args);
  va_end(args);
  return status;
}

}  // namespace kdt

const char* kdt_last_error(void) { return kdt::last_error; }

const char* kdt_status_name(int32_t status) {
#define KDT_NAME(name) \
  case name:           \
    return #name
  switch (status) {
    KDT_NAME(KDT_OK);
    KDT_NAME(KDT_ERR_INVALID_ARGUMENT);
    KDT_NAME(KDT_ERR_NULL_POINTER);
    KDT_NAME(KDT_ERR_SHAPE);
    KDT_NAME(KDT_ERR_LIMIT);
    KDT_NAME(KDT_ERR_STRIDE);
    KDT_NAME(KDT_ERR_ALIGNMENT);
    KDT_NAME(KDT_ERR_OVERLAP);
    KDT_NAME(KDT_ERR_WORKSPACE);
    KDT_NAME(KDT_ERR_STRUCT);
    KDT_NAME(KDT_ERR_UNSUPPORTED);
    KDT_NAME(KDT_ERR_NO_BACKEND);
    KDT_NAME(KDT_ERR_NO_DEVICE);
    KDT_NAME(KDT_ERR_OUT_OF_MEMORY);
    KDT_NAME(KDT_ERR_CUDA);
    KDT_NAME(KDT_ERR_INTERNAL);
    KDT_NAME(KDTR_ERR_IO);
    KDT_NAME(KDTR_ERR_NOT_FOUND);
    KDT_NAME(KDTR_ERR_TOO_SHORT);
    KDT_NAME(KDTR_ERR_MAGIC);
    KDT_NAME(KDTR_ERR_VERSION);
    KDT_NAME(KDTR_ERR_RESERVED);
    KDT_NAME(KDTR_ERR_FILE_SIZE);
    KDT_NAME(KDTR_ERR_CAP);
    KDT_NAME(KDTR_ERR_INDEX_CHECKSUM);
    KDT_NAME(KDTR_ERR_INDEX);
    KDT_NAME(KDTR_ERR_NAME);
    KDT_NAME(KDTR_ERR_DTYPE);
    KDT_NAME(KDTR_ERR_SHAPE);
    KDT_NAME(KDTR_ERR_SIZE);
    KDT_NAME(KDTR_ERR_OFFSET);
    KDT_NAME(KDTR_ERR_PADDING);
    KDT_NAME(KDTR_ERR_DATA_CHECKSUM);
    KDT_NAME(KDTR_ERR_VALUE);
    default:
      return "unknown status";
  }
#undef KDT_NAME
}
