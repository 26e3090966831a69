// Which instructions the CPU's hot loops use. Chosen when a context is made: the widest that the processor has, or
// what the environment variable KDTREE_CPU_ISA names.
#pragma once

#include <cstdint>

namespace kdt::cpu {

enum class Isa : int32_t {
  kScalar,  // "scalar": what every x86-64 or other processor has
  kAvx2,    // "avx2": AVX2, FMA, F16C
  kAvx512,  // "avx512": AVX-512 F, BW, DQ, VL
};

bool has(Isa isa);
Isa widest_isa();
const char* name_of(Isa isa);

// KDT_OK and the set to use, or an error that names the environment variable.
int32_t read_isa(const char* function, Isa* isa);

}  // namespace kdt::cpu
