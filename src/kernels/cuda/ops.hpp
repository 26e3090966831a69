// The operations on the CUDA backend, overloaded on their parameters. Parameters arrive checked and with all
// strides settled (see ../args.hpp), workspaces have the size asked for and any alignment. Each operation is in the
// file of its name.
//
// enqueue puts the operation on the session's stream and returns what the launches returned. It neither allocates
// nor synchronises, and reads no array.
#pragma once

#include <cstddef>

#include "device.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cuda {

#ifdef KDT_WITH_CUDA

#define KDT_CUDA_OPERATION(name)                                                        \
  size_t workspace_size(const kdt_context& context, const kdt_##name##_params& params); \
  int32_t enqueue(const Session& session, const kdt_##name##_params& params, void* workspace)

KDT_CUDA_OPERATION(topk_logprobs);
KDT_CUDA_OPERATION(topk_merge);
KDT_CUDA_OPERATION(tree_build);
KDT_CUDA_OPERATION(tree_from_parents);
KDT_CUDA_OPERATION(tree_from_visibility);
KDT_CUDA_OPERATION(verify_attn);
KDT_CUDA_OPERATION(merge_attn_states);
KDT_CUDA_OPERATION(argmax);
KDT_CUDA_OPERATION(sample);
KDT_CUDA_OPERATION(tree_accept);
KDT_CUDA_OPERATION(kv_compact);

#undef KDT_CUDA_OPERATION

#else  // no CUDA context can be made, so these are never called

template <class Params>
size_t workspace_size(const kdt_context&, const Params&) {
  return 0;
}
template <class Params>
int32_t enqueue(const Session&, const Params&, void*) {
  return KDT_ERR_NO_BACKEND;
}

#endif

}  // namespace kdt::cuda
