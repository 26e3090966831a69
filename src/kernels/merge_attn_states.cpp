// Entry of merge_attn_states: the checks on its arguments.
#include "cpu/ops.hpp"
#include "operation.hpp"

namespace kdt {
namespace {

// One (out, lse) pair, with what error texts call it.
struct State {
  const char *out_name, *lse_name;
  const void* out;
  const float* lse;
  int32_t dtype;
  int64_t row_stride, head_stride, lse_row_stride, lse_head_stride;
};

bool same_array(const State& a, const State& b) {
  return a.out == b.out && a.dtype == b.dtype && a.row_stride == b.row_stride && a.head_stride == b.head_stride;
}

bool same_lse(const State& a, const State& b) {
  return a.lse == b.lse && a.lse_row_stride == b.lse_row_stride && a.lse_head_stride == b.lse_head_stride;
}

struct Call {
  using Params = kdt_merge_attn_states_params;
  Params p;

  int32_t resolve(const char* fn, const kdt_context&, const Params* given, Arrays arrays, ArrayChecker* checker) {
    KDT_TRY(read_struct(fn, "params", given, &p));
    KDT_TRY(check_dimension(fn, "num_rows", p.num_rows, 0, INT32_MAX));
    KDT_TRY(check_dimension(fn, "num_heads", p.num_heads, 1, INT32_MAX));
    KDT_TRY(check_dimension(fn, "v_dim", p.v_dim, 1, INT32_MAX));
    KDT_TRY(check_range(fn, "lse_base", p.lse_base, KDT_LSE_NATURAL, KDT_LSE_BASE2, KDT_ERR_INVALID_ARGUMENT));
    KDT_TRY(check_float_dtype(fn, "a_dtype", p.a_dtype));
    KDT_TRY(check_float_dtype(fn, "b_dtype", p.b_dtype));
    KDT_TRY(check_float_dtype(fn, "out_dtype", p.out_dtype));
    KDT_TRY(settle_rows_per_request(fn, p.num_rows, &p.rows_per_request));
    const int64_t h = p.num_heads, d = p.v_dim;
    KDT_TRY(settle_free_strides(fn, "a_head_stride", &p.a_head_stride, d, "a_row_stride", &p.a_row_stride, h));
    KDT_TRY(settle_free_strides(fn, "b_head_stride", &p.b_head_stride, d, "b_row_stride", &p.b_row_stride, h));
    KDT_TRY(
        settle_free_strides(fn, "out_head_stride", &p.out_head_stride, d, "out_row_stride", &p.out_row_stride, h));
    KDT_TRY(settle_free_strides(fn, "a_lse_head_stride", &p.a_lse_head_stride, 1, "a_lse_row_stride",
                                &p.a_lse_row_stride, h));
    KDT_TRY(settle_free_strides(fn, "b_lse_head_stride", &p.b_lse_head_stride, 1, "b_lse_row_stride",
                                &p.b_lse_row_stride, h));
    KDT_TRY(
        settle_free_strides(fn, "lse_head_stride", &p.lse_head_stride, 1, "lse_row_stride", &p.lse_row_stride, h));
    KDT_TRY(check_distinct(
        fn, {{"out_head_stride", h, p.out_head_stride}, {"out_row_stride", p.num_rows, p.out_row_stride}}, d));
    KDT_TRY(check_distinct(
        fn, {{"lse_head_stride", h, p.lse_head_stride}, {"lse_row_stride", p.num_rows, p.lse_row_stride}}, 1));
    if (arrays == Arrays::kIgnore) return KDT_OK;

    using Use = ArrayChecker::Use;
    const State a = {"a",
                     "a_lse",
                     p.a,
                     p.a_lse,
                     p.a_dtype,
                     p.a_row_stride,
                     p.a_head_stride,
                     p.a_lse_row_stride,
                     p.a_lse_head_stride};
    const State b = {"b",
                     "b_lse",
                     p.b,
                     p.b_lse,
                     p.b_dtype,
                     p.b_row_stride,
                     p.b_head_stride,
                     p.b_lse_row_stride,
                     p.b_lse_head_stride};
    const State out = {"out",
                       "lse",
                       p.out,
                       p.lse,
                       p.out_dtype,
                       p.out_row_stride,
                       p.out_head_stride,
                       p.lse_row_stride,
                       p.lse_head_stride};
    const auto add_out = [&](const State& s, Use use) -> int32_t {
      int64_t extent;
      KDT_TRY(nested_extent(fn, s.out_name, p.num_rows, s.row_stride, h, s.head_stride, d, &extent));
      return checker->add_floats(s.out_name, s.out, s.dtype, use, p.num_rows == 0 ? 0 : 1, 1, extent);
    };
    const auto add_lse = [&](const State& s, Use use) -> int32_t {
      int64_t extent;
      KDT_TRY(nested_extent(fn, s.lse_name, p.num_rows, s.lse_row_stride, h, s.lse_head_stride, 1, &extent));
      return checker->add(s.lse_name, s.lse, use, p.num_rows == 0 ? 0 : 1, 1, extent);
    };
    for (const State* side : {&a, &b}) {  // a side that is the output is checked as the output
      if (!same_array(*side, out)) KDT_TRY(add_out(*side, Use::kIn));
      if (!same_lse(*side, out)) KDT_TRY(add_lse(*side, Use::kIn));
    }
    KDT_TRY(add_out(out, Use::kOut));
    KDT_TRY(add_lse(out, Use::kOut));
    return checker->add("num_live", p.num_live, Use::kOptionalIn, 1);
  }

  size_t workspace_size(const kdt_context&) const { return 0; }
  void run(const kdt_context& context, void*) const { cpu::merge_attn_states(context, p); }
};

}  // namespace
}  // namespace kdt

int32_t kdt_merge_attn_states_workspace_size(const kdt_context* context, const kdt_merge_attn_states_params* params,
                                             size_t* size) {
  return kdt::query_workspace<kdt::Call>("kdt_merge_attn_states_workspace_size", context, params, size);
}

int32_t kdt_merge_attn_states(const kdt_context* context, const kdt_merge_attn_states_params* params,
                              void* workspace, size_t workspace_size, void* stream) {
  return kdt::launch<kdt::Call>("kdt_merge_attn_states", context, params, workspace, workspace_size, stream);
}
