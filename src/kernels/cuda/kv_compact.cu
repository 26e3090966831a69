// kv_compact on CUDA: one kernel, no workspace.
//
// Idea: the 16-byte pieces of a row, over all layers, are dealt to the threads of a few blocks a request. Each
// block first checks the whole path, all entries at once, and leaves the byte offsets of its rows in shared memory.
// What it reads for that is never written here, so all blocks of a request come to the same answer without speaking
// to each other, and none has moved a byte when it says no. Then each thread takes its piece of every accepted row,
// in path order, with the widest vectors that the addresses allow.
//
// Safe in place: a piece of a row belongs to one thread, which loads up to kBatch rows before it stores them. Slots
// ascend strictly from 0 on, so a_k >= k; the rows stored so far are those below some k, and all rows still to be
// loaded are a_k or beyond. Loads before stores take care of the rows within a batch.
//
// The loads that a block waits for one after another: the numbers of the request and its path (together), the page
// table, a pointer of layer_data if there is one, the rows.
//
// Limits: paths have at most N = 1,025 entries, since slots ascend; 16 KB of shared memory hold their offsets. Rows
// that are not aligned to 16 bytes cost up to 16 times the loads and stores.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../cache.hpp"
#include "common.cuh"
#include "launch.hpp"

namespace kdt::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kEntries = kThreads / 2;  // of a path at once: two threads look up the two rows of an entry
constexpr int32_t kPiece = 16;              // bytes of each row that a thread moves
constexpr int32_t kBatch = 8;               // rows a thread has in registers
constexpr uint64_t kMaxParts = 4096;        // blocks a request
constexpr int32_t kMaxPath = KDT_MAX_BUDGET + 1;

// Bytes within a layer; from < 0: the row is in its place.
struct Move {
  int64_t from, to;
};

__device__ std::byte* layer_base(const kdt_kv_cache& c, uint64_t layer) {
  if (c.layer_data != nullptr) return static_cast<std::byte*>(c.layer_data[layer]);
  return static_cast<std::byte*>(c.data) + static_cast<int64_t>(layer) * c.layer_stride * c.element_size;
}

// Moves `bytes` bytes of each row, a multiple of the vector's size.
template <class Vector>
__device__ void move_piece(const std::byte* source, std::byte* target, int32_t bytes, const Move* moves,
                           int32_t length) {
  for (int32_t at = 0; at < bytes; at += static_cast<int32_t>(sizeof(Vector))) {
    for (int32_t k = 0; k < length; k += kBatch) {
      Vector rows[kBatch];
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        if (k + i < length && moves[k + i].from >= 0) {
          rows[i] = *reinterpret_cast<const Vector*>(source + moves[k + i].from + at);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        if (k + i < length && moves[k + i].from >= 0) {
          *reinterpret_cast<Vector*>(target + moves[k + i].to + at) = rows[i];
        }
      }
    }
  }
}

// A load that the compiler leaves where it stands, instead of moving it behind the branch that needs it.
__device__ int32_t load_here(const int32_t* address) { return *static_cast<const volatile int32_t*>(address); }

