// verify_attn's last kernel: joins what the parts of a tile's cache rows have come to (verify_attn_parts.cuh), in
// their order, so that results have the same bits every time.
//
// Limits: none of its own. Reads 2 KB a query row and part; with the parts of one call some 30 MB at most, which
// the L2 cache holds.
#include <cmath>

#include "mma.cuh"
#include "verify_attn_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kCombineThreads = kVDim / 4;

// A block a query row: joins the parts of rows whose tile was cut, and writes those of requests without rows. A
// thread has four neighbouring columns; every warp works out the parts' factors, a lane a part, for itself.
__global__ void __launch_bounds__(kCombineThreads)
    combine(const __grid_constant__ kdt_verify_attn_params p, const int64_t* offsets, const Partial* partials,
            int64_t tiles, int64_t most_parts, int32_t block_rows, float one) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int32_t query_rows = p.num_queries * p.num_heads;
  wait_for_primary();
  const Cut cut(max(offsets[p.batch_size], int64_t{1}), block_rows, tiles, most_parts);
  const float scale = scale_of(p);
  const int64_t rows = int64_t{p.batch_size} * query_rows;
  for (int64_t item = blockIdx.x; item < rows; item += gridDim.x) {
    const int64_t b = quotient(item, query_rows);
    const int32_t row = static_cast<int32_t>(item - b * query_rows), tile_row = row % kTile;
    const int64_t begin = offsets[b], end = offsets[b + 1], line = row / kTile * cut.blocks;
    int64_t first_part = 0, last_part = -1;
    if (begin < end) {
      first_part = cut.part_with(line + begin);
      last_part = cut.part_with(line + end - 1);
      if (first_part == last_part) continue;  // attend has written it
    }
    // The first part begins with other work or with this, the others with this.
    const auto partial_of = [&](int64_t part) -> const Partial& {
      return partials[part * 2 + (part == first_part ? 1 : 0)];
    };
    float top = negative_infinity();
    for (int64_t part = first_part + lane; part <= last_part; part += kWarpSize) {
      top = fmaxf(top, partial_of(part).states[tile_row].max);
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));

    float4 sums = {};
    double total = 0.0;
    int32_t any_seen = 0;
    for (int64_t base = first_part; base <= last_part; base += kWarpSize) {
      RowState state = {negative_infinity(), 0.0f, 0.0f, 0};
      if (base + lane <= last_part) state = partial_of(base + lane).states[tile_row];
      const float factor = state.max == top ? 1.0f : exp2_approx((state.max - top) * scale);
      const unsigned seen = __ballot_sync(kAllLanes, state.seen != 0);
      double weight = state.seen != 0 ? static_cast<double>(factor) * static_cast<double>(state.weight) : 0.0;
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) weight += __shfl_xor_sync(kAllLanes, weight, step);
      total += weight;
      any_seen |= seen != 0;
      const int32_t count = static_cast<int32_t>(min(last_part - base + 1, int64_t{kWarpSize}));
#pragma unroll 6
      for (int32_t i = 0; i < count; ++i) {
        const float its_factor = __shfl_sync(kAllLanes, factor, i);
        const float4 four = *reinterpret_cast<const float4*>(&partial_of(base + i).values[tile_row][thread * 4]);
        if ((seen >> i & 1) == 0) continue;  // what is there may be NaN
        sums = make_float4(fmaf(its_factor, four.x, sums.x), fmaf(its_factor, four.y, sums.y),
                           fmaf(its_factor, four.z, sums.z), fmaf(its_factor, four.w, sums.w));
      }
    }
    const int32_t query = row / p.num_heads, head = row % p.num_heads;
    const float factor = normalizer({total, top, any_seen});
    const int64_t at = out_index(p, b, query, head) + thread * 4;
    store_out(p, at, sums.x * factor);
    store_out(p, at + 1, sums.y * factor);
    store_out(p, at + 2, sums.z * factor);
    store_out(p, at + 3, sums.w * factor);
    if (thread == 0) store_lse(p, b, query, head, in_base_e(p, total, top, any_seen, one));
  }
}

}  // namespace

size_t offsets_bytes(int64_t batch_size) { return round_up(static_cast<size_t>(batch_size + 1) * sizeof(int64_t)); }

int32_t enqueue_combine(const Session& session, const kdt_verify_attn_params& p, const Scratch& scratch,
                        int32_t block_rows) {
  const int64_t rows = int64_t{p.batch_size} * p.num_queries * p.num_heads,
                parts = session.context().multiprocessors;
  return launch_kernel<0>(session, "verify_attn, parts", combine, std::min<int64_t>(rows, parts * 16),
                          kCombineThreads, After::kTriggered, p, scratch.offsets, scratch.partials, tiles_of(p),
                          parts, block_rows,
                          std::exp2(p.q_dtype == KDT_F16 ? kUnit<__half> : kUnit<__nv_bfloat16>));
}

}  // namespace kdt::cuda
