// The C ABI: what each call refuses, with which status and text, and that a refused call writes nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "backend.hpp"
#include "call.hpp"
#include "calls.hpp"
#include "guarded.hpp"
#include "kdtree/kdtr.h"
#include "kdtree/kdtree.h"

extern "C" int kdt_test_header_is_c(void);

namespace {

using namespace kdt_test;
using namespace kdt_test::calls;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// ---- What every operation refuses ------------------------------------------------------------------

template <class T>
class Operation : public CallTest {
 protected:
  // The last call gave `code`, named the function and the argument, and wrote nothing.
  void expect_refused(const Call& call, int32_t got, int32_t code, const std::string& argument,
                      const std::string& suffix = "") {
    EXPECT_STREQ(kdt_status_name(got), kdt_status_name(code)) << argument;
    const std::string text = kdt_last_error();
    EXPECT_EQ(text.rfind(call.function() + suffix + ": ", 0), 0u) << text;
    EXPECT_NE(text.find("'" + argument + "'"), std::string::npos) << argument << ": " << text;
    EXPECT_TRUE(call.untouched()) << argument;
    EXPECT_TRUE(workspace_->unchanged()) << argument;
  }

  // A refusal that does not depend on arrays: the workspace query gives it too.
  void expect_refused_by_both(Call& call, int32_t code, const std::string& argument) {
    expect_refused(call, run(call), code, argument);
    size_t size = 12345;
    expect_refused(call, call.query(context_, call.params(), &size), code, argument, "_workspace_size");
    EXPECT_EQ(size, 0u);
  }
};

TYPED_TEST_SUITE(Operation, Calls, CallNames);

// All else rests on this: the calls below differ from one that works in one thing each.
TYPED_TEST(Operation, ValidCallWorksAndWrites) {
  TypeParam call;
  EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
  EXPECT_FALSE(call.untouched());
  for (const GuardedBytes* memory : call.memory()) EXPECT_TRUE(memory->guards_intact());
}

TYPED_TEST(Operation, NullContextAndParams) {
  TypeParam call;
  this->expect_refused(call, call.run(nullptr, call.params(), nullptr, 0, nullptr), KDT_ERR_NULL_POINTER,
                       "context");
  this->expect_refused(call, this->run(call, nullptr), KDT_ERR_NULL_POINTER, "params");
  this->expect_refused(call, call.query(this->context_, call.params(), nullptr), KDT_ERR_NULL_POINTER, "size",
                       "_workspace_size");
  size_t size = 1;
  this->expect_refused(call, call.query(nullptr, call.params(), &size), KDT_ERR_NULL_POINTER, "context",
                       "_workspace_size");
  this->expect_refused(call, call.query(this->context_, nullptr, &size), KDT_ERR_NULL_POINTER, "params",
                       "_workspace_size");
}

TYPED_TEST(Operation, SizesOfStructs) {
  constexpr size_t kTail = 40, kNone = ~size_t{0};
  const auto struct_of = [](Call& call, size_t i) {
    return i == 0 ? Call::Struct{"params", call.params(), call.params_size(), {}} : call.structs()[i - 1];
  };
  // Runs with a copy of the struct that says `size` and has a tail of zeros, but for byte `set` of it.
  const auto run_with = [&](Call& call, const Call::Struct& s, size_t size, size_t set) {
    alignas(8) uint8_t bytes[512] = {};
    const uint8_t* original = static_cast<const uint8_t*>(s.address);
    std::copy(original, original + s.size, bytes);
    std::memcpy(bytes, &size, sizeof size);
    if (set != kNone) bytes[s.size + set] = 1;
    if (!s.set) return this->run(call, bytes);
    s.set(bytes);
    return this->run(call);
  };
  const size_t count = 1 + TypeParam().structs().size();
  for (size_t i = 0; i < count; ++i) {
    TypeParam call;
    const Call::Struct s = struct_of(call, i);
    for (const size_t size : {size_t{0}, size_t{8}, s.size - 1, size_t{1} << 40, ~size_t{0}}) {
      this->expect_refused(call, run_with(call, s, size, kNone), KDT_ERR_STRUCT, s.name);
    }
    for (const size_t set : {size_t{0}, size_t{1}, size_t{7}, kTail - 1}) {
      this->expect_refused(call, run_with(call, s, s.size + kTail, set), KDT_ERR_STRUCT, s.name);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    TypeParam newer, same;
    EXPECT_EQ(run_with(newer, struct_of(newer, i), struct_of(newer, i).size + kTail, kNone), KDT_OK)
        << kdt_last_error();
    EXPECT_EQ(run_with(same, struct_of(same, i), struct_of(same, i).size, 0), KDT_OK)
        << "bytes beyond struct_size are not looked at: " << kdt_last_error();
  }
}

// A wild size is refused before anything behind the struct is read: there is no memory there.
TYPED_TEST(Operation, WildSizesAreNotFollowed) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* memory = ::mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  uint8_t* const end = static_cast<uint8_t*>(memory) + page;
  ASSERT_EQ(::mprotect(end, page, PROT_NONE), 0);
  TypeParam call;
  for (const size_t size : {size_t{1} << 20, size_t{1} << 40, ~size_t{0}}) {
    std::memcpy(end - call.params_size(), call.params(), call.params_size());
    std::memcpy(end - call.params_size(), &size, sizeof size);
    this->expect_refused(call, this->run(call, end - call.params_size()), KDT_ERR_STRUCT, "params");
  }
  const size_t small = sizeof small;
  std::memcpy(end - sizeof small, &small, sizeof small);
  this->expect_refused(call, this->run(call, end - sizeof small), KDT_ERR_STRUCT, "params");
  ::munmap(memory, 2 * page);
}

TYPED_TEST(Operation, StructsThatAreNullOrMisaligned) {
  TypeParam call;
  for (const Call::Struct& s : call.structs()) {
    if (s.required) {
      s.set(nullptr);
      this->expect_refused_by_both(call, KDT_ERR_NULL_POINTER, s.name);
    }
    std::vector<uint64_t> memory(64);
    s.set(reinterpret_cast<uint8_t*>(memory.data()) + 4);
    this->expect_refused_by_both(call, KDT_ERR_ALIGNMENT, s.name);
    s.set(s.address);
  }
}

TYPED_TEST(Operation, ReservedFields) {
  TypeParam counted;
  for (size_t i = 0; i < counted.reserved().size(); ++i) {
    TypeParam call;
    const Reserved field = call.reserved()[i];
    field.set();
    this->expect_refused_by_both(call, KDT_ERR_UNSUPPORTED, field.name);
  }
}

TYPED_TEST(Operation, PointersThatAreNull) {
  TypeParam call;
  for (const Pointer& array : call.pointers()) {
    if (!array.required) continue;
    void* const old = array.get();
    array.set(nullptr);
    const std::string name = array.name.substr(0, array.name.rfind(".data"));  // data or layer_data
    this->expect_refused(call, this->run(call), KDT_ERR_NULL_POINTER, name);
    size_t size;
    EXPECT_EQ(call.query(this->context_, call.params(), &size), KDT_OK) << "a query reads no arrays";
    array.set(old);
  }
}

TYPED_TEST(Operation, OptionalPointersMayBeNull) {
  TypeParam call;
  for (const Pointer& array : call.pointers()) {
    if (!array.required && array.name.find("block_table") == std::string::npos) array.set(nullptr);
  }
  EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
}

TYPED_TEST(Operation, PointersThatAreMisaligned) {
  TypeParam call;
  for (const Pointer& array : call.pointers()) {
    char* const old = static_cast<char*>(array.get());
    for (size_t shift = 1; shift < array.alignment; ++shift) {
      array.set(old + shift);
      this->expect_refused(call, this->run(call), KDT_ERR_ALIGNMENT, array.name);
    }
    array.set(old);
  }
}

// Each output over each other array: from its start, at its last element, and by the output's own last element.
TYPED_TEST(Operation, OutputsThatOverlap) {
  TypeParam call;
  const auto arrays = call.pointers();
  for (const Pointer& output : arrays) {
    if (!output.output) continue;
    for (const Pointer& other : arrays) {
      if (other.name == output.name) continue;
      char* const old = static_cast<char*>(output.get());
      char* const begin = static_cast<char*>(other.get());
      const size_t step = std::max(output.alignment, other.element_size);
      const size_t last = (other.span - 1) / step * step, own_last = (output.span - 1) / step * step;
      for (char* place : {begin, begin + last, begin - own_last}) {
        output.set(place);
        const int32_t got = this->run(call);
        EXPECT_STREQ(kdt_status_name(got), "KDT_ERR_OVERLAP") << output.name << " over " << other.name;
        const std::string text = kdt_last_error();
        EXPECT_NE(text.find("'" + output.name + "'"), std::string::npos) << text;
        EXPECT_TRUE(call.untouched()) << output.name << " over " << other.name;
      }
      output.set(old);
    }
  }
}

// Inputs may share memory, and an output may begin where another array ends.
TYPED_TEST(Operation, NeighboursAndSharedInputsAreNoOverlap) {
  TypeParam call;
  Guarded<uint64_t> arena({1 << 14});
  char* next = reinterpret_cast<char*>(arena.data());
  for (const Pointer& array : call.pointers()) {
    next += (array.alignment - reinterpret_cast<uintptr_t>(next) % array.alignment) % array.alignment;
    if (on_cuda()) {
      cuda::copy(next, array.get(), array.span);
    } else {
      std::memcpy(next, array.get(), array.span);
    }
    array.set(next);
    next += array.span;
  }
  ASSERT_LT(next, reinterpret_cast<char*>(arena.data() + (1 << 14)));
  EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();

  TypeParam shared;
  const auto arrays = shared.pointers();
  const auto find = [&](auto&& is) { return *std::find_if(arrays.begin(), arrays.end(), is); };
  const Pointer num_live = find([](const Pointer& a) { return a.name == "num_live"; });
  num_live.set(find([](const Pointer& a) { return !a.output && a.name != "num_live"; }).get());
  const int32_t got = this->run(shared);
  EXPECT_EQ(got, KDT_OK) << kdt_last_error();
}

TYPED_TEST(Operation, StridesThatAreTooSmallOrTooLarge) {
  TypeParam call;
  for (const Stride& stride : call.strides()) {
    const int64_t old = *stride.field;
    for (const int64_t value : {stride.minimum - 1, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
      if (value == 0) continue;  // packed
      *stride.field = value;
      this->expect_refused_by_both(call, KDT_ERR_STRIDE, stride.name);
    }
    // Spans beyond 2^63 elements, and (but for bytes) beyond 2^63 bytes. The text names the stride or its array.
    for (const int64_t value : {kHuge, kHuge / 2}) {
      if (value < kHuge && stride.name == "mask_stride") continue;
      *stride.field = value;
      EXPECT_STREQ(kdt_status_name(this->run(call)), "KDT_ERR_STRIDE") << stride.name << " " << value;
      EXPECT_TRUE(call.untouched()) << stride.name;
    }
    *stride.field = old;
  }
}

TYPED_TEST(Operation, DimensionsThatAreNegativeOrAboveTheirLimits) {
  TypeParam call;
  for (const Dimension& dimension : call.dimensions()) {
    const int32_t old = *dimension.field;
    for (const int32_t value : {dimension.lowest - 1, -1, INT32_MIN}) {
      *dimension.field = value;
      this->expect_refused_by_both(call, KDT_ERR_SHAPE, dimension.name);
    }
    if (dimension.highest < INT32_MAX) {
      for (const int32_t value : {dimension.highest + 1, INT32_MAX}) {
        *dimension.field = value;
        this->expect_refused_by_both(call, KDT_ERR_LIMIT, dimension.name);
        EXPECT_NE(std::string(kdt_last_error()).find(std::to_string(dimension.highest)), std::string::npos)
            << "the text names the limit";
      }
    }
    *dimension.field = old;
  }
}

TYPED_TEST(Operation, StreamOnTheCpu) {
  KDT_SKIP_ON_CUDA("streams are what it wants");
  TypeParam call;
  int stream = 0;
  const int32_t got =
      call.run(this->context_, call.params(), this->workspace_->data(), this->workspace_->size(), &stream);
  this->expect_refused(call, got, KDT_ERR_INVALID_ARGUMENT, "stream");
}

TYPED_TEST(Operation, Workspace) {
  TypeParam call;
  size_t size = 0;
  ASSERT_EQ(call.query(this->context_, call.params(), &size), KDT_OK) << kdt_last_error();
  if (size > 0) {
    void* const workspace = this->workspace_->data();
    this->expect_refused(call, call.run(this->context_, call.params(), nullptr, size, nullptr), KDT_ERR_WORKSPACE,
                         "workspace");
    this->expect_refused(call, call.run(this->context_, call.params(), workspace, size - 1, nullptr),
                         KDT_ERR_WORKSPACE, "workspace");
    this->expect_refused(call, call.run(this->context_, call.params(), workspace, 0, nullptr), KDT_ERR_WORKSPACE,
                         "workspace");
  }
  // Over each array, by the last byte of either.
  const size_t given = std::max<size_t>(size, 1);
  for (const Pointer& array : call.pointers()) {
    char* const begin = static_cast<char*>(array.get());
    for (char* place : {begin, begin + array.span - 1, begin - (given - 1)}) {
      EXPECT_EQ(call.run(this->context_, call.params(), place, given, nullptr), KDT_ERR_OVERLAP) << array.name;
      EXPECT_NE(std::string(kdt_last_error()).find("'workspace'"), std::string::npos) << kdt_last_error();
      EXPECT_TRUE(call.untouched()) << array.name;
    }
  }
  Guarded<uint8_t> workspace({static_cast<int64_t>(size)});
  const int32_t got = run_operation(workspace, [&](void* stream) {
    return call.run(this->context_, call.params(), size > 0 ? workspace.data() : nullptr, size, stream);
  });
  EXPECT_EQ(got, KDT_OK) << kdt_last_error();
}

TYPED_TEST(Operation, NoRequestsIsANoOp) {
  TypeParam call;
  call.set_batch_size(0);
  EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
  for (const Pointer& array : call.pointers()) array.set(nullptr);
  EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
  EXPECT_EQ(call.run(this->context_, call.params(), nullptr, 0, nullptr), KDT_OK) << kdt_last_error();
  EXPECT_TRUE(call.untouched());
}

TYPED_TEST(Operation, WorkspaceSizeGrowsWithEachDimension) {
  TypeParam counted;
  const auto size_with = [&](size_t dimension, int32_t value) {
    TypeParam call;
    const Dimension d = call.dimensions()[dimension];
    *d.field = value;
    call.settle(d.name);
    for (const Stride& stride : call.strides()) *stride.field = 0;
    size_t size = 0;
    EXPECT_EQ(call.query(this->context_, call.params(), &size), KDT_OK)
        << d.name << " " << value << kdt_last_error();
    return size;
  };
  for (size_t i = 0; i < counted.dimensions().size(); ++i) {
    const Dimension d = counted.dimensions()[i];
    size_t previous = 0;
    if (d.name.rfind("destination", 0) == 0 || d.name == "cache.num_layers" || d.name == "cache.row_width") {
      if constexpr (std::is_same_v<TypeParam, KvCompactToCall>) continue;  // both caches must agree
    }
    for (int32_t value = d.lowest; value <= std::min(d.highest, 1025); value += 1 + value / 3) {
      const size_t size = size_with(i, value);
      EXPECT_GE(size, previous) << d.name << " " << value;
      previous = size;
    }
    if (d.highest < INT32_MAX) {
      EXPECT_GE(size_with(i, d.highest), previous);
    }
  }
}

// ---- What single operations refuse -----------------------------------------------------------------

class Calling : public CallTest {
 protected:
  void expect_refused(Call& call, int32_t code, const std::string& argument) {
    EXPECT_STREQ(kdt_status_name(run(call)), kdt_status_name(code));
    EXPECT_NE(std::string(kdt_last_error()).find("'" + argument + "'"), std::string::npos) << kdt_last_error();
    EXPECT_TRUE(call.untouched());
  }
};

// The pointers to the layers of a call's cache.
std::vector<void*> layers_of(KvCompactCall& call) {
  return {call.rows.data(), call.rows.data() + KvCompactCall::kLayer};
}

TEST_F(Calling, TreeBuildWantsOneSlotMoreThanTheBudget) {
  for (const int32_t budget : {kN - 2, kN, 0, KDT_MAX_BUDGET}) {
    TreeBuildCall call;
    call.p.budget = budget;
    expect_refused(call, KDT_ERR_SHAPE, "tree.num_slots");
  }
}

TEST_F(Calling, TreeBuildVocabSize) {
  TreeBuildCall call;
  call.p.vocab_size = -1;
  expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "vocab_size");
  call.p.vocab_size = INT32_MAX;
  EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
}

// No rows or no candidates: the arrays of candidates are empty, and may be NULL with any stride.
TEST_F(Calling, TreeBuildWithoutCandidatesReadsNone) {
  for (const bool no_rows : {true, false}) {
    for (const int64_t stride : {0, 7}) {
      TreeBuildCall call;
      (no_rows ? call.p.depth : call.p.num_candidates) = 0;
      call.p.log_probs = nullptr;
      call.p.token_ids = nullptr;
      call.p.log_probs_row_stride = call.p.token_ids_row_stride = 0;
      call.p.log_probs_stride = call.p.token_ids_stride = stride;
      if (no_rows) call.p.log_probs_row_stride = call.p.token_ids_row_stride = stride;
      EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
      EXPECT_EQ(call.out.node_count.values(), (std::vector<int32_t>{1, 1}));
    }
  }
}

TEST_F(Calling, KvCompactIgnoresTheLayerStrideOfLayerPointers) {
  for (const int64_t stride : {int64_t{-1}, int64_t{1}, kHuge}) {
    KvCompactCall call;
    Guarded<void*> layers({KvCompactCall::kLayers}, layers_of(call));
    call.cache.data = nullptr;
    call.cache.layer_data = layers.data();
    call.cache.layer_stride = stride;
    EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
  }
}

TEST_F(Calling, KvCompactRefusesRowsThatShareElements) {
  for (const auto& [field, name] : {std::pair{&kdt_kv_cache::layer_stride, "cache.layer_stride"},
                                    std::pair{&kdt_kv_cache::page_stride, "cache.page_stride"}}) {
    KvCompactCall call;
    call.cache.*field = KvCompactCall::kRow + 1;  // steps into the next row
    EXPECT_EQ(run(call), KDT_ERR_STRIDE) << name;
    EXPECT_TRUE(call.untouched());
  }
}

TEST_F(Calling, KvCompactElementSize) {
  for (const int32_t size : {0, -1, 65, INT32_MIN, INT32_MAX}) {
    KvCompactCall call;
    call.cache.element_size = size;
    expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "cache.element_size");
    KvCompactToCall to;
    to.destination.element_size = size;
    expect_refused(to, KDT_ERR_INVALID_ARGUMENT, "destination.element_size");
  }
}

