// The KDTR reader. Nothing is decoded into structures of its own: a kdtr_file is the bytes and, for each
// entry of the index, where it starts (4 bytes, twice: in file order and sorted by name; an entry has at
// least 16 bytes of its own, so this is less than the file). Names and values are NUL-terminated in the file.
//
// Checker::run is the list of checks, in the order that plans/0002-kdtr-format.md fixes. Bounds are tested by
// subtraction from what is left, so that no sum of hostile numbers is ever formed.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "../kernels/error.hpp"
#include "crc32.hpp"
#include "format.hpp"

namespace kdt::kdtr {
namespace {

struct AlignedDelete {
  void operator()(uint8_t* p) const noexcept { ::operator delete(p, std::align_val_t{kDataAlign}); }
};
using AlignedBytes = std::unique_ptr<uint8_t, AlignedDelete>;

}  // namespace
}  // namespace kdt::kdtr

struct kdtr_file {
  kdt::kdtr::AlignedBytes owned;  // empty when the bytes are the caller's
  const uint8_t* bytes = nullptr;
  std::vector<uint32_t> tensors, attrs;                  // offset of each entry, in file order
  std::vector<uint32_t> tensors_by_name, attrs_by_name;  // the same offsets, sorted by name
};

namespace kdt::kdtr {
namespace {

std::string_view tensor_name(const uint8_t* bytes, uint32_t at) noexcept {
  const uint8_t* entry = bytes + at;
  const size_t dims_size = size_t{8} * entry[tensor_entry::kNdim];
  return {reinterpret_cast<const char*>(entry + tensor_entry::kDims + dims_size),
          load<uint16_t>(entry + tensor_entry::kNameLen)};
}

std::string_view attr_key(const uint8_t* bytes, uint32_t at) noexcept {
  const uint8_t* entry = bytes + at;
  return {reinterpret_cast<const char*>(entry + attr_entry::kKey), load<uint32_t>(entry + attr_entry::kKeyLen)};
}

std::string_view attr_value(const uint8_t* bytes, uint32_t at) noexcept {
  const std::string_view key = attr_key(bytes, at);
  return {key.data() + key.size() + 1, load<uint32_t>(bytes + at + attr_entry::kValueLen)};
}

using NameOf = std::string_view (*)(const uint8_t*, uint32_t) noexcept;

kdtr_tensor read_tensor(const uint8_t* bytes, uint32_t at) noexcept {
  const uint8_t* entry = bytes + at;
  kdtr_tensor tensor = {};
  tensor.name = tensor_name(bytes, at).data();
  tensor.dtype = entry[tensor_entry::kDtype];
  tensor.ndim = entry[tensor_entry::kNdim];
  std::memcpy(tensor.dims, entry + tensor_entry::kDims, size_t{8} * entry[tensor_entry::kNdim]);
  tensor.data = bytes + load<uint64_t>(entry + tensor_entry::kOffset);
  tensor.nbytes = load<uint64_t>(entry + tensor_entry::kBytes);
  return tensor;
}

kdtr_attr read_attr(const uint8_t* bytes, uint32_t at) noexcept {
  const std::string_view value = attr_value(bytes, at);
  return {attr_key(bytes, at).data(), value.data(), value.size()};
}

class Checker {
 public:
  // `bytes` holds the first `size` bytes of a file; for check_header alone, 64 of them will do.
  Checker(const char* function, const uint8_t* bytes, uint64_t size) noexcept
      : function_(function), bytes_(bytes), size_(size) {}

  int32_t check_header();
  int32_t run(kdtr_file* file);

 private:
  int32_t check_checksum();
  int32_t check_entries(kdtr_file* file);
  int32_t check_tensor_entry(size_t i);
  int32_t check_attr_entry(size_t i);
  int32_t check_layout(const kdtr_file& file);
  int32_t check_contents(const kdtr_file& file);
  int32_t sort_unique(const std::vector<uint32_t>& entries, NameOf name_of, const char* what,
                      std::vector<uint32_t>* sorted);

