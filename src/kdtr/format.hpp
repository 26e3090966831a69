// What reader and writer share: where the fields lie, and the rules for shapes and names.
// The format itself is described in plans/0002-kdtr-format.md.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "kdtree/kdtr.h"

namespace kdt::kdtr {

static_assert(std::endian::native == std::endian::little, "KDTR is written for little-endian hosts");

inline constexpr char kMagic[8] = {'K', 'D', 'T', 'R', '\r', '\n', '\x1a', '\n'};
inline constexpr uint32_t kVersion = 1;
inline constexpr uint64_t kDataAlign = 64;
inline constexpr uint64_t kEntryAlign = 8;

namespace header {
inline constexpr size_t kVersion = 8;      // u32
inline constexpr size_t kReserved0 = 12;   // u32
inline constexpr size_t kFileSize = 16;    // u64
inline constexpr size_t kIndexSize = 24;   // u64
inline constexpr size_t kNumTensors = 32;  // u32
inline constexpr size_t kNumAttrs = 36;    // u32
inline constexpr size_t kChecksum = 40;    // u32
inline constexpr size_t kReserved1 = 44;   // 20 bytes
inline constexpr size_t kSize = 64;
}  // namespace header

namespace tensor_entry {
inline constexpr size_t kOffset = 0;     // u64
inline constexpr size_t kBytes = 8;      // u64
inline constexpr size_t kChecksum = 16;  // u32
inline constexpr size_t kNameLen = 20;   // u16
inline constexpr size_t kDtype = 22;     // u8
inline constexpr size_t kNdim = 23;      // u8
inline constexpr size_t kDims = 24;      // u64[ndim], then the name and its NUL
inline constexpr size_t kMinSize = 32;
}  // namespace tensor_entry

namespace attr_entry {
inline constexpr size_t kKeyLen = 0;    // u32
inline constexpr size_t kValueLen = 4;  // u32
inline constexpr size_t kKey = 8;       // the key and its NUL, then the value and its NUL
inline constexpr size_t kMinSize = 16;
}  // namespace attr_entry

// Fields lie at any alignment when the caller's memory does.
template <class T>
T load(const uint8_t* p) noexcept {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void store(uint8_t* p, T value) noexcept {
  std::memcpy(p, &value, sizeof value);
}

// Bytes from `end` to the next multiple of `align`, a power of two. Cannot overflow, unlike rounding up.
constexpr uint64_t padding_after(uint64_t end, uint64_t align) noexcept { return (0 - end) & (align - 1); }

inline bool all_zero(const uint8_t* p, uint64_t size) noexcept {
  return std::all_of(p, p + size, [](uint8_t byte) { return byte == 0; });
}

inline bool all_bool(const uint8_t* p, uint64_t size) noexcept {
  return std::all_of(p, p + size, [](uint8_t byte) { return byte <= 1; });
}

// The bytes a tensor has. False if a dimension is negative, or if the product of the dimensions, zeros taken
// as ones, and the element size is above 2^63 - 1.
inline bool shape_bytes(int32_t dtype, const int64_t* dims, int32_t ndim, uint64_t* nbytes) noexcept {
  int64_t product = static_cast<int64_t>(kdtr_dtype_size(dtype));
  bool empty = false;
  for (int32_t i = 0; i < ndim; ++i) {
    if (dims[i] < 0 || __builtin_mul_overflow(product, std::max<int64_t>(dims[i], 1), &product)) return false;
    empty |= dims[i] == 0;
  }
  *nbytes = empty ? 0 : static_cast<uint64_t>(product);
  return true;
}

// UTF-8 as RFC 3629 and Python's strict decoder have it: no overlong form, no surrogate, nothing above U+10FFFF.
inline bool valid_utf8(std::string_view text) noexcept {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  size_t left = text.size();
  while (left > 0) {
    const uint8_t lead = *p;
    size_t length = 1;
    if (lead >= 0x80) {
      if (lead < 0xC2 || lead > 0xF4) return false;
      length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
      if (left < length) return false;
      const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
      const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
      if (p[1] < low || p[1] > high) return false;
      for (size_t i = 2; i < length; ++i) {
        if ((p[i] & 0xC0) != 0x80) return false;
      }
    }
    p += length;
    left -= length;
  }
  return true;
}

inline bool valid_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= KDTR_MAX_NAME && name.find('\0') == name.npos && valid_utf8(name);
}

}  // namespace kdt::kdtr
