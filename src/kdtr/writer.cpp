// The KDTR writer: check everything, lay it out, write a temporary file, rename it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/error.hpp"
#include "crc32.hpp"
#include "format.hpp"

namespace kdt::kdtr {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFunction = "kdtr_save";
constexpr uint64_t kMaxFileSize = (uint64_t{1} << 63) - kDataAlign;  // the last aligned one an off_t holds

// strlen, but a name without an end costs no more than a name that is too long.
std::string_view name_view(const char* name) noexcept { return {name, strnlen(name, KDTR_MAX_NAME + 1)}; }

int32_t check_tensor(size_t i, const kdtr_tensor& tensor) {
  if (tensor.name == nullptr) return fail(KDT_ERR_NULL_POINTER, kFunction, "tensor %zu: name is NULL", i);
  if (kdtr_dtype_size(tensor.dtype) == 0) {
    return fail(KDTR_ERR_DTYPE, kFunction, "tensor %zu: unknown dtype code %d", i, tensor.dtype);
  }
  if (tensor.ndim < 0 || tensor.ndim > KDTR_MAX_DIMS) {
    return fail(KDTR_ERR_SHAPE, kFunction, "tensor %zu: %d dimensions, not 0..%d", i, tensor.ndim, KDTR_MAX_DIMS);
  }
  uint64_t expected;
  if (!shape_bytes(tensor.dtype, tensor.dims, tensor.ndim, &expected)) {
    return fail(KDTR_ERR_SHAPE, kFunction, "tensor %zu: a dimension is negative or the shape too large", i);
  }
  if (tensor.nbytes != expected) {
    return fail(KDTR_ERR_SIZE, kFunction, "tensor %zu: nbytes is %ju, its shape takes %ju", i,
                uintmax_t{tensor.nbytes}, uintmax_t{expected});
  }
  if (!valid_name(name_view(tensor.name))) {
    return fail(KDTR_ERR_NAME, kFunction, "tensor %zu: its name is not 1..%d bytes of UTF-8", i, KDTR_MAX_NAME);
  }
  if (tensor.data == nullptr && tensor.nbytes > 0) {
    return fail(KDT_ERR_NULL_POINTER, kFunction, "tensor '%s': data is NULL", tensor.name);
  }
  if (tensor.dtype == KDTR_BOOL && !all_bool(static_cast<const uint8_t*>(tensor.data), tensor.nbytes)) {
    return fail(KDTR_ERR_VALUE, kFunction, "tensor '%s' has a bool that is neither 0 nor 1", tensor.name);
  }
  return KDT_OK;
}

int32_t check_attr(size_t i, const kdtr_attr& attr) {
  if (attr.key == nullptr) return fail(KDT_ERR_NULL_POINTER, kFunction, "attribute %zu: key is NULL", i);
  if (attr.value == nullptr && attr.value_size > 0) {
    return fail(KDT_ERR_NULL_POINTER, kFunction, "attribute %zu: value is NULL", i);
  }
  if (!valid_name(name_view(attr.key))) {
    return fail(KDTR_ERR_NAME, kFunction, "attribute %zu: its key is not 1..%d bytes of UTF-8", i, KDTR_MAX_NAME);
  }
  if (attr.value_size > KDTR_MAX_INDEX) {
    return fail(KDTR_ERR_CAP, kFunction, "attribute '%s': a value of %zu bytes does not fit the index", attr.key,
                attr.value_size);
  }
  if (!valid_utf8({attr.value, attr.value_size})) {
    return fail(KDTR_ERR_NAME, kFunction, "attribute '%s': its value is not UTF-8", attr.key);
  }
  return KDT_OK;
}

int32_t check_unique(std::vector<std::string_view> names, const char* what) {
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return KDT_OK;
  return fail(KDTR_ERR_NAME, kFunction, "two %s are named '%s'", what, twice->data());
}

int32_t check_all(const kdtr_tensor* tensors, size_t num_tensors, const kdtr_attr* attrs, size_t num_attrs) {
  if (num_tensors > KDTR_MAX_TENSORS || num_attrs > KDTR_MAX_ATTRS) {
    return fail(KDTR_ERR_CAP, kFunction, "%zu tensors and %zu attributes, at most %d and %d are allowed",
                num_tensors, num_attrs, KDTR_MAX_TENSORS, KDTR_MAX_ATTRS);
  }
  std::vector<std::string_view> names, keys;
  for (size_t i = 0; i < num_tensors; ++i) {
    if (const int32_t status = check_tensor(i, tensors[i]); status != KDT_OK) return status;
    names.push_back(tensors[i].name);
  }
  for (size_t i = 0; i < num_attrs; ++i) {
    if (const int32_t status = check_attr(i, attrs[i]); status != KDT_OK) return status;
    keys.push_back(attrs[i].key);
  }
  const int32_t status = check_unique(std::move(names), "tensors");
  return status == KDT_OK ? check_unique(std::move(keys), "attributes") : status;
}

// Header and index, growing; all numbers are little endian as the host's.
class Index {
 public:
  Index() : bytes_(header::kSize) {}

