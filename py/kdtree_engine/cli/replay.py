"""`kdtree replay`: what would tree decoding have gained on a recorded trace?"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import numpy as np

from .. import reference
from .._context import Context
from .._cuda import DeviceArray, Graph
from .._trace import Trace, load_trace, targets_of, tree_digest
from .._transfer import to_host
from ..bench.gpu import Clock
from ..ops import MAX_BUDGET, Call, tree_accept, tree_build
from ..types import Accepted, Tree
from ._common import bundled, figure_for, json_option, print_json, print_table, progress, resolve_fixture

DEFAULT_BUDGETS = "1,4,8,15,16,32,64,128,256"
BATCH = 64
FAILED = 1


class Step(NamedTuple):
    """One call of each operation, on one step of the trace or several."""

    tree: Tree
    accept_len: Any
    build_seconds: float
    accept_seconds: float


class Stepper(Protocol):
    """Builds and accepts up to `batch` steps at a time, timing the operation itself."""

    batch: int

    def run(self, trace: Trace, steps: slice) -> Step: ...


class HostStepper:
    """Steps one at a time, timing the call of the C ABI, or of numpy."""

    batch = 1

    def __init__(self, trace: Trace, budget: int, context: Context | None) -> None:
        self.log_probs = np.empty_like(trace.log_probs[:1])
        self.token_ids = np.empty_like(trace.token_ids[:1])
        self.root_tokens = np.empty(1, np.int32)
        self.prefix_lens = np.zeros(1, np.int32)
        self.target_tokens = np.empty((1, budget + 1), np.int32)
        self.tree = Tree.empty(1, budget + 1)
        self.accepted: Accepted = Accepted.empty(1, budget + 1, budget + 1)
        self.build: Callable[[], None]
        self.accept: Callable[[], None]
        if context is None:

            def build() -> None:
                self.tree = reference.tree_build(
                    self.log_probs, self.token_ids, self.root_tokens, self.prefix_lens, budget
                )

            def accept() -> None:
                self.accepted = reference.tree_accept(self.tree, self.target_tokens)

            self.build, self.accept = build, accept
        else:
            inputs = (self.log_probs, self.token_ids, self.root_tokens, self.prefix_lens)
            self.build = tree_build.prepare(*inputs, budget, out=self.tree, context=context).launch
            self.accept = tree_accept.prepare(self.tree, self.target_tokens, out=self.accepted, context=context).launch

    def run(self, trace: Trace, steps: slice) -> Step:
        self.log_probs[:] = trace.log_probs[steps]
        self.token_ids[:] = trace.token_ids[steps]
        self.root_tokens[:] = trace.root_tokens[steps]
        start = time.perf_counter()
        self.build()
        built = time.perf_counter()
        self.target_tokens[:] = targets_of(trace, steps, self.tree.depths)
        accept_start = time.perf_counter()
        self.accept()
        return Step(self.tree, self.accepted.accept_len, built - start, time.perf_counter() - accept_start)


class GpuStepper:
    """Steps on a GPU, timing replays of a graph of the one call."""

    AHEAD = 32
    """Calls that run first, so that the device is still busy when the host has queued what is timed."""

    def __init__(self, trace: Trace, budget: int, context: Context, clock: Clock, batch: int) -> None:
        self.batch, self.clock = batch, clock

        def array(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
            return DeviceArray((batch, *shape), dtype, context.device)

        self.recorded = (trace.log_probs, trace.token_ids, trace.root_tokens)
        rows, ids, roots = (array(recorded.shape[1:], recorded.dtype) for recorded in self.recorded)
        self.inputs = (rows, ids, roots)
        lens, self.targets = array((), np.int32), array((budget + 1,), np.int32)
        lens.copy_from(np.zeros(batch, np.int32))
        self.live = None if batch == 1 else DeviceArray(1, np.int32, context.device)
        self.tree_call = tree_build.prepare(rows, ids, roots, lens, budget, num_live=self.live, context=context)
        self.accept_call = tree_accept.prepare(self.tree_call.result, self.targets, num_live=self.live, context=context)
        self.build, self.accept = self.graphs(self.tree_call), self.graphs(self.accept_call)

    def graphs(self, call: Call[Any]) -> tuple[Graph, Graph]:
        return self.clock.capture(call.launch, self.AHEAD), self.clock.capture(call.launch, 1)

    def seconds(self, graphs: tuple[Graph, Graph]) -> float:
        ahead, single = graphs
        ahead.launch(self.clock.stream)
        return self.clock.between(lambda: single.launch(self.clock.stream))

    def upload(self, array: DeviceArray, values: Any) -> None:
        """The first requests of a batch; the others are dead."""
        padded = np.zeros(array.shape, array.dtype)
        padded[: len(values)] = values
        array.copy_from(padded)

    def run(self, trace: Trace, steps: slice) -> Step:
        for array, recorded in zip(self.inputs, self.recorded, strict=True):
            self.upload(array, recorded[steps])
        count = len(trace.root_tokens[steps])
        if self.live is not None:
            self.live.copy_from(np.array([count], np.int32))
        build_seconds = self.seconds(self.build)
        tree = to_host(self.tree_call.result)
        self.upload(self.targets, targets_of(trace, steps, tree.depths[:count]))
        accept_seconds = self.seconds(self.accept)
        return Step(tree, self.accept_call.result.accept_len.numpy()[:count], build_seconds, accept_seconds)


class Replayed(NamedTuple):
    lengths: list[int]
    sha256: str
    build_us: float
    accept_us: float


def replay_all(trace: Trace, stepper: Stepper, bar: Any) -> Replayed:
    """All steps, in order; the medians of the times of a call."""
    digest, lengths = hashlib.sha256(), []
    build_seconds, accept_seconds = [], []
    steps = len(trace.root_tokens)
    stepper.run(trace, slice(0, min(stepper.batch, steps)))  # first touch of code and memory
    unseen = 0
    for first in range(0, steps, stepper.batch):
        last = min(first + stepper.batch, steps)
        step = stepper.run(trace, slice(first, last))
        build_seconds.append(step.build_seconds)
        accept_seconds.append(step.accept_seconds)
        lengths += step.accept_len.tolist()
        tree_digest(digest, step.tree, last - first)
        unseen += last - first
        if unseen >= BATCH or last == steps:
            bar.update(unseen)
            unseen = 0
    times = (statistics.median(seconds) * 1e6 for seconds in (build_seconds, accept_seconds))
    return Replayed(lengths, digest.hexdigest(), *times)


def row_of(budget: int, replayed: Replayed) -> dict[str, Any]:
    return {
        "budget": budget,
        "accept_len_mean": statistics.fmean(replayed.lengths),
        "build_us_p50": replayed.build_us,
        "accept_us_p50": replayed.accept_us,
        "trees_sha256": replayed.sha256,
    }


def row_on_gpu(trace: Trace, budget: int, context: Context, clock: Clock, bar: Any) -> dict[str, Any]:
    """One step a call, then many; both must say the same."""
    single, batched = (replay_all(trace, GpuStepper(trace, budget, context, clock, batch), bar) for batch in (1, BATCH))
    if (single.lengths, single.sha256) != (batched.lengths, batched.sha256):
        click.echo(f"\nkdtree: budget {budget}: {BATCH} steps a call gave other trees than one", err=True)
        sys.exit(FAILED)
    times = {f"build_us_p50_batch{BATCH}": batched.build_us, f"accept_us_p50_batch{BATCH}": batched.accept_us}
    return {**row_of(budget, single), **times}


def chain_accept_len_mean(trace: Trace) -> float:
    """Mean accepted length when only the best candidate of each row is drafted: the trees of one candidate a row."""
    steps, depth, _ = trace.log_probs.shape
    first = (np.ascontiguousarray(trace.log_probs[:, :, :1]), np.ascontiguousarray(trace.token_ids[:, :, :1]))
    tree = reference.tree_build(*first, trace.root_tokens, np.zeros(steps, np.int32), depth)
    return float(reference.tree_accept(tree, targets_of(trace, slice(None), tree.depths)).accept_len.mean())


def parse_budgets(_context: Any, _parameter: Any, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"expected integers >= 0 separated by commas, got {text!r}")
    budgets = [int(part) for part in parts]
    for budget in budgets:
        if not 0 <= budget <= MAX_BUDGET:
            raise click.BadParameter(f"expected budgets of 0..{MAX_BUDGET}, got {budget}")
    return budgets


def plot_rows(figure: Any, rows: list[dict[str, Any]], chain: float) -> None:
    axes = figure.add_subplot()
    rows = sorted(rows, key=lambda row: int(row["budget"]))
    axes.plot([r["budget"] for r in rows], [r["accept_len_mean"] for r in rows], marker="o", label="tree")
    axes.axhline(chain, linestyle="--", color="gray", label=f"chain ({chain:.2f})")
    axes.set_xscale("symlog", base=2)
    axes.set_xlabel("budget (nodes)")
    axes.set_ylabel("mean accepted length (tokens per step)")
    axes.grid(alpha=0.3)
    axes.legend()


@click.command()
@click.argument("trace", required=False)
@click.option(
    "--budgets", default=DEFAULT_BUDGETS, show_default=True, callback=parse_budgets, help="Tree sizes to try."
)
@click.option("--backend", type=click.Choice(["cpu", "cuda", "reference"]), default="cpu", show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the curve (extra: plots).")
@json_option
def replay(trace: str | None, budgets: list[int], backend: str, plot: Path | None, as_json: bool) -> None:
    """Replay a recorded drafter trace: budget -> mean accepted length, against the chain.

    TRACE is a KDTR file with log_probs [.., D, K] f32, token_ids [.., D, K] i32, root_tokens [..] i32 and
    continuation [.., D] i32 (what the target went on to emit), or the name of a bundled one (default: trace_code).
    For each step the tree of the drafter's rows is built and followed along the continuation. The accepted
    length is 1 + the draft tokens accepted. Times are medians a step of one call with one request.

    On a GPU everything runs twice, one step a call and 64 steps a call, and must come out the same. A time there is
    that between two events around the replay of a graph of the one call, behind other work, so that the host is not in
    it; the columns "x64" (build_us_p50_batch64, accept_us_p50_batch64 in the JSON) are of a call with 64 requests.
    """
    figure = None if plot is None else figure_for("--plot", plot, (7, 4.5))
    path = bundled("trace_code") if trace is None else resolve_fixture(trace)
    recorded = load_trace(path)
    context = None if backend == "reference" else Context(backend=backend)
    clock = Clock(context.device, 0) if context is not None and backend == "cuda" else None
    steps, depth, candidates = recorded.log_probs.shape
    chain = chain_accept_len_mean(recorded)
    rows: list[dict[str, Any]] = []
    with progress(len(budgets) * steps * (1 if clock is None else 2), "replaying") as bar:
        for budget in budgets:
            if context is not None and clock is not None:
                rows.append(row_on_gpu(recorded, budget, context, clock, bar))
            else:
                rows.append(row_of(budget, replay_all(recorded, HostStepper(recorded, budget, context), bar)))
    if figure is not None:
        plot_rows(figure, rows, chain)
        figure.savefig(plot)
    if as_json:
        print_json(
            {
                "trace": str(path),
                "backend": backend,
                "steps": steps,
                "depth": depth,
                "candidates": candidates,
                "chain_accept_len_mean": chain,
                "rows": rows,
            }
        )
        return
    origin = "bundled " if path == bundled(path.stem) else ""
    click.echo(f"{origin}{path.name}: {steps} steps, D={depth}, K={candidates}, backend {backend}\n")
    times = {"build us": "build_us_p50", "accept us": "accept_us_p50"}
    if clock is not None:
        times |= {f"{name} x{BATCH}": f"{key}_batch{BATCH}" for name, key in times.items()}
    table = [("chain", f"{chain:.4f}", "", *("" for _ in times))]
    for row in rows:
        gain = f"{row['accept_len_mean'] / chain:.2f}x"
        cells = (f"{row[key]:.1f}" for key in times.values())
        table.append((str(row["budget"]), f"{row['accept_len_mean']:.4f}", gain, *cells))
    print_table(("budget", "tokens/step", "vs chain", *times), table)
