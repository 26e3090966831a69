"""tree_from_visibility: the tree layout from a boolean ancestor mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import StatusFlag, Tree
from ._layout import clamp, live_requests, write_tree


def parents_of(mask: Any) -> list[int] | None:
    """Parents of an ancestor mask [count, count], or None when it is not the closure of any tree.

    Row i of a closure is its parent's row and i itself, and the parent, coming before i, is the highest other.
    """
    parents = []
    for slot, row in enumerate(mask):
        ancestors = np.flatnonzero(row[:slot])
        parent = int(ancestors[-1]) if ancestors.size else -1
        expected = mask[parent].copy() if parent >= 0 else np.zeros_like(row)
        expected[slot] = True
        if (row != expected).any() or (parent == -1) != (slot == 0):
            return None
        parents.append(parent)
    return parents


def tree_from_visibility(
    visibility: Any, tokens: Any, node_counts: Any, prefix_lens: Any, *, num_live: Any = None
) -> Tree:
    """Lays out the trees given by boolean masks [B, N, N]; see `kdtree_engine.tree_from_visibility`."""
    batch_size, num_slots = tokens.shape
    tree = Tree.empty(batch_size, num_slots)
    for b in range(live_requests(num_live, batch_size)):
        count = int(node_counts[b])
        if count == 0:
            continue  # like a dead request
        prefix_len, status = clamp(int(prefix_lens[b]), 0, 2**31 - 1 - num_slots)
        parents = parents_of(visibility[b, :count, :count]) if 0 < count <= num_slots else None
        if parents is None:
            parents, status = [-1], status | StatusFlag.BAD_TREE
        count = len(parents)
        write_tree(tree, b, tokens[b, :count].tolist(), parents, [0.0] * count, prefix_len)
        tree.status[b] = status
    return tree
