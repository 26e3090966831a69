"""tree_accept: the longest path of a draft tree that agrees with the target (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types import Accepted, StatusFlag, Tree
from ._layout import clamp, live_requests


def tree_accept(
    tree: Tree,
    target_tokens: Any,
    *,
    max_tokens: Any = None,
    stop_tokens: Sequence[int] = (),
    max_len: int | None = None,
    num_live: Any = None,
) -> Accepted:
    """Walks each tree along the target's tokens; see `kdtree_engine.tree_accept`."""
    batch_size, num_slots = tree.tokens.shape
    max_len = num_slots if max_len is None else max_len
    accepted = Accepted.empty(batch_size, max_len, num_slots)
    for b in range(live_requests(num_live, batch_size)):
        node_count, status = clamp(int(tree.node_count[b]), 0, num_slots)
        accepted.status[b] = status
        if node_count == 0:
            continue  # like a dead request
        limit = None if max_tokens is None else int(max_tokens[b])
        tokens: list[int] = []
        path: list[int] = []
        finished = 2 if limit is not None and limit <= 0 else 0
        slot, hops = 0, 0
        while not finished and len(tokens) < max_len:
            target = int(target_tokens[b, slot])
            if target < 0:
                status |= StatusFlag.BAD_TARGET
                break
            child = int(tree.first_child[b, slot])
            while child != -1:  # the first child in link order whose token is the target's
                if not slot < child < node_count or hops == num_slots:
                    status |= StatusFlag.BAD_TREE
                    child = -1
                    break
                hops += 1
                if tree.tokens[b, child] == target:
                    break
                child = int(tree.next_sibling[b, child])
            tokens.append(target)  # of the child if there is one, else the bonus
            path.append(slot)
            if target in stop_tokens:
                finished = 1
            elif len(tokens) == limit:
                finished = 2
            elif child == -1:
                break
            slot = child

        count = len(tokens)
        accepted.tokens[b, :count] = tokens
        accepted.accept_index[b, :count] = path
        accepted.token_count[b] = accepted.accept_len[b] = count
        accepted.next_root[b] = tokens[-1] if tokens else tree.tokens[b, 0]
        accepted.finished[b] = finished
        accepted.status[b] = status
    return accepted
