"""tree_accept: CPU and reference, on real and hostile trees."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from conftest import TEST_DATA, assert_same_accepted, random_rows, vector

import kdtree_engine as kdt
from kdtree_engine import StatusFlag

PEERS = json.loads((TEST_DATA / "peer_vectors.json").read_text())

#       0
#     1   2       tokens: slot i has 10 + i
#    3 4  5
#    6
PARENTS = vector(-1, 0, 0, 1, 1, 2, 3)


def small_tree(batch_size: int = 1) -> kdt.Tree:
    tokens = np.tile(np.arange(10, 17, dtype=np.int32), (batch_size, 1))
    counts, lens = np.full(batch_size, 7, np.int32), np.zeros(batch_size, np.int32)
    return kdt.tree_from_parents(tokens, np.tile(PARENTS, (batch_size, 1)), counts, lens)


def targets(**after: int) -> Any:
    """Target tokens: `s1=13` is 13 after slot 1; 99 elsewhere."""
    result = np.full((1, 7), 99, np.int32)
    for slot, token in after.items():
        result[0, int(slot[1:])] = token
    return result


def test_peer_walk(backend: Any) -> None:
    case = PEERS["greedy_walk"]
    tree = kdt.Tree.empty(2, 6)
    for field in ("tokens", "first_child", "next_sibling", "parents"):
        getattr(tree, field)[:] = case[field]
    tree.node_count[:] = 6
    got = backend.tree_accept(tree, np.array(case["target_tokens"], np.int32), max_len=4)
    assert got.accept_index.tolist() == case["accept_index"]
    assert got.accept_len.tolist() == case["accept_len"]
    assert [row[:n].tolist() for row, n in zip(got.tokens, got.token_count, strict=True)] == case["tokens_out"]


@pytest.mark.parametrize(
    ("target", "options", "tokens", "index", "finished"),
    [
        ({}, {}, [99], [0], 0),  # nothing agrees: the bonus alone
        ({"s0": 11, "s1": 13, "s3": 16, "s6": 5}, {}, [11, 13, 16, 5], [0, 1, 3, 6], 0),  # all
        ({"s0": 11, "s1": 14}, {}, [11, 14, 99], [0, 1, 4], 0),  # a second sibling
        ({"s0": 12}, {}, [12, 99], [0, 2], 0),
        ({"s0": 11, "s1": 13}, {"stop_tokens": [13]}, [11, 13], [0, 1], 1),  # a draft token stops
        ({"s0": 11}, {"stop_tokens": [4, 99]}, [11, 99], [0, 1], 1),  # the bonus stops
        ({"s0": 11}, {"stop_tokens": [10]}, [11, 99], [0, 1], 0),  # the root is not tested
        ({"s0": 11, "s1": 13}, {"max_tokens": vector(2)}, [11, 13], [0, 1], 2),
        ({"s0": 11, "s1": 13}, {"max_tokens": vector(3)}, [11, 13, 99], [0, 1, 3], 2),  # reached exactly
        ({"s0": 11, "s1": 13}, {"max_tokens": vector(4)}, [11, 13, 99], [0, 1, 3], 0),
        ({"s0": 11}, {"max_tokens": vector(0)}, [], [], 2),
        ({"s0": 11}, {"max_tokens": vector(-5)}, [], [], 2),
        ({"s0": 11}, {"max_tokens": vector(2), "stop_tokens": [99]}, [11, 99], [0, 1], 1),  # stop wins
        ({"s0": 11, "s1": 13}, {"max_len": 2}, [11, 13], [0, 1], 0),
        ({"s0": 11, "s1": 13}, {"max_len": 2, "max_tokens": vector(2)}, [11, 13], [0, 1], 2),
        ({"s0": 11, "s1": 13}, {"max_len": 1}, [11], [0], 0),
        ({"s0": 11}, {"max_len": 20}, [11, 99], [0, 1], 0),
        ({"s0": 0}, {}, [0], [0], 0),  # token 0 is ordinary
    ],
)
def test_walks(
    backend: Any, target: dict[str, int], options: dict[str, Any], tokens: list[int], index: list[int], finished: int
) -> None:
    got = backend.tree_accept(small_tree(), targets(**target), **options)
    width = options.get("max_len", 7)
    assert got.tokens.tolist() == [tokens + [-1] * (width - len(tokens))]
    assert got.accept_index.tolist() == [index + [-1] * (width - len(index))]
    assert got.token_count.tolist() == got.accept_len.tolist() == [len(tokens)]
    assert got.next_root.tolist() == [tokens[-1] if tokens else 10]
    assert got.finished.tolist() == [finished]
    assert got.status.tolist() == [0]


def test_negative_targets_give_no_bonus(backend: Any) -> None:
    got = backend.tree_accept(small_tree(), targets(s0=11, s1=-1))
    assert (got.tokens[0, :2].tolist(), got.accept_index[0, :2].tolist()) == ([11, -1], [0, -1])
    assert (got.accept_len[0], got.next_root[0], got.finished[0]) == (1, 11, 0)
    assert got.status[0] == StatusFlag.BAD_TARGET
    got = backend.tree_accept(small_tree(), targets(s0=-7))
    assert (got.accept_len[0], got.next_root[0], got.status[0]) == (0, 10, StatusFlag.BAD_TARGET)
    got = backend.tree_accept(small_tree(), targets(s0=-7), max_tokens=vector(0))  # nothing was looked at
    assert (got.accept_len[0], got.finished[0], got.status[0]) == (0, 2, 0)


def test_a_negative_token_in_the_tree_matches_nothing(backend: Any) -> None:
    tree = small_tree()
    tree.tokens[0, 1] = -1
    assert backend.tree_accept(tree, targets(s0=-1)).accept_len[0] == 0


def test_the_first_of_duplicate_children_counts(backend: Any) -> None:
    tree = small_tree()
    tree.tokens[0, 2] = 11
    got = backend.tree_accept(tree, targets(s0=11))
    assert got.accept_index[0, :2].tolist() == [0, 1]
    tree.first_child[0, 0], tree.next_sibling[0, 2], tree.next_sibling[0, 1] = 2, 1, -1  # links as given
    got = backend.tree_accept(tree, targets(s0=11))
    assert got.accept_index[0, :2].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("field", "slot", "link"),
    [
        ("first_child", 0, 0),  # itself
        ("first_child", 0, 7),  # beyond node_count
        ("first_child", 0, 2**31 - 1),
        ("first_child", 0, -2),
        ("first_child", 0, -(2**31)),
        ("next_sibling", 1, 1),  # a list that never ends
        ("next_sibling", 1, 0),  # the parent
        ("next_sibling", 2, 1),  # back and forth
        ("next_sibling", 2, 100),
    ],
)
def test_illegal_links_end_the_list_and_the_bonus_still_comes(backend: Any, field: str, slot: int, link: int) -> None:
    tree = small_tree(3)
    getattr(tree, field)[1, slot] = link
    got = backend.tree_accept(tree, np.full((3, 7), 99, np.int32))
    assert got.status.tolist() == [0, StatusFlag.BAD_TREE, 0]
    assert got.tokens[:, 0].tolist() == [99, 99, 99]
    assert got.accept_len.tolist() == [1, 1, 1]


def test_hops_are_counted_over_the_whole_walk(backend: Any) -> None:
    """N hops in all: a cycle in the first list leaves no hop for the second."""
    tree = small_tree()
    tree.next_sibling[0, 2] = 1  # 1 -> 2 -> 1 -> 2 ...: 7 hops, then it ends
    got = backend.tree_accept(tree, targets(s0=77, s1=13))
    assert (got.tokens[0, 0], got.accept_len[0], got.status[0]) == (77, 1, StatusFlag.BAD_TREE)
    chain = kdt.tree_from_parents(vector(0, 1, 2, 3)[None], vector(-1, 0, 1, 2)[None], vector(4), vector(0))
    got = backend.tree_accept(chain, vector(1, 2, 3, 9)[None])  # 3 hops of 4: legal trees never run out
    assert (got.accept_len[0], got.status[0]) == (4, 0)


@pytest.mark.parametrize(("count", "clamped", "flag"), [(8, 7, 8), (2**31 - 1, 7, 8), (-1, 0, 8), (0, 0, 0), (3, 3, 0)])
def test_node_count_is_clamped(backend: Any, count: int, clamped: int, flag: int) -> None:
    tree = small_tree()
    tree.node_count[0] = count
    got = backend.tree_accept(tree, targets(s0=11, s1=13))
    if clamped == 0:
        assert (got.accept_len[0], got.next_root[0], got.tokens.max(), got.status[0]) == (0, -1, -1, flag)
    elif clamped == 3:  # slot 3 is not there: its link is illegal
        assert (got.tokens[0, :2].tolist(), got.status[0]) == ([11, 13], StatusFlag.BAD_TREE)
    else:
        assert (got.tokens[0, :3].tolist(), got.status[0]) == ([11, 13, 99], flag)


def test_dead_requests(backend: Any) -> None:
    tree = small_tree(3)
    got = backend.tree_accept(tree, np.full((3, 7), 99, np.int32), num_live=1, max_tokens=vector(5, 0, -1))
    assert got.tokens[:, 0].tolist() == [99, -1, -1]
    assert got.accept_index[1:].max() == -1
    for field in ("token_count", "accept_len", "finished", "status"):
        assert getattr(got, field)[1:].tolist() == [0, 0], field
    assert got.next_root.tolist() == [99, -1, -1]


def test_random_walks_agree_in_every_field() -> None:
    rng = np.random.default_rng(1)
    statuses = 0
    for case in range(400):
        batch_size, budget = int(rng.choice([0, 1, 5, 64])), int(rng.choice([0, 1, 15, 64, 130]))
        log_probs, ids = random_rows(rng, batch_size, 8, 6, "ties")
        ids %= 4
        lens = np.zeros(batch_size, np.int32)
        tree = kdt.tree_build(log_probs, ids, lens, lens, budget)
        target = rng.integers(-1 if case % 5 == 0 else 0, 4, tree.tokens.shape, dtype=np.int32)
        if case % 3 == 0 and tree.tokens.size:  # hostile links and counts
            for field in ("first_child", "next_sibling"):
                links = getattr(tree, field)
                where = rng.random(links.shape) < 0.1
                links[where] = rng.integers(-3, budget + 4, int(where.sum()))
            tree.node_count[:] = rng.integers(-2, budget + 4, batch_size)
        options: dict[str, Any] = {"stop_tokens": rng.integers(-2, 30, int(rng.integers(0, 4))).astype(np.int32)}
        if rng.random() < 0.5:
            options["max_tokens"] = rng.integers(-1, 8, batch_size).astype(np.int32)
        if rng.random() < 0.5:
            options["max_len"] = int(rng.integers(1, budget + 10))
        if rng.random() < 0.3:
            options["num_live"] = int(rng.integers(-1, batch_size + 2))
        got = kdt.tree_accept(tree, target, **options)
        expected = kdt.reference.tree_accept(
            tree, target, **{**options, "stop_tokens": options["stop_tokens"].tolist()}
        )
        assert_same_accepted(got, expected, f"{case=} {options=}")
        statuses |= int(np.bitwise_or.reduce(got.status, initial=0))
    assert statuses == StatusFlag.BAD_TREE | StatusFlag.CLAMPED | StatusFlag.BAD_TARGET


def test_given_outputs_are_used() -> None:
    wide = kdt.Accepted.empty(2, 9, 7)
    out = kdt.Accepted(**{**vars(wide), "tokens": wide.tokens[:, :4], "accept_index": wide.accept_index[:, :4]})
    got = kdt.tree_accept(small_tree(2), np.full((2, 7), 99, np.int32), max_len=4, out=out)
    assert got is out
    assert wide.tokens[:, 0].tolist() == [99, 99]
