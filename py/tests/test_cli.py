"""The command `kdtree`: results, exit codes, what goes where."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, TEST_DATA

import kdtree_engine as kdt

DIGESTS = json.loads((TEST_DATA / "trace_digests.json").read_text())["budgets"]

MEANS = {
    1: 1.7578,
    4: 2.9049,
    8: 3.3477,
    15: 3.6953,
    16: 3.7240,
    32: 3.9792,
    64: 4.2005,
    128: 4.4193,
    256: 4.6250,
}


def kdtree(*arguments: str | Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command and checks its exit code; no traceback may ever reach a user."""
    command = [sys.executable, "-m", "kdtree_engine", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_replay_gives_the_recorded_means(backend: str) -> None:
    result = json.loads(kdtree("replay", "--json", "--backend", backend).stdout)
    assert result["steps"] == 768
    assert f"{result['chain_accept_len_mean']:.4f}" == "3.0807"
    assert {row["budget"]: round(row["accept_len_mean"], 4) for row in result["rows"]} == pytest.approx(MEANS, abs=5e-5)
    for row in result["rows"]:
        assert row["build_us_p50"] > 0
        assert row["accept_us_p50"] > 0
        if str(row["budget"]) in DIGESTS:
            assert row["trees_sha256"] == DIGESTS[str(row["budget"])]


def test_replay_prints_a_table() -> None:
    done = kdtree("replay", "--budgets", "64,0")
    assert re.search(r"^chain +3\.0807$", done.stdout, re.MULTILINE)
    assert re.search(r"^64 +4\.2005 +1\.36x +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    assert re.search(r"^0 +1\.0000 ", done.stdout, re.MULTILINE)


def save_trace(path: Path, **changes: Any) -> Path:
    tensors = {
        "log_probs": np.full((2, 3, 4), -1, np.float32),
        "token_ids": np.tile(np.arange(4, dtype=np.int32), (2, 3, 1)),
        "root_tokens": np.zeros(2, np.int32),
        "continuation": np.zeros((2, 3), np.int32),
        **changes,
    }
    kdt.kdtr.save(path, {name: value for name, value in tensors.items() if value is not None}, {})
    return path


def test_replay_takes_a_trace_of_ones_own(tmp_path: Path) -> None:
    trace = save_trace(tmp_path / "t.kdtr", continuation=np.array([[0, 1, 2], [3, 3, 9]], np.int32))
    result = json.loads(kdtree("replay", trace, "--json", "--budgets", "84,3").stdout)
    assert result["chain_accept_len_mean"] == 1.5
    assert [row["accept_len_mean"] for row in result["rows"]] == [3.5, 1.5]  # (0)(1)(2)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"continuation": None}, "'continuation' is missing"),
        ({"log_probs": np.zeros((2, 3, 4))}, "'log_probs' is float64"),
        ({"token_ids": np.zeros((2, 3, 5), np.int32)}, "'token_ids'"),
        ({"root_tokens": np.zeros(3, np.int32)}, "'root_tokens'"),
        ({"continuation": np.zeros(3, np.int32)}, "'continuation'"),
        ({"log_probs": np.zeros(4, np.float32)}, "'log_probs'"),
        ({"continuation": np.array([[0, 1, 2], [3, -1, 9]], np.int32)}, "'continuation' has tokens < 0"),
        (
            {
                "log_probs": np.zeros((0, 3, 4), np.float32),
                "token_ids": np.zeros((0, 3, 4), np.int32),
                "root_tokens": np.zeros(0, np.int32),
                "continuation": np.zeros((0, 3), np.int32),
            },
            "empty trace",
        ),
    ],
)
def test_what_is_no_trace(tmp_path: Path, changes: dict[str, Any], names: str) -> None:
    done = kdtree("replay", save_trace(tmp_path / "t.kdtr", **changes), code=4)
    assert re.search(names, done.stderr)
    assert done.stdout == ""


def test_a_trace_beyond_the_limits_is_refused_by_every_backend(tmp_path: Path) -> None:
    shape = (1, 65, 1)
    trace = save_trace(
        tmp_path / "t.kdtr",
        log_probs=np.zeros(shape, np.float32),
        token_ids=np.zeros(shape, np.int32),
        root_tokens=np.zeros(1, np.int32),
        continuation=np.zeros((1, 65), np.int32),
    )
    for backend in ("cpu", "reference"):
        assert "D=65" in kdtree("replay", trace, "--backend", backend, code=4).stderr


