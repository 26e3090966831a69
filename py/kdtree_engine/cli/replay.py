"""`kdtree replay`: what would tree decoding have gained on a recorded trace?"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import kdtr, reference
from .._context import Context
from .._errors import KdtrError, Status
from ..ops import MAX_BUDGET, MAX_CANDIDATES, MAX_DEPTH, tree_accept, tree_build
from ..types import Accepted, Tree
from ._common import bundled, figure_for, json_option, print_json, print_table, progress, resolve_fixture

DEFAULT_BUDGETS = "1,4,8,15,16,32,64,128,256"


@dataclass
class Trace:
    """`S` recorded decode steps."""

    log_probs: Any
    """[S, D, K] f32, the drafter's rows"""
    token_ids: Any
    """[S, D, K] i32"""
    root_tokens: Any
    """[S] i32, the token before the first row"""
    continuation: Any
    """[S, D] i32, what the target went on to emit"""
    attrs: dict[str, str]


def load_trace(path: Path) -> Trace:
    """Reads a trace; leading dimensions (sequences, steps) are flattened. KdtrError when the file holds none."""
    tensors, attrs = kdtr.load(path)

    def tensor(name: str, dtype: type[np.generic], trailing: int) -> Any:
        array = tensors.get(name)
        if array is None:
            raise KdtrError(f"{path}: no trace, tensor '{name}' is missing", Status.KDTR_NOT_FOUND)
        if array.dtype != dtype or array.ndim < trailing:
            wanted = f"{np.dtype(dtype).name} with at least {trailing} dimensions"
            raise KdtrError(f"{path}: no trace, tensor '{name}' is {array.dtype}{list(array.shape)}, not {wanted}", 521)
        kept = array.shape[array.ndim - trailing :]
        return array.reshape(int(np.prod(array.shape[: array.ndim - trailing], dtype=np.int64)), *kept)

    trace = Trace(
        tensor("log_probs", np.float32, 2),
        tensor("token_ids", np.int32, 2),
        tensor("root_tokens", np.int32, 0),
        tensor("continuation", np.int32, 1),
        attrs,
    )
    steps, depth, _ = trace.log_probs.shape
    for name, shape in (
        ("token_ids", trace.log_probs.shape),
        ("root_tokens", (steps,)),
        ("continuation", (steps, depth)),
    ):
        got = getattr(trace, name).shape
        if got != shape:
            raise KdtrError(
                f"{path}: no trace, tensor '{name}' has shape {list(got)} after flattening, expected {list(shape)}", 520
            )
    candidates = trace.log_probs.shape[2]
    if depth > MAX_DEPTH or candidates > MAX_CANDIDATES:
        raise KdtrError(f"{path}: D={depth}, K={candidates} are beyond D={MAX_DEPTH}, K={MAX_CANDIDATES}", 520)
    if (trace.continuation < 0).any():
        raise KdtrError(f"{path}: no trace, tensor 'continuation' has tokens < 0", Status.KDTR_VALUE)
    if steps == 0 or depth == 0 or candidates == 0:
        raise KdtrError(f"{path}: an empty trace ({steps} steps of shape {list(trace.log_probs.shape[1:])})", 520)
    return trace


class Stepper:
    """Builds and accepts one step at a time, timing the operation itself: the call of the C ABI, or of numpy."""

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

    def run(self, trace: Trace, step: int) -> tuple[float, float]:
        """Runs one step; returns seconds to build and to accept."""
        self.log_probs[0] = trace.log_probs[step]
        self.token_ids[0] = trace.token_ids[step]
        self.root_tokens[0] = trace.root_tokens[step]
        start = time.perf_counter()
        self.build()
        built = time.perf_counter()
        self.target_tokens[:] = targets_of(trace, [step], self.tree.depths)
        accept_start = time.perf_counter()
        self.accept()
        return built - start, time.perf_counter() - accept_start


def tree_digest(digest: Any, tree: Tree) -> None:
    """Adds a tree without its root and padding to a hash: node_count, then tokens, parents, depths, log_probs."""
    count = int(tree.node_count[0])
    digest.update(np.array(count, "<i4").tobytes())
    for field, dtype in (("tokens", "<i4"), ("parents", "<i4"), ("depths", "<i4"), ("log_probs", "<f4")):
        digest.update(getattr(tree, field)[0, 1:count].astype(dtype).tobytes())


def targets_of(trace: Trace, steps: Any, depths: Any) -> Any:
    """The target's token after nodes of these depths [S, N], on the path that agrees with the target.

    After the last recorded token it is unknown; such a node has no children, so any token serves.
    """
    continued = np.pad(trace.continuation[steps], ((0, 0), (0, 1)))
    return np.take_along_axis(continued, depths, axis=1)


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
    """
    figure = None if plot is None else figure_for("--plot", plot, (7, 4.5))
    path = bundled("trace_code") if trace is None else resolve_fixture(trace)
    recorded = load_trace(path)
    context = None if backend == "reference" else Context(backend=backend)
    steps, depth, candidates = recorded.log_probs.shape
    chain = chain_accept_len_mean(recorded)
    rows: list[dict[str, Any]] = []
    with progress(len(budgets) * steps, "replaying") as bar:
        for budget in budgets:
            stepper = Stepper(recorded, budget, context)
            digest = hashlib.sha256()
            lengths, build_seconds, accept_seconds = [], [], []
            stepper.run(recorded, 0)  # first touch of code and memory
            for step in range(steps):
                build, accept = stepper.run(recorded, step)
                build_seconds.append(build)
                accept_seconds.append(accept)
                lengths.append(int(stepper.accepted.accept_len[0]))
                tree_digest(digest, stepper.tree)
                if step % 64 == 63:
                    bar.update(64)
            bar.update(steps % 64)
            rows.append(
                {
                    "budget": budget,
                    "accept_len_mean": statistics.fmean(lengths),
                    "build_us_p50": statistics.median(build_seconds) * 1e6,
                    "accept_us_p50": statistics.median(accept_seconds) * 1e6,
                    "trees_sha256": digest.hexdigest(),
                }
            )
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
    table = [("chain", f"{chain:.4f}", "", "", "")]
    for row in rows:
        gain = f"{row['accept_len_mean'] / chain:.2f}x"
        times = (f"{row['build_us_p50']:.1f}", f"{row['accept_us_p50']:.1f}")
        table.append((str(row["budget"]), f"{row['accept_len_mean']:.4f}", gain, *times))
    print_table(("budget", "tokens/step", "vs chain", "build us", "accept us"), table)
