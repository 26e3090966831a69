"""As much of the CUDA driver as this package needs, through ctypes: memory, copies, streams, events, graphs.

Why not torch or cuda-python: this package has two runtime dependencies, numpy and click, and what it needs are the
thirty functions below. The driver is on every machine that has a GPU, and a name with its version (`cuMemAlloc_v2`)
keeps its meaning for good. torch's and cupy's arrays are taken without importing either (see `_arrays.py`).

Everything happens in the device's primary context, which the CUDA runtime inside our library and torch use, too.
Streams and graphs are plain handles to both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import weakref
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

import numpy as np

from ._errors import KdtError, KdtValueError, NoDeviceError, OutOfMemoryError, Status

LIBRARY = "libcuda.so.1"

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(c_ulonglong), c_size_t),
    "cuMemFree_v2": (c_ulonglong,),
    "cuMemcpyHtoD_v2": (c_ulonglong, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_ulonglong, c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_ulonglong, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
}
"""What we call and with which arguments, by exported name. Each returns a CUresult, an int. A test reads cuda.h."""

L2_CACHE_SIZE = 38
"""CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, in bytes"""

_STREAM_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
_OUT_OF_MEMORY = 2
_NO_DEVICE = {35, 36, 46, 100, 101, 803}
"""INSUFFICIENT_DRIVER (the runtime's), CALL_REQUIRES_NEWER_DRIVER, DEVICE_UNAVAILABLE, NO_DEVICE, INVALID_DEVICE,
SYSTEM_DRIVER_MISMATCH"""


# ---- The driver and its devices ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    """The driver, loaded and initialised once."""
    try:
        library = ctypes.CDLL(LIBRARY)
        for name, arguments in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = c_int, arguments
    except OSError as error:
        raise NoDeviceError(f"no device: the CUDA driver cannot be loaded: {error}") from None
    except AttributeError as error:
        raise NoDeviceError(f"no device: the CUDA driver is too old: {error}") from None
    result = library.cuInit(0)
    if result != 0:
        raise _error(library, "cuInit", result)
    return library


def _error(library: ctypes.CDLL, function: str, result: int) -> KdtError:
    words = []
    for describe in (library.cuGetErrorName, library.cuGetErrorString):
        text = c_char_p()
        if describe(result, ctypes.byref(text)) == 0 and text.value:
            words.append(text.value.decode("utf-8", "replace"))
    message = f"{function} failed: {', '.join(words) or f'error {result}'}"
    if result in _NO_DEVICE:
        return NoDeviceError(f"no device: {message}")
    return OutOfMemoryError(message) if result == _OUT_OF_MEMORY else KdtError(message, Status.CUDA)


def driver_version() -> int:
    """The newest CUDA version the driver serves: 1000 * major + 10 * minor."""
    library, version = _driver(), c_int()
    result = library.cuDriverGetVersion(ctypes.byref(version))
    if result != 0:
        raise _error(library, "cuDriverGetVersion", result)
    return version.value


class Device:
    """One GPU and its primary context, which is kept for the life of the process."""

    def __init__(self, ordinal: int) -> None:
        self._driver = _driver()
        self._context: c_void_p | None = None
        self.ordinal = ordinal
        handle, context = c_int(), c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._handle, self._context = handle, context

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a driver function in the device's context; the caller's is put back."""
        if self._context is not None:
            pushed = self._driver.cuCtxPushCurrent_v2(self._context)
            if pushed != 0:
                raise _error(self._driver, "cuCtxPushCurrent", pushed)
        result = getattr(self._driver, name)(*arguments)
        if self._context is not None:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(c_void_p()))
        if result != 0:
            raise _error(self._driver, name.partition("_")[0], result)

    def quietly(self, name: str, *arguments: Any) -> None:
        """The same for finalizers, which have nobody to tell."""
        with contextlib.suppress(KdtError):
            self.call(name, *arguments)

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), self._handle)
        return text.value.decode("utf-8", "replace")

    def attribute(self, number: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._handle)
        return value.value

    def synchronize(self) -> None:
        """Waits for all work of this process on the device, in whatever stream."""
        self.call("cuCtxSynchronize")


@functools.cache
def device(ordinal: int) -> Device:
    return Device(ordinal)


# ---- Arrays ------------------------------------------------------------------------------------------------


