"""Does a result agree with the reference? Integers exactly, floats within the project's tolerances.

topk log_probs      2e-6 + 1e-6 |lp| + 1.2e-7 |lse|
attention out       |out - ref| / |ref| <= 1e-5 (float32), 6e-4 (float16), 2.5e-3 (bfloat16), for each request
lse                 1e-5 + 1e-6 |lse|
sample              tokens may differ where the two best scores are within 1e-5 max(1, max|logit| / T)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import cases, reference
from .._floats import float_name, to_float32
from ..cases import Arguments, Results
from ..reference.sample import gumbel

NORMS = {"float32": 1e-5, "float16": 6e-4, "bfloat16": 2.5e-3}
ATTENTION = ("verify_attn", "merge_attn_states")


def expected(operation: str, arguments: Arguments) -> Results:
    """What the reference says; of attention before it is rounded to 16 bits."""
    if operation in ATTENTION:
        arguments = {**arguments, "out_dtype": np.float32}
    return cases.run(reference, operation, arguments)


def mismatch(
    operation: str, arguments: Arguments, got: Results, want: Results, *, slack: float = 1.0, rows: Any = None
) -> str | None:
    """The first disagreement in words, or None.

    slack multiplies the tolerances. rows, a boolean array, limits the comparison to some rows or requests.
    """
    for name, value in got.items():
        wanted = want[name]
        if value.shape != wanted.shape:
            return f"{name}: shape {list(value.shape)}, expected {list(wanted.shape)}"
        if operation == "sample" and name in ("tokens", "values"):
            wanted, limit = _sampled(arguments, name, value, wanted)
        else:
            limit = _limit(operation, name, arguments, want)
        if rows is not None and value.shape[: rows.ndim] == rows.shape:
            value, wanted = value[rows], wanted[rows]
            limit = limit[rows] if isinstance(limit, np.ndarray) else limit
        if name == "out" and operation in ATTENTION:
            q = arguments["q" if operation == "verify_attn" else "out_a"]
            kind = float_name(arguments.get("out_dtype") or q.dtype)
            if operation == "verify_attn":
                kind = float_name(q.dtype)  # rounding of the weights and rows, whatever the type of out
            problem = _norm(value, wanted, slack * NORMS[str(kind)])
        elif limit is None:
            problem = _exact(value, wanted)
        else:
            problem = _within(value, wanted, slack * limit)
        if problem is not None:
            return f"{name}{problem}"
    return None


def _limit(operation: str, name: str, arguments: Arguments, want: Results) -> Any:
    """The largest error allowed, a number or an array; None: exact."""
    if operation in ATTENTION and name == "lse":
        return 1e-5 + 1e-6 * np.abs(_finite(want["lse"]))
    if operation in ("topk_logprobs", "topk_merge"):
        if name == "lse":
            return 2e-6 + 1.2e-7 * np.abs(_finite(want["lse"]))
        if name == "log_probs" and not arguments.get("raw"):
            log_probs = _finite(want["log_probs"])
            return 2e-6 + 1e-6 * np.abs(log_probs) + 1.2e-7 * np.abs(_lse(operation, arguments, want))[..., None]
    return None


def _lse(operation: str, arguments: Arguments, want: Results) -> Any:
    """The lse of each row, 0 where it is not finite."""
    with np.errstate(invalid="ignore"):
        if operation == "topk_merge":
            return _finite(np.logaddexp.reduce(arguments["lse"], axis=0))
        if want["token_ids"].shape[-1] == 0:
            return np.zeros(want["token_ids"].shape[:-1])
        best = np.maximum(want["token_ids"][..., :1] - arguments.get("id_offset", 0), 0)
        logits = np.take_along_axis(to_float32(arguments["logits"]), best.astype(np.int64), axis=-1)
        return _finite((logits - want["log_probs"][..., :1])[..., 0])


def _finite(values: Any) -> Any:
    return np.where(np.isfinite(values), values, 0).astype(np.float64)


def _sampled(arguments: Arguments, name: str, got: Any, want: Any) -> tuple[Any, Any]:
    """What to expect of `sample`, and the limit: where the token got is as good as the best, that token."""
    logits = to_float32(arguments["logits"])
    heat = np.broadcast_to(arguments["temperatures"], want.shape).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        largest = np.abs(_finite(logits)).max(axis=-1, initial=0)
        limit = np.where(heat > 0, 1e-5 * np.maximum(1, largest / heat), 0)
    if name == "values":
        return want, limit
    want = want.copy()
    offset = arguments.get("id_offset", 0)
    for row in zip(*np.nonzero(got != want), strict=True):
        token, best = int(got[row]), int(want[row])
        if limit[row] == 0 or best < 0 or not 0 <= token - offset < logits.shape[-1]:
            continue
        noise = gumbel(
            np.array([token, best], np.int64),
            arguments["seed"],
            int(arguments["positions"][row]),
            int(arguments["request_ids"][row]),
        )
        scores = logits[row][[token - offset, best - offset]].astype(np.float64) / heat[row] + noise
        if abs(scores[0] - scores[1]) <= limit[row]:
            want[row] = token
    return want, None


def _exact(got: Any, want: Any) -> str | None:
    if got.dtype != want.dtype:
        return f": dtype {got.dtype}, expected {want.dtype}"
    if got.dtype.names is not None:  # bfloat16: by its bits
        got, want = got.view(np.uint16), want.view(np.uint16)
    same = (got == want) | ((got != got) & (want != want))
    return None if same.all() else _first(~same, got, want)


def _within(got: Any, want: Any, limit: Any) -> str | None:
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        good = np.where(
            np.isfinite(want), np.abs(got - want) <= limit, (got == want) | (np.isnan(got) & np.isnan(want))
        )
    return None if good.all() else _first(~good, got, want)


def _norm(got: Any, want: Any, limit: float) -> str | None:
    got, want = to_float32(got).astype(np.float64), want.astype(np.float64)
    odd = ~np.isfinite(want) | ~np.isfinite(got)
    same = ~odd | (got == want) | (np.isnan(got) & np.isnan(want))
    if not same.all():
        return _first(~same, got, want)
    got, want = (np.where(odd, 0, values).reshape(len(values), -1) for values in (got, want))
    if got.size == 0:
        return None
    error, size = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
    worst = int(np.argmax(error - limit * size))
    if error[worst] <= limit * size[worst]:
        return None
    relative = error[worst] / size[worst] if size[worst] else np.inf
    return f"[{worst}]: relative error {relative:.3g}, allowed {limit:.3g}"


def _first(bad: Any, got: Any, want: Any) -> str:
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{list(where)}: got {got[where]}, expected {want[where]} ({int(bad.sum())} of {bad.size} differ)"
