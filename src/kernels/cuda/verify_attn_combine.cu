// verify_attn's last kernel: joins what the parts of a tile's cache rows have come to (verify_attn_parts.cuh), in
// their order, so that results have the same bits every time.
//
// Limits: none of its own. Reads 4 KB a pair of query rows and part; with the parts of one call some 30 MB at most,
// which the L2 cache holds.
#include <cmath>

#include "mma.cuh"
#include "verify_attn_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = kVDim / 4;
constexpr int32_t kItems = kTile;  // of a tile: a pair of rows, one half of the columns

// A block half of the columns of a pair of rows of a tile, 8 apart; a thread two columns of both. Joins the parts
// of rows whose tile was cut, and writes those of requests without rows. Every warp works out the parts' factors, a
// lane a part, for itself.
__global__ void __launch_bounds__(kThreads)
    combine(const __grid_constant__ kdt_verify_attn_params p, const int64_t* offsets, const Partial* partials,
            int64_t tiles, int64_t most_parts, int64_t in_step_from, float one, bool out_pairs) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kWarpSize;
  const int32_t query_rows = p.num_queries * p.num_heads;
  wait_for_primary();
  const Cut cut(max(offsets[p.batch_size], int64_t{1}), in_step_from, tiles, most_parts);
  const float scale = scale_of(p);
  const int64_t items = int64_t{p.batch_size} * tiles * kItems;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t b_tile = quotient(item, kItems), b = quotient(b_tile, tiles), tile = b_tile - b * tiles;
    const int32_t within = static_cast<int32_t>(item - b_tile * kItems), pair = within / 2, half = within % 2;
    const int32_t row = pair / 8 * 16 + pair % 8, rows[2] = {row, row + 8};
    if (tile * kTile + rows[0] >= query_rows) continue;
    const int64_t begin = offsets[b], end = offsets[b + 1], line = tile * cut.blocks;
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
    float top[2] = {negative_infinity(), negative_infinity()};
    for (int64_t part = first_part + lane; part <= last_part; part += kWarpSize) {
      for (int32_t h = 0; h < 2; ++h) top[h] = fmaxf(top[h], partial_of(part).states[rows[h]].max);
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      for (int32_t h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], step));
    }

    float sums[2][2] = {};  // [row][column]
    double total[2] = {};
    unsigned any_seen[2] = {};
    for (int64_t base = first_part; base <= last_part; base += kWarpSize) {
      float factors[2];
      unsigned seen[2];
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        RowState state = {negative_infinity(), 0.0f, 0.0f, 0};
        if (base + lane <= last_part) state = partial_of(base + lane).states[rows[h]];
        factors[h] = state.max == top[h] ? 1.0f : exp2_approx((state.max - top[h]) * scale);
        seen[h] = __ballot_sync(kAllLanes, state.seen != 0);
        double weight = state.seen != 0 ? static_cast<double>(factors[h]) * static_cast<double>(state.weight) : 0.0;
#pragma unroll
        for (int step = kWarpSize / 2; step > 0; step /= 2) weight += __shfl_xor_sync(kAllLanes, weight, step);
        total[h] += weight;
        any_seen[h] |= seen[h];
      }
      const int32_t count = static_cast<int32_t>(min(last_part - base + 1, int64_t{kWarpSize}));
#pragma unroll 8
      for (int32_t i = 0; i < count; ++i) {
        const float upper = __shfl_sync(kAllLanes, factors[0], i), lower = __shfl_sync(kAllLanes, factors[1], i);
        const float4 four =
            partial_of(base + i).values[pair / 8][half * (kThreads / 4) + thread / 4][pair % 8 * 4 + thread % 4];
        if ((seen[0] >> i & 1) != 0) {  // else what is there may be NaN
          sums[0][0] = fmaf(upper, four.x, sums[0][0]);
          sums[0][1] = fmaf(upper, four.y, sums[0][1]);
        }
        if ((seen[1] >> i & 1) != 0) {
          sums[1][0] = fmaf(lower, four.z, sums[1][0]);
          sums[1][1] = fmaf(lower, four.w, sums[1][1]);
        }
      }
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t query_row = static_cast<int32_t>(tile) * kTile + rows[h];
      if (query_row >= query_rows) continue;
      const int32_t query = query_row / p.num_heads, head = query_row % p.num_heads,
                    has_seen = any_seen[h] != 0 ? 1 : 0;
      const float factor = normalizer({total[h], top[h], has_seen});
      store_pair(p, out_index(p, b, query, head) + half * (kVDim / 2) + thread * 2, sums[h][0] * factor,
                 sums[h][1] * factor, out_pairs);
      if (thread == 0 && half == 0) store_lse(p, b, query, head, in_base_e(p, total[h], top[h], has_seen, one));
    }
  }
}

}  // namespace

size_t offsets_bytes(int64_t batch_size) { return round_up(static_cast<size_t>(batch_size + 1) * sizeof(int64_t)); }

int32_t enqueue_combine(const Session& session, const kdt_verify_attn_params& p, const Scratch& scratch,
                        int64_t in_step_from) {
  const int64_t items = int64_t{p.batch_size} * tiles_of(p) * kItems, parts = session.context().multiprocessors;
  return launch_kernel<0>(session, "verify_attn, parts", combine, std::min<int64_t>(items, parts * 16), kThreads,
                          After::kTriggered, p, scratch.offsets, scratch.partials, tiles_of(p), parts, in_step_from,
                          std::exp2(p.q_dtype == KDT_F16 ? kUnit<__half> : kUnit<__nv_bfloat16>),
                          pairs_are_aligned(p));
}

}  // namespace kdt::cuda
