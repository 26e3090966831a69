"""topk_logprobs: the K most likely tokens of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import StatusFlag
from ._rows import flat_rows, is_bad, live_rows, log_sum_exp


def topk_logprobs(
    logits: Any,
    k: int,
    *,
    raw: bool = False,
    id_offset: int = 0,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
) -> Any:
    """log_probs and ids of the k best tokens of each row; see `kdtree_engine.topk_logprobs`."""
    rows, leading = flat_rows(logits)
    num_rows = len(rows)
    values = np.full((num_rows, k), -np.inf, np.float32)
    ids = np.full((num_rows, k), -1, np.int32)
    lse = np.full(num_rows, -np.inf, np.float64)
    status = np.zeros(num_rows, np.int32)
    for r in range(live_rows(num_live, leading, rows_per_request)):
        row = rows[r]
        lse[r] = np.nan if is_bad(row) else log_sum_exp(row)
        if np.isnan(lse[r]) or (np.isneginf(lse[r]) and not raw):
            status[r] = StatusFlag.ROW_INVALID
            continue
        best = np.argsort(-row, kind="stable")[:k]  # descending, equal ones in ascending id
        ids[r, : len(best)] = best + id_offset
        if raw:
            values[r, : len(best)] = row[best]
        else:
            with np.errstate(over="ignore"):  # -3e38 - 3e38 is -inf
                values[r, : len(best)] = np.minimum(np.float32(0), row[best] - np.float32(lse[r]))
    values, ids = values.reshape(*leading, k), ids.reshape(*leading, k)
    result = (values, ids, lse.reshape(leading)) if raw else (values, ids)
    return (*result, status.reshape(leading)) if return_status else result
