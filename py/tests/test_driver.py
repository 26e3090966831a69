"""The CUDA backend's Python side without a GPU: other people's arrays, the driver's functions, bad drivers."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtree_engine as kdt
from kdtree_engine import Status, _cuda
from kdtree_engine._arrays import DeviceMemory

F32, I32 = np.float32, np.int32
MEMORY = DeviceMemory(0)

# ---- __cuda_array_interface__ ------------------------------------------------------------------------------


class Foreign:
    """Someone else's array: nothing but the interface, and at times a dtype."""

    def __init__(self, dtype: Any = None, **changes: Any) -> None:
        plain = {"shape": (4, 9), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**plain, **changes}
        if dtype is not None:
            self.dtype = dtype


def test_a_foreign_array_is_taken_as_it_says() -> None:
    array = MEMORY.view("x", Foreign(), F32, (4, None), writable=True)
    assert (array.pointer, array.dtype, array.shape, array.strides) == (4096, F32, (4, 9), (9, 1))
    assert MEMORY.view("x", Foreign(version=2, strides=(64, 4)), F32, (4, 9)).strides == (16, 1)
    assert MEMORY.view("x", Foreign(strides=(4, 64)), F32, (4, 9), contiguous_last=False).strides == (1, 16)
    assert MEMORY.view("x", Foreign(shape=(1, 9), strides=(-8, 4)), F32, (1, 9)).strides == (0, 1)
    assert MEMORY.view("x", Foreign(shape=(0, 9), data=(0, False)), F32, (0, 9)).pointer == 0
    assert MEMORY.view("x", Foreign(shape=(), typestr="|b1"), np.bool_, ()).shape == ()
    assert MEMORY.view("x", Foreign(data=(4096, True)), F32, (..., 9)).shape == (4, 9)
    assert MEMORY.rows_view("x", Foreign(shape=(2, 3, 9)))[2] == 9
    assert MEMORY.int_vector("x", Foreign(shape=(4,), typestr="<i4"), 4).shape == (4,)
    assert MEMORY.optional_scalar("x", Foreign(shape=(1,), typestr="<i4")) is not None


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bfloat16", kdt.bfloat16])
def test_bfloat16_is_told_by_the_arrays_dtype(dtype: Any) -> None:
    _, code = MEMORY.float_view("x", Foreign(dtype=dtype, typestr="<V2"), (4, 9))
    assert code == 4
    with pytest.raises(kdt.KdtValueError, match=r"'x'.*float32, float16 or bfloat16"):
        MEMORY.float_view("x", Foreign(dtype="something", typestr="<V2"), (4, 9))


class Refuses:
    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")


@pytest.mark.parametrize(
    ("value", "names", "status"),
    [
        (np.zeros((4, 9), F32), r"memory of device 0, got a numpy array in host memory", Status.INVALID_ARGUMENT),
        ([[1.0]], r"memory of device 0.*got list", Status.INVALID_ARGUMENT),
        (None, r"got NoneType", Status.INVALID_ARGUMENT),
        (Foreign, r"got type", Status.INVALID_ARGUMENT),
        (Refuses(), r"requires grad", Status.INVALID_ARGUMENT),
        (Foreign(typestr="<f8"), r"dtype float32, got float64", Status.INVALID_ARGUMENT),
        (Foreign(typestr=">f4"), r"dtype float32, got >f4", Status.INVALID_ARGUMENT),
        (Foreign(shape=(4, 8)), r"shape \[4, 9\], got \[4, 8\]", Status.SHAPE),
        (Foreign(shape=(36,)), r"shape \[4, 9\], got \[36\]", Status.SHAPE),
        (Foreign(strides=(72, 8)), r"stride of 4 \(contiguous\)", Status.STRIDE),
        (Foreign(strides=(-36, 4)), r"stride", Status.STRIDE),
        (Foreign(strides=(0, 4)), r"stride", Status.STRIDE),
        (Foreign(strides=(38, 4)), r"stride", Status.STRIDE),
        (Foreign(data=(4096, True)), r"writable array, got a read-only one", Status.INVALID_ARGUMENT),
        (Foreign(mask=Foreign()), r"without a mask", Status.INVALID_ARGUMENT),
        (Foreign(version=1), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(version=None), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(shape=(-1, 9)), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(shape=4), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(strides=(4,)), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(typestr="nonsense"), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(data=4096), r"version 2 or 3", Status.INVALID_ARGUMENT),
        (Foreign(data=("x", False)), r"version 2 or 3", Status.INVALID_ARGUMENT),
    ],
)
def test_what_is_not_taken(value: Any, names: str, status: Status) -> None:
    with pytest.raises(kdt.KdtValueError, match=f"argument 'x'.*{names}|argument 'x': .*{names}") as caught:
        MEMORY.view("x", value, F32, (4, 9), writable=True)
    assert caught.value.status == status


def test_the_cpu_takes_no_device_memory() -> None:
    for call in (
        lambda: kdt.argmax(Foreign()),
        lambda: kdt.argmax(np.zeros((4, 9), F32), num_live=Foreign(shape=(1,), typestr="<i4")),
        lambda: kdt.tree_from_parents(Foreign(typestr="<i4"), np.zeros((4, 9), I32), [1] * 4, [0] * 4),
        lambda: kdt.kv_compact([Foreign(shape=(1, 8, 4))], kdt.Accepted.empty(1, 4, 4), [0]),
        lambda: kdt.argmax(np.zeros((4, 9), F32), out=Foreign(shape=(4,), typestr="<i4")),
    ):
        with pytest.raises(kdt.KdtValueError, match=r"numpy array, got Foreign in device memory.*'cuda'"):
            call()


