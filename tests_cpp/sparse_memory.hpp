// Memory of any size, of which few bytes are used: on the CPU address space, of which only what was asked for can
// be touched; on CUDA real memory.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "backend.hpp"

namespace kdt_test {

class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes) : bytes_(bytes), on_device_(on_cuda()) {
    memory_ = on_device_ ? cuda::allocate(bytes)
                         : ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("cannot reserve address space");
  }
  ~SparseMemory() {
    if (on_device_) {
      cuda::release(memory_);
    } else {
      ::munmap(memory_, bytes_);
    }
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(memory_); }

  // Opens the memory pages that hold a range, and fills it.
  void put(size_t offset, const void* values, size_t bytes) const {
    if (on_device_) {
      cuda::upload(data() + offset, values, bytes);
      return;
    }
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t begin = offset / page * page, end = (offset + bytes + page - 1) / page * page;
    if (::mprotect(data() + begin, end - begin, PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("cannot open memory");
    }
    std::memcpy(data() + offset, values, bytes);
  }

  // A range that was filled.
  template <class T>
  std::vector<T> get(size_t offset, size_t count) const {
    std::vector<T> values(count);
    if (on_device_) {
      cuda::download(values.data(), data() + offset, count * sizeof(T));
    } else {
      std::memcpy(values.data(), data() + offset, count * sizeof(T));
    }
    return values;
  }

 private:
  size_t bytes_;
  bool on_device_;
  void* memory_;
};

// A copy of an array behind which there is no memory at all. (On CUDA, none of ours: compute-sanitizer sees it.)
template <class T>
class AtTheEnd {
 public:
  explicit AtTheEnd(const std::vector<T>& values)
      : count_(values.size()),
        offset_(whole_pages(count_ * sizeof(T)) - count_ * sizeof(T)),
        memory_(whole_pages(count_ * sizeof(T)) + (on_cuda() ? 0 : page())) {
    memory_.put(offset_, values.data(), count_ * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data() + offset_); }
  std::vector<T> values() const { return memory_.get<T>(offset_, count_); }

 private:
  static size_t page() { return on_cuda() ? 256 : static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }
  static size_t whole_pages(size_t bytes) { return (bytes + page() - 1) / page() * page(); }
  size_t count_, offset_;
  SparseMemory memory_;
};

}  // namespace kdt_test
