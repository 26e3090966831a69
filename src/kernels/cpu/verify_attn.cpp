// verify_attn on the CPU: blocked attention with an online softmax (FlashAttention, arXiv 2205.14135).
//
// Idea: the query rows (query-major, head-minor) of a request are cut into tiles of 32. A tile walks over the
// logical cache rows it may see in blocks of 64: 16-bit rows are expanded to float32 once a block, float32 rows are
// read where they are; the block is multiplied with the tile's queries, and its weighted values are added up. All
// heads of a query share one 64-bit mask a block; prefix blocks have a full one. Every 16 blocks the running sums
// are folded into totals of their own, so that float32 sums stay short (by the usual sqrt(n) estimate 262,144 rows
// in one would be off by some 1e-5). The inner loops are those of attn_tile.cpp, for the context's instruction set.
//
// A masked entry has weight 0, and 0 * NaN is NaN: rows that the tile does not see are never loaded, and a block
// whose scores are not all finite (as those of a row with a NaN or infinity are not) takes a slower path that skips
// masked entries.
//
// Where tiles are few and prefixes long, the cache rows of each tile are cut into parts, so that all threads have
// work; parts are joined in their order. Their number follows from the shapes and the longest request.
//
// Limits: scratch is 0.4 MB a thread, whatever the prefix, and 1 MB for parts. Results do not depend on the number
// of threads; in their last bits they do on the instruction set.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../cache.hpp"
#include "attn_tile.hpp"
#include "ops.hpp"
#include "parallel.hpp"
#include "rows.hpp"
#include "tree_layout.hpp"
#include "workspace.hpp"