  template <class T>
  void put(T value) {
    append(&value, sizeof value);
  }
  void put_text(std::string_view text) {  // and its NUL
    append(text.data(), text.size());
    bytes_.push_back(0);
  }
  void pad(uint64_t align) { bytes_.resize(bytes_.size() + padding_after(bytes_.size(), align)); }
  size_t size() const noexcept { return bytes_.size(); }
  uint8_t* data() noexcept { return bytes_.data(); }

 private:
  void append(const void* from, size_t size) {
    const size_t end = bytes_.size();
    bytes_.resize(end + size);
    if (size > 0) std::memcpy(bytes_.data() + end, from, size);
  }

  std::vector<uint8_t> bytes_;
};

// Everything before the first tensor's data. Fails when the index or the file becomes too large.
int32_t build_index(const kdtr_tensor* tensors, size_t num_tensors, const kdtr_attr* attrs, size_t num_attrs,
                    Index* index) {
  // The size of each entry is at most a few hundred bytes, or 64 MiB for a value: no sum here overflows.
  uint64_t index_size = 0;
  const auto add_entry = [&index_size](uint64_t size) { index_size += size + padding_after(size, kEntryAlign); };
  for (size_t i = 0; i < num_tensors; ++i) {
    add_entry(tensor_entry::kDims + uint64_t{8} * static_cast<uint64_t>(tensors[i].ndim) +
              std::strlen(tensors[i].name) + 1);
  }
  for (size_t i = 0; i < num_attrs; ++i) {
    add_entry(attr_entry::kKey + std::strlen(attrs[i].key) + 1 + attrs[i].value_size + 1);
  }
  if (index_size > KDTR_MAX_INDEX) {
    return fail(KDTR_ERR_CAP, kFunction, "the index takes %ju bytes, at most %d are allowed", uintmax_t{index_size},
                KDTR_MAX_INDEX);
  }

  uint64_t cursor = header::kSize + index_size;
  cursor += padding_after(cursor, kDataAlign);
  for (size_t i = 0; i < num_tensors; ++i) {
    const kdtr_tensor& tensor = tensors[i];
    if (tensor.nbytes > kMaxFileSize - cursor) {
      return fail(KDTR_ERR_CAP, kFunction, "the tensors take more than 2^63 bytes");
    }
    index->put(cursor);
    index->put(tensor.nbytes);
    index->put(crc32(0, tensor.data, tensor.nbytes));
    index->put(static_cast<uint16_t>(std::strlen(tensor.name)));
    index->put(static_cast<uint8_t>(tensor.dtype));
    index->put(static_cast<uint8_t>(tensor.ndim));
    for (int32_t d = 0; d < tensor.ndim; ++d) index->put(tensor.dims[d]);
    index->put_text(tensor.name);
    index->pad(kEntryAlign);
    cursor += tensor.nbytes;
    cursor += padding_after(cursor, kDataAlign);
  }
  for (size_t i = 0; i < num_attrs; ++i) {
    index->put(static_cast<uint32_t>(std::strlen(attrs[i].key)));
    index->put(static_cast<uint32_t>(attrs[i].value_size));
    index->put_text(attrs[i].key);
    index->put_text({attrs[i].value, attrs[i].value_size});
    index->pad(kEntryAlign);
  }
  uint8_t* head = index->data();
  std::memcpy(head, kMagic, sizeof kMagic);
  store(head + header::kVersion, kVersion);
  store(head + header::kFileSize, cursor);
  store(head + header::kIndexSize, index_size);
  store(head + header::kNumTensors, static_cast<uint32_t>(num_tensors));
  store(head + header::kNumAttrs, static_cast<uint32_t>(num_attrs));
  store(head + header::kChecksum, crc32(0, head, index->size()));  // the field itself is still zero
  index->pad(kDataAlign);
  return KDT_OK;
}

int32_t io_error(const char* what, const fs::path& path, int error) {
  return fail(KDTR_ERR_IO, kFunction, "cannot %s '%s': %s", what, path.c_str(), std::strerror(error));
}

// The file that `path` names after symbolic links, which need not exist yet.
int32_t resolve(const char* path, fs::path* target) {
  *target = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(*target, error)); ++links) {
    if (links == 40) return io_error("write", path, ELOOP);
    const fs::path next = fs::read_symlink(*target, error);
    if (error) return io_error("read link", *target, error.value());
    *target = target->parent_path() / next;
  }
  const fs::file_status status = fs::status(*target, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    return fail(KDTR_ERR_IO, kFunction, "'%s' is not a regular file", path);
  }
  return KDT_OK;
}

