"""The KDTR container: the shared corpus, agreement with the C reader, the writers, npz and safetensors."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import re
import resource
import signal
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine import _errors, kdtr
from kdtree_engine._errors import KdtError, KdtrError, KdtValueError, MissingExtraError, Status

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests_cpp" / "data" / "kdtr"
EXPECTED = {
    name: int(code) for name, code in (line.split() for line in (CORPUS / "expected.txt").read_text().splitlines())
}
GOOD = [name for name, code in EXPECTED.items() if code == Status.OK]
GOLDEN = (CORPUS / "good_golden.kdtr").read_bytes()

GOLDEN_TENSORS = {
    "hidden": np.array([[0.0, -0.0, 1.5], [-2.25, 3e38, np.inf]], np.float32),
    "logits.bf16": np.array([0x3F80, 0xC000, 0x7FC0], np.uint16).view(kdtr.bfloat16),
    "mask": np.array([True, False, True, True, False]),
    "step": np.array(-(2**62), np.int64),
    "empty": np.empty((0, 4), np.float16),
}
GOLDEN_ATTRS = {"model": "kdtree", "größe": "naïve ☃ 🌲", "none": "", "nul": "a\0b"}

DTYPES: list[Any] = [
    "<f8",
    "<f4",
    "<f2",
    kdtr.bfloat16,
    "<i8",
    "<i4",
    "<i2",
    "<i1",
    "<u8",
    "<u4",
    "<u2",
    "<u1",
    "?",
]

CodeOf = Callable[[bytes | bytearray], int]


def code_of(data: bytes | bytearray) -> int:
    try:
        kdtr.loads(data)
    except KdtrError as error:
        return error.status
    return Status.OK


def status_of(call: Callable[[], object]) -> int:
    with pytest.raises(KdtrError) as caught:
        call()
    return caught.value.status


def assert_same(content: tuple[dict[str, Any], dict[str, str]], tensors: dict[str, Any], attrs: dict[str, str]) -> None:
    """The same names, types, shapes and bits in the same order."""
    assert list(content[0]) == list(tensors)
    assert list(content[1].items()) == list(attrs.items())
    for name, array in content[0].items():
        assert array.dtype == tensors[name].dtype, name
        assert array.shape == tensors[name].shape, name
        assert array.tobytes() == tensors[name].tobytes(), name


def every_dtype() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    arrays = {}
    for dtype in (np.dtype(each) for each in DTYPES):
        raw = rng.integers(0, 2 if dtype == np.bool_ else 256, 6 * dtype.itemsize, np.uint8)
        arrays[f"t {dtype}"] = raw.view(dtype).reshape(2, 3)
    return arrays


# ---- The corpus and the C reader -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kdtr_lib(library_path: Path) -> CodeOf:
    """The C reader: the status code of kdtr_parse for some bytes."""
    library = ctypes.CDLL(str(library_path))
    library.kdtr_parse.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
    library.kdtr_close.argtypes = [ctypes.c_void_p]
    library.kdtr_close.restype = None
    file = ctypes.c_void_p()

    def parse(data: bytes | bytearray) -> int:
        status: int = library.kdtr_parse(bytes(data), len(data), ctypes.byref(file))
        assert (file.value is None) == (status != Status.OK)
        library.kdtr_close(file)
        return status

    return parse


@pytest.mark.parametrize("name", EXPECTED)
def test_corpus(name: str) -> None:
    data = (CORPUS / name).read_bytes()
    assert code_of(data) == EXPECTED[name]
    if EXPECTED[name] == Status.OK:
        kdtr.load(CORPUS / name)
    else:
        with pytest.raises(KdtrError, match=re.escape(name)) as caught:
            kdtr.load(CORPUS / name)
        assert caught.value.status == EXPECTED[name]


def test_corpus_lists_every_file_and_has_every_code() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {"expected.txt", *EXPECTED}
    assert set(range(Status.KDTR_TOO_SHORT, Status.KDTR_VALUE + 1)) <= set(EXPECTED.values())


def test_corpus_in_c(kdtr_lib: CodeOf) -> None:
    codes = {name: kdtr_lib((CORPUS / name).read_bytes()) for name in EXPECTED}
    assert codes == EXPECTED


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_has_one_form_only(name: str) -> None:
    data = (CORPUS / name).read_bytes()
    assert kdtr.dumps(*kdtr.loads(data)) == data


def test_every_truncation(kdtr_lib: CodeOf) -> None:
    for size in range(len(GOLDEN)):
        expected = Status.KDTR_TOO_SHORT if size < 64 else Status.KDTR_FILE_SIZE
        assert code_of(GOLDEN[:size]) == expected == kdtr_lib(GOLDEN[:size])


def test_every_changed_byte(kdtr_lib: CodeOf) -> None:
    data = bytearray(GOLDEN)
    for at, byte in enumerate(GOLDEN):
        for other in range(256):
            if other != byte:
                data[at] = other
                code = code_of(data)
                assert code == kdtr_lib(data), (at, other)
                assert code != Status.OK, (at, other)
        data[at] = byte


def entry_starts(data: bytes) -> list[tuple[int, int, int]]:
    """For each tensor: where its index entry starts, its offset and its size."""
    num_tensors = struct.unpack_from("<I", data, 32)[0]
    starts, at = [], 64
    for _ in range(num_tensors):
        offset, nbytes, _, name_len, _, ndim = struct.unpack_from("<QQIHBB", data, at)
        starts.append((at, offset, nbytes))
        at += (24 + 8 * ndim + name_len + 1 + 7) // 8 * 8
    return starts


def mutated(data: bytes, rng: random.Random) -> bytearray:
    """A few changes of a good file, then the checksums made right, so that the deep checks are reached."""
    out = bytearray(data)
    index_end = 64 + struct.unpack_from("<Q", data, 24)[0]
    if rng.random() < 0.1:
        out += bytes(rng.choice((1, 8, 64, 128)))
    elif rng.random() < 0.1:
        del out[max(64, len(out) - rng.choice((1, 8, 64, 128))) :]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        kind = rng.random()
        low, high = (24, 40) if kind < 0.05 else (64, index_end) if kind < 0.7 else (index_end, len(out))
        high = min(high, len(out))
        if low >= high:
            continue
        at = rng.randrange(low, high)
        if rng.random() < 0.8:
            values = (0, 1, 2, 4, 8, 9, 13, 14, 0x7F, 0x80, 0xC3, 0xED, 0xF4, 0xFF, rng.randrange(256))
            out[at] = rng.choice(values)
        else:  # eight bytes from one place to another: doubled names, swapped entries, overlaps
            at, source = at & ~7, rng.randrange(low, high) & ~7
            out[at : at + 8] = out[source : source + 8].ljust(8, b"\0")[: len(out) - at]
    if rng.random() < 0.9:
        out[16:24] = struct.pack("<Q", len(out))
    if rng.random() < 0.8:
        for at, offset, nbytes in entry_starts(data):
            if at + 24 <= len(out):
                out[at + 16 : at + 20] = struct.pack("<I", zlib.crc32(out[offset : offset + nbytes]))
    index_size = struct.unpack_from("<Q", out, 24)[0]
    if index_size <= len(out):
        out[40:44] = bytes(4)
        out[40:44] = struct.pack("<I", zlib.crc32(out[: 64 + index_size]))
    return out


def test_mutations(kdtr_lib: CodeOf) -> None:
    rng = random.Random(604_12989)
    files = [(CORPUS / name).read_bytes() for name in GOOD if name != "good_empty.kdtr"]
    codes: Counter[int] = Counter()
    for round_ in range(200_000):
        data = mutated(files[round_ % len(files)], rng)
        code = code_of(data)
        assert code == kdtr_lib(data), f"round {round_}: {bytes(data).hex()}"
        if code == Status.OK:
            assert kdtr.dumps(*kdtr.loads(data)) == data
        codes[code] += 1
    # Each deep check was reached; a wrong index checksum cannot be, as it is always made right.
    deep = set(range(Status.KDTR_FILE_SIZE, Status.KDTR_VALUE + 1)) - {Status.KDTR_INDEX_CHECKSUM}
    missed = {code for code in deep if codes[code] < 10}
    assert not missed, codes
    assert codes[Status.OK] >= 100


# ---- Reading ---------------------------------------------------------------------------------------------


def test_golden(tmp_path: Path) -> None:
    hint = "The format has changed. If that is meant, it needs a new version number."
    assert kdtr.dumps(GOLDEN_TENSORS, GOLDEN_ATTRS) == GOLDEN, hint
    kdtr.save(tmp_path / "golden.kdtr", GOLDEN_TENSORS, GOLDEN_ATTRS)
    assert (tmp_path / "golden.kdtr").read_bytes() == GOLDEN
    assert_same(kdtr.load(tmp_path / "golden.kdtr"), GOLDEN_TENSORS, GOLDEN_ATTRS)


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, lambda data: memoryview(data)[::1]])
def test_loads_takes_bytes_like(convert: Callable[[bytes], Any]) -> None:
    assert_same(kdtr.loads(convert(GOLDEN)), GOLDEN_TENSORS, GOLDEN_ATTRS)


def test_loads_does_not_keep_the_data() -> None:
    data = bytearray(GOLDEN)
    content = kdtr.loads(data)
    data[:] = bytes(len(data))
    assert_same(content, GOLDEN_TENSORS, GOLDEN_ATTRS)


@pytest.mark.parametrize("name", GOOD)
def test_arrays_are_aligned_writable_and_share_one_buffer(name: str) -> None:
    for content in (kdtr.load(CORPUS / name), kdtr.loads((CORPUS / name).read_bytes())):
        owners = set()
        for array in content[0].values():
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.ctypes.data % 64 == 0 or array.size == 0
            owner = array
            while owner.base is not None:
                owner = owner.base
            owners.add(id(owner))
            assert owner.nbytes == (CORPUS / name).stat().st_size + 63
        assert len(owners) <= 1


def test_bfloat16_survives() -> None:
    array = np.arange(24, dtype=np.uint16).view(kdtr.bfloat16).reshape(4, 6)
    loaded = kdtr.loads(kdtr.dumps({"t": array[1:, ::2]}))[0]["t"]
    assert loaded.dtype == kdtr.bfloat16
    assert loaded[1:].dtype == kdtr.bfloat16
    np.testing.assert_array_equal(loaded["bfloat16"], array["bfloat16"][1:, ::2])


@pytest.mark.parametrize("path", ["missing.kdtr", "missing/x.kdtr", ".", "fifo", "/dev/null", "/dev/zero", "a\0b"])
def test_only_regular_files_are_read(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for read in (kdtr.load, kdtr.inspect, kdtr.load_npz):
        with pytest.raises(KdtrError) as caught:
            read(tmp_path / path)
        assert caught.value.status == Status.KDTR_IO
        assert repr(str(tmp_path / path)) in str(caught.value)
    if path.startswith("missing"):
        assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_large_file_that_is_none_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sparse.kdtr"
    path.write_bytes(b"PK")
    os.truncate(path, 1 << 40)
    assert status_of(lambda: kdtr.load(path)) == Status.KDTR_MAGIC


def test_inspect() -> None:
    info = kdtr.inspect(CORPUS / "good_golden.kdtr")
    assert info.size == len(GOLDEN)
    assert info.attrs == GOLDEN_ATTRS
    assert [tensor.name for tensor in info.tensors] == list(GOLDEN_TENSORS)
    assert [tensor.dtype for tensor in info.tensors] == ["f32", "bf16", "bool", "i64", "f16"]
    for tensor in info.tensors:
        array = GOLDEN_TENSORS[tensor.name]
        assert (tensor.shape, tensor.nbytes) == (array.shape, array.nbytes)
        assert tensor.crc32 == zlib.crc32(array.tobytes())
        assert GOLDEN[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


# ---- Writing ---------------------------------------------------------------------------------------------


def test_round_trip_of_every_dtype(tmp_path: Path) -> None:
    tensors = every_dtype()
    tensors |= {f"0-d {name}": array[1, 2].reshape(()) for name, array in every_dtype().items()}
    tensors |= {f"empty {name}": array[:0] for name, array in every_dtype().items()}
    kdtr.save(tmp_path / "x.kdtr", tensors)
    assert_same(kdtr.load(tmp_path / "x.kdtr"), tensors, {})
    assert (tmp_path / "x.kdtr").read_bytes() == kdtr.dumps(tensors) == kdtr.dumps(tensors, {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_are_converted(dtype: Any) -> None:
    base = np.zeros((4, 6), dtype)
    base.view(np.uint8)[:] = np.arange(base.nbytes).reshape(4, -1) % (2 if dtype == "?" else 256)
    expected = kdtr.dumps({"t": base.copy()})
    wide = np.zeros((8, 18), dtype)
    wide[::2, ::3] = base
    for other in (base.astype(base.dtype.newbyteorder(">")), np.asfortranarray(base), wide[::2, ::3]):
        assert kdtr.dumps({"t": other}) == expected
    assert kdtr.dumps({"t": base[::-1]}) == kdtr.dumps({"t": base[::-1].copy()})
    assert kdtr.dumps({"t": base[1, 2]}) == kdtr.dumps({"t": base[1:2, 2:3].copy().reshape(())})


def test_ml_dtypes_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([[1.0, -2.0], [np.inf, 0.5]], ml_dtypes.bfloat16)
    for array in (values, values.T, values[0, 1]):
        loaded = kdtr.loads(kdtr.dumps({"t": array}))[0]["t"]
        assert loaded.dtype == kdtr.bfloat16
        assert loaded.shape == array.shape
        assert loaded.tobytes() == array.tobytes()
    assert status_of(lambda: kdtr.dumps({"t": values.astype(ml_dtypes.float8_e5m2)})) == Status.KDTR_DTYPE


@pytest.mark.parametrize(
    "value",
    [
        np.array([None]),
        np.array([1j]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, "V2"),
        np.zeros(2, [("x", "<u2")]),
        np.zeros(2, np.longdouble),
        pytest.param(
            np.array(["text"], np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else None,
            id="StringDType",
        ),
        [1.0, 2.0],
        1.0,
        None,
    ],
)
def test_unsupported_values_are_named(value: Any) -> None:
    with pytest.raises(KdtrError, match="tensor 'logits'") as caught:
        kdtr.dumps({"logits": value})
    assert caught.value.status == Status.KDTR_DTYPE


@pytest.mark.parametrize("name", ["", "n" * 256, "é" * 128, "a\0", "\ud800", 3, None])
def test_bad_names_are_refused(name: Any) -> None:
    tensor = np.zeros(1)
    assert status_of(lambda: kdtr.dumps({name: tensor})) == Status.KDTR_NAME
    assert status_of(lambda: kdtr.dumps({}, {name: "v"})) == Status.KDTR_NAME


def test_other_bad_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(lambda: kdtr.dumps({}, {"k": "\udfff"})) == Status.KDTR_NAME
    assert status_of(lambda: kdtr.dumps({}, {"k": 3})) == Status.KDTR_NAME  # type: ignore[dict-item]
    assert status_of(lambda: kdtr.dumps({"t": np.zeros((1,) * 9)})) == Status.KDTR_SHAPE
    assert status_of(lambda: kdtr.dumps({"t": np.array([0, 2], np.uint8).view(bool)})) == Status.KDTR_VALUE
    attrs = {str(i): "" for i in range(65537)}
    assert status_of(lambda: kdtr.dumps({}, attrs)) == Status.KDTR_CAP
    value = "v" * ((64 << 20) - 11)  # 8 + "k\0" + value + "\0" is the cap
    assert kdtr.loads(kdtr.dumps({}, {"k": value}))[1] == {"k": value}
    assert status_of(lambda: kdtr.dumps({}, {"k": value, "l": ""})) == Status.KDTR_CAP
    assert status_of(lambda: kdtr.dumps({}, {"k": value + "v"})) == Status.KDTR_CAP


SAVERS = [kdtr.save, kdtr.save_npz]


@pytest.mark.parametrize("save", SAVERS)
def test_save_that_fails_leaves_the_old_file(save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    large = {"large": np.zeros(1 << 16)}
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old_limit[1]))  # stands in for a full disk
    try:
        assert status_of(lambda: save(path, large)) == Status.KDTR_IO
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    with pytest.raises(KdtrError):
        save(path, {"t": np.array([None])})
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"
    save(path, large)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert path.stat().st_size > 8 << 16


@pytest.mark.parametrize("save", SAVERS)
def test_save_refuses_what_is_no_file(save: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    for name in ("folder", "full", "loop", "fifo", "file/x", "missing/x", "a\0b"):
        assert status_of(lambda name=name: save(tmp_path / name, {})) == Status.KDTR_IO  # type: ignore[misc]
    assert sorted(tmp_path.iterdir()) == before


def test_save_follows_links_and_honours_the_umask(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")  # dangling at first
    old = os.umask(0o027)
    try:
        for _ in range(2):
            kdtr.save(tmp_path / "link", GOLDEN_TENSORS, GOLDEN_ATTRS)
            assert (tmp_path / "target").read_bytes() == GOLDEN
            assert (tmp_path / "target").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


# ---- npz, safetensors, conversion ------------------------------------------------------------------------


def test_npz_round_trip(tmp_path: Path) -> None:
    tensors = {**GOLDEN_TENSORS, **every_dtype()}
    tensors |= {
        "file": np.zeros(1),
        "a.npy": np.zeros(2),
        "a": np.zeros(3),
        "../up/": np.zeros(4),
        "/": np.zeros(5),
    }
    kdtr.save_npz(tmp_path / "x.npz", tensors, GOLDEN_ATTRS)
    assert_same(kdtr.load_npz(tmp_path / "x.npz"), tensors, GOLDEN_ATTRS)
    first = (tmp_path / "x.npz").read_bytes()
    kdtr.save_npz(tmp_path / "x.npz", tensors, GOLDEN_ATTRS)
    assert (tmp_path / "x.npz").read_bytes() == first
    kdtr.save_npz(tmp_path / "x.npz", {})
    assert_same(kdtr.load_npz(tmp_path / "x.npz"), {}, {})


def test_npz_is_numpys(tmp_path: Path) -> None:
    kdtr.save_npz(tmp_path / "x.npz", GOLDEN_TENSORS, GOLDEN_ATTRS)
    with np.load(tmp_path / "x.npz") as archive:
        assert archive.files == [*GOLDEN_TENSORS, "__kdtr_attrs__"]
        assert archive["logits.bf16"].dtype == kdtr.bfloat16
    tensors = {"a": np.arange(6, dtype=">i4").reshape(2, 3).T, "b": np.array(1.5)}
    np.savez_compressed(tmp_path / "y.npz", a=tensors["a"], b=tensors["b"])
    loaded, attrs = kdtr.load_npz(tmp_path / "y.npz")
    assert attrs == {}
    np.testing.assert_array_equal(loaded["a"], tensors["a"])
    assert loaded["a"].dtype == np.dtype("<i4")
    assert loaded["b"].shape == ()


def test_npz_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.array([{}]))
    assert status_of(lambda: kdtr.load_npz(path)) == Status.KDTR_IO  # never unpickled
    np.savez(path, a=np.array([1j]))
    assert status_of(lambda: kdtr.load_npz(path)) == Status.KDTR_DTYPE
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "text")
    assert status_of(lambda: kdtr.load_npz(path)) == Status.KDTR_DTYPE
    assert status_of(lambda: kdtr.save_npz(path, {"__kdtr_attrs__": np.zeros(1)})) == Status.KDTR_NAME
    for raw in (b"[]", b'{"a": 1}', b"{"):
        np.savez(path, __kdtr_attrs__=np.frombuffer(raw, np.uint8))
        assert status_of(lambda: kdtr.load_npz(path)) in (Status.KDTR_IO, Status.KDTR_NAME)
    kdtr.save_npz(path, GOLDEN_TENSORS, GOLDEN_ATTRS)
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        assert status_of(lambda: kdtr.load_npz(path)) == Status.KDTR_IO


def test_safetensors_round_trip(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    tensors = {**GOLDEN_TENSORS, **every_dtype()}
    attrs = dict(sorted(GOLDEN_ATTRS.items()))
    kdtr.save_safetensors(path, tensors, GOLDEN_ATTRS)
    loaded, loaded_attrs = kdtr.load_safetensors(path)
    assert_same(({name: loaded[name] for name in tensors}, loaded_attrs), tensors, attrs)
    assert len(loaded) == len(tensors)
    assert all(array.flags.writeable for array in loaded.values())
    kdtr.save_safetensors(path, {})
    assert_same(kdtr.load_safetensors(path), {}, {})


def test_safetensors_is_safetensors(tmp_path: Path) -> None:
    numpy_module = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "x.safetensors"
    tensors = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([True, False]), "c": np.array(3, np.int16)}
    kdtr.save_safetensors(path, tensors)
    for name, array in numpy_module.load_file(path).items():
        np.testing.assert_array_equal(array, tensors[name], strict=True)
    numpy_module.save_file(tensors, path, {"k": "v"})
    loaded, attrs = kdtr.load_safetensors(path)
    assert attrs == {"k": "v"}
    assert_same(({name: loaded[name] for name in tensors}, {}), tensors, {})


def test_safetensors_errors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    assert status_of(lambda: kdtr.load_safetensors(path)) == Status.KDTR_IO
    header = b'{"t":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(KdtrError, match="tensor 't'") as caught:
        kdtr.load_safetensors(path)
    assert caught.value.status == Status.KDTR_DTYPE
    path.write_bytes(b"\0" * 20)
    assert status_of(lambda: kdtr.load_safetensors(path)) == Status.KDTR_IO
    assert status_of(lambda: kdtr.save_safetensors(path, {"__metadata__": np.zeros(1)})) == Status.KDTR_NAME


def test_safetensors_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: kdtr.save_safetensors(tmp_path / "x", {}),
        lambda: kdtr.load_safetensors(tmp_path / "x"),
    ):
        with pytest.raises(MissingExtraError, match=r"pip install kdtree-engine\[safetensors\]"):
            call()


def test_convert(tmp_path: Path) -> None:
    kdtr.save(tmp_path / "a.kdtr", GOLDEN_TENSORS, GOLDEN_ATTRS)
    kdtr.convert(tmp_path / "a.kdtr", tmp_path / "b.NPZ")
    kdtr.convert(str(tmp_path / "b.NPZ"), tmp_path / "c.kdtr")
    assert (tmp_path / "c.kdtr").read_bytes() == GOLDEN
    pytest.importorskip("safetensors")
    kdtr.convert(tmp_path / "b.NPZ", tmp_path / "d.safetensors")
    kdtr.convert(tmp_path / "d.safetensors", tmp_path / "e.kdtr")
    tensors, attrs = kdtr.load(tmp_path / "e.kdtr")
    assert_same(({name: tensors[name] for name in GOLDEN_TENSORS}, {}), GOLDEN_TENSORS, {})
    assert attrs == GOLDEN_ATTRS


@pytest.mark.parametrize("pair", [("a.kdtr", "b.txt"), ("a", "b.kdtr"), ("kdtr", "b.npz"), (".kdtr", "b.npz")])
def test_convert_of_unknown_suffixes(pair: tuple[str, str]) -> None:
    with pytest.raises(KdtValueError) as caught:
        kdtr.convert(*pair)
    assert caught.value.status == Status.INVALID_ARGUMENT


# ---- Errors ----------------------------------------------------------------------------------------------


def test_status_mirrors_the_headers() -> None:
    text = "".join((ROOT / "include" / "kdtree" / name).read_text() for name in ("kdtree.h", "kdtr.h"))
    codes = dict(re.findall(r"^  (KDT_OK|KDTR?_ERR_\w+) = (\d+),?", text, re.MULTILINE))
    names = {name.replace("KDT_ERR_", "").replace("KDTR_ERR_", "KDTR_").replace("KDT_", ""): int(code)
             for name, code in codes.items()}  # fmt: skip
    assert names == {status.name: status.value for status in Status}


@pytest.mark.parametrize(
    ("cls", "base", "status"),
    [
        (_errors.KdtValueError, ValueError, Status.INVALID_ARGUMENT),
        (_errors.KdtrError, ValueError, Status.KDTR_IO),
        (_errors.LibraryNotFoundError, OSError, Status.UNSUPPORTED),
        (_errors.MissingExtraError, ImportError, Status.UNSUPPORTED),
        (_errors.NoDeviceError, RuntimeError, Status.NO_DEVICE),
    ],
)
def test_errors(cls: type[KdtError], base: type[Exception], status: Status) -> None:
    assert issubclass(cls, KdtError)
    assert issubclass(cls, base)
    assert cls("text").status == status
    error = pickle.loads(pickle.dumps(cls("text", Status.CUDA)))
    assert (type(error), str(error), error.status) == (cls, "text", Status.CUDA)
    assert cls("text", 777).status == 777
