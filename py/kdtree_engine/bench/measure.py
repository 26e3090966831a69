"""Timing, and what the machine can do.

A measurement is warm: the same call on the same arrays, over and over, which then sit in whatever cache holds them.
`time_cold` walks an array larger than the last-level cache before every call.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MIN_SAMPLES = 7
SHORTEST_SAMPLE = 20e-6
"""Seconds: a sample of a shorter call is the mean of many, or the clock would be what is measured."""
COLD_SAMPLES = 11
SGEMM_SIZE = 2048


@dataclass(frozen=True)
class Timing:
    """Seconds a call."""

    median: float
    spread: float
    """(p90 - p10) / median"""
    samples: int


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds(launch: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        launch()
    return time.perf_counter() - start


def summary(samples: list[float]) -> Timing:
    low, median, high = np.percentile(samples, [10, 50, 90]).tolist()
    return Timing(median, (high - low) / median if median > 0 else 0.0, len(samples))


def time_warm(launch: Callable[[], Any], min_time: float) -> Timing:
    """Warms up for a quarter of min_time, then times for min_time and at least MIN_SAMPLES samples."""
    with no_garbage_collection():
        end = time.perf_counter() + min_time / 4
        launch()
        while time.perf_counter() < end:
            launch()
        times = 1
        while seconds(launch, times) < SHORTEST_SAMPLE:
            times *= 2
        samples: list[float] = []
        end = time.perf_counter() + min_time
        while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
            samples.append(seconds(launch, times) / times)
    return summary(samples)


def time_cold(launch: Callable[[], Any], min_time: float, evict: Callable[[], Any]) -> Timing:
    """Single calls, each with the caches full of something else; fewer than COLD_SAMPLES where they take long."""
    samples: list[float] = []
    with no_garbage_collection():
        while len(samples) < COLD_SAMPLES and (len(samples) < 3 or sum(samples) < min_time):
            evict()
            samples.append(seconds(launch, 1))
    return summary(samples)


def last_level_cache() -> int:
    """Bytes; 32 MiB where the system does not say."""
    units = {"K": 2**10, "M": 2**20}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=32 * 2**20)


class Machine:
    """Rates of this machine through numpy, with the same number of threads as the calls that are timed."""

    def __init__(self, threads: int, min_time: float) -> None:
        count = math.ceil(min(max(4 * last_level_cache(), 2**20), 2**30) / 8)
        self.min_time = min_time
        self.source = np.resize(np.random.default_rng(0).integers(0, 2**60, 2**17), count)
        self.target = np.zeros_like(self.source)
        edges = np.linspace(0, count, threads + 1).astype(int).tolist()
        self.parts = [slice(low, high) for low, high in itertools.pairwise(edges)]
        self.pool = ThreadPoolExecutor(threads)

    def read(self) -> None:
        """Reads an array of several times the last-level cache; what was there before has to go."""
        list(self.pool.map(lambda part: self.source[part].sum(), self.parts))

    def copy(self) -> None:
        list(self.pool.map(lambda part: np.copyto(self.target[part], self.source[part]), self.parts))

    def rates(self) -> dict[str, float]:
        """Bandwidths (a copy counts what it reads and what it writes) and numpy's float32 matrix product."""
        a, b = np.random.default_rng(0).normal(size=(2, SGEMM_SIZE, SGEMM_SIZE)).astype(np.float32)
        product = np.empty_like(a)
        size = self.source.nbytes
        return {
            "read_gb_per_s": size / time_warm(self.read, self.min_time).median / 1e9,
            "copy_gb_per_s": 2 * size / time_warm(self.copy, self.min_time).median / 1e9,
            "sgemm_gflop_per_s": 2
            * SGEMM_SIZE**3
            / time_warm(lambda: np.matmul(a, b, out=product), self.min_time).median
            / 1e9,
        }
