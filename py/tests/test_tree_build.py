"""tree_build: CPU and reference against each other, against brute force, and on worked cases."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import numpy as np
import pytest
from conftest import TEST_DATA, TREE_FIELDS, assert_same_tree, random_rows, vector

import kdtree_engine as kdt
from kdtree_engine import StatusFlag
from kdtree_engine._trace import load_trace
from kdtree_engine.cli._common import bundled

PEERS = json.loads((TEST_DATA / "peer_vectors.json").read_text())
DIGESTS = json.loads((TEST_DATA / "trace_digests.json").read_text())["budgets"]


def build(module: Any, rows: Any, budget: int, ids: Any = None, **options: Any) -> kdt.Tree:
    """A tree for one request; ids default to the ranks."""
    log_probs = np.array(rows, np.float32)[None]
    if ids is None:
        ids = np.broadcast_to(np.arange(log_probs.shape[-1]), log_probs.shape)
    token_ids = np.ascontiguousarray(np.array(ids, np.int32).reshape(log_probs.shape))
    return module.tree_build(log_probs, token_ids, vector(99), vector(10), budget, **options)


def rank_tuples(tree: kdt.Tree, b: int = 0) -> list[tuple[int, ...]]:
    """The tuples of a tree whose token ids are its ranks."""
    tuples: list[tuple[int, ...]] = [()]
    for slot in range(1, tree.node_count[b]):
        tuples.append((*tuples[tree.parents[b, slot]], int(tree.tokens[b, slot])))
    return tuples[1:]


@pytest.mark.parametrize("case", PEERS["build_order"]["cases"], ids=lambda case: f"budget{case['budget']}")
def test_worked_cases(backend: Any, case: dict[str, Any]) -> None:
    tree = build(backend, case["rows"], case["budget"])
    assert rank_tuples(tree) == [tuple(t) for t in case["order"]]


def tree_digest(tree: kdt.Tree) -> str:
    """As shared with us: node_count, then tokens, parents, depths of the nodes as i32, their log_probs as f32."""
    digest = hashlib.sha256()
    for b, count in enumerate(tree.node_count):
        digest.update(np.int32(count).tobytes())
        for field in ("tokens", "parents", "depths", "log_probs"):
            digest.update(getattr(tree, field)[b, 1:count].tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("budget", [int(b) for b in DIGESTS])
def test_digests_of_the_real_trace(backend: Any, budget: int) -> None:
    trace = load_trace(bundled("trace_code"))
    lens = np.zeros(len(trace.root_tokens), np.int32)
    tree = backend.tree_build(trace.log_probs, trace.token_ids, trace.root_tokens, lens, budget)
    assert tree_digest(tree) == DIGESTS[str(budget)]


def test_a_smaller_tree_is_the_start_of_a_larger_one() -> None:
    trace = load_trace(bundled("trace_code"))
    lens = np.zeros(len(trace.root_tokens), np.int32)
    arguments = (trace.log_probs, trace.token_ids, trace.root_tokens, lens)
    large, small = kdt.tree_build(*arguments, 256), kdt.tree_build(*arguments, 40)
    for field in ("tokens", "parents", "depths", "positions", "log_probs"):
        assert np.array_equal(getattr(large, field)[:, :41], getattr(small, field)), field


def brute_force(rows: Any, ids: Any, budget: int, max_depth: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Every rank tuple of usable candidates, sorted by the rule. Shares no code with the library."""
    usable = []
    for row, row_ids in zip(rows[:max_depth], ids[:max_depth], strict=True):
        good = []
        for rank, (value, token) in enumerate(zip(row, row_ids, strict=True)):
            if np.isnan(value) or np.isinf(value) or value > 0 or not 0 <= token < vocab_size:
                break
            if rank > 0 and value > row[rank - 1]:
                break
            good.append(rank)
        if not good:
            break
        usable.append(good)
    scored = []
    for d in range(1, len(usable) + 1):
        for ranks in itertools.product(*usable[:d]):
            score = 0.0
            for row, rank in zip(rows, ranks, strict=False):
                score += float(row[rank])
            scored.append((-score, ranks))
    scored.sort()
    return [ranks for _, ranks in scored[:budget]]


