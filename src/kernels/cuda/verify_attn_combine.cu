// verify_attn's last kernel: joins what the parts of a tile's cache rows have come to (verify_attn_parts.cuh), in
// their order, so that results have the same bits every time.
//
// Idea: a warp has a pair of query rows, or a share of its columns where pairs are few: finding a pair's parts and
// their factors costs a warp some 500 instructions, which with a share of 64 columns each bounded this kernel's
// time (20 us where 4,160 rows had two parts each; plans/0007-verify-attn-wgmma.md).
//
// Limits: none of its own. Reads 4 KB a pair of query rows and part, 2 KB where they are float16; with the parts of
// one call some 30 MB at most, which the L2 cache holds.
#include <type_traits>

#include "mma.cuh"
#include "verify_attn_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 64, kWarps = kThreads / kWarpSize;
constexpr int32_t kPairs = kTile / 2;                  // of rows, 8 apart, in a tile
constexpr int32_t kMostFours = kVDim / 2 / kWarpSize;  // float4 of a pair a lane has if its warp has all columns
constexpr int64_t kBusyWarps = 12;                     // a multiprocessor: with fewer, pairs are shared out
constexpr int64_t kMostBlocks = 32;                    // a multiprocessor

constexpr int32_t kBlocks = 8;  // on a multiprocessor at once

// float4 a lane asks for before it uses them: as many as leave kBlocks blocks their registers.
template <int32_t kFours, bool kHalves>
constexpr int32_t kInFlight = kFours == kMostFours && !kHalves ? 8 : 16;

// Where the parts of a tile are. The first part begins with other work or with this, the others with this.
struct Parts {
  const Partial* partials;
  int32_t first, last;

  __device__ const Partial& at(int32_t part) const { return partials[part * 2 + (part == first ? 1 : 0)]; }
};

__device__ inline float4 in_float32(const float4& four) { return four; }
__device__ inline float4 in_float32(const uint2& four) {
  const float2 upper = __half22float2(reinterpret_cast<const __half2&>(four.x)),
               lower = __half22float2(reinterpret_cast<const __half2&>(four.y));
  return make_float4(upper.x, upper.y, lower.x, lower.y);
}

