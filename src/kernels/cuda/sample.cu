// sample on CUDA: parts of rows as in argmax, and the Gumbel-max trick on each.
//
// Idea: the noise of every token has to be known, and its ten rounds of Philox are most of the work; its two
// logarithms need not be taken. A token can only win when its noise exceeds what separates its scaled logit from a
// score already reached, that is when its random word is at least some bound; one exponential gives a bound for
// eight tokens from the largest of their logits, and then comparing words is all. A first score is made before,
// from the likeliest two of each thread's first eight tokens, and the block shares better ones as they come. The
// bound lets more through than it must (by 1e-5 and some rounding); what passes is scored in float32, and in
// float64 as the header says unless that rules it out. So the result does not depend on when a thread sees a better
// score.
//
// Limits: those of the header. An id_offset that is no multiple of 4 and rows not aligned to 16 bytes are slower; a
// temperature outside 1e-30 .. 1e30 (infinity excepted) makes the bound useless: all tokens are scored, slower
// still.
#include "../philox.hpp"
#include "launch.hpp"
#include "row_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

// What the first kernel leaves of a part.
struct Part {
  double score;    // the winning score, -inf when none was drawn
  int32_t token;   // its index
  float value;     // as for argmax: the largest logit, NaN when there is a NaN
  int32_t index;   // of the first such logit
  int32_t finite;  // whether there is a finite logit
};

// Keys of Philox's rounds: they depend on the seed alone, so the host makes them.
struct RoundKeys {
  uint32_t low[10], high[10];
};

RoundKeys round_keys(uint64_t seed) {
  RoundKeys keys;
  for (uint32_t i = 0; i < 10; ++i) {
    keys.low[i] = static_cast<uint32_t>(seed) + i * 0x9E3779B9u;
    keys.high[i] = static_cast<uint32_t>(seed >> 32) + i * 0xBB67AE85u;
  }
  return keys;
}

// One row's randomness: Philox as in ../philox.hpp, with the product that all blocks of a row share taken once.
struct Noise {
  uint32_t position, request_high;
  uint64_t product;  // of request_low in the first round

  __device__ Noise(int32_t position, int64_t request_id)
      : position(static_cast<uint32_t>(position)),
        request_high(static_cast<uint32_t>(static_cast<uint64_t>(request_id) >> 32)),
        product(uint64_t{0xCD9E8D57u} * static_cast<uint32_t>(request_id)) {}

  // The random words of ids block * 4 .. block * 4 + 3.
  __device__ PhiloxBlock of_block(uint32_t block, const RoundKeys& keys) const {
    const uint64_t first = uint64_t{0xD2511F53u} * block;
    uint32_t c0 = static_cast<uint32_t>(product >> 32) ^ position ^ keys.low[0];
    uint32_t c1 = static_cast<uint32_t>(product);
    uint32_t c2 = static_cast<uint32_t>(first >> 32) ^ request_high ^ keys.high[0];
    uint32_t c3 = static_cast<uint32_t>(first);
#pragma unroll
    for (int round = 1; round < 10; ++round) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product1 = uint64_t{0xCD9E8D57u} * c2;
      c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ keys.low[round];
      c1 = static_cast<uint32_t>(product1);
      c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ keys.high[round];
      c3 = static_cast<uint32_t>(product0);
    }
    return {{c0, c1, c2, c3}};
  }
};

__device__ uint32_t word_of(const PhiloxBlock& block, uint32_t i) {
  const uint32_t low = i & 1 ? block.words[1] : block.words[0], high = i & 1 ? block.words[3] : block.words[2];
  return i & 2 ? high : low;
}

