"""Operations on rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _abi
from .._arrays import Memory, View, host_int, is_array, is_packed, pointer, row_stride
from .._context import Context, context_or_default
from .._errors import KdtValueError, Status
from ._call import MAX_CANDIDATES, Call, checked_output, count_rows, given_outputs, operation, results


@operation
def topk_logprobs(
    logits: Any,
    k: int,
    *,
    raw: bool = False,
    id_offset: int = 0,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
    out: Any = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """The k most likely tokens of each row of logits, and their log-probs.

    logits            [..., V] float32, float16 or bfloat16, any V < 2^31.
    k                 0..1024; where k > V the rest is padding, (-inf, -1).
    raw               for one shard of a vocabulary: logits instead of log-probs, and the shard's lse.
    id_offset         added to every id.
    rows_per_request  rows that share one request for num_live; default: all but the first leading dimension.

    Returns (log_probs [..., k] f32, token_ids [..., k] i32), raw: (logits, token_ids, lse [...] f64); and
    status [...] i32 with return_status=True. `out` is a tuple of the same.

    Descending logits, equal ones (+0 = -0) in ascending id; log_prob = min(0, f32(logit) - f32(lse)). A row with a
    NaN or +inf, or nothing finite, is ROW_INVALID and all (-inf, -1); raw, its lse is NaN, and a shard without
    anything finite is legal with lse -inf.
    """
    where = context_or_default(context)
    memory = where.memory
    rows, code, stride = memory.rows_view("logits", logits)
    k = host_int("k", k, 0, MAX_CANDIDATES, Status.LIMIT)
    if not isinstance(raw, (bool, np.bool_)):
        raise KdtValueError(f"argument 'raw': expected a bool, got {type(raw).__name__}")
    leading = rows.shape[:-1]
    num_rows, per_request = count_rows(leading, rows_per_request)
    live = memory.optional_scalar("num_live", num_live)
    outs = given_outputs(out, 2 + bool(raw) + bool(return_status))
    values, values_view = checked_output(memory, "out[0]", outs[0], (*leading, k), np.float32)
    ids, ids_view = checked_output(memory, "out[1]", outs[1], (*leading, k), np.int32)
    lse = checked_output(memory, "out[2]", outs[2], leading, np.float64) if raw else None
    status = checked_output(memory, f"out[{len(outs) - 1}]", outs[-1], leading, np.int32) if return_status else None
    params = _abi.TopkLogprobsParams(
        num_rows=num_rows,
        vocab_size=rows.shape[-1],
        num_candidates=k,
        logits_dtype=code,
        logits=rows.pointer,
        logits_stride=stride,
        raw=int(raw),
        id_offset=host_int("id_offset", id_offset, 0, 2**31 - 1),
        log_probs=values_view.pointer,
        log_probs_stride=row_stride("out[0]", values_view.shape, values_view.strides),
        token_ids=ids_view.pointer,
        token_ids_stride=row_stride("out[1]", ids_view.shape, ids_view.strides),
        lse=lse and lse[1].pointer,
        num_live=pointer(live),
        rows_per_request=per_request,
        status=status and status[1].pointer,
    )
    keep = [rows, live, values_view, ids_view, lse, status]
    return Call(
        "topk_logprobs",
        params,
        results(values, ids, lse and lse[0], status and status[0]),
        keep,
        where,
        workspace,
        stream,
    )


@operation
def topk_merge(
    logits: Any,
    token_ids: Any,
    lse: Any,
    *,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
    out: Any = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """Joins the raw top-k of S shards of a vocabulary into the top-k log-probs of the whole.

    logits, token_ids  [S, ..., k] f32 and i32, lse [S, ...] f64: what `topk_logprobs(raw=True)` gave on each shard
                       with its id_offset. S <= 256.

    Returns (log_probs [..., k], token_ids [..., k]) and, with return_status=True, status [...]. Entries are ordered
    by (logit, id), padding last; of entries with the same id the first counts. ids are exactly those of one shard.
    """
    where = context_or_default(context)
    memory = where.memory
    values = memory.view("logits", logits, np.float32, (..., None, None))
    num_shards, *leading, k = values.shape
    ids = memory.view("token_ids", token_ids, np.int32, values.shape)
    sums = memory.view("lse", lse, np.float64, values.shape[:-1])
    num_rows, per_request = count_rows(leading, rows_per_request)
    live = memory.optional_scalar("num_live", num_live)
    outs = given_outputs(out, 2 + bool(return_status))
    log_probs, log_probs_view = checked_output(memory, "out[0]", outs[0], (*leading, k), np.float32)
    out_ids, out_ids_view = checked_output(memory, "out[1]", outs[1], (*leading, k), np.int32)
    status = checked_output(memory, "out[2]", outs[-1], leading, np.int32) if return_status else None

    def strides(name: str, array: View) -> tuple[int, int]:
        """From shard to shard and from row to row."""
        return array.strides[0], row_stride(name, array.shape[1:], array.strides[1:])

    values_stride, values_row_stride = strides("logits", values)
    ids_stride, ids_row_stride = strides("token_ids", ids)
    params = _abi.TopkMergeParams(
        num_shards=num_shards,
        num_rows=num_rows,
        num_candidates=k,
        rows_per_request=per_request,
        logits=values.pointer,
        logits_stride=values_stride,
        logits_row_stride=values_row_stride,
        shard_token_ids=ids.pointer,
        shard_token_ids_stride=ids_stride,
        shard_token_ids_row_stride=ids_row_stride,
        shard_lse=sums.pointer,
        shard_lse_stride=sums.strides[0],
        log_probs=log_probs_view.pointer,
        log_probs_stride=row_stride("out[0]", log_probs_view.shape, log_probs_view.strides),
        token_ids=out_ids_view.pointer,
        token_ids_stride=row_stride("out[1]", out_ids_view.shape, out_ids_view.strides),
        num_live=pointer(live),
        status=status and status[1].pointer,
    )
    keep = [values, ids, sums, live, log_probs_view, out_ids_view, status]
    return Call("topk_merge", params, results(log_probs, out_ids, status and status[0]), keep, where, workspace, stream)


@operation
def argmax(
    logits: Any,
    *,
    id_offset: int = 0,
    return_values: bool = False,
    num_live: Any = None,
    rows_per_request: int | None = None,
    return_status: bool = False,
    out: Any = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """The most likely token of each row [..., V]; of equal logits (+0 = -0) the lowest id.

    Returns tokens [...] i32; with return_values=True also the largest logits [...] f32 (to join shards), with
    return_status=True status [...]. A row with a NaN or nothing finite is ROW_INVALID: token -1. `out` is the tokens
    array, or a tuple when more is returned.
    """
    where = context_or_default(context)
    memory = where.memory
    rows, code, stride = memory.rows_view("logits", logits)
    params = _abi.ArgmaxParams(id_offset=host_int("id_offset", id_offset, 0, 2**31 - 1))
    returns = (return_values, return_status)
    run_with = (where, workspace, stream)
    return _tokens_of_rows("argmax", params, rows, code, stride, [], returns, num_live, rows_per_request, out, run_with)


@operation
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
    out: Any = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """One token a row [..., V] from softmax(logits / temperature), by Gumbel-max.

    temperatures  f32, a number, [B] or [...]: 0 is argmax, +inf uniform over the finite; negative or NaN: token -1.
    seed          0..2^64-1.
    positions     i32 [...] of the token to be emitted: for the slots of a tree, tree.positions + 1.
    request_ids   i64, a number, [B] or [...].

    With `sample.prepare`, full contiguous arrays are read at each launch; what is spread over rows is copied once (in a
    GPU's memory by way of the host, which waits for the device).

    The noise depends on (seed, request id, position, token id) alone, so a result depends on neither batch nor slot,
    and the samples at a tree's nodes equal a chain's at the same positions; kdtree.h gives the formula to the bit.
    Returns as `argmax`; values are the winning scores.
    """
    where = context_or_default(context)
    memory = where.memory
    rows, code, stride = memory.rows_view("logits", logits)
    leading = rows.shape[:-1]
    heat = _per_row(memory, "temperatures", temperatures, np.float32, leading)
    places = _per_row(memory, "positions", positions, np.int32, leading)
    requests = _per_row(memory, "request_ids", request_ids, np.int64, leading)
    params = _abi.SampleParams(
        seed=host_int("seed", seed, 0, 2**64 - 1),
        temperatures=heat.pointer,
        positions=places.pointer,
        request_ids=requests.pointer,
        id_offset=host_int("id_offset", id_offset, 0, 2**31 - 1),
    )
    keep = [heat, places, requests]
    returns = (return_values, return_status)
    run_with = (where, workspace, stream)
    return _tokens_of_rows(
        "sample", params, rows, code, stride, keep, returns, num_live, rows_per_request, out, run_with
    )


def _numbers(name: str, value: Any, dtype: type[np.generic]) -> Any:
    """Python numbers as an array of `dtype`, if they are that: none out of range, no float for an integer."""
    wanted = np.dtype(dtype)
    try:
        numbers = np.array(value)
    except ValueError as error:  # rows of different lengths
        raise KdtValueError(f"argument '{name}': expected {wanted.name} numbers, got {value!r} ({error})") from None
    if numbers.size == 0:
        return numbers.astype(dtype)
    if numbers.dtype.kind in ("iu" if wanted.kind == "i" else "iuf"):
        with np.errstate(over="ignore"):
            converted = numbers.astype(dtype)
        if wanted.kind == "i":
            same = np.array_equal(converted, numbers)
        else:  # not to be taken for infinite, or for 0
            same = not ((np.isinf(converted) & np.isfinite(numbers)) | ((converted == 0) & (numbers != 0))).any()
        if same:
            return converted
    raise KdtValueError(f"argument '{name}': expected {wanted.name} numbers, got {value!r}")


def _per_row(memory: Memory, name: str, value: Any, dtype: type[np.generic], leading: tuple[int, ...]) -> View:
    """One number a row, contiguous. A number, or one for each of the first dimensions ([B]), serves all their rows.

    A full contiguous array is used as it is, so that a later launch sees its new contents.
    """
    if is_array(name, value):
        array = memory.view(name, value, dtype, (...,))
        given = array.shape
    else:
        numbers = _numbers(name, value, dtype)
        array, given = None, numbers.shape
    if given != leading[: len(given)]:
        raise KdtValueError(
            f"argument '{name}': expected shape {list(leading)} or leading dimensions of it, got {list(given)}",
            Status.SHAPE,
        )
    if array is not None:
        if given == leading and is_packed(array):
            return array
        numbers = memory.read(array)
    spread = np.broadcast_to(numbers.reshape(given + (1,) * (len(leading) - len(given))), leading)
    return memory.view(name, memory.put(np.asarray(spread, order="C")), dtype, leading)


def _tokens_of_rows(
    name: str,
    params: Any,
    rows: View,
    code: int,
    stride: int,
    keep: list[Any],
    returns: tuple[bool, bool],
    num_live: Any,
    rows_per_request: int | None,
    out: Any,
    run_with: tuple[Context, Any, Any],
) -> Call[Any]:
    """What argmax and sample share: rows in, one token a row out."""
    return_values, return_status = returns
    memory = run_with[0].memory
    leading = rows.shape[:-1]
    params.num_rows, params.rows_per_request = count_rows(leading, rows_per_request)
    live = memory.optional_scalar("num_live", num_live)
    count = 1 + bool(return_values) + bool(return_status)
    outs = [out] if count == 1 else given_outputs(out, count)

    def output(index: int, dtype: Any) -> tuple[Any, View]:
        what = "out" if count == 1 else f"out[{index}]"
        array, checked = checked_output(memory, what, outs[index], leading, dtype)
        if not is_packed(checked):
            raise KdtValueError(f"argument '{what}': expected a contiguous array", Status.STRIDE)
        return array, checked

    tokens = output(0, np.int32)
    values = output(1, np.float32) if return_values else None
    status = output(count - 1, np.int32) if return_status else None
    params.vocab_size, params.logits_dtype = rows.shape[-1], code
    params.logits, params.logits_stride = rows.pointer, stride
    params.tokens = tokens[1].pointer
    params.values = values and values[1].pointer
    params.num_live = pointer(live)
    params.status = status and status[1].pointer
    result = results(tokens[0], values and values[0], status and status[0])
    return Call(name, params, result, [rows, live, tokens, values, status, keep], *run_with)
