// What only the CUDA backend can get wrong: whose memory and streams it is given, errors of launches, threads,
// offsets beyond 32 bits; and ten thousand random trees beside the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.hpp"
#include "backend.hpp"
#include "call.hpp"
#include "calls.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "rows.hpp"
#include "sparse_memory.hpp"
#include "tree_buffers.hpp"

namespace {

using namespace kdt_test;
using calls::Call;
using calls::Pointer;

constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- Whose memory, whose stream --------------------------------------------------------------------

// Memory of the host, filled with a pattern.
class HostMemory {
 public:
  HostMemory(size_t bytes, bool pinned) : bytes_(bytes), pinned_(pinned) {
    memory_ = pinned ? cuda::allocate_pinned(bytes) : ::operator new(bytes, std::align_val_t{64});
    std::memset(memory_, kPattern, bytes);
  }
  ~HostMemory() {
    if (pinned_) {
      cuda::release_pinned(memory_);
    } else {
      ::operator delete(memory_, std::align_val_t{64});
    }
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void* data() const { return memory_; }
  bool unchanged() const {
    const uint8_t* bytes = static_cast<const uint8_t*>(memory_);
    return std::all_of(bytes, bytes + bytes_, [](uint8_t byte) { return byte == kPattern; });
  }

 private:
  static constexpr uint8_t kPattern = 0x5a;
  size_t bytes_;
  bool pinned_;
  void* memory_;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : memory_(cuda::allocate(bytes)) {}
  ~DeviceMemory() { cuda::release(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return memory_; }

 private:
  void* memory_;
};

template <class T>
class CudaDevice : public calls::CallTest {
 protected:
  void expect_refused(const Call& call, int32_t got, int32_t code, const std::string& text) {
    EXPECT_STREQ(kdt_status_name(got), kdt_status_name(code)) << text;
    EXPECT_NE(std::string(kdt_last_error()).find(text), std::string::npos) << text << ": " << kdt_last_error();
    EXPECT_TRUE(call.untouched()) << text;
  }

  // Each array in memory from make(bytes), and the workspace.
  template <class Make>
  void expect_foreign_memory_refused(Call& call, Make&& make) {
    for (const Pointer& array : call.pointers()) {
      const auto memory = make(array.span);
      void* const own = array.get();
      array.set(memory->data());
      expect_refused(call, run(call), KDT_ERR_INVALID_ARGUMENT, "'" + array.name + "'");
      array.set(own);
    }
    size_t size = 0;
    ASSERT_EQ(call.query(context_, call.params(), &size), KDT_OK) << kdt_last_error();
    if (size > 0) {
      const auto memory = make(size);
      expect_refused(call, call.run(context_, call.params(), memory->data(), size, nullptr),
                     KDT_ERR_INVALID_ARGUMENT, "'workspace'");
    }
    EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
  }
};
TYPED_TEST_SUITE(CudaDevice, calls::Calls, calls::CallNames);

TYPED_TEST(CudaDevice, MemoryOfTheHostIsRefused) {
  for (const bool pinned : {false, true}) {
    TypeParam call;
    std::vector<std::shared_ptr<HostMemory>> all;
    this->expect_foreign_memory_refused(
        call, [&](size_t bytes) { return all.emplace_back(std::make_shared<HostMemory>(bytes, pinned)); });
    for (const auto& memory : all) EXPECT_TRUE(memory->unchanged());
  }
}

TYPED_TEST(CudaDevice, ALaunchThatFailsIsAnErrorOfItsCall) {
  TypeParam call;
  ASSERT_EQ(this->run(call), KDT_OK) << kdt_last_error();  // the workspace has its size from now on
  for (GuardedBytes* array : GuardedBytes::of_this_thread()) array->reset();
  const CudaStream stream;
  const std::string text = cuda::begin_spoiled_capture(stream);
  const int32_t got = call.run(this->context_, call.params(), this->workspace_->data(), this->workspace_->size(),
                               static_cast<void*>(stream));
  const std::string error = kdt_last_error();
  cuda::end_spoiled_capture(stream);
  EXPECT_STREQ(kdt_status_name(got), "KDT_ERR_CUDA") << error;
  EXPECT_EQ(error.rfind(call.function() + ": ", 0), 0u) << error;
  EXPECT_NE(error.find(text), std::string::npos) << error;
  EXPECT_TRUE(call.untouched());
  EXPECT_EQ(this->run(call), KDT_OK) << "nothing stays behind: " << kdt_last_error();
  EXPECT_FALSE(call.untouched());
}

TEST(Cuda, LayerPointersInMemoryOfTheHostAreRefused) {
  calls::KvCompactCall call;
  void* layers[] = {call.rows.data(), call.rows.data() + calls::KvCompactCall::kLayer};
  call.cache.data = nullptr;
  call.cache.layer_data = layers;
  const TestContext context;
  size_t size = 0;
  ASSERT_EQ(call.query(context, call.params(), &size), KDT_OK) << kdt_last_error();
  Guarded<uint8_t> workspace({static_cast<int64_t>(size)});
  EXPECT_EQ(call.run(context, call.params(), workspace.data(), size, nullptr), KDT_ERR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kdt_last_error()).find("'cache.layer_data'"), std::string::npos) << kdt_last_error();
  EXPECT_TRUE(call.untouched());
}

// ---- Two devices -----------------------------------------------------------------------------------

template <class T>
class CudaTwoDevices : public CudaDevice<T> {
 protected:
  void SetUp() override {
    if (cuda::device_count() < 2) GTEST_SKIP() << "one device";
  }
  void TearDown() override { cuda::set_device(0); }
};
TYPED_TEST_SUITE(CudaTwoDevices, calls::Calls, calls::CallNames);

TYPED_TEST(CudaTwoDevices, MemoryOfAnotherDeviceIsRefused) {
  TypeParam call;
  this->expect_foreign_memory_refused(call, [](size_t bytes) {
    cuda::set_device(1);
    auto memory = std::make_shared<DeviceMemory>(bytes);
    cuda::set_device(0);
    return memory;
  });
  EXPECT_EQ(cuda::current_device(), 0);
}

TYPED_TEST(CudaTwoDevices, AStreamOfAnotherDeviceIsRefused) {
  TypeParam call;
  ASSERT_EQ(this->run(call), KDT_OK) << kdt_last_error();
  for (GuardedBytes* array : GuardedBytes::of_this_thread()) array->reset();
  cuda::set_device(1);
  const CudaStream stream;
  cuda::set_device(0);
  const int32_t got = call.run(this->context_, call.params(), this->workspace_->data(), this->workspace_->size(),
                               static_cast<void*>(stream));
  this->expect_refused(call, got, KDT_ERR_INVALID_ARGUMENT, "'stream'");
  EXPECT_EQ(cuda::current_device(), 0);
}

TYPED_TEST(CudaTwoDevices, TheCallersDeviceStaysCurrent) {
  TypeParam here;
  ASSERT_EQ(this->run(here), KDT_OK) << kdt_last_error();
  cuda::set_device(1);
  {
    TypeParam there;
    const TestContext context(1, 1);
    const CudaStream stream;
    size_t size = 0;
    ASSERT_EQ(there.query(context, there.params(), &size), KDT_OK) << kdt_last_error();
    Guarded<uint8_t> workspace({static_cast<int64_t>(size)});
    cuda::set_device(0);
    const auto run = [&] {
      return there.run(context, there.params(), workspace.data(), size, static_cast<void*>(stream));
    };

    // Refused when the device has been switched already.
    const Pointer array = there.pointers()[0];
    void* const own = array.get();
    array.set(here.pointers()[0].get());
    this->expect_refused(there, run(), KDT_ERR_INVALID_ARGUMENT, "'" + array.name + "'");
    EXPECT_EQ(cuda::current_device(), 0);
    array.set(own);

    EXPECT_EQ(run(), KDT_OK) << kdt_last_error();
    EXPECT_EQ(cuda::current_device(), 0);
    cuda::synchronize(stream);
    const auto expected = here.memory(), got = there.memory();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i]->block(), expected[i]->block()) << "array " << i;
  }
}

