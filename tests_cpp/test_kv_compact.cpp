// kv_compact against the reference, against a copy of rows made one by one, and what it must not write.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "backend.hpp"
#include "call.hpp"
#include "fixture.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "sparse_memory.hpp"

namespace {

using namespace kdt_test;
using Ints = std::vector<int32_t>;
using Bytes = std::vector<uint8_t>;

// How the layers, pages and rows of a cache lie in memory. Elements between rows, pages and layers.
struct Layout {
  int64_t row_gap = 0, page_gap = 0, layer_gap = 0;
  bool layer_pointers = false;
  bool pages_first = false;  // [pages, L, page_size, w] in memory: layers are closer than pages
};

// A cache in guarded memory. Bytes are in the packed order [L, pages, page_size, w] whatever the layout.
class Cache {
 public:
  Cache(const Bytes& bytes, int32_t layers, int32_t pages, int32_t page_size, int32_t width, int32_t element_size,
        const Layout& layout)
      : cache_(sized<kdt_kv_cache>()) {
    const int64_t e = element_size, w = width, row = w + layout.row_gap, page = page_size * row + layout.page_gap;
    cache_.num_layers = layers;
    cache_.num_pages = pages;
    cache_.page_size = page_size;
    cache_.row_width = width;
    cache_.element_size = element_size;
    if (layout.layer_pointers) {
      const size_t layer_bytes = bytes.size() / static_cast<size_t>(layers);
      std::vector<void*> pointers;
      for (int32_t l = 0; l < layers; ++l) {
        const auto first = bytes.begin() + static_cast<ptrdiff_t>(layer_bytes) * l;
        // Not packed: the dimension of bytes makes a row's width visible to strides counted in bytes.
        memory_.push_back(std::make_unique<Guarded<uint8_t>>(
            Guarded<uint8_t>::Dims{pages, page_size, w * e},
            Bytes(first, first + static_cast<ptrdiff_t>(layer_bytes)), Guarded<uint8_t>::Dims{page * e, row * e}));
        pointers.push_back(memory_.back()->data());
      }
      pointers_ = std::make_unique<Guarded<void*>>(Guarded<void*>::Dims{layers}, pointers);
      cache_.layer_data = pointers_->data();
    } else {
      const int64_t layer = layout.pages_first ? page : pages * page + layout.layer_gap;
      const int64_t page_step = layout.pages_first ? layers * page + layout.layer_gap : page;
      memory_.push_back(
          std::make_unique<Guarded<uint8_t>>(Guarded<uint8_t>::Dims{layers, pages, page_size, w * e}, bytes,
                                             Guarded<uint8_t>::Dims{layer * e, page_step * e, row * e}));
      cache_.data = memory_.back()->data();
      const bool packed = layout.row_gap + layout.page_gap + layout.layer_gap == 0 && !layout.pages_first;
      cache_.layer_stride = packed ? 0 : layer;
      cache_.page_stride = packed ? 0 : page_step;
    }
    if (layout.layer_pointers && layout.row_gap + layout.page_gap > 0) cache_.page_stride = page;
    if (layout.row_gap > 0) cache_.row_stride = row;
  }

  // A table of `columns` pages a request, with `slack` unused entries after each request's.
  void set_table(const Ints& table, int32_t columns, int64_t slack) {
    const int64_t requests = columns > 0 ? static_cast<int64_t>(table.size()) / columns : 0;
    table_ = std::make_unique<Guarded<int32_t>>(Guarded<int32_t>::Dims{requests, columns}, table,
                                                Guarded<int32_t>::Dims{columns + slack});
    cache_.block_table = table_->data();
    cache_.max_pages = columns;
    cache_.block_table_stride = slack > 0 ? columns + slack : 0;
  }

  const kdt_kv_cache* get() const { return &cache_; }

