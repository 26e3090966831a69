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

void kv_compact(const kdt_context& context, const kdt_kv_compact_params& params);

}  // namespace kdt::cpu
