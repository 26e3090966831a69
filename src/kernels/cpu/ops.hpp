// The operations on the CPU. Parameters arrive checked and with all strides settled (see ../args.hpp), so
// nothing here can fail; workspaces have the size the twin gives. Each function is in the file of its name.
#pragma once

#include <cstddef>

#include "../context.hpp"
#include "kdtree/kdtree.h"

namespace kdt::cpu {

size_t tree_build_workspace_size(const kdt_context& context, const kdt_tree_build_params& params);
void tree_build(const kdt_context& context, const kdt_tree_build_params& params, void* workspace);

void tree_from_parents(const kdt_context& context, const kdt_tree_from_parents_params& params);

void tree_from_visibility(const kdt_context& context, const kdt_tree_from_visibility_params& params);

void tree_accept(const kdt_context& context, const kdt_tree_accept_params& params);

size_t kv_compact_workspace_size(const kdt_context& context, const kdt_kv_compact_params& params);
void kv_compact(const kdt_context& context, const kdt_kv_compact_params& params, void* workspace);

void topk_logprobs(const kdt_context& context, const kdt_topk_logprobs_params& params);

size_t topk_merge_workspace_size(const kdt_context& context, const kdt_topk_merge_params& params);
void topk_merge(const kdt_context& context, const kdt_topk_merge_params& params, void* workspace);

void argmax(const kdt_context& context, const kdt_argmax_params& params);

void sample(const kdt_context& context, const kdt_sample_params& params);

size_t verify_attn_workspace_size(const kdt_context& context, const kdt_verify_attn_params& params);
void verify_attn(const kdt_context& context, const kdt_verify_attn_params& params, void* workspace);

void merge_attn_states(const kdt_context& context, const kdt_merge_attn_states_params& params);

}  // namespace kdt::cpu
