"""Taking a caller's arrays: what the C ABI needs to know of them, and errors that name the argument.

Only numpy for now. Other kinds (DLPack, `__cuda_array_interface__`) will become `View`s here too; nothing
outside this module looks at an array's type.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._errors import KdtValueError, Status

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class View:
    """An array as the C ABI sees it."""

    owner: Any
    """Keeps the memory alive."""
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; 0 (packed) where a dimension has one entry or none."""


def view(
    name: str, value: Any, dtype: type[np.generic] | None, shape: Sequence[int | None], *, writable: bool = False
) -> View:
    """Checks one array. `shape` gives its expected sizes, None for any; `dtype` None is any type.

    The last dimension must be contiguous, other strides positive multiples of the element.
    """
    if not isinstance(value, np.ndarray):
        raise KdtValueError(f"argument '{name}': expected a numpy array, got {type(value).__name__}")
    if dtype is not None and value.dtype != dtype:
        raise KdtValueError(f"argument '{name}': expected dtype {np.dtype(dtype).name}, got {value.dtype}")
    if value.dtype.hasobject:
        raise KdtValueError(f"argument '{name}': expected plain numbers, got dtype {value.dtype}")
    if value.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, value.shape, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise KdtValueError(f"argument '{name}': expected shape [{expected}], got {list(value.shape)}", Status.SHAPE)
    if writable and not value.flags.writeable:
        raise KdtValueError(f"argument '{name}': expected a writable array, got a read-only one")
    item = value.itemsize
    strides = []
    for axis, (size, stride) in enumerate(zip(value.shape, value.strides, strict=True)):
        last = axis == value.ndim - 1
        if size <= 1 or value.size == 0:
            strides.append(0)
        elif stride <= 0 or stride % item or (last and stride != item):
            wanted = f"{item} (contiguous)" if last else f"a positive multiple of {item}"
            raise KdtValueError(
                f"argument '{name}': expected a stride of {wanted} bytes in dimension {axis}, got {stride}",
                Status.STRIDE,
            )
        else:
            strides.append(stride // item)
    return View(value, value.ctypes.data, value.shape, tuple(strides))


def int_vector(name: str, value: Any, size: int | None) -> View:
    """An int32 array [size]; a plain sequence of Python ints is converted."""
    if isinstance(value, (list, tuple, range)):
        value = np.array([_int32(f"{name}[{i}]", item) for i, item in enumerate(value)], np.int32)
    return view(name, value, np.int32, (size,))


def optional_int_vector(name: str, value: Any, size: int | None) -> View | None:
    return None if value is None else int_vector(name, value, size)


def optional_scalar(name: str, value: Any) -> View | None:
    """One int32 in memory: an int, or an array [1] (its content may change between launches)."""
    if value is None:
        return None
    return view(
        name, value if isinstance(value, np.ndarray) else np.array([_int32(name, value)], np.int32), np.int32, (1,)
    )


def host_int(name: str, value: Any, low: int, high: int, status: int = Status.INVALID_ARGUMENT) -> int:
    """A host-side integer in low..high."""
    number = _int(name, value)
    if not low <= number <= high:
        raise KdtValueError(f"argument '{name}': expected {low}..{high}, got {number}", status)
    return number


def pointer(array: View | None) -> int | None:
    return None if array is None else array.pointer


def _int(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise KdtValueError(f"argument '{name}': expected an integer, got {type(value).__name__}") from None


def _int32(name: str, value: Any) -> int:
    number = _int(name, value)
    if not INT32_MIN <= number <= INT32_MAX:
        raise KdtValueError(f"argument '{name}': expected a 32-bit integer, got {number}")
    return number
