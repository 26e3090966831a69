#include "args.hpp"

#include <algorithm>
#include <cinttypes>

namespace kdt {

int32_t check_struct_bytes(const char* function, const char* name, const void* given, size_t alignment,
                           size_t known_size) {
  KDT_TRY(check_not_null(function, name, given));
  if (reinterpret_cast<uintptr_t>(given) % alignment != 0) {
    return fail(KDT_ERR_ALIGNMENT, function, "argument '%s': expected a struct aligned to %zu bytes, got %p", name,
                alignment, given);
  }
  size_t size;
  std::memcpy(&size, given, sizeof size);
  if (size < known_size || size > kMaxStructSize) {
    return fail(KDT_ERR_STRUCT, function,
                "argument '%s': expected struct_size %zu (or up to %zu with zeros), got %zu", name, known_size,
                kMaxStructSize, size);
  }
  const unsigned char* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = known_size; i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(KDT_ERR_STRUCT, function,
                  "argument '%s': struct_size %zu is newer than this library's %zu, and byte %zu beyond it is set",
                  name, size, known_size, i);
    }
  }
  return KDT_OK;
}

int32_t check_not_null(const char* function, const char* name, const void* pointer) {
  if (pointer != nullptr) return KDT_OK;
  return fail(KDT_ERR_NULL_POINTER, function, "argument '%s': expected a pointer, got NULL", name);
}

int32_t check_range(const char* function, const char* name, int64_t value, int64_t low, int64_t high,
                    int32_t error) {
  if (value >= low && value <= high) return KDT_OK;
  return fail(error, function, "argument '%s': expected %" PRId64 "..%" PRId64 ", got %" PRId64, name, low, high,
              value);
}

int32_t check_dimension(const char* function, const char* name, int64_t value, int64_t low, int64_t limit) {
  return check_range(function, name, value, low, limit, value < low ? KDT_ERR_SHAPE : KDT_ERR_LIMIT);
}

int32_t check_reserved(const char* function, const char* name, bool unset) {
  if (unset) return KDT_OK;
  return fail(KDT_ERR_UNSUPPORTED, function, "argument '%s': reserved, expected 0 or NULL", name);
}

int32_t settle_stride(const char* function, const char* name, int64_t* stride, int64_t minimum) {
  if (*stride == 0) *stride = minimum;
  if (*stride >= minimum) return KDT_OK;
  return fail(KDT_ERR_STRIDE, function, "argument '%s': expected 0 (packed) or at least %" PRId64 ", got %" PRId64,
              name, minimum, *stride);
}

int32_t settle_nested_strides(const char* function, const char* row_name, int64_t* row_stride, int64_t width,
                              const char* outer_name, int64_t* outer_stride, int64_t rows) {
  KDT_TRY(settle_stride(function, row_name, row_stride, width));
  int64_t minimum;
  if (__builtin_mul_overflow(rows, *row_stride, &minimum)) {
    return fail(KDT_ERR_STRIDE, function, "argument '%s': the rows do not fit in the address space", row_name);
  }
  return settle_stride(function, outer_name, outer_stride, minimum);
}

int32_t settle_free_strides(const char* function, const char* head_name, int64_t* head_stride, int64_t width,
                            const char* row_name, int64_t* row_stride, int64_t heads, const char* outer_name,
                            int64_t* outer_stride, int64_t rows) {
  const auto settle = [&](const char* name, int64_t* stride, int64_t count, int64_t unit) -> int32_t {
    if (*stride == 0 && __builtin_mul_overflow(count, unit, stride)) {
      return fail(KDT_ERR_STRIDE, function, "argument '%s': the packed array does not fit in the address space",
                  name);
    }
    return settle_stride(function, name, stride, width);
  };
  KDT_TRY(settle(head_name, head_stride, 1, width));
  KDT_TRY(settle(row_name, row_stride, heads, *head_stride));
  return outer_name == nullptr ? KDT_OK : settle(outer_name, outer_stride, rows, *row_stride);
}

