"""The README's examples, run as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def example(language: str) -> tuple[str, str]:
    """The README's only example in a language, and the output printed right below it."""
    blocks = [(match[1], match[2]) for match in FENCE.finditer(README)]
    places = [i for i, (kind, _) in enumerate(blocks) if kind == language]
    assert len(places) == 1, language
    kind, output = blocks[places[0] + 1]
    assert kind == "text"
    return blocks[places[0]][1], output


def test_python_example(tmp_path: Path) -> None:
    code, output = example("python")
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (output, "")


def test_c_example(tmp_path: Path, library_path: Path) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None, "cc is missing: install a C compiler"
    if "sanitize" in str(library_path):
        pytest.skip("a plain program cannot link a sanitized library")
    code, output = example("c")
    (tmp_path / "example.c").write_text(code)
    library = library_path.parent
    command = [
        compiler,
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "example.c",
        f"-I{ROOT / 'include'}",
        "-o",
        "example",
    ]
    command += [f"-L{library}", "-lkdtree_kernels", f"-Wl,-rpath,{library}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(["./example"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (output, "", 0)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")
def test_install_commands(tmp_path: Path) -> None:
    """The two shell lines that build, install and link, in a copy of the checkout's sources."""
    lines = next(block for kind, block in FENCE.findall(README) if kind == "sh" and "cmake --install" in block)
    for name in ("CMakeLists.txt", "include", "src"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    (tmp_path / "example.c").write_text(example("c")[0])
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    subprocess.run(["sh", "-ec", lines], cwd=tmp_path, env=environment, check=True, capture_output=True)
    done = subprocess.run(["./example"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == example("c")[1]


def test_replay_table_is_what_the_command_prints() -> None:
    """All but the times."""
    done = subprocess.run([sys.executable, "-m", "kdtree_engine", "replay"], capture_output=True, text=True, check=True)
    printed = next(block for kind, block in FENCE.findall(README) if kind == "text" and "chain" in block)

    def without_times(text: str) -> list[list[str]]:
        return [line.split()[:3] for line in text.splitlines()]

    assert without_times(done.stdout) == without_times(printed)
