"""Attention over trees, and the merging of its results."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .. import _abi
from .._arrays import View, pointer, row_stride
from .._context import Context, context_or_default
from .._errors import KdtValueError, Status
from .._floats import float_name
from ..types import Tree
from ._call import Call, checked_output, count_rows, given_outputs, operation, results
from .kv_cache import cache_struct
from .trees import tree_struct

_QK_DIM, _V_DIM = 576, 512

_LSE_BASES = {"e": 0, "2": 1}


def _lse_base(lse_base: Any) -> int:
    if not isinstance(lse_base, str) or lse_base not in _LSE_BASES:
        raise KdtValueError(f"argument 'lse_base': expected 'e' or '2', got {lse_base!r}")
    return _LSE_BASES[lse_base]


@operation
def verify_attn(
    q: Any,
    kv_cache: Any,
    tree: Tree | None,
    prefix_lens: Any,
    *,
    scale: float,
    block_table: Any = None,
    kv_starts: Any = None,
    lse_base: str = "e",
    out_dtype: Any = None,
    num_live: Any = None,
    return_status: bool = False,
    out: Any = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """Attention of a tree's queries over prefix and tree in absorbed MLA (DeepSeek-V2, arXiv 2405.04434).

    q            [B, Q, H, 576] float32, float16 or bfloat16; H <= 128; 576 = 512 latent + 64 rope.
    kv_cache     [pages, page_size, 576] with a block_table, page_size a power of two <= 256; or [B, S, 576]. Type of q.
                 One KV head: a row is the key, its first 512 values the value.
    tree         reads visibility [B, N, ceil(N/64)] and node_count [B], Q <= N; either may be None: then query i sees
                 slots 0..i, or there are Q nodes. None: both.
    prefix_lens  [B] i32. Logical row prefix_len + j is slot j of the tree.
    scale        of the scores; for Kimi K2.x 0.144679626.
    block_table  optional [B, max_pages] i32 page ids.
    kv_starts    optional [B] i32: prefix rows before it are unseen; = prefix_lens leaves the tree alone.
    lse_base     "e" or "2".
    out_dtype    q's dtype (default) or float32.

    Returns (out [B, Q, H, 512], lse [B, Q, H] f32) and, with return_status=True, status [B]; `out` is a tuple of the
    same. A query >= node_count, or one that sees nothing, gets 0 and -inf. What no query may see never matters.
    CLAMPED: a length or count was out of range, or a page that a query must see is not there (its rows are unseen).
    """
    where = context_or_default(context)
    memory = where.memory
    queries, code = memory.float_view("q", q, (None, None, None, _QK_DIM))
    batch_size, num_queries, num_heads, _ = queries.shape
    table = None if block_table is None else memory.view("block_table", block_table, np.int32, (batch_size, None))
    dimensions = len(memory.describe("kv_cache", kv_cache).shape)
    if dimensions != 3:
        raise KdtValueError(f"argument 'kv_cache': expected an array of 3 dimensions, got {dimensions} dimensions")
    rows, kv_code = memory.float_view("kv_cache", kv_cache, (None, None, _QK_DIM))
    if kv_code != code:
        raise KdtValueError(f"argument 'kv_cache': expected q's dtype {queries.dtype}, got {rows.dtype}")
    cache, keep, shape = cache_struct(memory, "kv_cache", kv_cache, table, writable=False)
    if table is None and shape[1] < batch_size:
        raise KdtValueError(
            f"argument 'kv_cache': expected at least {batch_size} requests, got {shape[1]}", Status.SHAPE
        )
    lens = memory.int_vector("prefix_lens", prefix_lens, batch_size)
    starts = memory.optional_int_vector("kv_starts", kv_starts, batch_size)
    live = memory.optional_scalar("num_live", num_live)
    struct = None
    if tree is not None:
        if not isinstance(tree, Tree):
            raise KdtValueError(f"argument 'tree': expected a Tree or None, got {type(tree).__name__}")
        fields = [field for field in ("visibility", "node_count") if getattr(tree, field) is not None]
        slots = num_queries
        if tree.visibility is not None:
            slots = memory.view("tree.visibility", tree.visibility, np.uint64, (batch_size, None, None)).shape[1]
        struct, views = tree_struct(memory, "tree", tree, batch_size, slots, fields, writable=False)
        keep.append(views)

    count = 2 + bool(return_status)
    outs = given_outputs(out, count)
    result_dtype = queries.dtype if out_dtype is None else _float_dtype(out_dtype)
    out_shape = (batch_size, num_queries, num_heads, _V_DIM)
    if outs[0] is None:
        outs[0] = memory.empty(out_shape, result_dtype)
    result, result_code = memory.float_view("out[0]", outs[0], out_shape, writable=True)
    if out_dtype is not None and float_name(result.dtype) != float_name(result_dtype):
        raise KdtValueError(f"argument 'out[0]': expected dtype {result_dtype}, got {result.dtype}")
    if outs[1] is None:
        outs[1] = memory.empty((batch_size, num_queries, num_heads), np.float32)
    sums_shape = (batch_size, num_queries, num_heads)
    sums = memory.view("out[1]", outs[1], np.float32, sums_shape, writable=True, contiguous_last=False)
    status = checked_output(memory, "out[2]", outs[-1], (batch_size,), np.int32) if return_status else None
    params = _abi.VerifyAttnParams(
        batch_size=batch_size,
        num_queries=num_queries,
        num_heads=num_heads,
        qk_dim=_QK_DIM,
        v_dim=_V_DIM,
        q_dtype=code,
        kv_dtype=kv_code,
        out_dtype=result_code,
        lse_base=_lse_base(lse_base),
        scale=_float("scale", scale),
        q=queries.pointer,
        q_stride=queries.strides[0],
        q_row_stride=queries.strides[1],
        q_head_stride=queries.strides[2],
        cache=ctypes.pointer(cache),
        prefix_lens=lens.pointer,
        kv_starts=pointer(starts),
        tree=None if struct is None else ctypes.pointer(struct),
        num_live=pointer(live),
        out=result.pointer,
        out_stride=result.strides[0],
        out_row_stride=result.strides[1],
        out_head_stride=result.strides[2],
        lse=sums.pointer,
        lse_stride=sums.strides[0],
        lse_row_stride=sums.strides[1],
        lse_head_stride=sums.strides[2],
        status=status and status[1].pointer,
    )
    keep += [queries, lens, starts, live, result, sums, status]
    return Call("verify_attn", params, results(outs[0], outs[1], status and status[0]), keep, where, workspace, stream)


@operation
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
    out: Any = None,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """Attention over two disjoint sets of keys from the results over each (FlashAttention, arXiv 2205.14135).

    out_a, out_b  [..., H, D] float32, float16 or bfloat16, each of its own type.
    lse_a, lse_b  [..., H] f32 in base e or 2; -inf and +inf both mean an empty side, whose out is never used.
    out_dtype     default out_a's dtype.
    out           a tuple (out, lse) to write into; it may be (out_a, lse_a) or (out_b, lse_b).

    Returns (out [..., H, D], lse [..., H]). Both sides empty: 0, -inf. NaN propagates.
    """
    where = context_or_default(context)
    memory = where.memory
    a, a_code = memory.float_view("out_a", out_a, (..., None, None))
    shape = a.shape
    b, b_code = memory.float_view("out_b", out_b, shape)
    a_lse = memory.view("lse_a", lse_a, np.float32, shape[:-1], contiguous_last=False)
    b_lse = memory.view("lse_b", lse_b, np.float32, shape[:-1], contiguous_last=False)
    if out is None:
        out = (
            memory.empty(shape, a.dtype if out_dtype is None else _float_dtype(out_dtype)),
            memory.empty(shape[:-1], np.float32),
        )
    elif not isinstance(out, (tuple, list)) or len(out) != 2:
        raise KdtValueError("argument 'out': expected a tuple (out, lse)")
    result, result_code = memory.float_view("out[0]", out[0], shape, writable=True)
    if out_dtype is not None and float_name(result.dtype) != float_name(_float_dtype(out_dtype)):
        raise KdtValueError(f"argument 'out[0]': expected dtype {_float_dtype(out_dtype)}, got {result.dtype}")
    sums = memory.view("out[1]", out[1], np.float32, shape[:-1], writable=True, contiguous_last=False)
    live = memory.optional_scalar("num_live", num_live)

    def strides(name: str, array: View, heads_axis: int) -> tuple[int, int]:
        """From row to row and from head to head."""
        upto = heads_axis + 1
        return row_stride(name, array.shape[:upto], array.strides[:upto]), array.strides[heads_axis]

    axis = len(shape) - 2
    fields: dict[str, Any] = {}
    for prefix, name, array in (("a", "out_a", a), ("b", "out_b", b), ("out", "out[0]", result)):
        fields[f"{prefix}_row_stride"], fields[f"{prefix}_head_stride"] = strides(name, array, axis)
    for prefix, name, array in (("a_lse", "lse_a", a_lse), ("b_lse", "lse_b", b_lse), ("lse", "out[1]", sums)):
        fields[f"{prefix}_row_stride"], fields[f"{prefix}_head_stride"] = strides(name, array, axis)
    num_rows, per_request = count_rows(shape[:-2], rows_per_request)
    params = _abi.MergeAttnStatesParams(
        num_rows=num_rows,
        num_heads=shape[-2],
        v_dim=shape[-1],
        lse_base=_lse_base(lse_base),
        a_dtype=a_code,
        b_dtype=b_code,
        out_dtype=result_code,
        rows_per_request=per_request,
        a=a.pointer,
        a_lse=a_lse.pointer,
        b=b.pointer,
        b_lse=b_lse.pointer,
        out=result.pointer,
        lse=sums.pointer,
        num_live=pointer(live),
        **fields,
    )
    keep = [a, b, a_lse, b_lse, result, sums, live]
    return Call("merge_attn_states", params, (out[0], out[1]), keep, where, workspace, stream)


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise KdtValueError(f"argument '{name}': expected a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise KdtValueError(f"argument '{name}': expected a finite number, got {value}") from None


def _float_dtype(value: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(value) if isinstance(value, (str, type, np.dtype)) else None
    except TypeError:
        dtype = None
    if dtype is None or float_name(dtype) is None:
        raise KdtValueError(f"argument 'out_dtype': expected float32, float16 or bfloat16, got {value!r}")
    return dtype
