// Calls of operations, in guarded memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <utility>
#include <vector>

#include "backend.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"

namespace kdt_test {

class CudaStream {
 public:
  CudaStream() : stream_(cuda::create_stream()) {}
  ~CudaStream() { cuda::destroy_stream(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  operator void*() const { return stream_; }

 private:
  void* stream_;
};

// What run(stream) puts on a stream, captured once.
class CudaGraph {
 public:
  template <class Run>
  CudaGraph(const CudaStream& stream, Run&& run) {
    cuda::begin_capture(stream);
    EXPECT_EQ(run(static_cast<void*>(stream)), KDT_OK) << "while captured: " << kdt_last_error();
    graph_ = cuda::end_capture(stream);
  }
  ~CudaGraph() { cuda::destroy_graph(graph_); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void replay(const CudaStream& stream) const {
    cuda::launch_graph(graph_, stream);
    cuda::synchronize(stream);
  }

 private:
  void* graph_;
};

// Runs an operation, which is given a stream, and returns its status.
//
// On CUDA a call that works is made twice: eagerly, and, with all arrays of this thread as they were before, as a
// graph that is captured on another stream and replayed. Both must leave the same bits in every array. The
// workspace alone is not put back: what the first run left there is garbage to the second. With KDTREE_TEST_ONCE in
// the environment there is the eager run alone: compute-sanitizer takes seconds for what else would be done.
template <class Run>
int32_t run_operation(const GuardedBytes& workspace, Run&& run) {
  if (!on_cuda()) return run(nullptr);
  static const bool once = std::getenv("KDTREE_TEST_ONCE") != nullptr;
  thread_local const CudaStream eager, captured;
  if (once) {
    const int32_t status = run(static_cast<void*>(eager));
    cuda::synchronize(eager);
    return status;
  }
  std::vector<std::pair<GuardedBytes*, std::vector<std::byte>>> before, after;
  const auto save = [&](auto* saved) {
    for (GuardedBytes* array : GuardedBytes::of_this_thread()) {
      if (array != &workspace) saved->emplace_back(array, array->block());
    }
  };
  save(&before);
  const int32_t status = run(static_cast<void*>(eager));
  cuda::synchronize(eager);
  if (status != KDT_OK) return status;
  save(&after);
  for (const auto& [array, bytes] : before) array->put_back(bytes);
  CudaGraph(captured, run).replay(captured);
  for (const auto& [array, bytes] : after) {
    const std::vector<std::byte> again = array->block();
    const auto differs = std::mismatch(bytes.begin(), bytes.end(), again.begin()).first;
    EXPECT_TRUE(differs == bytes.end()) << "eager and replayed runs differ at byte " << differs - bytes.begin()
                                        << " of a block of " << bytes.size();
  }
  return status;
}

// Queries the workspace, runs, and checks that nothing but outputs was written. The workspace is as large as asked
// for and has no alignment.
template <class Params>
void call(int32_t (*query)(const kdt_context*, const Params*, size_t*),
          int32_t (*run)(const kdt_context*, const Params*, void*, size_t, void*), const kdt_context* context,
          const Params& p, std::initializer_list<const GuardedBytes*> inputs,
          std::initializer_list<const GuardedBytes*> outputs, size_t misalignment = 3) {
  size_t size = 0;
  ASSERT_EQ(query(context, &p, &size), KDT_OK) << kdt_last_error();
  Guarded<uint8_t> workspace({static_cast<int64_t>(size + misalignment)});
  const int32_t status = run_operation(
      workspace, [&](void* stream) { return run(context, &p, workspace.data() + misalignment, size, stream); });
  ASSERT_EQ(status, KDT_OK) << kdt_last_error();
  EXPECT_TRUE(workspace.guards_intact());
  for (const GuardedBytes* input : inputs) EXPECT_TRUE(input->unchanged()) << "an input was written";
  for (const GuardedBytes* output : outputs) EXPECT_TRUE(output->guards_intact()) << "written beside an output";
}

}  // namespace kdt_test
