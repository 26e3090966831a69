// Checks on the arguments of the exported operations. Every operation's entry reads the same way: copy the
// parameter structs, check scalars, settle strides, then hand each array to an ArrayChecker. Each check
// returns a status and has recorded the error text when it is not KDT_OK.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "context.hpp"
#include "error.hpp"
#include "kdtree/kdtree.h"

#define KDT_TRY(call)                                                \
  do {                                                               \
    if (int32_t status_ = (call); status_ != KDT_OK) return status_; \
  } while (0)

namespace kdt {

// Largest struct_size read: stops a wild value from sending us through foreign memory.
inline constexpr size_t kMaxStructSize = 4096;

int32_t check_struct_bytes(const char* function, const char* name, const void* given, size_t alignment,
                           size_t known_size);

// Copies a caller's struct whose first member is its size. Version 1 of the ABI knows one size of each struct;
// a larger one (from a newer header) is legal when the bytes unknown here are zero.
template <class Struct>
int32_t read_struct(const char* function, const char* name, const Struct* given, Struct* out) {
  KDT_TRY(check_struct_bytes(function, name, given, alignof(Struct), sizeof(Struct)));
  std::memcpy(out, given, sizeof(Struct));
  return KDT_OK;
}

int32_t check_not_null(const char* function, const char* name, const void* pointer);
int32_t check_range(const char* function, const char* name, int64_t value, int64_t low, int64_t high,
                    int32_t error);
// A dimension: below `low` it is no shape (SHAPE), above `limit` it is more than we promise (LIMIT).
int32_t check_dimension(const char* function, const char* name, int64_t value, int64_t low, int64_t limit);
int32_t check_reserved(const char* function, const char* name, bool unset);

// Whether the arrays of a call are looked at: a workspace query reads scalars only.
enum class Arrays { kIgnore, kCheck };

// Settles one stride: 0 becomes `minimum`, less is refused.
int32_t settle_stride(const char* function, const char* name, int64_t* stride, int64_t minimum);

// [outer, rows, width]: a row stride >= width and an outer stride >= rows * row stride.
int32_t settle_nested_strides(const char* function, const char* row_name, int64_t* row_stride, int64_t width,
                              const char* outer_name, int64_t* outer_stride, int64_t rows);

// [outer, rows, heads, width] whose dimensions may lie in any order: packed by default, each stride >= width.
int32_t settle_free_strides(const char* function, const char* head_name, int64_t* head_stride, int64_t width,
                            const char* row_name, int64_t* row_stride, int64_t heads,
                            const char* outer_name = nullptr, int64_t* outer_stride = nullptr, int64_t rows = 0);

// Elements that [rows, heads, width] spans.
int32_t nested_extent(const char* function, const char* name, int64_t rows, int64_t row_stride, int64_t heads,
                      int64_t head_stride, int64_t width, int64_t* extent);

// One dimension of a strided array, with what error texts call its stride.
struct Dimension {
  const char* name;
  int64_t count, stride;
};

// Checks that no two entries, each `width` elements wide, share an element: by ascending stride, each dimension
// must step over all that the ones before it span.
int32_t check_distinct(const char* function, std::initializer_list<Dimension> dimensions, int64_t width);

// Reads the batch's tree struct and settles its strides. No array is looked at.
int32_t read_tree(const char* function, const kdt_tree* given, kdt_tree* out);

// Logits, queries, caches: KDT_F32, KDT_F16 or KDT_BF16.
int32_t check_float_dtype(const char* function, const char* name, int32_t dtype);
inline int64_t float_dtype_size(int32_t dtype) { return dtype == KDT_F32 ? 4 : 2; }

// Settles rows_per_request: 0 becomes 1; it must divide the number of rows.
int32_t settle_rows_per_request(const char* function, int32_t num_rows, int32_t* rows_per_request);

// The scalars of an operation on rows of logits.
int32_t check_logits(const char* function, int32_t num_rows, int32_t vocab_size, int32_t dtype, int32_t id_offset,
                     int64_t* stride);

// Checks the arrays of one call: not NULL, aligned, inside the address space, and (check_overlaps, called by
// check_call) no output over another array.
class ArrayChecker {
 public:
  explicit ArrayChecker(const char* function) : function_(function) { ranges_.reserve(32); }

  // An array whose outermost dimension has `count` entries `stride` elements apart, each spanning `extent`
  // elements. Optional arrays may be NULL.
  enum class Use { kIn, kOptionalIn, kOut, kOptionalOut };
  template <class T>
  int32_t add(const char* name, const T* array, Use use, int64_t count, int64_t stride = 1, int64_t extent = 1) {
    return add_bytes(name, array, use, count, stride, extent, sizeof(T), alignof(T));
  }
  int32_t add_bytes(const char* name, const void* array, Use use, int64_t count, int64_t stride, int64_t extent,
                    int64_t element_size, size_t alignment);
  // An array of one of the float dtypes.
  int32_t add_floats(const char* name, const void* array, int32_t dtype, Use use, int64_t count, int64_t stride,
                     int64_t extent) {
    const int64_t size = float_dtype_size(dtype);
    return add_bytes(name, array, use, count, stride, extent, size, static_cast<size_t>(size));
  }

  // All arrays of a tree, as an operation that returns one writes them.
  int32_t add_output_tree(const kdt_tree& tree);

  // The last check: no array that is written shares a byte with another.
  int32_t check_overlaps();

  // Calls check(name, first byte) for every array that has elements, until one fails.
  template <class Check>
  int32_t for_each_array(Check&& check) const {
    for (const Range& range : ranges_) KDT_TRY(check(range.name, reinterpret_cast<const void*>(range.begin)));
    return KDT_OK;
  }

 private:
  struct Range {
    const char* name;
    uintptr_t begin, end;
    bool written;
  };
  const char* function_;
  std::vector<Range> ranges_;
};

// The arguments every operation shares, checked last. CPU calls finish before they return, so a stream is a mistake
// there.
int32_t check_call(const char* function, const kdt_context& context, const void* stream, const void* workspace,
                   size_t workspace_size, size_t workspace_needed, ArrayChecker* checker);

// Bytes from the first to past the last element; false when it does not fit in the address space.
bool span_bytes(int64_t count, int64_t stride, int64_t extent, int64_t element_size, int64_t* bytes);

}  // namespace kdt
