"""Arrays: taking a caller's, with errors that name the argument, and making new ones, where a context has its own.

A `Memory` is the host's or a GPU's. Its `describe` is the one place that looks at what kind of array a value is: numpy
in host memory; in a GPU's `DeviceArray` and anything with `__cuda_array_interface__` (torch, cupy). Other kinds
(DLPack) become another branch there.
"""

from __future__ import annotations

import abc
import ctypes
import math
import operator
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from ._cuda import DeviceArray, device, stream_handle
from ._errors import KdtValueError, Status
from ._floats import CODES, float_name
from .kdtr import bfloat16

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

Shape = Sequence[int | EllipsisType | None]
"""Expected sizes, None for any; (..., None) is any dimensions and one more."""


class Described(NamedTuple):
    """An array of whatever kind."""

    owner: Any
    """Keeps the memory alive."""
    pointer: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    writable: bool


class View(NamedTuple):
    """A checked array as the C ABI sees it."""

    owner: Any
    """Keeps the memory alive."""
    pointer: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; 0 (packed) where a dimension has one entry or none."""


class Memory(abc.ABC):
    """Where the arrays of a call live."""

    @abc.abstractmethod
    def describe(self, name: str, value: Any) -> Described:
        """What an argument is; an error when it is no array in this memory."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new array, uninitialised."""

    @abc.abstractmethod
    def put(self, values: Any) -> Any:
        """A numpy array of ours in this memory: a copy, or itself."""

    @abc.abstractmethod
    def read(self, array: View) -> Any:
        """What an array holds, as a numpy array."""

    @abc.abstractmethod
    def pointer_array(self, pointers: Sequence[int]) -> tuple[Any, int]:
        """Pointers in this memory: what keeps them alive, and their address."""

    @abc.abstractmethod
    def stream(self, stream: Any) -> int | None:
        """The handle of the stream of a call."""

    def view(
        self,
        name: str,
        value: Any,
        dtype: type[np.generic] | None,
        shape: Shape,
        *,
        writable: bool = False,
        contiguous_last: bool = True,
    ) -> View:
        """Checks one array. `dtype` None is any type.

        Strides must be positive multiples of the element, and that of the last dimension one element, unless
        contiguous_last is False.
        """
        array = self.describe(name, value)
        if dtype is not None and array.dtype != dtype:
            raise KdtValueError(f"argument '{name}': expected dtype {np.dtype(dtype).name}, got {array.dtype}")
        if array.dtype.hasobject:
            raise KdtValueError(f"argument '{name}': expected plain numbers, got dtype {array.dtype}")
        _check_shape(name, array.shape, shape)
        if any(size > INT32_MAX for size in array.shape) and name != "workspace":
            raise KdtValueError(
                f"argument '{name}': expected dimensions below 2^31, got {list(array.shape)}", Status.LIMIT
            )
        if array.dtype.itemsize == 0:
            raise KdtValueError(f"argument '{name}': expected elements of some bytes, got dtype {array.dtype}")
        if writable and not array.writable:
            raise KdtValueError(f"argument '{name}': expected a writable array, got a read-only one")
        item, empty = array.dtype.itemsize, 0 in array.shape
        strides = []
        for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            last = contiguous_last and axis == len(array.shape) - 1
            if size <= 1 or empty:
                strides.append(0)
            elif stride <= 0 or stride % item or (last and stride != item):
                wanted = f"{item} (contiguous)" if last else f"a positive multiple of {item}"
                raise KdtValueError(
                    f"argument '{name}': expected a stride of {wanted} bytes in dimension {axis}, got {stride}",
                    Status.STRIDE,
                )
            else:
                strides.append(stride // item)
        return View(array.owner, array.pointer, array.dtype, array.shape, tuple(strides))

    def float_view(self, name: str, value: Any, shape: Shape, *, writable: bool = False) -> tuple[View, int]:
        """A float32, float16 or bfloat16 array, and its KDT_* code."""
        array = self.view(name, value, None, shape, writable=writable)
        kind = float_name(array.dtype)
        if kind is None or not array.dtype.isnative:
            raise KdtValueError(f"argument '{name}': expected float32, float16 or bfloat16, got {array.dtype}")
        return array, CODES[kind]

    def rows_view(self, name: str, value: Any) -> tuple[View, int, int]:
        """[..., V] floats as rows: the view, its code and the distance from row to row in elements.

        The leading dimensions must be evenly strided, as if they were one.
        """
        array, code = self.float_view(name, value, (...,))
        if not array.shape:
            raise KdtValueError(f"argument '{name}': expected an array [..., V], got 0 dimensions")
        return array, code, row_stride(name, array.shape, array.strides)

    def int_vector(self, name: str, value: Any, size: int | None) -> View:
        """An int32 array [size]; a plain sequence of Python ints is converted (and put on the device)."""
        if isinstance(value, (list, tuple, range)):
            value = self.put(np.array([_int32(f"{name}[{i}]", item) for i, item in enumerate(value)], np.int32))
        elif not is_array(name, value):
            got = type(value).__name__
            raise KdtValueError(f"argument '{name}': expected an int32 array or a list of ints, got {got}")
        return self.view(name, value, np.int32, (size,))

    def optional_int_vector(self, name: str, value: Any, size: int | None) -> View | None:
        return None if value is None else self.int_vector(name, value, size)

    def optional_scalar(self, name: str, value: Any) -> View | None:
        """One int32 in memory: an int, or an array [1] (its content may change between launches)."""
        if value is None:
            return None
        if not is_array(name, value):
            value = self.put(np.array([_int32(name, value)], np.int32))
        return self.view(name, value, np.int32, (1,))


class HostMemory(Memory):
    def describe(self, name: str, value: Any) -> Described:
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
            return Described(
                value, value.ctypes.data, value.dtype, value.shape, value.strides, bool(value.flags.writeable)
            )
        got = type(value).__name__
        if interface_of(name, value) is not None:
            got += " in device memory, which needs a context of the backend 'cuda'"
        raise KdtValueError(f"argument '{name}': expected a numpy array, got {got}")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return np.empty(tuple(shape), dtype)

    def put(self, values: Any) -> Any:
        return values

    def read(self, array: View) -> Any:
        return array.owner

    def pointer_array(self, pointers: Sequence[int]) -> tuple[Any, int]:
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        return array, ctypes.addressof(array)

    def stream(self, stream: Any) -> int | None:
        if stream is not None:
            raise KdtValueError(
                f"argument 'stream': expected None, the CPU having no streams, got {type(stream).__name__}"
            )
        return None


HOST = HostMemory()


class DeviceMemory(Memory):
    """The memory of one GPU. Nothing here asks the driver about a foreign pointer: the library does, at each call."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def describe(self, name: str, value: Any) -> Described:
        if isinstance(value, DeviceArray):
            strides = packed_strides(value.shape, value.dtype.itemsize)
            return Described(value, value.pointer, value.dtype, value.shape, strides, True)
        interface = interface_of(name, value)
        if interface is not None:
            return self._foreign(name, value, interface)
        expected = f"argument '{name}': expected memory of device {self.ordinal}"
        if isinstance(value, np.ndarray):
            raise KdtValueError(f"{expected}, got a numpy array in host memory (DeviceArray.from_numpy uploads one)")
        raise KdtValueError(
            f"{expected} (a DeviceArray, or anything with __cuda_array_interface__), got {type(value).__name__}"
        )

    def _foreign(self, name: str, value: Any, interface: Any) -> Described:
        """Reads `__cuda_array_interface__`, version 2 or 3."""
        try:
            version, shape = operator.index(interface["version"]), tuple(map(operator.index, interface["shape"]))
            dtype = np.dtype(interface["typestr"])
            address, read_only = interface["data"]
            address = operator.index(address or 0)  # 0 where there are no elements
            given = interface.get("strides")
            strides = packed_strides(shape, dtype.itemsize) if given is None else tuple(map(operator.index, given))
            mask, stream = interface.get("mask"), interface.get("stream")
            if version < 2 or len(strides) != len(shape) or any(size < 0 for size in shape):
                raise ValueError(f"version {version}, shape {list(shape)}, strides {list(strides)}")
            if not 0 <= address < 2**64 or any(abs(stride) >= 2**63 for stride in strides):
                raise ValueError(f"address {address:#x}, strides {list(strides)}")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise KdtValueError(
                f"argument '{name}': expected __cuda_array_interface__ of version 2 or 3, got one that cannot be read "
                f"({type(error).__name__}: {error})"
            ) from None
        if mask is not None:
            raise KdtValueError(f"argument '{name}': expected an array without a mask, got a masked one")
        if dtype.kind == "V" and dtype.itemsize == 2 and "bfloat16" in str(getattr(value, "dtype", "")):
            dtype = bfloat16  # a type string cannot say so
        if version >= 3 and stream is not None:  # the stream that its producer is at work on
            device(self.ordinal).call("cuStreamSynchronize", stream_handle(stream))
        return Described(value, address, dtype, shape, strides, not read_only)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return DeviceArray(shape, dtype, self.ordinal)

    def put(self, values: Any) -> Any:
        return DeviceArray.from_numpy(values, self.ordinal)

    def read(self, array: View) -> Any:
        """Waits for the device."""
        item = array.dtype.itemsize
        # From the first to the last element, whatever lies between them.
        last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
        span = np.empty(0 if 0 in array.shape else last + 1, array.dtype)
        owner = device(self.ordinal)
        owner.synchronize()
        if span.size:
            owner.call("cuMemcpyDtoH_v2", span.ctypes.data, array.pointer, span.nbytes)
        strides = tuple(stride * item for stride in array.strides)
        return np.lib.stride_tricks.as_strided(span, array.shape, strides)

    def pointer_array(self, pointers: Sequence[int]) -> tuple[Any, int]:
        array = self.put(np.array(pointers, np.uint64))
        return array, array.pointer

    def stream(self, stream: Any) -> int | None:
        return stream_handle(stream)


def packed_strides(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Byte strides of a contiguous array."""
    return tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def interface_of(name: str, value: Any) -> Mapping[str, Any] | None:
    """An array's `__cuda_array_interface__`; None where there is none."""
    if isinstance(value, (np.ndarray, type)):
        return None
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except Exception as error:  # torch: a tensor that requires grad, is sparse, ...
        raise KdtValueError(f"argument '{name}': {error}") from error
    return interface if isinstance(interface, Mapping) else None


def is_array(name: str, value: Any) -> bool:
    """Of any kind, in whatever memory."""
    return isinstance(value, np.ndarray) or interface_of(name, value) is not None


def _check_shape(name: str, got: tuple[int, ...], shape: Shape) -> None:
    tail, last = shape, got
    if shape and shape[0] is ...:
        tail = shape[1:]
        last = got[max(len(got) - len(tail), 0) :]
    if len(last) == len(tail) and all(want is None or want == size for want, size in zip(tail, last, strict=True)):
        return
    words = ["..." if size is ... else "any" if size is None else str(size) for size in shape]
    raise KdtValueError(f"argument '{name}': expected shape [{', '.join(words)}], got {list(got)}", Status.SHAPE)


def is_packed(array: View) -> bool:
    """Without gaps."""
    expected = 1
    for size, step in reversed(list(zip(array.shape, array.strides, strict=True))):
        if step not in (0, expected):
            return False
        expected *= size
    return True


def row_stride(name: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from row to row of [..., n] when the leading dimensions are strided as if they were one; 0: packed."""
    stride = 0
    for size, step in reversed(list(zip(shape[:-1], strides[:-1], strict=True))):
        if size <= 1 or step == 0:
            continue
        if stride == 0:
            stride, expected = step, step * size
        elif step != expected:
            raise KdtValueError(
                f"argument '{name}': expected evenly strided rows, got strides {list(strides)} for shape {list(shape)}",
                Status.STRIDE,
            )
        else:
            expected = step * size
    return stride


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
