// Chooses the backend and runs the tests. Exit codes beside GoogleTest's 0 and 1: 2 for a backend that there is
// not, 3 when CUDA cannot be had here.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "backend.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* given = std::getenv("KDTREE_TEST_BACKEND");
  const std::string backend = given != nullptr ? given : "cpu";
  if (backend != "cpu" && backend != "cuda") {
    std::fprintf(stderr, "KDTREE_TEST_BACKEND: expected cpu or cuda, got '%s'\n", given);
    return 2;
  }
  if (backend == "cuda") {
    const std::string reason = kdt_test::cuda::unavailable();
    if (!reason.empty()) {
      std::fprintf(stderr, "KDTREE_TEST_BACKEND=cuda: %s\n", reason.c_str());
      return 3;
    }
    kdt_test::testing_cuda = true;
  } else {  // tests of what only CUDA has are left out, not skipped
    std::string& filter = testing::GTEST_FLAG(filter);
    filter += std::string(filter.find('-') == std::string::npos ? "-" : ":") + "Cuda*";
  }
  return RUN_ALL_TESTS();
}
