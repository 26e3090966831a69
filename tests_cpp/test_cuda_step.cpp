// One decode step of a batch of eight (top-k, tree, attention, the target's tokens, acceptance, compaction)
// captured once in a CUDA graph and replayed with other numbers in device memory: logits, cache, lengths, budgets,
// live requests. After each replay every stage is compared with the CPU backend's, which is fed with what CUDA's
// stage before it gave.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "accept.hpp"
#include "attention.hpp"
#include "backend.hpp"
#include "call.hpp"
#include "guarded.hpp"
#include "kdtree/kdtree.h"
#include "kernels/philox.hpp"
#include "rows.hpp"
#include "tree_buffers.hpp"

namespace {

using namespace kdt_test;

constexpr int32_t kB = 8, kD = 7, kK = 16, kN = 33, kVocabulary = 2003, kHeads = 4, kPageSize = 16, kColumns = 16,
                  kPages = kB * kColumns + 3, kLongestPrefix = 200;
constexpr float kScale = 0.05f;
constexpr uint64_t kSeed = 0x0123456789abcdef;  // a scalar of the call, so the graph has it for good
constexpr size_t kRowBytes = kQk * 2;

// What a step is given. Dead requests have garbage.
struct Inputs {
  Bytes draft_logits, target_logits, q, cache;  // bfloat16
  Ints table, root_tokens, prefix_lens, budgets, max_depths, max_tokens, stop_tokens, num_live;
  Draws draws;

  DraftRows draft_rows(const TopK& best) const {
    return {kB,          kD,          kK,      kVocabulary, best.log_probs, best.token_ids,
            root_tokens, prefix_lens, budgets, max_depths,  num_live};
  }
  Logits draft() const { return {kB * kD, kVocabulary, KDT_BF16, draft_logits, 0, num_live, kD}; }
  Logits target() const { return {kB * kN, kVocabulary, KDT_BF16, target_logits, 0, num_live, kN}; }
};

class Generator {
 public:
  Generator() {
    std::normal_distribution<float> normal;
    Floats values(size_t{1} << 22);
    for (float& v : values) v = normal(random_);
    pool_ = encoded(values, KDT_BF16);
  }

  Inputs next() {
    Inputs in;
    in.num_live = {below(kB + 1)};
    const int32_t live = in.num_live[0];
    in.draft_logits = numbers(size_t{kB} * kD * kVocabulary);
    in.target_logits = numbers(size_t{kB} * kN * kVocabulary);
    in.q = numbers(size_t{kB} * kN * kHeads * kQk);
    in.table.resize(kPages);
    std::iota(in.table.begin(), in.table.end(), 0);
    std::shuffle(in.table.begin(), in.table.end(), random_);
    in.table.resize(size_t{kB} * kColumns);
    in.cache.assign(size_t{kPages} * kPageSize * kRowBytes, 0xff);  // NaN but where a request has rows
    in.draws.seed = kSeed;
    for (int32_t b = 0; b < kB; ++b) {
      in.root_tokens.push_back(below(kVocabulary));
      in.prefix_lens.push_back(below(30) == 0 ? -5 : below(kLongestPrefix + 1));
      in.budgets.push_back(below(3) == 0 ? below(kN + 2) - 1 : kN - 1);
      in.max_depths.push_back(below(3) == 0 ? below(kD + 3) - 1 : kD);
      in.max_tokens.push_back(below(3) == 0 ? below(6) : 40);
      const int64_t request_id = static_cast<int64_t>((uint64_t{random_()} << 32) + random_());
      for (int32_t slot = 0; slot < kN; ++slot) {
        in.draws.temperatures.push_back(0.5f * static_cast<float>(below(3)));
        in.draws.positions.push_back(std::max(in.prefix_lens.back(), 0) + 1 + below(kD));
        in.draws.request_ids.push_back(request_id);
      }
      // A token that stands out in each row, more or less: deep trees and wide ones.
      const int32_t sharpness = 4 + below(9);
      for (int32_t d = 0; d < kD; ++d) {
        set(&in.draft_logits, b * kD + d, below(kVocabulary), static_cast<float>(sharpness + below(3)));
      }
      if (below(20) == 0) set(&in.draft_logits, b * kD + below(kD), below(kVocabulary), NAN);
      if (b < live) fill_cache(&in, b);
    }
    for (int32_t i = 0; i < 3; ++i) in.stop_tokens.push_back(below(kVocabulary));
    agree(&in);
    for (int32_t b = live; b < kB; ++b) bury(&in, b);
    return in;
  }

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }

