// The KDTR container: the corpus in tests_cpp/data/kdtr (made by tools/make-kdtr-corpus), every truncation and
// every changed byte of its golden file, and the writer. Meant to run under sanitizers too.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kdtree/kdtr.h"

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

struct Close {
  void operator()(kdtr_file* file) const { kdtr_close(file); }
};
using File = std::unique_ptr<kdtr_file, Close>;

fs::path corpus() { return fs::path(KDT_TEST_DATA) / "kdtr"; }

Bytes read_bytes(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

Bytes golden() { return read_bytes(corpus() / "good_golden.kdtr"); }

std::vector<std::pair<std::string, int32_t>> expected_codes() {
  std::ifstream in(corpus() / "expected.txt");
  std::vector<std::pair<std::string, int32_t>> codes;
  std::string name;
  int32_t code;
  while (in >> name >> code) codes.emplace_back(name, code);
  return codes;
}

// The bytes are copied to a block of exactly their size, so that a sanitizer sees each byte read beyond.
int32_t parse_code(const uint8_t* data, size_t size) {
  const std::unique_ptr<uint8_t[]> exact(new uint8_t[size]);
  if (size > 0) std::memcpy(exact.get(), data, size);
  kdtr_file* raw = nullptr;
  const int32_t status = kdtr_parse(exact.get(), size, &raw);
  EXPECT_EQ(raw == nullptr, status != KDT_OK);
  kdtr_close(raw);
  return status;
}

File open_file(const fs::path& path) {
  kdtr_file* raw = nullptr;
  EXPECT_EQ(kdtr_open(path.c_str(), &raw), KDT_OK) << kdt_last_error();
  return File(raw);
}

struct Content {
  std::vector<kdtr_tensor> tensors;
  std::vector<kdtr_attr> attrs;
};

Content content_of(const File& file) {
  Content content;
  content.tensors.resize(kdtr_num_tensors(file.get()));
  content.attrs.resize(kdtr_num_attrs(file.get()));
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    EXPECT_EQ(kdtr_tensor_at(file.get(), i, &content.tensors[i]), KDT_OK);
  }
  for (size_t i = 0; i < content.attrs.size(); ++i) {
    EXPECT_EQ(kdtr_attr_at(file.get(), i, &content.attrs[i]), KDT_OK);
  }
  return content;
}

int32_t save(const fs::path& path, const Content& content) {
  return kdtr_save(path.c_str(), content.tensors.data(), content.tensors.size(), content.attrs.data(),
                   content.attrs.size());
}

template <class T>
kdtr_tensor tensor(const char* name, int32_t dtype, std::vector<int64_t> dims, const std::vector<T>& data) {
  kdtr_tensor t = {name, dtype, static_cast<int32_t>(dims.size()), {}, data.data(), data.size() * sizeof(T)};
  std::copy(dims.begin(), dims.end(), t.dims);
  return t;
}

kdtr_attr attr(const char* key, const char* value) { return {key, value, std::strlen(value)}; }

// A folder that goes away with the test.
class Kdtr : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "kdtr-test-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path folder_;
};

const std::vector<float> kHidden = {0.0f, -0.0f, 1.5f, -2.25f, 3e38f, std::numeric_limits<float>::infinity()};
const std::vector<uint16_t> kLogits = {0x3F80, 0xC000, 0x7FC0};
const std::vector<uint8_t> kMask = {1, 0, 1, 1, 0};
const std::vector<int64_t> kStep = {-(int64_t{1} << 62)};

Content golden_content() {
  return {{tensor("hidden", KDTR_F32, {2, 3}, kHidden), tensor("logits.bf16", KDTR_BF16, {3}, kLogits),
           tensor("mask", KDTR_BOOL, {5}, kMask), tensor("step", KDTR_I64, {}, kStep),
           tensor<uint16_t>("empty", KDTR_F16, {0, 4}, {})},
          {attr("model", "kdtree"), attr("größe", "naïve ☃ 🌲"), attr("none", ""), {"nul", "a\0b", 3}}};
}