def test_brute_force(backend: Any) -> None:
    rng = np.random.default_rng(1)
    for case in range(1500):
        depth, candidates = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        kind = ["smooth", "ties", "zeros", "bad"][case % 4]
        log_probs, ids = random_rows(rng, 1, depth, candidates, kind)
        if kind != "bad":
            ids = np.ascontiguousarray(np.broadcast_to(np.arange(candidates, dtype=np.int32), ids.shape))
        budget, max_depth = int(rng.integers(0, 60)), int(rng.integers(0, depth + 1))
        tree = backend.tree_build(
            log_probs, ids, vector(7), vector(3), budget, max_depths=vector(max_depth), vocab_size=50
        )
        expected = brute_force(log_probs[0], ids[0], budget, max_depth, 50)
        got: list[tuple[int, ...]] = [()]
        for slot in range(1, tree.node_count[0]):  # recover ranks: siblings come in rank order
            parent = tree.parents[0, slot]
            rank = sum(tree.parents[0, s] == parent for s in range(1, slot))
            assert tree.tokens[0, slot] == ids[0, len(got[parent]), rank]
            got.append((*got[parent], rank))
        assert got[1:] == expected, (case, log_probs, ids)


def test_ten_thousand_random_trees() -> None:
    """CPU = reference in every field, over every kind of row, ragged budgets and depths, at every size."""
    rng = np.random.default_rng(2)
    shapes = [(1, 1), (1, 8), (15, 1), (15, 64), (7, 16), (64, 3), (3, 200), (5, 5), (2, 1024), (0, 4), (4, 0)]
    trees = large = nodes = flagged = 0
    while trees < 10_000:
        depth, candidates = shapes[int(rng.integers(len(shapes)))]
        budget = int(rng.choice([0, 1, 2, 15, 63, 64, 65, 1024], p=[0.05, 0.05, 0.1, 0.15, 0.15, 0.2, 0.15, 0.15]))
        batch_size = 8
        kind = str(rng.choice(["smooth", "ties", "zeros", "bad", "bad"]))
        log_probs, ids = random_rows(rng, batch_size, depth, candidates, kind)
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["budgets"] = rng.integers(-2, budget + 3, batch_size).astype(np.int32)
        if rng.random() < 0.5:
            options["max_depths"] = rng.integers(-2, depth + 3, batch_size).astype(np.int32)
        if rng.random() < 0.5:
            options["vocab_size"] = int(rng.choice([50, 100, 49, 30]))
        if rng.random() < 0.2:
            options["num_live"] = int(rng.integers(-1, batch_size + 2))
        lens = rng.choice(np.array([-5, 0, 1000, 2**31 - 1, 2**31 - 66, -(2**31)], np.int32), batch_size)
        roots = rng.integers(-1, 50, batch_size).astype(np.int32)
        arguments = (log_probs, ids, roots, lens, budget)
        expected = kdt.reference.tree_build(*arguments, **options)
        got = kdt.tree_build(*arguments, **options)
        assert_same_tree(got, expected, f"after {trees} trees, {depth=} {candidates=} {budget=} {kind=} {options=}")
        trees += batch_size
        large += batch_size if budget == 1024 else 0
        nodes += int(got.node_count.sum())
        flagged += int((got.status & StatusFlag.ROW_TRUNCATED != 0).sum())
    assert large >= 500, large
    assert nodes >= 300_000, nodes
    assert flagged >= 1000, flagged