  Bytes numbers(size_t count) {
    const size_t first = random_() % (pool_.size() / 2 - count) * 2;
    return Bytes(pool_.begin() + static_cast<ptrdiff_t>(first),
                 pool_.begin() + static_cast<ptrdiff_t>(first + count * 2));
  }

  static void set(Bytes* logits, int32_t row, int32_t id, float value) {
    const Bytes bits = encoded({value}, KDT_BF16);
    std::copy(bits.begin(), bits.end(), logits->begin() + (ptrdiff_t{row} * kVocabulary + id) * 2);
  }

  // The rows of the prefix and of every slot.
  void fill_cache(Inputs* in, int32_t b) {
    const int32_t rows = std::max(in->prefix_lens[static_cast<size_t>(b)], 0) + kN;
    const Bytes values = numbers(static_cast<size_t>(rows) * kQk);
    for (int32_t row = 0; row < rows; ++row) {
      const int32_t page = in->table[static_cast<size_t>(b * kColumns + row / kPageSize)];
      std::copy_n(values.begin() + row * static_cast<ptrdiff_t>(kRowBytes), kRowBytes,
                  in->cache.begin() + (page * kPageSize + row % kPageSize) * static_cast<ptrdiff_t>(kRowBytes));
    }
  }

  // Makes the target agree with a path of the tree that the CPU builds, often one of the deepest.
  void agree(Inputs* in) {
    const OnCpu on_cpu;
    const TestContext context(0);
    TreeBuffers out(kB, kN);
    build(context, in->draft_rows(topk(context, in->draft(), kK)), &out);
    const TreeValues tree = out.values();
    for (int32_t b = 0; b < in->num_live[0]; ++b) {
      const auto at = [&](int32_t slot) { return static_cast<size_t>(b * kN + slot); };
      const int32_t count = tree.node_count[static_cast<size_t>(b)];
      int32_t slot = below(count);
      for (int32_t other = 0; other < count && b % 2 == 0; ++other) {
        if (tree.depths[at(other)] > tree.depths[at(slot)]) slot = other;
      }
      if (below(6) == 0) in->stop_tokens[static_cast<size_t>(below(3))] = tree.tokens[at(slot)];
      if (below(20) == 0) set(&in->target_logits, b * kN + slot, below(kVocabulary), NAN);
      for (; slot > 0; slot = tree.parents[at(slot)]) {
        set(&in->target_logits, b * kN + tree.parents[at(slot)], tree.tokens[at(slot)], 30.0f);
      }
    }
  }

  // Everything of a dead request becomes garbage.
  static void bury(Inputs* in, int32_t b) {
    const auto fill = [&](Bytes* bytes) {
      const ptrdiff_t size = static_cast<ptrdiff_t>(bytes->size()) / kB;
      std::fill_n(bytes->begin() + b * size, size, uint8_t{0xff});
    };
    fill(&in->draft_logits);
    fill(&in->target_logits);
    fill(&in->q);
    const size_t i = static_cast<size_t>(b);
    std::fill_n(in->table.begin() + b * kColumns, kColumns, INT32_MAX);
    in->root_tokens[i] = -77;
    in->prefix_lens[i] = in->budgets[i] = in->max_tokens[i] = INT32_MIN;
    in->max_depths[i] = INT32_MAX;
    std::fill_n(in->draws.temperatures.begin() + b * kN, kN, NAN);
    std::fill_n(in->draws.positions.begin() + b * kN, kN, INT32_MIN);
  }

  std::mt19937 random_{20261201};
  Bytes pool_;
};