// The words of eight consecutive ids.
__device__ void words_of(const Noise& noise, const RoundKeys& keys, uint32_t first_id,
                         uint32_t (&words)[kVectorSize]) {
  if (first_id % 4 == 0) {
#pragma unroll
    for (uint32_t i = 0; i < kVectorSize / 4; ++i) {
      const PhiloxBlock block = noise.of_block(first_id / 4 + i, keys);
#pragma unroll
      for (int e = 0; e < 4; ++e) words[i * 4 + e] = block.words[e];
    }
  } else {
#pragma unroll 1
    for (uint32_t e = 0; e < kVectorSize; ++e) {
      const uint32_t word = word_of(noise.of_block((first_id + e) / 4, keys), (first_id + e) % 4);
#pragma unroll
      for (uint32_t i = 0; i < kVectorSize; ++i) words[i] = i == e ? word : words[i];
    }
  }
}

// The score to the letter of the header.
__device__ __noinline__ double exact_score(float logit, float temperature, uint32_t word) {
  const double uniform = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return static_cast<double>(logit) / static_cast<double>(temperature) - log(-log(uniform));
}

// A score within 1e-5 + 1e-6 |logit / temperature|, float32. Of uniform and 1 - uniform it takes the smaller, which
// float32 has exactly enough.
__device__ float rough_score(float scaled, uint32_t word) {
  const bool upper = word >= 0x80000000u;
  const float smaller = (static_cast<float>(upper ? ~word : word) + 0.5f) * 0x1p-32f;
  return scaled - logf(upper ? -log1pf(-smaller) : -logf(smaller));
}

// Not more than the score, and near it where that is high: -log(u) = -log(1 - c) <= c + c^2 for c <= 1/2.
__device__ float score_below(float scaled, uint32_t word) {
  if (word < 0x80000000u) return negative_infinity();
  const float c = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;
  return scaled - __logf(c + c * c) - 1e-5f;
}

// Scaled logits in float32; infinite temperatures make all of them 0.
struct Scale {
  float inverse;
  bool usable;  // false: no bound can be had from it
  __device__ explicit Scale(float temperature)
      : inverse(isinf(temperature) ? 0.0f : 1.0f / temperature),
        usable(isinf(temperature) || (temperature >= 1e-30f && temperature <= 1e30f)) {}
  __device__ float operator()(float logit) const { return logit * inverse; }
};

// How far float32 may be off around a scaled logit.
__device__ float slack(float scaled) { return 2e-5f + 2e-6f * fabsf(scaled); }

// The smallest word that can lift a token of this scaled logit, or a smaller one, to `score`: its noise g must be
// at least d = score - scaled; exp(-g) = -log(u) >= 1 - u, so 1 - u <= exp(-d) is necessary. Conversion saturates.
__device__ uint32_t word_needed(float scaled, float score) {
  const float exponent = (scaled + slack(scaled) - score) * kLog2E + 32.00002f;
  if (!(exponent < 32.0f)) return 0;  // and where something is not finite
  return ~__float2uint_rz(exp2_fast(exponent) + 1.0f);
}

// The best token so far. Its exact score is taken only when a rough one does not decide.
struct Winner {
  double score = -static_cast<double>(positive_infinity());  // when `exact`
  float rough = negative_infinity();
  float logit = 0.0f;
  uint32_t word = 0;
  int32_t token = INT32_MAX;
  bool exact = true;

  __device__ void settle(float temperature) {
    if (exact) return;
    score = exact_score(logit, temperature, word);
    exact = true;
  }
  __device__ void consider(Winner other, float temperature) {
    const float margin = slack(rough) + slack(other.rough);  // infinite: the exact scores decide
    if (token != INT32_MAX && other.rough + margin < rough) return;
    if (token != INT32_MAX && !(other.rough > rough + margin)) {
      settle(temperature);
      other.settle(temperature);
      if (!(other.score > score || (other.score == score && other.token < token))) return;
    }
    *this = other;
  }
  __device__ void join_lanes() {  // of exact ones
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      const double other_score = __shfl_xor_sync(kAllLanes, score, step);
      const int32_t other_token = __shfl_xor_sync(kAllLanes, token, step);
      take(other_score, other_token);
    }
  }
  __device__ void take(double other_score, int32_t other_token) {
    if (other_score > score || (other_score == score && other_token < token)) {
      score = other_score;
      token = other_token;
    }
  }
};

constexpr int kWarps = kThreads / kWarpSize;

