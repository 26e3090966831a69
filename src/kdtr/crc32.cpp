// Slicing by 8: tables[k][b] is the checksum of byte b followed by k zero bytes, so eight table look-ups,
// independent of each other, take in eight bytes. The tables are 8 KiB and made by the compiler.
#include "crc32.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace kdt::kdtr {
namespace {

static_assert(std::endian::native == std::endian::little, "KDTR is written for little-endian hosts");

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320u : 0u);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}

constexpr Tables tables = make_tables();

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t size) noexcept {
  const auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; size >= 8; p += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= tables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; size > 0; ++p, --size) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 0xFF];
  return ~crc;
}

}  // namespace kdt::kdtr
