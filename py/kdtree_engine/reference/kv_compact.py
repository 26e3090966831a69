"""kv_compact: keep the KV rows of the accepted path (after DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import StatusFlag
from ._layout import live_requests


def kv_compact(
    cache: Any,
    accepted: Any,
    prefix_lens: Any,
    *,
    block_table: Any = None,
    out: Any = None,
    num_live: Any = None,
    return_status: bool = False,
) -> Any:
    """Moves the accepted rows to the end of each prefix; see `kdtree_engine.kv_compact`."""
    layers = list(cache) if isinstance(cache, (list, tuple)) or cache.ndim == 4 else [cache]
    if out is None:
        out, destinations = cache, layers
    else:
        destinations = list(out) if isinstance(out, (list, tuple)) or out.ndim == 4 else [out]
    num_pages, page_size, _ = layers[0].shape

    def place(b: int, row: int) -> tuple[int, int] | None:
        """Page and row within it of logical row `row`, or None when there is none."""
        if row < 0:
            return None
        if block_table is None:
            return (b, row) if row < page_size else None
        if row // page_size >= block_table.shape[1]:
            return None
        page = int(block_table[b, row // page_size])
        return (page, row % page_size) if 0 <= page < num_pages else None

    batch_size, max_len = accepted.accept_index.shape
    status = np.zeros(batch_size, np.int32)
    for b in range(live_requests(num_live, batch_size)):
        length, prefix_len = int(accepted.accept_len[b]), int(prefix_lens[b])
        slots = accepted.accept_index[b, : max(length, 0)].tolist()
        ascending = all(low < high for low, high in zip([-1, *slots], [*slots, accepted.num_slots], strict=True))
        sources = [place(b, prefix_len + slot) for slot in slots]
        targets = [place(b, prefix_len + k) for k in range(len(slots))]
        if not 0 <= length <= max_len or not ascending or None in sources or None in targets:
            status[b] = StatusFlag.BAD_TREE
            continue
        for layer, destination in zip(layers, destinations, strict=True):
            rows = [layer[source].copy() for source in sources]
            for row, source, target in zip(rows, sources, targets, strict=True):
                if destination is not layer or source != target:
                    destination[target] = row
    return (out, status) if return_status else out
