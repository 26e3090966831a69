#pragma once

#include <cstdint>

#include "kdtree/kdtree.h"

struct kdt_context {
  int32_t backend;
  int32_t device;
  int32_t num_threads;          // >= 1 on the CPU backend
  int32_t multiprocessors;      // CUDA only
  int32_t kernel_architecture;  // CUDA only: what the kernels were compiled for, 80 for the portable PTX
};
