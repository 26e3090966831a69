"""One case on one backend: compared with the reference, then timed, beside its peers."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import _cuda, cases, ops
from .._context import Context
from .._errors import KdtError
from .._transfer import place, to_host
from . import check
from .gpu import Clock
from .measure import Machine, Timing, time_cold, time_warm
from .model import MODELS
from .peers import NUMPY, Maker, NoPeer, Peer, Torch, TorchOnGpu, usable

PEER_SLACK = 10
"""Peers are checked for meaning the same, not for precision: so many times the tolerances."""

Row = dict[str, Any]

NUMBERS = ("median_us", "spread", "samples", "cold_median_us", "gb_per_s", "gflop_per_s")


class Prepared:
    """Stands in for the package in `cases.run`, in the memory of a context, and keeps the call it made."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.call: ops.Call[Any]

    def __getattr__(self, operation: str) -> Any:
        prepare = getattr(ops, operation).prepare

        def function(**arguments: Any) -> Any:
            self.call = prepare(**place(arguments, self.context.memory), context=self.context)
            self.call.launch()
            return to_host(self.call.result)

        return function


def timing_fields(timing: Timing) -> Row:
    return {"median_us": timing.median * 1e6, "spread": timing.spread, "samples": timing.samples}


class Bench:
    """Checks and times cases with one set of options, on the CPU."""

    torch: Torch | None = None

    def __init__(self, context: Context, min_time: float, peers: bool) -> None:
        self.context, self.min_time, self.peers = context, min_time, peers
        with contextlib.suppress(ImportError):
            if peers:
                self.torch = self.find_torch()
        self.start()

    # What differs on a GPU.

    def find_torch(self) -> Torch:
        return Torch(self.context.num_threads)

    def start(self) -> None:
        self.machine = Machine(self.context.num_threads, self.min_time)

    def rates(self) -> Row:
        """What the machine can do."""
        return self.machine.rates()

    def timed(self, call: ops.Call[Any]) -> tuple[Timing, Row]:
        """The median, and the other times of a row."""
        hot = time_warm(call.launch, self.min_time)
        cold = time_cold(call.launch, self.min_time, self.machine.read)
        return hot, {"cold_median_us": cold.median * 1e6}

    def makers(self) -> Mapping[str, Mapping[str, Maker]]:
        """The peers, by name and operation."""
        return {"numpy": NUMPY, "torch": {} if self.torch is None else self.torch.makers}

    def time_peer(self, name: str, peer: Peer) -> Timing:
        return time_warm(peer.run, self.min_time)

    # What does not.

    def command(self, case: cases.Case) -> str:
        words = ["kdtree", "bench", "run", "-k", case.name, "--backend", self.context.backend]
        words += ["--threads", str(self.context.num_threads), "--min-time", str(self.min_time)]
        return shlex.join(words if self.peers else [*words, "--no-peers"])

    def row(self, case: cases.Case) -> Row:
        """Runs once and compares with the reference; times only what is right."""
        arguments = case.arguments()
        row: Row = {"case": case.name, "operation": case.operation, "backend": self.context.backend, "ok": False}
        row.update(dict.fromkeys(("error", "bytes", "flop", *NUMBERS)), peers={}, command=self.command(case))
        expected = check.expected(case.operation, arguments)
        prepared = Prepared(self.context)
        try:
            results = cases.run(prepared, case.operation, arguments)
            row["error"] = check.mismatch(case.operation, arguments, results, expected)
        except KdtError as error:
            row["error"] = str(error)
        if row["error"] is not None:
            return row
        row["ok"] = True
        work = MODELS[case.operation](arguments, results)
        # From here on kv_compact's call moves rows of a cache whose content no longer matters.
        timing, others = self.timed(prepared.call)
        row.update(timing_fields(timing), bytes=work.bytes, flop=work.flop, **others)
        row["gb_per_s"] = work.bytes / timing.median / 1e9
        row["gflop_per_s"] = work.flop / timing.median / 1e9 if work.flop else None
        if self.peers and usable(case.operation, arguments):
            for name, makers in self.makers().items():
                if case.operation in makers:
                    make = functools.partial(makers[case.operation], arguments, expected)
                    # Only rows and requests without a flag: what to make of bad ones is this project's own.
                    good = expected["status"] == 0 if "status" in expected else None
                    with contextlib.suppress(NoPeer):
                        row["peers"][name] = self.peer(
                            name, make, case.operation, arguments, expected, timing, rows=good
                        )
        return row

    def peer(
        self,
        name: str,
        make: Callable[[], Peer],
        operation: str,
        arguments: cases.Arguments,
        expected: cases.Results,
        ours: Timing,
        *,
        rows: Any = None,
    ) -> Row:
        """A peer's time and ours as a multiple of it; or what went wrong. May raise NoPeer.

        rows  those to compare, as for check.mismatch.
        """
        with self.quiet():
            try:
                peer = make()
                results = peer.results(peer.run())
                wanted = peer.expected or expected
                problem = check.mismatch(operation, arguments, results, wanted, slack=PEER_SLACK, rows=rows)
                if problem is not None:
                    return {"error": problem}
                timing = self.time_peer(name, peer)
            except NoPeer:
                raise
            except Exception as error:  # peers take ordinary input; whatever else they make of it is not ours
                return {"error": f"{type(error).__name__}: {error}"}
        return {**timing_fields(timing), "ratio": ours.median / timing.median, "checked": bool(results)}

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No warnings of numpy's, and no autograd."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))
            if self.torch is not None:
                stack.enter_context(self.torch.torch.inference_mode())
            yield

    def environment(self, installed: Row) -> Row:
        """What is installed, and what the machine is and can do."""
        facts = {name: fact for name, fact in installed.items() if name != "cpu_threads"}
        return {
            **facts,
            "torch": None if self.torch is None else self.torch.version,
            "cpu": facts["backends"]["cpu"]["devices"][0]["name"],
            "threads": self.context.num_threads,
            "min_time_s": self.min_time,
            "load_average": os.getloadavg()[0],
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **self.rates(),
        }


