#include "isa.hpp"

#include <cstdlib>
#include <string_view>

#include "../error.hpp"

namespace kdt::cpu {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};

}  // namespace

bool has(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
             __builtin_cpu_supports("f16c") != 0;
    case Isa::kAvx512:
      return has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  }
  return false;
#else
  return isa == Isa::kScalar;
#endif
}

Isa widest_isa() {
  static const Isa widest = has(Isa::kAvx512) ? Isa::kAvx512 : has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar;
  return widest;
}

const char* name_of(Isa isa) { return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "scalar"; }

int32_t read_isa(const char* function, Isa* isa) {
  *isa = widest_isa();
  const char* given = std::getenv("KDTREE_CPU_ISA");
  if (given == nullptr || *given == '\0' || std::string_view(given) == "auto") return KDT_OK;
  for (const Isa named : kAll) {
    if (std::string_view(given) != name_of(named)) continue;
    *isa = named;
    if (has(named)) return KDT_OK;
    return fail(KDT_ERR_INVALID_ARGUMENT, function,
                "environment variable KDTREE_CPU_ISA: this processor has no %s (its widest set is %s)", given,
                name_of(widest_isa()));
  }
  return fail(KDT_ERR_INVALID_ARGUMENT, function,
              "environment variable KDTREE_CPU_ISA: expected auto, scalar, avx2 or avx512, got \"%s\"", given);
}

}  // namespace kdt::cpu
