"""sample: Gumbel-max sampling with counter-based noise (Philox4x32-10: Salmon et al., SC 2011)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import StatusFlag
from ._rows import flat_rows, live_rows

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: Any, key: tuple[int, int]) -> Any:
    """Ten rounds on counters [n, 4] u32 with one key: [n, 4] u32."""
    c0, c1, c2, c3 = (np.asarray(counter[:, i], np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & LOW,
            (product0 >> SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & LOW,
        )
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(ids: Any, seed: int, position: int, request_id: int) -> Any:
    """The noise of tokens `ids` [n] in float64; it depends on its arguments alone."""
    blocks, block_of = np.unique(ids // 4, return_inverse=True)
    counter = np.empty((len(blocks), 4), np.uint64)
    counter[:, 0] = blocks
    counter[:, 1] = position & 0xFFFFFFFF
    counter[:, 2] = request_id & 0xFFFFFFFF
    counter[:, 3] = (request_id >> 32) & 0xFFFFFFFF
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    uniform = (words[block_of, ids % 4].astype(np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log(uniform))


def sample(
    logits: Any,
    *,
    temperatures: Any,
    seed: int,
    positions: Any,
    request_ids: Any,
    id_offset: int = 0,
    return_values: bool = False,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
) -> Any:
    """One token a row from softmax(logits / temperature); see `kdtree_engine.sample`."""
    rows, leading = flat_rows(logits)

    def per_row(value: Any) -> Any:
        """Scalars and [B] vectors serve all rows of a request."""
        value = np.asarray(value)
        return np.broadcast_to(value.reshape(value.shape + (1,) * (len(leading) - value.ndim)), leading).ravel()

    temperatures = per_row(np.asarray(temperatures, np.float32))
    positions, request_ids = per_row(positions), per_row(request_ids)
    tokens = np.full(len(rows), -1, np.int32)
    values = np.full(len(rows), -np.inf, np.float32)
    status = np.zeros(len(rows), np.int32)
    for r in range(live_rows(num_live, leading, rows_per_request)):
        row, temperature = rows[r].astype(np.float64), float(temperatures[r])
        values[r] = np.max(row, initial=-np.inf)
        if np.isnan(values[r]) or not np.isfinite(row).any() or np.isnan(temperature) or temperature < 0:
            status[r] = StatusFlag.ROW_INVALID
            continue
        if temperature == 0 or np.isposinf(values[r]):  # argmax, or the lowest id with +inf
            tokens[r] = np.flatnonzero(row == values[r])[0] + id_offset
            continue
        ids = np.flatnonzero(np.isfinite(row))  # -inf is never drawn
        scores = row[ids] / temperature + gumbel(ids + id_offset, seed, int(positions[r]), int(request_ids[r]))
        best = int(np.argmax(scores))  # the first of equal ones
        tokens[r] = ids[best] + id_offset
        with np.errstate(over="ignore"):
            values[r] = scores[best]
    results: list[Any] = [tokens.reshape(leading)]
    results += [values.reshape(leading)] if return_values else []
    results += [status.reshape(leading)] if return_status else []
    return results[0] if len(results) == 1 else tuple(results)
