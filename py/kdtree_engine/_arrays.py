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
from ._floats import CODES, float_name

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
    name: str,
    value: Any,
    dtype: type[np.generic] | None,
    shape: Sequence[int | None],
    *,
    writable: bool = False,
    contiguous_last: bool = True,
) -> View:
    """Checks one array. `shape` gives its expected sizes, None for any; `dtype` None is any type.

    Strides must be positive multiples of the element, and that of the last dimension one element, unless
    contiguous_last is False.
    """
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise KdtValueError(f"argument '{name}': expected a numpy array, got {type(value).__name__}")
    if dtype is not None and value.dtype != dtype:
        raise KdtValueError(f"argument '{name}': expected dtype {np.dtype(dtype).name}, got {value.dtype}")
    if value.dtype.hasobject:
        raise KdtValueError(f"argument '{name}': expected plain numbers, got dtype {value.dtype}")
    if value.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, value.shape, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise KdtValueError(f"argument '{name}': expected shape [{expected}], got {list(value.shape)}", Status.SHAPE)
    if any(size > INT32_MAX for size in value.shape):
        raise KdtValueError(f"argument '{name}': expected dimensions below 2^31, got {list(value.shape)}", Status.LIMIT)
    if writable and not value.flags.writeable:
        raise KdtValueError(f"argument '{name}': expected a writable array, got a read-only one")
    item = value.itemsize
    strides = []
    for axis, (size, stride) in enumerate(zip(value.shape, value.strides, strict=True)):
        last = contiguous_last and axis == value.ndim - 1
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


def float_view(name: str, value: Any, shape: Sequence[int | None], *, writable: bool = False) -> tuple[View, int]:
    """A float32, float16 or bfloat16 array, and its KDT_* code."""
    array = view(name, value, None, shape, writable=writable)
    kind = float_name(value.dtype)
    if kind is None or not value.dtype.isnative:
        raise KdtValueError(f"argument '{name}': expected float32, float16 or bfloat16, got {value.dtype}")
    return array, CODES[kind]


def rows_view(name: str, value: Any) -> tuple[View, int, int]:
    """[..., V] floats as rows: the view, its code and the distance from row to row in elements.

    The leading dimensions must be evenly strided, as if they were one.
    """
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        got = "0 dimensions" if isinstance(value, np.ndarray) else type(value).__name__
        raise KdtValueError(f"argument '{name}': expected an array [..., V], got {got}")
    array, code = float_view(name, value, (None,) * value.ndim)
    return array, code, row_stride(name, array)


def row_stride(name: str, array: View) -> int:
    """Elements from row to row of [..., n] when the leading dimensions are strided as if they were one; 0: packed."""
    stride = 0
    for size, step in reversed(list(zip(array.shape[:-1], array.strides[:-1], strict=True))):
        if size <= 1 or step == 0:
            continue
        if stride == 0:
            stride, expected = step, step * size
        elif step != expected:
            raise KdtValueError(
                f"argument '{name}': expected evenly strided rows, got strides {list(array.strides)} for shape "
                f"{list(array.shape)}",
                Status.STRIDE,
            )
        else:
            expected = step * size
    return stride


def int_vector(name: str, value: Any, size: int | None) -> View:
    """An int32 array [size]; a plain sequence of Python ints is converted."""
    if isinstance(value, (list, tuple, range)):
        value = np.array([_int32(f"{name}[{i}]", item) for i, item in enumerate(value)], np.int32)
    elif not isinstance(value, np.ndarray):
        got = type(value).__name__
        raise KdtValueError(f"argument '{name}': expected an int32 array or a list of ints, got {got}")
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
