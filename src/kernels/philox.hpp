// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
// as 1, 2, 3" (SC 2011). Host and device code alike.
#pragma once

#include <cstdint>

#include "host_device.hpp"

namespace kdt {

struct PhiloxBlock {
  uint32_t words[4];
};

KDT_HOST_DEVICE inline PhiloxBlock philox4x32(PhiloxBlock counter, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t* c = counter.words;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c[0], product1 = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(product1);
    c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace kdt
