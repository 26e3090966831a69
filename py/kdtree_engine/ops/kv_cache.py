"""Operations on the KV cache."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .. import _abi
from .._arrays import Memory, View, host_int, pointer
from .._context import Context, context_or_default
from .._errors import KdtValueError, Status
from ..types import Accepted
from ._call import MAX_BUDGET, Call, checked_output, operation


def cache_struct(
    memory: Memory, name: str, cache: Any, table: View | None, *, writable: bool
) -> tuple[_abi.KvCacheStruct, list[Any], tuple[Any, ...]]:
    """The C struct of a cache, what keeps it alive, and (layers, pages, page_size, width) and dtype."""
    keep: list[Any] = [table]
    struct = _abi.KvCacheStruct()
    if not isinstance(cache, (list, tuple)):
        dimensions = len(memory.describe(name, cache).shape)
        if dimensions not in (3, 4):
            raise KdtValueError(
                f"argument '{name}': expected an array of 3 or 4 dimensions or a list of layers, got "
                f"{dimensions} dimensions"
            )
        array = memory.view(name, cache, None, (None,) * dimensions, writable=writable)
        struct.num_layers = array.shape[0] if dimensions == 4 else 1
        struct.layer_stride = array.strides[0] if dimensions == 4 else 0
        struct.data = array.pointer
    else:
        if not cache:
            raise KdtValueError(f"argument '{name}': expected at least one layer, got an empty list", Status.SHAPE)
        views = [
            memory.view(f"{name}[{i}]", layer, None, (None,) * 3, writable=writable) for i, layer in enumerate(cache)
        ]
        array = views[0]
        for i, other in enumerate(views):
            if (other.shape, other.strides, other.dtype) != (array.shape, array.strides, array.dtype):
                raise KdtValueError(
                    f"argument '{name}[{i}]': expected dtype, shape and strides of '{name}[0]' "
                    f"({array.dtype}, {list(array.shape)}, {list(array.strides)}), "
                    f"got {other.dtype}, {list(other.shape)}, {list(other.strides)}",
                    Status.SHAPE,
                )
        pointers, address = memory.pointer_array([view.pointer for view in views])
        struct.num_layers = len(views)
        struct.layer_data = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        keep += [pointers, views]
    keep.append(array)
    struct.num_pages, struct.page_size, struct.row_width = array.shape[-3:]
    struct.page_stride, struct.row_stride = array.strides[-3:-1]
    struct.element_size = array.dtype.itemsize
    if table is not None:
        # A table without columns may have no address, but NULL would mean a contiguous cache.
        struct.block_table, struct.block_table_stride = table.pointer or table.dtype.itemsize, table.strides[0]
        struct.max_pages = table.shape[1]
    return struct, keep, (struct.num_layers, *array.shape[-3:], array.dtype)


@operation
def kv_compact(
    cache: Any,
    accepted: Accepted,
    prefix_lens: Any,
    *,
    block_table: Any = None,
    out: Any = None,
    num_live: Any = None,
    return_status: bool = False,
    workspace: Any = None,
    context: Context | None = None,
    stream: Any = None,
) -> Call[Any]:
    """Keeps the KV rows of the accepted path: row prefix_len + accept_index[k] goes to row prefix_len + k.

    cache        [pages, page_size, w] or [L, pages, page_size, w] with a block_table, [B, S, w] or [L, B, S, w]
                 without; or a list of L arrays of 3 dimensions. Any dtype, page size and width.
    accepted     what `tree_accept` returned: accept_index [B, M], accept_len [B], num_slots.
    prefix_lens  [B] i32, before this step.
    block_table  optional [B, max_pages] i32 page ids; the pages of rows written belong to that request alone.
    out          optional separate destination, shaped like cache, addressed by the same block_table; it gets all
                 accepted rows. Without it the rows move in place, and nothing already in place is written.

    Returns out, or cache; with return_status=True, (that, status [B] i32). A request whose path does not ascend
    strictly within 0..N-1, or whose rows are not all in the table, is untouched: BAD_TREE.
    """
    where = context_or_default(context)
    memory = where.memory
    if not isinstance(accepted, Accepted):
        raise KdtValueError(f"argument 'accepted': expected an Accepted, got {type(accepted).__name__}")
    index = memory.view("accepted.accept_index", accepted.accept_index, np.int32, (None, None))
    batch_size, max_len = index.shape
    lengths = memory.int_vector("accepted.accept_len", accepted.accept_len, batch_size)
    lens = memory.int_vector("prefix_lens", prefix_lens, batch_size)
    live = memory.optional_scalar("num_live", num_live)
    table = None if block_table is None else memory.view("block_table", block_table, np.int32, (batch_size, None))
    struct, keep, shape = cache_struct(memory, "cache", cache, table, writable=out is None)
    if table is None and shape[1] < batch_size:
        raise KdtValueError(f"argument 'cache': expected at least {batch_size} requests, got {shape[1]}", Status.SHAPE)
    destination = None
    if out is not None:
        destination, keep_out, out_shape = cache_struct(memory, "out", out, table, writable=True)
        if out_shape != shape:
            raise KdtValueError(
                f"argument 'out': expected the layers, pages, page size, width and dtype of 'cache', "
                f"{[*shape[:-1], str(shape[-1])]}, got {[*out_shape[:-1], str(out_shape[-1])]}",
                Status.SHAPE,
            )
        keep += keep_out
    status, flags = checked_output(memory, "status", None, (batch_size,), np.int32)
    params = _abi.KvCompactParams(
        batch_size=batch_size,
        num_slots=host_int("accepted.num_slots", accepted.num_slots, 1, MAX_BUDGET + 1, Status.LIMIT),
        max_len=max_len,
        cache=ctypes.pointer(struct),
        destination=None if destination is None else ctypes.pointer(destination),
        accept_index=index.pointer,
        accept_index_stride=index.strides[0],
        accept_len=lengths.pointer,
        prefix_lens=lens.pointer,
        num_live=pointer(live),
        status=flags.pointer,
    )
    written = cache if out is None else out
    result = (written, status) if return_status else written
    return Call("kv_compact", params, result, [index, lengths, lens, live, keep, flags], where, workspace, stream)