// Requests times `parts` blocks: block `part` of a request takes every parts-th run of kThreads pieces.
__global__ void __launch_bounds__(kThreads) compact_rows(const kdt_kv_compact_params p, const kdt_kv_cache from,
                                                         const kdt_kv_cache to, bool in_place, uint64_t parts) {
  __shared__ Move moves[kMaxPath];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const bool at_source = thread < kEntries;  // of the rows of an entry, this thread looks up that to be read
  const int32_t max_length = min(p.max_len, p.num_slots);
  const int64_t row_bytes = int64_t{from.row_width} * from.element_size;
  const uint64_t pieces = static_cast<uint64_t>((row_bytes + kPiece - 1) / kPiece);
  const uint64_t units = static_cast<uint64_t>(from.num_layers) * pieces;
  const uint64_t strides =
      static_cast<uint64_t>(from.page_stride | from.row_stride | to.page_stride | to.row_stride) *
      static_cast<uint64_t>(from.element_size);

  const uint64_t items = static_cast<uint64_t>(p.batch_size) * parts;
  for (uint64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t b = static_cast<int64_t>(item / parts);
    const uint64_t part = item % parts;
    const int32_t* accept_index = p.accept_index + b * p.accept_index_stride;
    // One wait for all of these: a thread's entry of the path is read before the path's length is known.
    int32_t k = thread % kEntries;
    const int32_t entry = min(k, max_length - 1);
    int32_t slot = load_here(accept_index + entry), before = load_here(accept_index + max(entry - 1, 0));
    const int64_t prefix_len = load_here(p.prefix_lens + b);
    const int32_t given_length = load_here(p.accept_len + b);
    const int32_t length = b < live_requests(p.num_live, p.batch_size) ? given_length : 0;

    bool bad = length < 0 || length > max_length;
    while (!bad && k < length) {
      const int64_t offset = at_source ? row_offset(from, b, prefix_len + slot) : row_offset(to, b, prefix_len + k);
      bad = slot <= (k == 0 ? -1 : before) || slot >= p.num_slots || offset < 0;
      if (at_source) {
        moves[k].from = in_place && slot == k ? -1 : offset * from.element_size;
      } else {
        moves[k].to = offset * from.element_size;
      }
      k += kEntries;
      if (k >= length) break;
      slot = accept_index[k];
      before = accept_index[k - 1];
    }
    bad = __syncthreads_or(bad) != 0;
    if (part == 0 && thread == 0 && p.status != nullptr) p.status[b] = bad ? KDT_STATUS_BAD_TREE : 0;

    if (!bad && length > 0) {
      const uint64_t step = parts * kThreads;
      for (uint64_t unit = part * kThreads + static_cast<uint64_t>(thread); unit < units; unit += step) {
        const uint64_t layer = unit / pieces;
        const int64_t at = static_cast<int64_t>(unit % pieces) * kPiece;
        const int32_t bytes = static_cast<int32_t>(min(int64_t{kPiece}, row_bytes - at));
        const std::byte* source = layer_base(from, layer) + at;
        std::byte* target = layer_base(to, layer) + at;
        const uint64_t alignment = strides | reinterpret_cast<uintptr_t>(source) |
                                   reinterpret_cast<uintptr_t>(target) | static_cast<uint64_t>(bytes);
        if (alignment % 16 == 0) {
          move_piece<uint4>(source, target, bytes, moves, length);
        } else if (alignment % 8 == 0) {
          move_piece<uint2>(source, target, bytes, moves, length);
        } else if (alignment % 4 == 0) {
          move_piece<uint32_t>(source, target, bytes, moves, length);
        } else if (alignment % 2 == 0) {
          move_piece<uint16_t>(source, target, bytes, moves, length);
        } else {
          move_piece<uint8_t>(source, target, bytes, moves, length);
        }
      }
    }
    __syncthreads();  // the next request's moves take the place of these
  }
}

}  // namespace

size_t workspace_size(const kdt_context&, const kdt_kv_compact_params&) { return 0; }

int32_t enqueue(const Session& session, const kdt_kv_compact_params& p, void*) {
  const kdt_kv_cache& from = *p.cache;
  const bool in_place = p.destination == nullptr;
  const kdt_kv_cache& to = in_place ? from : *p.destination;
  const int64_t row_bytes = int64_t{from.row_width} * from.element_size;
  const uint64_t units =
      static_cast<uint64_t>(from.num_layers) * static_cast<uint64_t>((row_bytes + kPiece - 1) / kPiece);
  const uint64_t parts = std::min(kMaxParts, (units + kThreads - 1) / kThreads);
  return launch_kernel<0>(session, "kv_compact", compact_rows, p.batch_size * static_cast<int64_t>(parts), kThreads,
                          After::kFinished, p, from, to, in_place, parts);
}

}  // namespace kdt::cuda
