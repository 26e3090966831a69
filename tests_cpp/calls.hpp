// For each operation a struct with a valid call in guarded memory and lists of what may be wrong with it; typed
// tests run over all of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend.hpp"
#include "call.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "tree_buffers.hpp"

namespace kdt_test::calls {

inline constexpr int32_t kB = 2, kN = 3, kM = 4, kD = 2, kK = 3;

// An array argument.
struct Pointer {
  std::string name;
  std::function<void*()> get;
  std::function<void(void*)> set;
  size_t element_size, alignment;
  size_t span;  // bytes from the first element to past the last
  bool output, required;
};

struct Stride {
  std::string name;
  int64_t* field;
  int64_t minimum;
};

struct Dimension {
  std::string name;
  int32_t* field;
  int32_t lowest;
  int32_t highest;
};

struct Reserved {
  std::string name;
  std::function<void()> set;
};

template <class T>
Pointer pointer(const std::string& name, T** field, int64_t elements, bool output, bool required = true) {
  using Value = std::remove_const_t<T>;
  return {name,
          [field] { return const_cast<Value*>(*field); },
          [field](void* p) { *field = static_cast<T*>(p); },
          sizeof(T),
          alignof(T),
          static_cast<size_t>(elements) * sizeof(T),
          output,
          required};
}

// What all operations have.
struct Call {
  virtual ~Call() = default;
  virtual std::string function() const = 0;
  virtual void* params() = 0;
  virtual size_t params_size() const = 0;
  virtual int32_t run(const kdt_context* c, const void* params, void* workspace, size_t size, void* stream) = 0;
  virtual int32_t query(const kdt_context* c, const void* params, size_t* size) = 0;
  virtual void set_batch_size(int32_t b) = 0;
  // Structs that params point to, by name: their address, their size, and how to point to another.
  struct Struct {
    std::string name;
    void* address;
    size_t size;
    std::function<void(void*)> set;
    bool required = true;
  };
  virtual std::vector<Struct> structs() { return {}; }
  virtual std::vector<Pointer> pointers() = 0;
  virtual std::vector<Stride> strides() = 0;
  virtual std::vector<Dimension> dimensions() = 0;
  // Makes the other dimensions agree with one that was set.
  virtual void settle(const std::string& /*dimension*/) {}
  virtual std::vector<Reserved> reserved() { return {}; }
  virtual std::vector<const GuardedBytes*> memory() const = 0;

  bool untouched() const {
    const auto all = memory();
    return std::all_of(all.begin(), all.end(), [](const GuardedBytes* m) { return m->unchanged(); });
  }
};

inline constexpr int64_t kSlack = 2;

struct OutTree : TreeBuffers {
  OutTree() : TreeBuffers(kB, kN, kSlack) {}

  void add_pointers(std::vector<Pointer>* list) {
    const int64_t span = tree.slot_stride * (kB - 1) + kN;
    list->push_back(pointer("tree.tokens", &tree.tokens, span, true));
    list->push_back(pointer("tree.parents", &tree.parents, span, true));
    list->push_back(pointer("tree.first_child", &tree.first_child, span, true));
    list->push_back(pointer("tree.next_sibling", &tree.next_sibling, span, true));
    list->push_back(pointer("tree.depths", &tree.depths, span, true));
    list->push_back(pointer("tree.positions", &tree.positions, span, true));
    list->push_back(pointer("tree.log_probs", &tree.log_probs, span, true));
    list->push_back(pointer("tree.visibility", &tree.visibility,
                            tree.visibility_stride * (kB - 1) + tree.visibility_pitch * (kN - 1) + 1, true));
    list->push_back(pointer("tree.node_count", &tree.node_count, kB, true));
    list->push_back(pointer("tree.status", &tree.status, kB, true, false));
  }
  void add_strides(std::vector<Stride>* list) {
    list->push_back({"tree.slot_stride", &tree.slot_stride, kN});
    list->push_back({"tree.visibility_pitch", &tree.visibility_pitch, 1});
    list->push_back({"tree.visibility_stride", &tree.visibility_stride, kN * tree.visibility_pitch});
  }
  void add_memory(std::vector<const GuardedBytes*>* list) const {
    for (const GuardedBytes* array : arrays()) list->push_back(array);
  }
};

template <class Params>
struct CallOf : Call {
  Params p = sized<Params>();
  void* params() override { return &p; }
  size_t params_size() const override { return sizeof p; }
};

struct TreeBuildCall : CallOf<kdt_tree_build_params> {
  static constexpr const char* kName = "TreeBuild";
  OutTree out;
  Guarded<float> log_probs{
      {kB, kD, kK}, std::vector<float>(kB * kD * kK, -1.0f), {kD * (kK + kSlack), kK + kSlack}};
  Guarded<int32_t> token_ids{
      {kB, kD, kK}, std::vector<int32_t>(kB * kD * kK, 5), {kD * (kK + kSlack), kK + kSlack}};
  Guarded<int32_t> root_tokens{{kB}, std::vector<int32_t>{7, 8}}, prefix_lens{{kB}, std::vector<int32_t>{1, 2}};
  Guarded<int32_t> budgets{{kB}, std::vector<int32_t>{2, 1}}, max_depths{{kB}, std::vector<int32_t>{2, 2}};
  Guarded<int32_t> num_live{{1}, std::vector<int32_t>{2}};