TEST_F(Calling, KvCompactWantsTheSameRowsInBothCaches) {
  for (int32_t kdt_kv_cache::* field :
       {&kdt_kv_cache::num_layers, &kdt_kv_cache::row_width, &kdt_kv_cache::element_size}) {
    KvCompactToCall call;
    call.destination.*field -= 1;
    EXPECT_STREQ(kdt_status_name(run(call)), "KDT_ERR_SHAPE");
    EXPECT_NE(std::string(kdt_last_error()).find("'destination."), std::string::npos);
    EXPECT_TRUE(call.untouched());
  }
}

TEST_F(Calling, KvCompactWantsEitherDataOrLayerData) {
  KvCompactCall call;
  Guarded<void*> layers({KvCompactCall::kLayers}, layers_of(call));
  call.cache.layer_data = layers.data();
  expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "cache");
  call.cache.data = nullptr;
  call.cache.layer_data = nullptr;
  expect_refused(call, KDT_ERR_NULL_POINTER, "cache");
  call.cache.layer_data = layers.data();
  if (!on_cuda()) {  // there the pointers are in device memory, which no call reads on the host
    layers.fill({call.rows.data(), nullptr});
    expect_refused(call, KDT_ERR_NULL_POINTER, "cache.layer_data");
    layers.fill({call.rows.data(), call.rows.data()});  // one layer over another
    expect_refused(call, KDT_ERR_OVERLAP, "cache.layer_data");
    layers.fill(layers_of(call));
  }
  EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
}

