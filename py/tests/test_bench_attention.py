"""Attention among the targets of `kdtree bench`, as far as it can be tested without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kdtree_engine as kdt
from kdtree_engine import cases
from kdtree_engine._floats import from_float32, to_float32
from kdtree_engine._trace import load_trace
from kdtree_engine.bench import attention, check, measure
from kdtree_engine.bench.attention import DISTINCT_ROWS, PAGE_SIZE, SHAPES, Inputs, Shape, against_flash_mla
from kdtree_engine.bench.bed import Bed, Trial
from kdtree_engine.bench.peers import NoPeer, Peer, TorchOnGpu, flash_mla_lens
from kdtree_engine.bench.run import GpuBench
from kdtree_engine.bench.targets import TARGETS
from kdtree_engine.cli.bench import print_targets

TRACE = load_trace(cases.DATA / "trace_code.kdtr")


def arguments_of(name: str) -> cases.Arguments:
    return next(case for case in cases.CASES if case.name == f"verify_attn/{name}").arguments()


# ---- The rows ----------------------------------------------------------------------------------------------


def test_every_shape_is_a_target() -> None:
    targets = {target.name: target for target in TARGETS if target.name.startswith("verify_attn/")}
    assert len(targets) == len(SHAPES) == 19
    assert sum(shape.queries == 65 for shape in SHAPES) == 16
    assert targets["verify_attn/128x1x64x8192"].copy_share == 0.75
    assert targets["verify_attn/1x65x8x512"].copy_share is None
    assert Shape(2, 3, 5, 7).flop == 2 * 2 * 3 * 5 * (7 + 3) * 1088


@pytest.mark.parametrize("shape", [Shape(3, 65, 2, 300), Shape(2, 1, 4, 5000), Shape(1, 8, 3, 120)])
def test_what_is_expected_is_right(shape: Shape) -> None:
    """Against the CPU backend on the whole cache; and without a mask."""
    inputs = Inputs.of(shape, TRACE)
    assert (inputs.tree is None) == (shape.queries != 65)
    rows = np.arange(inputs.num_pages * PAGE_SIZE) % DISTINCT_ROWS
    given = {
        "q": inputs.q,
        "kv_cache": inputs.block[rows].reshape(-1, PAGE_SIZE, 576),
        "tree": inputs.tree,
        "prefix_lens": inputs.prefix_lens,
        "block_table": inputs.table,
        "scale": cases.KIMI_SCALE,
    }
    picked = inputs.picked()
    full = np.full((shape.batch_size, shape.queries, -(-shape.queries // 64)), 2**64 - 1, np.uint64)
    blind = kdt.Tree(**{**dict.fromkeys(vars(kdt.Tree.empty(1, 1))), "visibility": full})
    results = []
    for masked in (True, False):
        out, lse = kdt.verify_attn(**{**given, "tree": inputs.tree if masked else blind})
        got = {"out": out[picked], "lse": lse[picked]}
        assert got["lse"].size <= 18
        results.append(inputs.expected(masked))
        assert check.mismatch("verify_attn", {"q": inputs.q[picked]}, got, results[-1]) is None
    if shape.queries > 1:
        assert check.mismatch("verify_attn", {"q": inputs.q[picked]}, results[0], results[1]) is not None


def test_the_mean_against_flash_mla() -> None:
    def row(shape: Shape, **peers: Any) -> dict[str, Any]:
        return {"case": shape.name, "peers": peers}

    decode = row(SHAPES[-1], flash_mla={"ratio": 100.0})
    missing = row(SHAPES[1], flash_mla={"error": "?"})
    assert against_flash_mla([decode, missing, row(SHAPES[0])]) is None
    pair = [row(SHAPES[0], flash_mla={"ratio": 1.0}), row(SHAPES[2], flash_mla={"ratio": 4.0})]
    mean = against_flash_mla([decode, missing, *pair])
    assert mean == {"rows": 2, "ratio": pytest.approx(2), "target": attention.FLASH_MLA_RATIO, "met": True}
    pair[1]["peers"]["flash_mla"]["ratio"] = 16.0
    mean = against_flash_mla(pair)
    assert mean is not None
    assert not mean["met"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {"device": "a GPU", "driver_cuda": "13.0", "numpy": "2", "torch": "3", "flash_mla": "1.0"}
    facts |= {"library": {"version": "0"}, "copy_gb_per_s": 4000.0, "empty_graph_us": 1.0}
    row: dict[str, Any] = {"case": SHAPES[0].name, "ok": True, "median_us": 20.0, "cold_median_us": 30.0, "met": None}
    row |= {"event_median_us": 40.0, "target_us": None, "target_copy_share": None, "copy_share": 0.25}
    row |= {"gflop_per_s": 321e3, "peers": {}}
    peers = {"flash_mla": {"median_us": 10.0, "ratio": 2.0}, "torch": {"error": "too large", "left_out": True}}
    decode = {**row, "case": SHAPES[-1].name, "target_copy_share": 0.75, "met": False}
    print_targets(facts, [{**row, "peers": peers}, {**decode, "peers": {"flash_mla": {"error": "out: wrong"}}}])
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "numpy 2, torch 3, flash_mla 1.0, library 0" in shown
    assert "\nverify_attn/1x65x8x512 20.0 30.0 40.0 25.0% 321 left out 10.0 2.000\n" in shown
    assert "\nverify_attn/128x1x64x8192 20.0 30.0 40.0 75% of copy no 25.0% 321 differs\n" in shown
    assert "\ntorch: too large (verify_attn/1x65x8x512)\nflash_mla: out: wrong (verify_attn/128x1x64x8192)\n" in shown
    assert "2.000 x FlashMLA without (geometric mean of 1 rows), target 2.5: met" in shown
    print_targets({**facts, "flash_mla": None}, [row])
    shown = capsys.readouterr().out
    assert "flash_mla" not in shown
    assert "FlashMLA" not in shown


# ---- FlashMLA ----------------------------------------------------------------------------------------------


class FlashMla:
    """What it means, in numpy."""

    def get_mla_metadata(self, lens: Any, rows: int, kv_heads: int) -> Any:
        assert kv_heads == 1
        return ("plan", rows), lens

    def flash_mla_with_kvcache(
        self, q: Any, pages: Any, table: Any, lens: Any, width: int, plan: Any, splits: Any, **options: Any
    ) -> Any:
        assert pages.shape[1:] == (64, 1, 576)
        assert (width, plan, splits is lens) == (512, ("plan", q.shape[1] * q.shape[2]), True)
        assert options.pop("causal") is False
        out = np.zeros((*q.shape[:3], width), np.float32)
        for b, end in enumerate(lens):
            keys = pages[table[b, : -(-end // 64)], :, 0].reshape(-1, 576)[:end]
            weights = np.exp(q[b] @ keys.T * options["softmax_scale"])
            out[b] = weights @ keys[:, :width] / weights.sum(axis=-1, keepdims=True)
        return out, None


class NumpyTorch(TorchOnGpu):
    """Of torch's peers those that need no torch."""

    def __init__(self) -> None:
        self.flash_mla = FlashMla()

    def tensor(self, array: Any) -> Any:
        return array if array.dtype == np.int32 else to_float32(array)

    def numpy(self, got: Any) -> Any:
        return got


