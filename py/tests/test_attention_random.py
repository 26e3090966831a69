"""verify_attn on random problems, against float64: masks, lengths, layouts and types that no table would list.

On the CPU a few small ones, so that this file itself is tested; on a GPU (KDTREE_TEST_BACKEND=cuda) hundreds, with
prefixes up to 70,000 rows, and some far larger than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from conftest import vector

import kdtree_engine as kdt
from kdtree_engine import cases, kdtr, ops
from kdtree_engine._cuda import DeviceArray
from kdtree_engine._floats import to_float32
from kdtree_engine._trace import load_trace
from kdtree_engine._transfer import to_host

SMALL_CASES, SHARDS, CASES_A_SHARD = 32, 32, 17
MOST_FLOP = 2.5e10
"""In float64, of one case's expected result."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.5e-3, "float16": 6e-4}
MASKS = ["random", "random", "shallow", "star", "chain", "caterpillar", "any", "causal"]
SCALES = [cases.KIMI_SCALE, cases.KIMI_SCALE, 192**-0.5, 0.04, 1.0, -0.1, 0.0]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def context(request: pytest.FixtureRequest) -> kdt.Context:
    return kdt.Context(backend=request.param)


# ---- Problems ----------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """What is asked, whatever the layout in memory. Requests from `num_live` on are dead."""

    dtype: str
    q: Any
    """[B, Q, H, 576]"""
    rows: list[Any]
    """[prefix_len + node_count, 576] of each request"""
    lens: list[int]
    masks: list[Any]
    """bool [node_count, node_count] of each request"""
    starts: list[int] | None = None
    num_slots: int | None = None
    """N of the mask; None: none is given, and `masks` are causal."""
    gives_counts: bool = True
    num_live: int | None = None
    page_size: int = 64
    """0: a contiguous cache"""
    scale: float = cases.KIMI_SCALE
    lse_base: str = "e"
    wide: bool = False
    """float32 out"""
    layout: int = 0
    """The seed of strides, page ids and garbage."""

    @property
    def live(self) -> int:
        return len(self.lens) if self.num_live is None else min(max(self.num_live, 0), len(self.lens))

    def start(self, b: int) -> int:
        return 0 if self.starts is None else self.starts[b]

    def seen(self, b: int) -> Any:
        """bool [prefix_len + node_count]: some query of the request sees the row."""
        seen = np.zeros(len(self.rows[b]), bool)
        if b < self.live and len(self.masks[b]):
            seen[self.start(b) : self.lens[b]] = True
            seen[self.lens[b] :] = self.masks[b].any(axis=0)
        return seen


def tree_mask(rng: np.random.Generator, count: int, kind: str) -> Any:
    """Who sees whom in a tree of some shape; "any" is no tree's mask."""
    if kind == "causal":
        return np.tri(count, dtype=bool)
    if kind == "any":
        return rng.random((count, count)) < rng.choice([0.02, 0.3, 0.9])
    mask = np.eye(count, dtype=bool)
    for i in range(1, count):
        parent = {"star": 0, "chain": i - 1, "caterpillar": max(0, i - 1 - i % 2)}.get(kind)
        if parent is None:
            parent = int(rng.integers(0 if kind == "shallow" else max(0, i - 6), i))
        mask[i] |= mask[parent]
    return mask


def numbers(rng: np.random.Generator, shape: Sequence[int], std: float, dtype: str) -> Any:
    return cases.as_dtype(rng.standard_normal(shape, np.float32) * np.float32(std), dtype)


