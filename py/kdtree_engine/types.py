"""The results of operations, and the flags in their `status` arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arrays import HOST

if TYPE_CHECKING:
    from ._context import Context


class StatusFlag(IntFlag):
    """Flags in the `status` array of a result: 0 or a sum."""

    ROW_INVALID = 1
    """NaN, +inf or nothing finite in a row of logits."""
    ROW_TRUNCATED = 2
    """A row of candidates ended early."""
    BAD_TREE = 4
    """Malformed parents, mask, links or path."""
    CLAMPED = 8
    """A number in an array was out of range and was clamped."""
    BAD_TARGET = 16
    """A target token < 0."""


@dataclass(eq=False)
class Tree:
    """`B` draft trees of at most `N` slots. Slot 0 is the root, slots 1.. are nodes, best first.

    Slots from `node_count` on hold the padding named last.
    """

    tokens: Any
    """[B, N] i32; -1"""
    parents: Any
    """[B, N] i32 slots; -1 for the root and padding"""
    first_child: Any
    """[B, N] i32 slots; -1 for none and padding"""
    next_sibling: Any
    """[B, N] i32 slots, ascending; -1 for none and padding"""
    depths: Any
    """[B, N] i32; 0"""
    positions: Any
    """[B, N] i32, prefix_len + depth; 0"""
    log_probs: Any
    """[B, N] f32, sum along the path, root 0; -inf"""
    visibility: Any
    """[B, N, ceil(N / 64)] u64; bit j of row i: j is i or an ancestor of i; 0"""
    node_count: Any
    """[B] i32, root included"""
    status: Any
    """[B] i32, a sum of `StatusFlag`s"""

    @property
    def batch_size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.tokens.shape[1])

    @classmethod
    def empty(cls, batch_size: int, num_slots: int, context: Context | None = None) -> Tree:
        """Trees without any node: padding everywhere, as for dead requests. In the memory of the context."""
        shape = (batch_size, num_slots)
        put = _put(context)
        return cls(
            tokens=put(np.full(shape, -1, np.int32)),
            parents=put(np.full(shape, -1, np.int32)),
            first_child=put(np.full(shape, -1, np.int32)),
            next_sibling=put(np.full(shape, -1, np.int32)),
            depths=put(np.zeros(shape, np.int32)),
            positions=put(np.zeros(shape, np.int32)),
            log_probs=put(np.full(shape, -np.inf, np.float32)),
            visibility=put(np.zeros((*shape, (num_slots + 63) // 64), np.uint64)),
            node_count=put(np.zeros(batch_size, np.int32)),
            status=put(np.zeros(batch_size, np.int32)),
        )


@dataclass(eq=False)
class Accepted:
    """What `tree_accept` found for `B` requests, at most `M` tokens each."""

    tokens: Any
    """[B, M] i32, the accepted draft tokens, then the bonus; padding -1"""
    token_count: Any
    """[B] i32"""
    accept_index: Any
    """[B, M] i32 slots whose KV rows are to be kept, the root first; padding -1"""
    accept_len: Any
    """[B] i32, equal to token_count"""
    next_root: Any
    """[B] i32, the root of the next step; -1 for a dead request"""
    finished: Any
    """[B] i32: 0 no, 1 a stop token came, 2 max_tokens reached"""
    status: Any
    """[B] i32, a sum of `StatusFlag`s"""
    num_slots: int
    """N of the tree: slots in accept_index lie below it"""

    @property
    def batch_size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def max_len(self) -> int:
        return int(self.tokens.shape[1])

    @classmethod
    def empty(cls, batch_size: int, max_len: int, num_slots: int, context: Context | None = None) -> Accepted:
        """Nothing accepted: padding everywhere, as for dead requests. In the memory of the context."""
        put = _put(context)
        return cls(
            tokens=put(np.full((batch_size, max_len), -1, np.int32)),
            token_count=put(np.zeros(batch_size, np.int32)),
            accept_index=put(np.full((batch_size, max_len), -1, np.int32)),
            accept_len=put(np.zeros(batch_size, np.int32)),
            next_root=put(np.full(batch_size, -1, np.int32)),
            finished=put(np.zeros(batch_size, np.int32)),
            status=put(np.zeros(batch_size, np.int32)),
            num_slots=num_slots,
        )


def _put(context: Context | None) -> Callable[[Any], Any]:
    """Without a context the library is not needed: the references make trees, too."""
    return HOST.put if context is None else context.memory.put