// The arrays of a step in device memory, and its calls. All stages share one workspace, as they would in use.
class Step {
 public:
  explicit Step(bool sampled) : sampled_(sampled) {
    topk_.num_rows = kB * kD;
    topk_.vocab_size = kVocabulary;
    topk_.num_candidates = kK;
    topk_.logits_dtype = KDT_BF16;
    topk_.logits = draft_logits_.data();
    topk_.log_probs = log_probs_.data();
    topk_.token_ids = token_ids_.data();
    topk_.num_live = num_live_.data();
    topk_.rows_per_request = kD;
    topk_.status = topk_status_.data();

    build_.depth = kD;
    build_.num_candidates = kK;
    build_.budget = kN - 1;
    build_.vocab_size = kVocabulary;
    build_.log_probs = log_probs_.data();
    build_.token_ids = token_ids_.data();
    build_.root_tokens = root_tokens_.data();
    build_.prefix_lens = prefix_lens_.data();
    build_.budgets = budgets_.data();
    build_.max_depths = max_depths_.data();
    build_.num_live = num_live_.data();
    build_.tree = &tree_.tree;

    pages_.data = cache_.data();
    pages_.num_layers = 1;
    pages_.num_pages = kPages;
    pages_.page_size = kPageSize;
    pages_.row_width = static_cast<int32_t>(kQk);
    pages_.element_size = 2;
    pages_.block_table = table_.data();
    pages_.max_pages = kColumns;

    attend_.batch_size = kB;
    attend_.num_queries = kN;
    attend_.num_heads = kHeads;
    attend_.qk_dim = static_cast<int32_t>(kQk);
    attend_.v_dim = static_cast<int32_t>(kV);
    attend_.q_dtype = attend_.kv_dtype = attend_.out_dtype = KDT_BF16;
    attend_.scale = kScale;
    attend_.q = q_.data();
    attend_.cache = &pages_;
    attend_.prefix_lens = prefix_lens_.data();
    attend_.tree = &tree_.tree;
    attend_.num_live = num_live_.data();
    attend_.out = out_.data();
    attend_.lse = lse_.data();
    attend_.status = attend_status_.data();

    const auto set_target = [this](auto* p) {
      p->num_rows = kB * kN;
      p->vocab_size = kVocabulary;
      p->logits_dtype = KDT_BF16;
      p->logits = target_logits_.data();
      p->tokens = targets_.data();
      p->num_live = num_live_.data();
      p->rows_per_request = kN;
      p->status = target_status_.data();
    };
    set_target(&argmax_);
    set_target(&sample_);
    sample_.seed = kSeed;
    sample_.temperatures = temperatures_.data();
    sample_.positions = positions_.data();
    sample_.request_ids = request_ids_.data();

    accept_.tree = &tree_.tree;
    accept_.target_tokens = targets_.data();
    accept_.max_tokens = max_tokens_.data();
    accept_.stop_tokens = stop_tokens_.data();
    accept_.num_stop_tokens = 3;
    accept_.max_len = kN;
    accept_.num_live = num_live_.data();
    accept_.tokens = tokens_.data();
    accept_.accept_index = accept_index_.data();
    accept_.token_count = token_count_.data();
    accept_.accept_len = accept_len_.data();
    accept_.next_root = next_root_.data();
    accept_.finished = finished_.data();
    accept_.status = accept_status_.data();

    compact_.batch_size = kB;
    compact_.num_slots = kN;
    compact_.max_len = kN;
    compact_.cache = &pages_;
    compact_.accept_index = accept_index_.data();
    compact_.accept_len = accept_len_.data();
    compact_.prefix_lens = prefix_lens_.data();
    compact_.num_live = num_live_.data();
    compact_.status = compact_status_.data();

    add(kdt_topk_logprobs_workspace_size, kdt_topk_logprobs, topk_);
    add(kdt_tree_build_workspace_size, kdt_tree_build, build_);
    add(kdt_verify_attn_workspace_size, kdt_verify_attn, attend_);
    if (sampled) {
      add(kdt_sample_workspace_size, kdt_sample, sample_);
    } else {
      add(kdt_argmax_workspace_size, kdt_argmax, argmax_);
    }
    add(kdt_tree_accept_workspace_size, kdt_tree_accept, accept_);
    add(kdt_kv_compact_workspace_size, kdt_kv_compact, compact_);
    workspace_ = std::make_unique<Guarded<uint8_t>>(Guarded<uint8_t>::Dims{static_cast<int64_t>(largest_) + 3});
  }