def make_problem(
    rng: np.random.Generator,
    lens: Sequence[int],
    counts: Sequence[int],
    queries: int,
    heads: int,
    *,
    mask: str = "random",
    dtype: str = "bfloat16",
    score_std: float = 3.5,
    key_std: float = 1.0,
    scale: float = cases.KIMI_SCALE,
    levels: float = 0.0,
    **options: Any,
) -> Problem:
    """Random numbers whose scores have about this standard deviation.

    levels  of another one, added to all scores of a row through one coordinate, so that it costs no precision.
    """
    q = numbers(rng, (len(lens), queries, heads, 576), score_std / (24 * key_std * (abs(scale) or 1)), dtype)
    rows = [numbers(rng, (n + count, 576), key_std, dtype) for n, count in zip(lens, counts, strict=True)]
    if levels:
        q[..., 575] = cases.as_dtype(np.full(1, 2, np.float32), dtype)[0]
        for part in rows:
            added = np.clip(rng.normal(0, levels / (2 * (abs(scale) or 1)), len(part)), -6e4, 6e4)
            part[:, 575] = cases.as_dtype(added.astype(np.float32), dtype)
    masks = [tree_mask(rng, count, mask) for count in counts]
    if mask not in ("causal", "any") and rng.random() < 0.2:
        for one in masks:
            one[rng.random(len(one)) < rng.choice([0.5, 1]), :1] = False  # the root is not seen
    options.setdefault("num_slots", None if mask == "causal" else queries)
    return Problem(dtype, q, rows, list(lens), masks, scale=scale, layout=int(rng.integers(2**31)), **options)


def random_problem(rng: np.random.Generator, most_flop: float, longest: int) -> Problem:
    most_pairs = most_flop / (2 * 1088)
    while True:
        batch_size = int(rng.choice([1, 1, 2, 3, 4, 5]))
        heads = int(rng.choice(vector(1, 2, 3, 5, 8, 8, 13, 16, 64, 128)))
        slots = int(
            rng.choice(vector(1, 2, 8, 16, 17, 33, 64, 65, 65, 66, 129, 257, 513, 1025, int(rng.integers(1, 1026))))
        )
        if rng.random() < 0.2:  # those that people ask for
            batch_size, heads, slots = min(batch_size, 2), int(rng.choice([8, 16])), int(rng.choice([17, 33, 65]))
        queries = slots if rng.random() < 0.7 else int(rng.integers(1, slots + 1))
        fixed = batch_size * queries * heads
        if fixed * queries <= most_pairs:
            break
    room = int(np.clip(most_pairs * 10 ** (-2.5 * rng.random() ** 2) / fixed - queries, 0, longest))
    few, some = vector(0, 1, 63, 64, 65), rng.random((batch_size, 3)) * [room, room, 0]
    some[:, 2] = room ** rng.random(batch_size)
    lens = [int(rng.choice(few if rng.random() < 0.25 else [room, *row])) for row in some]
    gives_counts = rng.random() < 0.7
    counts = [queries] * batch_size
    if gives_counts and rng.random() < 0.7:
        counts = [int(rng.integers(0, queries + 1)) if rng.random() < 0.9 else 0 for _ in range(batch_size)]
    starts = None
    if rng.random() < 0.4:
        starts = list(lens) if rng.random() < 0.4 else [int(rng.integers(0, n + 1)) for n in lens]
    dtype = str(rng.choice(["bfloat16", "bfloat16", "bfloat16", "float16", "float16", "float32"]))
    mask = str(rng.choice(MASKS))
    return make_problem(
        rng,
        lens,
        counts,
        queries,
        heads,
        mask=mask,
        dtype=dtype,
        score_std=float(rng.choice([0.2, 1.5, 3.5, 6])),
        key_std=float(rng.choice([0.05, 1, 3])),
        scale=float(rng.choice(SCALES)),
        levels=float(rng.choice([0, 0, 0, 10 if dtype == "float32" else int(rng.choice([10, 100, 1000]))])),
        starts=starts,
        num_slots=None if mask == "causal" else slots,
        gives_counts=gives_counts,
        num_live=None if rng.random() < 0.7 else int(rng.integers(-1, batch_size + 2)),
        page_size=int(rng.choice([0, 0, *(2**i for i in range(9)), 64, 64])),
        lse_base=str(rng.choice(["e", "2"])),
        wide=bool(rng.random() < 0.3),
    )


