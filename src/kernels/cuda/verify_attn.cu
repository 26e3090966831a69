// verify_attn on CUDA: which kernel does the work, and the numbers of the requests.
//
// The kernels are those of verify_attn_wgmma.cu, verify_attn_mma.cu and verify_attn_plain.cu. Which runs follows
// from the call's types, alignment and shapes and from the chip (attn_choice.hpp). Before the latter two another
// one runs, a block a request: it clamps the numbers on the device, writes the status and looks for pages that must
// be seen and are not there. Hopper's kernel does all that itself.
#include "attn_choice.hpp"
#include "launch.hpp"
#include "verify_attn.cuh"
#include "verify_attn_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads) prepare(const kdt_verify_attn_params p, const kdt_kv_cache cache,
                                                    const kdt_tree tree, AttnRequest* requests, const Plan plan) {
  wait_for_primary();
  trigger_dependents();
  const int64_t live = live_requests(p.num_live, p.batch_size);
  for (int64_t b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
    AttnRequest request = {0, 0, 0, 0};
    int32_t status = 0;
    bool lacking = false;
    if (b < live) {
      request = read_request(p, cache, tree, b, &status);
      lacking = lacks_rows<kThreads>(cache, tree, b, request, static_cast<int32_t>(threadIdx.x));
    }
    request.lacks_rows = __syncthreads_or(lacking);
    if (request.lacks_rows != 0) status |= KDT_STATUS_CLAMPED;
    if (request.node_count == 0 && plan.ranges != nullptr) {
      plan.write_none<kThreads>(b, static_cast<int32_t>(threadIdx.x));
    }
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
  if (takes_wgmma(session.context(), p)) {
    if (const std::optional<int32_t> done = enqueue_wgmma(session, call, scratch)) return *done;
  }
  const bool mma = takes_mma(session.context(), p);
  KDT_TRY(launch_kernel<0>(session, "verify_attn, numbers", prepare, p.batch_size, kThreads, After::kTriggered, p,
                           call.cache, call.tree, requests, mma ? scratch_of(scratch, p).plan : Plan{nullptr, 0}));
  return mma ? enqueue_mma(session, call, requests, scratch) : enqueue_plain(session, call, requests, scratch);
}

}  // namespace kdt::cuda
