// Address space of any size, of which only what was asked for can be touched.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace kdt_test {

class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        memory_(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::runtime_error("cannot reserve address space");
  }
  ~SparseMemory() { ::munmap(memory_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(memory_); }

  // Opens the memory pages that hold a range, and gives its start.
  uint8_t* open(size_t offset, size_t bytes) const {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t begin = offset / page * page, end = (offset + bytes + page - 1) / page * page;
    if (::mprotect(data() + begin, end - begin, PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("cannot open memory");
    }
    return data() + offset;
  }

 private:
  size_t bytes_;
  void* memory_;
};

// A copy of an array behind which there is no memory at all.
template <class T>
class AtTheEnd {
 public:
  explicit AtTheEnd(const std::vector<T>& values)
      : pages_((values.size() * sizeof(T) + page() - 1) / page() * page()), memory_(pages_ + page()) {
    data_ = reinterpret_cast<T*>(memory_.open(0, pages_) + pages_) - values.size();
    std::memcpy(static_cast<void*>(data_), values.data(), values.size() * sizeof(T));
  }
  T* data() const { return data_; }

 private:
  static size_t page() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }
  size_t pages_;
  SparseMemory memory_;
  T* data_;
};

}  // namespace kdt_test
