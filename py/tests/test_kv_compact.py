"""kv_compact: CPU and reference, for every layout of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import vector

import kdtree_engine as kdt
from kdtree_engine import StatusFlag


def accepted(*paths: list[int], num_slots: int = 20, max_len: int = 8) -> kdt.Accepted:
    """An Accepted with these paths."""
    result = kdt.Accepted.empty(len(paths), max_len, num_slots)
    for b, path in enumerate(paths):
        result.accept_index[b, : len(path)] = path
        result.accept_len[b] = len(path)
    return result


def numbered(*shape: int, dtype: Any = np.float32) -> Any:
    """A cache whose every element is its own number."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_accepted_rows_move_to_the_end_of_the_prefix(backend: Any) -> None:
    cache = numbered(2, 12, 3)  # [B, S, w]
    before = cache.copy()
    got, status = backend.kv_compact(cache, accepted([0, 2, 5], [0, 1]), vector(4, 1), return_status=True)
    assert got is cache
    assert status.tolist() == [0, 0]
    expected = before.copy()
    expected[0, 5], expected[0, 6] = before[0, 6], before[0, 9]
    assert np.array_equal(cache, expected)


def test_overlapping_moves_and_page_ends(backend: Any) -> None:
    for page_size in (1, 2, 3, 4, 64):
        pages = 24 // page_size + 2
        rng = np.random.default_rng(page_size)
        cache = numbered(3, pages * 2, page_size, 5)  # [L, pages, page_size, w]
        table = rng.permutation(pages * 2).astype(np.int32).reshape(2, pages)
        before = cache.copy()
        paths = ([0, 1, 3, 4, 5, 7], [0, 2, 5])
        backend.kv_compact(cache, accepted(*paths), vector(3, 0), block_table=table)

        def row(b: int, r: int, table: Any = table, page_size: int = page_size) -> tuple[int, int]:
            return table[b, r // page_size], r % page_size

        expected = before.copy()
        for b, (path, prefix) in enumerate(zip(paths, (3, 0), strict=True)):
            for k, slot in enumerate(path):
                (page, r), (from_page, from_r) = row(b, prefix + k), row(b, prefix + slot)
                expected[:, page, r] = before[:, from_page, from_r]
        assert np.array_equal(cache, expected), page_size


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, np.complex128, kdt.bfloat16])
def test_any_element_and_any_layout_agree(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    for case in range(60):
        layers, page_size, width = int(rng.integers(1, 4)), int(rng.choice([1, 3, 16, 64])), int(rng.integers(1, 40))
        batch_size, slots = int(rng.integers(0, 5)), int(rng.integers(1, 40))
        max_pages = -(-80 // page_size)
        pages = batch_size * max_pages + 1
        paged = case % 2 == 0
        shape = (layers, pages, page_size, width) if paged else (layers, batch_size, 80, width)
        if case % 3 == 0 and paged:  # pages outermost
            data = rng.integers(0, 256, (pages, layers, page_size, width, np.dtype(dtype).itemsize), np.uint8)
            cache = data.view(dtype)[..., 0].transpose(1, 0, 2, 3)
        else:
            data = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
            cache = data.view(dtype)[..., 0]
        table = rng.permutation(pages - 1).reshape(batch_size, max_pages).astype(np.int32) if paged else None
        paths = [
            sorted(rng.choice(slots, int(rng.integers(0, min(slots, 8) + 1)), replace=False)) for _ in range(batch_size)
        ]
        paths = [[int(slot) for slot in path] for path in paths]
        if case % 4 == 1 and batch_size:
            paths[0] = [5, 3]  # bad: untouched
        lens = rng.integers(-1, 80, batch_size).astype(np.int32)
        options: dict[str, Any] = {"block_table": table, "return_status": True, "num_live": int(rng.integers(0, 6))}
        a, b = cache.copy(order="K"), cache.copy(order="K")
        path = accepted(*paths, num_slots=slots)
        _, status = kdt.kv_compact(a, path, lens, **options)
        _, expected = kdt.reference.kv_compact(b, path, lens, **options)
        assert a.tobytes() == b.tobytes(), case
        assert status.tolist() == expected.tolist()
        out_a, out_b = np.zeros_like(cache), np.zeros_like(cache)
        kdt.kv_compact(cache, path, lens, out=out_a, **options)
        kdt.reference.kv_compact(cache, path, lens, out=out_b, **options)
        assert out_a.tobytes() == out_b.tobytes(), case
        as_list = [np.ascontiguousarray(layer) for layer in cache]
        kdt.kv_compact(as_list, path, lens, **options)
        assert np.array(as_list).tobytes() == np.ascontiguousarray(a).tobytes(), case


def test_a_separate_destination_gets_all_rows_and_the_source_none(backend: Any) -> None:
    cache, out = numbered(1, 10, 2), np.full((1, 10, 2), -1, np.float32)
    before = cache.copy()
    got = backend.kv_compact(cache, accepted([0, 1, 4]), vector(2), out=out)
    assert got is out
    assert np.array_equal(cache, before)
    assert np.array_equal(out[0, 2:5], before[0, [2, 3, 6]])
    assert (np.delete(out[0], [2, 3, 4], axis=0) == -1).all()


@pytest.mark.parametrize("path", [[0, 0], [3, 2], [0, 20], [-1, 0], [0, 2**31 - 1], [-(2**31)], [0, 10]])
def test_bad_paths_leave_the_request_untouched(backend: Any, path: list[int]) -> None:
    """The last path is legal in itself, but its row 2 + 10 lies beyond the request's 12 rows."""
    cache = numbered(2, 12, 3)
    before = cache.copy()
    _, status = backend.kv_compact(cache, accepted(path, [1, 3]), vector(2, 2), return_status=True)
    assert status.tolist() == [StatusFlag.BAD_TREE, 0]
    assert np.array_equal(cache[0], before[0])
    assert np.array_equal(cache[1, 2:4], before[1, [3, 5]])


@pytest.mark.parametrize("length", [-1, 9, 2**31 - 1, -(2**31)])
def test_bad_lengths(backend: Any, length: int) -> None:
    cache, path = numbered(1, 12, 3), accepted([0, 2])
    before = cache.copy()
    path.accept_len[0] = length
    _, status = backend.kv_compact(cache, path, vector(2), return_status=True)
    assert status.tolist() == [StatusFlag.BAD_TREE]
    assert np.array_equal(cache, before)


@pytest.mark.parametrize(
    ("table", "prefix", "good"),
    [
        ([0, 1, 2], 0, True),
        ([0, -1, 2], 0, True),  # page 1 is not touched
        ([0, 1, 2], 7, True),
        ([-1, 1, 2], 0, False),
        ([3, 1, 2], 0, False),
        ([0, 1, 2**31 - 1], 7, False),
        ([0, 1, 2], 8, False),  # the last row is beyond the table
        ([0, 1, 2], 2**31 - 1, False),
        ([0, 1, 2], -1, False),
        ([0, 1, 2], -(2**31), False),
    ],
)
def test_every_row_must_lie_in_the_table(backend: Any, table: list[int], prefix: int, good: bool) -> None:
    cache = numbered(3, 4, 2)
    before = cache.copy()
    _, status = backend.kv_compact(
        cache,
        accepted([1, 3, 4] if prefix else [1, 3]),
        vector(prefix),
        block_table=vector(*table)[None],
        return_status=True,
    )
    assert status.tolist() == [0 if good else StatusFlag.BAD_TREE]
    assert np.array_equal(cache, before) != good


def test_rows_in_place_are_not_written() -> None:
    """A chain accepted whole moves nothing, so the cache may even be shared: nothing is written."""
    cache = numbered(1, 12, 3)
    before = cache.copy()
    kdt.kv_compact(cache, accepted([0, 1, 2, 3]), vector(2))
    assert np.array_equal(cache, before)


def test_the_result_of_tree_accept_goes_straight_in() -> None:
    tree = kdt.tree_from_parents(vector(9, 1, 2, 3)[None], vector(-1, 0, 0, 2)[None], vector(4), vector(5))
    path = kdt.tree_accept(tree, vector(2, 0, 3, 7)[None])
    cache = numbered(1, 12, 1)
    kdt.kv_compact(cache, path, [5])
    assert path.tokens[0, :3].tolist() == [2, 3, 7]
    assert cache[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 8, 9, 10, 11]
