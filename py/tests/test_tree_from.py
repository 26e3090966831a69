"""tree_from_parents and tree_from_visibility: CPU and reference, on good and malformed trees."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from conftest import TEST_DATA, assert_same_tree, random_rows, vector

import kdtree_engine as kdt
from kdtree_engine import StatusFlag

PEERS = json.loads((TEST_DATA / "peer_vectors.json").read_text())


def random_parents(rng: np.random.Generator, count: int) -> Any:
    """Parents of a random tree: bushy, chain-like or anything between."""
    reach = int(rng.choice([1, 2, 5, 1000]))
    return np.array([-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, count))], np.int32)


def mask_of(parents: Any) -> Any:
    """The ancestor closure of parents, by walking up."""
    count = len(parents)
    mask = np.zeros((count, count), bool)
    for slot in range(count):
        at = slot
        while at != -1:
            mask[slot, at] = True
            at = parents[at]
    return mask


def from_both(module: Any, parents: Any, count: int, tokens: Any = None, prefix_len: int = 7) -> list[kdt.Tree]:
    """One request through both functions; slots from count on hold garbage."""
    num_slots = len(parents)
    tokens = np.arange(num_slots, dtype=np.int32)[None] if tokens is None else tokens
    mask = np.ones((1, num_slots, num_slots), bool)
    mask[0, :count, :count] = mask_of(parents[:count])
    return [
        module.tree_from_parents(tokens, parents[None], vector(count), vector(prefix_len)),
        module.tree_from_visibility(mask, tokens, vector(count), vector(prefix_len)),
    ]


def test_peer_layout(backend: Any) -> None:
    case = PEERS["layout"]
    tokens, parents = np.array(case["tokens"], np.int32), np.array(case["parents"], np.int32)
    tree = backend.tree_from_parents(tokens, parents, vector(8, 8), np.array(case["prefix_lens"], np.int32))
    for field in ("tokens", "parents", "positions", "first_child", "next_sibling"):
        assert getattr(tree, field).tolist() == case[field], field
    assert tree.visibility[..., 0].tolist() == case["visibility_bytes"]
    assert tree.log_probs.tolist() == np.zeros((2, 8)).tolist()


def test_peer_visibility(backend: Any) -> None:
    case = PEERS["from_visibility"]
    mask = np.array(case["visibility"], bool)[None]
    tree = backend.tree_from_visibility(mask, vector(0, 1, 2, 3)[None], vector(4), vector(case["prefix_len"]))
    for field in ("parents", "first_child", "next_sibling", "positions"):
        assert getattr(tree, field)[0].tolist() == case[field], field


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 63, 64, 65, 128, 129, 1024, 1025])
def test_chains_across_mask_words(backend: Any, count: int) -> None:
    parents = np.arange(-1, count - 1, dtype=np.int32)
    for tree in from_both(backend, parents, count):
        assert tree.status[0] == 0
        assert tree.depths[0].tolist() == list(range(count))
        bits = np.unpackbits(tree.visibility[0].view(np.uint8), axis=1, bitorder="little")
        assert np.array_equal(bits[:, :count], np.tri(count, dtype=np.uint8))
        assert not bits[:, count:].any()


def test_random_trees_agree_in_every_field() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        num_slots = int(rng.choice([1, 2, 9, 64, 65, 130]))
        count = int(rng.integers(1, num_slots + 1))
        parents = np.full(num_slots, 12345, np.int32)
        parents[:count] = random_parents(rng, count)
        trees = from_both(kdt, parents, count) + from_both(kdt.reference, parents, count)
        assert trees[0].node_count[0] == count
        for tree in trees[1:]:
            assert_same_tree(tree, trees[0])


def test_tree_build_is_reproduced_from_its_parents_and_mask() -> None:
    rng = np.random.default_rng(2)
    log_probs, ids = random_rows(rng, 8, 10, 10, "ties")
    lens = np.arange(8, dtype=np.int32)
    built = kdt.tree_build(log_probs, ids, lens, lens, 70, budgets=np.arange(0, 80, 10, dtype=np.int32))
    bits = np.unpackbits(built.visibility.view(np.uint8).reshape(8, 71, -1), axis=2, bitorder="little")
    mask = np.ascontiguousarray(bits[:, :, :71]).astype(bool)
    for tree in (
        kdt.tree_from_parents(built.tokens, built.parents, built.node_count, lens),
        kdt.tree_from_visibility(mask, built.tokens, built.node_count, lens),
    ):
        tree.log_probs[:] = built.log_probs
        assert_same_tree(tree, kdt.Tree(**{**vars(built), "status": np.where(built.status & 8, 8, 0).astype(np.int32)}))


GOOD = [-1, 0, 0, 1]


@pytest.mark.parametrize(
    ("parents", "count"),
    [
        ([0, 0, 0, 1], 4),  # the root has a parent
        ([-2, 0, 0, 1], 4),
        ([-1, -1, 0, 1], 4),  # a second root
        ([-1, 1, 0, 1], 4),  # its own parent
        ([-1, 2, 1, 1], 4),  # a cycle
        ([-1, 0, 0, 3], 4),
        ([-1, 0, 0, 4], 4),
        ([-1, 0, 0, 2**31 - 1], 4),
        ([-1, 0, 0, -(2**31)], 4),
        (GOOD, 5),
        (GOOD, -1),
        (GOOD, 2**31 - 1),
        (GOOD, -(2**31)),
    ],
)
def test_malformed_parents_leave_the_root(backend: Any, parents: list[int], count: int) -> None:
    tokens = np.array([[5, 6, 7, 8], [5, 6, 7, 8]], np.int32)
    tree = backend.tree_from_parents(tokens, np.array([parents, GOOD], np.int32), vector(count, 4), vector(3, 3))
    root = backend.tree_from_parents(tokens, np.array([GOOD, GOOD], np.int32), vector(1, 4), vector(3, 3))
    root.status[0] = StatusFlag.BAD_TREE
    assert_same_tree(tree, root)  # the neighbour is not disturbed


def test_slots_beyond_node_count_are_ignored(backend: Any) -> None:
    tree = backend.tree_from_parents(vector(5, 6, 7, 8)[None], vector(-1, 0, 99, -99)[None], vector(2), vector(3))
    assert tree.status[0] == 0
    assert tree.node_count[0] == 2
    assert tree.tokens[0].tolist() == [5, 6, -1, -1]


def test_masks_that_are_no_closure_leave_the_root(backend: Any) -> None:
    """Every mask of 3 slots: exactly the closures of trees with parents before children are good."""
    closures = {mask_of(np.array([-1, 0, p])).tobytes() for p in (0, 1)}
    masks = ((np.arange(512)[:, None] >> np.arange(9)) & 1).astype(bool).reshape(512, 3, 3)
    tokens = np.tile(vector(4, 5, 6), (512, 1))
    counts, lens = np.full(512, 3, np.int32), np.zeros(512, np.int32)
    tree = backend.tree_from_visibility(masks, tokens, counts, lens)
    good = [mask.tobytes() in closures for mask in masks]
    assert sum(good) == 2
    assert tree.status.tolist() == [0 if g else StatusFlag.BAD_TREE for g in good]
    assert tree.node_count.tolist() == [3 if g else 1 for g in good]


def test_a_single_wrong_bit_is_found_anywhere() -> None:
    rng = np.random.default_rng(3)
    parents = random_parents(rng, 70)
    mask = mask_of(parents)
    masks = np.repeat(mask[None], 70 * 70, axis=0)
    masks[np.arange(70 * 70), np.repeat(np.arange(70), 70), np.tile(np.arange(70), 70)] ^= True
    tokens = np.zeros((70 * 70, 70), np.int32)
    counts = np.full(70 * 70, 70, np.int32)
    tree = kdt.tree_from_visibility(masks, tokens, counts, np.zeros(70 * 70, np.int32))
    some = rng.choice(70 * 70, 300, replace=False)
    expected = kdt.reference.tree_from_visibility(masks[some], tokens[some], counts[some], np.zeros(300, np.int32))
    assert np.array_equal(tree.status[some], expected.status)
    # A flipped bit may turn one tree into another only where a leaf moves to a parent with one ancestor more or less.
    assert (tree.status == StatusFlag.BAD_TREE).mean() > 0.9


@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1, -(2**31)])
def test_masks_with_a_bad_count(backend: Any, bad: int) -> None:
    tree = backend.tree_from_visibility(mask_of(GOOD)[None], vector(5, 6, 7, 8)[None], vector(bad), vector(0))
    assert (tree.status[0], tree.node_count[0], tree.tokens[0, 0]) == (StatusFlag.BAD_TREE, 1, 5)


def test_dead_and_clamped_requests(backend: Any) -> None:
    top = 2**31 - 1 - 4
    tokens, parents = np.tile(vector(5, 6, 7, 8), (5, 1)), np.tile(np.array(GOOD, np.int32), (5, 1))
    counts, lens = vector(4, 0, 4, 4, 4), vector(top, -1, -1, top + 1, 0)
    mask = np.tile(mask_of(GOOD), (5, 1, 1))
    for tree in (
        backend.tree_from_parents(tokens, parents, counts, lens, num_live=4),
        backend.tree_from_visibility(mask, tokens, counts, lens, num_live=np.array([4], np.int32)),
    ):
        assert tree.status.tolist() == [0, 0, 8, 8, 0]
        assert tree.node_count.tolist() == [4, 0, 4, 4, 0]
        assert tree.positions[:, 1].tolist() == [top + 1, 0, 1, top + 1, 0]
        empty = kdt.Tree.empty(5, 4)
        for b in (1, 4):
            assert tree.tokens[b].tolist() == empty.tokens[b].tolist()
            assert tree.log_probs[b].tolist() == empty.log_probs[b].tolist()
            assert not tree.visibility[b].any()
