"""What there is to reach, made ready and timed on one GPU: targets.py and attention.py say what."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import cases
from .._cuda import DeviceArray
from .._errors import KdtError
from .._trace import Trace, load_trace
from .._transfer import place
from ..cases import Arguments, Results
from .gpu import Launch
from .measure import Timing
from .peers import NoPeer, Peer
from .run import NUMBERS, GpuBench, Row, timing_fields


@dataclass
class Trial:
    """A row made ready: arguments in device memory, and what to expect."""

    launches: Sequence[Launch]
    """One call, or calls on different inputs."""
    problem: Callable[[], str | None]
    """The first disagreement after one launch of each."""
    bytes: int | None
    """What one call reads and writes (model.py); None where that says nothing."""
    peers: Mapping[str, Callable[[], Peer]] = field(default_factory=dict)
    """Others' versions, by name. Their results are checked against `expected`."""
    expected: Results | None = None
    arguments: Arguments | None = None
    yardstick: Launch | None = None
    """What a relative target is relative to."""
    flop: int | None = None


@dataclass(frozen=True)
class Target:
    name: str
    """operation/variant"""
    make: Callable[[Bed], Trial]
    us: float | None = None
    """Without any of the three there is nothing to reach."""
    yardsticks: float | None = None
    """Instead: so many times the yardstick's time."""
    copy_share: float | None = None
    """Instead: a share of the bandwidth of a copy."""


class Bed:
    """Makes and times targets on one GPU."""

    def __init__(self, bench: GpuBench) -> None:
        self.bench, self.context, self.clock = bench, bench.context, bench.clock
        self.trace: Trace = load_trace(cases.DATA / "trace_code.kdtr")

    def put(self, value: Any) -> Any:
        return place(value, self.context.memory)

    def row(self, target: Target) -> Row:
        """As those of `Bench.row`, with the target."""
        operation = target.name.split("/")[0]
        row: Row = {"case": target.name, "operation": operation, "backend": self.context.backend, "ok": False}
        more = ("event_median_us", "calls_per_replay", "copy_share", "met")
        row.update(dict.fromkeys(("error", "bytes", "flop", *NUMBERS, *more)), peers={})
        row.update(target_us=target.us, target_copy_share=target.copy_share)
        words = ["kdtree", "bench", "targets", "-k", target.name, "--min-time", str(self.bench.min_time)]
        row["command"] = shlex.join(words if self.bench.peers else [*words, "--no-peers"])
        try:
            trial = target.make(self)
            for launch in trial.launches:
                launch(None)
            row["error"] = trial.problem()
        except KdtError as error:
            row["error"] = str(error)
        if row["error"] is not None:
            return row
        self.time(target, trial, row)
        return row

    def time(self, target: Target, trial: Trial, row: Row) -> None:
        single = len(trial.launches) == 1
        hot, calls = self.clock.hot(trial.launches[0]) if single else self.clock.hot_over(trial.launches)
        row.update(ok=True, **timing_fields(hot), calls_per_replay=calls, bytes=trial.bytes, flop=trial.flop)
        row["cold_median_us"] = self.clock.cold(trial.launches).median * 1e6
        row["event_median_us"] = self.clock.event(trial.launches).median * 1e6
        if trial.bytes is not None:
            row["gb_per_s"] = trial.bytes / hot.median / 1e9
            row["copy_share"] = row["gb_per_s"] / self.bench.copy_gb_per_s
        if trial.flop is not None:
            row["gflop_per_s"] = trial.flop / hot.median / 1e9
        if target.yardsticks is not None and trial.yardstick is not None:
            row["target_us"] = target.yardsticks * self.clock.hot(trial.yardstick)[0].median * 1e6
        if target.copy_share is not None:
            row["met"] = row["copy_share"] >= target.copy_share
        elif row["target_us"] is not None:
            row["met"] = row["median_us"] <= row["target_us"]
        if self.bench.torch is not None:
            for name, make in trial.peers.items():
                row["peers"][name] = self.peer(name, make, trial, row["operation"], hot)

    def peer(self, name: str, make: Callable[[], Peer], trial: Trial, operation: str, ours: Timing) -> Row:
        """As that of the bench; or why there is none."""
        try:
            return self.bench.peer(name, make, operation, trial.arguments or {}, trial.expected or {}, ours)
        except NoPeer as reason:
            return {"error": str(reason), "left_out": True}


def repeated(rows: Any, count: int, ordinal: int) -> DeviceArray:
    """So many rows, row i being row i % len(rows)."""
    array = DeviceArray((count, *rows.shape[1:]), rows.dtype, ordinal)
    done = min(len(rows), count)
    array[:done].copy_from(rows[:done])
    while done < count:
        size = min(done, count - done)
        array[done : done + size].copy_from(array[:size])
        done += size
    return array