TEST_F(Calling, KvCompactContiguousWantsAPageForEachRequest) {
  KvCompactCall call;
  call.cache.block_table = nullptr;
  call.cache.num_pages = kB - 1;
  expect_refused(call, KDT_ERR_SHAPE, "cache.num_pages");
  call.cache.num_pages = kB;
  EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
}

// ---- Vocabulary rows and attention -----------------------------------------------------------------

template <class T>
class CallingOnLogits : public Calling {};
using CallsOnLogits = testing::Types<TopkLogprobsCall, TopkLogprobsRawCall, ArgmaxCall, SampleCall>;
TYPED_TEST_SUITE(CallingOnLogits, CallsOnLogits, CallNames);

TYPED_TEST(CallingOnLogits, Dtypes) {
  for (const int32_t dtype : {0, 1, 5, 6, -1, INT32_MIN, INT32_MAX}) {
    TypeParam call;
    call.p.logits_dtype = dtype;
    this->expect_refused(call, KDT_ERR_UNSUPPORTED, "logits_dtype");
  }
}

TYPED_TEST(CallingOnLogits, IdsStayBelow32Bits) {
  const int32_t last = INT32_MAX - kV + 1;  // so that the last id is 2^31 - 1
  for (const int32_t offset : {-1, INT32_MIN, last + 1, INT32_MAX}) {
    TypeParam call;
    call.p.id_offset = offset;
    this->expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "id_offset");
  }
  TypeParam call;
  call.p.id_offset = last;
  EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
}