HOST_ONLY = ("tree_build", "tree_from_parents", "tree_from_visibility", "tree_accept")
"""Operations that torch has not: their peers on a GPU are numpy's and Python's, on the host, without the copies."""


class GpuBench(Bench):
    """On a GPU. torch's peers run there, too, and are timed in graphs as ours are (see gpu.py)."""

    torch: TorchOnGpu | None = None

    def find_torch(self) -> TorchOnGpu:
        return TorchOnGpu(self.context.num_threads, self.context.device)

    def start(self) -> None:
        self.clock = Clock(self.context.device, self.min_time)
        self.copy_gb_per_s = 0.0

    def rates(self) -> Row:
        version = _cuda.driver_version()
        facts: Row = {"device": self.clock.device.name, "driver_cuda": f"{version // 1000}.{version % 1000 // 10}"}
        facts.update(self.clock.rates())
        self.copy_gb_per_s = facts["copy_gb_per_s"]
        if self.torch is not None:
            facts["flash_mla"] = self.torch.flash_mla and str(getattr(self.torch.flash_mla, "__version__", "?"))
            with self.quiet():
                facts["bf16_tflop_per_s"] = self.torch.bf16_flop_per_s(self.clock) / 1e12
        return facts

    def timed(self, call: ops.Call[Any]) -> tuple[Timing, Row]:
        hot, calls = self.clock.hot(call.launch)
        times = {"cold_median_us": self.clock.cold([call.launch]), "event_median_us": self.clock.event([call.launch])}
        return hot, {**{name: timing.median * 1e6 for name, timing in times.items()}, "calls_per_replay": calls}

    def makers(self) -> Mapping[str, Mapping[str, Maker]]:
        host = {operation: NUMPY[operation] for operation in HOST_ONLY}
        peers: dict[str, Mapping[str, Maker]] = {"numpy": host}
        if self.torch is not None:
            peers["torch"] = self.torch.makers
            if self.torch.flash_mla is not None:
                peers["flash_mla"] = {"verify_attn": self.torch.flash_mla_verify_attn}
        return peers

    def time_peer(self, name: str, peer: Peer) -> Timing:
        if name != "numpy" and self.torch is not None:
            return self.torch.time(self.clock, peer.run)
        return super().time_peer(name, peer)

    def row(self, case: cases.Case) -> Row:
        row = super().row(case)
        row["copy_share"] = row["gb_per_s"] / self.copy_gb_per_s if row["ok"] else None
        return row


def bench_on(context: Context, min_time: float, peers: bool) -> Bench:
    return (GpuBench if context.backend == "cuda" else Bench)(context, min_time, peers)