struct Shared {
  RowMaxShared<kThreads> row_max;
  uint32_t reached;  // a score that some token reaches, as ordered bits
  double scores[kWarps];
  int32_t tokens[kWarps];
};

// One part of a live row, by the whole block.
template <class T>
__device__ Part sample_part(const kdt_sample_params& p, const RoundKeys& keys, int64_t r, const VectorRange& range,
                            Shared& shared) {
  const int tid = threadIdx.x, lane = tid % kWarpSize, warp = tid / kWarpSize;
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
  const float temperature = p.temperatures[r];
  const bool noisy = temperature > 0.0f;  // no for 0, and for a bad one: the row is invalid
  const Noise noise(p.positions[r], p.request_ids[r]);
  const Scale scale(temperature);
  const uint32_t first_id = static_cast<uint32_t>(p.id_offset);

  // For all to see, the best score so far that some token reaches for sure.
  if (tid == 0) shared.reached = ordered_bits(negative_infinity());
  __syncthreads();
  const auto raise = [&](float score) { atomicMax(&shared.reached, ordered_bits(score - slack(score))); };
  if (noisy && scale.usable) {
    float best = negative_infinity();
    const int64_t v = range.begin + tid;
    if (v < range.end) {
      const Vector<T> logits = load_vector(row, v * kVectorSize, p.vocab_size);
      uint32_t words[kVectorSize];
      words_of(noise, keys, first_id + static_cast<uint32_t>(v * kVectorSize), words);
      float likeliest = logits[0], luckiest = likeliest;
      uint32_t word_of_likeliest = words[0], most = words[0];
#pragma unroll
      for (int e = 1; e < kVectorSize; ++e) {
        const float x = logits[e];
        if (x > likeliest) {
          likeliest = x;
          word_of_likeliest = words[e];
        }
        if (words[e] > most) {
          most = words[e];
          luckiest = x;
        }
      }
      // -inf is never drawn; rows with what else is not finite are settled apart.
      if (isfinite(likeliest)) best = score_below(scale(likeliest), word_of_likeliest);
      if (isfinite(luckiest)) best = fmaxf(best, score_below(scale(luckiest), most));
    }
    for (int step = kWarpSize / 2; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, step));
    if (lane == 0 && isfinite(best)) raise(best);
  }
  __syncthreads();

  ThreadMax m;
  Winner winner;
  for_each_vector<kThreads, 1>(row, range, p.vocab_size, [&](const Vector<T>& logits, int32_t v) {
    const float largest = m.add(logits, v);
    if (!noisy || largest == negative_infinity()) return;
    const float reached = from_ordered_bits(*static_cast<volatile uint32_t*>(&shared.reached));
    const uint32_t needed = scale.usable ? word_needed(scale(largest), reached) : 0;
    uint32_t words[kVectorSize];
    words_of(noise, keys, first_id + static_cast<uint32_t>(v) * kVectorSize, words);
    uint32_t most = words[0];
#pragma unroll
    for (int e = 1; e < kVectorSize; ++e) most = max(most, words[e]);
    if (most < needed) return;
    unsigned lucky = 0;
#pragma unroll
    for (int e = 0; e < kVectorSize; ++e) {  // each by its own logit; one of -inf is never drawn
      const uint32_t its_need = scale.usable ? word_needed(scale(logits[e]), reached) : 0;
      lucky |= words[e] >= its_need && logits[e] != negative_infinity() ? 1u << e : 0u;
    }
    for (; lucky != 0; lucky &= lucky - 1) {
      const int e = __ffs(static_cast<int>(lucky)) - 1;
      const float logit = logits.at(e);
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) word = i == e ? words[i] : word;
      Winner candidate;
      candidate.logit = logit;
      candidate.word = word;
      candidate.token = v * kVectorSize + e;
      candidate.exact = false;
      candidate.rough = positive_infinity();
      if (scale.usable) {
        candidate.rough = rough_score(scale(logit), word);
        if (candidate.rough + slack(candidate.rough) < reached) continue;
        if (isfinite(candidate.rough)) raise(candidate.rough);
      }
      winner.consider(candidate, temperature);
    }
  });
  if (!winner.exact) {
    const float reached = from_ordered_bits(*static_cast<volatile uint32_t*>(&shared.reached));
    if (scale.usable && winner.rough + slack(winner.rough) < reached) winner = Winner();
    winner.settle(temperature);
  }
  winner.join_lanes();
  if (lane == 0) {
    shared.scores[warp] = winner.score;
    shared.tokens[warp] = winner.token;
  }
  const RowMax found = block_max(m, row, p.vocab_size, range, shared.row_max);
  for (int w = 0; w < kWarps; ++w) winner.take(shared.scores[w], shared.tokens[w]);
  __syncthreads();  // shared may be written again
  return {winner.score, winner.token, found.value, found.index, found.finite};
}