TYPED_TEST(CallingOnLogits, RowsPerRequestDividesTheRows) {
  for (const int32_t rows : {-1, INT32_MIN, 3, INT32_MAX}) {
    TypeParam call;
    call.p.rows_per_request = rows;
    this->expect_refused(call, KDT_ERR_SHAPE, "rows_per_request");
  }
  for (const int32_t rows : {0, 1, kB}) {
    TypeParam call;
    call.p.rows_per_request = rows;
    EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
  }
}

// Rows without logits are rows all the same: each is invalid, but for a raw shard's.
TYPED_TEST(CallingOnLogits, AnEmptyVocabularyReadsNothing) {
  for (const int64_t stride : {0, 7}) {
    TypeParam call;
    call.p.vocab_size = 0;
    call.p.logits = nullptr;
    call.p.logits_stride = stride;
    EXPECT_EQ(this->run(call), KDT_OK) << kdt_last_error();
    const int32_t expected = std::is_same_v<TypeParam, TopkLogprobsRawCall> ? 0 : KDT_STATUS_ROW_INVALID;
    EXPECT_EQ(call.status.values(), (std::vector<int32_t>{expected, expected}));
  }
}

TEST_F(Calling, TopkLogprobsRaw) {
  for (const int32_t raw : {2, -1, INT32_MAX}) {
    TopkLogprobsCall call;
    call.p.raw = raw;
    expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "raw");
  }
}

TEST_F(Calling, TopkWithoutCandidatesWritesTheRest) {
  TopkLogprobsCall call;
  call.p.num_candidates = 0;
  call.p.log_probs = nullptr;
  call.p.token_ids = nullptr;
  EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
  EXPECT_EQ(call.status.values(), (std::vector<int32_t>{0, 0}));
  EXPECT_FALSE(call.lse.unchanged());
  TopkMergeCall merge;
  merge.p.num_candidates = 0;
  merge.p.logits = nullptr;
  merge.p.shard_token_ids = nullptr;
  merge.p.log_probs = nullptr;
  merge.p.token_ids = nullptr;
  EXPECT_EQ(run(merge), KDT_OK) << kdt_last_error();
  EXPECT_EQ(merge.status.values(), (std::vector<int32_t>{0, 0}));
  EXPECT_FALSE(merge.lse.unchanged());
}

