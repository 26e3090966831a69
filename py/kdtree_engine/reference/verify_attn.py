"""verify_attn: tree-masked attention in absorbed MLA (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._floats import from_float32, to_float32
from ..types import StatusFlag
from ._layout import clamp, live_requests

V_DIM = 512


def seen_slots(tree: Any, b: int, query: int, node_count: int) -> list[int]:
    """Slots of the tree that a query sees: itself and its ancestors; without a mask, all up to itself."""
    if tree is None or tree.visibility is None:
        return list(range(min(query + 1, node_count)))
    words = tree.visibility[b, query].tolist()
    return [j for j in range(node_count) if words[j // 64] >> (j % 64) & 1]


def verify_attn(
    q: Any,
    kv_cache: Any,
    tree: Any,
    prefix_lens: Any,
    *,
    scale: float,
    block_table: Any = None,
    kv_starts: Any = None,
    lse_base: str = "e",
    out_dtype: Any = None,
    num_live: Any = None,
    return_status: bool = False,
) -> Any:
    """(out, lse), computed in float64 and rounded once; see `kdtree_engine.verify_attn`."""
    batch_size, num_queries, num_heads, _ = q.shape
    num_pages, page_size, _ = kv_cache.shape
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    out = np.zeros((batch_size, num_queries, num_heads, V_DIM), np.float64)
    lse = np.full((batch_size, num_queries, num_heads), -np.inf, np.float64)
    status = np.zeros(batch_size, np.int32)
    for b in range(live_requests(num_live, batch_size)):
        node_count, flags = num_queries, 0
        if tree is not None and tree.node_count is not None:
            node_count, flags = clamp(int(tree.node_count[b]), 0, num_queries)
        prefix_len, flag = clamp(int(prefix_lens[b]), 0, max(capacity - node_count, 0))
        flags |= flag
        start = 0
        if kv_starts is not None:
            start, flag = clamp(int(kv_starts[b]), 0, prefix_len)
            flags |= flag
        for i in range(node_count):
            wanted = np.array(
                [*range(start, prefix_len), *(prefix_len + j for j in seen_slots(tree, b, i, node_count))]
            )
            wanted = wanted.astype(np.int64)
            there = wanted < capacity
            page = np.full(len(wanted), b, np.int64)
            if block_table is not None:
                page[there] = block_table[b, wanted[there] // page_size]
            there &= (page >= 0) & (page < num_pages)
            if not there.all():
                flags |= StatusFlag.CLAMPED
            rows = to_float32(kv_cache[page[there], wanted[there] % page_size]).astype(np.float64)
            if len(rows) == 0:
                continue
            with np.errstate(invalid="ignore", over="ignore"):
                scores = scale * (to_float32(q[b, i]).astype(np.float64) @ rows.T)  # [H, rows]
                largest = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - largest)
                total = weights.sum(axis=1, keepdims=True)
                out[b, i] = weights @ rows[:, :V_DIM] / total
                lse[b, i] = (largest + np.log(total))[:, 0]
        status[b] = flags
    if lse_base == "2":
        lse /= np.log(2.0)
    with np.errstate(over="ignore"):
        rounded = from_float32(out.astype(np.float32), q.dtype if out_dtype is None else out_dtype)
        result = (rounded, lse.astype(np.float32))
    return (*result, status) if return_status else result
