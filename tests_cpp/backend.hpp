// Which backend the tests run on: the environment variable KDTREE_TEST_BACKEND says cpu (the default) or cuda.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cuda_memory.hpp"
#include "kdtree/kdtree.h"

namespace kdt_test {

// Set by main.cpp.
inline bool testing_cuda = false;

// A thread that computes what CUDA's results are compared with.
inline thread_local bool comparing = false;

// Where this thread's arrays, contexts and calls belong.
inline bool on_cuda() { return testing_cuda && !comparing; }

// Whether verify_attn may run on tensor cores, which take weights of q's type whatever the type of out.
inline bool on_tensor_cores() {
  const char* kernel = std::getenv("KDTREE_VERIFY_ATTN");
  return on_cuda() && (kernel == nullptr || std::string_view(kernel) != "plain");
}

// What is made and called while it lives is the CPU backend's, whatever is tested.
class OnCpu {
 public:
  OnCpu() : before_(comparing) { comparing = true; }
  ~OnCpu() { comparing = before_; }
  OnCpu(const OnCpu&) = delete;
  OnCpu& operator=(const OnCpu&) = delete;

 private:
  bool before_;
};

#define KDT_SKIP_ON_CUDA(reason) \
  if (on_cuda()) GTEST_SKIP() << "on CUDA: " << reason

// Parameter structs start with their size and are zero otherwise.
template <class Struct>
Struct sized() {
  Struct s = {};
  s.struct_size = sizeof s;
  return s;
}

// A context of the backend that goes away with the test.
class TestContext {
 public:
  explicit TestContext(int32_t num_threads = 1, int32_t device = 0) {
    auto params = sized<kdt_context_params>();
    params.backend = on_cuda() ? KDT_BACKEND_CUDA : KDT_BACKEND_CPU;
    params.device = device;
    params.num_threads = num_threads;
    EXPECT_EQ(kdt_context_create(&params, &context_), KDT_OK) << kdt_last_error();
  }
  ~TestContext() { kdt_context_destroy(context_); }
  TestContext(const TestContext&) = delete;
  TestContext& operator=(const TestContext&) = delete;
  operator const kdt_context*() const { return context_; }

 private:
  kdt_context* context_ = nullptr;
};

}  // namespace kdt_test
