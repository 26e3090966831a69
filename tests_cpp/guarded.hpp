// Arrays that notice what they should not see: every byte that is no element (64 bytes on either side and all
// that strides skip) holds a pattern of its own, and so does an output's element until it is written.
//
// On CUDA an array is device memory, guards and all; whoever looks at it gets a fresh copy.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "backend.hpp"
#include "kdtree/kdtree.h"

namespace kdt_test {

// What an array of the tests can be asked without knowing its type.
class GuardedBytes {
 public:
  virtual ~GuardedBytes() {
    auto& all = of_this_thread();
    all.erase(std::find(all.begin(), all.end(), this));
  }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  // No byte has changed since the array was made or filled.
  bool unchanged() const { return std::memcmp(look(), snapshot_.data(), snapshot_.size()) == 0; }

  // No byte outside the elements has changed.
  bool guards_intact() const {
    const std::byte* now = look();
    return std::all_of(guards_.begin(), guards_.end(), [&](const auto& range) {
      return std::memcmp(now + range.first, snapshot_.data() + range.first, range.second - range.first) == 0;
    });
  }

  // All bytes, guards included, and putting such bytes back.
  std::vector<std::byte> block() const {
    const std::byte* now = look();
    return {now, now + snapshot_.size()};
  }
  void put_back(const std::vector<std::byte>& bytes) {
    std::memcpy(host_.get(), bytes.data(), bytes.size());
    if (device_ != nullptr) cuda::upload(device_.get(), host_.get(), bytes.size());
  }
  // As it was made or filled.
  void reset() { put_back(snapshot_); }

  // All that this thread has made and that is still there.
  static std::vector<GuardedBytes*>& of_this_thread() {
    thread_local std::vector<GuardedBytes*> all;
    return all;
  }

 protected:
  static constexpr size_t kGuard = 64;

  // `rows` are the offsets of the runs of elements, `row_bytes` the length of each.
  GuardedBytes(size_t bytes, std::vector<size_t> rows, size_t row_bytes) : snapshot_(bytes + 2 * kGuard) {
    static const std::vector<std::byte> pattern = [] {
      std::vector<std::byte> p(1 << 16);
      for (size_t i = 0; i < p.size(); ++i) p[i] = static_cast<std::byte>(0x80 | (i * 37 + i / 256));
      return p;
    }();
    for (size_t at = 0; at < snapshot_.size(); at += pattern.size()) {
      std::memcpy(snapshot_.data() + at, pattern.data(), std::min(pattern.size(), snapshot_.size() - at));
    }
    // The block has exactly its size, so that a sanitizer sees an access beyond the guards too.
    host_.reset(static_cast<std::byte*>(::operator new(snapshot_.size(), std::align_val_t{64})));
    if (on_cuda()) device_.reset(static_cast<std::byte*>(cuda::allocate(snapshot_.size())));
    reset();

    std::sort(rows.begin(), rows.end());
    size_t end = 0;  // of the elements so far
    for (const size_t row : rows) {
      if (kGuard + row > end) guards_.emplace_back(end, kGuard + row);
      end = kGuard + row + row_bytes;
    }
    guards_.emplace_back(end, snapshot_.size());
    of_this_thread().push_back(this);
  }

  // The first element, where operations find it.
  std::byte* first() const { return (device_ != nullptr ? device_.get() : host_.get()) + kGuard; }
  // The bytes as they are now, on the host.
  const std::byte* look() const {
    if (device_ != nullptr) cuda::download(host_.get(), device_.get(), snapshot_.size());
    return host_.get();
  }
  // Overwrites elements in what was there when the array was made or filled.
  template <class Write>
  void refill(Write&& write) {
    write(snapshot_.data() + kGuard);
    reset();
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  struct Release {
    void operator()(std::byte* p) const { cuda::release(p); }
  };
  std::unique_ptr<std::byte, Free> host_;
  std::unique_ptr<std::byte, Release> device_;  // on CUDA; host_ is then its last copy
  std::vector<std::byte> snapshot_;
  std::vector<std::pair<size_t, size_t>> guards_;
};

// A row-major array of T. strides[i] is the distance in elements of the entries of dimension i, 0 meaning packed;
// the last dimension is contiguous and has none.
template <class T>
class Guarded : public GuardedBytes {
 public:
  using Dims = std::vector<int64_t>;

