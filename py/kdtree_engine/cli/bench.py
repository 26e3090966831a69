"""`kdtree bench`: how long each operation takes, beside what users have without it, and against an earlier run."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from .. import cases
from .._context import Context
from ..bench.attention import against_flash_mla
from ..bench.bed import Bed
from ..bench.model import MODELS
from ..bench.run import GpuBench, Row, bench_on
from ..bench.targets import TARGETS
from ._common import figure_for, json_option, print_json, print_table, printable, progress
from .info import environment as installed

FAILED, FIXTURE, NOTHING_MATCHED = 1, 4, 5


class RunByDefault(click.Group):
    """`kdtree bench` and `kdtree bench --option` mean `kdtree bench run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunByDefault)
def bench() -> None:
    """Time the operations, compare two runs, draw one; hold a GPU against the project's targets.

    Without a command: run (kdtree bench run --help for its options).
    """


def stop(code: int, message: str) -> NoReturn:
    click.echo(f"kdtree: {message}", err=True)
    sys.exit(code)


# ---- run ---------------------------------------------------------------------------------------------------


def selected(pattern: str | None) -> list[cases.Case]:
    """The cases that are one call each: those of the bench, or those that match."""
    calls = [case for case in cases.CASES if case.operation in MODELS]
    if pattern is None:
        return [case for case in calls if case.bench]
    found = [case for case in calls if case.name == pattern] or [case for case in calls if pattern in case.name]
    if not found:
        stop(NOTHING_MATCHED, f"no case that is one call matches {pattern!r}")
    return found


def seconds_option(_context: Any, _parameter: Any, value: float) -> float:
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"expected seconds >= 0, got {value}")
    return value


min_time_option = click.option(
    "--min-time",
    type=float,
    default=0.3,
    show_default=True,
    callback=seconds_option,
    help="Seconds to spend on each measurement, at least.",
)
peers_option = click.option(
    "--peers/--no-peers", default=True, show_default=True, help="Also time numpy's, torch's and FlashMLA's versions."
)


@bench.command()
@click.option("-k", "pattern", help="The case of this name, or all whose name contains it; default: the bench cases.")
@click.option("--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(0, 2**31 - 1), default=0, help="CPU threads; default: all.")
@min_time_option
@peers_option
@json_option
def run(pattern: str | None, backend: str, threads: int, min_time: float, peers: bool, as_json: bool) -> None:
    """Check each case against the reference, then time one call of the C ABI.

    us is the median, spread (p90 - p10) / median, of the same call over and over on the same arrays (warm); cold is
    the median of single calls after a walk over more memory than the last-level cache. GB/s and GFLOP/s count what the
    operation cannot do without: inputs read once, results written once (for kv_compact the rows moved, for attention
    the rows seen). ours/numpy and ours/torch are our time over theirs, torch's where it can be imported; torch gets
    the same number of threads, numpy's matrix product takes what OPENBLAS_NUM_THREADS gives it.

    On a GPU times are those between events: us is a call's share of the replay of a graph of many calls back to back;
    cold is the replay of a graph of one call after a write of twice the L2 cache (an empty graph's replay is given
    above the table); eager is one call without a graph, with what the host does for it. copy is GB/s over the
    bandwidth of a copy in device memory, measured in the same run. torch runs on the GPU, in graphs, too; where it
    lacks the operation, numpy's version on the host is beside ours. FlashMLA, where flash_mla can be imported, stands
    beside attention in bfloat16 with pages of 64 rows; it has no tree mask, and is checked where that hides nothing.

    Exit code 1: a result was wrong, and not timed.
    """
    context = Context(backend=backend, num_threads=threads)  # no CUDA code or no GPU: exit 3 with the reason
    chosen = selected(pattern)
    bench = bench_on(context, min_time, peers)
    rows = []
    with progress(len(chosen) + 1, "timing") as bar:
        facts = bench.environment(installed())
        bar.update(1)
        if facts["load_average"] > 0.5:
            click.echo(f"\nkdtree: this machine is not idle (load {facts['load_average']:.1f}): times vary", err=True)
        for case in chosen:
            rows.append(bench.row(case))
            bar.update(1)
    if as_json:
        print_json({"environment": facts, "rows": rows})
    else:
        print_run(facts, rows)
    exit_if_wrong(rows)


def exit_if_wrong(rows: list[Row]) -> None:
    wrong = [row for row in rows if not row["ok"]]
    for row in wrong:
        click.echo(f"kdtree: {row['case']}: {row['error']}\n        again: {row['command']}", err=True)
    if wrong:
        sys.exit(FAILED)


def microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.{1 if value >= 10 else 2}f}"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def print_run(facts: Row, rows: list[Row]) -> None:
    print_machine(facts)
    names = [name for name in ("numpy", "torch", "flash_mla") if any(name in row["peers"] for row in rows)]
    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda row: row["case"],
        "us": lambda row: microseconds(row["median_us"]) if row["ok"] else "WRONG",
        "spread": lambda row: number(row["spread"], ".0%"),
        "cold us": lambda row: microseconds(row["cold_median_us"]),
        "eager us": lambda row: microseconds(row.get("event_median_us")),
        "GB/s": lambda row: number(row["gb_per_s"], ".2f"),
        "copy": lambda row: number(row["copy_share"], ".1%"),
        "GFLOP/s": lambda row: number(row["gflop_per_s"], ".1f"),
    }
    if "device" not in facts:
        del columns["eager us"], columns["copy"]
    header = [*columns, *(text for name in names for text in (f"{name} us", f"ours/{name}"))]
    table = []
    for row in rows:
        cells = [cell(row) for cell in columns.values()]
        for name in names:
            peer = row["peers"].get(name, {})
            cells += peer_cells(peer)
        table.append(cells)
    print_table(header, table)


def peer_cells(peer: Row) -> list[str]:
    """Its time, and ours as a multiple of it."""
    if "error" in peer:
        return ["left out" if peer.get("left_out") else "differs", ""]
    return [microseconds(peer.get("median_us")), number(peer.get("ratio"), ".3f")]


def print_machine(facts: Row) -> None:
    versions = f"numpy {facts['numpy']}"
    for name in ("torch", "flash_mla"):
        versions += f", {name} {facts[name]}" if facts.get(name) else ""
    if "device" in facts:
        click.echo(
            f"{facts['device']}, driver for CUDA {facts['driver_cuda']}, {versions}, "
            f"library {facts['library']['version']}"
        )
        product = f", torch bf16 {facts['bf16_tflop_per_s']:.0f} TFLOP/s" if "bf16_tflop_per_s" in facts else ""
        floor = f"an empty graph {facts['empty_graph_us']:.1f} us"
        click.echo(f"copy {facts['copy_gb_per_s']:,.0f} GB/s, {floor}{product}\n")
        return
    click.echo(f"{facts['cpu']}, {facts['threads']} threads, {versions}, library {facts['library']['version']}")
    click.echo(
        f"read {facts['read_gb_per_s']:.1f} GB/s, copy {facts['copy_gb_per_s']:.1f} GB/s, "
        f"numpy sgemm {facts['sgemm_gflop_per_s']:.0f} GFLOP/s\n"
    )


# ---- targets -----------------------------------------------------------------------------------------------


@bench.command()
@click.option("-k", "pattern", help="Only targets whose name contains this.")
@click.option("--backend", type=click.Choice(["cuda"]), default="cuda", show_default=True)
@min_time_option
@peers_option
@json_option
def targets(pattern: str | None, backend: str, min_time: float, peers: bool, as_json: bool) -> None:
    """Time what the project set out to reach on a GPU, at full size.

    Times are those of `kdtree bench run --backend cuda`: hot in a graph, cold, eager. A row whose target is
    relative gives it in us of this run. Results are checked as there. Exit code 1: a result was wrong; a missed
    target is none.

    verify_attn/BxQxHxprefix is attention over a prefix: of a tree where Q is 65, else of a chain. Its TFLOP/s count
    every query with every row. For those with a tree the target is a geometric mean, given below the table.
    """
    chosen = [target for target in TARGETS if pattern is None or pattern in target.name]
    if not chosen:
        stop(NOTHING_MATCHED, f"no target matches {pattern!r}")
    bench = bench_on(Context(backend=backend), min_time, peers)
    assert isinstance(bench, GpuBench)
    rows = []
    with progress(len(chosen) + 1, "timing") as bar:
        facts = bench.environment(installed())
        bar.update(1)
        bed = Bed(bench)
        for target in chosen:
            rows.append(bed.row(target))
            bar.update(1)
    if as_json:
        print_json({"environment": facts, "rows": rows, "flash_mla": against_flash_mla(rows)})
    else:
        print_targets(facts, rows)
    exit_if_wrong(rows)


def print_targets(facts: Row, rows: list[Row]) -> None:
    print_machine(facts)
    flash_mla = any("flash_mla" in row["peers"] for row in rows)
    table = []
    for row in rows:
        goal = microseconds(row["target_us"])
        if row["target_copy_share"] is not None:
            goal = f"{row['target_copy_share']:.0%} of copy"
        rate = row["gflop_per_s"]
        cells = [
            row["case"],
            microseconds(row["median_us"]) if row["ok"] else "WRONG",
            microseconds(row["cold_median_us"]),
            microseconds(row["event_median_us"]),
            goal,
            "" if row["met"] is None else "yes" if row["met"] else "no",
            number(row["copy_share"], ".1%"),
            number(rate and rate / 1000, ".0f"),
            peer_cells(row["peers"].get("torch", {}))[0],
        ]
        table.append(cells + (peer_cells(row["peers"].get("flash_mla", {})) if flash_mla else []))
    header = ["case", "us", "cold us", "eager us", "target us", "met", "copy", "TFLOP/s", "torch us"]
    print_table([*header, "flash_mla us", "ours/flash_mla"] if flash_mla else header, table)
    print_peers(rows)


def print_peers(rows: list[Row]) -> None:
    """Below the table: why peers are missing, and how we stand against FlashMLA."""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, peer in row["peers"].items():
            if "error" in peer:
                missing.setdefault((name, peer["error"]), []).append(row["case"])
    mean = against_flash_mla(rows)
    if missing or mean is not None:
        click.echo()
    for (name, error), names in missing.items():
        click.echo(f"{name}: {error} ({', '.join(names)})")
    if mean is not None:
        click.echo(
            f"verify_attn with a tree: {mean['ratio']:.3f} x FlashMLA without (geometric mean of {mean['rows']} rows), "
            f"target {mean['target']:g}: {'met' if mean['met'] else 'not met'}"
        )


# ---- compare -----------------------------------------------------------------------------------------------


def load_run(path: Path) -> tuple[Row, dict[tuple[str, str], Row]]:
    """The environment and the rows, by case and backend, of a file that `run --json` wrote; else exit 4."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        stop(FIXTURE, f"{path}: {error.strerror or error}")
    except (ValueError, RecursionError):
        stop(FIXTURE, f"{path}: no bench file, not JSON")
    if not isinstance(content, dict) or not isinstance(content.get("environment"), dict):
        stop(FIXTURE, f"{path}: no bench file, expected an object with environment and rows")
    rows = content.get("rows")
    if not isinstance(rows, list) or not all(is_row(row) for row in rows):
        stop(FIXTURE, f"{path}: no bench file, its rows are not those of `kdtree bench run --json`")
    return content["environment"], {(row["case"], row["backend"]): row for row in rows}


def is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("peers"), dict) or not isinstance(row.get("ok"), bool):
        return False
    if not all(isinstance(peer, dict) and ("error" in peer or is_timing(peer)) for peer in row["peers"].values()):
        return False
    return all(isinstance(row.get(name), str) for name in ("case", "backend")) and (is_timing(row) or not row["ok"])


def is_timing(fields: Row) -> bool:
    median, spread = fields.get("median_us"), fields.get("spread")
    return all(isinstance(value, (int, float)) and 0 <= value < 1e15 for value in (median, spread)) and median != 0


def verdict(old: Row, new: Row, threshold: float) -> str:
    """SAME within the threshold; UNSURE where the spreads cover the difference; WRONG has no time to compare."""
    if not new["ok"]:
        return "WRONG"
    if not old["ok"]:
        return "UNSURE"
    before, after = old["median_us"], new["median_us"]
    difference = after - before
    if abs(difference) <= threshold * before:
        return "SAME"
    if abs(difference) <= (old["spread"] * before + new["spread"] * after) / 2:
        return "UNSURE"
    return "SLOW" if difference > 0 else "FAST"


def parse_threshold(_context: Any, _parameter: Any, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text.strip(), re.ASCII)
    value = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 <= value < 1:
        raise click.BadParameter(f"expected a percentage like 5% or a fraction like 0.05, below 1, got {text!r}")
    return value


@bench.command()
@click.argument("old", type=click.Path(path_type=Path), metavar="OLD.json")
@click.argument("new", type=click.Path(path_type=Path), metavar="NEW.json")
@click.option(
    "--threshold", default="5%", show_default=True, callback=parse_threshold, help="The difference that still is SAME."
)
@json_option
def compare(old: Path, new: Path, threshold: float, as_json: bool) -> None:
    """Compare two files written by `kdtree bench run --json`, case by case.

    SAME, FAST or SLOW say what became of our median; UNSURE that half the spreads of both runs together cover the
    difference; WRONG that the new result was not right. Exit code 1: a row is SLOW or WRONG; 5: no row is in both.
    """
    (old_facts, old_rows), (new_facts, new_rows) = load_run(old), load_run(new)
    both = [key for key in old_rows if key in new_rows]
    if not both:
        stop(NOTHING_MATCHED, f"no case is in both {old} and {new}")
    for fact in ("cpu", "threads", "device"):
        if old_facts.get(fact) != new_facts.get(fact):
            words = [printable(str(facts.get(fact))) for facts in (old_facts, new_facts)]
            click.echo(f"kdtree: the runs differ in {fact}: {words[0]} and {words[1]}", err=True)
    rows: list[Row] = []
    for key in both:
        before, after = old_rows[key], new_rows[key]
        timed = before["ok"] and after["ok"]
        rows.append(
            {
                "case": key[0],
                "backend": key[1],
                "old_us": before["median_us"] if before["ok"] else None,
                "new_us": after["median_us"] if after["ok"] else None,
                "change": after["median_us"] / before["median_us"] - 1 if timed else None,
                "verdict": verdict(before, after, threshold),
            }
        )
    alone = {"only_old": sorted(c for c, _ in old_rows.keys() - new_rows.keys())}
    alone["only_new"] = sorted(c for c, _ in new_rows.keys() - old_rows.keys())
    if as_json:
        print_json({"threshold": threshold, "rows": rows, **alone})
    else:
        keys = ("old_us", "new_us")
        table = [
            (printable(r["case"]), *(microseconds(r[k]) for k in keys), number(r["change"], "+.1%"), r["verdict"])
            for r in rows
        ]
        print_table(("case", "old us", "new us", "change", "verdict"), table)
        for name, where in (("only_old", old), ("only_new", new)):
            if alone[name]:
                click.echo(f"only in {where}: {printable(', '.join(alone[name]))}", err=True)
    if any(row["verdict"] in ("SLOW", "WRONG") for row in rows):
        sys.exit(FAILED)


# ---- plot --------------------------------------------------------------------------------------------------


@bench.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.json")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.png")
def plot(file: Path, out: Path) -> None:
    """Draw a file written by `kdtree bench run --json`: our time and the peers', case by case (extra: plots)."""
    figure = figure_for("OUT", out, (9, 1.5 + 0.45 * 10))
    facts, found = load_run(file)
    rows = [row for row in found.values() if row["ok"]]
    if not rows:
        stop(NOTHING_MATCHED, f"{file}: no timed row to draw")
    figure.set_figheight(1.5 + 0.45 * len(rows))
    axes = figure.add_subplot()
    series: dict[str, list[tuple[int, float]]] = {"kdtree-engine": []}  # (place, time), the first row on top
    for place, row in zip(reversed(range(len(rows))), rows, strict=True):
        series["kdtree-engine"].append((place, row["median_us"]))
        for name, peer in row["peers"].items():
            if "error" not in peer:
                series.setdefault(printable(name), []).append((place, peer["median_us"]))
    height = 0.8 / len(series)
    for i, (name, times) in enumerate(series.items()):
        offset = (len(series) - 1) / 2 - i
        axes.barh([place + offset * height for place, _ in times], [time for _, time in times], height, label=name)
    labels = [
        printable(row["case"] if row["backend"] == "cpu" else f"{row['case']} ({row['backend']})") for row in rows
    ]
    axes.set_yticks(list(reversed(range(len(rows)))), labels)
    axes.set_xscale("log")
    axes.set_xlabel("median time of a call (us, log scale)")
    title = str(facts.get("device") or f"{facts.get('cpu', '?')}, {facts.get('threads', '?')} threads")
    axes.set_title(printable(title), fontsize="medium", parse_math=False)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(out)
    click.echo(f"wrote {out}", err=True)