// A new file beside `target` that disappears again unless it is renamed.
class TemporaryFile {
 public:
  TemporaryFile() = default;
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }

  int32_t create(const fs::path& target) {
    static std::atomic<uint32_t> counter = 0;
    for (int attempt = 0; attempt < 100; ++attempt) {
      fs::path path =
          target.parent_path() / (".kdtr-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp");
      fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ >= 0) {
        path_ = std::move(path);
        return KDT_OK;
      }
      if (errno != EEXIST) break;  // a leftover of a crash has this name: try the next
    }
    return io_error("create a file beside", target, errno);
  }

  int32_t write(const void* data, uint64_t size) {
    const auto* from = static_cast<const uint8_t*>(data);
    while (size > 0) {
      const ssize_t done = ::write(fd_, from, std::min<uint64_t>(size, 1u << 30));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) return io_error("write", path_, errno);
      from += done;
      size -= static_cast<uint64_t>(done);
    }
    return KDT_OK;
  }

  int32_t commit(const fs::path& target) {
    if (::fsync(fd_) != 0) return io_error("sync", path_, errno);
    const int closed = ::close(fd_);
    fd_ = -1;
    if (closed != 0) return io_error("close", path_, errno);
    if (::rename(path_.c_str(), target.c_str()) != 0) return io_error("rename to", target, errno);
    path_.clear();
    return KDT_OK;
  }

 private:
  int fd_ = -1;
  fs::path path_;
};

int32_t save(const char* path, const kdtr_tensor* tensors, size_t num_tensors, const kdtr_attr* attrs,
             size_t num_attrs) {
  Index index;
  fs::path target;
  TemporaryFile file;
  int32_t status = check_all(tensors, num_tensors, attrs, num_attrs);
  if (status == KDT_OK) status = build_index(tensors, num_tensors, attrs, num_attrs, &index);
  if (status == KDT_OK) status = resolve(path, &target);
  if (status == KDT_OK) status = file.create(target);
  if (status == KDT_OK) status = file.write(index.data(), index.size());
  const uint8_t zeros[kDataAlign] = {};
  for (size_t i = 0; i < num_tensors && status == KDT_OK; ++i) {
    status = file.write(tensors[i].data, tensors[i].nbytes);
    if (status == KDT_OK) status = file.write(zeros, padding_after(tensors[i].nbytes, kDataAlign));
  }
  return status == KDT_OK ? file.commit(target) : status;
}

}  // namespace
}  // namespace kdt::kdtr

int32_t kdtr_save(const char* path, const kdtr_tensor* tensors, size_t num_tensors, const kdtr_attr* attrs,
                  size_t num_attrs) {
  if (path == nullptr) return kdt::fail(KDT_ERR_NULL_POINTER, "kdtr_save", "path is NULL");
  if (tensors == nullptr && num_tensors > 0) {
    return kdt::fail(KDT_ERR_NULL_POINTER, "kdtr_save", "tensors is NULL");
  }
  if (attrs == nullptr && num_attrs > 0) return kdt::fail(KDT_ERR_NULL_POINTER, "kdtr_save", "attrs is NULL");
  return kdt::guarded("kdtr_save", [&] { return kdt::kdtr::save(path, tensors, num_tensors, attrs, num_attrs); });
}
