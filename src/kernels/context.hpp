#pragma once

#include <cstdint>

#include "kdtree/kdtree.h"

struct kdt_context {
  int32_t backend;
  int32_t device;
  int32_t num_threads;         // >= 1 on the CPU backend
  int32_t multiprocessors;     // CUDA only
  int32_t compute_capability;  // CUDA only: major * 10 + minor
};
