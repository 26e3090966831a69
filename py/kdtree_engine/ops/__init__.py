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

Each operation has `f.prepare`: with the same arguments it gives a `Call`, whose `launch()` is one call of the C ABI, as
often as one likes on the same arrays, and whose `result` is what `f` returns.
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
