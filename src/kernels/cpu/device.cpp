#include "device.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

#include "../args.hpp"
#include "isa.hpp"

namespace kdt::cpu {

int32_t usable_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails (EINVAL) on machines with more CPUs than the set holds; then count them all.
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::clamp(CPU_COUNT(&set), 1, 1024);
  return static_cast<int32_t>(std::clamp(std::thread::hardware_concurrency(), 1u, 1024u));
}

int32_t device_query(const char* function, kdt_device_info* info) {
  Isa isa = Isa::kScalar;
  KDT_TRY(read_isa(function, &isa));
  std::string name = "CPU";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) name = line.substr(colon + 2);
    break;
  }
  std::snprintf(info->name, sizeof info->name, "%.200s (%s)", name.c_str(), name_of(isa));
  info->multiprocessors = usable_threads();
  return KDT_OK;
}

}  // namespace kdt::cpu
