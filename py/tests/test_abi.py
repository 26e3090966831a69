"""The library as a file: exports, header against ctypes, loading."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import kdtree_engine as kdt
from kdtree_engine import _abi, _library
from kdtree_engine._errors import Status
from kdtree_engine.types import StatusFlag

HEADER = (ROOT / "include/kdtree/kdtree.h").read_text()
KDTR_HEADER = (ROOT / "include/kdtree/kdtr.h").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER + KDTR_HEADER, flags=re.DOTALL)


def test_exports_are_the_declared_functions(library_path: Path) -> None:
    nm = shutil.which("nm")
    assert nm is not None, "nm is missing: install binutils"
    symbols = subprocess.run([nm, "-D", "--defined-only", library_path], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    declared = set(re.findall(r"KDT_API [\w* ]+?\b(kdt\w+)\(", CODE))
    assert exported == declared
    assert len(declared) >= 30


def test_structs_are_the_headers_field_by_field() -> None:
    types = {
        "size_t": ctypes.c_size_t,
        "int32_t": ctypes.c_int32,
        "int64_t": ctypes.c_int64,
        "uint64_t": ctypes.c_uint64,
        "float": ctypes.c_float,
        "char": ctypes.c_char,
    }
    mirrored = {
        "kdt_context_params": _abi.ContextParams,
        "kdt_device_info": _abi.DeviceInfo,
        "kdt_tree": _abi.TreeStruct,
        "kdt_kv_cache": _abi.KvCacheStruct,
        **{f"kdt_{name}_params": params for name, params in _abi.OPERATIONS.items()},
    }
    found = re.findall(r"typedef struct (kdt_\w+) \{(.*?)\} \1;", CODE, re.DOTALL)
    assert {name for name, _ in found} == set(mirrored)
    for name, body in found:
        fields = re.findall(r"([\w ]+?[\w*](?: const\*)?[ ]*)\b(\w+)(?:\[(\d+)\])?;", body)
        assert len(fields) == body.count(";"), name
        struct = mirrored[name]
        assert [field for _, field, _ in fields] == [field for field, *_ in struct._fields_], name
        for (kind, field, count), (_, mirror, *_) in zip(fields, struct._fields_, strict=True):
            if "*" in kind:
                assert ctypes.sizeof(mirror) == ctypes.sizeof(ctypes.c_void_p), f"{name}.{field}"
                assert mirror is ctypes.c_void_p or issubclass(mirror, ctypes._Pointer), f"{name}.{field}"
            else:
                expected = types[kind.split()[-1]]
                assert mirror == (expected * int(count) if count else expected), f"{name}.{field}"


def test_numbers_are_the_headers() -> None:
    constants = {name: int(value) for name, value in re.findall(r"\b(KDTR?_\w+) = (\d+)", CODE)}
    for status in Status:
        name = status.name if status else "OK"
        c_name = {"OK": "KDT_OK"}.get(name) or (
            f"KDTR_ERR_{name[5:]}" if name.startswith("KDTR_") else f"KDT_ERR_{name}"
        )
        assert constants.pop(c_name) == status
        assert _library.load().kdt_status_name(status).decode() == c_name
    for flag in StatusFlag:
        assert constants.pop(f"KDT_STATUS_{flag.name}") == flag
    assert not [name for name in constants if "ERR" in name or "STATUS" in name]
    assert constants["KDT_BACKEND_CPU"] == _abi.BACKENDS["cpu"]
    assert constants["KDT_BACKEND_CUDA"] == _abi.BACKENDS["cuda"]
    assert _library.load().kdt_status_name(12345) == b"unknown status"


def test_versions_agree(library_path: Path) -> None:
    version = re.search(r'KDT_VERSION "([\d.]+)"', HEADER)
    assert version is not None
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{version[1]}"' in pyproject
    assert kdt.__version__ == version[1] == _library.load().kdt_version().decode() == kdt.build_info()["version"]
    assert _library.load().kdt_abi_version() // 1000 == _abi.ABI_MAJOR
    assert f"KDT_ABI_MAJOR {_abi.ABI_MAJOR}\n" in HEADER


def test_soname_carries_the_abi_major(library_path: Path) -> None:
    readelf = shutil.which("readelf")
    assert readelf is not None, "readelf is missing: install binutils"
    dynamic = subprocess.run([readelf, "-d", library_path], capture_output=True, text=True, check=True).stdout
    assert f"Library soname: [libkdtree_kernels.so.{_abi.ABI_MAJOR}]" in dynamic
    needed = set(re.findall(r"NEEDED.*\[(.*?)\.so", dynamic))
    assert needed <= {"libstdc++", "libgcc_s", "libc", "libm", "libpthread", "librt", "libdl", "ld-linux-x86-64"} | {
        name for name in needed if name.endswith("san")
    }


def run_with_library(value: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KDTREE_LIBRARY": value}
    command = [sys.executable, "-m", "kdtree_engine", "info"]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_forced_library_must_exist(tmp_path: Path, library_path: Path) -> None:
    good = run_with_library(str(library_path), tmp_path)
    assert good.returncode == 0, good.stderr
    assert str(library_path) in good.stdout
    text = tmp_path / "libtext.so"
    text.write_text("no library")
    for value, reason in (
        (str(tmp_path / "nowhere.so"), "no such file"),
        ("libkdtree_kernels.so", "not an absolute path"),
        (str(text), "invalid ELF header|file too short"),
        (str(tmp_path), "no such file"),
        ("/lib/x86_64-linux-gnu/libm.so.6", "not a kdtree-engine library|no such file"),
    ):
        bad = run_with_library(value, tmp_path)
        assert bad.returncode == 3, value
        assert "KDTREE_LIBRARY" in bad.stderr
        assert re.search(reason, bad.stderr), bad.stderr
        assert "Traceback" not in bad.stderr
        assert bad.stdout == ""


def test_all_paths_tried_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KDTREE_LIBRARY", raising=False)
    monkeypatch.setattr(_library, "source_root", lambda: tmp_path)
    monkeypatch.setattr(_library.importlib.resources, "files", lambda _package: tmp_path / "package")
    _library._loaded.cache_clear()
    try:
        with pytest.raises(kdt.LibraryNotFoundError) as caught:
            _library.load()
    finally:
        _library._loaded.cache_clear()
    for tried in ("package/libkdtree_kernels.so", *(f"build/{name}/lib" for name in _library.BUILD_TREES)):
        assert tried in str(caught.value)


def test_another_abi_is_refused(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None, "cc is missing: install a C compiler"
    source = tmp_path / "old.c"
    source.write_text("int kdt_abi_version(void) { return 9000; }\n")
    library = tmp_path / "libold.so"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    bad = run_with_library(str(library), tmp_path)
    assert bad.returncode == 3
    assert "its ABI is 9.0, this package needs 1" in bad.stderr