TEST_F(Calling, RowsPerRequestOfMerges) {
  for (const int32_t rows : {-1, INT32_MIN, 3, INT32_MAX}) {
    TopkMergeCall topk;
    topk.p.rows_per_request = rows;
    expect_refused(topk, KDT_ERR_SHAPE, "rows_per_request");
    MergeAttnStatesCall states;
    states.p.rows_per_request = rows;
    expect_refused(states, KDT_ERR_SHAPE, "rows_per_request");
  }
}

TEST_F(Calling, VerifyAttnDims) {
  for (const int32_t dim : {0, -1, 1, 575, 577, 512, INT32_MAX}) {
    VerifyAttnCall call;
    call.p.qk_dim = dim;
    expect_refused(call, KDT_ERR_UNSUPPORTED, "qk_dim");
  }
  for (const int32_t dim : {0, -1, 1, 511, 513, 576, INT32_MAX}) {
    VerifyAttnCall call;
    call.p.v_dim = dim;
    expect_refused(call, KDT_ERR_UNSUPPORTED, "v_dim");
  }
}

// q and cache of one dtype, out in that or in float32. All nine mixtures of dtypes, and numbers that are none.
TEST_F(Calling, VerifyAttnDtypes) {
  for (const int32_t dtype : {0, 1, 5, -1, INT32_MAX}) {
    VerifyAttnCall call;
    call.p.q_dtype = dtype;
    expect_refused(call, KDT_ERR_UNSUPPORTED, "q_dtype");
  }
  for (const int32_t dtype : {0, int32_t{KDT_F32}, int32_t{KDT_F16}, 5, -1}) {
    VerifyAttnCall call;
    call.p.kv_dtype = dtype;
    expect_refused(call, KDT_ERR_UNSUPPORTED, "kv_dtype");
  }
  for (const int32_t dtype : {0, int32_t{KDT_F16}, 5, -1}) {
    VerifyAttnCall call;
    call.p.out_dtype = dtype;
    expect_refused(call, KDT_ERR_UNSUPPORTED, "out_dtype");
  }
  for (const int32_t size : {1, 4}) {
    VerifyAttnCall call;
    call.cache.element_size = size;
    expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "cache.element_size");
  }
}

TEST_F(Calling, VerifyAttnNumbers) {
  for (const float scale : {HUGE_VALF, -HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
    VerifyAttnCall call;
    call.p.scale = scale;
    expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "scale");
  }
  for (const int32_t base : {2, -1, INT32_MAX}) {
    VerifyAttnCall call;
    call.p.lse_base = base;
    expect_refused(call, KDT_ERR_INVALID_ARGUMENT, "lse_base");
    MergeAttnStatesCall merge;
    merge.p.lse_base = base;
    expect_refused(merge, KDT_ERR_INVALID_ARGUMENT, "lse_base");
  }
}

TEST_F(Calling, VerifyAttnCache) {
  for (const int32_t size : {3, 5, 48, 255, 257, 512, 1 << 30}) {
    VerifyAttnCall call;
    call.cache.page_size = size;
    call.cache.row_stride = call.cache.page_stride = 0;
    expect_refused(call, KDT_ERR_LIMIT, "cache.page_size");
  }
  for (const int32_t size : {0, -1, INT32_MIN}) {
    VerifyAttnCall call;
    call.cache.page_size = size;
    expect_refused(call, KDT_ERR_SHAPE, "cache.page_size");
  }
  for (const int32_t layers : {0, -1, 2}) {
    VerifyAttnCall call;
    call.cache.num_layers = layers;
    expect_refused(call, KDT_ERR_SHAPE, "cache.num_layers");
  }
  for (const int32_t width : {0, -1, 575}) {
    VerifyAttnCall call;
    call.cache.row_width = width;
    expect_refused(call, KDT_ERR_SHAPE, "cache.row_width");
  }
  VerifyAttnCall call;
  void* layers[] = {call.rows.data()};
  call.cache.data = nullptr;
  call.cache.layer_data = layers;
  expect_refused(call, KDT_ERR_UNSUPPORTED, "cache.layer_data");
  call.cache.layer_data = nullptr;
  expect_refused(call, KDT_ERR_NULL_POINTER, "cache");
}

TEST_F(Calling, VerifyAttnContiguousCacheMayHaveAnyRows) {
  for (const int32_t rows : {0, 1, 2, 3}) {
    VerifyAttnCall call;
    call.cache.block_table = nullptr;
    call.cache.num_pages = kB;
    call.cache.page_size = rows;
    call.cache.page_stride = VerifyAttnCall::kPage * 2;
    EXPECT_EQ(run(call), KDT_OK) << kdt_last_error();
  }
  VerifyAttnCall call;
  call.cache.block_table = nullptr;
  call.cache.num_pages = kB - 1;
  expect_refused(call, KDT_ERR_SHAPE, "cache.num_pages");
}

TEST_F(Calling, VerifyAttnWantsTheTreesBatchAndNoMoreQueriesThanSlots) {
  VerifyAttnCall call;
  for (const int32_t b : {kB - 1, kB + 1}) {
    call.tree.batch_size = b;
    expect_refused(call, KDT_ERR_SHAPE, "tree.batch_size");
  }
  call.tree.batch_size = kB;
  call.tree.num_slots = VerifyAttnCall::kQ - 1;
  call.tree.visibility_stride = 0;
  expect_refused(call, KDT_ERR_SHAPE, "num_queries");
}

TEST_F(Calling, MergeAttnStatesDtypes) {
  for (const int32_t dtype : {0, 1, 5, -1, INT32_MAX}) {
    for (const auto& [field, name] : {std::pair{&kdt_merge_attn_states_params::a_dtype, "a_dtype"},
                                      std::pair{&kdt_merge_attn_states_params::b_dtype, "b_dtype"},
                                      std::pair{&kdt_merge_attn_states_params::out_dtype, "out_dtype"}}) {
      MergeAttnStatesCall call;
      call.p.*field = dtype;
      expect_refused(call, KDT_ERR_UNSUPPORTED, name);
    }
  }
}