  // Puts all stages on a stream.
  int32_t run(void* stream) {
    for (const auto& stage : stages_) {
      if (const int32_t status = stage(stream); status != KDT_OK) return status;
    }
    return KDT_OK;
  }

  // The inputs, and outputs that nobody has written.
  void set(const Inputs& in) {
    for (GuardedBytes* output : outputs()) output->reset();
    draft_logits_.fill(in.draft_logits);
    target_logits_.fill(in.target_logits);
    q_.fill(in.q);
    cache_.fill(in.cache);
    table_.fill(in.table);
    root_tokens_.fill(in.root_tokens);
    prefix_lens_.fill(in.prefix_lens);
    budgets_.fill(in.budgets);
    max_depths_.fill(in.max_depths);
    max_tokens_.fill(in.max_tokens);
    stop_tokens_.fill(in.stop_tokens);
    num_live_.fill(in.num_live);
    temperatures_.fill(in.draws.temperatures);
    positions_.fill(in.draws.positions);
    request_ids_.fill(in.draws.request_ids);
  }

  // Compares every stage.
  void expect(const Inputs& in) const {
    for (const GuardedBytes* input : std::initializer_list<const GuardedBytes*>{
             &draft_logits_, &target_logits_, &q_, &table_, &root_tokens_, &prefix_lens_, &budgets_, &max_depths_,
             &max_tokens_, &stop_tokens_, &num_live_, &temperatures_, &positions_, &request_ids_}) {
      EXPECT_TRUE(input->unchanged()) << "an input was written";
    }
    for (const GuardedBytes* output : outputs()) EXPECT_TRUE(output->guards_intact()) << "written beside an output";
    EXPECT_TRUE(cache_.guards_intact() && workspace_->guards_intact());

    const OnCpu on_cpu;
    const TestContext context(0);
    const TopK best = {log_probs_.values(), token_ids_.values(), {}, topk_status_.values()};
    const TopK expected_best = topk(context, in.draft(), kK);
    EXPECT_TRUE(same_bits(best.token_ids, expected_best.token_ids)) << "topk.token_ids";
    EXPECT_TRUE(same_bits(best.status, expected_best.status)) << "topk.status";
    EXPECT_TRUE(log_probs_near(best.log_probs, expected_best.log_probs, 20.0)) << "topk.log_probs";

    TreeBuffers expected_tree(kB, kN);
    build(context, in.draft_rows(best), &expected_tree);
    tree_.expect(expected_tree.values());

    // In float32 the CPU's output is as good as exact.
    const TreeValues tree = tree_.values();
    const Attended attended = attend(context, {.batch_size = kB,
                                               .num_queries = kN,
                                               .num_heads = kHeads,
                                               .dtype = KDT_BF16,
                                               .out_dtype = KDT_F32,
                                               .scale = kScale,
                                               .q = in.q,
                                               .cache = in.cache,
                                               .num_pages = kPages,
                                               .page_size = kPageSize,
                                               .table = in.table,
                                               .prefix_lens = in.prefix_lens,
                                               .num_live = in.num_live,
                                               .num_slots = kN,
                                               .visibility = tree.visibility,
                                               .node_count = tree.node_count});
    EXPECT_TRUE(
        outputs_near(decoded(out_.values(), KDT_BF16), decoded(attended.out, KDT_F32), tolerance_of(KDT_BF16)))
        << "out";
    EXPECT_TRUE(lse_near(lse_.values(), attended.lse)) << "lse";
    EXPECT_TRUE(same_bits(attend_status_.values(), attended.status)) << "status of verify_attn";

    const Ints targets = targets_.values();
    const Chosen chosen = sampled_ ? sample(context, in.target(), in.draws) : argmax(context, in.target());
    EXPECT_TRUE(same_bits(target_status_.values(), chosen.status)) << "status of the target's tokens";
    for (size_t row = 0; row < targets.size(); ++row) {
      if (targets[row] != chosen.tokens[row]) expect_tied(in, row, targets[row], chosen.tokens[row]);
    }

    const Accepted accepted = {tokens_.values(),       token_count_.values(), accept_index_.values(),
                               accept_len_.values(),   next_root_.values(),   finished_.values(),
                               accept_status_.values()};
    expect_accepted(accepted,
                    accept(context, {kB, kN, tree.tokens, tree.first_child, tree.next_sibling, tree.node_count,
                                     targets, in.max_tokens, in.stop_tokens, in.num_live, kN}));
    expect_compacted(context, in, accepted);
  }