TEST_F(Kdtr, CorpusGivesTheExpectedCodes) {
  const auto codes = expected_codes();
  EXPECT_GT(codes.size(), 200u);
  for (const auto& [name, code] : codes) {
    const Bytes bytes = read_bytes(corpus() / name);
    EXPECT_EQ(parse_code(bytes.data(), bytes.size()), code) << name << ": " << kdt_last_error();
    kdtr_file* raw = nullptr;
    EXPECT_EQ(kdtr_open((corpus() / name).c_str(), &raw), code) << name << ": " << kdt_last_error();
    kdtr_close(raw);
  }
}

TEST_F(Kdtr, CorpusListsEveryFileAndHasEveryCode) {
  const auto codes = expected_codes();
  const auto files = std::distance(fs::directory_iterator(corpus()), fs::directory_iterator());
  EXPECT_EQ(static_cast<size_t>(files), codes.size() + 1);
  for (int32_t code = KDTR_ERR_TOO_SHORT; code <= KDTR_ERR_VALUE; ++code) {
    EXPECT_TRUE(std::any_of(codes.begin(), codes.end(), [&](const auto& line) { return line.second == code; }))
        << kdt_status_name(code);
  }
}

// A good file has one form only: what was read is written as the same bytes.
TEST_F(Kdtr, GoodFilesAreWrittenAsTheyWere) {
  for (const auto& [name, code] : expected_codes()) {
    if (code != KDT_OK) continue;
    const File file = open_file(corpus() / name);
    ASSERT_NE(file, nullptr) << name;
    EXPECT_EQ(save(folder_ / name, content_of(file)), KDT_OK) << name << ": " << kdt_last_error();
    EXPECT_EQ(read_bytes(folder_ / name), read_bytes(corpus() / name)) << name;
  }
}

TEST_F(Kdtr, EveryTruncationIsAnError) {
  const Bytes bytes = golden();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(parse_code(bytes.data(), size), size < 64 ? KDTR_ERR_TOO_SHORT : KDTR_ERR_FILE_SIZE) << size;
  }
}

TEST_F(Kdtr, EveryChangedByteIsAnError) {
  Bytes bytes = golden();
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int change = 1; change < 256; ++change) {
      bytes[at] ^= static_cast<uint8_t>(change);
      EXPECT_NE(parse_code(bytes.data(), bytes.size()), KDT_OK) << "byte " << at << " ^ " << change;
      bytes[at] ^= static_cast<uint8_t>(change);
    }
  }
}