__device__ void write_row(const kdt_sample_params& p, int64_t r, bool live, const Part& whole) {
  int32_t token = -1;
  float value = negative_infinity();
  if (live) {
    const float temperature = p.temperatures[r];
    value = whole.value;
    if (whole.finite != 0 && !isnan(whole.value) && temperature >= 0.0f) {
      token = whole.index;
      if (temperature > 0.0f && whole.value < positive_infinity()) {
        token = whole.token;
        value = static_cast<float>(whole.score);
      }
    }
  }
  p.tokens[r] = token >= 0 ? token + p.id_offset : -1;
  if (p.values != nullptr) p.values[r] = value;
  if (p.status != nullptr) p.status[r] = live && token < 0 ? KDT_STATUS_ROW_INVALID : 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    sample_parts_kernel(kdt_sample_params p, RoundKeys keys, Part* parts, int32_t num_parts) {
  __shared__ Shared shared;
  trigger_dependents();
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  for (int64_t item = blockIdx.x; item < int64_t{p.num_rows} * num_parts; item += gridDim.x) {
    const int64_t r = item / num_parts;
    Part part = {};
    if (r < live) part = sample_part<T>(p, keys, r, part_of_row(p.vocab_size, item % num_parts, num_parts), shared);
    if (threadIdx.x == 0) {
      if (num_parts == 1) {
        write_row(p, r, r < live, part);
      } else {
        parts[item] = part;
      }
    }
  }
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    sample_rows_kernel(kdt_sample_params p, const Part* parts, int32_t num_parts) {
  wait_for_primary();
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kRows = kThreads / kWarpSize;
  for (int64_t r = blockIdx.x * int64_t{kRows} + threadIdx.x / kWarpSize; r < p.num_rows;
       r += gridDim.x * int64_t{kRows}) {
    Part whole = {};
    if (r < live) {
      Winner winner;
      RowMax found = {negative_infinity(), INT32_MAX, 0};
      if (lane < num_parts) {
        const Part part = parts[r * num_parts + lane];
        winner.take(part.score, part.token);
        found = {part.value, part.index, part.finite};
      }
      winner.join_lanes();
      join_lanes(&found);
      whole = {winner.score, winner.token, found.value, found.index, found.finite};
    }
    if (lane == 0) write_row(p, r, r < live, whole);
  }
}

}  // namespace

size_t workspace_size(const kdt_context& context, const kdt_sample_params& p) {
  return workspace_for(parts_in_workspace(context, p.num_rows, p.vocab_size) * sizeof(Part));
}

int32_t enqueue(const Session& session, const kdt_sample_params& p, void* workspace) {
  const auto start = [&](Part* parts, int32_t num_parts) {
    return dispatch_dtype(p.logits_dtype, [&](auto zero) {
      return launch_kernel<0>(session, "sample", sample_parts_kernel<decltype(zero)>,
                              int64_t{p.num_rows} * num_parts, kThreads, After::kFinished, p, round_keys(p.seed),
                              parts, num_parts);
    });
  };
  return launch_by_parts<Part>(session, "sample", p, workspace, kThreads, sample_rows_kernel, start);
}

}  // namespace kdt::cuda