  TreeBuildCall() {
    p.depth = kD;
    p.num_candidates = kK;
    p.budget = kN - 1;
    p.log_probs = log_probs.data();
    p.token_ids = token_ids.data();
    p.log_probs_row_stride = p.token_ids_row_stride = kK + kSlack;
    p.log_probs_stride = p.token_ids_stride = kD * (kK + kSlack);
    p.root_tokens = root_tokens.data();
    p.prefix_lens = prefix_lens.data();
    p.budgets = budgets.data();
    p.max_depths = max_depths.data();
    p.num_live = num_live.data();
    p.tree = &out.tree;
  }
  std::string function() const override { return "kdt_tree_build"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_tree_build(c, static_cast<const kdt_tree_build_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_tree_build_workspace_size(c, static_cast<const kdt_tree_build_params*>(params), size);
  }
  void set_batch_size(int32_t b) override { out.tree.batch_size = b; }
  std::vector<Struct> structs() override {
    return {{"tree", &out.tree, sizeof out.tree, [this](void* s) { p.tree = static_cast<kdt_tree*>(s); }}};
  }
  std::vector<Pointer> pointers() override {
    const int64_t span = p.log_probs_stride * (kB - 1) + p.log_probs_row_stride * (kD - 1) + kK;
    std::vector<Pointer> list = {
        pointer("log_probs", &p.log_probs, span, false),   pointer("token_ids", &p.token_ids, span, false),
        pointer("root_tokens", &p.root_tokens, kB, false), pointer("prefix_lens", &p.prefix_lens, kB, false),
        pointer("budgets", &p.budgets, kB, false, false),  pointer("max_depths", &p.max_depths, kB, false, false),
        pointer("num_live", &p.num_live, 1, false, false)};
    out.add_pointers(&list);
    return list;
  }
  std::vector<Stride> strides() override {
    std::vector<Stride> list = {{"log_probs_row_stride", &p.log_probs_row_stride, kK},
                                {"log_probs_stride", &p.log_probs_stride, kK},
                                {"token_ids_row_stride", &p.token_ids_row_stride, kK},
                                {"token_ids_stride", &p.token_ids_stride, kK}};
    out.add_strides(&list);
    return list;
  }
  std::vector<Dimension> dimensions() override {
    return {{"depth", &p.depth, 0, KDT_MAX_DEPTH},
            {"num_candidates", &p.num_candidates, 0, KDT_MAX_CANDIDATES},
            {"budget", &p.budget, 0, KDT_MAX_BUDGET},
            {"tree.batch_size", &out.tree.batch_size, 0, INT32_MAX},
            {"tree.num_slots", &out.tree.num_slots, 1, KDT_MAX_BUDGET + 1}};
  }
  void settle(const std::string& dimension) override {
    if (dimension == "budget") out.tree.num_slots = p.budget + 1;
    if (dimension == "tree.num_slots") p.budget = out.tree.num_slots - 1;
  }
  std::vector<Reserved> reserved() override {
    return {{"spine_len", [this] { p.spine_len = 1; }},
            {"reserved0", [this] { p.reserved0 = -1; }},
            {"min_scores", [this] { p.min_scores = p.log_probs; }},
            {"depth_costs", [this] { p.depth_costs = p.log_probs; }}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    std::vector<const GuardedBytes*> list = {&log_probs, &token_ids,  &root_tokens, &prefix_lens,
                                             &budgets,   &max_depths, &num_live};
    out.add_memory(&list);
    return list;
  }
};

struct TreeFromParentsCall : CallOf<kdt_tree_from_parents_params> {
  static constexpr const char* kName = "TreeFromParents";
  OutTree out;
  Guarded<int32_t> tokens{{kB, kN}, std::vector<int32_t>(kB * kN, 4), {kN + kSlack}};
  Guarded<int32_t> parents{{kB, kN}, std::vector<int32_t>{-1, 0, 1, -1, 0, 0}, {kN + kSlack}};
  Guarded<int32_t> node_counts{{kB}, std::vector<int32_t>{3, 2}}, prefix_lens{{kB}, std::vector<int32_t>{1, 2}};
  Guarded<int32_t> num_live{{1}, std::vector<int32_t>{2}};

  TreeFromParentsCall() {
    p.tokens = tokens.data();
    p.parents = parents.data();
    p.tokens_stride = p.parents_stride = kN + kSlack;
    p.node_counts = node_counts.data();
    p.prefix_lens = prefix_lens.data();
    p.num_live = num_live.data();
    p.tree = &out.tree;
  }
  std::string function() const override { return "kdt_tree_from_parents"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_tree_from_parents(c, static_cast<const kdt_tree_from_parents_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_tree_from_parents_workspace_size(c, static_cast<const kdt_tree_from_parents_params*>(params), size);
  }
  void set_batch_size(int32_t b) override { out.tree.batch_size = b; }
  std::vector<Struct> structs() override {
    return {{"tree", &out.tree, sizeof out.tree, [this](void* s) { p.tree = static_cast<kdt_tree*>(s); }}};
  }
  std::vector<Pointer> pointers() override {
    const int64_t span = p.tokens_stride * (kB - 1) + kN;
    std::vector<Pointer> list = {
        pointer("tokens", &p.tokens, span, false), pointer("parents", &p.parents, span, false),
        pointer("node_counts", &p.node_counts, kB, false), pointer("prefix_lens", &p.prefix_lens, kB, false),
        pointer("num_live", &p.num_live, 1, false, false)};
    out.add_pointers(&list);
    return list;
  }
  std::vector<Stride> strides() override {
    std::vector<Stride> list = {{"tokens_stride", &p.tokens_stride, kN}, {"parents_stride", &p.parents_stride, kN}};
    out.add_strides(&list);
    return list;
  }
  std::vector<Dimension> dimensions() override {
    return {{"tree.batch_size", &out.tree.batch_size, 0, INT32_MAX},
            {"tree.num_slots", &out.tree.num_slots, 1, KDT_MAX_BUDGET + 1}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    std::vector<const GuardedBytes*> list = {&tokens, &parents, &node_counts, &prefix_lens, &num_live};
    out.add_memory(&list);
    return list;
  }
};

struct TreeFromVisibilityCall : CallOf<kdt_tree_from_visibility_params> {
  static constexpr const char* kName = "TreeFromVisibility";
  OutTree out;
  Guarded<uint8_t> mask{{kB, kN, kN},
                        std::vector<uint8_t>{1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1},
                        {kN * (kN + kSlack), kN + kSlack}};
  Guarded<int32_t> tokens{{kB, kN}, std::vector<int32_t>(kB * kN, 4), {kN + kSlack}};
  Guarded<int32_t> node_counts{{kB}, std::vector<int32_t>{3, 2}}, prefix_lens{{kB}, std::vector<int32_t>{1, 2}};
  Guarded<int32_t> num_live{{1}, std::vector<int32_t>{2}};

  TreeFromVisibilityCall() {
    p.mask = mask.data();
    p.mask_row_stride = kN + kSlack;
    p.mask_stride = kN * (kN + kSlack);
    p.tokens = tokens.data();
    p.tokens_stride = kN + kSlack;
    p.node_counts = node_counts.data();
    p.prefix_lens = prefix_lens.data();
    p.num_live = num_live.data();
    p.tree = &out.tree;
  }
  std::string function() const override { return "kdt_tree_from_visibility"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_tree_from_visibility(c, static_cast<const kdt_tree_from_visibility_params*>(params), w, size,
                                    stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_tree_from_visibility_workspace_size(c, static_cast<const kdt_tree_from_visibility_params*>(params),
                                                   size);
  }
  void set_batch_size(int32_t b) override { out.tree.batch_size = b; }
  std::vector<Struct> structs() override {
    return {{"tree", &out.tree, sizeof out.tree, [this](void* s) { p.tree = static_cast<kdt_tree*>(s); }}};
  }
  std::vector<Pointer> pointers() override {
    std::vector<Pointer> list = {
        pointer("mask", &p.mask, p.mask_stride * (kB - 1) + p.mask_row_stride * (kN - 1) + kN, false),
        pointer("tokens", &p.tokens, p.tokens_stride * (kB - 1) + kN, false),
        pointer("node_counts", &p.node_counts, kB, false), pointer("prefix_lens", &p.prefix_lens, kB, false),
        pointer("num_live", &p.num_live, 1, false, false)};
    out.add_pointers(&list);
    return list;
  }
  std::vector<Stride> strides() override {
    std::vector<Stride> list = {{"mask_row_stride", &p.mask_row_stride, kN},
                                {"mask_stride", &p.mask_stride, kN * p.mask_row_stride},
                                {"tokens_stride", &p.tokens_stride, kN}};
    out.add_strides(&list);
    return list;
  }
  std::vector<Dimension> dimensions() override {
    return {{"tree.batch_size", &out.tree.batch_size, 0, INT32_MAX},
            {"tree.num_slots", &out.tree.num_slots, 1, KDT_MAX_BUDGET + 1}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    std::vector<const GuardedBytes*> list = {&mask, &tokens, &node_counts, &prefix_lens, &num_live};
    out.add_memory(&list);
    return list;
  }
};

struct TreeAcceptCall : CallOf<kdt_tree_accept_params> {
  static constexpr const char* kName = "TreeAccept";
  using Ints = std::vector<int32_t>;
  kdt_tree tree = sized<kdt_tree>();
  Guarded<int32_t> tree_tokens{{kB, kN}, Ints{7, 4, 5, 8, 4, 5}, {kN + kSlack}};
  Guarded<int32_t> first_child{{kB, kN}, Ints{1, 2, -1, 1, -1, -1}, {kN + kSlack}};
  Guarded<int32_t> next_sibling{{kB, kN}, Ints{-1, -1, -1, -1, 2, -1}, {kN + kSlack}};
  Guarded<int32_t> node_count{{kB}, Ints{3, 3}};
  Guarded<int32_t> targets{{kB, kN}, Ints{4, 5, 6, 5, 1, 2}, {kN + kSlack}};
  Guarded<int32_t> max_tokens{{kB}, Ints{9, 9}}, stop_tokens{{2}, Ints{99, 98}}, num_live{{1}, Ints{2}};
  Guarded<int32_t> tokens{{kB, kM}, {kM + kSlack}}, accept_index{{kB, kM}, {kM + kSlack}};
  Guarded<int32_t> token_count{{kB}}, accept_len{{kB}}, next_root{{kB}}, finished{{kB}}, status{{kB}};
  Guarded<float> reserved_floats{{kB, kM}};

  TreeAcceptCall() {
    tree.batch_size = kB;
    tree.num_slots = kN;
    tree.slot_stride = kN + kSlack;
    tree.tokens = tree_tokens.data();
    tree.first_child = first_child.data();
    tree.next_sibling = next_sibling.data();
    tree.node_count = node_count.data();
    p.tree = &tree;
    p.target_tokens = targets.data();
    p.target_tokens_stride = kN + kSlack;
    p.max_tokens = max_tokens.data();
    p.stop_tokens = stop_tokens.data();
    p.num_stop_tokens = 2;
    p.max_len = kM;
    p.num_live = num_live.data();
    p.tokens = tokens.data();
    p.accept_index = accept_index.data();
    p.tokens_stride = p.accept_index_stride = kM + kSlack;
    p.token_count = token_count.data();
    p.accept_len = accept_len.data();
    p.next_root = next_root.data();
    p.finished = finished.data();
    p.status = status.data();
  }
  std::string function() const override { return "kdt_tree_accept"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_tree_accept(c, static_cast<const kdt_tree_accept_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_tree_accept_workspace_size(c, static_cast<const kdt_tree_accept_params*>(params), size);
  }
  void set_batch_size(int32_t b) override { tree.batch_size = b; }
  std::vector<Struct> structs() override {
    return {{"tree", &tree, sizeof tree, [this](void* s) { p.tree = static_cast<kdt_tree*>(s); }}};
  }
  std::vector<Pointer> pointers() override {
    const int64_t slots = tree.slot_stride * (kB - 1) + kN, row = p.tokens_stride * (kB - 1) + kM;
    return {pointer("tree.tokens", &tree.tokens, slots, false),
            pointer("tree.first_child", &tree.first_child, slots, false),
            pointer("tree.next_sibling", &tree.next_sibling, slots, false),
            pointer("tree.node_count", &tree.node_count, kB, false),
            pointer("target_tokens", &p.target_tokens, slots, false),
            pointer("max_tokens", &p.max_tokens, kB, false, false),
            pointer("stop_tokens", &p.stop_tokens, 2, false),  // required: num_stop_tokens is 2
            pointer("num_live", &p.num_live, 1, false, false),
            pointer("tokens", &p.tokens, row, true),
            pointer("accept_index", &p.accept_index, row, true),
            pointer("token_count", &p.token_count, kB, true),
            pointer("accept_len", &p.accept_len, kB, true),
            pointer("next_root", &p.next_root, kB, true),
            pointer("finished", &p.finished, kB, true),
            pointer("status", &p.status, kB, true, false)};
  }
  std::vector<Stride> strides() override {
    return {{"tree.slot_stride", &tree.slot_stride, kN},
            {"target_tokens_stride", &p.target_tokens_stride, kN},
            {"tokens_stride", &p.tokens_stride, kM},
            {"accept_index_stride", &p.accept_index_stride, kM}};
  }
  std::vector<Dimension> dimensions() override {
    return {{"tree.batch_size", &tree.batch_size, 0, INT32_MAX},
            {"tree.num_slots", &tree.num_slots, 1, KDT_MAX_BUDGET + 1},
            {"num_stop_tokens", &p.num_stop_tokens, 0, INT32_MAX},
            {"max_len", &p.max_len, 1, INT32_MAX}};
  }
  std::vector<Reserved> reserved() override {
    return {{"target_log_probs", [this] { p.target_log_probs = reserved_floats.data(); }},
            {"log_probs", [this] { p.log_probs = reserved_floats.data(); }}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    return {&tree_tokens, &first_child, &next_sibling, &node_count,     &targets,     &max_tokens,
            &stop_tokens, &num_live,    &tokens,       &accept_index,   &token_count, &accept_len,
            &next_root,   &finished,    &status,       &reserved_floats};
  }
};

// In place, and (KvCompactToCall) to a destination.
struct KvCompactCall : CallOf<kdt_kv_compact_params> {
  static constexpr const char* kName = "KvCompact";
  using Ints = std::vector<int32_t>;
  static constexpr int32_t kLayers = 2, kPages = 4, kPageSize = 4, kWidth = 3, kColumns = 2;
  static constexpr int64_t kRow = kWidth + 1, kPage = kPageSize * kRow + 1, kLayer = kPages * kPage + 1;
  kdt_kv_cache cache = sized<kdt_kv_cache>(), destination = sized<kdt_kv_cache>();
  Guarded<uint16_t> rows{{kLayers, kPages, kPageSize, kWidth}, filled(), {kLayer, kPage, kRow}};
  Guarded<uint16_t> destination_rows{{kLayers, kPages, kPageSize, kWidth}, {kLayer, kPage, kRow}};
  Guarded<int32_t> table{{kB, kColumns}, Ints{3, 0, 1, 2}, {kColumns + kSlack}};
  Guarded<int32_t> destination_table{{kB, kColumns}, Ints{0, 1, 2, 3}, {kColumns + kSlack}};
  Guarded<int32_t> accept_index{{kB, kM}, Ints{0, 2, -1, -1, 1, 2, -1, -1}, {kM + kSlack}};
  Guarded<int32_t> accept_len{{kB}, Ints{2, 2}}, prefix_lens{{kB}, Ints{2, 3}}, num_live{{1}, Ints{2}};
  Guarded<int32_t> status{{kB}};

  static std::vector<uint16_t> filled() {
    std::vector<uint16_t> values(kLayers * kPages * kPageSize * kWidth);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
    return values;
  }

  KvCompactCall() {
    for (kdt_kv_cache* c : {&cache, &destination}) {
      c->num_layers = kLayers;
      c->num_pages = kPages;
      c->page_size = kPageSize;
      c->row_width = kWidth;
      c->element_size = 2;
      c->max_pages = kColumns;
      c->row_stride = kRow;
      c->page_stride = kPage;
      c->layer_stride = kLayer;
      c->block_table_stride = kColumns + kSlack;
    }
    cache.data = rows.data();
    cache.block_table = table.data();
    destination.data = destination_rows.data();
    destination.block_table = destination_table.data();
    p.batch_size = kB;
    p.num_slots = kN;
    p.max_len = kM;
    p.cache = &cache;
    p.accept_index = accept_index.data();
    p.accept_index_stride = kM + kSlack;
    p.accept_len = accept_len.data();
    p.prefix_lens = prefix_lens.data();
    p.num_live = num_live.data();
    p.status = status.data();
  }
  std::string function() const override { return "kdt_kv_compact"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_kv_compact(c, static_cast<const kdt_kv_compact_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_kv_compact_workspace_size(c, static_cast<const kdt_kv_compact_params*>(params), size);
  }
  void set_batch_size(int32_t b) override { p.batch_size = b; }
  std::vector<Struct> structs() override {
    return {{"cache", &cache, sizeof cache, [this](void* s) { p.cache = static_cast<kdt_kv_cache*>(s); }}};
  }
  void add_cache_pointers(const std::string& name, kdt_kv_cache* c, bool output, std::vector<Pointer>* list) {
    // Elements have any size here, so the cache has no alignment of its own.
    list->push_back(
        {name + ".data", [c] { return c->data; }, [c](void* v) { c->data = v; }, 2, 1,
         2 * static_cast<size_t>(kLayer * (kLayers - 1) + kPage * (kPages - 1) + kRow * (kPageSize - 1) + kWidth),
         output, true});
    list->push_back(
        pointer(name + ".block_table", &c->block_table, c->block_table_stride * (kB - 1) + kColumns, false, false));
  }
  std::vector<Pointer> pointers() override {
    std::vector<Pointer> list = {
        pointer("accept_index", &p.accept_index, p.accept_index_stride * (kB - 1) + kM, false),
        pointer("accept_len", &p.accept_len, kB, false), pointer("prefix_lens", &p.prefix_lens, kB, false),
        pointer("num_live", &p.num_live, 1, false, false), pointer("status", &p.status, kB, true, false)};
    add_cache_pointers("cache", &cache, p.destination == nullptr, &list);
    return list;
  }
  void add_cache_strides(const std::string& name, kdt_kv_cache* c, std::vector<Stride>* list) {
    list->push_back({name + ".row_stride", &c->row_stride, kWidth});
    list->push_back({name + ".page_stride", &c->page_stride, kWidth});
    list->push_back({name + ".layer_stride", &c->layer_stride, kWidth});
    list->push_back({name + ".block_table_stride", &c->block_table_stride, kColumns});
  }
  std::vector<Stride> strides() override {
    std::vector<Stride> list = {{"accept_index_stride", &p.accept_index_stride, kM}};
    add_cache_strides("cache", &cache, &list);
    return list;
  }
  void add_cache_dimensions(const std::string& name, kdt_kv_cache* c, std::vector<Dimension>* list) {
    list->push_back({name + ".num_layers", &c->num_layers, 1, INT32_MAX});
    list->push_back({name + ".num_pages", &c->num_pages, 0, INT32_MAX});
    list->push_back({name + ".page_size", &c->page_size, 1, INT32_MAX});
    list->push_back({name + ".row_width", &c->row_width, 1, INT32_MAX});
    list->push_back({name + ".max_pages", &c->max_pages, 0, INT32_MAX});
  }
  std::vector<Dimension> dimensions() override {
    std::vector<Dimension> list = {{"batch_size", &p.batch_size, 0, INT32_MAX},
                                   {"num_slots", &p.num_slots, 1, KDT_MAX_BUDGET + 1},
                                   {"max_len", &p.max_len, 1, INT32_MAX}};
    add_cache_dimensions("cache", &cache, &list);
    return list;
  }
  std::vector<Reserved> reserved() override {
    return {{"reserved0", [this] { p.reserved0 = 1; }}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    return {&rows,        &destination_rows, &table, &destination_table, &accept_index, &accept_len,
            &prefix_lens, &num_live,         &status};
  }
};

struct KvCompactToCall : KvCompactCall {
  static constexpr const char* kName = "KvCompactTo";
  KvCompactToCall() { p.destination = &destination; }
  std::vector<Struct> structs() override {
    auto list = KvCompactCall::structs();
    list.push_back({"destination", &destination, sizeof destination,
                    [this](void* s) { p.destination = static_cast<kdt_kv_cache*>(s); }, false});
    return list;
  }
  std::vector<Pointer> pointers() override {
    auto list = KvCompactCall::pointers();
    add_cache_pointers("destination", &destination, true, &list);
    return list;
  }
  std::vector<Stride> strides() override {
    auto list = KvCompactCall::strides();
    add_cache_strides("destination", &destination, &list);
    return list;
  }
  std::vector<Dimension> dimensions() override {
    auto list = KvCompactCall::dimensions();
    add_cache_dimensions("destination", &destination, &list);
    return list;
  }
};

// ---- Vocabulary rows ----

inline constexpr int32_t kV = 6, kShards = 3;

inline Pointer floats_pointer(const std::string& name, std::function<void*()> get, std::function<void(void*)> set,
                              int32_t dtype, int64_t elements, bool output) {
  const size_t size = dtype == KDT_F32 ? 4 : 2;
  return {name, std::move(get), std::move(set), size, size, static_cast<size_t>(elements) * size, output, true};
}

// What the calls on logits share: two rows of bfloat16, one a request.
template <class Params>
struct LogitsCall : CallOf<Params> {
  using CallOf<Params>::p;
  Guarded<uint16_t> logits{{kB, kV}, std::vector<uint16_t>(kB * kV, 0x3f80), {kV + kSlack}};
  Guarded<int32_t> num_live{{1}, std::vector<int32_t>{2}}, status{{kB}};
  Guarded<uint32_t> allowed{{kB}, std::vector<uint32_t>{63, 63}};

  LogitsCall() {
    p.num_rows = kB;
    p.vocab_size = kV;
    p.logits_dtype = KDT_BF16;
    p.logits = logits.data();
    p.logits_stride = kV + kSlack;
    p.num_live = num_live.data();
    p.status = status.data();
  }
  void set_batch_size(int32_t b) override { p.num_rows = b; }
  std::vector<Pointer> pointers() override {
    return {floats_pointer(
                "logits", [this] { return const_cast<void*>(p.logits); }, [this](void* l) { p.logits = l; },
                KDT_BF16, p.logits_stride * (kB - 1) + kV, false),
            pointer("num_live", &p.num_live, 1, false, false), pointer("status", &p.status, kB, true, false)};
  }
  std::vector<Stride> strides() override { return {{"logits_stride", &p.logits_stride, kV}}; }
  std::vector<Dimension> dimensions() override {
    return {{"num_rows", &p.num_rows, 0, INT32_MAX}, {"vocab_size", &p.vocab_size, 0, INT32_MAX}};
  }
  std::vector<Reserved> reserved() override {
    return {{"reserved0", [this] { p.reserved0 = 1; }}, {"allowed", [this] { p.allowed = allowed.data(); }}};
  }
  std::vector<const GuardedBytes*> memory() const override { return {&logits, &num_live, &status, &allowed}; }
};

struct TopkLogprobsCall : LogitsCall<kdt_topk_logprobs_params> {
  static constexpr const char* kName = "TopkLogprobs";
  Guarded<float> log_probs{{kB, kK}, {kK + kSlack}};
  Guarded<int32_t> token_ids{{kB, kK}, {kK + kSlack}};
  Guarded<double> lse{{kB}};

  TopkLogprobsCall() {
    p.num_candidates = kK;
    p.log_probs = log_probs.data();
    p.token_ids = token_ids.data();
    p.log_probs_stride = p.token_ids_stride = kK + kSlack;
    p.lse = lse.data();
  }
  std::string function() const override { return "kdt_topk_logprobs"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_topk_logprobs(c, static_cast<const kdt_topk_logprobs_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_topk_logprobs_workspace_size(c, static_cast<const kdt_topk_logprobs_params*>(params), size);
  }
  std::vector<Pointer> pointers() override {
    auto list = LogitsCall::pointers();
    const int64_t span = p.log_probs_stride * (kB - 1) + kK;
    list.push_back(pointer("log_probs", &p.log_probs, span, true));
    list.push_back(pointer("token_ids", &p.token_ids, span, true));
    list.push_back(pointer("lse", &p.lse, kB, true, p.raw != 0));
    return list;
  }
  std::vector<Stride> strides() override {
    auto list = LogitsCall::strides();
    list.push_back({"log_probs_stride", &p.log_probs_stride, kK});
    list.push_back({"token_ids_stride", &p.token_ids_stride, kK});
    return list;
  }
  std::vector<Dimension> dimensions() override {
    auto list = LogitsCall::dimensions();
    list.push_back({"num_candidates", &p.num_candidates, 0, KDT_MAX_CANDIDATES});
    return list;
  }
  std::vector<const GuardedBytes*> memory() const override {
    auto list = LogitsCall::memory();
    list.insert(list.end(), {&log_probs, &token_ids, &lse});
    return list;
  }
};

struct TopkLogprobsRawCall : TopkLogprobsCall {
  static constexpr const char* kName = "TopkLogprobsRaw";
  TopkLogprobsRawCall() { p.raw = 1; }
};

struct TopkMergeCall : CallOf<kdt_topk_merge_params> {
  static constexpr const char* kName = "TopkMerge";
  static constexpr int64_t kRow = kK + kSlack, kShard = kB * kRow + 1;
  Guarded<float> logits{{kShards, kB, kK}, std::vector<float>(kShards * kB * kK, 1.0f), {kShard, kRow}};
  Guarded<int32_t> shard_ids{{kShards, kB, kK}, std::vector<int32_t>(kShards * kB * kK, 5), {kShard, kRow}};
  Guarded<double> shard_lse{{kShards, kB}, std::vector<double>(kShards * kB, 2.0), {kB + 1}};
  Guarded<int32_t> num_live{{1}, std::vector<int32_t>{2}}, status{{kB}};
  Guarded<float> log_probs{{kB, kK}, {kRow}};
  Guarded<int32_t> token_ids{{kB, kK}, {kRow}};
  Guarded<double> lse{{kB}};

  TopkMergeCall() {
    p.num_shards = kShards;
    p.num_rows = kB;
    p.num_candidates = kK;
    p.logits = logits.data();
    p.shard_token_ids = shard_ids.data();
    p.logits_stride = p.shard_token_ids_stride = kShard;
    p.logits_row_stride = p.shard_token_ids_row_stride = kRow;
    p.shard_lse = shard_lse.data();
    p.shard_lse_stride = kB + 1;
    p.log_probs = log_probs.data();
    p.token_ids = token_ids.data();
    p.log_probs_stride = p.token_ids_stride = kRow;
    p.lse = lse.data();
    p.num_live = num_live.data();
    p.status = status.data();
  }
  std::string function() const override { return "kdt_topk_merge"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_topk_merge(c, static_cast<const kdt_topk_merge_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_topk_merge_workspace_size(c, static_cast<const kdt_topk_merge_params*>(params), size);
  }
  void set_batch_size(int32_t b) override { p.num_rows = b; }
  std::vector<Pointer> pointers() override {
    const int64_t shards = kShard * (kShards - 1) + kRow * (kB - 1) + kK, rows = kRow * (kB - 1) + kK;
    return {pointer("logits", &p.logits, shards, false),
            pointer("shard_token_ids", &p.shard_token_ids, shards, false),
            pointer("shard_lse", &p.shard_lse, p.shard_lse_stride * (kShards - 1) + kB, false),
            pointer("num_live", &p.num_live, 1, false, false),
            pointer("log_probs", &p.log_probs, rows, true),
            pointer("token_ids", &p.token_ids, rows, true),
            pointer("lse", &p.lse, kB, true, false),
            pointer("status", &p.status, kB, true, false)};
  }
  std::vector<Stride> strides() override {
    return {{"logits_row_stride", &p.logits_row_stride, kK},
            {"logits_stride", &p.logits_stride, kB * kRow},
            {"shard_token_ids_row_stride", &p.shard_token_ids_row_stride, kK},
            {"shard_token_ids_stride", &p.shard_token_ids_stride, kB * kRow},
            {"shard_lse_stride", &p.shard_lse_stride, kB},
            {"log_probs_stride", &p.log_probs_stride, kK},
            {"token_ids_stride", &p.token_ids_stride, kK}};
  }
  std::vector<Dimension> dimensions() override {
    return {{"num_shards", &p.num_shards, 1, KDT_MAX_SHARDS},
            {"num_rows", &p.num_rows, 0, INT32_MAX},
            {"num_candidates", &p.num_candidates, 0, KDT_MAX_CANDIDATES}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    return {&logits, &shard_ids, &shard_lse, &num_live, &status, &log_probs, &token_ids, &lse};
  }
};

struct ArgmaxCall : LogitsCall<kdt_argmax_params> {
  static constexpr const char* kName = "Argmax";
  Guarded<int32_t> tokens{{kB}};
  Guarded<float> values{{kB}};

  ArgmaxCall() {
    p.tokens = tokens.data();
    p.values = values.data();
  }
  std::string function() const override { return "kdt_argmax"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_argmax(c, static_cast<const kdt_argmax_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_argmax_workspace_size(c, static_cast<const kdt_argmax_params*>(params), size);
  }
  std::vector<Pointer> pointers() override {
    auto list = LogitsCall::pointers();
    list.push_back(pointer("tokens", &p.tokens, kB, true));
    list.push_back(pointer("values", &p.values, kB, true, false));
    return list;
  }
  std::vector<const GuardedBytes*> memory() const override {
    auto list = LogitsCall::memory();
    list.insert(list.end(), {&tokens, &values});
    return list;
  }
};

struct SampleCall : LogitsCall<kdt_sample_params> {
  static constexpr const char* kName = "Sample";
  Guarded<float> temperatures{{kB}, std::vector<float>{1.0f, 0.5f}}, values{{kB}};
  Guarded<int32_t> positions{{kB}, std::vector<int32_t>{3, 4}}, tokens{{kB}};
  Guarded<int64_t> request_ids{{kB}};

  SampleCall() {
    request_ids.fill({8, 9});
    p.temperatures = temperatures.data();
    p.positions = positions.data();
    p.request_ids = request_ids.data();
    p.tokens = tokens.data();
    p.values = values.data();
  }
  std::string function() const override { return "kdt_sample"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_sample(c, static_cast<const kdt_sample_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_sample_workspace_size(c, static_cast<const kdt_sample_params*>(params), size);
  }
  std::vector<Pointer> pointers() override {
    auto list = LogitsCall::pointers();
    list.push_back(pointer("temperatures", &p.temperatures, kB, false));
    list.push_back(pointer("positions", &p.positions, kB, false));
    list.push_back(pointer("request_ids", &p.request_ids, kB, false));
    list.push_back(pointer("tokens", &p.tokens, kB, true));
    list.push_back(pointer("values", &p.values, kB, true, false));
    return list;
  }
  std::vector<const GuardedBytes*> memory() const override {
    auto list = LogitsCall::memory();
    list.insert(list.end(), {&temperatures, &values, &positions, &tokens, &request_ids});
    return list;
  }
};

// ---- Attention ----

// Two queries of two heads over a paged cache of bfloat16, out in float32; heads lie outside queries.
struct VerifyAttnCall : CallOf<kdt_verify_attn_params> {
  static constexpr const char* kName = "VerifyAttn";
  using Ints = std::vector<int32_t>;
  using Halves = std::vector<uint16_t>;
  static constexpr int32_t kQ = 2, kH = 2, kQk = 576, kVDim = 512, kPages = 4, kPageSize = 2, kColumns = 3;
  static constexpr int64_t kRow = kQk + 1, kPage = kPageSize * kRow + 1;
  static constexpr int64_t row_of(int64_t width) { return width + 1; }
  static constexpr int64_t head_of(int64_t width) { return kQ * row_of(width) + 1; }
  static constexpr int64_t request_of(int64_t width) { return kH * head_of(width) + 1; }
  static constexpr int64_t span_of(int64_t width) {
    return request_of(width) * (kB - 1) + head_of(width) * (kH - 1) + row_of(width) * (kQ - 1) + width;
  }

  kdt_kv_cache cache = sized<kdt_kv_cache>();
  kdt_tree tree = sized<kdt_tree>();
  Guarded<uint16_t> q{
      {kB, kQ, kH, kQk}, Halves(kB * kQ * kH * kQk, 0x3f80), {request_of(kQk), row_of(kQk), head_of(kQk)}};
  Guarded<uint16_t> rows{{kPages, kPageSize, kQk}, Halves(kPages * kPageSize * kQk, 0x3f80), {kPage, kRow}};
  Guarded<int32_t> table{{kB, kColumns}, Ints{3, 0, 1, 2, 1, 0}, {kColumns + kSlack}};
  Guarded<int32_t> prefix_lens{{kB}, Ints{2, 3}}, kv_starts{{kB}, Ints{1, 0}}, num_live{{1}, Ints{2}};
  Guarded<uint64_t> visibility{{kB, kN, 1}, std::vector<uint64_t>{1, 3, 5, 1, 3, 7}, {kN * 2 + 1, 2}};
  Guarded<int32_t> node_count{{kB}, Ints{2, 1}}, status{{kB}};
  Guarded<float> out{{kB, kQ, kH, kVDim}, {request_of(kVDim), row_of(kVDim), head_of(kVDim)}};
  Guarded<float> lse{{kB, kQ, kH, 1}, {request_of(1), row_of(1), head_of(1)}};

  VerifyAttnCall() {
    cache.data = rows.data();
    cache.num_layers = 1;
    cache.num_pages = kPages;
    cache.page_size = kPageSize;
    cache.row_width = kQk;
    cache.element_size = 2;
    cache.max_pages = kColumns;
    cache.page_stride = kPage;
    cache.row_stride = kRow;
    cache.block_table = table.data();
    cache.block_table_stride = kColumns + kSlack;
    tree.batch_size = kB;
    tree.num_slots = kN;
    tree.visibility = visibility.data();
    tree.visibility_pitch = 2;
    tree.visibility_stride = kN * 2 + 1;
    tree.node_count = node_count.data();
    p.batch_size = kB;
    p.num_queries = kQ;
    p.num_heads = kH;
    p.qk_dim = kQk;
    p.v_dim = kVDim;
    p.q_dtype = p.kv_dtype = KDT_BF16;
    p.out_dtype = KDT_F32;
    p.scale = 0.1f;
    p.q = q.data();
    p.q_stride = request_of(kQk);
    p.q_row_stride = row_of(kQk);
    p.q_head_stride = head_of(kQk);
    p.cache = &cache;
    p.prefix_lens = prefix_lens.data();
    p.kv_starts = kv_starts.data();
    p.tree = &tree;
    p.num_live = num_live.data();
    p.out = out.data();
    p.out_stride = request_of(kVDim);
    p.out_row_stride = row_of(kVDim);
    p.out_head_stride = head_of(kVDim);
    p.lse = lse.data();
    p.lse_stride = request_of(1);
    p.lse_row_stride = row_of(1);
    p.lse_head_stride = head_of(1);
    p.status = status.data();
  }
  std::string function() const override { return "kdt_verify_attn"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_verify_attn(c, static_cast<const kdt_verify_attn_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_verify_attn_workspace_size(c, static_cast<const kdt_verify_attn_params*>(params), size);
  }
  void set_batch_size(int32_t b) override { p.batch_size = tree.batch_size = b; }
  std::vector<Struct> structs() override {
    std::vector<Struct> list = {
        {"cache", &cache, sizeof cache, [this](void* s) { p.cache = static_cast<kdt_kv_cache*>(s); }}};
    if (p.tree != nullptr) {
      list.push_back({"tree", &tree, sizeof tree, [this](void* s) { p.tree = static_cast<kdt_tree*>(s); }, false});
    }
    return list;
  }
  std::vector<Pointer> pointers() override {
    std::vector<Pointer> list = {
        floats_pointer(
            "q", [this] { return const_cast<void*>(p.q); }, [this](void* a) { p.q = a; }, KDT_BF16, span_of(kQk),
            false),
        floats_pointer(
            "cache.data", [this] { return cache.data; }, [this](void* a) { cache.data = a; }, KDT_BF16,
            kPage * (kPages - 1) + kRow * (kPageSize - 1) + kQk, false),
        pointer("cache.block_table", &cache.block_table, cache.block_table_stride * (kB - 1) + kColumns, false,
                false),
        pointer("prefix_lens", &p.prefix_lens, kB, false),
        pointer("kv_starts", &p.kv_starts, kB, false, false),
        pointer("num_live", &p.num_live, 1, false, false),
        floats_pointer(
            "out", [this] { return p.out; }, [this](void* a) { p.out = a; }, KDT_F32, span_of(kVDim), true),
        pointer("lse", &p.lse, span_of(1), true),
        pointer("status", &p.status, kB, true, false)};
    if (p.tree != nullptr) {
      list.push_back(pointer("tree.visibility", &tree.visibility,
                             tree.visibility_stride * (kB - 1) + 2 * (kN - 1) + 1, false, false));
      list.push_back(pointer("tree.node_count", &tree.node_count, kB, false, false));
    }
    return list;
  }
  std::vector<Stride> strides() override {
    std::vector<Stride> list = {{"q_stride", &p.q_stride, kQk},
                                {"q_row_stride", &p.q_row_stride, kQk},
                                {"q_head_stride", &p.q_head_stride, kQk},
                                {"out_stride", &p.out_stride, kVDim},
                                {"out_row_stride", &p.out_row_stride, kVDim},
                                {"out_head_stride", &p.out_head_stride, kVDim},
                                {"lse_stride", &p.lse_stride, 1},
                                {"lse_row_stride", &p.lse_row_stride, 1},
                                {"lse_head_stride", &p.lse_head_stride, 1},
                                {"cache.row_stride", &cache.row_stride, kQk},
                                {"cache.page_stride", &cache.page_stride, kQk},
                                {"cache.block_table_stride", &cache.block_table_stride, kColumns}};
    if (p.tree != nullptr) {
      list.push_back({"tree.visibility_pitch", &tree.visibility_pitch, 1});
      list.push_back({"tree.visibility_stride", &tree.visibility_stride, kN * tree.visibility_pitch});
    }
    return list;
  }
  std::vector<Dimension> dimensions() override {
    std::vector<Dimension> list = {{"batch_size", &p.batch_size, 0, INT32_MAX},
                                   {"num_queries", &p.num_queries, 1, KDT_MAX_BUDGET + 1},
                                   {"num_heads", &p.num_heads, 1, 128},
                                   {"cache.num_pages", &cache.num_pages, 0, INT32_MAX},
                                   {"cache.max_pages", &cache.max_pages, 0, INT32_MAX}};
    if (p.tree != nullptr) {
      list.push_back({"tree.batch_size", &tree.batch_size, 0, INT32_MAX});
      list.push_back({"tree.num_slots", &tree.num_slots, 1, KDT_MAX_BUDGET + 1});
    }
    return list;
  }
  void settle(const std::string& dimension) override {
    if (dimension == "batch_size") tree.batch_size = p.batch_size;
    if (dimension == "tree.batch_size") p.batch_size = tree.batch_size;
    if (dimension == "num_queries") tree.num_slots = std::max(kN, p.num_queries);
    if (dimension == "tree.num_slots") p.num_queries = 1;
  }
  std::vector<Reserved> reserved() override {
    return {{"qo_indptr", [this] { p.qo_indptr = node_count.data(); }},
            {"q_rope", [this] { p.q_rope = q.data(); }},
            {"kv_rope", [this] { p.kv_rope = rows.data(); }},
            {"kv_scales", [this] { p.kv_scales = lse.data(); }},
            {"split_len", [this] { p.split_len = 1; }},
            {"reserved0", [this] { p.reserved0 = -1; }}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    return {&q, &rows, &table, &prefix_lens, &kv_starts, &num_live, &visibility, &node_count, &status, &out, &lse};
  }
};

struct VerifyAttnTreelessCall : VerifyAttnCall {
  static constexpr const char* kName = "VerifyAttnTreeless";
  VerifyAttnTreelessCall() { p.tree = nullptr; }
};

// Sides and result have strides of their own, so no two of them are one array.
struct MergeAttnStatesCall : CallOf<kdt_merge_attn_states_params> {
  static constexpr const char* kName = "MergeAttnStates";
  static constexpr int32_t kH = 2, kDim = 5;
  static constexpr int64_t row_of(int64_t width, int64_t slack) { return width + slack; }
  static constexpr int64_t head_of(int64_t width, int64_t slack) { return kB * row_of(width, slack) + slack; }
  static constexpr int64_t span_of(int64_t width, int64_t slack) {
    return head_of(width, slack) * (kH - 1) + row_of(width, slack) * (kB - 1) + width;
  }
  Guarded<uint16_t> a{
      {kB, kH, kDim}, std::vector<uint16_t>(kB * kH * kDim, 0x3f80), {row_of(kDim, 1), head_of(kDim, 1)}};
  Guarded<float> b{{kB, kH, kDim}, std::vector<float>(kB * kH * kDim, 2.0f), {row_of(kDim, 2), head_of(kDim, 2)}};
  Guarded<float> a_lse{{kB, kH, 1}, std::vector<float>(kB * kH, 1.0f), {row_of(1, 1), head_of(1, 1)}};
  Guarded<float> b_lse{{kB, kH, 1}, std::vector<float>(kB * kH, 1.0f), {row_of(1, 2), head_of(1, 2)}};
  Guarded<float> out{{kB, kH, kDim}, {row_of(kDim, 3), head_of(kDim, 3)}};
  Guarded<float> lse{{kB, kH, 1}, {row_of(1, 3), head_of(1, 3)}};
  Guarded<int32_t> num_live{{1}, std::vector<int32_t>{2}};

  MergeAttnStatesCall() {
    p.num_rows = kB;
    p.num_heads = kH;
    p.v_dim = kDim;
    p.a_dtype = KDT_BF16;
    p.b_dtype = p.out_dtype = KDT_F32;
    p.a = a.data();
    p.a_row_stride = row_of(kDim, 1);
    p.a_head_stride = head_of(kDim, 1);
    p.a_lse = a_lse.data();
    p.a_lse_row_stride = row_of(1, 1);
    p.a_lse_head_stride = head_of(1, 1);
    p.b = b.data();
    p.b_row_stride = row_of(kDim, 2);
    p.b_head_stride = head_of(kDim, 2);
    p.b_lse = b_lse.data();
    p.b_lse_row_stride = row_of(1, 2);
    p.b_lse_head_stride = head_of(1, 2);
    p.out = out.data();
    p.out_row_stride = row_of(kDim, 3);
    p.out_head_stride = head_of(kDim, 3);
    p.lse = lse.data();
    p.lse_row_stride = row_of(1, 3);
    p.lse_head_stride = head_of(1, 3);
    p.num_live = num_live.data();
  }
  std::string function() const override { return "kdt_merge_attn_states"; }
  int32_t run(const kdt_context* c, const void* params, void* w, size_t size, void* stream) override {
    return kdt_merge_attn_states(c, static_cast<const kdt_merge_attn_states_params*>(params), w, size, stream);
  }
  int32_t query(const kdt_context* c, const void* params, size_t* size) override {
    return kdt_merge_attn_states_workspace_size(c, static_cast<const kdt_merge_attn_states_params*>(params), size);
  }
  void set_batch_size(int32_t rows) override { p.num_rows = rows; }
  std::vector<Pointer> pointers() override {
    return {floats_pointer(
                "a", [this] { return const_cast<void*>(p.a); }, [this](void* s) { p.a = s; }, KDT_BF16,
                span_of(kDim, 1), false),
            floats_pointer(
                "b", [this] { return const_cast<void*>(p.b); }, [this](void* s) { p.b = s; }, KDT_F32,
                span_of(kDim, 2), false),
            pointer("a_lse", &p.a_lse, span_of(1, 1), false),
            pointer("b_lse", &p.b_lse, span_of(1, 2), false),
            floats_pointer(
                "out", [this] { return p.out; }, [this](void* s) { p.out = s; }, KDT_F32, span_of(kDim, 3), true),
            pointer("lse", &p.lse, span_of(1, 3), true),
            pointer("num_live", &p.num_live, 1, false, false)};
  }
  std::vector<Stride> strides() override {
    return {{"a_row_stride", &p.a_row_stride, kDim},      {"a_head_stride", &p.a_head_stride, kDim},
            {"b_row_stride", &p.b_row_stride, kDim},      {"b_head_stride", &p.b_head_stride, kDim},
            {"out_row_stride", &p.out_row_stride, kDim},  {"out_head_stride", &p.out_head_stride, kDim},
            {"a_lse_row_stride", &p.a_lse_row_stride, 1}, {"a_lse_head_stride", &p.a_lse_head_stride, 1},
            {"b_lse_row_stride", &p.b_lse_row_stride, 1}, {"b_lse_head_stride", &p.b_lse_head_stride, 1},
            {"lse_row_stride", &p.lse_row_stride, 1},     {"lse_head_stride", &p.lse_head_stride, 1}};
  }
  std::vector<Dimension> dimensions() override {
    return {{"num_rows", &p.num_rows, 0, INT32_MAX},
            {"num_heads", &p.num_heads, 1, INT32_MAX},
            {"v_dim", &p.v_dim, 1, INT32_MAX}};
  }
  std::vector<const GuardedBytes*> memory() const override {
    return {&a, &b, &a_lse, &b_lse, &out, &lse, &num_live};
  }
};

using Calls = testing::Types<TreeBuildCall, TreeFromParentsCall, TreeFromVisibilityCall, TreeAcceptCall,
                             KvCompactCall, KvCompactToCall, TopkLogprobsCall, TopkLogprobsRawCall, TopkMergeCall,
                             ArgmaxCall, SampleCall, VerifyAttnCall, VerifyAttnTreelessCall, MergeAttnStatesCall>;
struct CallNames {
  template <class T>
  static std::string GetName(int) {
    return T::kName;
  }
};

// Runs calls in a workspace that is as large as they ask for, or (those that are refused) as any call before asked.
class CallTest : public testing::Test {
 protected:
  int32_t run(Call& call) { return run(call, call.params()); }
  int32_t run(Call& call, const void* params) {
    size_t size = 0;
    if (call.query(context_, params, &size) == KDT_OK && size > workspace_->size()) {
      workspace_ = std::make_unique<Guarded<uint8_t>>(Guarded<uint8_t>::Dims{static_cast<int64_t>(size)});
    }
    return run_operation(*workspace_, [&](void* stream) {
      return call.run(context_, params, workspace_->data(), workspace_->size(), stream);
    });
  }

  TestContext context_;
  std::unique_ptr<Guarded<uint8_t>> workspace_ =
      std::make_unique<Guarded<uint8_t>>(Guarded<uint8_t>::Dims{1 << 12});
};

}  // namespace kdt_test::calls
