"""One call of the C ABI, and what the operations share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arrays import (
    View,
    host_int,
    view,
)
from .._context import Context, check, context_or_default
from .._library import load

MAX_BUDGET = 1024
MAX_DEPTH = 64
MAX_CANDIDATES = 1024


class Call:
    """One operation with all its arguments settled: `launch()` is a single call of the C ABI.

    The arrays' contents may change between launches; the arrays themselves may not.
    """

    def __init__(
        self,
        name: str,
        params: ctypes.Structure,
        result: Any,
        keep: Sequence[Any],
        context: Context | None,
        workspace: Any,
    ) -> None:
        library = load()
        self.result = result
        self._context = context_or_default(context)
        self._function = getattr(library, f"kdt_{name}")
        self._params = params
        size = ctypes.c_size_t()
        check(getattr(library, f"kdt_{name}_workspace_size")(self._context.handle, params, size))
        self.workspace_size = size.value
        if workspace is None:
            workspace = np.empty(size.value, np.uint8)
        scratch = view("workspace", workspace, np.uint8, (None,), writable=True)
        self._arguments = (self._context.handle, params, scratch.pointer, scratch.shape[0], None)
        self._keep = (*keep, scratch)

    def launch(self) -> None:
        status = self._function(*self._arguments)
        if status != 0:
            check(status)


def count_rows(leading: Sequence[int], rows_per_request: int | None) -> tuple[int, int]:
    """R and rows_per_request; by default the first leading dimension counts requests."""
    num_rows = math.prod(leading)
    if rows_per_request is None:
        return num_rows, max(math.prod(leading[1:]), 1)
    return num_rows, host_int("rows_per_request", rows_per_request, 1, 2**31 - 1)


def checked_output(name: str, out: Any, shape: Sequence[int], dtype: Any) -> tuple[Any, View]:
    """A given output checked, or a new one."""
    array = np.empty(tuple(shape), dtype) if out is None else out
    return array, view(name, array, dtype, shape, writable=True)


def results(*results: Any) -> Any:
    """The results that were asked for: one alone, or a tuple."""
    wanted = tuple(result for result in results if result is not None)
    return wanted[0] if len(wanted) == 1 else wanted
