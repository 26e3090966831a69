// The cases in tests_cpp/data/operations.kdtr, made from the Python reference by tools/make-test-fixtures.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "kdtree/kdtr.h"

namespace kdt_test {

template <class T>
struct Values {
  std::vector<int64_t> dims;
  std::vector<T> data;
};

// One case of one operation. Arguments are "in.NAME", results "out.NAME".
class Case {
 public:
  Case(const kdtr_file* file, std::string operation, std::string name)
      : file_(file), operation_(std::move(operation)), name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  bool has(const std::string& role) const {
    kdtr_tensor tensor;
    return kdtr_find_tensor(file_, (operation_ + "/" + name_ + "/" + role).c_str(), &tensor) == KDT_OK;
  }

  template <class T>
  std::optional<Values<T>> find(const std::string& role) const {
    kdtr_tensor tensor;
    if (kdtr_find_tensor(file_, (operation_ + "/" + name_ + "/" + role).c_str(), &tensor) != KDT_OK) return {};
    EXPECT_EQ(kdtr_dtype_size(tensor.dtype), sizeof(T)) << role;
    Values<T> values;
    values.dims.assign(tensor.dims, tensor.dims + tensor.ndim);
    values.data.resize(tensor.nbytes / sizeof(T));
    if (tensor.nbytes > 0) std::memcpy(values.data.data(), tensor.data, tensor.nbytes);
    return values;
  }

  template <class T>
  Values<T> get(const std::string& role) const {
    auto found = find<T>(role);
    if (found) return *std::move(found);
    ADD_FAILURE() << operation_ << "/" << name_ << " has no " << role;
    std::abort();
  }

  int32_t scalar(const std::string& role) const { return get<int32_t>(role).data.at(0); }
  int32_t scalar_or(const std::string& role, int32_t otherwise) const {
    return has(role) ? scalar(role) : otherwise;
  }

  // Bytes an element has, and the bytes themselves.
  Values<uint8_t> bytes(const std::string& role, int32_t* element_size) const {
    kdtr_tensor tensor;
    EXPECT_EQ(kdtr_find_tensor(file_, (operation_ + "/" + name_ + "/" + role).c_str(), &tensor), KDT_OK);
    *element_size = static_cast<int32_t>(kdtr_dtype_size(tensor.dtype));
    const auto* first = static_cast<const uint8_t*>(tensor.data);
    return {{tensor.dims, tensor.dims + tensor.ndim}, {first, first + tensor.nbytes}};
  }

 private:
  const kdtr_file* file_;
  std::string operation_, name_;
};

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name(); }
inline std::string case_name(const testing::TestParamInfo<Case>& info) { return info.param.name(); }

// All cases of an operation. Ends the program when the file cannot be read: a suite without cases would pass.
inline std::vector<Case> cases_of(const std::string& operation) {
  static const kdtr_file* file = [] {
    kdtr_file* opened = nullptr;
    if (kdtr_open(KDT_TEST_DATA "/operations.kdtr", &opened) != KDT_OK) {
      std::cerr << kdt_last_error() << "; tools/make-test-fixtures makes it\n";
      std::exit(1);
    }
    return opened;
  }();
  std::vector<Case> cases;
  for (size_t i = 0; i < kdtr_num_tensors(file); ++i) {
    kdtr_tensor tensor;
    EXPECT_EQ(kdtr_tensor_at(file, i, &tensor), KDT_OK);
    const std::string path = tensor.name;
    if (path.compare(0, operation.size() + 1, operation + "/") != 0) continue;
    const std::string name = path.substr(operation.size() + 1, path.rfind('/') - operation.size() - 1);
    if (cases.empty() || cases.back().name() != name) cases.emplace_back(file, operation, name);
  }
  return cases;
}

// The requests of a batch, over and over: enough of them for several threads to get some.
template <class T>
std::vector<T> tiled(const std::vector<T>& data, int64_t times) {
  std::vector<T> result;
  result.reserve(data.size() * static_cast<size_t>(times));
  for (int64_t i = 0; i < times; ++i) result.insert(result.end(), data.begin(), data.end());
  return result;
}

// How a case is run. Every way must give the same bits.
struct Variant {
  int32_t num_threads;
  bool many_requests;  // repeat the batch until there is work for all threads
  int64_t slack;       // elements between rows
  bool with_status;
};
inline constexpr Variant kVariants[] = {
    {1, false, 0, true}, {1, false, 3, false}, {2, true, 1, true}, {7, true, 0, false}, {7, true, 5, true}};

inline std::string to_string(const Variant& v) {
  return std::to_string(v.num_threads) + " threads, slack " + std::to_string(v.slack) +
         (v.many_requests ? ", many requests" : "") + (v.with_status ? "" : ", no status");
}

}  // namespace kdt_test