class DeviceArray:
    """A contiguous array in the memory of a GPU.

    shape, dtype  as of numpy; dtype may be `kdtree_engine.bfloat16` (or ml_dtypes').
    device        the GPU's ordinal.

    `DeviceArray(shape, dtype)` is uninitialised. The memory lives as long as this array, or one made from it by
    indexing, `reshape` or `view`. `numpy`, `from_numpy` and `copy_from` wait until the device has finished what it was
    given before, in all streams, and are finished themselves when they return. torch and cupy take it through
    `__cuda_array_interface__`.
    """

    def __init__(self, shape: int | Sequence[int], dtype: Any, device: int = 0) -> None:
        self._settle((shape,) if isinstance(shape, int) else shape, dtype, device)
        self.pointer = 0
        self._base: DeviceArray | None = None
        if self.nbytes:
            owner, address = _device(device), c_ulonglong()
            owner.call("cuMemAlloc_v2", ctypes.byref(address), self.nbytes)
            self.pointer = address.value
            # At exit the process' memory goes anyway, and the driver may have gone before.
            weakref.finalize(self, owner.quietly, "cuMemFree_v2", self.pointer).atexit = False

    def _settle(self, shape: Sequence[int], dtype: Any, device: int) -> None:
        self.shape = tuple(operator.index(size) for size in shape)
        if any(size < 0 for size in self.shape):
            raise KdtValueError(f"argument 'shape': expected sizes >= 0, got {list(self.shape)}", Status.SHAPE)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype.hasobject:
            raise KdtValueError(f"argument 'dtype': expected plain numbers, got {self.dtype}")
        self.device = device
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    def _part(self, shape: Sequence[int], dtype: Any, offset: int) -> DeviceArray:
        """On the same memory, from a byte on."""
        part = object.__new__(DeviceArray)
        part._settle(shape, dtype, self.device)
        part.pointer = self.pointer + offset if part.nbytes else 0
        part._base = self
        return part

    @classmethod
    def from_numpy(cls, array: Any, device: int = 0) -> DeviceArray:
        """A copy of a numpy array."""
        values = np.asarray(array)
        made = cls(values.shape, values.dtype, device)
        made.copy_from(values)
        return made

    def numpy(self) -> Any:
        """A copy in host memory."""
        values = np.empty(self.shape, self.dtype)
        if self.nbytes:
            owner = _device(self.device)
            owner.synchronize()
            owner.call("cuMemcpyDtoH_v2", values.ctypes.data, self.pointer, self.nbytes)
        return values

    def copy_from(self, source: Any) -> None:
        """Overwrites this array with a numpy array, or another on the same device, of its shape and dtype."""
        if not isinstance(source, (np.ndarray, DeviceArray)):
            raise KdtValueError(
                f"argument 'source': expected a numpy array or a DeviceArray, got {type(source).__name__}"
            )
        if source.shape != self.shape or source.dtype != self.dtype:
            raise KdtValueError(
                f"argument 'source': expected {self.dtype} of shape {list(self.shape)}, got {source.dtype} of "
                f"{list(source.shape)}",
                Status.SHAPE,
            )
        if isinstance(source, DeviceArray) and source.device != self.device:
            raise KdtValueError(f"argument 'source': expected memory of device {self.device}, got {source.device}")
        if not self.nbytes:
            return
        owner = _device(self.device)
        owner.synchronize()
        if isinstance(source, DeviceArray):
            self.copy_async(source, None)
        else:
            values = np.ascontiguousarray(source)
            owner.call("cuMemcpyHtoD_v2", self.pointer, values.ctypes.data, self.nbytes)
        # A copy from pageable memory may still be on its way when the driver returns, and our streams do not wait for
        # the default one.
        owner.call("cuStreamSynchronize", None)

    def copy_async(self, source: DeviceArray, stream: Any) -> None:
        """Copies as many bytes as this array has on a stream, without waiting."""
        if source.nbytes < self.nbytes:
            raise KdtValueError(
                f"argument 'source': expected at least {self.nbytes} bytes, got {source.nbytes}", Status.SHAPE
            )
        handle = stream_handle(stream)
        _device(self.device).call("cuMemcpyDtoDAsync_v2", self.pointer, source.pointer, self.nbytes, handle)

    def fill_bytes(self, value: int, stream: Any) -> None:
        """Sets every byte on a stream, without waiting."""
        if self.nbytes:
            handle = stream_handle(stream)
            _device(self.device).call("cuMemsetD8Async", self.pointer, value, self.nbytes, handle)

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same memory in another shape; one size may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        if sizes.count(-1) == 1:
            known = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = self.size // known if known else 0
        if any(size < 0 for size in sizes) or math.prod(sizes) != self.size:
            raise KdtValueError(
                f"argument 'shape': expected {self.size} elements as {list(self.shape)} has, got {list(shape)}",
                Status.SHAPE,
            )
        return self._part(sizes, self.dtype, 0)

    def view(self, dtype: Any) -> DeviceArray:
        """The same bits as another dtype of the same size."""
        if np.dtype(dtype).itemsize != self.dtype.itemsize:
            size = self.dtype.itemsize
            raise KdtValueError(f"argument 'dtype': expected {size} bytes an element, got {np.dtype(dtype)}")
        return self._part(self.shape, dtype, 0)

    def __getitem__(self, index: int | slice) -> DeviceArray:
        """One entry, or consecutive entries, of the first dimension: on the same memory."""
        if not self.shape:
            raise IndexError("an array of no dimensions cannot be indexed")
        row_bytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shape[0])
            if step != 1:
                raise IndexError(f"expected consecutive entries, got a step of {step}")
            return self._part((max(stop - start, 0), *self.shape[1:]), self.dtype, start * row_bytes)
        place = range(self.shape[0])[operator.index(index)]
        return self._part(self.shape[1:], self.dtype, place * row_bytes)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    def __array__(self, *_arguments: Any, **_options: Any) -> Any:
        raise TypeError("a DeviceArray is in device memory: call its numpy() for a copy in host memory")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. A bfloat16 array's typestr is that of two plain bytes; the dtype is on the array."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"DeviceArray(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


