"""`kdtree bench`: results are checked before they are timed; verdicts; what goes where; exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

import kdtree_engine as kdt
from kdtree_engine import cases, cli, reference
from kdtree_engine.bench import check, measure
from kdtree_engine.bench.model import MODELS, Work
from kdtree_engine.bench.peers import NUMPY, usable

OPERATIONS = set(
    re.findall(r"\bkdt_(\w+)_workspace_size\(const kdt_context", (ROOT / "include/kdtree/kdtree.h").read_text())
)
TINY = ("--min-time", "0", "--threads", "1")
Kdtree = Callable[..., Any]


@pytest.fixture
def kdtree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kdtree:
    """Runs the command in this process on a machine whose rates take no time to find out; checks its exit code."""
    monkeypatch.setattr(measure, "SGEMM_SIZE", 64)
    monkeypatch.setattr(measure, "last_level_cache", lambda: 2**16)

    def run(*arguments: str | Path, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["kdtree", *map(str, arguments)])
        try:
            got = cli.run()
        except SystemExit as error:
            got = error.code if isinstance(error.code, int) else 0
        output = capsys.readouterr()
        assert got == code, (got, output)
        return output

    return run


def case(name: str) -> cases.Case:
    return next(c for c in cases.CASES if c.name == name)


# ---- run ---------------------------------------------------------------------------------------------------


def test_every_operation_of_the_abi_is_benched() -> None:
    assert len(OPERATIONS) >= 11
    assert {c.operation for c in cases.CASES if c.bench} == OPERATIONS
    assert MODELS.keys() == OPERATIONS
    assert NUMPY.keys() == OPERATIONS


def test_no_bench_case_is_of_zeros() -> None:
    for c in cases.CASES:
        if c.bench and c.operation not in ("tree_build", "tree_accept"):
            largest = max((v for v in c.arguments().values() if isinstance(v, np.ndarray)), key=lambda v: v.nbytes)
            assert len(np.unique(largest.view(np.uint8))) > 1, c.name


def test_run_prints_a_table(kdtree: Kdtree) -> None:
    done = kdtree("bench", "-k", "tree_build/worked", *TINY)
    assert re.search(r"^read [\d.]+ GB/s, copy [\d.]+ GB/s, numpy sgemm \d+ GFLOP/s$", done.out, re.MULTILINE)
    header = r"^case +us +spread +cold us +GB/s +GFLOP/s +numpy us +ours/numpy"
    assert re.search(header, done.out, re.MULTILINE)
    rows = re.findall(
        r"^tree_build/worked\d +([\d.,]+) +\d+% +[\d.,]+ +[\d.]+ +[\d.,]+ +[\d.]+$", done.out, re.MULTILINE
    )
    assert len(rows) == 3
    assert "timing" in done.err


def test_json_and_the_command_of_a_row(kdtree: Kdtree) -> None:
    result = json.loads(kdtree("bench", "run", "-k", "tree_build/budget1", "--json", "--no-peers", *TINY).out)
    assert [row["case"] for row in result["rows"]] == ["tree_build/budget1"], "an exact name is that case alone"
    result = json.loads(kdtree("bench", "run", "-k", "merge_attn_states/", "--json", *TINY).out)
    facts, rows = result["environment"], result["rows"]
    assert facts["threads"] == 1
    assert facts["numpy"] == np.__version__
    assert facts["library"]["build_type"]
    assert facts["backends"]["cpu"]["available"]
    assert {"python", "torch", "cpu", "date", "min_time_s", "load_average"} <= facts.keys()
    assert all(facts[rate] > 0 for rate in ("read_gb_per_s", "copy_gb_per_s", "sgemm_gflop_per_s"))
    assert len(rows) == len(cases.select("merge_attn_states/"))
    for row in rows:
        assert row["ok"] is True
        assert row["error"] is None
        assert row["operation"] == "merge_attn_states"
        assert row["backend"] == "cpu"
        assert row["samples"] >= measure.MIN_SAMPLES
        assert row["spread"] >= 0
        assert row["cold_median_us"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        assert row["gflop_per_s"] == pytest.approx(row["flop"] / row["median_us"] / 1e3)
    peer = rows[0]["peers"]["numpy"]
    assert peer["checked"] is True
    assert peer["ratio"] == pytest.approx(rows[0]["median_us"] / peer["median_us"])
    words = shlex.split(rows[1]["command"])
    assert words[0] == "kdtree"
    again = json.loads(kdtree(*words[1:], "--json").out)
    assert [row["case"] for row in again["rows"]] == [rows[1]["case"]]
    assert again["rows"][0]["command"] == rows[1]["command"]


def test_stdout_is_one_json_object_and_nothing_else() -> None:
    command = [sys.executable, "-m", "kdtree_engine", "bench", "--json", "-k", "kv_compact/page16", *TINY]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"][0]["ok"]
    assert "Traceback" not in done.stderr


def spoil(monkeypatch: pytest.MonkeyPatch, operation: str, change: Callable[[Any], None]) -> None:
    """The reference's result is changed, so that the library's is wrong."""
    right = getattr(reference, operation)

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = right(*arguments, **options)
        change(result)
        return result

    monkeypatch.setattr(reference, operation, wrong)


def change_token(tree: Any) -> None:
    tree.tokens[0, 2] += 1


def change_out(result: Any) -> None:
    result[0][1, 2] *= np.float32(1.001)


def change_cache(result: Any) -> None:
    result[0].view(np.uint16)[0, 3, 5, 7] ^= 1


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        ("tree_build/worked1", change_token, r"tokens\[0, 2\]: got \d+, expected \d+ \(1 of \d+ differ\)"),
        ("merge_attn_states/base2_f16", change_out, r"out\[1\]: relative error"),
        ("kv_compact/page16", change_cache, r"cache\[0, 3, 5, 7\]"),
    ],
)
def test_a_wrong_result_is_not_timed(
    kdtree: Kdtree, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, where: str
) -> None:
    spoil(monkeypatch, name.split("/")[0], change)
    done = kdtree("bench", "-k", name, *TINY, code=1)
    assert re.search(rf"^{name} +WRONG *$", done.out, re.MULTILINE)
    assert re.search(where, done.err)
    assert f"again: kdtree bench run -k {name}" in done.err
    row = json.loads(kdtree("bench", "-k", name, "--json", *TINY, code=1).out)["rows"][0]
    assert row["ok"] is False
    assert re.search(where, row["error"])
    assert row["median_us"] is None
    assert row["peers"] == {}


def test_an_operation_that_fails_is_a_failed_row(kdtree: Kdtree, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise kdt.KdtError("not here", kdt.Status.UNSUPPORTED)

    monkeypatch.setattr(kdt.argmax, "prepare", refuse)
    assert "argmax/ties: not here" in kdtree("bench", "-k", "argmax/ties", *TINY, code=1).err


def test_what_cannot_be_run(kdtree: Kdtree) -> None:
    assert "no case" in kdtree("bench", "-k", "nosuchcase", code=5).err
    assert "one call" in kdtree("bench", "-k", "step/f32", code=5).err
    assert "No such command" in kdtree("bench", "nosuchcommand", code=2).err
    for value in ("nan", "-1", "inf", "x"):
        assert "--min-time" in kdtree("bench", "--min-time", value, code=2).err
    assert "--threads" in kdtree("bench", "--threads", "-1", code=2).err
    assert "--backend" in kdtree("bench", "targets", "--backend", "cpu", code=2).err
    assert "no target" in kdtree("bench", "targets", "-k", "nosuchtarget", code=5).err
    assert "compare" in kdtree("bench", "-h").out
    assert "--min-time" in kdtree("bench", "run", "-h").out


# ---- Checking, peers, models, clocks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("topk_logprobs/small", "topk_logprobs/ties_bf16", "topk_logprobs/bad_rows", "topk_merge/shards4"),
        *("argmax/ties", "argmax/v163840", "verify_attn/page16", "verify_attn/poison", "verify_attn/poison_window"),
        *("verify_attn/chain", "verify_attn/decode", "verify_attn/contiguous_f32", "verify_attn/tail_only"),
        *("merge_attn_states/f32", "merge_attn_states/bf16_f32", "tree_build/ties", "tree_from_parents/random"),
        *("tree_from_parents/malformed", "tree_from_visibility/random", "tree_from_visibility/damaged"),
        *("tree_accept/none", "tree_accept/middle", "tree_accept/batch64", "kv_compact/page16"),
        *("kv_compact/page64_layers", "kv_compact/contiguous", "kv_compact/destination"),
    ],
)
def test_numpy_peers_mean_the_same(name: str) -> None:
    operation, arguments = name.split("/")[0], case(name).arguments()
    expected = check.expected(operation, arguments)
    assert usable(operation, arguments)
    with np.errstate(all="ignore"):
        peer = NUMPY[operation](arguments, expected)
        got = peer.results(peer.run())
    rows = expected["status"] == 0 if "status" in expected else None
    assert got
    assert check.mismatch(operation, arguments, got, expected, slack=10, rows=rows) is None


def test_peers_refuse_options_they_do_not_have() -> None:
    for name in ("topk_logprobs/raw_shard", "verify_attn/clamped", "tree_accept/stop", "merge_attn_states/base2_f16"):
        assert not usable(name.split("/")[0], case(name).arguments()), name


@pytest.mark.parametrize(
    ("name", "field", "inside", "outside"),
    [
        ("topk_logprobs/small", "log_probs", 2e-6, 3e-5),
        ("verify_attn/contiguous_f32", "lse", 1e-5, 1e-4),
        ("merge_attn_states/base2_f16", "lse", 1e-5, 1e-4),
        ("sample/v163840", "values", 1e-5, 1e-3),
    ],
)
def test_tolerances_of_numbers(name: str, field: str, inside: float, outside: float) -> None:
    operation, arguments = name.split("/")[0], case(name).arguments()
    want = check.expected(operation, arguments)
    place = tuple(np.argwhere(np.isfinite(want[field]))[0])
    for error, good in ((0, True), (inside, True), (outside, False), (np.nan, False), (-np.inf, False)):
        got = {**want, field: want[field].astype(np.float64)}
        got[field][place] += error
        assert (check.mismatch(operation, arguments, got, want) is None) == good, error
    assert check.mismatch(operation, arguments, {field: want[field][:1]}, want) is not None


@pytest.mark.parametrize(("name", "limit"), [("contiguous_f32", 1e-5), ("f16", 6e-4), ("decode", 2.5e-3)])
def test_tolerance_of_attention(name: str, limit: float) -> None:
    arguments = case(f"verify_attn/{name}").arguments()
    want = check.expected("verify_attn", arguments)
    assert want["out"].dtype == np.float32
    for factor, good in ((0.9, True), (1.1, False)):
        got = {"out": want["out"].copy()}
        got["out"][0] *= 1 + factor * limit  # of one request
        assert (check.mismatch("verify_attn", arguments, got, want) is None) == good
    got["out"][:] = want["out"]
    got["out"][0, 0, 0, 0] = np.nan
    assert "nan" in str(check.mismatch("verify_attn", arguments, got, want))


def test_sample_may_differ_only_in_a_tie() -> None:
    arguments = case("sample/v163840").arguments()
    want = check.expected("sample", arguments)
    other = {**want, "tokens": want["tokens"].copy()}
    other["tokens"][3] += 1
    assert re.match(r"tokens\[3\]", str(check.mismatch("sample", arguments, other, want)))
    tied = {
        "logits": np.zeros((1, 2), np.float32),
        "temperatures": np.full(1, 1e9, np.float32),
        "seed": 1,
        "positions": np.zeros(1, np.int32),
        "request_ids": np.zeros(1, np.int64),
    }
    noise = check.gumbel(np.arange(2), 1, 0, 0)
    tied["temperatures"][:] = 1
    tied["logits"][0] = -noise  # as good as each other
    want = check.expected("sample", tied)
    assert check.mismatch("sample", tied, {"tokens": 1 - want["tokens"]}, want) is None


def test_bytes_and_flop_by_hand() -> None:
    chain = case("verify_attn/chain").arguments()  # 16 queries, 8 heads, prefix 100, bfloat16, pages of 64
    results = cases.run(kdt, "verify_attn", chain)
    rows, outputs = 116, 16 * 8 * 512 * 2 + 16 * 8 * 4 + 4
    table = chain["block_table"].nbytes
    read = 16 * 8 * 576 * 2 + rows * 576 * 2 + table + 4
    assert MODELS["verify_attn"](chain, results) == Work(read + outputs, 2 * 8 * 1088 * (16 * 100 + 16 * 17 // 2))

    tail = case("verify_attn/tail_only").arguments()  # dead queries and rows before kv_starts do not count
    count = tail["tree"].node_count
    bits = (np.unpackbits(tail["tree"].visibility[b, :n].view(np.uint8)) for b, n in enumerate(count.tolist()))
    flop = 2 * 8 * 1088 * sum(int(row_bits.sum()) for row_bits in bits)
    assert MODELS["verify_attn"](tail, cases.run(kdt, "verify_attn", tail)).flop == flop > 0

    compact = case("kv_compact/page64_layers").arguments()  # 3 layers, rows of 576 bfloat16
    accepted = compact["accepted"]
    moved = sum(
        int((accepted.accept_index[b, :n] != np.arange(n)).sum()) for b, n in enumerate(accepted.accept_len.tolist())
    )
    work = MODELS["kv_compact"](compact, cases.run(kdt, "kv_compact", compact))
    assert work.bytes == 2 * moved * 3 * 1152 + 4 * int(accepted.accept_len.sum()) + 3 * 4 * 3

    argmax = case("argmax/ties").arguments()
    assert MODELS["argmax"](argmax, cases.run(kdt, "argmax", argmax)) == Work(6 * 3000 * 2 + 3 * 6 * 4, 0)


def test_short_calls_are_timed_in_batches() -> None:
    calls = 0

    def launch() -> None:
        nonlocal calls
        calls += 1

    timing = measure.time_warm(launch, 0)
    assert timing.samples == measure.MIN_SAMPLES
    assert calls > 100 * measure.MIN_SAMPLES
    assert 0 < timing.median < 5e-6
    assert measure.time_cold(launch, 0, lambda: None).samples == 3
    assert measure.last_level_cache() >= 2**15


# ---- compare -----------------------------------------------------------------------------------------------


def row(name: str, median: float | None, spread: float = 0.02, **changes: Any) -> dict[str, Any]:
    peers = {"numpy": {"median_us": 50.0, "spread": 0.1}, "torch": {"error": "differs"}}
    fields = {"case": name, "backend": "cpu", "ok": median is not None, "median_us": median, "spread": spread}
    return {**fields, "peers": peers, **changes}


def save(path: Path, *rows: dict[str, Any], **facts: Any) -> Path:
    path.write_text(json.dumps({"environment": {"cpu": "x", "threads": 2, **facts}, "rows": list(rows)}))
    return path


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (row("a", 100.0), row("a", 104.0), "SAME"),
        (row("a", 100.0), row("a", 96.0), "SAME"),
        (row("a", 100.0), row("a", 110.0), "SLOW"),
        (row("a", 100.0), row("a", 80.0), "FAST"),
        (row("a", 100.0, 0.3), row("a", 110.0), "UNSURE"),
        (row("a", 100.0), row("a", 80.0, 0.5), "UNSURE"),
        (row("a", 100.0, 0.3), row("a", 101.0, 0.3), "SAME"),
        (row("a", 100.0, 0.3), row("a", 200.0, 0.3), "SLOW"),
        (row("a", 100.0), row("a", None), "WRONG"),
        (row("a", None), row("a", 100.0), "UNSURE"),
    ],
)
def test_verdicts(kdtree: Kdtree, tmp_path: Path, old: Any, new: Any, verdict: str) -> None:
    files = save(tmp_path / "old.json", old), save(tmp_path / "new.json", new)
    code = 1 if verdict in ("SLOW", "WRONG") else 0
    found = json.loads(kdtree("bench", "compare", *files, "--json", code=code).out)
    assert [r["verdict"] for r in found["rows"]] == [verdict]
    assert found["threshold"] == 0.05
    assert re.search(rf"^a .* {verdict}$", kdtree("bench", "compare", *files, code=code).out, re.MULTILINE)


def test_compare_threshold_and_rows_in_one_file_only(kdtree: Kdtree, tmp_path: Path) -> None:
    old = save(tmp_path / "old.json", row("a", 100.0), row("b", 1.0))
    new = save(tmp_path / "new.json", row("c", 1.0), row("a", 108.0), threads=4)
    for text in ("10%", "0.1", ".1"):
        done = kdtree("bench", "compare", old, new, "--threshold", text)
        assert re.search(r"^a +100\.0 +108\.0 +\+8\.0% +SAME$", done.out, re.MULTILINE)
    assert "only in" in done.err
    assert "differ in threads: 2 and 4" in done.err
    found = json.loads(kdtree("bench", "compare", old, new, "--json", code=1).out)
    assert (found["only_old"], found["only_new"]) == (["b"], ["c"])
    for text in ("5", "-5%", "nan", "x", "100%", "", "1e-2"):
        assert "--threshold" in kdtree("bench", "compare", old, new, "--threshold", text, code=2).err
    only = save(tmp_path / "only.json", row("z", 1.0))
    assert "no case is in both" in kdtree("bench", "compare", old, only, code=5).err


BAD_FILES = [
    *("", "[1, 2", "\x00", "[]", "{}", '{"environment": {}}', '{"environment": [], "rows": []}'),
    '{"environment": {}, "rows": {}}',
    '{"environment": {}, "rows": [1]}',
    *(
        json.dumps({"environment": {}, "rows": [row("a", 1.0, **{name: value})]})
        for name, value in (
            *(("median_us", v) for v in (None, "1", -1, 0, float("nan"), float("inf"), 10**400)),
            *(("spread", None), ("ok", 1), ("case", 3), ("backend", None), ("peers", None), ("peers", {"numpy": {}})),
        )
    ),
]


@pytest.mark.parametrize("text", BAD_FILES)
def test_what_is_no_bench_file(kdtree: Kdtree, tmp_path: Path, text: str) -> None:
    good, bad = save(tmp_path / "good.json", row("a", 1.0)), tmp_path / "bad.json"
    bad.write_text(text)
    for files in ((good, bad), (bad, good)):
        assert "no bench file" in kdtree("bench", "compare", *files, code=4).err
    assert "no bench file" in kdtree("bench", "plot", bad, tmp_path / "out.png", code=4).err


def test_a_bench_file_that_cannot_be_read(kdtree: Kdtree, tmp_path: Path) -> None:
    good = save(tmp_path / "good.json", row("a", 1.0))
    assert "No such file" in kdtree("bench", "compare", good, tmp_path / "none.json", code=4).err
    assert "directory" in kdtree("bench", "compare", tmp_path, good, code=4).err
    (tmp_path / "latin.json").write_bytes(b'{"environment": "\xe9"}')
    assert "no bench file" in kdtree("bench", "compare", tmp_path / "latin.json", good, code=4).err


# ---- plot --------------------------------------------------------------------------------------------------


def test_plot(kdtree: Kdtree, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = save(tmp_path / "run.json", row("a/x", 1.0), row("b/$_{", 2000.0, backend="cuda"), row("c", None), cpu="$^")
    kdtree("bench", "plot", run, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    kdtree("bench", "plot", run, tmp_path / "out.SVG")
    assert "suffix" in kdtree("bench", "plot", tmp_path / "none.json", tmp_path / "out.xyz", code=2).err
    assert "cannot be written" in kdtree("bench", "plot", run, tmp_path / "no" / "out.png", code=2).err
    assert "No such file" in kdtree("bench", "plot", tmp_path / "none.json", tmp_path / "o.png", code=4).err
    wrong = save(tmp_path / "wrong.json", row("a", None))
    assert "no timed row" in kdtree("bench", "plot", wrong, tmp_path / "o.png", code=5).err
    assert not (tmp_path / "o.png").exists()


def test_plot_names_the_missing_extra(kdtree: Kdtree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = save(tmp_path / "run.json", row("a", 1.0))
    assert "kdtree-engine[plots]" in kdtree("bench", "plot", run, tmp_path / "out.png", code=3).err
