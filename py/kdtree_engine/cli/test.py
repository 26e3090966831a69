"""`kdtree test`: the C++ and the Python tests of a checkout, with one summary."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click

from .._context import Context
from .._errors import KdtError, LibraryNotFoundError, Status
from .._library import source_root
from ._common import json_option, print_json

FAILED, ENVIRONMENT, NOTHING_MATCHED = 1, 3, 5

BACKEND = "KDTREE_TEST_BACKEND"
"""Tells the C++ programs and pytest which backend to test (py/tests/conftest.py)."""


class TestSetupError(KdtError, RuntimeError):
    """The tests cannot be run here."""

    default_status = Status.UNSUPPORTED


def run(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Runs a command with all its output on stderr."""
    click.echo("$ " + " ".join(command), err=True)
    sys.stderr.flush()
    return subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode


def tool_path() -> str:
    """PATH with this Python's own folder first: a venv's cmake is found even when the venv is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def find_checkout() -> Path:
    """The checkout whose tests to run: the package's own, or the current directory's."""
    root = source_root()
    if root is not None:
        return root
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "tests_cpp").is_dir() and (folder / "py" / "kdtree_engine").is_dir():
            return folder
    raise TestSetupError("the tests live in a source checkout: run this inside one, after tools/dev-setup")


def test_programs(build: Path) -> list[Path]:
    """The GoogleTest programs of a build tree, brought up to date first when cmake is at hand."""
    manifest = build / "tests_cpp" / "programs.txt"
    if not manifest.is_file():
        raise TestSetupError(f"no C++ tests in {build}: run tools/dev-setup (or cmake --preset {build.name}) first")
    cmake = shutil.which("cmake", path=tool_path())
    if cmake is not None and run([cmake, "--build", str(build)]) != 0:
        raise TestSetupError(f"building {build} failed")
    return [Path(line) for line in manifest.read_text().splitlines()]


def run_cpp(programs: list[Path], pattern: str | None, backend: str, report: Path) -> dict[str, int]:
    """Runs GoogleTest programs and adds up their reports. A program that dies counts as one failure."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for program in programs:
        report.unlink(missing_ok=True)
        command = [str(program), f"--gtest_output=json:{report}", "--gtest_brief=1"]
        if pattern is not None:
            command.append(f"--gtest_filter=*{pattern}*")
        code = run(command, {**os.environ, BACKEND: backend})
        failed = 0
        if report.is_file():
            for suite in json.loads(report.read_text())["testsuites"]:
                for case in suite["testsuite"]:
                    outcome = (
                        "failed" if case.get("failures") else "skipped" if case["result"] == "SKIPPED" else "passed"
                    )
                    counts[outcome] += case["result"] != "SUPPRESSED"
                    failed += outcome == "failed"
        if code != 0 and failed == 0:
            click.echo(f"{program.name} ended with code {code}", err=True)
            counts["failed"] += 1
    return counts


def run_python(root: Path, pattern: str | None, backend: str, library: Path, report: Path) -> dict[str, int]:
    """Runs pytest on the checkout against the library of the build tree under test."""
    command = [sys.executable, "-m", "pytest", str(root / "py" / "tests"), f"--junitxml={report}", f"--rootdir={root}"]
    if pattern is not None:
        command += ["-k", pattern]
    code = run(command, {**os.environ, "KDTREE_LIBRARY": str(library), "PATH": tool_path(), BACKEND: backend})
    if code == 5 and pattern is not None:  # pytest: no test matched
        return {"passed": 0, "failed": 0, "skipped": 0}
    if not report.is_file():
        raise TestSetupError(f"pytest ended with code {code} and no report; is it installed? Run tools/dev-setup.")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    number = {
        key: int(suite.get(key, "0")) if suite is not None else 0 for key in ("tests", "failures", "errors", "skipped")
    }
    failed = number["failures"] + number["errors"]
    if code != 0 and failed == 0:
        failed = 1  # pytest itself failed: an internal error, an interruption
    return {
        "passed": max(number["tests"] - failed - number["skipped"], 0),
        "failed": failed,
        "skipped": number["skipped"],
    }


@click.command()
@click.option("-k", "pattern", help="Only tests whose name contains this.")
@click.option("--cpp/--no-cpp", default=True, show_default=True, help="The C++ tests.")
@click.option("--python/--no-python", default=True, show_default=True, help="The Python tests.")
@click.option("--preset", default="dev", show_default=True, help="The build tree to test, build/<preset>.")
@click.option("--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@json_option
def test(pattern: str | None, cpp: bool, python: bool, preset: str, backend: str, as_json: bool) -> None:
    """Run the C++ and Python tests of a checkout. Exit code 1: a test failed; 5: none matched -k.

    With --backend cuda the operations are tested on a GPU: the C++ programs run with KDTREE_TEST_BACKEND=cuda in their
    environment, and of the Python tests those marked `cuda`.
    """
    if backend == "cuda":
        Context(backend="cuda")  # no CUDA code or no GPU: exit 3 with the reason
    root = find_checkout()
    build = root / "build" / preset
    library = build / "libkdtree_kernels.so"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kdtree-test-") as folder:
        if cpp:
            results["cpp"] = run_cpp(test_programs(build), pattern, backend, Path(folder) / "cpp.json")
        if python:
            if not library.is_file():
                raise LibraryNotFoundError(f"{library} is missing: run tools/dev-setup first")
            results["python"] = run_python(root, pattern, backend, library, Path(folder) / "python.xml")
    total = {key: sum(counts[key] for counts in results.values()) for key in ("passed", "failed", "skipped")}
    if as_json:
        print_json({**results, "total": total})
    else:
        for name, counts in results.items():
            click.echo(f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
        click.echo(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    if total["failed"]:
        sys.exit(FAILED)
    if total["passed"] + total["skipped"] == 0:
        click.echo("kdtree: no test matched", err=True)
        sys.exit(NOTHING_MATCHED)
