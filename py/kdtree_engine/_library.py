"""Finding and loading libkdtree_kernels.so."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path

from . import _abi
from ._errors import LibraryNotFoundError

FILE_NAME = "libkdtree_kernels.so"
ENVIRONMENT = "KDTREE_LIBRARY"
BUILD_TREES = ("dev", "cuda", "release")


def source_root() -> Path | None:
    """The checkout this package is imported from, or None when it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "CMakeLists.txt").is_file() and (root / "include" / "kdtree").is_dir() else None


def _packaged() -> Path:
    """Where the installed package has its library. In an editable install the package is several folders."""
    found = importlib.resources.files("kdtree_engine").joinpath(FILE_NAME)
    return found if isinstance(found, Path) else Path(__file__).parent / FILE_NAME


def _candidates() -> Iterator[tuple[Path, str]]:
    """Where the library may be, best first, each with a word on why."""
    forced = os.environ.get(ENVIRONMENT)
    if forced:
        yield Path(forced), f"the environment variable {ENVIRONMENT}"
        return  # a user who names a library wants no other
    yield _packaged(), "the installed package"
    root = source_root()
    if root is not None:
        trees = [root / "build" / name / FILE_NAME for name in BUILD_TREES]
        built = sorted((t for t in trees if t.is_file()), key=lambda t: t.stat().st_mtime, reverse=True)
        for tree in built or trees:
            yield tree, "a development build, newest first"


def _load(path: Path) -> ctypes.CDLL:
    """Loads and checks one library; raises OSError saying what is wrong with it."""
    if not path.is_absolute():
        raise OSError("not an absolute path")
    if not path.is_file():
        raise OSError("no such file")
    library = ctypes.CDLL(str(path))
    try:
        library.kdt_abi_version.restype = ctypes.c_int32
        abi = library.kdt_abi_version()
        if abi // 1000 != _abi.ABI_MAJOR:
            raise OSError(f"its ABI is {abi // 1000}.{abi % 1000}, this package needs {_abi.ABI_MAJOR}")
        _abi.declare(library)
    except AttributeError as error:
        raise OSError(f"not a kdtree-engine library: {error}") from None
    return library


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL, Path]:
    tried = []
    for path, reason in _candidates():
        try:
            return _load(path), path
        except OSError as error:
            tried.append(f"  {path} ({reason}): {error}")
    advice = "Build it with tools/dev-setup (in a checkout) or reinstall the package kdtree-engine."
    raise LibraryNotFoundError(f"cannot load {FILE_NAME}; tried\n" + "\n".join(tried) + f"\n{advice}")


def load() -> ctypes.CDLL:
    """The library, loaded once. Raises `LibraryNotFoundError` listing every path tried with its error."""
    return _loaded()[0]


def library_path() -> Path:
    """Where the library was loaded from."""
    return _loaded()[1]
