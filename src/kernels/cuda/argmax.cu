// argmax on CUDA: parts of rows; where a row has several, a second kernel joins them.
//
// Idea: the floor is reading the logits once, so there is little work on each: comparing and the search for NaN
// work on vectors of eight, for 16-bit types on two logits at a time. Only a vector that beats what the thread has
// seen is searched for the place.
//
// Limits: those of the header; rows whose start is not aligned to 16 bytes are read by element, which is slower.
//
// Tried and lost: a cluster of blocks a row that joins its parts in shared memory, without a second kernel (9.5 us
// against 9.1 for 65 rows, H200); streaming loads, which drop from the cache what the next replay would find there.
#include "launch.hpp"
#include "row_parts.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

__device__ void write_row(const kdt_argmax_params& p, int64_t r, bool live, const RowMax& whole) {
  const bool good = live && whole.finite != 0 && !isnan(whole.value);
  p.tokens[r] = good ? whole.index + p.id_offset : -1;
  if (p.values != nullptr) p.values[r] = live ? whole.value : negative_infinity();
  if (p.status != nullptr) p.status[r] = live && !good ? KDT_STATUS_ROW_INVALID : 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    argmax_parts_kernel(kdt_argmax_params p, RowMax* parts, int32_t num_parts) {
  __shared__ RowMaxShared<kThreads> shared;
  trigger_dependents();
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  for (int64_t item = blockIdx.x; item < int64_t{p.num_rows} * num_parts; item += gridDim.x) {
    const int64_t r = item / num_parts;
    RowMax part = {negative_infinity(), 0, 0};
    if (r < live) {
      const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
      const VectorRange range = part_of_row(p.vocab_size, item % num_parts, num_parts);
      ThreadMax m;
      for_each_vector<kThreads, 5>(row, range, p.vocab_size,
                                   [&](const Vector<T>& v, int32_t vector) { m.add(v, vector); });
      part = block_max(m, row, p.vocab_size, range, shared);
    }
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
    argmax_rows_kernel(kdt_argmax_params p, const RowMax* parts, int32_t num_parts) {
  wait_for_primary();
  const int64_t live = live_rows(p.num_live, p.num_rows, p.rows_per_request);
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kRows = kThreads / kWarpSize;
  for (int64_t r = blockIdx.x * int64_t{kRows} + threadIdx.x / kWarpSize; r < p.num_rows;
       r += gridDim.x * int64_t{kRows}) {
    RowMax whole = {negative_infinity(), INT32_MAX, 0};
    if (lane < num_parts && r < live) whole = parts[r * num_parts + lane];
    join_lanes(&whole);
    if (lane == 0) write_row(p, r, r < live, whole);
  }
}

}  // namespace

size_t workspace_size(const kdt_context& context, const kdt_argmax_params& p) {
  return workspace_for(parts_in_workspace(context, p.num_rows, p.vocab_size) * sizeof(RowMax));
}

int32_t enqueue(const Session& session, const kdt_argmax_params& p, void* workspace) {
  const auto start = [&](RowMax* parts, int32_t num_parts) {
    return dispatch_dtype(p.logits_dtype, [&](auto zero) {
      return launch_kernel<0>(session, "argmax", argmax_parts_kernel<decltype(zero)>,
                              int64_t{p.num_rows} * num_parts, kThreads, After::kFinished, p, parts, num_parts);
    });
  };
  return launch_by_parts<RowMax>(session, "argmax", p, workspace, kThreads, argmax_rows_kernel, start);
}

}  // namespace kdt::cuda
