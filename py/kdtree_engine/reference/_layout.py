"""The layout of a tree: everything that follows from tokens and parents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..types import StatusFlag, Tree


def clamp(value: int, low: int, high: int) -> tuple[int, int]:
    """Returns `value` clamped to low..high, and CLAMPED if that changed it, else 0."""
    clamped = min(max(value, low), high)
    return clamped, 0 if clamped == value else StatusFlag.CLAMPED


def live_requests(num_live: Any, batch_size: int) -> int:
    """Requests from this one on are dead."""
    return batch_size if num_live is None else clamp(int(np.ravel(num_live)[0]), 0, batch_size)[0]


def write_tree(
    tree: Tree, b: int, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[Any], prefix_len: int
) -> None:
    """Writes request `b` of `tree`, which holds padding so far. Parents come before their children."""
    tree.node_count[b] = len(tokens)
    last_child: dict[int, int] = {}
    for slot, (token, parent, log_prob) in enumerate(zip(tokens, parents, log_probs, strict=True)):
        tree.tokens[b, slot] = token
        tree.parents[b, slot] = parent
        tree.log_probs[b, slot] = log_prob
        if slot > 0:
            tree.depths[b, slot] = tree.depths[b, parent] + 1
            tree.visibility[b, slot] = tree.visibility[b, parent]
            if parent in last_child:
                tree.next_sibling[b, last_child[parent]] = slot
            else:
                tree.first_child[b, parent] = slot
            last_child[parent] = slot
        tree.positions[b, slot] = prefix_len + tree.depths[b, slot]
        tree.visibility[b, slot, slot // 64] |= np.uint64(1) << np.uint64(slot % 64)