uint32_t crc32(const uint8_t* data, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

// The checksum is made right after each change, so that the checks behind it meet hostile numbers. The
// Python tests compare the codes; this one is for the sanitizers.
TEST_F(Kdtr, ChangesWithTheChecksumMadeRight) {
  std::mt19937 random(1);
  std::array<size_t, 600> count = {};
  for (const auto& [name, code] : expected_codes()) {
    if (code != KDT_OK) continue;
    const Bytes original = read_bytes(corpus() / name);
    uint64_t index_size;
    std::memcpy(&index_size, original.data() + 24, sizeof index_size);
    if (index_size == 0) continue;
    for (int round = 0; round < 2000; ++round) {
      Bytes bytes = original;
      for (auto changes = 1 + random() % 3; changes > 0; --changes) {
        constexpr std::array<uint8_t, 12> values = {0, 1, 2, 8, 9, 13, 14, 0x7F, 0x80, 0xE0, 0xED, 0xFF};
        const size_t at = random() % 16 == 0 ? 24 + random() % 16 : 64 + random() % index_size;
        bytes[at] = random() % 2 == 0 ? values[random() % values.size()] : static_cast<uint8_t>(random());
      }
      uint64_t size;
      std::memcpy(&size, bytes.data() + 24, sizeof size);
      if (size <= bytes.size() - 64) {
        std::memset(bytes.data() + 40, 0, 4);
        const uint32_t crc = crc32(bytes.data(), 64 + size);
        std::memcpy(bytes.data() + 40, &crc, sizeof crc);
      }
      ++count.at(static_cast<size_t>(parse_code(bytes.data(), bytes.size())));
    }
  }
  for (const int32_t code : {KDTR_ERR_CAP, KDTR_ERR_INDEX, KDTR_ERR_NAME, KDTR_ERR_DTYPE, KDTR_ERR_SHAPE,
                             KDTR_ERR_SIZE, KDTR_ERR_OFFSET, KDTR_ERR_PADDING, KDTR_ERR_DATA_CHECKSUM}) {
    EXPECT_GT(count[static_cast<size_t>(code)], 10u) << kdt_status_name(code);
  }
}

TEST_F(Kdtr, GoldenBytes) {
  ASSERT_EQ(save(folder_ / "golden.kdtr", golden_content()), KDT_OK) << kdt_last_error();
  EXPECT_EQ(read_bytes(folder_ / "golden.kdtr"), golden())
      << "The format has changed. If that is meant, it needs a new version number; see plans/0002-kdtr-format.md.";
}

TEST_F(Kdtr, GoldenContent) {
  const File file = open_file(corpus() / "good_golden.kdtr");
  ASSERT_NE(file, nullptr);
  const Content expected = golden_content(), content = content_of(file);
  ASSERT_EQ(content.tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const kdtr_tensor &a = content.tensors[i], &b = expected.tensors[i];
    EXPECT_STREQ(a.name, b.name);
    EXPECT_EQ(a.dtype, b.dtype);
    EXPECT_EQ(a.ndim, b.ndim);
    EXPECT_TRUE(std::equal(std::begin(a.dims), std::end(a.dims), std::begin(b.dims)));
    ASSERT_EQ(a.nbytes, b.nbytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 64, 0u);
    if (a.nbytes > 0) {
      EXPECT_EQ(std::memcmp(a.data, b.data, a.nbytes), 0) << a.name;
    }
    kdtr_tensor found;
    EXPECT_EQ(kdtr_find_tensor(file.get(), b.name, &found), KDT_OK);
    EXPECT_EQ(found.data, a.data);
    EXPECT_EQ(found.name, a.name);
  }
  ASSERT_EQ(content.attrs.size(), expected.attrs.size());
  for (size_t i = 0; i < content.attrs.size(); ++i) {
    const kdtr_attr &a = content.attrs[i], &b = expected.attrs[i];
    EXPECT_STREQ(a.key, b.key);
    EXPECT_EQ(std::string(a.value, a.value_size), std::string(b.value, b.value_size));
    EXPECT_EQ(a.value[a.value_size], '\0');
    kdtr_attr found;
    EXPECT_EQ(kdtr_find_attr(file.get(), b.key, &found), KDT_OK);
    EXPECT_EQ(found.value, a.value);
  }
}

TEST_F(Kdtr, ParsesAtEveryBaseAddress) {
  const Bytes bytes = golden();
  for (size_t shift = 0; shift < 64; ++shift) {
    const std::unique_ptr<uint8_t[]> moved(new uint8_t[bytes.size() + shift]);
    std::memcpy(moved.get() + shift, bytes.data(), bytes.size());
    kdtr_file* raw = nullptr;
    ASSERT_EQ(kdtr_parse(moved.get() + shift, bytes.size(), &raw), KDT_OK);
    const File file(raw);
    kdtr_tensor step;
    ASSERT_EQ(kdtr_find_tensor(raw, "step", &step), KDT_OK);
    EXPECT_EQ(std::memcmp(step.data, kStep.data(), 8), 0);
    EXPECT_GE(static_cast<const uint8_t*>(step.data), moved.get());  // borrowed, not copied
    EXPECT_LT(static_cast<const uint8_t*>(step.data), moved.get() + bytes.size() + shift);
    ASSERT_EQ(save(folder_ / "moved.kdtr", content_of(file)), KDT_OK);
    EXPECT_EQ(read_bytes(folder_ / "moved.kdtr"), bytes);
  }
}

TEST_F(Kdtr, AsManyTensorsAsTheCapAllows) {
  std::vector<std::string> names(KDTR_MAX_TENSORS + 1);
  Content content;
  for (size_t i = 0; i < names.size(); ++i) {
    names[i] = std::to_string(i * 7919 % names.size());  // 65537 is prime: all differ, in no order
    content.tensors.push_back(tensor<uint8_t>(names[i].c_str(), KDTR_U8, {0}, {}));
    content.attrs.push_back(attr(names[i].c_str(), names[i].c_str()));
  }
  EXPECT_EQ(save(folder_ / "many.kdtr", content), KDTR_ERR_CAP);
  content.tensors.pop_back();
  EXPECT_EQ(save(folder_ / "many.kdtr", content), KDTR_ERR_CAP);
  content.attrs.pop_back();
  ASSERT_EQ(save(folder_ / "many.kdtr", content), KDT_OK) << kdt_last_error();
  const File file = open_file(folder_ / "many.kdtr");
  for (size_t i = 0; i < content.attrs.size(); ++i) {
    kdtr_tensor found;
    kdtr_attr found_attr;
    ASSERT_EQ(kdtr_find_tensor(file.get(), names[i].c_str(), &found), KDT_OK);
    ASSERT_EQ(kdtr_find_attr(file.get(), names[i].c_str(), &found_attr), KDT_OK);
    ASSERT_EQ(found_attr.value, names[i]);
  }
}

TEST_F(Kdtr, IndexMayReachItsCapAndNoMore) {
  Content content;
  const std::string value(KDTR_MAX_INDEX - 16 + 5, 'v');  // 8 + "k\0" + value + "\0" is the cap
  content.attrs = {{"k", value.data(), value.size()}};
  ASSERT_EQ(save(folder_ / "large.kdtr", content), KDT_OK) << kdt_last_error();
  EXPECT_EQ(content_of(open_file(folder_ / "large.kdtr")).attrs.size(), 1u);
  content.attrs.push_back(attr("l", ""));
  EXPECT_EQ(save(folder_ / "large.kdtr", content), KDTR_ERR_CAP);
  content.attrs = {{"k", "", std::numeric_limits<size_t>::max()}};
  EXPECT_EQ(save(folder_ / "large.kdtr", content), KDTR_ERR_CAP);
}

TEST_F(Kdtr, OpenRefusesAllButRegularFiles) {
  const fs::path fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const fs::path& path : {folder_, fifo, fs::path("/dev/null"), fs::path("/dev/zero"), folder_ / "missing",
                               folder_ / "missing" / "file", fs::path("")}) {
    kdtr_file* raw = reinterpret_cast<kdtr_file*>(8);
    EXPECT_EQ(kdtr_open(path.c_str(), &raw), KDTR_ERR_IO) << path;
    EXPECT_EQ(raw, nullptr);
    EXPECT_NE(std::string(kdt_last_error()).find(path.string()), std::string::npos);
  }
}

