// The cases of py/kdtree_engine/cases.py, as `kdtree fixtures gen` writes them: one KDTR file each, named
// OPERATION/VARIANT.kdtr, with arrays "in/NAME" and "out/NAME" and scalar arguments as attributes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kdtree/kdtr.h"

namespace kdt_test {

inline std::filesystem::path fixtures_folder() {
  const char* given = std::getenv("KDTREE_FIXTURES");
  return given != nullptr ? given : KDT_FIXTURES;
}

// A fixture that has not been opened.
struct CaseFile {
  std::string operation, variant;
  std::filesystem::path path() const { return fixtures_folder() / operation / (variant + ".kdtr"); }
};

inline void PrintTo(const CaseFile& c, std::ostream* out) { *out << c.variant; }
inline std::string case_name(const testing::TestParamInfo<CaseFile>& info) { return info.param.variant; }

// The operations whose cases were asked for.
inline std::set<std::string>& operations_run() {
  static std::set<std::string> operations;
  return operations;
}

// All cases of an operation. None when the folder is not there: test_fixtures.cpp says so.
inline std::vector<CaseFile> cases_of(const std::string& operation) {
  operations_run().insert(operation);
  std::vector<CaseFile> cases;
  std::error_code error;
  for (std::filesystem::directory_iterator at(fixtures_folder() / operation, error), end; !error && at != end;
       at.increment(error)) {
    if (at->path().extension() == ".kdtr") cases.push_back({operation, at->path().stem().string()});
  }
  std::sort(cases.begin(), cases.end(), [](const CaseFile& a, const CaseFile& b) { return a.variant < b.variant; });
  return cases;
}

// Runs TEST_P(SUITE, ...) on every case of an operation.
#define KDT_CASES(suite, operation)                         \
  class suite : public testing::TestWithParam<CaseFile> {}; \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(suite);     \
  INSTANTIATE_TEST_SUITE_P(Reference, suite, testing::ValuesIn(cases_of(operation)), case_name)

template <class T>
struct Values {
  std::vector<int64_t> dims;
  std::vector<T> data;
};

// An open fixture. What it must have and lacks is thrown, which fails the test.
class Case {
 public:
  explicit Case(const CaseFile& file) : name_(file.operation + "/" + file.variant) {
    kdtr_file* opened = nullptr;
    if (kdtr_open(file.path().c_str(), &opened) != KDT_OK) {
      throw std::runtime_error(std::string(kdt_last_error()) + "; run `kdtree fixtures gen`");
    }
    file_.reset(opened);
  }

  bool has(const std::string& role) const {
    kdtr_tensor tensor;
    return kdtr_find_tensor(file_.get(), role.c_str(), &tensor) == KDT_OK;
  }

  template <class T>
  std::optional<Values<T>> find(const std::string& role) const {
    if (!has(role)) return {};
    const kdtr_tensor tensor = tensor_of(role);
    if (kdtr_dtype_size(tensor.dtype) != sizeof(T)) throw std::runtime_error(name_ + ": size of " + role);
    Values<T> values;
    values.dims.assign(tensor.dims, tensor.dims + tensor.ndim);
    values.data.resize(tensor.nbytes / sizeof(T));
    if (tensor.nbytes > 0) std::memcpy(values.data.data(), tensor.data, tensor.nbytes);
    return values;
  }

  template <class T>
  Values<T> get(const std::string& role) const {
    auto found = find<T>(role);
    if (!found) throw std::runtime_error(name_ + " has no " + role);
    return *std::move(found);
  }

  // The elements alone.
  std::vector<int32_t> ints(const std::string& role) const { return get<int32_t>(role).data; }
  std::optional<std::vector<int32_t>> optional_ints(const std::string& role) const {
    return has(role) ? std::optional(ints(role)) : std::nullopt;
  }

  int32_t dtype(const std::string& role) const { return tensor_of(role).dtype; }
  int32_t element_size(const std::string& role) const { return static_cast<int32_t>(kdtr_dtype_size(dtype(role))); }
  Values<uint8_t> bytes(const std::string& role) const {
    const kdtr_tensor tensor = tensor_of(role);
    const auto* first = static_cast<const uint8_t*>(tensor.data);
    return {{tensor.dims, tensor.dims + tensor.ndim}, {first, first + tensor.nbytes}};
  }

  std::optional<std::string> attribute(const std::string& key) const {
    kdtr_attr attr;
    if (kdtr_find_attr(file_.get(), key.c_str(), &attr) != KDT_OK) return {};
    return std::string(attr.value, attr.value_size);
  }
  std::string text(const std::string& key) const {
    const auto found = attribute(key);
    if (!found) throw std::runtime_error(name_ + " has no attribute " + key);
    return *found;
  }
  int32_t integer(const std::string& key) const { return std::stoi(text(key)); }
  int32_t integer_or(const std::string& key, int32_t otherwise) const {
    return attribute(key) ? integer(key) : otherwise;
  }
  // A list: "1,2,3".
  std::optional<std::vector<int32_t>> integers(const std::string& key) const {
    const auto found = attribute(key);
    if (!found) return {};
    std::vector<int32_t> values;
    std::istringstream list(*found);
    for (std::string item; std::getline(list, item, ',');) values.push_back(std::stoi(item));
    return values;
  }

 private:
  kdtr_tensor tensor_of(const std::string& role) const {
    kdtr_tensor tensor;
    if (kdtr_find_tensor(file_.get(), role.c_str(), &tensor) != KDT_OK) {
      throw std::runtime_error(name_ + " has no " + role);
    }
    return tensor;
  }

  struct Close {
    void operator()(kdtr_file* file) const { kdtr_close(file); }
  };
  std::unique_ptr<kdtr_file, Close> file_;
  std::string name_;
};

// The requests of a batch, over and over: enough of them for several threads to get some.
template <class T>
std::vector<T> tiled(const std::vector<T>& data, int64_t times) {
  std::vector<T> result;
  result.reserve(data.size() * static_cast<size_t>(times));
  for (int64_t i = 0; i < times; ++i) result.insert(result.end(), data.begin(), data.end());
  return result;
}

template <class T>
std::optional<std::vector<T>> tiled(const std::optional<std::vector<T>>& data, int64_t times) {
  return data ? std::optional(tiled(*data, times)) : std::nullopt;
}

// How a case is run. Every way must give the same bits; on CUDA sums may be split by sizes and alignment, so there
// floats that are sums have their tolerance instead.
struct Variant {
  int32_t num_threads = 1;
  bool many_requests = false;  // repeat the batch until there is work for all threads
  int64_t slack = 0;           // elements between rows
  bool with_status = true;     // and the other optional outputs
};
inline constexpr Variant kVariants[] = {
    {1, false, 0, true}, {1, false, 3, false}, {2, true, 1, true}, {7, true, 0, false}, {7, true, 5, true}};

inline std::string to_string(const Variant& v) {
  return std::to_string(v.num_threads) + " threads, slack " + std::to_string(v.slack) +
         (v.many_requests ? ", many requests" : "") + (v.with_status ? "" : ", no status");
}

// The variants, each twice; for a case that takes long, one that is packed and one that is not.
inline std::vector<Variant> variants_of(bool takes_long) {
  if (takes_long) return {kVariants[0], {7, false, 3, false}};
  std::vector<Variant> variants;
  for (const Variant& v : kVariants) variants.insert(variants.end(), 2, v);
  return variants;
}

}  // namespace kdt_test
