"""One call of the C ABI, and what the operations share."""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from .._arrays import Memory, View, host_int
from .._context import Context, check
from .._errors import KdtValueError
from .._library import load

MAX_BUDGET = 1024
MAX_DEPTH = 64
MAX_CANDIDATES = 1024


R = TypeVar("R")
P = ParamSpec("P")


class Call(Generic[R]):
    """One operation with all its arguments settled: `launch()` is a single call of the C ABI.

    The arrays' contents may change between launches; the arrays themselves may not. On a GPU a launch puts the
    operation on a stream and does not wait for it. It may be captured in a graph, which then needs this object alive.
    """

    def __init__(
        self,
        name: str,
        params: ctypes.Structure,
        result: R,
        keep: Sequence[Any],
        context: Context,
        workspace: Any,
        stream: Any,
    ) -> None:
        library = load()
        self.result = result
        self._context = context
        self._stream = context.memory.stream(stream)
        self._function = getattr(library, f"kdt_{name}")
        self._params = params
        size = ctypes.c_size_t()
        check(getattr(library, f"kdt_{name}_workspace_size")(self._context.handle, params, size))
        self.workspace_size = size.value
        if workspace is None:
            workspace = context.memory.empty((size.value,), np.uint8)
        scratch = context.memory.view("workspace", workspace, np.uint8, (None,), writable=True)
        self._arguments = (context.handle, params, scratch.pointer, scratch.shape[0])
        self._keep = (*keep, scratch)

    def launch(self, stream: Any = None) -> None:
        """One call, on this stream instead of the one it was prepared with."""
        handle = self._stream if stream is None else self._context.memory.stream(stream)
        status = self._function(*self._arguments, handle)
        if status != 0:
            check(status)


class Operation(Protocol[P, R]):
    """A function that runs an operation; `prepare` takes the same arguments and stops short of the launch."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...


def operation(prepare: Callable[P, Call[R]]) -> Operation[P, R]:
    """Makes the public function from one that settles the arguments and returns a `Call`."""

    @functools.wraps(prepare)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        call = prepare(*args, **kwargs)
        call.launch()
        return call.result

    signature = inspect.signature(prepare)
    returned = re.sub(r"^Call\[(.*)\]$", r"\1", str(signature.return_annotation))
    run.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    run.prepare = prepare  # type: ignore[attr-defined]
    return cast("Operation[P, R]", run)


def count_rows(leading: Sequence[int], rows_per_request: int | None) -> tuple[int, int]:
    """R and rows_per_request; by default the first leading dimension counts requests."""
    num_rows = math.prod(leading)
    if rows_per_request is None:
        return num_rows, max(math.prod(leading[1:]), 1)
    return num_rows, host_int("rows_per_request", rows_per_request, 1, 2**31 - 1)


def given_outputs(out: Any, count: int) -> list[Any]:
    """The arrays of a tuple `out`, or as many times None."""
    if out is None:
        return [None] * count
    if not isinstance(out, (tuple, list)) or len(out) != count:
        got = f"{len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise KdtValueError(f"argument 'out': expected a tuple of {count} arrays, got {got}")
    return list(out)


def checked_output(memory: Memory, name: str, out: Any, shape: Sequence[int], dtype: Any) -> tuple[Any, View]:
    """A given output checked, or a new one."""
    array = memory.empty(shape, dtype) if out is None else out
    return array, memory.view(name, array, dtype, shape, writable=True)


def results(*results: Any) -> Any:
    """The results that were asked for: one alone, or a tuple."""
    wanted = tuple(result for result in results if result is not None)
    return wanted[0] if len(wanted) == 1 else wanted
