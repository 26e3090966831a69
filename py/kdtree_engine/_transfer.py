"""Arguments and results between the host and the memory of a context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from ._arrays import Memory
from ._cuda import DeviceArray
from .types import Accepted, Tree


def place(value: Any, memory: Memory) -> Any:
    """The same with its numpy arrays in a memory: on a GPU copies, on the host themselves."""
    return _mapped(value, np.ndarray, memory.put)


def to_host(value: Any) -> Any:
    """The same with numpy arrays instead of `DeviceArray`s. Waits for the device."""
    return _mapped(value, DeviceArray, DeviceArray.numpy)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (Tree, Accepted)):
        return type(value)(**{f.name: _mapped(getattr(value, f.name), kind, change) for f in fields(value)})
    if isinstance(value, dict):
        return {name: _mapped(item, kind, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, kind, change) for item in value)
    return value
