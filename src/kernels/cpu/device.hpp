#pragma once

#include <cstdint>

#include "kdtree/kdtree.h"

namespace kdt::cpu {

// Hardware threads this process may run on (its affinity mask), at least 1.
int32_t usable_threads();

int32_t device_query(const char* function, kdt_device_info* info);

}  // namespace kdt::cpu