int32_t nested_extent(const char* function, const char* name, int64_t rows, int64_t row_stride, int64_t heads,
                      int64_t head_stride, int64_t width, int64_t* extent) {
  int64_t head_span;
  if (rows == 0 || heads == 0 || width == 0) {
    *extent = 0;
  } else if (__builtin_mul_overflow(heads - 1, head_stride, &head_span) ||
             __builtin_mul_overflow(rows - 1, row_stride, extent) ||
             __builtin_add_overflow(*extent, head_span, extent) || __builtin_add_overflow(*extent, width, extent)) {
    return fail(KDT_ERR_STRIDE, function, "argument '%s': it does not fit in the address space", name);
  }
  return KDT_OK;
}

int32_t check_distinct(const char* function, std::initializer_list<Dimension> dimensions, int64_t width) {
  std::vector<Dimension> ascending;
  for (const Dimension& d : dimensions) {
    if (d.count > 1) ascending.push_back(d);
  }
  std::sort(ascending.begin(), ascending.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  int64_t span = width;
  for (const Dimension& d : ascending) {
    int64_t reach;
    if (d.stride < span) {
      return fail(KDT_ERR_STRIDE, function,
                  "argument '%s': expected at least %" PRId64 " so that rows do not overlap, got %" PRId64, d.name,
                  span, d.stride);
    }
    if (__builtin_mul_overflow(d.count - 1, d.stride, &reach) || __builtin_add_overflow(span, reach, &span)) {
      return fail(KDT_ERR_STRIDE, function, "argument '%s': the array does not fit in the address space", d.name);
    }
  }
  return KDT_OK;
}

int32_t read_tree(const char* function, const kdt_tree* given, kdt_tree* out) {
  KDT_TRY(read_struct(function, "tree", given, out));
  KDT_TRY(check_dimension(function, "tree.batch_size", out->batch_size, 0, INT32_MAX));
  KDT_TRY(check_dimension(function, "tree.num_slots", out->num_slots, 1, KDT_MAX_BUDGET + 1));
  KDT_TRY(settle_stride(function, "tree.slot_stride", &out->slot_stride, out->num_slots));
  KDT_TRY(settle_stride(function, "tree.visibility_pitch", &out->visibility_pitch, (out->num_slots + 63) / 64));
  int64_t minimum;
  if (__builtin_mul_overflow(out->visibility_pitch, static_cast<int64_t>(out->num_slots), &minimum)) {
    return fail(KDT_ERR_STRIDE, function, "argument 'tree.visibility_pitch': %" PRId64 " is too large",
                out->visibility_pitch);
  }
  return settle_stride(function, "tree.visibility_stride", &out->visibility_stride, minimum);
}

int32_t check_float_dtype(const char* function, const char* name, int32_t dtype) {
  if (dtype == KDT_F32 || dtype == KDT_F16 || dtype == KDT_BF16) return KDT_OK;
  return fail(KDT_ERR_UNSUPPORTED, function, "argument '%s': expected KDT_F32, KDT_F16 or KDT_BF16, got %d", name,
              dtype);
}

int32_t settle_rows_per_request(const char* function, int32_t num_rows, int32_t* rows_per_request) {
  if (*rows_per_request == 0) *rows_per_request = 1;
  if (*rows_per_request > 0 && num_rows % *rows_per_request == 0) return KDT_OK;
  return fail(KDT_ERR_SHAPE, function, "argument 'rows_per_request': expected a divisor of num_rows = %d, got %d",
              num_rows, *rows_per_request);
}

int32_t check_logits(const char* function, int32_t num_rows, int32_t vocab_size, int32_t dtype, int32_t id_offset,
                     int64_t* stride) {
  KDT_TRY(check_dimension(function, "num_rows", num_rows, 0, INT32_MAX));
  KDT_TRY(check_dimension(function, "vocab_size", vocab_size, 0, INT32_MAX));
  KDT_TRY(check_float_dtype(function, "logits_dtype", dtype));
  // Ids are below 2^31; an empty vocabulary has none.
  const int64_t last = (int64_t{1} << 31) - std::max(vocab_size, 1);
  KDT_TRY(check_range(function, "id_offset", id_offset, 0, last, KDT_ERR_INVALID_ARGUMENT));
  KDT_TRY(settle_stride(function, "logits_stride", stride, vocab_size));
  if (vocab_size == 0) *stride = 0;  // nothing there to step over
  return KDT_OK;
}

bool span_bytes(int64_t count, int64_t stride, int64_t extent, int64_t element_size, int64_t* bytes) {
  if (count == 0 || extent == 0) {
    *bytes = 0;
    return true;
  }
  int64_t elements;
  return !__builtin_mul_overflow(count - 1, stride, &elements) &&
         !__builtin_add_overflow(elements, extent, &elements) &&
         !__builtin_mul_overflow(elements, element_size, bytes);
}

int32_t ArrayChecker::add_bytes(const char* name, const void* array, Use use, int64_t count, int64_t stride,
                                int64_t extent, int64_t element_size, size_t alignment) {
  const bool optional = use == Use::kOptionalIn || use == Use::kOptionalOut;
  const bool written = use == Use::kOut || use == Use::kOptionalOut;
  if (array == nullptr && (optional || count == 0 || extent == 0)) return KDT_OK;
  KDT_TRY(check_not_null(function_, name, array));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(array);
  if (begin % alignment != 0) {
    return fail(KDT_ERR_ALIGNMENT, function_, "argument '%s': expected a pointer aligned to %zu bytes, got %p",
                name, alignment, array);
  }
  int64_t bytes;
  if (!span_bytes(count, stride, extent, element_size, &bytes) ||
      static_cast<uintptr_t>(bytes) > UINTPTR_MAX - begin) {
    return fail(KDT_ERR_STRIDE, function_,
                "argument '%s': %" PRId64 " entries of stride %" PRId64 " do not fit in the address space", name,
                count, stride);
  }
  if (bytes > 0) ranges_.push_back({name, begin, begin + static_cast<uintptr_t>(bytes), written});
  return KDT_OK;
}

int32_t ArrayChecker::check_overlaps() {
  std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const Range* farthest = nullptr;          // of those seen, the one that ends last
  const Range* farthest_written = nullptr;  // likewise among outputs
  for (const Range& range : ranges_) {
    const Range* other = range.written ? farthest : farthest_written;
    if (other != nullptr && range.begin < other->end) {
      const Range* output = range.written ? &range : other;
      return fail(KDT_ERR_OVERLAP, function_, "argument '%s': expected memory of its own, but it overlaps '%s'",
                  output->name, (output == &range ? other : &range)->name);
    }
    if (farthest == nullptr || range.end > farthest->end) farthest = &range;
    if (range.written && (farthest_written == nullptr || range.end > farthest_written->end))
      farthest_written = &range;
  }
  return KDT_OK;
}

int32_t ArrayChecker::add_output_tree(const kdt_tree& t) {
  const int64_t b = t.batch_size, n = t.num_slots, words = (n + 63) / 64;
  KDT_TRY(add("tree.tokens", t.tokens, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.parents", t.parents, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.first_child", t.first_child, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.next_sibling", t.next_sibling, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.depths", t.depths, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.positions", t.positions, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.log_probs", t.log_probs, Use::kOut, b, t.slot_stride, n));
  KDT_TRY(add("tree.visibility", t.visibility, Use::kOut, b, t.visibility_stride,
              (n - 1) * t.visibility_pitch + words));
  KDT_TRY(add("tree.node_count", t.node_count, Use::kOut, b));
  return add("tree.status", t.status, Use::kOptionalOut, b);
}

int32_t check_call(const char* function, const kdt_context& context, const void* stream, const void* workspace,
                   size_t workspace_size, size_t workspace_needed, ArrayChecker* checker) {
  if (context.backend == KDT_BACKEND_CPU && stream != nullptr) {
    return fail(KDT_ERR_INVALID_ARGUMENT, function, "argument 'stream': expected NULL on the CPU backend, got %p",
                stream);
  }
  if (workspace_needed > 0 && (workspace == nullptr || workspace_size < workspace_needed)) {
    return fail(KDT_ERR_WORKSPACE, function, "argument 'workspace': expected %zu bytes, got %s%zu",
                workspace_needed, workspace == nullptr ? "NULL and " : "", workspace_size);
  }
  const int64_t bytes = static_cast<int64_t>(std::min(workspace_size, static_cast<size_t>(INT64_MAX)));
  KDT_TRY(checker->add_bytes("workspace", workspace, ArrayChecker::Use::kOptionalOut, 1, 1, bytes, 1, 1));
  return checker->check_overlaps();
}

}  // namespace kdt
