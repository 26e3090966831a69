"""KDTR: a small binary container of named tensors and string attributes.

The format is described byte by byte in ``plans/0002-kdtr-format.md``; ``kdtree/kdtr.h`` reads and writes the
same files in C. Both readers are strict, and give the same code on every file, good or bad.

Everywhere here a file's content is a pair: ``tensors``, a dict of NumPy arrays, and ``attrs``, a dict of
strings, both in file order. NumPy has no bfloat16, so those tensors come as the tagged dtype
:data:`bfloat16`; ``array["bfloat16"]`` is their raw ``uint16`` bits. Arrays of ``ml_dtypes.bfloat16`` may be
saved as they are.

Only the KDTR reader is hardened against hostile files. The npz and safetensors functions are for exchange.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ._errors import KdtError, KdtrError, KdtValueError, MissingExtraError, Status

__all__ = [
    "FileInfo",
    "TensorInfo",
    "bfloat16",
    "convert",
    "dumps",
    "inspect",
    "load",
    "load_npz",
    "load_safetensors",
    "loader_of",
    "loads",
    "save",
    "save_npz",
    "save_safetensors",
    "saver_of",
]

Array: TypeAlias = npt.NDArray[Any]
Attrs: TypeAlias = Mapping[str, str]
BytesLike: TypeAlias = "bytes | bytearray | memoryview"
Content: TypeAlias = "tuple[dict[str, Array], dict[str, str]]"
StrPath: TypeAlias = "str | os.PathLike[str]"
Tensors: TypeAlias = "Mapping[str, Array | np.generic]"

#: The dtype of bfloat16 tensors. It survives slicing, ``np.save`` and npz.
bfloat16 = np.dtype([("bfloat16", "<u2")])

_MAGIC = b"KDTR\r\n\x1a\n"
_VERSION = 1
_DATA_ALIGN = 64
_ENTRY_ALIGN = 8

_MAX_DIMS = 8
_MAX_TENSORS = 65536
_MAX_ATTRS = 65536
_MAX_NAME = 255
_MAX_INDEX = 64 << 20
_MAX_BYTES = 2**63 - 1

_HEADER = struct.Struct("<8sIIQQIII20s")  # magic, version, 0, file, index, tensors, attrs, checksum, zeros
_CHECKSUM_AT = 40
_TENSOR = struct.Struct("<QQIHBB")  # offset, nbytes, checksum, name length, dtype code, ndim
_TENSOR_MIN_SIZE = 32
_ATTR = struct.Struct("<II")  # key length, value length
_ATTR_MIN_SIZE = 16

_DTYPES: dict[int, tuple[str, np.dtype[Any]]] = {
    1: ("f64", np.dtype("<f8")),
    2: ("f32", np.dtype("<f4")),
    3: ("f16", np.dtype("<f2")),
    4: ("bf16", bfloat16),
    5: ("i64", np.dtype("<i8")),
    6: ("i32", np.dtype("<i4")),
    7: ("i16", np.dtype("<i2")),
    8: ("i8", np.dtype("<i1")),
    9: ("u64", np.dtype("<u8")),
    10: ("u32", np.dtype("<u4")),
    11: ("u16", np.dtype("<u2")),
    12: ("u8", np.dtype("<u1")),
    13: ("bool", np.dtype(np.bool_)),
}
_CODES = {dtype: code for code, (_, dtype) in _DTYPES.items()}
_BOOL = 13


class TensorInfo(NamedTuple):
    """One tensor of a file, as its index entry describes it."""

    name: str
    dtype: str  #: "f64", "f32", "f16", "bf16", "i64" ... "u8", "bool"
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    crc32: int


class FileInfo(NamedTuple):
    """What is in a file."""

    size: int
    tensors: list[TensorInfo]
    attrs: dict[str, str]


# ---- Reading ---------------------------------------------------------------------------------------------


def load(path: StrPath) -> Content:
    """Reads a file and returns ``(tensors, attrs)``, both in file order.

    The arrays are contiguous, writable, 64-byte aligned, and share one buffer of the file's size.
    """
    buffer, checker = _read_kdtr(path)
    return _arrays(buffer, checker), dict(checker.attrs)


def loads(data: BytesLike) -> Content:
    """Like :func:`load`, from bytes that hold a whole file. They are copied once they have passed."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes > 0 else memoryview(b"")
    checker = _Checker(view, "the data")
    checker.run()
    buffer = _aligned_buffer(len(view))
    buffer.data[:] = view
    return _arrays(buffer, checker), dict(checker.attrs)