// Joins the parts of rows whose tile was cut, and writes those of requests without rows. A lane has kFours times
// two columns of both rows of a pair.
template <int32_t kFours, bool kHalves>
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine(const __grid_constant__ kdt_verify_attn_params p, const Plan plan, const Partial* partials, float unit,
            bool out_pairs) {
  constexpr int32_t kShares = kMostFours / kFours, kItems = kPairs * kShares;  // of a tile
  constexpr int32_t kAtOnce = kInFlight<kFours, kHalves> / kFours;             // parts
  constexpr int32_t kSides = kFours > kMostFours / 2 ? 2 : 1;                  // halves of the columns
  using Four = std::conditional_t<kHalves, uint2, float4>;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t query_rows = p.num_queries * p.num_heads;
  const float scale = scale_of(p);
  const int64_t items = int64_t{p.batch_size} * plan.tiles * kItems;
  wait_for_primary();
  trigger_dependents();
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize; item < items;
       item += int64_t{gridDim.x} * kWarps) {
    const int64_t b_tile = quotient<int64_t>(item, kItems), b = quotient(b_tile, plan.tiles),
                  tile = b_tile - b * plan.tiles;
    const int32_t within = static_cast<int32_t>(item - b_tile * kItems), pair = within / kShares,
                  share = within % kShares;
    const int32_t row = pair / 8 * 16 + pair % 8, rows[2] = {row, row + 8};
    if (tile * kTile + rows[0] >= query_rows) continue;
    const int2 range = plan.ranges[b_tile];
    if (range.x == range.y) continue;  // attend has written it
    const Parts parts = {partials, range.x, range.y};
    const auto states_of = [&](int32_t part, RowState(&states)[2]) {
      for (int32_t h = 0; h < 2; ++h) {
        states[h] = {negative_infinity(), 0.0f, 0.0f, 0};
        if (part <= parts.last) states[h] = parts.at(part).states[rows[h]];
      }
    };
    const int32_t side = share * kFours / (kMostFours / 2);  // the first one
    Four fours[kAtOnce][kFours];                             // of parts from `part` on, none beyond `last`
    const auto load = [&](int32_t part, int32_t last) {
#pragma unroll
      for (int32_t n = 0; n < kAtOnce; ++n) {
        const Partial& partial = parts.at(min(part + n, last));
#pragma unroll
        for (int32_t f = 0; f < kFours; ++f) {
          const int32_t eight = (share * kFours + f) * 8 + lane / 4, slot = pair % 8 * 4 + lane % 4;
          if constexpr (kHalves) {
            fours[n][f] = partial.halves[pair / 8][eight][slot];
          } else {
            fours[n][f] = partial.values[pair / 8][eight][slot];
          }
        }
      }
    };
    if (parts.first < parts.last) load(parts.first, parts.last);  // the first ones, beside the states
    RowState first[2];                                            // of the first parts, a lane a part
    states_of(parts.first + lane, first);
    float units[2][kSides];  // of this lane's part
    const auto units_of = [&](int32_t part) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
#pragma unroll
        for (int32_t c = 0; c < kSides; ++c) {
          units[h][c] = 1.0f;
          if (kHalves && part <= parts.last) {
            units[h][c] = power_of_two(parts.at(part).exponents[side + c][rows[h]]);
          }
        }
      }
    };
    units_of(parts.first + lane);
    float top[2] = {first[0].max, first[1].max};
    for (int32_t part = parts.first + kWarpSize + lane; part <= parts.last; part += kWarpSize) {
      for (int32_t h = 0; h < 2; ++h) top[h] = fmaxf(top[h], parts.at(part).states[rows[h]].max);
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      for (int32_t h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], step));
    }

    float sums[kFours][2][2] = {};  // [..][row][column]
    float total[2] = {};
    unsigned any_seen[2] = {};
    for (int32_t base = parts.first; base <= parts.last; base += kWarpSize) {
      if (base != parts.first) {
        states_of(base + lane, first);
        units_of(base + lane);
      }
      float factors[2];
      unsigned seen[2];
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        factors[h] = first[h].max == top[h] ? 1.0f : exp2_approx((first[h].max - top[h]) * scale);
        seen[h] = __ballot_sync(kAllLanes, first[h].seen != 0);
        float weight = first[h].seen != 0 ? factors[h] * first[h].weight : 0.0f;
#pragma unroll
        for (int step = kWarpSize / 2; step > 0; step /= 2) weight += __shfl_xor_sync(kAllLanes, weight, step);
        total[h] += weight;
        any_seen[h] |= seen[h];
      }
      const int32_t count = min(parts.last - base + 1, kWarpSize);
      for (int32_t i = 0; i < count; i += kAtOnce) {
        if (base != parts.first || i > 0) load(base + i, parts.last);
#pragma unroll
        for (int32_t n = 0; n < kAtOnce; ++n) {
          float upper[kSides], lower[kSides];
#pragma unroll
          for (int32_t c = 0; c < kSides; ++c) {
            upper[c] = __shfl_sync(kAllLanes, factors[0] * units[0][c], (i + n) % kWarpSize);
            lower[c] = __shfl_sync(kAllLanes, factors[1] * units[1][c], (i + n) % kWarpSize);
          }
          const bool is = i + n < count;
          const bool upper_seen = is && (seen[0] >> (i + n) % kWarpSize & 1) != 0;  // else it may be NaN
          const bool lower_seen = is && (seen[1] >> (i + n) % kWarpSize & 1) != 0;
#pragma unroll
          for (int32_t f = 0; f < kFours; ++f) {
            const float4 four = in_float32(fours[n][f]);
            const int32_t c = f / (kMostFours / 2);
            if (upper_seen) {
              sums[f][0][0] = fmaf(upper[c], four.x, sums[f][0][0]);
              sums[f][0][1] = fmaf(upper[c], four.y, sums[f][0][1]);
            }
            if (lower_seen) {
              sums[f][1][0] = fmaf(lower[c], four.z, sums[f][1][0]);
              sums[f][1][1] = fmaf(lower[c], four.w, sums[f][1][1]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t query_row = static_cast<int32_t>(tile) * kTile + rows[h];
      if (query_row >= query_rows) continue;
      const int32_t query = query_row / p.num_heads, head = query_row % p.num_heads,
                    has_seen = any_seen[h] != 0 ? 1 : 0;
      const float factor = has_seen != 0 ? 1.0f / total[h] : 0.0f;
      const int64_t out = out_index(p, b, query, head) + share * kFours * (2 * kWarpSize) + lane * 2;
#pragma unroll
      for (int32_t f = 0; f < kFours; ++f) {
        store_pair(p, out + f * (2 * kWarpSize), sums[f][h][0] * factor, sums[f][h][1] * factor, out_pairs);
      }
      if (lane == 0 && share == 0) {
        float lse = negative_infinity();
        if (has_seen != 0) {
          // In float32, which is near enough; float64 costs many instructions, that are seldom in a cache.
          lse = total[h] == 0.0f ? quiet_nan() : fmaf(top[h], scale, log2f(total[h]) - unit);
          if (p.lse_base != KDT_LSE_BASE2) lse *= 0.6931471805599453f;
        }
        p.lse[b * p.lse_stride + query * p.lse_row_stride + head * p.lse_head_stride] = lse;
      }
    }
  }
}

}  // namespace

size_t plan_bytes(const kdt_verify_attn_params& p) {
  return round_up(static_cast<size_t>(p.batch_size * tiles_of(p)) * sizeof(int2));
}

Scratch scratch_of(void* workspace, const kdt_verify_attn_params& p) {
  std::byte* begin = static_cast<std::byte*>(workspace);
  return {{reinterpret_cast<int2*>(begin), tiles_of(p)}, reinterpret_cast<Partial*>(begin + plan_bytes(p))};
}

int32_t enqueue_combine(const Session& session, const kdt_verify_attn_params& p, const Scratch& scratch,
                        bool are_halves) {
  const int64_t parts = session.context().multiprocessors;
  const int64_t pairs = int64_t{p.batch_size} * scratch.plan.tiles * kPairs, busy = parts * kBusyWarps;
  const auto start = [&](auto kernel, int32_t shares) {
    const int64_t blocks = (pairs * shares + kWarps - 1) / kWarps;
    return launch_kernel<0>(session, "verify_attn, parts", kernel, std::min(blocks, parts * kMostBlocks), kThreads,
                            After::kTriggered, p, scratch.plan, scratch.partials,
                            p.q_dtype == KDT_F16 ? kUnit<__half> : kUnit<__nv_bfloat16>, pairs_are_aligned(p));
  };
  const auto start_of = [&](auto fours) {
    constexpr int32_t kFours = decltype(fours)::value, kShares = kMostFours / kFours;
    return are_halves ? start(combine<kFours, true>, kShares) : start(combine<kFours, false>, kShares);
  };
  if (pairs >= busy) return start_of(std::integral_constant<int32_t, kMostFours>());
  if (pairs * 2 >= busy) return start_of(std::integral_constant<int32_t, kMostFours / 2>());
  if (pairs * 4 >= busy) return start_of(std::integral_constant<int32_t, kMostFours / 4>());
  return start_of(std::integral_constant<int32_t, kMostFours / 8>());
}

}  // namespace kdt::cuda