def test_flash_mla_gets_what_the_case_has() -> None:
    for name in ("decode", "chain", "heads8"):
        arguments = arguments_of(name)
        expected = check.expected("verify_attn", arguments)
        peer = NumpyTorch().flash_mla_verify_attn(arguments, expected)
        results = peer.results(peer.run())
        assert bool(results) == (name == "decode"), "checked where no mask hides anything"
        assert check.mismatch("verify_attn", arguments, results, expected, slack=10) is None


@pytest.mark.parametrize("name", ["f16", "page16", "contiguous_f32", "tail_only", "real_layer0", "poison_window"])
def test_what_flash_mla_has_not(name: str) -> None:
    with pytest.raises(NoPeer):
        flash_mla_lens(arguments_of(name))


def test_rows_for_flash_mla() -> None:
    arguments = arguments_of("heads8")
    assert flash_mla_lens(arguments).tolist() == (arguments["tree"].node_count + arguments["prefix_lens"]).tolist()
    arguments["tree"].node_count[0] = arguments["prefix_lens"][0] = 0
    with pytest.raises(NoPeer, match="some row"):
        flash_mla_lens(arguments)


# ---- Peers of a target -------------------------------------------------------------------------------------


def test_peers_are_checked_against_what_they_mean() -> None:
    """A peer may have an expectation of its own, be left out, differ or fail."""
    arguments = arguments_of("decode")
    expected = check.expected("verify_attn", arguments)
    other = {"out": -expected["out"]}
    rounded = {name: from_float32(results["out"], kdt.bfloat16) for name, results in {"": expected, "-": other}.items()}
    timing = measure.summary([2e-6] * 3)
    bed = object.__new__(Bed)
    bed.clock = SimpleNamespace()  # type: ignore[assignment]
    bed.bench = object.__new__(GpuBench)
    bed.bench.clock = bed.clock
    bed.bench.torch = SimpleNamespace(time=lambda _clock, _run: timing)  # type: ignore[assignment]
    bed.bench.quiet = contextlib.nullcontext  # type: ignore[assignment,method-assign]
    trial = Trial([], lambda: None, None, {}, expected, arguments)

    def found(make: Any) -> Any:
        return bed.peer("torch", make, trial, "verify_attn", measure.summary([1e-6] * 3))

    def left_out() -> Peer:
        raise NoPeer("too large")

    right = found(lambda: Peer(lambda: rounded[""], lambda got: {"out": got}))
    assert (right["checked"], right["ratio"]) == (True, 0.5)
    assert found(lambda: Peer(lambda: rounded["-"], lambda got: {"out": got}, other))["checked"]
    assert "relative error" in found(lambda: Peer(lambda: rounded["-"], lambda got: {"out": got}))["error"]
    assert found(left_out) == {"error": "too large", "left_out": True}
    assert found(lambda: Peer(lambda: 1 / 0, lambda got: got))["error"].startswith("ZeroDivisionError")


# ---- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_rows_on_a_gpu() -> None:
    command = [sys.executable, "-m", "kdtree_engine", "bench", "targets", "--min-time", "0", "--json", "-k"]
    for name in ("verify_attn/1x65x8x512", "verify_attn/1x8x64x8192", "verify_attn/32x1x64x8192"):
        done = subprocess.run([*command, name], env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["rows"]
        assert row["gflop_per_s"] > 0
        assert row["met"] in ((True, False) if "x1x" in name else (None,))
        assert all("error" not in peer for peer in row["peers"].values())
