"""The table of cases: through the Python functions, and as fixtures."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kdtree_engine as kdt
from kdtree_engine import cases, ops
from kdtree_engine.bench import check
from kdtree_engine.cli import cli

OPERATIONS = sorted({case.operation for case in cases.CASES} - {"step"})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_case_agrees_with_the_reference(operation: str) -> None:
    for case in (case for case in cases.CASES if case.operation == operation):
        arguments = case.arguments()
        before = {name: value.tobytes() for name, value in arguments.items() if isinstance(value, np.ndarray)}
        got = cases.run(kdt, operation, arguments)
        want = check.expected(operation, arguments)
        assert got.keys() == want.keys(), case.name
        assert check.mismatch(operation, arguments, got, want) is None, case.name
        after = {name: value.tobytes() for name, value in arguments.items() if isinstance(value, np.ndarray)}
        assert after == before, f"{case.name} changed its inputs"


def test_the_table_has_every_operation_and_no_name_twice() -> None:
    public = {name for name in ops.__all__ if name.islower() and hasattr(getattr(ops, name), "prepare")}
    assert set(OPERATIONS) == public
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)


def test_reference_and_operation_take_the_same_arguments() -> None:
    for name in OPERATIONS:
        reference = inspect.signature(getattr(kdt.reference, name)).parameters
        operation = inspect.signature(getattr(kdt, name)).parameters
        extra = {"out", "workspace", "context", "stream"}
        assert [p for p in operation if p not in extra] == [p for p in reference if p not in extra], name
        assert getattr(kdt, name).__doc__


def generate(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["fixtures", "gen", "--dir", str(folder), *arguments])


def test_fixtures_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert generate(tmp_path / folder, "-k", "tree_").exit_code == 0
        assert generate(tmp_path / folder, "-k", "verify_attn/prefix6").exit_code == 0
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.kdtr"))
    assert len(files) > 50
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_a_fixture_holds_the_case(tmp_path: Path) -> None:
    generate(tmp_path, "-k", "tree_build/worked3")
    tensors, attrs = kdt.kdtr.load(tmp_path / "tree_build" / "worked3.kdtr")
    assert attrs == {"case": "tree_build/worked3", "operation": "tree_build", "budget": "5"}
    assert tensors["in/log_probs"].tolist() == [[[-1, -2], [-1, -2]]]
    assert tensors["out/parents"].tolist() == [[-1, 0, 1, 0, 1, 3]]


def test_fixtures_that_left_the_table_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [case for case in cases.CASES if case.name.startswith("tree_accept/")]
    monkeypatch.setattr(cases, "CASES", tuple(few))
    assert generate(tmp_path).exit_code == 0
    mine = tmp_path / "tree_accept" / "mine.kdtr"
    mine.write_text("not from the table")
    monkeypatch.setattr(cases, "CASES", tuple(few[1:]))
    assert generate(tmp_path).exit_code == 0
    assert not (tmp_path / f"{few[0].name}.kdtr").exists()
    assert (tmp_path / f"{few[1].name}.kdtr").exists()
    assert mine.exists()
    assert (tmp_path / "index.txt").read_text().split() == [case.name for case in few[1:]]


def test_nothing_matched(tmp_path: Path) -> None:
    for command in ("gen", "list"):
        done = CliRunner().invoke(cli, ["fixtures", command, "--dir", str(tmp_path), "-k", "nosuchcase"])
        assert done.exit_code == 5