def test_streams_by_handle() -> None:
    class Theirs:
        cuda_stream = 77

    assert [_cuda.stream_handle(s) for s in (None, 0, 5, np.int64(6), Theirs())] == [None, None, 5, 6, 77]
    for bad in ("x", -1, True, 2.0, [1]):
        with pytest.raises(kdt.KdtValueError, match="'stream'"):
            _cuda.stream_handle(bad)


# ---- The driver's functions --------------------------------------------------------------------------------


def find_header() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    if nvcc is not None:
        homes.append(str(Path(nvcc).resolve().parents[1]))
    found = (Path(home) / "include" / "cuda.h" for home in homes if home)
    return next((path for path in found if path.is_file()), None)


POINTERS = ("CUcontext", "CUstream", "CUevent", "CUgraph", "CUgraphExec")
SIZES = {
    **dict.fromkeys(POINTERS, 8),
    **dict.fromkeys(("CUdeviceptr", "size_t", "unsigned long long"), 8),
    **dict.fromkeys(("int", "unsigned int", "float", "CUdevice", "CUresult"), 4),
    **dict.fromkeys(("CUdevice_attribute", "CUstreamCaptureMode"), 4),  # enums
    "unsigned char": 1,
    "char": 1,
}


def c_kind(declaration: str) -> tuple[str, int]:
    """("pointer", size of what it points at) or ("value", size); 0 for void."""
    words = re.sub(r"\bconst\b", "", declaration).replace("*", " * ").split()
    stars = words.count("*")
    words = [word for word in words if word != "*"]
    name = " ".join(words[:-1])  # the last word is the parameter's own
    if stars == 0:
        return ("pointer" if name in POINTERS else "value"), SIZES[name]
    return "pointer", 8 if stars > 1 else 0 if name == "void" else SIZES[name]


def python_kind(argument: Any) -> tuple[str, int]:
    if argument is ctypes.c_void_p:
        return "pointer", 8  # a handle, or memory: see below
    if argument is ctypes.c_char_p:
        return "pointer", 1
    if issubclass(argument, ctypes._Pointer):
        return "pointer", ctypes.sizeof(argument._type_)
    return "value", ctypes.sizeof(argument)


def test_functions_are_those_of_cuda_h() -> None:
    header = find_header()
    if header is None:
        pytest.skip("cuda.h is not here")
    text = re.sub(r"/\*.*?\*/", "", header.read_text(errors="replace"), flags=re.DOTALL)
    defines = dict(re.findall(r"#\s*define\s+(cu\w+)\s+(?:__CUDA_API_PT[SD][SZ]?\()?(cu\w+)\)?", text))
    declared = {exported: name for name, exported in defines.items()}
    for function, arguments in _cuda.FUNCTIONS.items():
        name = declared.get(function, function)
        found = re.search(rf"CUresult\s+CUDAAPI\s+{name}\(([^)]*)\);", text)
        assert found is not None, function
        parameters = [] if found[1].strip() == "void" else found[1].split(",")
        kinds, ours = [c_kind(p) for p in parameters], [python_kind(a) for a in arguments]
        # c_void_p stands for handles and for memory of any type.
        kinds = [
            (k, 8) if a is ctypes.c_void_p and k == "pointer" else (k, s)
            for (k, s), a in zip(kinds, arguments, strict=True)
        ]
        assert kinds == ours, (function, parameters)
    for constant, value in (
        ("CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE", _cuda.L2_CACHE_SIZE),
        ("CU_STREAM_NON_BLOCKING", _cuda._STREAM_NON_BLOCKING),
        ("CU_STREAM_CAPTURE_MODE_RELAXED", _cuda._CAPTURE_RELAXED),
        ("CUDA_ERROR_OUT_OF_MEMORY", _cuda._OUT_OF_MEMORY),
    ):
        found = re.search(rf"\b{constant}\s*=\s*(\w+)", text)
        assert found is not None
        assert int(found[1], 0) == value, constant


# ---- Drivers that are not what is needed -------------------------------------------------------------------

OLD_DRIVER = """
int cuInit(unsigned flags) { return 0 * flags; }
int cuDriverGetVersion(int* version) { *version = 9000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
"""


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine whose driver serves CUDA 9 at best, and lacks what came later."""
    compiler = shutil.which("cc")
    assert compiler is not None, "cc is missing: install a C compiler"
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(OLD_DRIVER)
    library = f"-Wl,-soname,{_cuda.LIBRARY}"
    subprocess.run([compiler, "-shared", "-fPIC", library, "driver.c", "-o", _cuda.LIBRARY], cwd=folder, check=True)
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def reason() -> str:
    return "no device: .*driver" if kdt.build_info()["cuda"] else "built without CUDA"


def test_info_on_an_old_driver(old_driver: dict[str, str]) -> None:
    command = [sys.executable, "-m", "kdtree_engine", "info"]
    done = subprocess.run(command, env=old_driver, capture_output=True, text=True, check=True)
    assert re.search(rf"^cuda +not available: .*{reason()}", done.stdout, re.MULTILINE)
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["replay", "test", "bench", "bench targets"])
def test_commands_on_an_old_driver(old_driver: dict[str, str], command: str) -> None:
    words = [sys.executable, "-m", "kdtree_engine", *command.split(), "--backend", "cuda"]
    done = subprocess.run(words, env=old_driver, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert re.search(reason(), done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_arrays_on_an_old_driver(old_driver: dict[str, str]) -> None:
    code = "import kdtree_engine as k\ntry: k.DeviceArray(4, 'u1')\nexcept k.NoDeviceError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], env=old_driver, capture_output=True, text=True, check=True)
    assert re.match("no device: the CUDA driver is too old: .*cu", done.stdout)
