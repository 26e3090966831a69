/* The headers are C11, may be included twice, and the library can be used from C. Compiled with
 * -std=c11 -pedantic-errors; called by test_abi.cpp. */
#include <stdlib.h>
#include <string.h>

#include "kdtree/kdtr.h"
#include "kdtree/kdtree.h"

#define CHECK(condition) \
  if (!(condition)) return __LINE__

/* 0, or the line of the check that failed. */
int kdt_test_header_is_c(void);

int kdt_test_header_is_c(void) {
  CHECK(kdt_abi_version() == KDT_ABI_MAJOR * 1000 + KDT_ABI_MINOR);
  CHECK(strcmp(kdt_version(), KDT_VERSION) == 0);

  kdt_context_params context_params = {.struct_size = sizeof context_params, .backend = 99};
  kdt_context* context = NULL;
  CHECK(kdt_context_create(&context_params, &context) == KDT_ERR_INVALID_ARGUMENT);
  CHECK(context == NULL);
  CHECK(strstr(kdt_last_error(), "backend") != NULL);
  CHECK(kdt_context_create(NULL, &context) == KDT_OK);

  const float log_probs[2] = {-1.0f, -2.0f};
  const int32_t token_ids[2] = {10, 11}, root_token = 7, prefix_len = 5;
  int32_t tokens[2], parents[2], first_child[2], next_sibling[2], depths[2], positions[2], node_count;
  float scores[2];
  uint64_t visibility[2];
  const kdt_tree tree = {.struct_size = sizeof tree,
                         .batch_size = 1,
                         .num_slots = 2,
                         .tokens = tokens,
                         .parents = parents,
                         .first_child = first_child,
                         .next_sibling = next_sibling,
                         .depths = depths,
                         .positions = positions,
                         .log_probs = scores,
                         .visibility = visibility,
                         .node_count = &node_count};
  const kdt_tree_build_params params = {.struct_size = sizeof params,
                                        .depth = 1,
                                        .num_candidates = 2,
                                        .budget = 1,
                                        .log_probs = log_probs,
                                        .token_ids = token_ids,
                                        .root_tokens = &root_token,
                                        .prefix_lens = &prefix_len,
                                        .tree = &tree};
  size_t size = 0;
  CHECK(kdt_tree_build_workspace_size(context, &params, &size) == KDT_OK);
  void* workspace = malloc(size + 1);
  CHECK(workspace != NULL);
  const int32_t status = kdt_tree_build(context, &params, workspace, size, NULL);
  free(workspace);
  kdt_context_destroy(context);
  CHECK(status == KDT_OK);
  CHECK(node_count == 2 && tokens[0] == 7 && tokens[1] == 10);
  CHECK(parents[0] == -1 && parents[1] == 0 && first_child[0] == 1 && first_child[1] == -1);
  CHECK(positions[0] == 5 && positions[1] == 6 && scores[1] == -1.0f && visibility[1] == 3);

  kdtr_file* file = NULL;
  CHECK(kdtr_parse("KDTR", 4, &file) == KDTR_ERR_TOO_SHORT);
  CHECK(strcmp(kdt_status_name(KDTR_ERR_TOO_SHORT), "KDTR_ERR_TOO_SHORT") == 0);
  return 0;
}