def test_layout_invariants() -> None:
    """What the layout promises, checked on its own terms: links, masks, positions, padding."""
    rng = np.random.default_rng(3)
    log_probs, ids = random_rows(rng, 16, 12, 20, "ties")
    lens = rng.integers(0, 1000, 16).astype(np.int32)
    tree = kdt.tree_build(
        log_probs, ids, vector(*range(16)), lens, 100, budgets=rng.integers(0, 101, 16, dtype=np.int32)
    )
    for b in range(16):
        count = tree.node_count[b]
        for slot in range(count):
            children = [s for s in range(count) if tree.parents[b, s] == slot]
            linked, child = [], tree.first_child[b, slot]
            while child != -1:
                linked.append(child)
                child = tree.next_sibling[b, child]
            assert linked == children
            ancestors, at = set(), slot
            while at != -1:
                ancestors.add(int(at))
                at = tree.parents[b, at]
            bits = {j for j in range(101) if int(tree.visibility[b, slot, j // 64]) >> (j % 64) & 1}
            assert bits == ancestors
            assert tree.depths[b, slot] == len(ancestors) - 1
            assert tree.positions[b, slot] == lens[b] + tree.depths[b, slot]
        empty = kdt.Tree.empty(1, 101)
        for field in TREE_FIELDS[:-2]:
            assert np.array_equal(getattr(tree, field)[b, count:], getattr(empty, field)[0, count:]), field
        assert np.all(np.diff(tree.log_probs[b, 1:count]) <= 0)


@pytest.mark.parametrize(
    ("row", "ids", "length", "flag"),
    [
        ([-1, -2, -3], [1, 2, 3], 3, 0),
        ([np.nan, -2, -3], [1, 2, 3], 0, StatusFlag.ROW_TRUNCATED),
        ([-1, np.inf, -3], [1, 2, 3], 1, StatusFlag.ROW_TRUNCATED),
        ([-1, -np.inf, -3], [1, -1, 3], 1, StatusFlag.ROW_TRUNCATED),
        ([-1, -2, -np.inf], [1, 2, 3], 2, StatusFlag.ROW_TRUNCATED),
        ([-1, -2, -np.inf], [1, 2, -2], 2, StatusFlag.ROW_TRUNCATED),
        ([0.5, -2, -3], [1, 2, 3], 0, StatusFlag.ROW_TRUNCATED),
        ([-2, -1, -3], [1, 2, 3], 1, StatusFlag.ROW_TRUNCATED),
        ([-1, -2, -3], [1, -1, 3], 1, StatusFlag.ROW_TRUNCATED),
        ([-1, -2, -3], [1, 2, 10], 2, StatusFlag.ROW_TRUNCATED),
        ([-1, -np.inf, -np.inf], [1, -1, -1], 1, 0),
        ([-np.inf, -np.inf, -np.inf], [-1, -1, -1], 0, 0),
        ([-1, -2, -3], [1, 2, -1], 2, StatusFlag.ROW_TRUNCATED),
        ([0.0, -0.0, 0.0], [0, 0, 0], 3, 0),
    ],
)
def test_where_a_row_ends(backend: Any, row: list[float], ids: list[int], length: int, flag: int) -> None:
    tree = build(backend, [row], 8, ids, vocab_size=10)
    assert tree.node_count[0] == 1 + length
    assert tree.status[0] == flag
    assert tree.tokens[0, 1 : 1 + length].tolist() == ids[:length]


def test_a_truncated_row_is_flagged_wherever_it_lies(backend: Any) -> None:
    rows = [[-1.0, -2.0], [np.nan, -2.0], [-1.0, np.nan]]
    assert build(backend, rows, 0).status[0] == StatusFlag.ROW_TRUNCATED  # the builder never got there
    assert build(backend, rows, 8, max_depths=vector(1)).status[0] == 0  # no row of this tree
    assert build(backend, rows, 8).node_count[0] == 3  # the empty row ends the tree at its depth


def test_zero_log_probs_tie_a_child_with_its_parent(backend: Any) -> None:
    assert rank_tuples(build(backend, [[0.0], [0.0], [0.0]], 3)) == [(0,), (0, 0), (0, 0, 0)]
    assert rank_tuples(build(backend, [[-1, -1], [0, 0]], 6)) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_sums_are_float64(backend: Any) -> None:
    """1e8 + 1 and 1e8 + 2 are one float32 but two float64."""
    tree = build(backend, [[-1.0, -2.0], [-1e8, -1e8]], 6)
    assert rank_tuples(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert tree.log_probs[0, 3] == np.float32(-1e8 - 1)


def test_a_sum_below_float32_rounds_to_minus_infinity(backend: Any) -> None:
    low = float(np.finfo(np.float32).min)
    tree = build(backend, [[low], [low]], 2)
    assert tree.node_count[0] == 3
    assert tree.log_probs[0].tolist() == [0.0, low, -np.inf]


def test_a_negative_zero_sum_comes_out_positive(backend: Any) -> None:
    tree = build(backend, [[-0.0]], 1)
    assert not np.signbit(tree.log_probs[0, 1])


def test_token_zero_and_duplicate_ids_are_ordinary(backend: Any) -> None:
    tree = build(backend, [[-1, -1, -2]], 3, [[0, 0, 0]])
    assert tree.tokens[0].tolist() == [99, 0, 0, 0]


def test_clamped_numbers_are_flagged(backend: Any) -> None:
    rows = np.full((6, 2, 2), -1, np.float32)
    ids = np.zeros((6, 2, 2), np.int32)
    top = 2**31 - 1 - 2
    lens = vector(0, -1, top, top + 1, 5, 5)
    tree = backend.tree_build(
        rows, ids, vector(*[0] * 6), lens, 4, budgets=vector(4, 0, 4, 4, 5, -1), max_depths=vector(0, 2, 2, 2, 3, -1)
    )
    assert tree.status.tolist() == [0, 8, 0, 8, 8, 8]
    assert tree.positions[:, 0].tolist() == [0, 0, top, top, 5, 5]
    assert tree.node_count.tolist() == [1, 1, 5, 5, 5, 1]
    assert tree.positions[2, 1:].max() <= 2**31 - 1


@pytest.mark.parametrize("num_live", [-3, 0, 2, 4, 9])
def test_dead_requests_get_padding(backend: Any, num_live: int) -> None:
    rng = np.random.default_rng(4)
    log_probs, ids = random_rows(rng, 4, 3, 4, "smooth")
    log_probs[3] = np.nan
    arguments = (log_probs, ids, vector(1, 2, 3, 4), vector(0, -1, 0, -1), 6)
    whole = backend.tree_build(*arguments)
    tree = backend.tree_build(*arguments, num_live=num_live)
    live = min(max(num_live, 0), 4)
    expected = kdt.Tree.empty(4, 7)
    for field in TREE_FIELDS:
        getattr(expected, field)[:live] = getattr(whole, field)[:live]
    assert_same_tree(tree, expected)


def test_empty_batch_and_empty_rows(backend: Any) -> None:
    tree = backend.tree_build(np.empty((0, 3, 4), np.float32), np.empty((0, 3, 4), np.int32), vector(), vector(), 5)
    assert tree.tokens.shape == (0, 6)
    for depth, candidates in ((0, 4), (3, 0), (0, 0)):
        shape = (2, depth, candidates)
        tree = backend.tree_build(np.empty(shape, np.float32), np.empty(shape, np.int32), vector(5, 6), vector(1, 2), 3)
        assert tree.node_count.tolist() == [1, 1]
        assert tree.tokens[:, 0].tolist() == [5, 6]
        assert tree.status.tolist() == [0, 0]


def test_strided_inputs_and_given_outputs() -> None:
    rng = np.random.default_rng(5)
    log_probs, ids = random_rows(rng, 3, 4, 6, "ties")
    expected = kdt.tree_build(log_probs, ids, [1, 2, 3], [4, 5, 6], 70)
    wide_rows, wide_ids = np.full((3, 6, 9), np.nan, np.float32), np.full((3, 5, 8), -9, np.int32)
    wide_rows[:, :4, :6], wide_ids[:, :4, :6] = log_probs, ids
    big = kdt.Tree.empty(3, 80)
    big.visibility = np.full((3, 75, 4), 77, np.uint64)
    out = kdt.Tree(
        **{
            name: (value[:, :71] if value.ndim == 2 else value[:, :71, :2] if value.ndim == 3 else value)
            for name, value in vars(big).items()
        }
    )
    got = kdt.tree_build(wide_rows[:, :4, :6], wide_ids[:, :4, :6], [1, 2, 3], [4, 5, 6], 70, out=out)
    assert got is out
    assert_same_tree(got, expected)
    assert (big.tokens[:, 71:] == -1).all()
    assert (big.visibility[:, :, 2:] == 77).all()
    assert (big.visibility[:, 71:] == 77).all()


def test_rows_may_lie_in_any_order() -> None:
    """[D, B, K], seen as [B, D, K]."""
    rng = np.random.default_rng(7)
    log_probs, ids = random_rows(rng, 3, 4, 6, "ties")
    expected = kdt.tree_build(log_probs, ids, [1, 2, 3], [4, 5, 6], 20)
    turned = [np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2) for array in (log_probs, ids)]
    assert_same_tree(kdt.tree_build(*turned, [1, 2, 3], [4, 5, 6], 20), expected)


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(6)
    log_probs, ids = random_rows(rng, 300, 15, 16, "ties")
    arguments = (log_probs, ids, np.arange(300, dtype=np.int32), np.zeros(300, np.int32), 64)
    one = kdt.tree_build(*arguments, context=kdt.Context(num_threads=1))
    for threads in (2, 3, 16):
        assert_same_tree(kdt.tree_build(*arguments, context=kdt.Context(num_threads=threads)), one)


def test_workspace_size_never_shrinks() -> None:
    base = {"batch_size": 8, "depth": 8, "num_candidates": 8, "budget": 8}
    limits = {"batch_size": 4096, "depth": 64, "num_candidates": 1024, "budget": 1024}
    for name, limit in limits.items():
        sizes = [
            kdt.tree_build_workspace_size(**{**base, name: size}) for size in range(0, limit + 1, max(1, limit // 64))
        ]
        assert sizes == sorted(sizes), name