namespace kdt::cpu {
namespace {

constexpr int32_t kBlocksPerFold = 16;  // blocks between foldings into the totals

// The clamped numbers of one request.
struct Request {
  int32_t node_count, prefix_len, kv_start;  // of a dead request all 0
};

// What the rows of a tile have come to, over some cache rows or all.
struct Result {
  float totals[kTile][kVDim];
  float max[kTile];
  double weight[kTile];
  bool seen[kTile];
};

// One thread's scratch, 64-byte aligned.
struct Scratch {
  alignas(64) float q[kTile][kQkDim];
  float rows[kBlock][kQkDim];   // the block's keys where they are not float32; the first 512 columns are the values
  float nothing[kQkDim];        // of a row that is not loaded: zeros
  float scores[kTile][kBlock];  // scores, then weights
  float sums[kTile][kVDim];     // weighted values since the last folding
  float max[kTile];
  double weight[kTile];  // since the last folding, too
  Result all;
};

int64_t capacity_of(const kdt_kv_cache& c) {
  return c.block_table != nullptr ? int64_t{c.max_pages} * c.page_size : c.page_size;
}

// Bits j0..j0+63 of what query i sees of the tree.
uint64_t tree_mask(const kdt_verify_attn_params& p, int64_t b, int64_t i, int64_t j0, int32_t node_count) {
  if (j0 >= node_count) return 0;
  const auto below = [](int64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
  const uint64_t limit = below(node_count - j0);
  if (p.tree == nullptr || p.tree->visibility == nullptr) return i < j0 ? 0 : limit & below(i - j0 + 1);
  const uint64_t* row = p.tree->visibility + b * p.tree->visibility_stride + i * p.tree->visibility_pitch;
  return limit & row[j0 / 64];
}

// Clamps the numbers of a request, and flags them and pages that are not there although a query must see them.
Request read_request(const kdt_verify_attn_params& p, int64_t b, int32_t* status) {
  const kdt_kv_cache& c = *p.cache;
  const int64_t capacity = capacity_of(c);
  Request r = {p.num_queries, 0, 0};
  if (p.tree != nullptr && p.tree->node_count != nullptr) {
    r.node_count = clamped(p.tree->node_count[b], 0, p.num_queries, status);
  }
  const int64_t room = std::clamp<int64_t>(capacity - r.node_count, 0, INT32_MAX);
  r.prefix_len = clamped(p.prefix_lens[b], 0, static_cast<int32_t>(room), status);
  if (p.kv_starts != nullptr) r.kv_start = clamped(p.kv_starts[b], 0, r.prefix_len, status);
  if (r.node_count == 0) return r;

  if (c.block_table != nullptr) {
    for (int64_t row = r.kv_start; row < r.prefix_len; row = (row / c.page_size + 1) * c.page_size) {
      if (row_offset(c, b, row) < 0) *status |= KDT_STATUS_CLAMPED;
    }
  }
  for (int32_t j0 = 0; j0 < r.node_count; j0 += 64) {
    uint64_t seen = 0;
    for (int32_t i = 0; i < r.node_count; ++i) seen |= tree_mask(p, b, i, j0, r.node_count);
    for (; seen != 0; seen &= seen - 1) {
      if (row_offset(c, b, int64_t{r.prefix_len} + j0 + std::countr_zero(seen)) < 0) *status |= KDT_STATUS_CLAMPED;
    }
  }
  return r;
}

// Adds what a row has come to elsewhere: `sums` in units of exp(max).
void join(Result& all, int32_t r, const float* sums, float max, double weight) {
  if (max == kNegInf && weight == 0.0) return;  // nothing seen there
  const float top = std::max(max, all.max[r]);
  // Before anything is seen a maximum is -inf, and its factor exp(-inf - top) = 0.
  const float old_factor = all.max[r] == top ? 1.0f : std::exp(all.max[r] - top);
  const float new_factor = max == top ? 1.0f : std::exp(max - top);
  for (int32_t d = 0; d < kVDim; ++d) all.totals[r][d] = all.totals[r][d] * old_factor + sums[d] * new_factor;
  all.weight[r] = all.weight[r] * static_cast<double>(old_factor) + weight * static_cast<double>(new_factor);
  all.max[r] = top;
}

// Folds the running sums into what there is and starts new ones.
void fold(Scratch& s, int32_t count, Result& all) {
  for (int32_t r = 0; r < count; ++r) {
    join(all, r, s.sums[r], s.max[r], s.weight[r]);
    std::fill_n(s.sums[r], kVDim, 0.0f);
    s.max[r] = kNegInf;
    s.weight[r] = 0.0;
  }
}

// Turns a row of scores into weights and rescales its running sum when the maximum rises.
void soften(const AttnTile& simd, Scratch& s, int32_t r, uint64_t mask, float scale) {
  float* const scores = s.scores[r];
  if (mask == 0) {
    std::fill_n(scores, kBlock, 0.0f);
    return;
  }
  bool nan = false;
  const float top = simd.scale_and_mask(scores, mask, scale, s.max[r], &nan);
  if (nan || top == kPosInf) {  // softmax has no value
    s.weight[r] = std::numeric_limits<double>::quiet_NaN();
    std::fill_n(scores, kBlock, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  if (top == kNegInf) {
    std::fill_n(scores, kBlock, 0.0f);
    return;
  }
  if (top > s.max[r] && s.weight[r] != 0.0) {
    const float factor = std::exp(s.max[r] - top);
    simd.scale(s.sums[r], kVDim, factor);
    s.weight[r] *= static_cast<double>(factor);
  }
  s.max[r] = top;
  s.weight[r] += simd.exponentiate(scores, mask, top);
}

// A tile: rows first.. of a request, counted over (query, head).
struct Tile {
  int64_t b, first;
  int64_t rows;  // at most kTile

  int32_t query(const kdt_verify_attn_params& p, int64_t r) const {
    return static_cast<int32_t>((first + r) / p.num_heads);
  }
  int32_t head(const kdt_verify_attn_params& p, int64_t r) const {
    return static_cast<int32_t>((first + r) % p.num_heads);
  }
};

// Blocks of cache rows: the prefix's first, then the tree's, which start anew at slot 0, so that mask words need no
// shift.
int64_t prefix_blocks(const Request& r) { return (int64_t{r.prefix_len} - r.kv_start + kBlock - 1) / kBlock; }
int64_t all_blocks(const Request& r) { return prefix_blocks(r) + (r.node_count + kBlock - 1) / kBlock; }

// A tile over one of `parts` parts of the cache rows of its request.
void attend(const AttnTile& simd, const kdt_verify_attn_params& p, const Request& request, const Tile& tile,
            int64_t part, int64_t parts, Scratch& s, Result& all) {
  const kdt_kv_cache& cache = *p.cache;
  const int32_t padded = static_cast<int32_t>(tile.rows + 3) / 4 * 4;  // as products take them
  std::fill_n(s.nothing, kQkDim, 0.0f);
  std::fill_n(&s.q[0][0], padded * kQkDim, 0.0f);
  std::fill_n(&s.sums[0][0], padded * kVDim, 0.0f);
  std::fill_n(&all.totals[0][0], padded * kVDim, 0.0f);
  for (int32_t r = 0; r < kTile; ++r) {
    s.max[r] = all.max[r] = kNegInf;
    s.weight[r] = all.weight[r] = 0.0;
    all.seen[r] = false;
  }
  bool any = false;  // some query of the tile is a node
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (tile.query(p, r) >= request.node_count) continue;
    any = true;
    const int64_t at = tile.b * p.q_stride + tile.query(p, r) * p.q_row_stride + tile.head(p, r) * p.q_head_stride;
    load_floats(element(p.q, p.q_dtype, at), p.q_dtype, kQkDim, s.q[r]);
  }
  if (!any) return;

  const int64_t of_prefix = prefix_blocks(request), blocks = all_blocks(request);
  int32_t since_fold = 0;
  for (int64_t block = part * blocks / parts; block < (part + 1) * blocks / parts; ++block) {
    const bool in_tree = block >= of_prefix;
    const int64_t slot = (block - of_prefix) * kBlock;  // in the tree
    const int64_t row0 = in_tree ? request.prefix_len + slot : request.kv_start + block * kBlock;
    const int64_t left = request.prefix_len - row0;  // in the prefix
    const uint64_t whole = left >= kBlock ? ~uint64_t{0} : (uint64_t{1} << std::max<int64_t>(left, 0)) - 1;
    uint64_t masks[kTile] = {}, seen = 0, loaded = 0;
    for (int64_t r = 0; r < tile.rows; ++r) {
      if (tile.query(p, r) >= request.node_count) continue;
      masks[r] = in_tree ? tree_mask(p, tile.b, tile.query(p, r), slot, request.node_count) : whole;
      seen |= masks[r];
    }
    if (seen == 0) continue;
    const float* keys[kBlock];
    for (int32_t c = 0; c < kBlock; ++c) {
      const int64_t offset = (seen >> c & 1) != 0 ? row_offset(cache, tile.b, row0 + c) : -1;
      keys[c] = s.nothing;
      if (offset < 0) continue;
      loaded |= uint64_t{1} << c;
      const void* const row = element(cache.data, p.kv_dtype, offset);
      keys[c] = p.kv_dtype == KDT_F32 ? static_cast<const float*>(row) : s.rows[c];
      if (p.kv_dtype == KDT_BF16) simd.widen_bf16(static_cast<const uint16_t*>(row), kQkDim, s.rows[c]);
      if (p.kv_dtype == KDT_F16) simd.widen_f16(static_cast<const uint16_t*>(row), kQkDim, s.rows[c]);
    }
    if (loaded == 0) continue;
    simd.multiply(s.q[0], keys, padded, s.scores[0]);
    const bool finite = simd.are_finite(s.scores[0], padded * kBlock);
    for (int32_t r = 0; r < padded; ++r) {
      masks[r] &= loaded;
      all.seen[r] |= masks[r] != 0;
      soften(simd, s, r, masks[r], p.scale);
    }
    if (finite) {
      simd.add(s.scores[0], keys, padded, s.sums[0]);
    } else {
      for (int32_t r = 0; r < padded; ++r) simd.add_some(s.scores[r], keys, masks[r], s.sums[r]);
    }
    if (++since_fold == kBlocksPerFold) {
      fold(s, padded, all);
      since_fold = 0;
    }
  }
  fold(s, padded, all);
}

// Writes what the rows of a tile have come to.
void store(const kdt_verify_attn_params& p, const Tile& tile, Result& all) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    // A query that saw rows, all with score -inf, has a weight of 0 and gets NaN; one that saw none gets 0 and
    // -inf.
    const double weight = all.weight[r];
    const float factor = all.seen[r] ? static_cast<float>(1.0 / weight) : 0.0f;
    for (int32_t d = 0; d < kVDim; ++d) all.totals[r][d] *= factor;
    double lse = -std::numeric_limits<double>::infinity();
    if (all.seen[r]) {
      lse = weight == 0.0 ? std::numeric_limits<double>::quiet_NaN()
                          : static_cast<double>(all.max[r]) + std::log(weight);
    }
    if (p.lse_base == KDT_LSE_BASE2) lse /= std::log(2.0);
    const int64_t query = tile.query(p, r), head = tile.head(p, r);
    const int64_t out_at = tile.b * p.out_stride + query * p.out_row_stride + head * p.out_head_stride;
    store_floats(all.totals[r], kVDim, p.out_dtype, element(p.out, p.out_dtype, out_at));
    p.lse[tile.b * p.lse_stride + query * p.lse_row_stride + head * p.lse_head_stride] = static_cast<float>(lse);
  }
}

int64_t tiles_of(const kdt_verify_attn_params& p) {
  return (int64_t{p.num_queries} * p.num_heads + kTile - 1) / kTile;
}

// Into how many parts the cache rows of each tile are cut, of requests of up to so many blocks: few tiles make some
// 16 items of work, each of at least eight blocks. Not by the number of threads, so that results do not depend on
// that.
int64_t parts_of(const kdt_verify_attn_params& p, int64_t blocks) {
  constexpr int64_t kItems = 16, kFewestBlocks = 8;
  const int64_t tiles = std::max<int64_t>(p.batch_size * tiles_of(p), 1);
  return std::max<int64_t>(std::min(blocks / kFewestBlocks, kItems / tiles), 1);
}
// As many as there is scratch for.
int64_t most_parts_of(const kdt_verify_attn_params& p) { return parts_of(p, capacity_of(*p.cache) / kBlock); }

size_t requests_bytes(int64_t batch_size) { return round_up(static_cast<size_t>(batch_size) * sizeof(Request)); }

// One result for each part of each tile, where there are parts.
size_t results_bytes(const kdt_verify_attn_params& p) {
  const int64_t parts = most_parts_of(p);
  return parts == 1 ? 0 : round_up(static_cast<size_t>(p.batch_size * tiles_of(p) * parts) * sizeof(Result));
}

}  // namespace

size_t verify_attn_workspace_size(const kdt_context& context, const kdt_verify_attn_params& p) {
  if (p.batch_size == 0) return 0;
  const int64_t threads = std::min(int64_t{context.num_threads}, p.batch_size * tiles_of(p) * most_parts_of(p));
  return workspace_for(requests_bytes(p.batch_size) + results_bytes(p) +
                       static_cast<size_t>(threads) * sizeof(Scratch));
}

void verify_attn(const kdt_context& context, const kdt_verify_attn_params& p, void* workspace) {
  std::byte* begin_of_all = workspace_begin(workspace);
  Request* requests = reinterpret_cast<Request*>(begin_of_all);
  Result* results = reinterpret_cast<Result*>(begin_of_all + requests_bytes(p.batch_size));
  Scratch* scratch = reinterpret_cast<Scratch*>(begin_of_all + requests_bytes(p.batch_size) + results_bytes(p));

  const int64_t live = live_requests(p.num_live, p.batch_size);
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    int32_t status = 0;
    requests[b] = b < live ? read_request(p, b, &status) : Request{};
    if (p.status != nullptr) p.status[b] = status;
    longest = std::max(longest, all_blocks(requests[b]));
  }
  const int64_t tiles = tiles_of(p), parts = std::min(parts_of(p, longest), most_parts_of(p));
  const AttnTile& simd = attn_tile(context.isa);
  const auto tile_of = [&](int64_t item) {
    const int64_t first = item % tiles * kTile;
    return Tile{item / tiles, first, std::min<int64_t>(kTile, int64_t{p.num_queries} * p.num_heads - first)};
  };
  parallel_for(context.num_threads, p.batch_size * tiles * parts, 1,
               [&](int64_t begin, int64_t end, int64_t worker) {
                 for (int64_t item = begin; item < end; ++item) {
                   Scratch& s = scratch[worker];  // without items there is none
                   const Tile tile = tile_of(item / parts);
                   Result& all = parts == 1 ? s.all : results[item];
                   attend(simd, p, requests[tile.b], tile, item % parts, parts, s, all);
                   if (parts == 1) store(p, tile, all);
                 }
               });
  if (parts == 1) return;
  for (int64_t item = 0; item < p.batch_size * tiles; ++item) {
    const Tile tile = tile_of(item);
    Result& all = results[item * parts];
    for (int64_t part = 1; part < parts; ++part) {
      const Result& more = results[item * parts + part];
      for (int32_t r = 0; r < tile.rows; ++r) {
        join(all, r, more.totals[r], more.max[r], more.weight[r]);
        all.seen[r] |= more.seen[r];
      }
    }
    store(p, tile, all);
  }
}

}  // namespace kdt::cpu