  Bytes bytes() const {
    Bytes all;
    for (const auto& memory : memory_) {
      const Bytes part = memory->values();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  // No byte but the rows' has changed, and (unchanged) not those either.
  bool guards_intact() const {
    return inputs_unchanged() &&
           std::all_of(memory_.begin(), memory_.end(), [](const auto& m) { return m->guards_intact(); });
  }
  bool unchanged() const {
    return inputs_unchanged() &&
           std::all_of(memory_.begin(), memory_.end(), [](const auto& m) { return m->unchanged(); });
  }

 private:
  bool inputs_unchanged() const {
    return (table_ == nullptr || table_->unchanged()) && (pointers_ == nullptr || pointers_->unchanged());
  }

  std::vector<std::unique_ptr<Guarded<uint8_t>>> memory_;
  std::unique_ptr<Guarded<void*>> pointers_;
  std::unique_ptr<Guarded<int32_t>> table_;
  kdt_kv_cache cache_;
};

struct Paths {
  int32_t batch_size, num_slots, max_len;
  Ints accept_index, accept_len, prefix_lens;
  std::optional<Ints> num_live;
};

// Compacts and gives the statuses. Inputs other than the cache are checked to be as they were.
Ints compact(const kdt_context* context, const Paths& in, const Cache& cache, const Cache* destination,
             int64_t slack = 0, bool with_status = true) {
  const int64_t b = in.batch_size, m = in.max_len;
  Guarded<int32_t> accept_index({b, m}, in.accept_index, {m + slack});
  Guarded<int32_t> accept_len({b}, in.accept_len), prefix_lens({b}, in.prefix_lens);
  Guarded<int32_t> num_live({1}, in.num_live.value_or(Ints(1))), status({b});
  auto p = sized<kdt_kv_compact_params>();
  p.batch_size = in.batch_size;
  p.num_slots = in.num_slots;
  p.max_len = in.max_len;
  p.cache = cache.get();
  p.destination = destination != nullptr ? destination->get() : nullptr;
  p.accept_index = accept_index.data();
  p.accept_index_stride = slack > 0 ? m + slack : 0;
  p.accept_len = accept_len.data();
  p.prefix_lens = prefix_lens.data();
  p.num_live = in.num_live ? num_live.data() : nullptr;
  p.status = with_status ? status.data() : nullptr;
  call(kdt_kv_compact_workspace_size, kdt_kv_compact, context, p,
       {&accept_index, &accept_len, &prefix_lens, &num_live}, {&status});
  EXPECT_TRUE(with_status || status.unchanged());
  return status.values();
}

// ---- Against the reference -------------------------------------------------------------------------

KDT_CASES(KvCompactCases, "kv_compact");

TEST_P(KvCompactCases, EqualsReferenceInEveryBit) {
  const Case c(GetParam());
  const int32_t element_size = c.element_size("in/cache");
  auto cache_values = c.bytes("in/cache");
  if (cache_values.dims.size() == 3) cache_values.dims.insert(cache_values.dims.begin(), 1);
  const auto dim = [&](size_t d) { return static_cast<int32_t>(cache_values.dims[d]); };
  const auto index = c.get<int32_t>("in/accepted.accept_index");
  const bool in_place = !c.has("in/out");
  const Bytes destination_bytes = in_place ? Bytes() : c.bytes("in/out").data;
  const Bytes expected = c.bytes(in_place ? "out/cache" : "out/out").data;
  const Ints expected_status = c.ints("out/status");
  const Paths paths = {static_cast<int32_t>(index.dims[0]), c.integer("num_slots"),
                       static_cast<int32_t>(index.dims[1]), index.data,
                       c.ints("in/accepted.accept_len"),    c.ints("in/prefix_lens"),
                       c.optional_ints("in/num_live")};

  const bool large = expected.size() > 100000;
  const Layout layouts[] = {{}, {2, 5, 7}, {.layer_pointers = true}, {1, 3, 0, true}, {1, 2, 3, false, true}};
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(testing::Message() << "layout " << &layout - layouts);
    // A row is bytes: elements of 1 byte, of the case's size, and (if they may be so large) a row as one element.
    const int32_t row_bytes = dim(3) * element_size;
    std::vector<int32_t> sizes = {element_size};
    if (!large) sizes.push_back(1);
    if (!large && row_bytes <= 64) sizes.push_back(row_bytes);
    for (const int32_t size : sizes) {
      for (const Variant& variant : variants_of(large)) {
        SCOPED_TRACE(testing::Message() << "element size " << size << ", " << to_string(variant));
        const TestContext context(variant.num_threads);
        const auto make = [&](const Bytes& bytes) {
          return Cache(bytes, dim(0), dim(1), dim(2), row_bytes / size, size, layout);
        };
        Cache cache = make(cache_values.data);
        std::optional<Cache> destination;
        if (!in_place) destination.emplace(make(destination_bytes));
        if (c.has("in/block_table")) {
          const auto table = c.get<int32_t>("in/block_table");
          const int32_t columns = static_cast<int32_t>(table.dims[1]);
          cache.set_table(table.data, columns, variant.slack);
          if (destination) destination->set_table(table.data, columns, 2 * variant.slack);
        }
        const Ints status = compact(context, paths, cache, destination ? &*destination : nullptr, variant.slack,
                                    variant.with_status);
        if (variant.with_status) {
          EXPECT_TRUE(same_bits(status, expected_status)) << "status";
        }
        EXPECT_TRUE(same_bits((in_place ? cache : *destination).bytes(), expected)) << "cache";
        EXPECT_TRUE((in_place ? cache : *destination).guards_intact());
        EXPECT_TRUE(in_place || cache.unchanged());
      }
    }
    if (expected.size() > 10000000) break;  // one layout is enough of that
  }
}

// ---- Against rows copied one by one ----------------------------------------------------------------

struct Pool {
  int32_t layers, pages, page_size;
  Ints table;  // [B, max_pages], or empty: contiguous
  int32_t max_pages;