def test_replay_of_a_missing_or_damaged_file(tmp_path: Path) -> None:
    assert "no such file" in kdtree("replay", tmp_path / "none.kdtr", code=4).stderr
    damaged = tmp_path / "damaged.kdtr"
    damaged.write_bytes(save_trace(tmp_path / "t.kdtr").read_bytes()[:-1])
    assert str(damaged) in kdtree("replay", damaged, code=4).stderr
    assert str(tmp_path) in kdtree("replay", tmp_path, code=4).stderr


@pytest.mark.parametrize("budgets", ["", "1,x", "-1", "1025", "1,,2", "1_0", " 1", "٣"])
def test_replay_refuses_bad_budgets(budgets: str) -> None:
    assert "--budgets" in kdtree("replay", "--budgets", budgets, code=2).stderr


@pytest.mark.parametrize("command", ["replay", "test", "bench", "bench run", "bench targets"])
def test_a_gpu_that_is_not_there(command: str) -> None:
    done = kdtree(*command.split(), "--backend", "cuda", code=3, CUDA_VISIBLE_DEVICES="")
    assert re.search("no device|without CUDA", done.stderr)
    assert done.stdout == ""


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots`")
    kdtree("replay", "--budgets", "1,4", "--plot", tmp_path / "p.png", MPLCONFIGDIR=str(tmp_path))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "--plot" in kdtree("replay", "--budgets", "1", "--plot", tmp_path / "no" / "p.png", code=2).stderr
    done = kdtree("replay", "--budgets", "1", "--plot", tmp_path / "p.xyz", code=2)
    assert "--plot" in done.stderr
    assert "replaying" not in done.stderr  # known before the work


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    done = kdtree(
        "replay", "--budgets", "1", "--plot", tmp_path / "p.png", code=3, PYTHONPATH=f"{tmp_path}:{ROOT / 'py'}"
    )
    assert "kdtree-engine[plots]" in done.stderr


def test_info() -> None:
    done = kdtree("info")
    assert "libkdtree_kernels.so" in done.stdout
    facts = json.loads(kdtree("info", "--json").stdout)
    assert facts["backends"]["cpu"]["available"]
    assert facts["version"] == kdt.__version__
    assert facts["cpu_threads"] >= 1


def test_fixtures_show() -> None:
    assert "log_probs" in kdtree("fixtures", "show", "trace_code").stdout
    shown = json.loads(kdtree("fixtures", "show", "trace_code", "--json").stdout)
    assert [t["shape"] for t in shown["tensors"]] == [[12, 64, 15, 64], [12, 64, 15, 64], [12, 64], [12, 64, 15]]
    assert shown["attrs"]["kind"] == "trace"
    assert "no such file" in kdtree("fixtures", "show", "nothing", code=4).stderr


def test_fixtures_verify(tmp_path: Path) -> None:
    good = save_trace(tmp_path / "good.kdtr")
    content = bytearray(good.read_bytes())
    content[-100] ^= 1
    bad = tmp_path / "bad.kdtr"
    bad.write_bytes(content)
    assert "ok" in kdtree("fixtures", "verify", good, "trace_code").stdout
    done = kdtree("fixtures", "verify", good, bad, "--json", code=4)
    assert [result["ok"] for result in json.loads(done.stdout)["files"]] == [True, False]
    kdtree("fixtures", "verify", tmp_path / "none", code=4)
    kdtree("fixtures", "verify", code=2)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_fixtures_export_there_and_back(tmp_path: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors", reason="the extra `safetensors`")
    trace = save_trace(tmp_path / "t.kdtr")
    other, back = tmp_path / f"t{suffix}", tmp_path / "back.kdtr"
    kdtree("fixtures", "export", trace, other)
    kdtree("fixtures", "export", other, back)
    assert kdt.kdtr.load(back)[1] == kdt.kdtr.load(trace)[1]
    for (name, a), (other_name, b) in zip(
        sorted(kdt.kdtr.load(back)[0].items()), sorted(kdt.kdtr.load(trace)[0].items()), strict=True
    ):
        assert name == other_name
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


def test_fixtures_export_to_nowhere(tmp_path: Path) -> None:
    trace = save_trace(tmp_path / "t.kdtr")
    kdtree("fixtures", "export", trace, tmp_path / "no" / "x.npz", code=2)
    kdtree("fixtures", "export", trace, tmp_path / "x.unknown", code=2)
    kdtree("fixtures", "export", tmp_path / "none.kdtr", tmp_path / "x.npz", code=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.kdtr"]


def test_paths_that_no_system_call_likes(tmp_path: Path) -> None:
    for path in ("a" * 5000, "", tmp_path / "loop.kdtr"):
        if path == tmp_path / "loop.kdtr":
            (tmp_path / "loop.kdtr").symlink_to("loop.kdtr")
        kdtree("replay", path, code=4)
        kdtree("fixtures", "verify", path, code=4)
    kdtree("fixtures", "export", "trace_code", tmp_path / "loop.kdtr", code=3)
    os.mkfifo(tmp_path / "fifo.kdtr")
    kdtree("fixtures", "show", tmp_path / "fifo.kdtr", code=4)
    kdtree("fixtures", "export", "trace_code", tmp_path / "fifo.kdtr", code=3)


def test_a_file_larger_than_memory_is_an_error(tmp_path: Path) -> None:
    """A sparse file whose header and index are right: nothing is allocated until it has to be, and then it fails."""
    index_size, data = 48, 1 << 40
    entry = struct.pack("<QQIHBBQ", 128, data, 0, 1, 12, 1, data) + b"x" + bytes(15 - 8)
    header = struct.pack("<8sIIQQIII20s", b"KDTR\r\n\x1a\n", 1, 0, 128 + data, index_size, 1, 0, 0, bytes(20))
    path = tmp_path / "huge.kdtr"
    with path.open("wb") as file:
        file.write(header + entry)
        try:
            file.truncate(128 + data)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
    command = f"ulimit -v 16000000; exec {sys.executable} -m kdtree_engine fixtures show {path}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "out of memory" in done.stderr


def test_output_that_cannot_be_written() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = [sys.executable, "-m", "kdtree_engine", "info"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    closed = subprocess.run(["sh", "-c", f"{sys.executable} -m kdtree_engine info >&-"], check=False)
    assert closed.returncode == 3
    gone = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m kdtree_engine replay --budgets 1 | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert gone.returncode in (0, 128 + 13)  # by whether the pipe was still open
    assert "Traceback" not in gone.stderr


def test_json_stays_pure_when_stderr_is_closed() -> None:
    command = f"{sys.executable} -m kdtree_engine replay --budgets 1 --json 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["steps"] == 768


def test_the_default_trace_comes_from_the_package(tmp_path: Path) -> None:
    (tmp_path / "trace_code").write_text("junk")
    command = [sys.executable, "-m", "kdtree_engine", "replay", "--budgets", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "py")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["steps"] == 768


def test_names_from_a_file_cannot_forge_the_screen(tmp_path: Path) -> None:
    kdt.kdtr.save(tmp_path / "t.kdtr", {"a\x1b[31m\nb": np.zeros(1)}, {"k": "\x1b]0;x\x07ü"})
    shown = kdtree("fixtures", "show", tmp_path / "t.kdtr").stdout
    assert "\x1b" not in shown
    assert "\\x1b[31m\\nb" in shown
    assert "ü" in shown


def test_usage_errors() -> None:
    kdtree("nonsense", code=2)
    kdtree("replay", "--nonsense", code=2)
    assert "replay" in kdtree("--help").stdout
    assert kdt.__version__ in kdtree("--version").stdout


def test_test_with_nothing_to_match() -> None:
    """Exit code 5. The C++ part is left out: this very run may hold its build tree."""
    preset = Path(os.environ.get("KDTREE_LIBRARY", "")).parent.name or "dev"
    if not (ROOT / "build" / preset / "tests_cpp" / "programs.txt").is_file():
        pytest.skip("not running from a build tree with tests")
    done = kdtree("test", "--no-cpp", "--preset", preset, "-k", "no_test_has_this_name", code=5)
    assert "0 passed, 0 failed, 0 skipped" in done.stdout


def test_test_without_a_build_tree() -> None:
    assert "tools/dev-setup" in kdtree("test", "--preset", "nonsense", code=3).stderr