def inspect(path: StrPath) -> FileInfo:
    """Reads and checks a file as :func:`load` does and returns what is in it, without the data."""
    buffer, checker = _read_kdtr(path)
    return FileInfo(len(buffer), checker.tensors, dict(checker.attrs))


class _Checker:
    """The list of checks, in the order that the format page fixes and ``src/kdtr/reader.cpp`` has."""

    def __init__(self, view: memoryview, source: str, size: int | None = None) -> None:
        """``view`` is the file; its first 64 bytes will do for ``check_header`` when ``size`` is given."""
        self.view = view
        self.source = source
        self.size = len(view) if size is None else size
        self.tensors: list[TensorInfo] = []
        self.attrs: list[tuple[str, str]] = []

    def run(self) -> None:
        self.check_header()
        self.check_checksum()
        self.check_entries()
        self.check_unique()
        self.check_layout()
        self.check_contents()

    def check_header(self) -> None:
        if self.size < _HEADER.size:
            self.fail(Status.KDTR_TOO_SHORT, f"a KDTR file has at least 64 bytes, not {self.size}")
        magic, version, zero, file_size, index_size, num_tensors, num_attrs, checksum, zeros = _HEADER.unpack_from(
            self.view
        )
        if magic != _MAGIC:
            self.fail(Status.KDTR_MAGIC, "not a KDTR file: the first 8 bytes are wrong")
        if version != _VERSION:
            self.fail(Status.KDTR_VERSION, f"version {version}, this reader knows {_VERSION}")
        if zero != 0 or any(zeros):
            self.fail(Status.KDTR_RESERVED, "reserved bytes of the header are not zero")
        if file_size != self.size:
            self.fail(Status.KDTR_FILE_SIZE, f"the header says {file_size} bytes, there are {self.size}")
        if num_tensors > _MAX_TENSORS or num_attrs > _MAX_ATTRS or index_size > _MAX_INDEX:
            text = f"{num_tensors} tensors, {num_attrs} attributes or {index_size} bytes of index"
            self.fail(Status.KDTR_CAP, f"{text} are above the caps")
        if index_size > self.size - _HEADER.size:
            self.fail(Status.KDTR_CAP, f"an index of {index_size} bytes in a file of {self.size}")
        if _TENSOR_MIN_SIZE * num_tensors + _ATTR_MIN_SIZE * num_attrs > index_size:
            text = f"{num_tensors} tensors and {num_attrs} attributes"
            self.fail(Status.KDTR_CAP, f"{text} do not fit an index of {index_size} bytes")
        self.num_tensors: int = num_tensors
        self.num_attrs: int = num_attrs
        self.checksum: int = checksum
        self.index_end: int = _HEADER.size + index_size
        self.at = _HEADER.size  # start of the next entry

    def check_checksum(self) -> None:
        crc = zlib.crc32(self.view[:_CHECKSUM_AT])
        crc = zlib.crc32(bytes(4), crc)
        crc = zlib.crc32(self.view[_CHECKSUM_AT + 4 : self.index_end], crc)
        if crc != self.checksum:
            text = f"header and index have checksum {crc:08x}, not {self.checksum:08x}"
            self.fail(Status.KDTR_INDEX_CHECKSUM, text)

    def check_entries(self) -> None:
        for i in range(self.num_tensors):
            self.check_tensor_entry(f"tensor {i}")
        for i in range(self.num_attrs):
            self.check_attr_entry(f"attribute {i}")
        if self.at != self.index_end:
            self.fail(Status.KDTR_INDEX, f"{self.index_end - self.at} bytes are left over in the index")

    def check_tensor_entry(self, what: str) -> None:
        dims_at = self.at + _TENSOR.size
        if dims_at > self.index_end:
            self.fail(Status.KDTR_INDEX, f"{what}: its entry runs past the index")
        offset, nbytes, crc, name_len, code, ndim = _TENSOR.unpack_from(self.view, self.at)
        if code not in _DTYPES:
            self.fail(Status.KDTR_DTYPE, f"{what}: unknown dtype code {code}")
        if ndim > _MAX_DIMS:
            self.fail(Status.KDTR_SHAPE, f"{what}: {ndim} dimensions, at most {_MAX_DIMS} are allowed")
        if not 1 <= name_len <= _MAX_NAME:
            self.fail(Status.KDTR_NAME, f"{what}: a name of {name_len} bytes, not 1..{_MAX_NAME}")
        name_at = dims_at + 8 * ndim
        name_end = name_at + name_len
        end = _align(name_end + 1, _ENTRY_ALIGN)
        if end > self.index_end:
            self.fail(Status.KDTR_INDEX, f"{what}: its entry runs past the index")
        shape = struct.unpack_from(f"<{ndim}Q", self.view, dims_at)
        dtype_name, dtype = _DTYPES[code]
        if not _shape_fits(shape, dtype):
            self.fail(Status.KDTR_SHAPE, f"{what}: its shape is too large")
        expected = _shape_bytes(shape, dtype)
        if nbytes != expected:
            self.fail(Status.KDTR_SIZE, f"{what}: {nbytes} bytes, its shape takes {expected}")
        name = _decode(self.view[name_at:name_end])
        if name is None or "\0" in name:
            self.fail(Status.KDTR_NAME, f"{what}: its name has a NUL or is not UTF-8")
        if any(self.view[name_end:end]):
            self.fail(Status.KDTR_PADDING, f"{what}: bytes after its name are not zero")
        self.tensors.append(TensorInfo(name, dtype_name, shape, nbytes, offset, crc))
        self.at = end

    def check_attr_entry(self, what: str) -> None:
        key_at = self.at + _ATTR.size
        if key_at > self.index_end:
            self.fail(Status.KDTR_INDEX, f"{what}: its entry runs past the index")
        key_len, value_len = _ATTR.unpack_from(self.view, self.at)
        if not 1 <= key_len <= _MAX_NAME:
            self.fail(Status.KDTR_NAME, f"{what}: a name of {key_len} bytes, not 1..{_MAX_NAME}")
        key_end = key_at + key_len
        value_end = key_end + 1 + value_len
        end = _align(value_end + 1, _ENTRY_ALIGN)
        if end > self.index_end:
            self.fail(Status.KDTR_INDEX, f"{what}: its entry runs past the index")
        key = _decode(self.view[key_at:key_end])
        if key is None or "\0" in key:
            self.fail(Status.KDTR_NAME, f"{what}: its name has a NUL or is not UTF-8")
        value = _decode(self.view[key_end + 1 : value_end])
        if value is None:
            self.fail(Status.KDTR_NAME, f"{what}: its value is not UTF-8")
        if self.view[key_end] != 0 or any(self.view[value_end:end]):
            self.fail(Status.KDTR_PADDING, f"{what}: bytes after its name or value are not zero")
        self.attrs.append((key, value))
        self.at = end

    def check_unique(self) -> None:
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            self.fail(Status.KDTR_NAME, "two tensors have the same name")
        if len({key for key, _ in self.attrs}) != len(self.attrs):
            self.fail(Status.KDTR_NAME, "two attributes have the same name")

    def check_layout(self) -> None:
        cursor = _align(self.index_end, _DATA_ALIGN)
        for tensor in self.tensors:
            if tensor.offset != cursor:
                text = f"tensor {tensor.name!r} is at {tensor.offset}, not at {cursor}"
                self.fail(Status.KDTR_OFFSET, text)
            cursor = _align(cursor + tensor.nbytes, _DATA_ALIGN)
            if cursor > self.size:
                self.fail(Status.KDTR_OFFSET, f"tensor {tensor.name!r} runs past the end of the file")
        if cursor != self.size:
            self.fail(Status.KDTR_OFFSET, f"the data ends at {cursor}, the file at {self.size}")

    def check_contents(self) -> None:
        if any(self.view[self.index_end : _align(self.index_end, _DATA_ALIGN)]):
            self.fail(Status.KDTR_PADDING, "bytes after the index are not zero")
        for name, dtype, _, nbytes, offset, expected in self.tensors:
            data = self.view[offset : offset + nbytes]
            if any(self.view[offset + nbytes : _align(offset + nbytes, _DATA_ALIGN)]):
                self.fail(Status.KDTR_PADDING, f"bytes after tensor {name!r} are not zero")
            crc = zlib.crc32(data)
            if crc != expected:
                text = f"tensor {name!r} has checksum {crc:08x}, not {expected:08x}"
                self.fail(Status.KDTR_DATA_CHECKSUM, text)
            if dtype == "bool" and not _all_bool(np.frombuffer(data, np.uint8)):
                self.fail(Status.KDTR_VALUE, f"tensor {name!r} has a bool that is neither 0 nor 1")

    def fail(self, status: Status, text: str) -> NoReturn:
        raise KdtrError(f"{self.source}: {text}", status)


