"""argmax: the most likely token of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import StatusFlag
from ._rows import flat_rows, live_rows


def argmax(
    logits: Any,
    *,
    id_offset: int = 0,
    return_values: bool = False,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
) -> Any:
    """Tokens (and largest logits) of each row; see `kdtree_engine.argmax`."""
    rows, leading = flat_rows(logits)
    tokens = np.full(len(rows), -1, np.int32)
    values = np.full(len(rows), -np.inf, np.float32)
    status = np.zeros(len(rows), np.int32)
    for r in range(live_rows(num_live, leading, rows_per_request)):
        row = rows[r]
        values[r] = np.max(row, initial=-np.inf)  # NaN if there is one
        if np.isnan(values[r]) or not np.isfinite(row).any():
            status[r] = StatusFlag.ROW_INVALID
        else:
            tokens[r] = np.flatnonzero(row == values[r])[0] + id_offset
    results: list[Any] = [tokens.reshape(leading)]
    results += [values.reshape(leading)] if return_values else []
    results += [status.reshape(leading)] if return_status else []
    return results[0] if len(results) == 1 else tuple(results)