@dataclass
class Attended:
    """What verify_attn returned."""

    out: Any
    lse: Any
    status: Any


# ---- What is right -----------------------------------------------------------------------------------------


def exact(problem: Problem, b: int) -> tuple[Any, Any]:
    """out [Q, H, 512] and lse [Q, H] of a request, in float64."""
    _, queries, heads, width = problem.q.shape
    out, lse = np.zeros((queries, heads, 512)), np.full((queries, heads), -np.inf)
    mask, start = problem.masks[b], problem.start(b)
    count, prefix = len(mask), problem.lens[b] - start
    if b >= problem.live or count == 0:
        return out, lse
    keys = np.where(problem.seen(b)[start:, None], to_float32(problem.rows[b][start:]), 0).astype(np.float64)
    scores = to_float32(problem.q[b, :count]).astype(np.float64).reshape(-1, width) @ keys.T
    scores = (scores * problem.scale).reshape(count, heads, -1)
    scores[..., prefix:] = np.where(mask[:, None], scores[..., prefix:], -np.inf)
    sees = mask.any(axis=1) | (prefix > 0)
    top = np.where(sees[:, None], scores.max(axis=-1), 0)
    weights = np.exp(scores - top[..., None], out=scores)
    total = np.where(sees[:, None], weights.sum(axis=-1), 1)
    values = (weights.reshape(count * heads, -1) @ keys[:, :512]).reshape(count, heads, 512)
    out[:count], lse[:count] = values / total[..., None], np.where(sees[:, None], top + np.log(total), -np.inf)
    return out, lse


def error(got: Any, want: Any) -> float:
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(to_float32(got).astype(np.float64) - want)) / (size or 1)


def assert_lse(got: Any, want: Any, base: str) -> None:
    natural = got.astype(np.float64) * (math.log(2) if base == "2" else 1)
    assert np.array_equal(np.isneginf(natural), np.isneginf(want))
    live = np.isfinite(want)
    off = np.abs(natural[live] - want[live]) - (1e-5 + 1e-6 * np.abs(want[live]))
    assert (off <= 0).all(), f"lse off by {off.max():.2e} more than allowed"  # NaN, too


def assert_right(problem: Problem, got: Attended, requests: Sequence[int] | None = None) -> float:
    """All requests or some; the worst relative error of out."""
    assert not got.status.any()
    worst = 0.0
    for b in range(len(problem.lens)) if requests is None else requests:
        out, lse = exact(problem, b)
        assert not to_float32(got.out[b])[np.isneginf(lse)].any(), f"request {b}: who sees nothing gets zeros"
        assert_lse(got.lse[b], lse, problem.lse_base)
        found = error(got.out[b], out)
        assert found <= TOLERANCE[problem.dtype], f"request {b}: {found:.2e}"
        worst = max(worst, found)
    return worst


# ---- Layouts -----------------------------------------------------------------------------------------------