def _align(size: int, align: int) -> int:
    return size + -size % align


def _shape_fits(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    product = dtype.itemsize
    for dim in shape:
        product *= max(dim, 1)
    return product <= _MAX_BYTES


def _shape_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    product = dtype.itemsize
    for dim in shape:
        product *= dim
    return product


def _all_bool(values: npt.NDArray[np.uint8]) -> bool:
    return values.size == 0 or bool(values.max() <= 1)


def _decode(raw: memoryview) -> str | None:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        return None


def _aligned_buffer(size: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(size + _DATA_ALIGN - 1, np.uint8)
    start = -raw.ctypes.data % _DATA_ALIGN
    return raw[start : start + size]


def _arrays(buffer: npt.NDArray[np.uint8], checker: _Checker) -> dict[str, Array]:
    dtypes = dict(_DTYPES.values())
    return {
        tensor.name: buffer[tensor.offset : tensor.offset + tensor.nbytes]
        .view(dtypes[tensor.dtype])
        .reshape(tensor.shape)
        for tensor in checker.tensors
    }


def _read_kdtr(path: StrPath) -> tuple[npt.NDArray[np.uint8], _Checker]:
    # The header is read and checked alone first, so that a large file that is no KDTR file costs nothing.
    with _open_regular(path) as file:
        source = os.fspath(path)
        size = os.fstat(file.fileno()).st_size
        head = bytearray(_HEADER.size)
        head_size = min(size, _HEADER.size)
        _read_exactly(file, memoryview(head)[:head_size], source)
        _Checker(memoryview(head), source, size).check_header()
        buffer = _aligned_buffer(size)
        view = buffer.data
        view[:head_size] = head
        _read_exactly(file, view[head_size:], source)
    checker = _Checker(buffer.data, source)
    checker.run()
    return buffer, checker


def _read_exactly(file: BinaryIO, view: memoryview, source: str) -> None:
    while len(view) > 0:
        got = file.readinto(view)  # type: ignore[attr-defined]  # the file is a FileIO
        if not got:
            raise KdtrError(f"cannot read {source!r}: it became shorter while being read", Status.KDTR_IO)
        view = view[got:]


# ---- Writing ---------------------------------------------------------------------------------------------


def save(path: StrPath, tensors: Tensors, attrs: Attrs | None = None) -> None:
    """Writes a file, the same bytes for the same content, or leaves everything as it was.

    Everything is checked first; then a temporary file in the same directory is synced and renamed over
    ``path``. A symbolic link at ``path`` is followed; anything else there must be a regular file. Arrays
    that are not contiguous or not little endian are converted.
    """
    chunks = _encode(tensors, attrs)
    with _replacing(path) as file:
        for chunk in chunks:
            file.write(chunk)


def dumps(tensors: Tensors, attrs: Attrs | None = None) -> bytes:
    """The bytes that :func:`save` writes."""
    return b"".join(_encode(tensors, attrs))


def _encode(tensors: Tensors, attrs: Attrs | None) -> list[Any]:
    """The file as a list of buffers."""
    arrays, texts = _checked(tensors, attrs)
    names = [name.encode() for name in arrays]
    entries = []
    for key, value in ((key.encode(), value.encode()) for key, value in texts.items()):
        entries.append(_ATTR.pack(len(key), len(value)) + key + b"\0" + value + b"\0")
    index_size = sum(_align(len(entry), _ENTRY_ALIGN) for entry in entries) + sum(
        _align(_TENSOR.size + 8 * array.ndim + len(name) + 1, _ENTRY_ALIGN)
        for name, array in zip(names, arrays.values(), strict=True)
    )
    if index_size > _MAX_INDEX:
        raise KdtrError(f"the index takes {index_size} bytes, not at most {_MAX_INDEX}", Status.KDTR_CAP)

    index = bytearray()
    data: list[Any] = []
    cursor = _align(_HEADER.size + index_size, _DATA_ALIGN)
    for name, array in zip(names, arrays.values(), strict=True):
        flat = array.reshape(-1).view(np.uint8)
        code = _CODES[array.dtype]
        index += _TENSOR.pack(cursor, len(flat), zlib.crc32(flat.data), len(name), code, array.ndim)
        index += struct.pack(f"<{array.ndim}Q", *array.shape) + name + b"\0"
        index += bytes(-len(index) % _ENTRY_ALIGN)
        end = cursor + len(flat)
        cursor = _align(end, _DATA_ALIGN)
        data += [flat, bytes(cursor - end)]
    for entry in entries:
        index += entry + bytes(-len(entry) % _ENTRY_ALIGN)

    def header(checksum: int) -> bytes:
        counts = (len(arrays), len(texts))
        return _HEADER.pack(_MAGIC, _VERSION, 0, cursor, index_size, *counts, checksum, bytes(20))

    checksum = zlib.crc32(header(0) + index)
    return [header(checksum), index, bytes(-(_HEADER.size + index_size) % _DATA_ALIGN), *data]


def _checked(tensors: Tensors, attrs: Attrs | None) -> Content:
    """The content as it may be written: every rule kept, arrays little endian and contiguous."""
    if not isinstance(tensors, Mapping) or not isinstance(attrs, Mapping | None):
        raise KdtrError("tensors and attrs are mappings from names to arrays and strings", Status.KDTR_NAME)
    texts = {} if attrs is None else dict(attrs)
    if len(tensors) > _MAX_TENSORS or len(texts) > _MAX_ATTRS:
        raise KdtrError(f"{len(tensors)} tensors or {len(texts)} attributes are too many", Status.KDTR_CAP)
    arrays = {}
    for name, value in tensors.items():
        arrays[name] = _checked_array(name, value)
    for key, text in texts.items():
        _check_name("attribute", key)
        if not isinstance(text, str):
            raise KdtrError(f"attribute {key!r}: its value is no str", Status.KDTR_NAME)
        if len(text) > _MAX_INDEX:
            raise KdtrError(f"attribute {key!r}: its value does not fit the index", Status.KDTR_CAP)
        if not _encodable(text):
            raise KdtrError(f"attribute {key!r}: its value has a surrogate", Status.KDTR_NAME)
    return arrays, texts


def _checked_array(name: str, value: Any) -> Array:
    if not isinstance(value, (np.ndarray, np.generic)) or isinstance(value, np.ma.MaskedArray):
        raise KdtrError(f"tensor {name!r}: a {type(value).__name__} is no NumPy array", Status.KDTR_DTYPE)
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":  # of ml_dtypes
        array = array.view(bfloat16)
    # Of the other kinds, not all have a byte order to ask about.
    dtype = array.dtype.newbyteorder("<") if array.dtype.kind in "fiubV" else array.dtype
    if dtype not in _CODES:
        raise KdtrError(f"tensor {name!r}: KDTR has no dtype for {array.dtype}", Status.KDTR_DTYPE)
    if array.ndim > _MAX_DIMS:
        text = f"tensor {name!r}: {array.ndim} dimensions, at most {_MAX_DIMS} are allowed"
        raise KdtrError(text, Status.KDTR_SHAPE)
    _check_name("tensor", name)
    array = np.asarray(array, dtype, order="C")
    if dtype == np.bool_ and not _all_bool(array.reshape(-1).view(np.uint8)):
        raise KdtrError(f"tensor {name!r} has a bool that is neither 0 nor 1", Status.KDTR_VALUE)
    return array


def _check_name(what: str, name: Any) -> None:
    valid = isinstance(name, str) and _encodable(name) and "\0" not in name
    if not valid or not 1 <= len(name.encode()) <= _MAX_NAME:
        text = f"{what} {name!r}: a name is a str of 1..{_MAX_NAME} bytes of UTF-8 without NUL"
        raise KdtrError(text, Status.KDTR_NAME)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- npz, safetensors and conversion ---------------------------------------------------------------------

_NPZ_ATTRS = "__kdtr_attrs__"  # a uint8 array, the attributes as JSON; np.load shows it like any other

_SAFETENSORS = {
    "F64": 1,
    "F32": 2,
    "F16": 3,
    "BF16": 4,
    "I64": 5,
    "I32": 6,
    "I16": 7,
    "I8": 8,
    "U64": 9,
    "U32": 10,
    "U16": 11,
    "U8": 12,
    "BOOL": 13,
}


def load_npz(path: StrPath) -> Content:
    """Reads an npz file, by :func:`save_npz` or ``np.savez``; never unpickles."""
    tensors: dict[str, Array] = {}
    with _open_regular(path) as file, _foreign_errors(path), zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name == member:
                raise KdtrError(f"{os.fspath(path)}: {member!r} is no npy file", Status.KDTR_DTYPE)
            if name in tensors:
                raise KdtrError(f"{os.fspath(path)}: two arrays are named {name!r}", Status.KDTR_NAME)
            with archive.open(member) as stream:
                tensors[name] = np.lib.format.read_array(stream, allow_pickle=False)
        attrs = json.loads(tensors.pop(_NPZ_ATTRS).tobytes()) if _NPZ_ATTRS in tensors else {}
        if not isinstance(attrs, dict):
            raise KdtrError(f"{os.fspath(path)}: {_NPZ_ATTRS!r} is no JSON object", Status.KDTR_NAME)
        return _checked(tensors, attrs)


def save_npz(path: StrPath, tensors: Tensors, attrs: Attrs | None = None) -> None:
    """Writes an npz file that ``np.load`` reads too, as atomically and deterministically as :func:`save`.

    Attributes go into one more array, ``__kdtr_attrs__``; there is none when there are no attributes.
    """
    arrays, texts = _checked(tensors, attrs)
    if _NPZ_ATTRS in arrays:
        raise KdtrError(f"the name {_NPZ_ATTRS!r} is reserved in npz files", Status.KDTR_NAME)
    if texts:
        arrays[_NPZ_ATTRS] = np.frombuffer(json.dumps(texts, ensure_ascii=False).encode(), np.uint8)
    # Not np.savez: it cannot store every name ("file", for one).
    with _replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


def load_safetensors(path: StrPath) -> Content:
    """Reads a safetensors file: tensors in the order of its header, attributes sorted by key."""
    library = _import_safetensors()
    with _open_regular(path) as file, _foreign_errors(path):
        data = file.read()
        items = dict(library.deserialize(data))
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        attrs = dict(sorted(header.pop("__metadata__", {}).items()))
        tensors = {}
        for name in header:
            item = items[name]
            if item["dtype"] not in _SAFETENSORS:
                text = f"tensor {name!r}: KDTR has no dtype for {item['dtype']}"
                raise KdtrError(f"{os.fspath(path)}: {text}", Status.KDTR_DTYPE)
            _, dtype = _DTYPES[_SAFETENSORS[item["dtype"]]]
            tensors[name] = np.frombuffer(bytearray(item["data"]), dtype).reshape(item["shape"])
        return _checked(tensors, attrs)


def save_safetensors(path: StrPath, tensors: Tensors, attrs: Attrs | None = None) -> None:
    """Writes a safetensors file, as atomically as :func:`save`, with the attributes as its metadata.

    That format keeps no order of tensors or attributes, and its bytes may differ from run to run.
    """
    library = _import_safetensors()
    arrays, texts = _checked(tensors, attrs)
    if "__metadata__" in arrays:
        raise KdtrError("the name '__metadata__' is reserved in safetensors files", Status.KDTR_NAME)
    specs = {
        name: library.TensorSpec(
            dtype="bfloat16" if array.dtype == bfloat16 else array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,  # `arrays` keeps it alive
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    data = library.serialize(specs, texts or None)
    with _replacing(path) as file:
        file.write(data)


Loader: TypeAlias = "Callable[[StrPath], Content]"
Saver: TypeAlias = "Callable[[StrPath, Tensors, Attrs], None]"

_FORMATS: dict[str, tuple[Loader, Saver]] = {
    ".kdtr": (load, save),
    ".npz": (load_npz, save_npz),
    ".safetensors": (load_safetensors, save_safetensors),
}


def loader_of(path: StrPath) -> Loader:
    """The function that loads a file of this suffix: .kdtr, .npz or .safetensors."""
    return _format_of(path)[0]


def saver_of(path: StrPath) -> Saver:
    """The function that saves a file of this suffix: .kdtr, .npz or .safetensors."""
    return _format_of(path)[1]


def convert(src: StrPath, dst: StrPath) -> None:
    """Copies a file's content into another format; the suffixes name them."""
    load_source, save_destination = loader_of(src), saver_of(dst)
    save_destination(dst, *load_source(src))


def _format_of(path: StrPath) -> tuple[Loader, Saver]:
    suffix = os.path.splitext(os.fsdecode(path))[1].lower()
    if suffix not in _FORMATS:
        raise KdtValueError(f"{os.fsdecode(path)!r} does not end in {', '.join(_FORMATS)}")
    return _FORMATS[suffix]


def _import_safetensors() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ImportError as error:
        text = "safetensors files need an optional package: pip install kdtree-engine[safetensors]"
        raise MissingExtraError(text) from error


# ---- Files -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _io_errors(action: str, path: StrPath) -> Iterator[None]:
    """Failures of the system become KdtrError; ValueError is what a path with a NUL gives."""
    try:
        yield
    except KdtError:
        raise
    except MemoryError as error:
        raise KdtrError(f"cannot {action} {os.fspath(path)!r}: out of memory", Status.OUT_OF_MEMORY) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KdtrError(f"cannot {action} {os.fspath(path)!r}: {reason}", Status.KDTR_IO) from error


@contextlib.contextmanager
def _foreign_errors(path: StrPath) -> Iterator[None]:
    """Whatever the parsers of other formats raise on a damaged file becomes KdtrError."""
    try:
        yield
    except (KdtError, MemoryError):
        raise
    except Exception as error:
        raise KdtrError(f"cannot read {os.fspath(path)!r}: {error}", Status.KDTR_IO) from error


@contextlib.contextmanager
def _open_regular(path: StrPath) -> Iterator[BinaryIO]:
    with _io_errors("read", path):
        # O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise KdtrError(f"{os.fspath(path)!r} is not a regular file", Status.KDTR_IO)
        with open(fd, "rb", buffering=0) as file:
            yield file


@contextlib.contextmanager
def _replacing(path: StrPath) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends well, and vanishes otherwise."""
    with _io_errors("write", path):
        target = os.path.realpath(path)
        if os.path.lexists(target) and not os.path.isfile(target):
            raise KdtrError(f"{os.fspath(path)!r} is not a regular file", Status.KDTR_IO)
        temporary, fd = _create_beside(target)
        try:
            with open(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


_temporaries = itertools.count()


def _create_beside(target: str) -> tuple[str, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(100):
        name = f".kdtr-{os.getpid()}-{next(_temporaries)}.tmp"
        path = os.path.join(os.path.dirname(target), name)
        try:
            return path, os.open(path, flags, 0o666)
        except FileExistsError:  # a leftover of a crash has this name: try the next
            continue
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
