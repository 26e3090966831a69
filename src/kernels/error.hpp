// The library's one way to fail: record a text for this thread, return a status.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "kdtree/kdtree.h"

namespace kdt {

// Stores "<function>: <formatted text>" as this thread's last error and returns `status`.
// The text names the argument, what was expected and what came.
[[gnu::format(printf, 3, 4)]] int32_t fail(int32_t status, const char* function, const char* format, ...) noexcept;

// Runs the body of an exported function so that no exception crosses the C ABI.
template <class Body>
int32_t guarded(const char* function, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(KDT_ERR_OUT_OF_MEMORY, function, "out of memory");
  } catch (const std::exception& e) {
    return fail(KDT_ERR_INTERNAL, function, "unexpected exception: %s", e.what());
  } catch (...) {
    return fail(KDT_ERR_INTERNAL, function, "unexpected exception");
  }
}

}  // namespace kdt
