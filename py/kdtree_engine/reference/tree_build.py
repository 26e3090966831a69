"""tree_build: the best-first draft tree of DDTree (arXiv 2604.12989)."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from ..types import StatusFlag, Tree
from ._layout import clamp, live_requests, write_tree


def row_length(log_probs: list[float], token_ids: list[int], vocab_size: int | None) -> tuple[int, int]:
    """Number of usable entries of one row, and ROW_TRUNCATED if more than padding follows them, else 0."""
    length, previous = 0, 0.0
    for log_prob, token in zip(log_probs, token_ids, strict=True):
        if not (math.isfinite(log_prob) and log_prob <= previous) or token < 0 or (vocab_size and token >= vocab_size):
            break
        length, previous = length + 1, log_prob
    rest = zip(log_probs[length:], token_ids[length:], strict=True)
    return length, 0 if all(entry == (-math.inf, -1) for entry in rest) else StatusFlag.ROW_TRUNCATED


def tree_build(
    log_probs: Any,
    token_ids: Any,
    root_tokens: Any,
    prefix_lens: Any,
    budget: int,
    *,
    budgets: Any = None,
    max_depths: Any = None,
    vocab_size: int | None = None,
    num_live: Any = None,
) -> Tree:
    """The tree of the `budget` best nodes for each request; see `kdtree_engine.tree_build`.

    A node is a tuple of ranks; its score is the float64 sum of its path's log-probs in depth order. Nodes are
    taken in the order (score descending, then tuples lexicographically, a proper prefix first), which is how
    Python compares (-score, tuple). Each node but (0,) comes after exactly one other that makes it a candidate:
    its previous sibling, or its parent if it is a first child. So a heap of candidates gives the order.
    """
    batch_size, depth, _ = log_probs.shape
    tree = Tree.empty(batch_size, budget + 1)
    for b in range(live_requests(num_live, batch_size)):
        prefix_len, status = clamp(int(prefix_lens[b]), 0, 2**31 - 1 - depth)
        nodes_wanted = budget
        if budgets is not None:
            nodes_wanted, flag = clamp(int(budgets[b]), 0, budget)
            status |= flag
        max_depth = depth
        if max_depths is not None:
            max_depth, flag = clamp(int(max_depths[b]), 0, depth)
            status |= flag
        # Plain Python numbers from here on: float64 arithmetic, exact comparisons.
        rows, ids = log_probs[b].tolist(), token_ids[b].tolist()
        lengths = []
        for d in range(max_depth):
            length, flag = row_length(rows[d], ids[d], vocab_size)
            lengths.append(length)
            status |= flag
        lengths.append(0)  # there is no row below the last

        tokens, parents, scores = [int(root_tokens[b])], [-1], [0.0]
        heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, ranks, parent slot)
        if lengths[0] > 0:
            heap.append((-(0.0 + rows[0][0]), (0,), 0))
        while heap and len(tokens) <= nodes_wanted:
            negative_score, ranks, parent = heapq.heappop(heap)
            slot, d, rank = len(tokens), len(ranks) - 1, ranks[-1]
            tokens.append(ids[d][rank])
            parents.append(parent)
            scores.append(-negative_score)
            if rank + 1 < lengths[d]:
                heapq.heappush(heap, (-(scores[parent] + rows[d][rank + 1]), (*ranks[:-1], rank + 1), parent))
            if lengths[d + 1] > 0:
                heapq.heappush(heap, (-(scores[slot] + rows[d + 1][0]), (*ranks, 0), slot))

        with np.errstate(over="ignore"):  # a sum below the float32 range rounds to -inf
            write_tree(tree, b, tokens, parents, np.array(scores).astype(np.float32).tolist(), prefix_len)
        tree.status[b] = status
    return tree
