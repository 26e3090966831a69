// verify_attn on CUDA: the numbers of the requests, and which kernel does the work.
//
// One kernel a call, a block a request, clamps the numbers on the device, writes the status and looks for pages
// that must be seen and are not there; then those of verify_attn_wgmma.cu, verify_attn_mma.cu or
// verify_attn_plain.cu run. Which, follows
// from the call's types, alignment and shapes and from the chip (attn_choice.hpp).
#include "attn_choice.hpp"
#include "launch.hpp"
#include "verify_attn.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 256, kWarps = kThreads / kWarpSize;

__device__ AttnRequest read_request(const kdt_verify_attn_params& p, const kdt_kv_cache& cache,
                                    const kdt_tree& tree, int64_t b, int32_t* status) {
  AttnRequest r = {p.num_queries, 0, 0, 0};
  if (tree.node_count != nullptr) r.node_count = clamped(tree.node_count[b], 0, p.num_queries, status);
  const int64_t room = min(max(capacity_of(cache) - r.node_count, int64_t{0}), int64_t{INT32_MAX});
  r.prefix_len = clamped(p.prefix_lens[b], 0, static_cast<int32_t>(room), status);
  if (p.kv_starts != nullptr) r.kv_start = clamped(p.kv_starts[b], 0, r.prefix_len, status);
  return r;
}

// This thread's share of the search for rows that some query must see and the cache does not hold.
__device__ bool lacks_rows(const kdt_kv_cache& cache, const kdt_tree& tree, int64_t b, const AttnRequest& r) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  bool lacking = false;
  if (r.node_count == 0) return lacking;
  if (cache.block_table != nullptr && r.kv_start < r.prefix_len) {  // prefix_len is at most the capacity
    const int32_t* table = cache.block_table + b * cache.block_table_stride;
    const int64_t last = (r.prefix_len - 1) / cache.page_size;
    for (int64_t i = r.kv_start / cache.page_size + int64_t{threadIdx.x}; i <= last; i += kThreads) {
      lacking = lacking || table[i] < 0 || table[i] >= cache.num_pages;
    }
  }
  for (int32_t j0 = warp * 64; j0 < r.node_count; j0 += kWarps * 64) {
    uint64_t seen = 0;
    for (int32_t i = lane; i < r.node_count; i += kWarpSize) seen |= tree_mask(tree, b, i, j0, r.node_count);
    const uint32_t halves[2] = {__reduce_or_sync(kAllLanes, static_cast<uint32_t>(seen)),
                                __reduce_or_sync(kAllLanes, static_cast<uint32_t>(seen >> 32))};
    for (int32_t half = 0; half < 2; ++half) {
      if ((halves[half] >> lane & 1) == 0) continue;
      lacking = lacking || row_offset(cache, b, int64_t{r.prefix_len} + j0 + half * 32 + lane) < 0;
    }
  }
  return lacking;
}

__global__ void __launch_bounds__(kThreads)
    prepare(const kdt_verify_attn_params p, const kdt_kv_cache cache, const kdt_tree tree, AttnRequest* requests) {
  trigger_dependents();
  const int64_t live = live_requests(p.num_live, p.batch_size);
  for (int64_t b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
    AttnRequest request = {0, 0, 0, 0};
    int32_t status = 0;
    bool lacking = false;
    if (b < live) {
      request = read_request(p, cache, tree, b, &status);
      lacking = lacks_rows(cache, tree, b, request);
    }
    request.lacks_rows = __syncthreads_or(lacking);
    if (request.lacks_rows != 0) status |= KDT_STATUS_CLAMPED;
    if (threadIdx.x == 0) {
      requests[b] = request;
      if (p.status != nullptr) p.status[b] = status;
    }
  }
}

size_t requests_bytes(int64_t batch_size) {
  return round_up(static_cast<size_t>(batch_size) * sizeof(AttnRequest));
}

}  // namespace

size_t workspace_size(const kdt_context& context, const kdt_verify_attn_params& p) {
  if (p.batch_size == 0) return 0;
  // One size for both kernels: which of them runs depends on alignment, too.
  return workspace_for(requests_bytes(p.batch_size) +
                       std::max(plain_workspace_size(context, p), mma_workspace_size(context, p)));
}

int32_t enqueue(const Session& session, const kdt_verify_attn_params& p, void* workspace) {
  if (p.batch_size == 0) return KDT_OK;
  std::byte* begin = workspace_begin(workspace);
  AttnRequest* requests = reinterpret_cast<AttnRequest*>(begin);
  void* scratch = begin + requests_bytes(p.batch_size);
  const AttnCall call = {p, *p.cache, p.tree != nullptr ? *p.tree : kdt_tree{}};
  KDT_TRY(launch_kernel<0>(session, "verify_attn, numbers", prepare, p.batch_size, kThreads, After::kFinished, p,
                           call.cache, call.tree, requests));
  if (takes_wgmma(session.context(), p)) {
    if (const std::optional<int32_t> done = enqueue_wgmma(session, call, requests, scratch)) return *done;
  }
  return takes_mma(session.context(), p) ? enqueue_mma(session, call, requests, scratch)
                                         : enqueue_plain(session, call, requests, scratch);
}

}  // namespace kdt::cuda
