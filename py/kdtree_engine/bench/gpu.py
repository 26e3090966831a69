"""Timing on a GPU, with events.

hot     calls back to back in one graph, so many that a replay takes SHORTEST_REPLAY, or MOST_CALLS; the time of a
        replay over the number of calls. Another replay goes ahead, so that the device is not waiting for the host
        when the clock starts. Arrays then sit in whatever cache holds them.
cold    a replay of a graph of one call, after a write of twice the L2 cache. What a replay costs at all is in it: the
        environment has the same time of an empty graph.
event   one call without a graph on an idle stream, events around it: with all that Python, the library and the driver
        do on the host for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import _cuda
from .._cuda import DeviceArray, Event, Graph, Stream
from .measure import Timing, no_garbage_collection, summary

SAMPLES = 50
MOST_SAMPLES = 500
SHORTEST_REPLAY = 200e-6
MOST_CALLS = 256
COPY_BYTES = 2**30

Launch = Callable[[Any], None]
"""Puts one call on a stream."""
Replay = Callable[[], None]
Capture = Callable[[int], Replay]
"""Makes a graph of so many calls; returns what replays it."""


class Clock:
    """Times what runs on one GPU. `min_time` is a lower limit of the seconds spent on a measurement."""

    def __init__(self, ordinal: int, min_time: float) -> None:
        self.device = _cuda.device(ordinal)
        self.min_time = min_time
        self.stream = Stream(ordinal)
        self.start, self.end = Event(ordinal), Event(ordinal)
        self.scrub = DeviceArray(max(2 * self.device.attribute(_cuda.L2_CACHE_SIZE), 2**24), "uint8", ordinal)

    def between(self, work: Replay, stream: Any = None) -> float:
        """Seconds from before to after some work on a stream (ours)."""
        on = self.stream if stream is None else stream
        self.start.record(on)
        work()
        self.end.record(on)
        self.end.synchronize()
        return self.end.seconds_since(self.start)

    def samples(self, sample: Callable[[], float], least: int = SAMPLES) -> list[float]:
        """At least so many, and for min_time; but no more than MOST_SAMPLES."""
        taken: list[float] = []
        end = time.perf_counter() + self.min_time
        while len(taken) < least or (time.perf_counter() < end and len(taken) < MOST_SAMPLES):
            taken.append(sample())
        return taken

    def capture(self, launch: Launch, times: int) -> Graph:
        with self.stream.capture() as graph:
            for _ in range(times):
                launch(self.stream)
        return graph

    def behind_another(self, replay: Replay, stream: Any = None) -> float:
        """The time of a replay that starts right after one that is not timed."""
        replay()
        return self.between(replay, stream)

    def calls_for(self, capture: Capture, stream: Any = None) -> tuple[int, Replay]:
        """How many calls a graph must have to be worth timing, and that graph."""
        times = 1
        while True:
            replay = capture(times)
            took = self.behind_another(replay, stream)
            if took >= SHORTEST_REPLAY or times == MOST_CALLS:
                return times, replay
            wanted = 1.2 * times * SHORTEST_REPLAY / max(took, 1e-7)
            times = min(MOST_CALLS, max(2 * times, math.ceil(wanted)))

    def hot_graph(self, capture: Capture, stream: Any = None) -> tuple[Timing, int]:
        """Seconds a call in a graph of many, and how many."""
        with no_garbage_collection():
            times, replay = self.calls_for(capture, stream)
            return summary([s / times for s in self.samples(lambda: self.behind_another(replay, stream))]), times

    def ours(self, launch: Launch) -> Capture:
        def capture(times: int) -> Replay:
            graph = self.capture(launch, times)
            return lambda: graph.launch(self.stream)

        return capture

    def hot(self, launch: Launch) -> tuple[Timing, int]:
        return self.hot_graph(self.ours(launch))

    def hot_over(self, launches: Sequence[Launch], least: int = 5) -> tuple[Timing, int]:
        """Over calls that differ in what they work on: the median of theirs, the spread from call to call."""
        with no_garbage_collection():
            times, _ = self.calls_for(self.ours(launches[0]))
            medians = []
            for launch in launches:
                replay = self.ours(launch)(times)
                taken = [self.behind_another(replay) / times for _ in range(least)]
                medians.append(summary(taken).median)
        return summary(medians), times

    def cold(self, launches: Sequence[Launch]) -> Timing:
        with no_garbage_collection():
            graphs = [self.capture(launch, 1) for launch in launches]
            for graph in graphs:
                graph.launch(self.stream)

            def sample(graph: Graph) -> float:
                self.scrub.fill_bytes(1, self.stream)
                return self.between(lambda: graph.launch(self.stream))

            if len(graphs) == 1:
                return summary(self.samples(lambda: sample(graphs[0])))
            return summary([sample(graph) for _ in range(3) for graph in graphs])

    def event(self, launches: Sequence[Launch]) -> Timing:
        def sample(launch: Launch) -> float:
            self.stream.synchronize()
            return self.between(lambda: launch(self.stream))

        with no_garbage_collection():
            for launch in launches:
                launch(self.stream)
            if len(launches) == 1:
                return summary(self.samples(lambda: sample(launches[0])))
            return summary([sample(launch) for launch in launches])

    def rates(self) -> dict[str, float]:
        """Copying from device memory to device memory (read and written bytes count), and what a replay costs."""
        source, target = (DeviceArray(COPY_BYTES, "uint8", self.device.ordinal) for _ in range(2))
        source.fill_bytes(3, self.stream)
        taken = self.samples(lambda: self.behind_another(lambda: target.copy_async(source, self.stream)), 20)
        return {
            "copy_gb_per_s": 2 * COPY_BYTES / summary(taken).median / 1e9,
            "empty_graph_us": self.cold([lambda _stream: None]).median * 1e6,
        }