// A sparse file of 2^40 bytes must be refused by its header, before any memory is taken for it.
TEST_F(Kdtr, OpenOfALargeFileThatIsNoneCostsNothing) {
  const fs::path path = folder_ / "sparse.kdtr";
  std::ofstream(path) << "PK";
  fs::resize_file(path, uintmax_t{1} << 40);
  kdtr_file* raw = nullptr;
  EXPECT_EQ(kdtr_open(path.c_str(), &raw), KDTR_ERR_MAGIC);
}

TEST_F(Kdtr, NullArguments) {
  kdtr_file* raw = nullptr;
  EXPECT_EQ(kdtr_open(nullptr, &raw), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_open("x", nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_parse(nullptr, 1, &raw), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_parse("x", 1, nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_parse(nullptr, 0, &raw), KDTR_ERR_TOO_SHORT);
  kdtr_close(nullptr);
  EXPECT_EQ(kdtr_num_tensors(nullptr), 0u);
  EXPECT_EQ(kdtr_num_attrs(nullptr), 0u);

  const File file = open_file(corpus() / "good_golden.kdtr");
  kdtr_tensor t;
  kdtr_attr a;
  EXPECT_EQ(kdtr_tensor_at(nullptr, 0, &t), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_tensor_at(file.get(), 0, nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_attr_at(nullptr, 0, &a), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_attr_at(file.get(), 0, nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_find_tensor(nullptr, "x", &t), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_find_tensor(file.get(), nullptr, &t), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_find_tensor(file.get(), "x", nullptr), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_find_attr(nullptr, "x", &a), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_find_attr(file.get(), nullptr, &a), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_find_attr(file.get(), "x", nullptr), KDT_ERR_NULL_POINTER);

  const std::string path = folder_ / "x.kdtr";
  EXPECT_EQ(kdtr_save(nullptr, nullptr, 0, nullptr, 0), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_save(path.c_str(), nullptr, 1, nullptr, 0), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(kdtr_save(path.c_str(), nullptr, 0, nullptr, 1), KDT_ERR_NULL_POINTER);
  EXPECT_TRUE(files().empty());
  EXPECT_EQ(kdtr_save(path.c_str(), nullptr, 0, nullptr, 0), KDT_OK);
  EXPECT_EQ(read_bytes(path), read_bytes(corpus() / "good_empty.kdtr"));
}

TEST_F(Kdtr, WhatIsNotThere) {
  const File file = open_file(corpus() / "good_golden.kdtr");
  kdtr_tensor t;
  kdtr_attr a;
  for (const size_t index : {size_t{5}, std::numeric_limits<size_t>::max()}) {
    EXPECT_EQ(kdtr_tensor_at(file.get(), index, &t), KDT_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(t.name, nullptr);
    EXPECT_EQ(kdtr_attr_at(file.get(), index, &a), KDT_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(a.key, nullptr);
  }
  for (const char* name : {"", "a", "hidde", "hidden2", "zzz", "\xff"}) {
    EXPECT_EQ(kdtr_find_tensor(file.get(), name, &t), KDTR_ERR_NOT_FOUND);
    EXPECT_EQ(t.data, nullptr);
    EXPECT_EQ(kdtr_find_attr(file.get(), name, &a), KDTR_ERR_NOT_FOUND);
    EXPECT_EQ(a.value, nullptr);
  }
}

TEST_F(Kdtr, DtypeSizes) {
  const std::array<size_t, 15> sizes = {0, 8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1, 0};
  for (size_t code = 0; code < sizes.size(); ++code) {
    EXPECT_EQ(kdtr_dtype_size(static_cast<int32_t>(code)), sizes[code]);
  }
  EXPECT_EQ(kdtr_dtype_size(-1), 0u);
  EXPECT_EQ(kdtr_dtype_size(std::numeric_limits<int32_t>::max()), 0u);
}

// Every refusal happens before a file is touched.
TEST_F(Kdtr, SaveChecksItsArguments) {
  const fs::path path = folder_ / "x.kdtr";
  const auto code_with = [&](auto change) {
    Content content = golden_content();
    change(content);
    return save(path, content);
  };
  const auto with_tensor = [&](auto change) { return code_with([&](Content& c) { change(c.tensors[2]); }); };
  const auto with_attr = [&](auto change) { return code_with([&](Content& c) { change(c.attrs[1]); }); };
  const std::string long_name(256, 'n');
  const std::vector<uint8_t> two = {0, 1, 2, 1, 0};
  constexpr int64_t huge = std::numeric_limits<int64_t>::max();

  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.name = nullptr; }), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.data = nullptr; }), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.dtype = 0; }), KDTR_ERR_DTYPE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.dtype = 256 + KDTR_U8; }), KDTR_ERR_DTYPE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.ndim = 9; }), KDTR_ERR_SHAPE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.ndim = -1; }), KDTR_ERR_SHAPE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.dims[0] = -5; }), KDTR_ERR_SHAPE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t = {"t", KDTR_I16, 2, {0, huge}, nullptr, 0}; }), KDTR_ERR_SHAPE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.nbytes = 4; }), KDTR_ERR_SIZE);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.name = ""; }), KDTR_ERR_NAME);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.name = "\xed\xa0\x80"; }), KDTR_ERR_NAME);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t.name = "hidden"; }), KDTR_ERR_NAME);
  EXPECT_EQ(with_tensor([&](kdtr_tensor& t) { t.name = long_name.c_str(); }), KDTR_ERR_NAME);
  EXPECT_EQ(with_tensor([&](kdtr_tensor& t) { t.data = two.data(); }), KDTR_ERR_VALUE);
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a.key = nullptr; }), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a.value = nullptr; }), KDT_ERR_NULL_POINTER);
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a.key = ""; }), KDTR_ERR_NAME);
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a.key = "model"; }), KDTR_ERR_NAME);
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a.key = "\x80"; }), KDTR_ERR_NAME);
  EXPECT_EQ(with_attr([&](kdtr_attr& a) { a.key = long_name.c_str(); }), KDTR_ERR_NAME);
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a = {"k", "\xff", 1}; }), KDTR_ERR_NAME);
  EXPECT_TRUE(files().empty());
  EXPECT_EQ(with_attr([](kdtr_attr& a) { a = {"k", nullptr, 0}; }), KDT_OK);
  EXPECT_EQ(with_tensor([](kdtr_tensor& t) { t = {"t", KDTR_I8, 2, {0, huge}, nullptr, 0}; }), KDT_OK);
}

