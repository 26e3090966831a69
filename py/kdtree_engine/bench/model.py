"""Bytes moved and FLOP of each operation: what it cannot do without, so that rates compare across implementations.

Every array given is read once and every result written once, whatever an implementation really touches, but for:

tree_accept         of the tree only what it reads (tokens, links, counts)
kv_compact          each row that moves is read and written once, in all layers, and the path read; no other row
verify_attn         live queries, each cache row that some query of its request sees, and the mask are read once
merge_attn_states   3 FLOP an element
verify_attn         2 H 1088 FLOP (2 H (576 + 512)) for each pair of a live query and a row that it sees

The others do no arithmetic worth a rate: 0 FLOP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from ..cases import Arguments, Results
from ..reference._layout import clamp, live_requests
from ..types import Accepted, Tree


class Work(NamedTuple):
    bytes: int
    flop: int


class Seen(NamedTuple):
    """What the queries of one request see."""

    request: int
    start: int
    prefix_len: int
    """Rows start..prefix_len-1 are seen by all live queries."""
    mask: Any
    """bool [node_count, node_count]: query i sees slot j, row prefix_len + j."""


def seen_rows(arguments: Arguments) -> Iterator[Seen]:
    """For each live request of `verify_attn`."""
    tree, table = arguments["tree"], arguments.get("block_table")
    batch_size, num_queries = arguments["q"].shape[:2]
    page_size = arguments["kv_cache"].shape[1]
    capacity = page_size if table is None else table.shape[1] * page_size
    starts = arguments.get("kv_starts")
    for b in range(live_requests(arguments.get("num_live"), batch_size)):
        count = num_queries
        if tree is not None and tree.node_count is not None:
            count, _ = clamp(int(tree.node_count[b]), 0, num_queries)
        prefix_len, _ = clamp(int(arguments["prefix_lens"][b]), 0, max(capacity - count, 0))
        start = 0 if starts is None else clamp(int(starts[b]), 0, prefix_len)[0]
        if tree is None or tree.visibility is None:
            mask = np.tri(count, dtype=bool)
        else:
            words = np.ascontiguousarray(tree.visibility[b, :count], "<u8")
            mask = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :count].astype(bool)
        yield Seen(b, start, prefix_len, mask)


def nbytes(value: Any) -> int:
    """Of an array, or of the arrays of a Tree, an Accepted, a list."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (Tree, Accepted)):
        return sum(nbytes(getattr(value, field.name)) for field in fields(value))
    return sum(nbytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def whole_arrays(arguments: Arguments, results: Results) -> Work:
    return Work(sum(nbytes(value) for value in (*arguments.values(), *results.values())), 0)


def tree_accept(arguments: Arguments, results: Results) -> Work:
    tree = arguments["tree"]
    unread = sum(nbytes(getattr(tree, f)) for f in ("parents", "depths", "positions", "log_probs", "visibility"))
    return Work(whole_arrays(arguments, results).bytes - unread - nbytes(tree.status), 0)


def kv_compact(arguments: Arguments, results: Results) -> Work:
    cache, accepted = arguments["cache"], arguments["accepted"]
    layers = cache if isinstance(cache, (list, tuple)) else cache if cache.ndim == 4 else cache[None]
    in_place = arguments.get("out") is None
    moved = read = 0
    for b in range(live_requests(arguments.get("num_live"), accepted.batch_size)):
        if results["status"][b] == 0:
            path = accepted.accept_index[b, : accepted.accept_len[b]]
            read += nbytes(path)
            moved += int((path != np.arange(len(path))).sum()) if in_place else len(path)
    row_bytes = layers[0].shape[-1] * layers[0].itemsize
    vectors = nbytes(accepted.accept_len) + nbytes(arguments["prefix_lens"]) + nbytes(results["status"])
    return Work(2 * moved * len(layers) * row_bytes + read + vectors, 0)


def verify_attn(arguments: Arguments, results: Results) -> Work:
    q, cache, tree = arguments["q"], arguments["kv_cache"], arguments["tree"]
    heads = q.shape[2]
    pairs = rows = queries = 0
    for seen in seen_rows(arguments):
        count, prefix = len(seen.mask), seen.prefix_len - seen.start
        queries += count
        pairs += count * prefix + int(seen.mask.sum())
        rows += (prefix if count else 0) + int(seen.mask.any(axis=0).sum())
    read = queries * nbytes(q[:1, :1]) + rows * cache.shape[-1] * cache.itemsize + nbytes(arguments["prefix_lens"])
    read += sum(nbytes(arguments.get(name)) for name in ("block_table", "kv_starts"))
    if tree is not None:
        read += nbytes(tree.visibility) + nbytes(tree.node_count)
    written = sum(nbytes(value) for value in results.values())
    return Work(read + written, 2 * heads * 1088 * pairs)


def merge_attn_states(arguments: Arguments, results: Results) -> Work:
    return Work(whole_arrays(arguments, results).bytes, 3 * results["out"].size)


MODELS: dict[str, Callable[[Arguments, Results], Work]] = {
    "topk_logprobs": whole_arrays,
    "topk_merge": whole_arrays,
    "tree_build": whole_arrays,
    "tree_from_parents": whole_arrays,
    "tree_from_visibility": whole_arrays,
    "verify_attn": verify_attn,
    "merge_attn_states": merge_attn_states,
    "argmax": whole_arrays,
    "sample": whole_arrays,
    "tree_accept": tree_accept,
    "kv_compact": kv_compact,
}
"""By operation. `results` are those of the call that is timed, in its types."""