_device = device  # where `device` is a number


# ---- Streams, events, graphs -------------------------------------------------------------------------------


def stream_handle(stream: Any) -> int | None:
    """The driver's handle of a stream: None is the default stream."""
    handle = getattr(stream, "cuda_stream", stream)
    if handle is None:
        return None
    try:
        number = -1 if isinstance(handle, bool) else operator.index(handle)
    except TypeError:
        number = -1
    if number < 0:
        raise KdtValueError(
            f"argument 'stream': expected None, a handle, or an object with cuda_stream, got {type(stream).__name__}"
        )
    return number or None


class Graph:
    """Work captured from a stream (`Stream.capture`), launched as one. What it works on must stay alive."""

    def __init__(self, owner: Device) -> None:
        self._device = owner
        self._executable = c_void_p()

    def _instantiate(self, graph: c_void_p) -> None:
        owner = self._device
        try:
            owner.call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, 0)
        finally:
            owner.quietly("cuGraphDestroy", graph)
        weakref.finalize(self, owner.quietly, "cuGraphExecDestroy", self._executable).atexit = False

    def launch(self, stream: Any = None) -> None:
        """Puts the captured work on a stream."""
        self._device.call("cuGraphLaunch", self._executable, stream_handle(stream))


class Stream:
    """A stream of a GPU that does not wait for the default stream, nor that for it."""

    def __init__(self, device: int = 0) -> None:
        self._device = _device(device)
        self.device = device
        handle = c_void_p()
        self._device.call("cuStreamCreate", ctypes.byref(handle), _STREAM_NON_BLOCKING)
        self.cuda_stream = handle.value or 0
        """The handle, under the name torch gives it."""
        weakref.finalize(self, self._device.quietly, "cuStreamDestroy_v2", self.cuda_stream).atexit = False

    def synchronize(self) -> None:
        """Waits for all that is on the stream."""
        self._device.call("cuStreamSynchronize", self.cuda_stream)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """What is put on this stream inside the block becomes a `Graph` instead of being run.

        Prepare calls before the block (`f.prepare`) and launch them inside it.
        """
        graph, captured = Graph(self._device), c_void_p()
        # Relaxed: that some other array's memory is freed meanwhile must not break the capture.
        self._device.call("cuStreamBeginCapture_v2", self.cuda_stream, _CAPTURE_RELAXED)
        try:
            yield graph
        except BaseException:
            self._device.quietly("cuStreamEndCapture", self.cuda_stream, ctypes.byref(captured))
            if captured.value:
                self._device.quietly("cuGraphDestroy", captured)
            raise
        self._device.call("cuStreamEndCapture", self.cuda_stream, ctypes.byref(captured))
        graph._instantiate(captured)


class Event:
    """A point in a stream, with its time."""

    def __init__(self, device: int = 0) -> None:
        self._device = _device(device)
        self._handle = c_void_p()
        self._device.call("cuEventCreate", ctypes.byref(self._handle), 0)
        weakref.finalize(self, self._device.quietly, "cuEventDestroy_v2", self._handle).atexit = False

    def record(self, stream: Any) -> None:
        self._device.call("cuEventRecord", self._handle, stream_handle(stream))

    def synchronize(self) -> None:
        """Waits until the stream has got there."""
        self._device.call("cuEventSynchronize", self._handle)

    def seconds_since(self, start: Event) -> float:
        """Between two events that the device has passed."""
        milliseconds = c_float()
        self._device.call("cuEventElapsedTime", ctypes.byref(milliseconds), start._handle, self._handle)
        return milliseconds.value * 1e-3