// ---- Threads ---------------------------------------------------------------------------------------

DraftRows random_rows(std::mt19937* random, int32_t batch_size, int32_t depth, int32_t candidates, int32_t budget);

TEST(Cuda, OneContextServesManyThreadsOnStreamsOfTheirOwn) {
  constexpr int32_t kThreads = 6, kRounds = 8, kRows = 9, kVocabulary = 3001, kBudget = 40;
  struct Work {
    Logits logits;
    Draws draws;
    DraftRows rows;
    TopK best;
    Chosen largest;
    TreeValues tree;
  };
  std::mt19937 random(53);
  std::vector<Work> work(kThreads);
  for (Work& w : work) {
    const OnCpu on_cpu;
    const TestContext context;
    Floats values(size_t{kRows} * kVocabulary);
    for (float& v : values) v = static_cast<float>(random() % 4096) / 256.0f;
    w.logits = logits_of(values, kRows, KDT_BF16);
    w.rows = random_rows(&random, 5, 6, 8, kBudget);
    w.best = topk(context, w.logits, 20);
    w.largest = argmax(context, w.logits);
    TreeBuffers out(w.rows.batch_size, kBudget + 1);
    build(context, w.rows, &out);
    w.tree = out.values();
  }
  const TestContext context;
  std::vector<std::thread> threads;
  for (const Work& w : work) {
    threads.emplace_back([&context, &w] {
      for (int32_t i = 0; i < kRounds; ++i) {
        const TopK best = topk(context, w.logits, 20);
        EXPECT_TRUE(same_bits(best.token_ids, w.best.token_ids));
        EXPECT_TRUE(log_probs_near(best.log_probs, w.best.log_probs, 25.0));
        EXPECT_EQ(argmax(context, w.logits).tokens, w.largest.tokens);
        TreeBuffers out(w.rows.batch_size, kBudget + 1);
        build(context, w.rows, &out);
        out.expect(w.tree);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- Random trees ----------------------------------------------------------------------------------

// Rows with ties, zeros, faults and padding, and numbers that are out of range now and then.
DraftRows random_rows(std::mt19937* random, int32_t batch_size, int32_t depth, int32_t candidates, int32_t budget) {
  const auto below = [&](int32_t n) { return static_cast<int32_t>((*random)() % static_cast<uint32_t>(n)); };
  DraftRows r;
  r.batch_size = batch_size;
  r.depth = depth;
  r.num_candidates = candidates;
  r.vocab_size = below(2) == 0 ? 0 : 900;
  r.budgets = std::vector<int32_t>();
  r.max_depths = std::vector<int32_t>();
  const size_t k = static_cast<size_t>(candidates);
  std::vector<float> row(k);
  for (int32_t b = 0; b < batch_size; ++b) {
    const int32_t kind = below(4);  // of a request: quarters, bfloat16, any float32, zeros
    const float step = std::ldexp(1.0f, -below(6));
    for (int32_t d = 0; d < depth; ++d) {
      float log_prob = kind == 3 ? 0.0f : -step * static_cast<float>(below(1000)) / 500.0f;
      for (float& entry : row) {
        entry = kind == 0 ? std::ceil(log_prob * 4.0f) / 4.0f : log_prob;
        if (kind == 1) {
          uint32_t bits;
          std::memcpy(&bits, &entry, sizeof bits);
          bits &= 0xffff0000u;  // towards zero, so the order stays
          std::memcpy(&entry, &bits, sizeof entry);
        }
        if (kind != 3) log_prob -= step * static_cast<float>(below(1000)) / 1000.0f;
      }
      const size_t first = r.log_probs.size();
      r.log_probs.insert(r.log_probs.end(), row.begin(), row.end());
      for (size_t i = 0; i < k; ++i) r.token_ids.push_back(below(899));
      if (k == 0 || below(12) > 0) continue;
      const size_t at = first + static_cast<size_t>(below(candidates));
      const float faults[] = {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf, 0.5f, 0.0f, -1e30f};
      switch (below(3)) {
        case 0:
          r.log_probs[at] = faults[below(6)];
          break;
        case 1:
          r.token_ids[at] = below(2) == 0 ? -1 : 900;
          break;
        default:
          for (size_t i = at; i < r.log_probs.size(); ++i) r.log_probs[i] = -kInf, r.token_ids[i] = -1;
      }
    }
    r.root_tokens.push_back(below(1000));
    r.prefix_lens.push_back(below(50) == 0 ? INT32_MAX - below(100) : below(100000) - 10);
    r.budgets->push_back(below(3) == 0 ? below(budget + 3) - 1 : budget);
    r.max_depths->push_back(below(3) == 0 ? below(depth + 3) - 1 : depth);
  }
  if (below(4) == 0) r.num_live = std::vector<int32_t>{below(batch_size + 3) - 1};
  return r;
}

// build() makes each of them twice, see run_operation.
TEST(Cuda, TenThousandRandomTreesAreTheCpusBitForBit) {
  std::mt19937 random(20261130);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  const TestContext context;
  int64_t trees = 0, nodes = 0, full = 0;
  for (int32_t batch = 0; trees < 10000; ++batch) {
    const int32_t budgets[] = {below(1025), below(1025), below(130), below(20), KDT_MAX_BUDGET, KDT_MAX_BUDGET};
    const int32_t budget = budgets[below(6)];
    const bool wide = batch % 16 == 5;
    const int32_t batch_size = wide ? 1 + below(12) : 1 + below(budget > 300 ? 120 : 300);
    const int32_t depth = wide ? below(17) : below(65), candidates = wide ? 65 + below(960) : below(65);
    const DraftRows rows = random_rows(&random, batch_size, depth, candidates, budget);
    TreeValues expected;
    {
      const OnCpu on_cpu;
      TreeBuffers out(batch_size, budget + 1);
      build(TestContext(0), rows, &out);
      expected = out.values();
    }
    TreeBuffers out(batch_size, budget + 1, batch % 3);
    build(context, rows, &out, batch % 2);
    out.expect(expected);
    ASSERT_FALSE(HasFailure()) << "batch " << batch << ": B " << batch_size << ", D " << depth << ", K "
                               << candidates << ", budget " << budget;
    trees += batch_size;
    for (const int32_t count : expected.node_count) {
      nodes += count;
      full += count == KDT_MAX_BUDGET + 1;
    }
  }
  std::cout << trees << " trees of " << nodes << " nodes, " << full << " of them with budget 1024 used up\n";
  RecordProperty("trees", std::to_string(trees));
  RecordProperty("nodes", std::to_string(nodes));
  RecordProperty("trees_of_budget_1024", std::to_string(full));
  EXPECT_GE(full, 1000);
}

// ---- Offsets beyond 32 bits ------------------------------------------------------------------------

// 28,300 packed rows of 151,936 logits: R * V passes 2^31 and 2^32. All are zeros but for rows around these places.
TEST(Cuda, RowsTimesVocabularyMayPass32Bits) {
  constexpr int32_t kRows = 28300, kVocabulary = 151936, kBest = 8;
  constexpr size_t kRowBytes = size_t{kVocabulary} * 2;
  const Ints places = {0, 14133, 14134, 14135, 28267, 28268, 28269, kRows - 1};
  std::mt19937 random(59);
  Floats values(places.size() * kVocabulary);
  for (float& v : values) v = static_cast<float>(random() % 65536) / 4096.0f - 8.0f;
  const Logits few = logits_of(values, static_cast<int32_t>(places.size()), KDT_BF16);
  const SparseMemory memory(kRows * kRowBytes);
  cuda::set_bytes(memory.data(), 0, kRows * kRowBytes);
  for (size_t i = 0; i < places.size(); ++i) {
    memory.put(static_cast<size_t>(places[i]) * kRowBytes, &few.values[i * kRowBytes], kRowBytes);
  }
  Chosen largest;
  TopK best;
  {
    const OnCpu on_cpu;
    const TestContext context(0);
    largest = argmax(context, few);
    best = topk(context, few, kBest);
  }

  // A row of zeros has its first ids, equally likely.
  Ints expected_tokens(kRows, 0), expected_ids;
  const float log_prob = -std::log(static_cast<float>(kVocabulary));
  Floats expected_log_probs(size_t{kRows} * kBest, log_prob);
  for (int32_t r = 0; r < kRows; ++r) {
    for (int32_t i = 0; i < kBest; ++i) expected_ids.push_back(i);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const size_t row = static_cast<size_t>(places[i]);
    expected_tokens[row] = largest.tokens[i];
    std::copy_n(&best.token_ids[i * kBest], kBest, &expected_ids[row * kBest]);
    std::copy_n(&best.log_probs[i * kBest], kBest, &expected_log_probs[row * kBest]);
  }

  const TestContext context;
  const auto set = [&](auto* p) {
    p->num_rows = kRows;
    p->vocab_size = kVocabulary;
    p->logits_dtype = KDT_BF16;
    p->logits = memory.data();
  };
  Guarded<int32_t> tokens({kRows}), ids({kRows, kBest});
  Guarded<float> log_probs({kRows, kBest});
  auto a = sized<kdt_argmax_params>();
  set(&a);
  a.tokens = tokens.data();
  call(kdt_argmax_workspace_size, kdt_argmax, context, a, {}, {&tokens});
  EXPECT_TRUE(same_bits(tokens.values(), expected_tokens));
  auto t = sized<kdt_topk_logprobs_params>();
  set(&t);
  t.num_candidates = kBest;
  t.log_probs = log_probs.data();
  t.token_ids = ids.data();
  call(kdt_topk_logprobs_workspace_size, kdt_topk_logprobs, context, t, {}, {&log_probs, &ids});
  EXPECT_TRUE(same_bits(ids.values(), expected_ids));
  EXPECT_TRUE(log_probs_near(log_probs.values(), expected_log_probs, 25.0));
}

}  // namespace