TEST_F(Kdtr, SaveReplacesAndFollowsLinks) {
  const fs::path target = folder_ / "target.kdtr", link = folder_ / "link.kdtr", chain = folder_ / "chain.kdtr";
  fs::create_symlink("target.kdtr", link);  // dangling at first
  fs::create_symlink(link, chain);
  for (const fs::path& path : {chain, link, target}) {
    ASSERT_EQ(save(path, golden_content()), KDT_OK) << kdt_last_error();
    EXPECT_EQ(read_bytes(target), golden());
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_TRUE(fs::is_symlink(chain));
    std::ofstream(target) << "old";
  }
  EXPECT_EQ(files().size(), 3u);
  const fs::path loop = folder_ / "loop";
  fs::create_symlink("loop", loop);
  EXPECT_EQ(save(loop, golden_content()), KDTR_ERR_IO);
}

TEST_F(Kdtr, SaveHonoursTheUmask) {
  const mode_t old = ::umask(027);
  EXPECT_EQ(save(folder_ / "x.kdtr", golden_content()), KDT_OK);
  ::umask(old);
  EXPECT_EQ(fs::status(folder_ / "x.kdtr").permissions(), fs::perms(0640));
}

TEST_F(Kdtr, SaveRefusesWhatIsNoFile) {
  fs::create_directory(folder_ / "folder");
  std::ofstream(folder_ / "file") << "old";
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  fs::create_symlink("/dev/full", folder_ / "full");
  for (const char* name : {"folder", "fifo", "full", "file/x.kdtr", "missing/x.kdtr"}) {
    EXPECT_EQ(save(folder_ / name, golden_content()), KDTR_ERR_IO) << name;
  }
  EXPECT_EQ(files(), (std::vector<std::string>{"fifo", "file", "folder", "full"}));
  EXPECT_EQ(kdtr_save("", nullptr, 0, nullptr, 0), KDTR_ERR_IO);
}