// In place over b: the same address, strides and dtype. Whatever differs makes it an overlap like any other.
TEST_F(Calling, MergeAttnStatesInPlace) {
  struct InPlace : MergeAttnStatesCall {
    InPlace() {
      p.out = b.data();
      p.out_row_stride = p.b_row_stride;
      p.out_head_stride = p.b_head_stride;
      p.lse = b_lse.data();
      p.lse_row_stride = p.b_lse_row_stride;
      p.lse_head_stride = p.b_lse_head_stride;
    }
  };
  InPlace both;
  EXPECT_EQ(run(both), KDT_OK) << kdt_last_error();
  EXPECT_FALSE(both.b.unchanged());
  EXPECT_TRUE(both.b.guards_intact());
  EXPECT_TRUE(both.out.unchanged());
  EXPECT_EQ(both.b.values()[0], 1.5f);

  const auto refused = [&](const char* argument, auto change) {
    InPlace call;
    change(call.p);
    expect_refused(call, KDT_ERR_OVERLAP, argument);
  };
  using P = kdt_merge_attn_states_params;
  refused("out", [](P& p) { p.out = static_cast<float*>(p.out) + 1; });
  refused("out", [](P& p) { p.out = static_cast<float*>(p.out) - 1; });
  refused("out", [](P& p) { ++p.out_row_stride; });
  refused("out", [](P& p) { ++p.out_head_stride; });
  refused("out", [](P& p) { p.out_dtype = KDT_BF16; });
  refused("lse", [](P& p) { ++p.lse; });
  refused("lse", [](P& p) { --p.lse; });
  refused("lse", [](P& p) { ++p.lse_row_stride; });
  refused("lse", [](P& p) { ++p.lse_head_stride; });
  refused("lse", [](P& p) { p.lse = static_cast<float*>(p.out); });
  refused("out", [](P& p) { p.a = p.b, p.a_dtype = KDT_F32; });  // over a side that is a in another layout
  refused("out", [](P& p) { p.num_live = static_cast<const int32_t*>(p.out); });
}

// ---- Contexts, devices, errors ---------------------------------------------------------------------

TEST(Abi, HeaderIsC) { EXPECT_EQ(kdt_test_header_is_c(), 0) << "line of header_is_c.c; " << kdt_last_error(); }

TEST(Abi, StatusNames) {
#define NAME(status) \
  {                  \
    status, #status  \
  }
  const std::pair<int32_t, const char*> names[] = {
      NAME(KDT_OK),
      NAME(KDT_ERR_INVALID_ARGUMENT),
      NAME(KDT_ERR_NULL_POINTER),
      NAME(KDT_ERR_SHAPE),
      NAME(KDT_ERR_LIMIT),
      NAME(KDT_ERR_STRIDE),
      NAME(KDT_ERR_ALIGNMENT),
      NAME(KDT_ERR_OVERLAP),
      NAME(KDT_ERR_WORKSPACE),
      NAME(KDT_ERR_STRUCT),
      NAME(KDT_ERR_UNSUPPORTED),
      NAME(KDT_ERR_NO_BACKEND),
      NAME(KDT_ERR_NO_DEVICE),
      NAME(KDT_ERR_OUT_OF_MEMORY),
      NAME(KDT_ERR_CUDA),
      NAME(KDT_ERR_INTERNAL),
      NAME(KDTR_ERR_IO),
      NAME(KDTR_ERR_NOT_FOUND),
      NAME(KDTR_ERR_TOO_SHORT),
      NAME(KDTR_ERR_MAGIC),
      NAME(KDTR_ERR_VERSION),
      NAME(KDTR_ERR_RESERVED),
      NAME(KDTR_ERR_FILE_SIZE),
      NAME(KDTR_ERR_CAP),
      NAME(KDTR_ERR_INDEX_CHECKSUM),
      NAME(KDTR_ERR_INDEX),
      NAME(KDTR_ERR_NAME),
      NAME(KDTR_ERR_DTYPE),
      NAME(KDTR_ERR_SHAPE),
      NAME(KDTR_ERR_SIZE),
      NAME(KDTR_ERR_OFFSET),
      NAME(KDTR_ERR_PADDING),
      NAME(KDTR_ERR_DATA_CHECKSUM),
      NAME(KDTR_ERR_VALUE),
  };
#undef NAME
  for (int32_t status = -10; status < 700; ++status) {
    const auto* found =
        std::find_if(std::begin(names), std::end(names), [&](auto& n) { return n.first == status; });
    EXPECT_STREQ(kdt_status_name(status), found != std::end(names) ? found->second : "unknown status") << status;
  }
  EXPECT_STREQ(kdt_status_name(INT32_MIN), "unknown status");
  EXPECT_STREQ(kdt_status_name(INT32_MAX), "unknown status");
}

TEST(Abi, VersionsAndBuildInfo) {
  EXPECT_EQ(kdt_abi_version(), KDT_ABI_MAJOR * 1000 + KDT_ABI_MINOR);
  EXPECT_STREQ(kdt_version(), KDT_VERSION);
  const std::string info = kdt_build_info();
  EXPECT_EQ(info.front(), '{');
  EXPECT_EQ(info.back(), '}');
  for (const char* key : {"\"version\": \"" KDT_VERSION "\"", "\"abi\": ", "\"compiler\": ", "\"build_type\": ",
                          "\"cuda\": ", "\"cuda_architectures\": "}) {
    EXPECT_NE(info.find(key), std::string::npos) << key;
  }
}

TEST(Abi, ContextDefaults) {
  kdt_context* context = nullptr;
  ASSERT_EQ(kdt_context_create(nullptr, &context), KDT_OK) << kdt_last_error();
  auto got = sized<kdt_context_params>();
  got.backend = got.device = got.reserved0 = 99;
  ASSERT_EQ(kdt_context_get(context, &got), KDT_OK) << kdt_last_error();
  kdt_context_destroy(context);
  EXPECT_EQ(got.backend, KDT_BACKEND_CPU);
  EXPECT_EQ(got.device, 0);
  EXPECT_EQ(got.reserved0, 0);
  EXPECT_GE(got.num_threads, 1);
  auto info = sized<kdt_device_info>();
  ASSERT_EQ(kdt_device_query(KDT_BACKEND_CPU, 0, &info), KDT_OK);
  EXPECT_EQ(got.num_threads, info.multiprocessors) << "as many threads as this process may run on";
}

