"""topk_merge: the raw top-k of a vocabulary's shards, joined."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import StatusFlag
from ._rows import live_rows, log_sum_exp


def topk_merge(
    logits: Any,
    token_ids: Any,
    lse: Any,
    *,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
) -> Any:
    """log_probs and ids of the whole vocabulary; see `kdtree_engine.topk_merge`."""
    num_shards, *leading, k = logits.shape
    num_rows = int(np.prod(leading, dtype=np.int64))
    logits, token_ids = logits.reshape(num_shards, num_rows, k), token_ids.reshape(num_shards, num_rows, k)
    lse = lse.reshape(num_shards, num_rows)
    log_probs = np.full((num_rows, k), -np.inf, np.float32)
    ids = np.full((num_rows, k), -1, np.int32)
    status = np.zeros(num_rows, np.int32)
    for r in range(live_rows(num_live, tuple(leading), rows_per_request)):
        first: dict[int, float] = {}  # of entries with the same id the first counts
        for token, logit in zip(token_ids[:, r].ravel().tolist(), logits[:, r].ravel().tolist(), strict=True):
            if token >= 0:
                first.setdefault(token, logit)
        used = [logits[:, r][token_ids[:, r] >= 0], lse[:, r]]
        bad = any(np.isnan(v).any() or np.isposinf(v).any() for v in used)
        total = np.nan if bad else log_sum_exp(lse[:, r])
        if bad or np.isneginf(total):
            status[r] = StatusFlag.ROW_INVALID
            continue
        best = sorted(first.items(), key=lambda entry: (-entry[1], entry[0]))[:k]
        ids[r, : len(best)] = [token for token, _ in best]
        values = np.array([logit for _, logit in best], np.float32)
        with np.errstate(over="ignore"):
            log_probs[r, : len(best)] = np.minimum(np.float32(0), values - np.float32(total))
    result = (log_probs.reshape(*leading, k), ids.reshape(*leading, k))
    return (*result, status.reshape(leading)) if return_status else result
