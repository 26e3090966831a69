"""The exceptions of this package and the status codes they carry.

Every exception raised on purpose is a :class:`KdtError` with a ``status``; the subclasses are also what a
Python caller would expect to catch (``ValueError``, ``OSError`` and so on).
"""

from __future__ import annotations

import enum
from typing import ClassVar


class Status(enum.IntEnum):
    """The status codes of ``kdtree.h`` and, from 500 on, ``kdtr.h``."""

    OK = 0

    INVALID_ARGUMENT = 100
    NULL_POINTER = 101
    SHAPE = 102
    LIMIT = 103
    STRIDE = 104
    ALIGNMENT = 105
    OVERLAP = 106
    WORKSPACE = 107
    STRUCT = 108

    UNSUPPORTED = 200
    NO_BACKEND = 201
    NO_DEVICE = 202

    OUT_OF_MEMORY = 300
    CUDA = 301

    INTERNAL = 400

    KDTR_IO = 500
    KDTR_NOT_FOUND = 501
    KDTR_TOO_SHORT = 510
    KDTR_MAGIC = 511
    KDTR_VERSION = 512
    KDTR_RESERVED = 513
    KDTR_FILE_SIZE = 514
    KDTR_CAP = 515
    KDTR_INDEX_CHECKSUM = 516
    KDTR_INDEX = 517
    KDTR_NAME = 518
    KDTR_DTYPE = 519
    KDTR_SHAPE = 520
    KDTR_SIZE = 521
    KDTR_OFFSET = 522
    KDTR_PADDING = 523
    KDTR_DATA_CHECKSUM = 524
    KDTR_VALUE = 525


class KdtError(Exception):
    """Base of all errors of this package.

    ``status`` is a :class:`Status`, or a plain number that a newer library returned and this package does
    not know. Left out, it is the class's own ``default_status``.
    """

    default_status: ClassVar[Status] = Status.INTERNAL
    status: int

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = self.default_status if status is None else _known(status)


class KdtValueError(KdtError, ValueError):
    """The caller's mistake (1xx)."""

    default_status = Status.INVALID_ARGUMENT


class KdtrError(KdtError, ValueError):
    """A KDTR file, or what should become one, is not as it must be (5xx)."""

    default_status = Status.KDTR_IO


class LibraryNotFoundError(KdtError, OSError):
    """The native library is not there, or is not one that this package can use."""

    default_status = Status.UNSUPPORTED


class MissingExtraError(KdtError, ImportError):
    """An optional package is not installed; the message says what to install."""

    default_status = Status.UNSUPPORTED


class NoDeviceError(KdtError, RuntimeError):
    """There is no usable driver or device."""

    default_status = Status.NO_DEVICE


class OutOfMemoryError(KdtError, MemoryError):
    """There is not so much memory, of the host or of the device."""

    default_status = Status.OUT_OF_MEMORY


def _known(status: int) -> int:
    try:
        return Status(status)
    except ValueError:
        return status