  Ints accept_lens() const { return accept_len_.values(); }

 private:
  template <class Params>
  void add(int32_t (*query)(const kdt_context*, const Params*, size_t*),
           int32_t (*run)(const kdt_context*, const Params*, void*, size_t, void*), const Params& p) {
    size_t size = 0;
    EXPECT_EQ(query(context_, &p, &size), KDT_OK) << kdt_last_error();
    largest_ = std::max(largest_, size);
    stages_.push_back(
        [this, run, &p](void* stream) { return run(context_, &p, workspace_->data() + 3, largest_, stream); });
  }

  std::vector<GuardedBytes*> outputs() {
    return {&log_probs_,
            &token_ids_,
            &topk_status_,
            &tree_.tokens,
            &tree_.parents,
            &tree_.first_child,
            &tree_.next_sibling,
            &tree_.depths,
            &tree_.positions,
            &tree_.log_probs,
            &tree_.visibility,
            &tree_.node_count,
            &tree_.status,
            &out_,
            &lse_,
            &attend_status_,
            &targets_,
            &target_status_,
            &tokens_,
            &accept_index_,
            &token_count_,
            &accept_len_,
            &next_root_,
            &finished_,
            &accept_status_,
            &compact_status_};
  }
  std::vector<const GuardedBytes*> outputs() const {
    const auto all = const_cast<Step*>(this)->outputs();
    return {all.begin(), all.end()};
  }

  // Two tokens that sample may choose between: both scores are the best within its tolerance.
  void expect_tied(const Inputs& in, size_t row, int32_t got, int32_t expected) const {
    const double temperature = static_cast<double>(in.draws.temperatures[row]);
    ASSERT_TRUE(sampled_ && got >= 0 && expected >= 0 && temperature > 0)
        << "token " << got << " of row " << row << ", expected " << expected;
    const Bytes bytes(in.target_logits.begin() + static_cast<ptrdiff_t>(row) * kVocabulary * 2,
                      in.target_logits.begin() + static_cast<ptrdiff_t>(row + 1) * kVocabulary * 2);
    const Floats logits = decoded(bytes, KDT_BF16);
    const auto score = [&](int32_t id) {
      const uint64_t request = static_cast<uint64_t>(in.draws.request_ids[row]);
      const kdt::PhiloxBlock noise =
          kdt::philox4x32({{static_cast<uint32_t>(id / 4), static_cast<uint32_t>(in.draws.positions[row]),
                            static_cast<uint32_t>(request), static_cast<uint32_t>(request >> 32)}},
                          in.draws.seed);
      const double uniform = (static_cast<double>(noise.words[id % 4]) + 0.5) * 0x1p-32;
      return static_cast<double>(logits[static_cast<size_t>(id)]) / temperature - std::log(-std::log(uniform));
    };
    EXPECT_NEAR(score(got), score(expected), 1e-5 * std::max(1.0, largest_magnitude(logits) / temperature))
        << "row " << row;
  }

  void expect_compacted(const kdt_context* context, const Inputs& in, const Accepted& accepted) const {
    auto rows = guarded_bytes({kPages, kPageSize, kQk}, in.cache, 2);
    Guarded<int32_t> table({kB, kColumns}, in.table), prefix_lens({kB}, in.prefix_lens);
    Guarded<int32_t> accept_index({kB, kN}, accepted.accept_index), accept_len({kB}, accepted.accept_len);
    Guarded<int32_t> num_live({1}, in.num_live), status({kB});
    kdt_kv_cache pages = pages_;
    pages.data = rows.data();
    pages.block_table = table.data();
    kdt_kv_compact_params p = compact_;
    p.cache = &pages;
    p.accept_index = accept_index.data();
    p.accept_len = accept_len.data();
    p.prefix_lens = prefix_lens.data();
    p.num_live = num_live.data();
    p.status = status.data();
    call(kdt_kv_compact_workspace_size, kdt_kv_compact, context, p, {}, {&rows, &status});
    EXPECT_TRUE(same_bits(cache_.values(), rows.values())) << "cache";
    EXPECT_TRUE(same_bits(compact_status_.values(), status.values())) << "status of kv_compact";
  }

