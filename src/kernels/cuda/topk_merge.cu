// topk_merge on CUDA: a block a row.
//
// Idea: of entries with the same id the first in (shard, place) order counts. All entries go into a hash table by
// id, which keeps the lowest place of each id (64-bit atomic minimum of id and place: what it ends with does not
// depend on the order). The entries that the table names have different ids, so their 64-bit keys (logit, then id)
// differ, and the K largest are found as in topk_logprobs. The shards' lse are added in float64.
//
// Limits: those of the header. A row of up to 1,024 entries has its table in shared memory, others in the
// workspace, a table for each of a limited number of blocks.
#include "key_list.cuh"
#include "launch.hpp"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kListSize = 2048;
constexpr int32_t kSmallTable = 2048;
constexpr int64_t kMaxBlocks = 512;                     // with tables in the workspace,
constexpr int64_t kMaxTableBytes = int64_t{256} << 20;  // of all together
constexpr unsigned long long kFree = ~0ull;
static_assert(kListSize >= KDT_MAX_CANDIDATES + kThreads);

int64_t entries_of(const kdt_topk_merge_params& p) { return int64_t{p.num_shards} * p.num_candidates; }

// A power of two of at least twice the entries.
int64_t table_size(const kdt_topk_merge_params& p) {
  int64_t size = kSmallTable;
  while (size < 2 * entries_of(p)) size *= 2;
  return size;
}

int64_t blocks_with_tables(const kdt_topk_merge_params& p) {
  const int64_t table_bytes = table_size(p) * static_cast<int64_t>(sizeof(unsigned long long));
  return std::min({int64_t{p.num_rows}, kMaxBlocks, kMaxTableBytes / table_bytes});
}

__device__ uint32_t hash(uint32_t id) {
  id *= 0x9E3779B1u;
  return id ^ id >> 15;
}

// Notes that `id` is at `place`, unless it is at a lower one.
__device__ void note(unsigned long long* table, uint32_t mask, uint32_t id, uint32_t place) {
  const unsigned long long mine = static_cast<unsigned long long>(id) << 32 | place;
  for (uint32_t at = hash(id) & mask;; at = (at + 1) & mask) {
    unsigned long long there = atomicCAS(&table[at], kFree, mine);
    if (there == kFree) return;
    if (there >> 32 == id) {
      atomicMin(&table[at], mine);
      return;
    }
  }
}

__device__ bool is_first(const unsigned long long* table, uint32_t mask, uint32_t id, uint32_t place) {
  uint32_t at = hash(id) & mask;
  while (table[at] >> 32 != id) at = (at + 1) & mask;
  return static_cast<uint32_t>(table[at]) == place;
}

__global__ void __launch_bounds__(kThreads)
    topk_merge_kernel(kdt_topk_merge_params p, unsigned long long* tables, int64_t table_entries) {
  __shared__ KeyList<kThreads, kListSize> list;
  __shared__ unsigned long long small_table[kSmallTable];
  __shared__ double warp_values[kThreads / kWarpSize];
  const int tid = threadIdx.x;
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int32_t k = p.num_candidates;
  const int64_t n = int64_t{p.num_shards} * k;
  unsigned long long* table = tables == nullptr ? small_table : tables + blockIdx.x * table_entries;
  const uint32_t mask = static_cast<uint32_t>(table_entries - 1);

  // A reduction over the block, in a fixed order.
  const auto reduce = [&](double value, auto&& combine) {
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    __syncthreads();
    if (tid % kWarpSize == 0) warp_values[tid / kWarpSize] = value;
    __syncthreads();
    value = warp_values[0];
    for (int w = 1; w < kThreads / kWarpSize; ++w) value = combine(value, warp_values[w]);
    return value;
  };

  for (int64_t r = blockIdx.x; r < p.num_rows; r += gridDim.x) {
    const double nothing = -static_cast<double>(positive_infinity());
    double lse = nothing;
    int32_t status = 0, count = 0;
    list.clear();
    if (r < live) {
      double mine = nothing;  // S <= the number of threads
      if (tid < p.num_shards) mine = p.shard_lse[tid * p.shard_lse_stride + r];
      bool bad = !(mine < -nothing);
      for (int64_t i = tid; i < table_entries; i += kThreads) table[i] = kFree;
      __syncthreads();
      const auto entry = [&](int64_t i, float* logit) {  // its id, -1 for padding
        const int64_t shard = i / k, place = i % k;
        *logit = p.logits[shard * p.logits_stride + r * p.logits_row_stride + place];
        return p.shard_token_ids[shard * p.shard_token_ids_stride + r * p.shard_token_ids_row_stride + place];
      };
      for (int64_t i = tid; i < n; i += kThreads) {
        float logit;
        const int32_t id = entry(i, &logit);
        if (id < 0) continue;
        bad |= !(logit < positive_infinity());
        note(table, mask, static_cast<uint32_t>(id), static_cast<uint32_t>(i));
      }
      bad = __syncthreads_or(bad) != 0;
      const double largest = reduce(mine, [](double a, double b) { return fmax(a, b); });
      if (bad || largest == nothing) {
        lse = bad ? static_cast<double>(quiet_nan()) : nothing;
        status = KDT_STATUS_ROW_INVALID;
      } else {
        const double sum = reduce(exp(mine - largest), [](double a, double b) { return a + b; });
        lse = largest + log(sum);
        for (int64_t first = 0; first < n; first += kThreads) {
          list.cut(k, kListSize - kThreads);
          const int64_t i = first + tid;
          float logit;
          const int32_t id = i < n ? entry(i, &logit) : -1;
          if (id >= 0 && is_first(table, mask, static_cast<uint32_t>(id), static_cast<uint32_t>(i))) {
            list.append(candidate_key(logit, static_cast<uint32_t>(id)));
          }
        }
        list.cut(k, max(k, kThreads));
        list.sort();
        count = min(list.count, k);
      }
    }
    const float lse32 = static_cast<float>(lse);
    for (int32_t i = tid; i < k; i += kThreads) {
      const bool there = i < count;
      p.log_probs[r * p.log_probs_stride + i] =
          there ? fminf(0.0f, candidate_logit(list.keys[i]) - lse32) : negative_infinity();
      p.token_ids[r * p.token_ids_stride + i] = there ? static_cast<int32_t>(candidate_id(list.keys[i])) : -1;
    }
    if (tid == 0) {
      if (p.lse != nullptr) p.lse[r] = lse;
      if (p.status != nullptr) p.status[r] = status;
    }
    __syncthreads();  // the next row comes into the same memory
  }
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_topk_merge_params& p) {
  const int64_t size = table_size(p);
  if (size == kSmallTable) return 0;
  return workspace_for(static_cast<size_t>(blocks_with_tables(p)) * static_cast<size_t>(size) *
                       sizeof(unsigned long long));
}

int32_t enqueue(const Session& session, const kdt_topk_merge_params& p, void* workspace) {
  const int64_t size = table_size(p);
  const bool small = size == kSmallTable;
  auto* tables = small ? nullptr : reinterpret_cast<unsigned long long*>(workspace_begin(workspace));
  return launch_kernel<0>(session, "topk_merge", topk_merge_kernel, small ? p.num_rows : blocks_with_tables(p),
                          kThreads, After::kFinished, p, tables, size);
}

}  // namespace kdt::cuda
