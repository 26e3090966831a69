// CRC-32 as zlib has it: polynomial 0xEDB88320, reflected, initial value and final xor all ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt::kdtr {

// The checksum of `size` more bytes after those that gave `crc` (0 at the start).
uint32_t crc32(uint32_t crc, const void* data, size_t size) noexcept;

}  // namespace kdt::kdtr