// A write that fails half-way, as on a full disk: the limit on file sizes stands in for it.
TEST_F(Kdtr, SaveThatFailsLeavesTheOldFile) {
  const fs::path path = folder_ / "x.kdtr";
  std::ofstream(path) << "old";
  const std::vector<uint8_t> large(1 << 16);
  Content content = golden_content();
  content.tensors.push_back(tensor("large", KDTR_U8, {1 << 16}, large));

  rlimit old;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit = {4096, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const int32_t status = save(path, content);
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);

  EXPECT_EQ(status, KDTR_ERR_IO);
  EXPECT_EQ(files(), (std::vector<std::string>{"x.kdtr"}));
  EXPECT_EQ(read_bytes(path), (Bytes{'o', 'l', 'd'}));
  EXPECT_EQ(save(path, content), KDT_OK);
  EXPECT_EQ(content_of(open_file(path)).tensors.size(), 6u);
}

// A leftover of a crashed process has the name the writer would take next.
TEST_F(Kdtr, SaveStepsOverLeftovers) {
  for (int i = 0; i < 50; ++i) {
    std::ofstream(folder_ / (".kdtr-" + std::to_string(::getpid()) + "-" + std::to_string(i) + ".tmp")) << "old";
  }
  EXPECT_EQ(save(folder_ / "x.kdtr", golden_content()), KDT_OK) << kdt_last_error();
  EXPECT_EQ(files().size(), 51u);
}

}  // namespace
