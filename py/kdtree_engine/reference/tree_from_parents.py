"""tree_from_parents: the tree layout for trees of other drafters (EAGLE, arXiv 2401.15077; Medusa, 2401.10774)."""

from __future__ import annotations

from typing import Any

from ..types import StatusFlag, Tree
from ._layout import clamp, live_requests, write_tree


def tree_from_parents(tokens: Any, parents: Any, node_counts: Any, prefix_lens: Any, *, num_live: Any = None) -> Tree:
    """Lays out the trees given by `parents`; see `kdtree_engine.tree_from_parents`."""
    batch_size, num_slots = tokens.shape
    tree = Tree.empty(batch_size, num_slots)
    for b in range(live_requests(num_live, batch_size)):
        count = int(node_counts[b])
        if count == 0:
            continue  # like a dead request
        prefix_len, status = clamp(int(prefix_lens[b]), 0, 2**31 - 1 - num_slots)
        good = (
            0 < count <= num_slots
            and parents[b, 0] == -1
            and all(0 <= parents[b, slot] < slot for slot in range(1, count))
        )
        if not good:
            count, status = 1, status | StatusFlag.BAD_TREE
        write_tree(tree, b, tokens[b, :count].tolist(), [-1, *parents[b, 1:count].tolist()], [0.0] * count, prefix_len)
        tree.status[b] = status
    return tree
