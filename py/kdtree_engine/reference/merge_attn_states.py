"""merge_attn_states: attention over two disjoint sets of keys (FlashAttention, arXiv 2205.14135)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._floats import from_float32, to_float32
from ._rows import live_rows


def merge_attn_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    lse_base: str = "e",
    out_dtype: Any = None,
    num_live: Any = None,
    rows_per_request: int | None = None,
) -> Any:
    """(out, lse) over both sides; outs [..., H, D], lses [..., H]. See `kdtree_engine.merge_attn_states`."""
    log_2 = np.log(2.0) if lse_base == "2" else 1.0
    a, b = to_float32(out_a).astype(np.float64), to_float32(out_b).astype(np.float64)
    lses = np.stack([lse_a, lse_b]).astype(np.float64) * log_2
    lses[np.isposinf(lses)] = -np.inf  # both mean an empty side
    a[np.isneginf(lses[0])] = 0  # whose out is never used
    b[np.isneginf(lses[1])] = 0
    largest = lses.max(axis=0)
    shift = np.where(np.isneginf(largest), 0, largest)
    weights = np.exp(lses - shift)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = (weights[0][..., None] * a + weights[1][..., None] * b) / total[..., None]
        lse = (shift + np.log(total)) / log_2
    out[total == 0] = 0
    leading = out.shape[:-2]
    live = live_rows(num_live, leading, rows_per_request)
    out.reshape(-1, *out.shape[-2:])[live:] = 0
    lse.reshape(-1, lse.shape[-1])[live:] = -np.inf
    with np.errstate(over="ignore"):
        rounded = from_float32(out.astype(np.float32), out_a.dtype if out_dtype is None else out_dtype)
        return rounded, lse.astype(np.float32)
