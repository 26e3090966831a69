"""Operations on trees."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _abi
from .._arrays import Memory, View, host_int, pointer
from .._context import Context, check, context_or_default
from .._errors import KdtValueError, Status
from .._library import load
from ..types import Accepted, Tree
from ._call import MAX_BUDGET, MAX_CANDIDATES, MAX_DEPTH, Call, operation

_TREE_FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "parents": np.int32,
    "first_child": np.int32,
    "next_sibling": np.int32,
    "depths": np.int32,
    "positions": np.int32,
    "log_probs": np.float32,
    "visibility": np.uint64,
    "node_count": np.int32,
    "status": np.int32,
}


def _field_shape(field: str, batch_size: int, num_slots: int) -> tuple[int, ...]:
    if field == "visibility":
        return (batch_size, num_slots, (num_slots + 63) // 64)
    return (batch_size,) if field in ("node_count", "status") else (batch_size, num_slots)


def tree_struct(
    memory: Memory,
    name: str,
    tree: Any,
    batch_size: int | None,
    num_slots: int | None,
    fields: Sequence[str],
    *,
    writable: bool,
) -> tuple[_abi.TreeStruct, list[View]]:
    """The C struct of the named fields of a tree, and the views that keep them alive."""
    if not isinstance(tree, Tree):
        raise KdtValueError(f"argument '{name}': expected a Tree, got {type(tree).__name__}")
    if batch_size is None or num_slots is None:
        batch_size, num_slots = memory.view(f"{name}.tokens", tree.tokens, np.int32, (batch_size, num_slots)).shape
    struct = _abi.TreeStruct(batch_size=batch_size, num_slots=num_slots)
    views: list[View] = []
    for field in fields:
        shape = _field_shape(field, batch_size, num_slots)
        array = memory.view(f"{name}.{field}", getattr(tree, field), _TREE_FIELDS[field], shape, writable=writable)
        if field == "visibility":
            struct.visibility_stride, struct.visibility_pitch = array.strides[:2]
        elif len(shape) == 2:
            if views and struct.slot_stride != array.strides[0]:
                raise KdtValueError(
                    f"argument '{name}.{field}': expected the batch stride of '{name}.tokens' "
                    f"({struct.slot_stride} elements), got {array.strides[0]}",
                    Status.STRIDE,
                )
            struct.slot_stride = array.strides[0]
        setattr(struct, field, array.pointer)
        views.append(array)
    return struct, views


def output_tree(
    memory: Memory, out: Tree | None, batch_size: int, num_slots: int
) -> tuple[Tree, _abi.TreeStruct, list[View]]:
    """A given tree checked, or a new one: the operation writes all of it."""
    tree = out
    if tree is None:
        shapes = {field: _field_shape(field, batch_size, num_slots) for field in _TREE_FIELDS}
        tree = Tree(**{field: memory.empty(shapes[field], dtype) for field, dtype in _TREE_FIELDS.items()})
    struct, views = tree_struct(memory, "out", tree, batch_size, num_slots, list(_TREE_FIELDS), writable=True)
    return tree, struct, views


@operation
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
    out: Tree | None = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Tree]:
    """The best `budget`-node tree of each request (DDTree, arXiv 2604.12989).

    log_probs    [B, D, K] f32, natural log, each row descending; D <= 64, K <= 1024.
    token_ids    [B, D, K] i32.
    root_tokens  [B] i32, the last token already emitted.
    prefix_lens  [B] i32, tokens in the KV cache; clamped to 0..2^31-1-D.
    budget       nodes without the root, 0..1024; the tree has budget + 1 slots.
    budgets      optional [B] i32, each clamped to 0..budget.
    max_depths   optional [B] i32, each clamped to 0..D.
    vocab_size   optional: ids >= vocab_size end a row, as ids < 0 do.

    A node is a tuple of ranks, its score the float64 sum in depth order of its path's log-probs; the tree is the
    first `budget` nodes in the order (score descending; then rank tuples lexicographically, a proper prefix
    first). A row ends at its first entry that is NaN, infinite, > 0, larger than the one before, or whose id is
    out of range; unless only (-inf, -1) follows, status has ROW_TRUNCATED. CLAMPED: a number was out of range.
    """
    where = context_or_default(context)
    memory = where.memory
    rows = memory.view("log_probs", log_probs, np.float32, (None, None, None))
    batch_size, depth, candidates = rows.shape
    ids = memory.view("token_ids", token_ids, np.int32, rows.shape)
    roots = memory.int_vector("root_tokens", root_tokens, batch_size)
    lens = memory.int_vector("prefix_lens", prefix_lens, batch_size)
    budget = host_int("budget", budget, 0, MAX_BUDGET, Status.LIMIT)
    per_request = memory.optional_int_vector("budgets", budgets, batch_size)
    depths = memory.optional_int_vector("max_depths", max_depths, batch_size)
    live = memory.optional_scalar("num_live", num_live)
    vocab = 0 if vocab_size is None else host_int("vocab_size", vocab_size, 1, 2**31 - 1)
    tree, struct, views = output_tree(memory, out, batch_size, budget + 1)
    params = _abi.TreeBuildParams(
        depth=depth,
        num_candidates=candidates,
        budget=budget,
        vocab_size=vocab,
        log_probs=rows.pointer,
        log_probs_stride=rows.strides[0],
        log_probs_row_stride=rows.strides[1],
        token_ids=ids.pointer,
        token_ids_stride=ids.strides[0],
        token_ids_row_stride=ids.strides[1],
        root_tokens=roots.pointer,
        prefix_lens=lens.pointer,
        budgets=pointer(per_request),
        max_depths=pointer(depths),
        num_live=pointer(live),
        tree=ctypes.pointer(struct),
    )
    keep = [rows, ids, roots, lens, per_request, depths, live, views]
    return Call("tree_build", params, tree, keep, where, workspace, stream)


@operation
def tree_from_parents(
    tokens: Any,
    parents: Any,
    node_counts: Any,
    prefix_lens: Any,
    *,
    num_live: Any = None,
    out: Tree | None = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Tree]:
    """The tree layout for trees of other drafters, of any depth.

    tokens       [B, N] i32, N <= 1025; slot 0 is the root.
    parents      [B, N] i32 slots: parents[:, 0] = -1, and 0 <= parents[b, i] < i.
    node_counts  [B] i32, root included; 0 is a dead request.
    prefix_lens  [B] i32, clamped to 0..2^31-1-N (CLAMPED).

    log_probs of nodes are 0. Malformed parents, or a count outside 0..N: BAD_TREE, the root alone.
    """
    where = context_or_default(context)
    memory = where.memory
    ids = memory.view("tokens", tokens, np.int32, (None, None))
    batch_size, num_slots = ids.shape
    links = memory.view("parents", parents, np.int32, ids.shape)
    counts = memory.int_vector("node_counts", node_counts, batch_size)
    lens = memory.int_vector("prefix_lens", prefix_lens, batch_size)
    live = memory.optional_scalar("num_live", num_live)
    tree, struct, views = output_tree(memory, out, batch_size, num_slots)
    params = _abi.TreeFromParentsParams(
        tokens=ids.pointer,
        tokens_stride=ids.strides[0],
        parents=links.pointer,
        parents_stride=links.strides[0],
        node_counts=counts.pointer,
        prefix_lens=lens.pointer,
        num_live=pointer(live),
        tree=ctypes.pointer(struct),
    )
    return Call("tree_from_parents", params, tree, [ids, links, counts, lens, live, views], where, workspace, stream)


@operation
def tree_from_visibility(
    visibility: Any,
    tokens: Any,
    node_counts: Any,
    prefix_lens: Any,
    *,
    num_live: Any = None,
    out: Tree | None = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Tree]:
    """The tree layout from boolean ancestor masks.

    visibility   [B, N, N] bool: slot j is i or an ancestor of i. Rows and columns >= node_counts[b] are ignored.
    tokens       [B, N] i32, N <= 1025.
    node_counts  [B] i32, root included; 0 is a dead request.
    prefix_lens  [B] i32, clamped to 0..2^31-1-N (CLAMPED).

    A mask that is no ancestor closure with parents before children: BAD_TREE, the root alone.
    """
    where = context_or_default(context)
    memory = where.memory
    mask = memory.view("visibility", visibility, np.bool_, (None, None, None))
    batch_size, num_slots = mask.shape[:2]
    memory.view("visibility", visibility, np.bool_, (batch_size, num_slots, num_slots))
    ids = memory.view("tokens", tokens, np.int32, (batch_size, num_slots))
    counts = memory.int_vector("node_counts", node_counts, batch_size)
    lens = memory.int_vector("prefix_lens", prefix_lens, batch_size)
    live = memory.optional_scalar("num_live", num_live)
    tree, struct, views = output_tree(memory, out, batch_size, num_slots)
    params = _abi.TreeFromVisibilityParams(
        mask=mask.pointer,
        mask_stride=mask.strides[0],
        mask_row_stride=mask.strides[1],
        tokens=ids.pointer,
        tokens_stride=ids.strides[0],
        node_counts=counts.pointer,
        prefix_lens=lens.pointer,
        num_live=pointer(live),
        tree=ctypes.pointer(struct),
    )
    return Call("tree_from_visibility", params, tree, [mask, ids, counts, lens, live, views], where, workspace, stream)


_ACCEPTED_VECTORS = ("token_count", "accept_len", "next_root", "finished", "status")


@operation
def tree_accept(
    tree: Tree,
    target_tokens: Any,
    *,
    max_tokens: Any = None,
    stop_tokens: Any = (),
    max_len: int | None = None,
    num_live: Any = None,
    out: Accepted | None = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Accepted]:
    """The longest path of each tree that agrees with the target.

    tree           reads tokens, first_child, next_sibling and node_count; links are followed as given.
    target_tokens  [B, N] i32, the target's token after each slot.
    max_tokens     optional [B] i32: stop when so many tokens are out (finished 2).
    stop_tokens    i32 ids, for all requests: stop after emitting one (finished 1).
    max_len        M >= 1, the most tokens a path may hold; default N.

    From the root on, the first child whose token is the target's token after the current slot is accepted; where
    none is, the target's token is the bonus and the last. A target < 0 ends the walk without a bonus
    (BAD_TARGET). An illegal link ends its sibling list (BAD_TREE).
    """
    where = context_or_default(context)
    memory = where.memory
    fields = ("tokens", "first_child", "next_sibling", "node_count")
    struct, views = tree_struct(memory, "tree", tree, None, None, fields, writable=False)
    batch_size, num_slots = struct.batch_size, struct.num_slots
    targets = memory.view("target_tokens", target_tokens, np.int32, (batch_size, num_slots))
    limits = memory.optional_int_vector("max_tokens", max_tokens, batch_size)
    stops = memory.int_vector("stop_tokens", stop_tokens, None)
    live = memory.optional_scalar("num_live", num_live)
    max_len = num_slots if max_len is None else host_int("max_len", max_len, 1, 2**31 - 1)
    if out is None:
        rows = (memory.empty((batch_size, max_len), np.int32) for _ in range(2))
        single = {field: memory.empty((batch_size,), np.int32) for field in _ACCEPTED_VECTORS}
        out = Accepted(tokens=next(rows), accept_index=next(rows), num_slots=num_slots, **single)
    elif not isinstance(out, Accepted):
        raise KdtValueError(f"argument 'out': expected an Accepted, got {type(out).__name__}")
    elif out.num_slots != num_slots:
        raise KdtValueError(f"argument 'out.num_slots': expected {num_slots}, got {out.num_slots}", Status.SHAPE)
    tokens = memory.view("out.tokens", out.tokens, np.int32, (batch_size, max_len), writable=True)
    index = memory.view("out.accept_index", out.accept_index, np.int32, (batch_size, max_len), writable=True)
    vectors = {
        field: memory.view(f"out.{field}", getattr(out, field), np.int32, (batch_size,), writable=True)
        for field in _ACCEPTED_VECTORS
    }
    params = _abi.TreeAcceptParams(
        tree=ctypes.pointer(struct),
        target_tokens=targets.pointer,
        target_tokens_stride=targets.strides[0],
        max_tokens=pointer(limits),
        stop_tokens=stops.pointer,
        num_stop_tokens=stops.shape[0],
        max_len=max_len,
        num_live=pointer(live),
        tokens=tokens.pointer,
        tokens_stride=tokens.strides[0],
        accept_index=index.pointer,
        accept_index_stride=index.strides[0],
        **{field: array.pointer for field, array in vectors.items()},
    )
    keep = [views, targets, limits, stops, live, tokens, index, vectors]
    return Call("tree_accept", params, out, keep, where, workspace, stream)


def tree_build_workspace_size(
    batch_size: int, depth: int, num_candidates: int, budget: int, *, context: Context | None = None
) -> int:
    """Bytes of scratch `tree_build` needs for these sizes; it never shrinks when one of them grows.

    For the others: `f.prepare(...).workspace_size`.
    """
    budget = host_int("budget", budget, 0, MAX_BUDGET, Status.LIMIT)
    struct = _abi.TreeStruct(batch_size=host_int("batch_size", batch_size, 0, 2**31 - 1), num_slots=budget + 1)
    params = _abi.TreeBuildParams(
        depth=host_int("depth", depth, 0, MAX_DEPTH, Status.LIMIT),
        num_candidates=host_int("num_candidates", num_candidates, 0, MAX_CANDIDATES, Status.LIMIT),
        budget=budget,
        tree=ctypes.pointer(struct),
    )
    size = ctypes.c_size_t()
    check(load().kdt_tree_build_workspace_size(context_or_default(context).handle, params, size))
    return size.value
