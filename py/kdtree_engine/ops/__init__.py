"""The operations on a caller's arrays, through the C ABI.

Shapes: B requests, D draft depth, K candidates a row, N = budget + 1 node slots (slot 0 is the root), M tokens
an accepted path may hold. Types are exact: an array of another dtype is an error, not a copy; vectors of
per-request integers may also be lists of ints. Arrays may be strided in all but the last dimension.

Errors are `KdtError`s that name the argument (`KdtValueError`, a ValueError, where the caller was wrong). Bad
numbers inside arrays are no error: they set `StatusFlag`s in the result's `status`, for that request alone.

Common arguments:

num_live    optional int, or i32 array [1] read at each launch: requests >= num_live are dead and get padding.
out         optional result to write into instead of a new one, all arrays preallocated.
workspace   optional u8 array of at least `workspace_size(...)` bytes, to be used instead of a new one.
context     optional `Context`; the default is the CPU with all threads.
stream      on a GPU: None (the default stream), a handle, or an object with `cuda_stream` (torch's or our `Stream`).

With a context of the backend "cpu" arrays are numpy's. With one of "cuda" they are in that GPU's memory:
`DeviceArray`s, or anything with `__cuda_array_interface__` (torch's tensors, cupy's arrays); new ones are
`DeviceArray`s. Short lists of ints and numbers are still taken, and uploaded. A call on a GPU returns when the work is
on the stream, not when it is done; `DeviceArray.numpy()` waits for it.

Each operation has `f.prepare`: with the same arguments it gives a `Call`, whose `launch()` is one call of the C ABI, as
often as one likes on the same arrays, and whose `result` is what `f` returns. On a GPU that is what is fast, and what
can be captured in a graph: `f` itself makes new arrays and scratch, and waits for the device to free the scratch.
"""

from __future__ import annotations

from ._call import MAX_BUDGET, MAX_CANDIDATES, MAX_DEPTH, Call, Operation
from .attention import merge_attn_states, verify_attn
from .kv_cache import kv_compact
from .trees import (
    tree_accept,
    tree_build,
    tree_build_workspace_size,
    tree_from_parents,
    tree_from_visibility,
)
from .vocabulary import argmax, sample, topk_logprobs, topk_merge

__all__ = [
    "MAX_BUDGET",
    "MAX_CANDIDATES",
    "MAX_DEPTH",
    "Call",
    "Operation",
    "argmax",
    "kv_compact",
    "merge_attn_states",
    "sample",
    "topk_logprobs",
    "topk_merge",
    "tree_accept",
    "tree_build",
    "tree_build_workspace_size",
    "tree_from_parents",
    "tree_from_visibility",
    "verify_attn",
]