  bool sampled_;
  TestContext context_;
  Guarded<uint8_t> draft_logits_{{kB * kD, kVocabulary * 2}}, target_logits_{{kB * kN, kVocabulary * 2}};
  Guarded<uint8_t> q_{{kB, kN, kHeads, kQk * 2}}, cache_{{kPages, kPageSize, kQk * 2}};
  Guarded<int32_t> table_{{kB, kColumns}}, root_tokens_{{kB}}, prefix_lens_{{kB}}, budgets_{{kB}};
  Guarded<int32_t> max_depths_{{kB}}, max_tokens_{{kB}}, stop_tokens_{{3}}, num_live_{{1}};
  Guarded<float> temperatures_{{kB, kN}};
  Guarded<int32_t> positions_{{kB, kN}};
  Guarded<int64_t> request_ids_{{kB, kN}};

  Guarded<float> log_probs_{{kB, kD, kK}};
  Guarded<int32_t> token_ids_{{kB, kD, kK}}, topk_status_{{kB, kD}};
  TreeBuffers tree_{kB, kN};
  Guarded<uint8_t> out_{{kB, kN, kHeads, kV * 2}};
  Guarded<float> lse_{{kB, kN, kHeads}};
  Guarded<int32_t> attend_status_{{kB}}, targets_{{kB, kN}}, target_status_{{kB, kN}};
  Guarded<int32_t> tokens_{{kB, kN}}, accept_index_{{kB, kN}}, token_count_{{kB}}, accept_len_{{kB}};
  Guarded<int32_t> next_root_{{kB}}, finished_{{kB}}, accept_status_{{kB}}, compact_status_{{kB}};

  kdt_topk_logprobs_params topk_ = sized<kdt_topk_logprobs_params>();
  kdt_tree_build_params build_ = sized<kdt_tree_build_params>();
  kdt_kv_cache pages_ = sized<kdt_kv_cache>();
  kdt_verify_attn_params attend_ = sized<kdt_verify_attn_params>();
  kdt_argmax_params argmax_ = sized<kdt_argmax_params>();
  kdt_sample_params sample_ = sized<kdt_sample_params>();
  kdt_tree_accept_params accept_ = sized<kdt_tree_accept_params>();
  kdt_kv_compact_params compact_ = sized<kdt_kv_compact_params>();
  std::vector<std::function<int32_t(void*)>> stages_;
  size_t largest_ = 0;  // of the workspaces asked for
  std::unique_ptr<Guarded<uint8_t>> workspace_;
};

void expect_replays(bool sampled, int32_t replays) {
  Generator generator;
  Step step(sampled);
  const CudaStream stream;
  step.set(generator.next());
  ASSERT_EQ(step.run(stream), KDT_OK) << kdt_last_error();  // once eagerly, as servers warm up
  cuda::synchronize(stream);
  const CudaGraph graph(stream, [&](void* captured) { return step.run(captured); });
  std::map<int32_t, int32_t> lengths;
  for (int32_t i = 0; i < replays; ++i) {
    const Inputs in = generator.next();
    step.set(in);
    graph.replay(stream);
    step.expect(in);
    ASSERT_FALSE(testing::Test::HasFailure()) << "replay " << i << ", " << in.num_live[0] << " live";
    const Ints accept_lens = step.accept_lens();
    for (int32_t b = 0; b < in.num_live[0]; ++b) ++lengths[accept_lens[static_cast<size_t>(b)]];
  }
  std::cout << replays << " replays; paths of each length:";
  for (int32_t length = 0; length <= kD + 1; ++length) {
    std::cout << " " << lengths[length];
    EXPECT_GT(lengths[length], 0) << "length " << length;
  }
  std::cout << "\n";
}

TEST(CudaStep, CapturedOnceIsRightInEachOfAThousandReplays) { expect_replays(false, 1000); }

TEST(CudaStep, WithSamplingToo) { expect_replays(true, 250); }

}  // namespace