  // First byte of a logical row.
  size_t at(int32_t layer, int32_t b, int32_t row, int32_t row_bytes) const {
    const int32_t page = table.empty() ? b : table[static_cast<size_t>(b * max_pages + row / page_size)];
    const int32_t within = table.empty() ? row : row % page_size;
    return ((static_cast<size_t>(layer) * static_cast<size_t>(pages) + static_cast<size_t>(page)) *
                static_cast<size_t>(page_size) +
            static_cast<size_t>(within)) *
           static_cast<size_t>(row_bytes);
  }
  size_t bytes(int32_t row_bytes) const {
    return static_cast<size_t>(layers) * static_cast<size_t>(pages) * static_cast<size_t>(page_size) *
           static_cast<size_t>(row_bytes);
  }
};

// Every mix of paged and contiguous, in place and to a destination of another shape, at odd widths and element
// sizes, with enough to move for several threads.
TEST(KvCompact, AgreesWithCopyingRowsOneByOne) {
  std::mt19937 random(5);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  const auto random_bytes = [&](size_t size) {
    Bytes bytes(size);
    for (size_t at = 0; at < size; at += sizeof(uint32_t)) {
      const uint32_t word = static_cast<uint32_t>(random());
      std::memcpy(bytes.data() + at, &word, std::min(sizeof word, size - at));
    }
    return bytes;
  };
  for (int i = 0; i < 150; ++i) {
    const bool large = i % 50 == 0;  // 40 layers of 128 kB to move: see min_layers in cpu/kv_compact.cpp
    const int32_t b = large ? 2 : 1 + below(4), layers = large ? 40 : 1 + below(3), rows = 48, n = 1 + below(24);
    const int32_t element_sizes[] = {1, 2, 3, 4, 8, 12, 64};
    const int32_t element_size = large ? 8 : element_sizes[below(7)], width = large ? 401 : 1 + below(9);
    const int32_t row_bytes = element_size * width;
    const auto make_pool = [&](bool paged) {
      const int32_t page_sizes[] = {1, 3, 16, 64};
      const int32_t page_size = paged ? page_sizes[below(4)] : rows + below(3);
      const int32_t max_pages = paged ? (rows + page_size - 1) / page_size : 0;
      Pool pool = {layers, paged ? b * max_pages + below(3) : b + below(2), page_size, {}, max_pages};
      if (!paged) return pool;
      pool.table.resize(static_cast<size_t>(pool.pages));
      std::iota(pool.table.begin(), pool.table.end(), 0);
      std::shuffle(pool.table.begin(), pool.table.end(), random);
      pool.table.resize(static_cast<size_t>(b * max_pages));
      return pool;
    };
    const bool in_place = i % 2 == 0;
    const Pool from = make_pool(below(2) == 0), to = in_place ? from : make_pool(below(2) == 0);
    Paths paths = {b, n, n, {}, {}, {}, {}};
    for (int32_t request = 0; request < b; ++request) {
      Ints path;
      for (int32_t slot = 0; slot < n; ++slot) {
        if (large ? slot != 1 : below(3) > 0) path.push_back(slot);
      }
      paths.accept_len.push_back(static_cast<int32_t>(path.size()));
      paths.prefix_lens.push_back(below(rows - n + 1));
      path.resize(static_cast<size_t>(n), -7);
      paths.accept_index.insert(paths.accept_index.end(), path.begin(), path.end());
    }

    const Bytes before = random_bytes(from.bytes(row_bytes));
    const Bytes destination_before = in_place ? before : random_bytes(to.bytes(row_bytes));
    Bytes expected = destination_before;
    for (int32_t layer = 0; layer < layers; ++layer) {
      for (int32_t request = 0; request < b; ++request) {
        const size_t r = static_cast<size_t>(request);
        for (int32_t k = 0; k < paths.accept_len[r]; ++k) {
          const int32_t slot = paths.accept_index[r * static_cast<size_t>(n) + static_cast<size_t>(k)];
          std::copy_n(before.begin() +
                          static_cast<ptrdiff_t>(from.at(layer, request, paths.prefix_lens[r] + slot, row_bytes)),
                      row_bytes,
                      expected.begin() +
                          static_cast<ptrdiff_t>(to.at(layer, request, paths.prefix_lens[r] + k, row_bytes)));
        }
      }
    }

    const Layout layout = {below(2), below(2), below(2), below(2) == 0, false};
    const auto make = [&](const Pool& pool, const Bytes& bytes) {
      Cache cache(bytes, layers, pool.pages, pool.page_size, width, element_size, layout);
      if (!pool.table.empty()) cache.set_table(pool.table, pool.max_pages, 0);
      return cache;
    };
    Cache cache = make(from, before);
    std::optional<Cache> destination;
    if (!in_place) destination.emplace(make(to, destination_before));
    const TestContext context(1 + 3 * below(3));
    const Ints status = compact(context, paths, cache, in_place ? nullptr : &*destination);
    EXPECT_EQ(status, Ints(static_cast<size_t>(b), 0));
    EXPECT_TRUE(same_bits((in_place ? cache : *destination).bytes(), expected));
    EXPECT_TRUE((in_place ? cache : *destination).guards_intact());
    EXPECT_TRUE(in_place || cache.unchanged());
    ASSERT_FALSE(HasFailure()) << "case " << i;
  }
}

// Each row has a memory page of its own, and only those that the path moves something to can be written.
TEST(KvCompact, InPlaceWritesNoRowThatIsInPlace) {
  KDT_SKIP_ON_CUDA("no memory there can be made read-only");
  const TestContext context;
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  constexpr int32_t kRows = 12, kPrefix = 3;
  for (const Ints& path : {Ints{0, 1, 2, 3}, Ints{0}, Ints{0, 1, 4, 7}, Ints{2, 3, 5}, Ints{}}) {
    const size_t size = static_cast<size_t>(kRows * page);
    void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    uint8_t* rows = static_cast<uint8_t*>(memory);
    for (int32_t row = 0; row < kRows; ++row) rows[row * page] = static_cast<uint8_t>(100 + row);
    ASSERT_EQ(::mprotect(memory, size, PROT_READ), 0);
    for (size_t k = 0; k < path.size(); ++k) {
      if (path[k] != static_cast<int32_t>(k)) {
        ASSERT_EQ(::mprotect(rows + (kPrefix + static_cast<int64_t>(k)) * page, static_cast<size_t>(page),
                             PROT_READ | PROT_WRITE),
                  0);
      }
    }
    auto cache = sized<kdt_kv_cache>();
    cache.data = memory;
    cache.num_layers = cache.num_pages = cache.element_size = 1;
    cache.page_size = kRows;
    cache.row_width = 16;
    cache.row_stride = page;
    const int32_t length = static_cast<int32_t>(path.size()), prefix = kPrefix;
    Ints index = path;
    index.resize(8);
    int32_t status = -1;
    auto p = sized<kdt_kv_compact_params>();
    p.batch_size = 1;
    p.num_slots = p.max_len = 8;
    p.cache = &cache;
    p.accept_index = index.data();
    p.accept_len = &length;
    p.prefix_lens = &prefix;
    p.status = &status;
    uint8_t workspace[256];
    EXPECT_EQ(kdt_kv_compact(context, &p, workspace, sizeof workspace, nullptr), KDT_OK) << kdt_last_error();
    EXPECT_EQ(status, 0);
    for (int32_t row = 0; row < kRows; ++row) {
      const int32_t k = row - kPrefix;
      const int32_t source = k >= 0 && k < length ? kPrefix + path[static_cast<size_t>(k)] : row;
      EXPECT_EQ(rows[row * page], 100 + source) << "row " << row;
    }
    ::munmap(memory, size);
  }
}

// Each move's source is the next one's target.
TEST(KvCompact, OverlappingMovesAreSafe) {
  constexpr int32_t kSlots = KDT_MAX_BUDGET + 1;
  Bytes bytes(kSlots * 2);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i / 2 % 251);
  const Cache cache(bytes, 1, 1, kSlots, 2, 1, {});
  Paths paths = {1, kSlots, kSlots, Ints(kSlots), {kSlots - 1}, {0}, {}};
  std::iota(paths.accept_index.begin(), paths.accept_index.end(), 1);
  EXPECT_EQ(compact(TestContext(), paths, cache, nullptr), Ints{0});
  Bytes expected(bytes.begin() + 2, bytes.end());
  expected.insert(expected.end(), bytes.end() - 2, bytes.end());
  EXPECT_TRUE(same_bits(cache.bytes(), expected));
}

// Layers and pages beyond 2^31 and 2^32 elements. The moves do not touch each other's rows, so the second run that
// CUDA's calls make of them changes nothing.
TEST(KvCompact, PagesMayLieBeyond32BitOffsets) {
  constexpr int32_t kLayers = 2, kPages = 240000, kPageSize = 32, kWidth = 576, kSlots = 32, kPrefix = 28;
  constexpr size_t kRowBytes = kWidth * 2, kPageBytes = kPageSize * kRowBytes, kLayerBytes = kPages * kPageBytes;
  const Ints far = {116509, 233017};  // 116509 * 32 * 576 > 2^31, 233017 * 32 * 576 > 2^32
  const Ints path = {0, 7, 8, 20, 25};
  const SparseMemory memory(kLayers * kLayerBytes);
  const auto at = [&](size_t layer, int32_t row) {
    return layer * kLayerBytes + static_cast<size_t>(far[static_cast<size_t>(row / kPageSize)]) * kPageBytes +
           static_cast<size_t>(row % kPageSize) * kRowBytes;
  };
  // Each row holds a byte of its own.
  const auto filler = [](size_t layer, int32_t row) {
    return Bytes(kRowBytes, static_cast<uint8_t>(layer * 100 + static_cast<size_t>(row) + 1));
  };
  for (size_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t row = 0; row < 2 * kPageSize; ++row) {
      memory.put(at(layer, row), filler(layer, row).data(), kRowBytes);
    }
  }
  Guarded<int32_t> table({1, 2}, far), prefix_lens({1}, Ints{kPrefix}), status({1});
  Guarded<int32_t> accept_index({1, 5}, path), accept_len({1}, Ints{5});
  auto cache = sized<kdt_kv_cache>();
  cache.data = memory.data();
  cache.num_layers = kLayers;
  cache.num_pages = kPages;
  cache.page_size = kPageSize;
  cache.row_width = kWidth;
  cache.element_size = 2;
  cache.block_table = table.data();
  cache.max_pages = 2;
  auto p = sized<kdt_kv_compact_params>();
  p.batch_size = 1;
  p.num_slots = kSlots;
  p.max_len = 5;
  p.cache = &cache;
  p.accept_index = accept_index.data();
  p.accept_len = accept_len.data();
  p.prefix_lens = prefix_lens.data();
  p.status = status.data();
  call(kdt_kv_compact_workspace_size, kdt_kv_compact, TestContext(), p,
       {&table, &prefix_lens, &accept_index, &accept_len}, {&status});
  EXPECT_EQ(status.values(), Ints{0});
  for (size_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t row = 0; row < 2 * kPageSize; ++row) {
      const int32_t k = row - kPrefix;
      const int32_t source = k >= 0 && k < 5 ? kPrefix + path[static_cast<size_t>(k)] : row;
      EXPECT_EQ(memory.get<uint8_t>(at(layer, row), kRowBytes), filler(layer, source))
          << "row " << row << " of layer " << layer;
    }
  }
}

}  // namespace