TEST(Abi, ContextKeepsItsThreads) {
  for (const int32_t threads : {1, 3, 1024}) {
    const TestContext context(threads);
    auto got = sized<kdt_context_params>();
    ASSERT_EQ(kdt_context_get(context, &got), KDT_OK);
    EXPECT_EQ(got.num_threads, threads);
  }
}

TEST(Abi, ContextCreateRefuses) {
  const auto refused = [](int32_t code, const char* argument, auto change) {
    auto params = sized<kdt_context_params>();
    change(params);
    kdt_context* context = reinterpret_cast<kdt_context*>(8);
    EXPECT_STREQ(kdt_status_name(kdt_context_create(&params, &context)), kdt_status_name(code)) << argument;
    EXPECT_EQ(context, nullptr);
    const std::string text = kdt_last_error();
    EXPECT_EQ(text.rfind("kdt_context_create: ", 0), 0u) << text;
    EXPECT_NE(text.find(argument), std::string::npos) << text;
  };
  for (const int32_t backend : {-1, 2, INT32_MIN, INT32_MAX}) {
    refused(KDT_ERR_INVALID_ARGUMENT, "'backend'", [=](kdt_context_params& p) { p.backend = backend; });
  }
  for (const int32_t device : {-1, 1, INT32_MAX}) {
    refused(KDT_ERR_INVALID_ARGUMENT, "'device'", [=](kdt_context_params& p) { p.device = device; });
  }
  for (const int32_t threads : {-1, 1025, INT32_MIN, INT32_MAX}) {
    refused(KDT_ERR_INVALID_ARGUMENT, "'num_threads'", [=](kdt_context_params& p) { p.num_threads = threads; });
  }
  refused(KDT_ERR_UNSUPPORTED, "'reserved0'", [](kdt_context_params& p) { p.reserved0 = 1; });
  for (const size_t size : {size_t{0}, sizeof(kdt_context_params) - 1, size_t{1} << 40}) {
    refused(KDT_ERR_STRUCT, "'params'", [=](kdt_context_params& p) { p.struct_size = size; });
  }
  EXPECT_EQ(kdt_context_create(nullptr, nullptr), KDT_ERR_NULL_POINTER);
  kdt_context_destroy(nullptr);
}

TEST(Abi, ContextOfANewerHeader) {
  struct Newer {
    kdt_context_params known;
    int64_t unknown;
  } params = {};
  params.known.struct_size = sizeof params;
  params.known.num_threads = 2;
  kdt_context* context = nullptr;
  ASSERT_EQ(kdt_context_create(&params.known, &context), KDT_OK) << kdt_last_error();
  params.known.num_threads = 0;
  EXPECT_EQ(kdt_context_get(context, &params.known), KDT_OK) << kdt_last_error();
  EXPECT_EQ(params.known.num_threads, 2);
  EXPECT_EQ(params.known.struct_size, sizeof params);
  kdt_context_destroy(context);
  params.unknown = 1;
  EXPECT_EQ(kdt_context_create(&params.known, &context), KDT_ERR_STRUCT);
  EXPECT_EQ(context, nullptr);
}

TEST(Abi, ContextGetRefuses) {
  const TestContext context;
  auto params = sized<kdt_context_params>();
  EXPECT_EQ(kdt_context_get(nullptr, &params), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdt_context_get(context, nullptr), KDT_ERR_NULL_POINTER);
  params.struct_size = 4;
  params.num_threads = 77;
  EXPECT_EQ(kdt_context_get(context, &params), KDT_ERR_STRUCT);
  EXPECT_EQ(params.num_threads, 77);
}

TEST(Abi, CpuDevice) {
  int32_t count = -1;
  EXPECT_EQ(kdt_device_count(KDT_BACKEND_CPU, &count), KDT_OK);
  EXPECT_EQ(count, 1);
  auto info = sized<kdt_device_info>();
  std::memset(info.name, 'x', sizeof info.name);
  ASSERT_EQ(kdt_device_query(KDT_BACKEND_CPU, 0, &info), KDT_OK) << kdt_last_error();
  EXPECT_GT(strnlen(info.name, sizeof info.name), 0u);
  EXPECT_LT(strnlen(info.name, sizeof info.name), sizeof info.name);
  EXPECT_EQ(info.struct_size, sizeof info);
  EXPECT_EQ(info.memory_bytes, 0);
  EXPECT_EQ(info.compute_capability, 0);
  EXPECT_EQ(info.kernel_architecture, 0);
  EXPECT_GE(info.multiprocessors, 1);
  EXPECT_EQ(info.max_shared_memory_bytes, 0);
}

