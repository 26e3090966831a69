#pragma once

#include <cstdint>

#include "cpu/isa.hpp"
#include "kdtree/kdtree.h"

namespace kdt {
// Which kernel verify_attn takes on CUDA: the environment variable KDTREE_VERIFY_ATTN when a context is made.
enum class AttentionKernel {
  kAuto,   // "auto" or unset: the fastest for the call and the chip
  kPlain,  // "plain": float32 arithmetic
  kMma,    // "mma": tensor cores, as any chip from sm_80 on has them
  kWgmma,  // "wgmma": as Hopper has them
};
}  // namespace kdt

struct kdt_context {
  int32_t backend;
  int32_t device;
  int32_t num_threads;          // >= 1 on the CPU backend
  int32_t multiprocessors;      // CUDA only
  int32_t kernel_architecture;  // CUDA only: what the kernels were compiled for, 80 for the portable PTX
  kdt::AttentionKernel attention;
  kdt::cpu::Isa isa;  // CPU only
};