class Window:
    """An array within a buffer, with gaps and at times with its dimensions in another order; 0xff everywhere (NaN)."""

    def __init__(
        self,
        rng: np.random.Generator,
        shape: Sequence[int],
        dtype: Any,
        step: int,
        *,
        contiguous_last: bool = True,
        any_order: bool = True,
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        order = list(range(len(shape) - contiguous_last))
        if any_order and rng.random() < 0.3:
            rng.shuffle(order)
        steps, extent = [1] * len(shape), shape[-1] if contiguous_last else 1
        for axis in reversed(order):
            steps[axis] = extent + step * int(rng.choice([0, 0, 1, 4]))
            extent = steps[axis] * shape[axis]
        self.offset = step * int(rng.choice([0, 0, 1, 3]))
        self.strides = tuple(n * self.dtype.itemsize for n in steps)
        self.buffer = np.full((self.offset + extent) * self.dtype.itemsize, 0xFF, np.uint8).view(self.dtype)

    def within(self, buffer: Any) -> Any:
        item = buffer.itemsize
        strides = [stride // self.dtype.itemsize * item for stride in self.strides]
        return np.lib.stride_tricks.as_strided(buffer[self.offset :], self.shape, strides)

    @property
    def array(self) -> Any:
        return self.within(self.buffer)

    @property
    def bits(self) -> Any:
        return self.within(self.buffer.view(f"u{self.dtype.itemsize}"))

    def on(self, context: kdt.Context) -> Any:
        if context.backend == "cpu":
            return self.array
        offset = self.offset * self.dtype.itemsize
        return OnDevice(DeviceArray.from_numpy(self.buffer), self.shape, self.strides, offset)


class OnDevice:
    """An array within device memory, as another library would hand it over; strides and offset in bytes."""

    def __init__(self, memory: DeviceArray, shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
        self.memory, self.dtype = memory, memory.dtype
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": memory.dtype.str,
            "data": (memory.pointer + offset, False),
            "strides": tuple(strides),
            "version": 3,
        }


def filled_cache(problem: Problem, rng: np.random.Generator, step: int) -> tuple[Window, Any]:
    """The cache and its table. No row is there but those seen, and no page id but those of their pages."""
    sizes = [n + len(mask) for n, mask in zip(problem.lens, problem.masks, strict=True)]
    dtype, page_size = problem.q.dtype, problem.page_size
    seen = [np.flatnonzero(problem.seen(b)) for b in range(len(sizes))]
    bits = [rows.view(f"u{dtype.itemsize}") for rows in problem.rows]
    if not page_size:
        cache = Window(
            rng, (len(sizes) + int(rng.integers(0, 2)), max(sizes) + int(rng.integers(1, 4)), 576), dtype, step
        )
        for b, there in enumerate(seen):
            cache.bits[b, there] = bits[b][there]
        return cache, None
    columns = [np.unique(there // page_size) for there in seen]
    num_pages = sum(map(len, columns)) + int(rng.integers(1, 4))
    ids = rng.permutation(num_pages).astype(np.int32)
    cache = Window(rng, (num_pages, page_size, 576), dtype, step)
    table = Window(
        rng, (len(sizes), -(-max(sizes) // page_size) + int(rng.integers(1, 3))), np.int32, 1, any_order=False
    )
    garbage = vector(-1, -(2**31), 2**31 - 1, num_pages, int(ids[0]))
    table.array[...] = rng.choice(garbage, table.shape)
    for b, there in enumerate(seen):
        used, ids = ids[: len(columns[b])], ids[len(columns[b]) :]
        table.array[b, columns[b]] = used
        cache.bits[table.array[b, there // page_size], there % page_size] = bits[b][there]
    return cache, table


def filled_mask(problem: Problem, rng: np.random.Generator) -> Window:
    """visibility, with every bit set that does not matter."""
    slots = problem.num_slots or 0
    words = (slots + 63) // 64
    visibility = Window(rng, (len(problem.lens), slots, words), np.uint64, 1, any_order=False)
    for b, mask in enumerate(problem.masks[: problem.live]):
        bits = np.ones((len(mask), words * 64), bool)
        bits[:, : len(mask)] = mask
        visibility.array[b, : len(mask)] = np.packbits(bits, axis=1, bitorder="little").view("<u8")
    return visibility


def attend(problem: Problem, context: kdt.Context) -> Attended:
    """Laid out as problem.layout says; twice, with the same bits; nothing is written outside the results."""
    rng = np.random.default_rng(problem.layout)
    step = 1 if rng.random() < 0.12 else 8  # at times rows do not begin at multiples of 16 bytes
    batch_size, queries, heads, _ = problem.q.shape
    q = Window(rng, problem.q.shape, problem.q.dtype, step)
    for b, mask in enumerate(problem.masks[: problem.live]):
        q.bits[b, : len(mask)] = problem.q[b, : len(mask)].view(q.bits.dtype)
    cache, table = filled_cache(problem, rng, step)

    def per_request(values: Sequence[int]) -> Any:
        dead = rng.choice(vector(-5, 7, 2**31 - 1), batch_size - problem.live)
        return context.memory.put(np.concatenate([vector(*values[: problem.live]), dead]).astype(np.int32))

    tree = None
    if problem.num_slots is not None or problem.gives_counts:
        fields = dict.fromkeys(vars(kdt.Tree.empty(1, 1)))
        if problem.num_slots is not None:
            fields["visibility"] = filled_mask(problem, rng).on(context)
        if problem.gives_counts:
            fields["node_count"] = per_request([len(mask) for mask in problem.masks])
        tree = kdt.Tree(**fields)
    out_dtype = np.dtype(np.float32) if problem.wide else problem.q.dtype
    out = Window(rng, (batch_size, queries, heads, 512), out_dtype, step)
    lse = Window(rng, (batch_size, queries, heads), np.float32, step, contiguous_last=False)
    results = (out.on(context), lse.on(context), context.memory.put(np.full(batch_size, 7, np.int32)))
    call = ops.verify_attn.prepare(
        q.on(context),
        cache.on(context),
        tree,
        per_request(problem.lens),
        scale=problem.scale,
        block_table=None if table is None else table.on(context),
        kv_starts=None if problem.starts is None else per_request(problem.starts),
        lse_base=problem.lse_base,
        num_live=problem.num_live,
        out=results,
        return_status=True,
        context=context,
    )
    runs = []
    for _ in range(2):
        for window, result in ((out, results[0]), (lse, results[1])):
            window.buffer.view(np.uint8)[...] = 0xFF
            if context.backend == "cuda":
                result.memory.copy_from(window.buffer)
        call.launch()
        for window, result in ((out, results[0]), (lse, results[1])):
            if context.backend == "cuda":
                window.buffer[...] = result.memory.numpy()
            outside = np.ones(len(window.buffer), bool)
            window.within(outside)[...] = False
            gaps = window.buffer.view(f"u{window.dtype.itemsize}")[outside]
            assert (~gaps == 0).all(), "something was written outside the result"
        runs.append(Attended(out.array.copy(), lse.array.copy(), to_host(results[2]).copy()))
    for name in ("out", "lse", "status"):
        assert getattr(runs[0], name).tobytes() == getattr(runs[1], name).tobytes(), f"{name}: other bits"
    return runs[0]


# ---- Many ----------------------------------------------------------------------------------------------------


def with_other_neighbours(problem: Problem, rng: np.random.Generator, kept: int) -> Problem:
    """The same lengths, other numbers in all requests but one."""
    others = [b for b in range(len(problem.lens)) if b != kept]
    q, rows = problem.q.copy(), list(problem.rows)
    q[others] = numbers(rng, q[others].shape, 0.5, problem.dtype)
    for b in others:
        rows[b] = numbers(rng, rows[b].shape, 2, problem.dtype)
    return replace(problem, q=q, rows=rows)


def with_shorter_neighbours(problem: Problem, rng: np.random.Generator, kept: int) -> Problem:
    lens = [n if b == kept else int(rng.integers(0, n + 1)) for b, n in enumerate(problem.lens)]
    rows = [
        np.concatenate([part[:new], part[old:]])
        for part, old, new in zip(problem.rows, problem.lens, lens, strict=True)
    ]
    starts = None if problem.starts is None else [min(s, n) for s, n in zip(problem.starts, lens, strict=True)]
    return replace(problem, rows=rows, lens=lens, starts=starts)


def check_case(seed: int, context: kdt.Context, most_flop: float, longest: int) -> dict[str, float]:
    """The worst error by type."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, most_flop, longest)
    got = attend(problem, context)
    worst = assert_right(problem, got)
    if seed % 4 == 0 and problem.live > 1:
        kept = int(rng.integers(problem.live))
        again = attend(with_other_neighbours(problem, rng, kept), context)
        assert again.out[kept].tobytes() == got.out[kept].tobytes(), "out depends on what neighbours contain"
        assert again.lse[kept].tobytes() == got.lse[kept].tobytes(), "lse depends on what neighbours contain"
        shorter = with_shorter_neighbours(problem, rng, kept)
        assert_right(shorter, attend(shorter, context), [kept])
    return {problem.dtype: worst}


def check_cases(seeds: Sequence[int], context: kdt.Context, most_flop: float, longest: int) -> None:
    worst = dict.fromkeys(TOLERANCE, 0.0)
    for seed in seeds:
        try:
            found = check_case(seed, context, most_flop, longest)
        except Exception as failure:
            raise AssertionError(
                f"check_case({seed}, context, {most_flop:g}, {longest}): {type(failure).__name__}: {failure}"
            ) from failure
        for dtype, value in found.items():
            worst[dtype] = max(worst[dtype], value)
    print("worst ||out - ref|| / ||ref||:", {name: f"{value:.2e}" for name, value in worst.items()})


def test_small_random_cases(context: kdt.Context) -> None:
    check_cases(range(10_000, 10_000 + SMALL_CASES), context, 2e8, 300)


@pytest.mark.cuda
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard: int) -> None:
    first = shard * CASES_A_SHARD
    check_cases(range(first, first + CASES_A_SHARD), kdt.Context(backend="cuda"), MOST_FLOP, 70_000)


# ---- Some -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_the_matter_of_those_who_see_it(context: kdt.Context, dtype: str, bad: float) -> None:
    rng = np.random.default_rng(21)
    for mask, lens, queries in (("random", [130, 0, 64], 65), ("any", [40, 3], 17), ("star", [100], 130)):
        problem = make_problem(rng, lens, [queries] * len(lens), queries, 8, mask=mask, dtype=dtype)
        for column in (5, 570):  # of the latent part and of the rope's
            rows = [part.copy() for part in problem.rows]
            slots = [int(rng.choice(np.flatnonzero(m.any(axis=0) & ~m.all(axis=0)))) for m in problem.masks]
            for b, slot in enumerate(slots):
                rows[b][lens[b] + slot, column] = cases.as_dtype(np.full(1, bad, np.float32), dtype)[0]
            got = attend(replace(problem, rows=rows), context)
            for b, slot in enumerate(slots):
                out, lse = exact(problem, b)
                blind = ~problem.masks[b][:, slot]
                assert error(got.out[b][blind], out[blind]) <= TOLERANCE[dtype]
                assert_lse(got.lse[b][blind], lse[blind], "e")
                if np.isnan(bad):
                    assert np.isnan(to_float32(got.out[b][~blind])).any(axis=-1).all()


@pytest.mark.parametrize(
    ("dtype", "query", "key"),
    [
        ("bfloat16", 1e15, -1e15),
        ("bfloat16", 1e5, 1e5),
        ("bfloat16", 3e9, 1),
        ("float16", 3e4, 3e4),
        ("float16", 3e4, -3e4),
    ],
)
def test_scores_far_from_zero(context: kdt.Context, dtype: str, query: float, key: float) -> None:
    """All rows with one score, so large that its rounding is more than the logarithm of any weight."""
    problem = make_problem(np.random.default_rng(7), [70, 500], [9, 3], 9, 8, dtype=dtype, scale=1.0)
    problem.q[...] = 0
    problem.q[..., 575] = cases.as_dtype(np.full(1, query, np.float32), dtype)[0]
    for rows in problem.rows:
        rows[:, 575] = cases.as_dtype(np.full(1, key, np.float32), dtype)[0]
    assert_right(problem, attend(problem, context))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("prefix", "queries"), [(3000, 17), (20, 65)])
def test_columns_of_different_size_are_each_right(context: kdt.Context, dtype: str, prefix: int, queries: int) -> None:
    """Each column within tolerance of its own size, be it a millionth of its neighbours'."""
    problem = make_problem(np.random.default_rng(10), [prefix, 7], [queries, queries], queries, 8, dtype=dtype)
    problem.q[..., :512] = 0  # so that scores stay what they are
    powers = np.arange(512) % (5 if dtype == "float16" else 9)
    for b, rows in enumerate(problem.rows):
        scaled = to_float32(rows)
        scaled[:, :512] *= np.float32(10.0) ** (2 - powers)
        problem.rows[b] = cases.as_dtype(scaled, dtype)
    got = attend(problem, context)
    assert_right(problem, got)
    for b in range(2):
        out, _ = exact(problem, b)
        for power in range(powers.max() + 1):
            columns = powers == power
            assert error(got.out[b][..., columns], out[..., columns]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("paged", "room"), [(False, 4), (False, 70), (True, 16)])
def test_rows_beyond_the_cache_are_unseen(context: kdt.Context, dtype: str, paged: bool, room: int) -> None:
    """More nodes than the cache has rows for a request: no query sees what is not there."""
    rng = np.random.default_rng(9)
    batch_size, queries, heads = 2, room + 9, 8
    q = numbers(rng, (batch_size, queries, heads, 576), 1.0, dtype)
    rows = numbers(rng, (batch_size, room, 576), 1.0, dtype)
    problem = Problem(dtype, q, list(rows), [0] * batch_size, [np.tri(queries, room, dtype=bool)] * batch_size)
    table = np.arange(batch_size, dtype=np.int32)[:, None] if paged else None
    put = context.memory.put
    out, lse, status = to_host(
        ops.verify_attn(
            put(q),
            put(rows),
            None,
            put(vector(5, 0)),  # clamped, too
            scale=problem.scale,
            block_table=None if table is None else put(table),
            return_status=True,
            context=context,
        )
    )
    assert (status == kdt.StatusFlag.CLAMPED).all()
    for b in range(batch_size):
        want_out, want_lse = exact(problem, b)
        assert error(out[b], want_out) <= TOLERANCE[dtype]
        assert_lse(lse[b], want_lse, "e")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_table_with_room_for_a_billion_rows(context: kdt.Context, dtype: str) -> None:
    """So many that positions in all work take more than 32 bits; requests have few of them."""
    rng = np.random.default_rng(11)
    lens, queries, heads, page_size = [700, 0, 2000], 65, 16, 256
    problem = make_problem(rng, lens, [queries] * 3, queries, heads, mask="causal", dtype=dtype, num_slots=None)
    pages = [-(-len(rows) // page_size) for rows in problem.rows]
    cache = np.zeros((sum(pages), page_size, 576), problem.q.dtype)
    table = np.full((3, 2**22), -1, np.int32)
    for b, rows in enumerate(problem.rows):
        first = sum(pages[:b])
        table[b, : pages[b]] = np.arange(first, first + pages[b])
        cache[first : first + pages[b]].reshape(-1, 576)[: len(rows)] = rows
    put = context.memory.put
    got = ops.verify_attn(
        put(problem.q),
        put(cache),
        None,
        put(vector(*lens)),
        scale=problem.scale,
        block_table=put(table),
        return_status=True,
        context=context,
    )
    assert_right(problem, Attended(*to_host(got)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("depth", [16.3, 20.4, 25.2])
def test_a_long_tail_of_small_weights_counts(dtype: str, depth: float) -> None:
    """One row has a score so many powers of 2 above 131,072 others."""
    problem = make_problem(np.random.default_rng(8), [131_072], [1], 1, 2, dtype=dtype, scale=1.0)
    problem.q[...] = 0
    problem.q[..., 575] = cases.as_dtype(np.ones(1, np.float32), dtype)[0]
    rows = to_float32(problem.rows[0]) + 1
    rows[:, 575] = 0
    rows[3, 575] = depth * math.log(2)
    problem.rows[0] = cases.as_dtype(rows, dtype)
    assert_right(problem, attend(problem, kdt.Context(backend="cuda")))


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_tail_merges_with_anothers_prefix(context: kdt.Context, dtype: str, base: str) -> None:
    rng = np.random.default_rng(22)
    lens, counts = [1000, 0, 64, 257], [65, 65, 0, 30]
    whole = make_problem(rng, lens, counts, 65, 8, dtype=dtype, lse_base=base, wide=True)
    tail = attend(replace(whole, starts=lens), context)
    blind = replace(whole, masks=[np.zeros_like(mask) for mask in whole.masks])
    prefix_out, prefix_lse = (np.stack(parts) for parts in zip(*(exact(blind, b) for b in range(4)), strict=True))
    prefix_lse = prefix_lse / (math.log(2) if base == "2" else 1)
    prefix_lse[np.isneginf(prefix_lse)] = np.inf  # as FlashMLA has it
    sides = (prefix_out.astype(np.float32), prefix_lse.astype(np.float32), tail.out, tail.lse)
    merged = kdt.merge_attn_states(*map(context.memory.put, sides), lse_base=base, context=context)
    out, lse = to_host(merged)
    assert_right(whole, Attended(out, lse, tail.status))


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_real_activations_under_a_real_tree(context: kdt.Context, layer: int) -> None:
    """Absorbed queries and latent rows of a small MLA model; trees of the bundled trace."""
    tensors, attrs = kdtr.load(cases.DATA / "mla_real.kdtr")
    trace, step = load_trace(cases.DATA / "trace_code.kdtr"), slice(layer, layer + 1)
    tree = kdt.tree_build(trace.log_probs[step], trace.token_ids[step], trace.root_tokens[step], [2048], 64)
    assert tree.node_count[0] == 65
    mask = np.unpackbits(tree.visibility[0].view(np.uint8), axis=1, bitorder="little")[:, :65].astype(bool)
    q, rows = tensors[f"q{layer}"][None], tensors[f"kv{layer}"]
    problem = Problem("bfloat16", q, [rows], [len(rows) - 65], [mask], num_slots=65, scale=float(attrs["scale"]))
    assert_right(problem, attend(replace(problem, wide=layer == 3), context))


# ---- Large, on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("queries", [768, 1025])
@pytest.mark.parametrize("mask", ["random", "shallow", "any"])
def test_many_queries(queries: int, mask: str) -> None:
    rng = np.random.default_rng(queries)
    problem = make_problem(rng, [500], [queries], queries, 8, mask=mask, num_slots=1025)
    assert_right(problem, attend(problem, kdt.Context(backend="cuda")))


@pytest.mark.cuda
@pytest.mark.parametrize("queries", [1, 9])
def test_long_prefix_beyond_32_bit_offsets(queries: int) -> None:
    """262,144 rows in pages so far apart that they lie at up to 2^32 elements, half of them beyond 2^31."""
    rng, context = np.random.default_rng(23), kdt.Context(backend="cuda")
    prefix, page_size, apart = 262_144, 64, 2**20 + 8
    problem = make_problem(rng, [prefix], [queries], queries, 8)
    num_pages = -(-(prefix + queries) // page_size)
    far = DeviceArray((num_pages, apart), problem.q.dtype)
    assert far.size > 2**32
    far.fill_bytes(0xFF, None)
    table = rng.permutation(num_pages).astype(np.int32)
    for column, page in enumerate(table):
        part = problem.rows[0][column * page_size : (column + 1) * page_size]
        far[int(page)][: part.size].copy_from(part.reshape(-1))
    cache = OnDevice(far, (num_pages, page_size, 576), (apart * 2, 576 * 2, 2), 0)
    tree = kdt.Tree(
        **{**dict.fromkeys(vars(kdt.Tree.empty(1, 1))), "visibility": filled_mask(problem, rng).on(context)}
    )
    got = kdt.verify_attn(
        context.memory.put(problem.q),
        cache,
        tree,
        [prefix],
        scale=problem.scale,
        block_table=context.memory.put(table[None]),
        return_status=True,
        context=context,
    )
    assert_right(problem, Attended(*to_host(got)))