  const char* function_;
  const uint8_t* bytes_;
  uint64_t size_;
  uint32_t num_tensors_ = 0;
  uint32_t num_attrs_ = 0;
  uint64_t index_end_ = 0;  // from check_header on: 64 + index size, within the file
  uint64_t at_ = 0;         // start of the next entry, <= index_end_
};

int32_t Checker::check_header() {
  if (size_ < header::kSize) {
    return fail(KDTR_ERR_TOO_SHORT, function_, "a KDTR file has at least 64 bytes, not %ju", uintmax_t{size_});
  }
  if (std::memcmp(bytes_, kMagic, sizeof kMagic) != 0) {
    return fail(KDTR_ERR_MAGIC, function_, "not a KDTR file: the first 8 bytes are wrong");
  }
  if (const uint32_t version = load<uint32_t>(bytes_ + header::kVersion); version != kVersion) {
    return fail(KDTR_ERR_VERSION, function_, "version %u, this reader knows %u", version, kVersion);
  }
  if (load<uint32_t>(bytes_ + header::kReserved0) != 0 ||
      !all_zero(bytes_ + header::kReserved1, header::kSize - header::kReserved1)) {
    return fail(KDTR_ERR_RESERVED, function_, "reserved bytes of the header are not zero");
  }
  if (const uint64_t file_size = load<uint64_t>(bytes_ + header::kFileSize); file_size != size_) {
    return fail(KDTR_ERR_FILE_SIZE, function_, "the header says %ju bytes, there are %ju", uintmax_t{file_size},
                uintmax_t{size_});
  }
  num_tensors_ = load<uint32_t>(bytes_ + header::kNumTensors);
  num_attrs_ = load<uint32_t>(bytes_ + header::kNumAttrs);
  const uint64_t index_size = load<uint64_t>(bytes_ + header::kIndexSize);
  if (num_tensors_ > KDTR_MAX_TENSORS || num_attrs_ > KDTR_MAX_ATTRS || index_size > KDTR_MAX_INDEX) {
    return fail(KDTR_ERR_CAP, function_, "%u tensors, %u attributes or %ju bytes of index are above the caps",
                num_tensors_, num_attrs_, uintmax_t{index_size});
  }
  if (index_size > size_ - header::kSize) {
    return fail(KDTR_ERR_CAP, function_, "an index of %ju bytes in a file of %ju", uintmax_t{index_size},
                uintmax_t{size_});
  }
  if (tensor_entry::kMinSize * num_tensors_ + attr_entry::kMinSize * num_attrs_ > index_size) {
    return fail(KDTR_ERR_CAP, function_, "%u tensors and %u attributes do not fit an index of %ju bytes",
                num_tensors_, num_attrs_, uintmax_t{index_size});
  }
  at_ = header::kSize;
  index_end_ = header::kSize + index_size;
  return KDT_OK;
}

int32_t Checker::check_checksum() {
  const uint8_t zero[4] = {};
  uint32_t crc = crc32(0, bytes_, header::kChecksum);
  crc = crc32(crc, zero, sizeof zero);
  crc = crc32(crc, bytes_ + header::kReserved1, index_end_ - header::kReserved1);
  const uint32_t expected = load<uint32_t>(bytes_ + header::kChecksum);
  if (crc == expected) return KDT_OK;
  return fail(KDTR_ERR_INDEX_CHECKSUM, function_, "header and index have checksum %08x, not %08x", crc, expected);
}

int32_t Checker::check_tensor_entry(size_t i) {
  const uint8_t* entry = bytes_ + at_;
  const uint64_t left = index_end_ - at_;
  if (left < tensor_entry::kDims) {
    return fail(KDTR_ERR_INDEX, function_, "tensor %zu: its entry runs past the index", i);
  }
  const int32_t dtype = entry[tensor_entry::kDtype];
  if (kdtr_dtype_size(dtype) == 0) {
    return fail(KDTR_ERR_DTYPE, function_, "tensor %zu: unknown dtype code %d", i, dtype);
  }
  const int32_t ndim = entry[tensor_entry::kNdim];
  if (ndim > KDTR_MAX_DIMS) {
    return fail(KDTR_ERR_SHAPE, function_, "tensor %zu: %d dimensions, at most %d are allowed", i, ndim,
                KDTR_MAX_DIMS);
  }
  const size_t name_len = load<uint16_t>(entry + tensor_entry::kNameLen);
  if (name_len == 0 || name_len > KDTR_MAX_NAME) {
    return fail(KDTR_ERR_NAME, function_, "tensor %zu: a name of %zu bytes, not 1..%d", i, name_len, KDTR_MAX_NAME);
  }
  const uint64_t used = tensor_entry::kDims + uint64_t{8} * entry[tensor_entry::kNdim] + name_len;
  const uint64_t zeros = 1 + padding_after(used + 1, kEntryAlign);
  if (used + zeros > left) {
    return fail(KDTR_ERR_INDEX, function_, "tensor %zu: its entry runs past the index", i);
  }
  int64_t dims[KDTR_MAX_DIMS];
  std::memcpy(dims, entry + tensor_entry::kDims, size_t{8} * entry[tensor_entry::kNdim]);
  uint64_t expected;
  if (!shape_bytes(dtype, dims, ndim, &expected)) {
    return fail(KDTR_ERR_SHAPE, function_, "tensor %zu: its shape is too large", i);
  }
  if (const uint64_t nbytes = load<uint64_t>(entry + tensor_entry::kBytes); nbytes != expected) {
    return fail(KDTR_ERR_SIZE, function_, "tensor %zu: %ju bytes, its shape takes %ju", i, uintmax_t{nbytes},
                uintmax_t{expected});
  }
  if (!valid_name(tensor_name(bytes_, static_cast<uint32_t>(at_)))) {
    return fail(KDTR_ERR_NAME, function_, "tensor %zu: its name has a NUL or is not UTF-8", i);
  }
  if (!all_zero(entry + used, zeros)) {
    return fail(KDTR_ERR_PADDING, function_, "tensor %zu: bytes after its name are not zero", i);
  }
  at_ += used + zeros;
  return KDT_OK;
}

int32_t Checker::check_attr_entry(size_t i) {
  const uint8_t* entry = bytes_ + at_;
  const uint64_t left = index_end_ - at_;
  if (left < attr_entry::kKey) {
    return fail(KDTR_ERR_INDEX, function_, "attribute %zu: its entry runs past the index", i);
  }
  const uint64_t key_len = load<uint32_t>(entry + attr_entry::kKeyLen);
  if (key_len == 0 || key_len > KDTR_MAX_NAME) {
    return fail(KDTR_ERR_NAME, function_, "attribute %zu: a name of %ju bytes, not 1..%d", i, uintmax_t{key_len},
                KDTR_MAX_NAME);
  }
  const uint64_t key_end = attr_entry::kKey + key_len;
  const uint64_t used = key_end + 1 + load<uint32_t>(entry + attr_entry::kValueLen);
  const uint64_t zeros = 1 + padding_after(used + 1, kEntryAlign);
  if (used + zeros > left) {
    return fail(KDTR_ERR_INDEX, function_, "attribute %zu: its entry runs past the index", i);
  }
  const auto at = static_cast<uint32_t>(at_);
  if (!valid_name(attr_key(bytes_, at))) {
    return fail(KDTR_ERR_NAME, function_, "attribute %zu: its name has a NUL or is not UTF-8", i);
  }
  if (!valid_utf8(attr_value(bytes_, at))) {
    return fail(KDTR_ERR_NAME, function_, "attribute %zu: its value is not UTF-8", i);
  }
  if (entry[key_end] != 0 || !all_zero(entry + used, zeros)) {
    return fail(KDTR_ERR_PADDING, function_, "attribute %zu: bytes after its name or value are not zero", i);
  }
  at_ += used + zeros;
  return KDT_OK;
}

int32_t Checker::check_entries(kdtr_file* file) {
  file->bytes = bytes_;
  file->tensors.reserve(num_tensors_);
  for (size_t i = 0; i < num_tensors_; ++i) {
    file->tensors.push_back(static_cast<uint32_t>(at_));
    if (const int32_t status = check_tensor_entry(i); status != KDT_OK) return status;
  }
  file->attrs.reserve(num_attrs_);
  for (size_t i = 0; i < num_attrs_; ++i) {
    file->attrs.push_back(static_cast<uint32_t>(at_));
    if (const int32_t status = check_attr_entry(i); status != KDT_OK) return status;
  }
  if (at_ == index_end_) return KDT_OK;
  return fail(KDTR_ERR_INDEX, function_, "%ju bytes are left over in the index", uintmax_t{index_end_ - at_});
}

// Sorting, not hashing: no choice of names makes it slow.
int32_t Checker::sort_unique(const std::vector<uint32_t>& entries, NameOf name_of, const char* what,
                             std::vector<uint32_t>* sorted) {
  *sorted = entries;
  std::sort(sorted->begin(), sorted->end(),
            [&](uint32_t a, uint32_t b) { return name_of(bytes_, a) < name_of(bytes_, b); });
  const auto twice = std::adjacent_find(sorted->begin(), sorted->end(), [&](uint32_t a, uint32_t b) {
    return name_of(bytes_, a) == name_of(bytes_, b);
  });
  if (twice == sorted->end()) return KDT_OK;
  return fail(KDTR_ERR_NAME, function_, "two %s are named '%s'", what, name_of(bytes_, *twice).data());
}

int32_t Checker::check_layout(const kdtr_file& file) {
  uint64_t cursor = index_end_;
  if (padding_after(cursor, kDataAlign) > size_ - cursor) {
    return fail(KDTR_ERR_OFFSET, function_, "the file ends within the padding of the index");
  }
  cursor += padding_after(cursor, kDataAlign);
  for (const uint32_t at : file.tensors) {
    const uint64_t offset = load<uint64_t>(bytes_ + at + tensor_entry::kOffset);
    const uint64_t nbytes = load<uint64_t>(bytes_ + at + tensor_entry::kBytes);
    const char* name = tensor_name(bytes_, at).data();
    if (offset != cursor) {
      return fail(KDTR_ERR_OFFSET, function_, "tensor '%s' is at %ju, not at %ju", name, uintmax_t{offset},
                  uintmax_t{cursor});
    }
    if (nbytes > size_ - cursor) {
      return fail(KDTR_ERR_OFFSET, function_, "tensor '%s' runs past the end of the file", name);
    }
    cursor += nbytes;
    if (padding_after(cursor, kDataAlign) > size_ - cursor) {
      return fail(KDTR_ERR_OFFSET, function_, "the file ends within the padding of tensor '%s'", name);
    }
    cursor += padding_after(cursor, kDataAlign);
  }
  if (cursor != size_) {
    return fail(KDTR_ERR_OFFSET, function_, "the last tensor ends at %ju, the file at %ju", uintmax_t{cursor},
                uintmax_t{size_});
  }
  return KDT_OK;
}

int32_t Checker::check_contents(const kdtr_file& file) {
  if (!all_zero(bytes_ + index_end_, padding_after(index_end_, kDataAlign))) {
    return fail(KDTR_ERR_PADDING, function_, "bytes after the index are not zero");
  }
  for (const uint32_t at : file.tensors) {
    const kdtr_tensor tensor = read_tensor(bytes_, at);
    const auto* data = static_cast<const uint8_t*>(tensor.data);
    if (!all_zero(data + tensor.nbytes, padding_after(tensor.nbytes, kDataAlign))) {
      return fail(KDTR_ERR_PADDING, function_, "bytes after tensor '%s' are not zero", tensor.name);
    }
    const uint32_t crc = crc32(0, data, tensor.nbytes);
    const uint32_t expected = load<uint32_t>(bytes_ + at + tensor_entry::kChecksum);
    if (crc != expected) {
      return fail(KDTR_ERR_DATA_CHECKSUM, function_, "tensor '%s' has checksum %08x, not %08x", tensor.name, crc,
                  expected);
    }
    if (tensor.dtype == KDTR_BOOL && !all_bool(data, tensor.nbytes)) {
      return fail(KDTR_ERR_VALUE, function_, "tensor '%s' has a bool that is neither 0 nor 1", tensor.name);
    }
  }
  return KDT_OK;
}

int32_t Checker::run(kdtr_file* file) {
  int32_t status = check_header();
  if (status == KDT_OK) status = check_checksum();
  if (status == KDT_OK) status = check_entries(file);
  if (status == KDT_OK) status = sort_unique(file->tensors, tensor_name, "tensors", &file->tensors_by_name);
  if (status == KDT_OK) status = sort_unique(file->attrs, attr_key, "attributes", &file->attrs_by_name);
  if (status == KDT_OK) status = check_layout(*file);
  if (status == KDT_OK) status = check_contents(*file);
  return status;
}

class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

// Reads exactly `size` bytes; false with errno set otherwise (0: the file ended early).
bool read_exactly(int fd, uint8_t* to, uint64_t size) noexcept {
  while (size > 0) {
    const ssize_t got = ::read(fd, to, std::min<uint64_t>(size, 1u << 30));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      if (got == 0) errno = 0;
      return false;
    }
    to += got;
    size -= static_cast<uint64_t>(got);
  }
  return true;
}

int32_t read_error(const char* path) noexcept {
  return fail(KDTR_ERR_IO, "kdtr_open", "cannot read '%s': %s", path,
              errno == 0 ? "it became shorter while being read" : std::strerror(errno));
}

// The header is read and checked alone first, so that a large file that is no KDTR file costs nothing.
int32_t open_file(const char* path, kdtr_file* file) {
  constexpr const char* function = "kdtr_open";
  // O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
  const Descriptor descriptor(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info;
  if (descriptor.get() < 0 || ::fstat(descriptor.get(), &info) != 0) {
    return fail(KDTR_ERR_IO, function, "cannot open '%s': %s", path, std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) return fail(KDTR_ERR_IO, function, "'%s' is not a regular file", path);
  const auto size = static_cast<uint64_t>(info.st_size);

  uint8_t head[header::kSize] = {};
  const uint64_t head_size = std::min<uint64_t>(size, sizeof head);
  if (!read_exactly(descriptor.get(), head, head_size)) return read_error(path);
  if (const int32_t status = Checker(function, head, size).check_header(); status != KDT_OK) return status;

  if (size > SIZE_MAX) return fail(KDT_ERR_OUT_OF_MEMORY, function, "'%s' does not fit the address space", path);
  file->owned.reset(static_cast<uint8_t*>(::operator new(size, std::align_val_t{kDataAlign})));
  std::memcpy(file->owned.get(), head, head_size);
  if (!read_exactly(descriptor.get(), file->owned.get() + head_size, size - head_size)) return read_error(path);
  return Checker(function, file->owned.get(), size).run(file);
}

// The entry of that name, or 0, where no entry can be.
uint32_t find(const kdtr_file& file, const std::vector<uint32_t>& sorted, NameOf name_of, std::string_view name) {
  const auto it = std::lower_bound(sorted.begin(), sorted.end(), name, [&](uint32_t at, std::string_view wanted) {
    return name_of(file.bytes, at) < wanted;
  });
  return it != sorted.end() && name_of(file.bytes, *it) == name ? *it : 0;
}

}  // namespace
}  // namespace kdt::kdtr

using kdt::fail;
using kdt::guarded;

size_t kdtr_dtype_size(int32_t dtype) {
  switch (dtype) {
    case KDTR_F64:
    case KDTR_I64:
    case KDTR_U64:
      return 8;
    case KDTR_F32:
    case KDTR_I32:
    case KDTR_U32:
      return 4;
    case KDTR_F16:
    case KDTR_BF16:
    case KDTR_I16:
    case KDTR_U16:
      return 2;
    case KDTR_I8:
    case KDTR_U8:
    case KDTR_BOOL:
      return 1;
    default:
      return 0;
  }
}

int32_t kdtr_open(const char* path, kdtr_file** file) {
  if (file == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_open", "file is NULL");
  *file = nullptr;
  if (path == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_open", "path is NULL");
  return guarded("kdtr_open", [&] {
    auto opened = std::make_unique<kdtr_file>();
    const int32_t status = kdt::kdtr::open_file(path, opened.get());
    if (status == KDT_OK) *file = opened.release();
    return status;
  });
}

int32_t kdtr_parse(const void* data, size_t size, kdtr_file** file) {
  if (file == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_parse", "file is NULL");
  *file = nullptr;
  if (data == nullptr && size > 0) return fail(KDT_ERR_NULL_POINTER, "kdtr_parse", "data is NULL");
  return guarded("kdtr_parse", [&] {
    auto parsed = std::make_unique<kdtr_file>();
    const int32_t status =
        kdt::kdtr::Checker("kdtr_parse", static_cast<const uint8_t*>(data), size).run(parsed.get());
    if (status == KDT_OK) *file = parsed.release();
    return status;
  });
}

void kdtr_close(kdtr_file* file) { delete file; }

size_t kdtr_num_tensors(const kdtr_file* file) { return file == nullptr ? 0 : file->tensors.size(); }

size_t kdtr_num_attrs(const kdtr_file* file) { return file == nullptr ? 0 : file->attrs.size(); }

int32_t kdtr_tensor_at(const kdtr_file* file, size_t index, kdtr_tensor* tensor) {
  if (tensor == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_tensor_at", "tensor is NULL");
  *tensor = {};
  if (file == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_tensor_at", "file is NULL");
  if (index >= file->tensors.size()) {
    return fail(KDT_ERR_INVALID_ARGUMENT, "kdtr_tensor_at", "index is %zu of %zu tensors", index,
                file->tensors.size());
  }
  *tensor = kdt::kdtr::read_tensor(file->bytes, file->tensors[index]);
  return KDT_OK;
}

int32_t kdtr_attr_at(const kdtr_file* file, size_t index, kdtr_attr* attr) {
  if (attr == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_attr_at", "attr is NULL");
  *attr = {};
  if (file == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_attr_at", "file is NULL");
  if (index >= file->attrs.size()) {
    return fail(KDT_ERR_INVALID_ARGUMENT, "kdtr_attr_at", "index is %zu of %zu attributes", index,
                file->attrs.size());
  }
  *attr = kdt::kdtr::read_attr(file->bytes, file->attrs[index]);
  return KDT_OK;
}

int32_t kdtr_find_tensor(const kdtr_file* file, const char* name, kdtr_tensor* tensor) {
  if (tensor == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_find_tensor", "tensor is NULL");
  *tensor = {};
  if (file == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_find_tensor", "file is NULL");
  if (name == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_find_tensor", "name is NULL");
  const uint32_t at = kdt::kdtr::find(*file, file->tensors_by_name, kdt::kdtr::tensor_name, name);
  if (at == 0) return fail(KDTR_ERR_NOT_FOUND, "kdtr_find_tensor", "no tensor is named '%s'", name);
  *tensor = kdt::kdtr::read_tensor(file->bytes, at);
  return KDT_OK;
}

int32_t kdtr_find_attr(const kdtr_file* file, const char* key, kdtr_attr* attr) {
  if (attr == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_find_attr", "attr is NULL");
  *attr = {};
  if (file == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_find_attr", "file is NULL");
  if (key == nullptr) return fail(KDT_ERR_NULL_POINTER, "kdtr_find_attr", "key is NULL");
  const uint32_t at = kdt::kdtr::find(*file, file->attrs_by_name, kdt::kdtr::attr_key, key);
  if (at == 0) return fail(KDTR_ERR_NOT_FOUND, "kdtr_find_attr", "no attribute is named '%s'", key);
  *attr = kdt::kdtr::read_attr(file->bytes, at);
  return KDT_OK;
}
