"""Contexts: which backend, device and threads a call uses. Errors of the library become exceptions here."""

from __future__ import annotations

import ctypes
import functools
import json
import weakref
from typing import Any

from . import _abi, _library
from ._arrays import HOST, INT32_MAX, DeviceMemory, Memory, host_int
from ._errors import KdtError, KdtValueError, NoDeviceError, OutOfMemoryError, Status


def check(status: int) -> None:
    """Raises the exception for a status the library returned."""
    if status == Status.OK:
        return
    message = _library.load().kdt_last_error().decode("utf-8", "replace")
    if 100 <= status < 200:
        raise KdtValueError(message, status)
    if status in (Status.NO_BACKEND, Status.NO_DEVICE):
        raise NoDeviceError(message, status)
    if status == Status.OUT_OF_MEMORY:
        raise OutOfMemoryError(message, status)
    raise KdtError(message, status)


def backend_code(backend: str) -> int:
    try:
        return _abi.BACKENDS[backend]
    except (KeyError, TypeError):
        raise KdtValueError(f"argument 'backend': expected one of {sorted(_abi.BACKENDS)}, got {backend!r}") from None


class Context:
    """Where operations run.

    backend: "cpu" or "cuda". device: the GPU's ordinal. num_threads: CPU threads a call may use, 0 for as many
    as this process may run on. A context never changes and may be shared by threads.

    `memory` is where the arrays of its calls live.
    """

    def __init__(self, backend: str = "cpu", device: int = 0, num_threads: int = 0) -> None:
        library = _library.load()
        handle = ctypes.c_void_p()
        params = _abi.ContextParams(
            backend=backend_code(backend),
            device=host_int("device", device, 0, INT32_MAX),
            num_threads=host_int("num_threads", num_threads, 0, INT32_MAX),
        )
        check(library.kdt_context_create(params, handle))
        self.handle = handle
        weakref.finalize(self, library.kdt_context_destroy, handle)
        settled = _abi.ContextParams()
        check(library.kdt_context_get(handle, settled))
        self.backend = backend
        self.device = int(settled.device)
        self.num_threads = int(settled.num_threads)
        self.memory: Memory = HOST if backend == "cpu" else DeviceMemory(self.device)

    def __reduce__(self) -> Any:
        return Context, (self.backend, self.device, self.num_threads)

    def __repr__(self) -> str:
        return f"Context(backend={self.backend!r}, device={self.device}, num_threads={self.num_threads})"


@functools.lru_cache(maxsize=1)
def default_context() -> Context:
    """The context of calls that name none: the CPU with all its threads."""
    return Context()


def context_or_default(context: Any) -> Context:
    if context is None:
        return default_context()
    if not isinstance(context, Context):
        raise KdtValueError(f"argument 'context': expected a Context or None, got {type(context).__name__}")
    return context


def build_info() -> dict[str, Any]:
    """How the loaded library was built: version, abi, compiler, build_type, cuda, cuda_architectures; and its path."""
    info: dict[str, Any] = json.loads(_library.load().kdt_build_info().decode())
    return {**info, "library": str(_library.library_path())}


def backends() -> dict[str, dict[str, Any]]:
    """Every backend with `available`, and then its `devices`, else the `reason` why not."""
    library = _library.load()
    found: dict[str, dict[str, Any]] = {}
    for name, code in _abi.BACKENDS.items():
        try:
            count = ctypes.c_int32()
            check(library.kdt_device_count(code, count))
            devices = []
            for index in range(count.value):
                info = _abi.DeviceInfo()
                check(library.kdt_device_query(code, index, info))
                fields = {field: getattr(info, field) for field, *_ in info._fields_[1:]}
                devices.append({**fields, "name": info.name.decode("utf-8", "replace")})
            found[name] = {"available": True, "devices": devices}
        except KdtError as error:
            found[name] = {"available": False, "reason": str(error)}
    return found
