"""Recorded decode steps: the drafter's rows, and what the target went on to emit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import kdtr
from ._errors import KdtrError, Status
from .ops import MAX_CANDIDATES, MAX_DEPTH
from .types import Tree


@dataclass
class Trace:
    """`S` recorded decode steps."""

    log_probs: Any
    """[S, D, K] f32, the drafter's rows"""
    token_ids: Any
    """[S, D, K] i32"""
    root_tokens: Any
    """[S] i32, the token before the first row"""
    continuation: Any
    """[S, D] i32, what the target went on to emit"""
    attrs: dict[str, str]


def load_trace(path: Path) -> Trace:
    """Reads a trace; leading dimensions (sequences, steps) are flattened. KdtrError when the file holds none."""
    tensors, attrs = kdtr.load(path)

    def tensor(name: str, dtype: type[np.generic], trailing: int) -> Any:
        array = tensors.get(name)
        if array is None:
            raise KdtrError(f"{path}: no trace, tensor '{name}' is missing", Status.KDTR_NOT_FOUND)
        if array.dtype != dtype or array.ndim < trailing:
            wanted = f"{np.dtype(dtype).name} with at least {trailing} dimensions"
            raise KdtrError(f"{path}: no trace, tensor '{name}' is {array.dtype}{list(array.shape)}, not {wanted}", 521)
        kept = array.shape[array.ndim - trailing :]
        return array.reshape(int(np.prod(array.shape[: array.ndim - trailing], dtype=np.int64)), *kept)

    trace = Trace(
        tensor("log_probs", np.float32, 2),
        tensor("token_ids", np.int32, 2),
        tensor("root_tokens", np.int32, 0),
        tensor("continuation", np.int32, 1),
        attrs,
    )
    steps, depth, _ = trace.log_probs.shape
    for name, shape in (
        ("token_ids", trace.log_probs.shape),
        ("root_tokens", (steps,)),
        ("continuation", (steps, depth)),
    ):
        got = getattr(trace, name).shape
        if got != shape:
            raise KdtrError(
                f"{path}: no trace, tensor '{name}' has shape {list(got)} after flattening, expected {list(shape)}", 520
            )
    candidates = trace.log_probs.shape[2]
    if depth > MAX_DEPTH or candidates > MAX_CANDIDATES:
        raise KdtrError(f"{path}: D={depth}, K={candidates} are beyond D={MAX_DEPTH}, K={MAX_CANDIDATES}", 520)
    if (trace.continuation < 0).any():
        raise KdtrError(f"{path}: no trace, tensor 'continuation' has tokens < 0", Status.KDTR_VALUE)
    if steps == 0 or depth == 0 or candidates == 0:
        raise KdtrError(f"{path}: an empty trace ({steps} steps of shape {list(trace.log_probs.shape[1:])})", 520)
    return trace


def tree_digest(digest: Any, tree: Tree, requests: int) -> None:
    """Adds trees without root and padding to a hash, each node_count, then tokens, parents, depths, log_probs."""
    for b in range(requests):
        count = int(tree.node_count[b])
        digest.update(np.array(count, "<i4").tobytes())
        for field, dtype in (("tokens", "<i4"), ("parents", "<i4"), ("depths", "<i4"), ("log_probs", "<f4")):
            digest.update(getattr(tree, field)[b, 1:count].astype(dtype).tobytes())


def targets_of(trace: Trace, steps: Any, depths: Any) -> Any:
    """The target's token after nodes of these depths [S, N], on the path that agrees with the target.

    After the last recorded token it is unknown; such a node has no children, so any token serves.
    """
    continued = np.pad(trace.continuation[steps], ((0, 0), (0, 1)))
    return np.take_along_axis(continued, depths, axis=1)