TEST(Abi, DeviceCallsRefuse) {
  int32_t count = -1;
  EXPECT_EQ(kdt_device_count(KDT_BACKEND_CPU, nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdt_device_count(2, &count), KDT_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(count, 0);
  auto info = sized<kdt_device_info>();
  info.multiprocessors = 77;
  EXPECT_EQ(kdt_device_query(KDT_BACKEND_CPU, 0, nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdt_device_query(-1, 0, &info), KDT_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(kdt_device_query(KDT_BACKEND_CPU, 1, &info), KDT_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(kdt_device_query(KDT_BACKEND_CPU, -1, &info), KDT_ERR_INVALID_ARGUMENT);
  info.struct_size -= 8;
  EXPECT_EQ(kdt_device_query(KDT_BACKEND_CPU, 0, &info), KDT_ERR_STRUCT);
  EXPECT_EQ(info.multiprocessors, 77) << "a call that failed has written nothing";
}

// With or without a GPU: either CUDA works, or every call says why it does not, in the same words.
TEST(Context, KernelOfVerifyAttnIsChosenByTheEnvironment) {
  const char* before = std::getenv("KDTREE_VERIFY_ATTN");
  const std::string restored = before != nullptr ? before : "";  // empty is like unset
  kdt_context* context = nullptr;
  for (const char* name : {"auto", "plain", "mma", "wgmma", ""}) {
    ASSERT_EQ(setenv("KDTREE_VERIFY_ATTN", name, 1), 0);
    ASSERT_EQ(kdt_context_create(nullptr, &context), KDT_OK) << kdt_last_error();
    kdt_context_destroy(context);
  }
  ASSERT_EQ(setenv("KDTREE_VERIFY_ATTN", "fast", 1), 0);
  context = reinterpret_cast<kdt_context*>(8);
  EXPECT_EQ(kdt_context_create(nullptr, &context), KDT_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(context, nullptr);
  EXPECT_STREQ(kdt_last_error(),
               "kdt_context_create: environment variable KDTREE_VERIFY_ATTN: expected auto, plain, mma or wgmma, "
               "got \"fast\"");
  ASSERT_EQ(setenv("KDTREE_VERIFY_ATTN", restored.c_str(), 1), 0);
}

TEST(Context, InstructionsOfTheCpuAreChosenByTheEnvironment) {
  const char* before = std::getenv("KDTREE_CPU_ISA");
  const std::string restored = before != nullptr ? before : "";
  kdt_context* context = nullptr;
  for (const std::string name : {"scalar", "avx2", "avx512", "auto", ""}) {
    ASSERT_EQ(setenv("KDTREE_CPU_ISA", name.c_str(), 1), 0);
    auto info = sized<kdt_device_info>();
    const int32_t status = kdt_context_create(nullptr, &context);
    EXPECT_EQ(kdt_device_query(KDT_BACKEND_CPU, 0, &info), status) << name;
    if (status == KDT_OK) {
      const std::string shown = name.empty() || name == "auto" ? "(" : "(" + name + ")";
      EXPECT_NE(std::string(info.name).find(shown), std::string::npos) << info.name;
    } else {  // what every processor has cannot be missing
      EXPECT_EQ(status, KDT_ERR_INVALID_ARGUMENT);
      EXPECT_EQ(name.find("avx"), 0u);
      EXPECT_NE(std::string(kdt_last_error()).find("KDTREE_CPU_ISA: this processor has no " + name),
                std::string::npos);
    }
    kdt_context_destroy(context);
  }
  ASSERT_EQ(setenv("KDTREE_CPU_ISA", "sse", 1), 0);
  context = reinterpret_cast<kdt_context*>(8);
  EXPECT_EQ(kdt_context_create(nullptr, &context), KDT_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(context, nullptr);
  EXPECT_STREQ(
      kdt_last_error(),
      "kdt_context_create: environment variable KDTREE_CPU_ISA: expected auto, scalar, avx2 or avx512, got "
      "\"sse\"");
  ASSERT_EQ(setenv("KDTREE_CPU_ISA", restored.c_str(), 1), 0);
}

TEST(Abi, CudaDeviceOrAReason) {
  const bool built = std::string(kdt_build_info()).find("\"cuda\": true") != std::string::npos;
  int32_t count = -1;
  const int32_t status = kdt_device_count(KDT_BACKEND_CUDA, &count);
  auto params = sized<kdt_context_params>();
  params.backend = KDT_BACKEND_CUDA;
  kdt_context* context = reinterpret_cast<kdt_context*>(8);
  auto info = sized<kdt_device_info>();
  if (status == KDT_OK) {
    EXPECT_TRUE(built);
    ASSERT_GT(count, 0);
    ASSERT_EQ(kdt_device_query(KDT_BACKEND_CUDA, 0, &info), KDT_OK) << kdt_last_error();
    EXPECT_GE(info.compute_capability, 80);
    EXPECT_GE(info.kernel_architecture, 80);
    EXPECT_GT(info.memory_bytes, 0);
    EXPECT_GT(info.multiprocessors, 0);
    EXPECT_GT(info.max_shared_memory_bytes, 0);
    EXPECT_EQ(kdt_device_query(KDT_BACKEND_CUDA, count, &info), KDT_ERR_INVALID_ARGUMENT);
    ASSERT_EQ(kdt_context_create(&params, &context), KDT_OK) << kdt_last_error();
    kdt_context_destroy(context);
    return;
  }
  EXPECT_EQ(status, built ? KDT_ERR_NO_DEVICE : KDT_ERR_NO_BACKEND) << kdt_last_error();
  EXPECT_EQ(count, 0);
  EXPECT_EQ(std::string(kdt_last_error()).rfind("kdt_device_count: ", 0), 0u) << kdt_last_error();
  EXPECT_GT(std::strlen(kdt_last_error()), std::strlen("kdt_device_count: "));
  EXPECT_EQ(kdt_device_query(KDT_BACKEND_CUDA, 0, &info), status);
  EXPECT_EQ(std::string(kdt_last_error()).rfind("kdt_device_query: ", 0), 0u) << kdt_last_error();
  EXPECT_EQ(kdt_context_create(&params, &context), status);
  EXPECT_EQ(std::string(kdt_last_error()).rfind("kdt_context_create: ", 0), 0u) << kdt_last_error();
  EXPECT_EQ(context, nullptr);
}

TEST(Abi, ErrorTextBelongsToItsThread) {
  int32_t count = 0;
  ASSERT_EQ(kdt_device_count(-1, &count), KDT_ERR_INVALID_ARGUMENT);
  const std::string mine = kdt_last_error();
  EXPECT_NE(mine.find("-1"), std::string::npos) << "the text has the value that came: " << mine;
  std::string before = "?", after;
  std::thread([&] {
    before = kdt_last_error();
    kdt_context_create(nullptr, nullptr);
    after = kdt_last_error();
  }).join();
  EXPECT_EQ(before, "") << "nothing has failed yet in a new thread";
  EXPECT_EQ(after.rfind("kdt_context_create: ", 0), 0u) << after;
  EXPECT_EQ(kdt_last_error(), mine);
  ASSERT_EQ(kdt_device_count(KDT_BACKEND_CPU, &count), KDT_OK);
  EXPECT_EQ(kdt_last_error(), mine) << "a call that works leaves the text";
}

}  // namespace