  explicit Guarded(Dims dims, Dims strides = {}) : Guarded(dims, settled(dims, std::move(strides)), 0) {}
  // Filled with packed values. (A template so that braces mean strides.)
  template <std::same_as<std::vector<T>> V>
  Guarded(Dims dims, const V& values, Dims strides = {}) : Guarded(std::move(dims), std::move(strides)) {
    fill(values);
  }

  T* data() { return reinterpret_cast<T*>(first()); }
  size_t size() const { return rows_.size() * row_size_; }

  void fill(const std::vector<T>& values) {
    ASSERT_EQ(values.size(), size());
    refill([&](std::byte* elements) {
      for (size_t i = 0; i < rows_.size(); ++i) {
        std::memcpy(elements + rows_[i], values.data() + i * row_size_, row_size_ * sizeof(T));
      }
    });
  }

  // The elements, packed.
  std::vector<T> values() const {
    std::vector<T> result(size());
    const std::byte* elements = look() + kGuard;
    for (size_t i = 0; i < rows_.size(); ++i) {
      std::memcpy(result.data() + i * row_size_, elements + rows_[i], row_size_ * sizeof(T));
    }
    return result;
  }

 private:
  Guarded(const Dims& dims, const Dims& strides, int)
      : GuardedBytes(bytes_of(dims, strides), row_offsets(dims, strides),
                     static_cast<size_t>(dims.back()) * sizeof(T)),
        rows_(row_offsets(dims, strides)),
        row_size_(static_cast<size_t>(dims.back())) {}

  static Dims settled(const Dims& dims, Dims strides) {
    strides.resize(dims.size(), 0);
    int64_t packed = 1;
    for (size_t d = dims.size(); d-- > 0;) {
      if (strides[d] == 0) strides[d] = packed;
      packed = strides[d] * dims[d];
    }
    return strides;
  }

  static size_t bytes_of(const Dims& dims, const Dims& strides) {
    int64_t elements = 1;
    for (size_t d = 0; d < dims.size(); ++d) {
      if (dims[d] == 0) return 0;
      elements += (dims[d] - 1) * strides[d];
    }
    return static_cast<size_t>(elements) * sizeof(T);
  }

  // In bytes, in packed order; none when the array has no elements.
  static std::vector<size_t> row_offsets(const Dims& dims, const Dims& strides) {
    std::vector<size_t> offsets;
    if (bytes_of(dims, strides) == 0) return offsets;
    offsets.push_back(0);
    for (size_t d = 0; d + 1 < dims.size(); ++d) {
      std::vector<size_t> longer;
      for (const size_t offset : offsets) {
        for (int64_t i = 0; i < dims[d]; ++i)
          longer.push_back(offset + static_cast<size_t>(i * strides[d]) * sizeof(T));
      }
      offsets = std::move(longer);
    }
    return offsets;
  }

  std::vector<size_t> rows_;
  size_t row_size_;
};

// Equal bit for bit: NaN equals itself, -0 differs from +0.
template <class T>
testing::AssertionResult same_bits(const std::vector<T>& got, const std::vector<T>& expected) {
  if (got.size() != expected.size()) {
    return testing::AssertionFailure() << got.size() << " elements, expected " << expected.size();
  }
  if (got.empty() || std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)) == 0) {
    return testing::AssertionSuccess();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &expected[i], sizeof(T)) != 0) {
      return testing::AssertionFailure() << "element " << i << " is " << +got[i] << ", expected " << +expected[i];
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace kdt_test
