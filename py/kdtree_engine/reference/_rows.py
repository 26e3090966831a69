"""Rows of logits: what top-k, argmax and sampling share."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._floats import to_float32
from ._layout import live_requests


def flat_rows(logits: Any) -> tuple[Any, tuple[int, ...]]:
    """[..., V] as float32 [R, V], and the leading shape."""
    leading = logits.shape[:-1]
    return to_float32(logits).reshape(int(np.prod(leading, dtype=np.int64)), logits.shape[-1]), leading


def live_rows(num_live: Any, leading: tuple[int, ...], rows_per_request: int | None) -> int:
    """Rows from this one on are dead. Without rows_per_request, the first leading dimension counts requests."""
    num_rows = int(np.prod(leading, dtype=np.int64))
    if rows_per_request is None:
        rows_per_request = int(np.prod(leading[1:], dtype=np.int64))
    return live_requests(num_live, num_rows // max(rows_per_request, 1)) * rows_per_request


def log_sum_exp(values: Any) -> float:
    """log(sum(exp(values))) in float64 of finite or -inf values; -inf when there is no finite one."""
    values = np.asarray(values, np.float64)
    largest = float(values.max(initial=-np.inf))
    if largest == -np.inf:
        return -np.inf
    return largest + float(np.log(np.exp(values - largest).sum()))


def is_bad(row: Any) -> bool:
    """A NaN or +inf among the logits."""
    return bool(np.isnan(row).any() or np.isposinf(row).any())
