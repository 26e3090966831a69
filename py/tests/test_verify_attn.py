"""verify_attn and merge_attn_states: CPU and reference against an independent float64 version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import vector

import kdtree_engine as kdt
from kdtree_engine import cases
from kdtree_engine._floats import from_float32, to_float32

TOLERANCE = {"float32": 1e-5, "bfloat16": 2.5e-3, "float16": 6e-4}


def independent(
    q: Any,
    logical: Any,
    parents: Sequence[Sequence[int]],
    prefix_lens: Sequence[int],
    scale: float,
    starts: Sequence[int],
) -> tuple[Any, Any]:
    """Plain loops in float64. Ancestors come from walking parents; logical[b] is the unpaged cache of request b."""
    batch_size, num_queries, num_heads, _ = q.shape
    out = np.zeros((batch_size, num_queries, num_heads, 512))
    lse = np.full((batch_size, num_queries, num_heads), -np.inf)
    for b in range(batch_size):
        for i in range(min(num_queries, len(parents[b]))):
            rows, at = list(range(starts[b], prefix_lens[b])), i
            while at != -1:
                rows.append(prefix_lens[b] + at)
                at = parents[b][at]
            keys = np.stack([logical[b][row] for row in rows]).astype(np.float64)
            for h in range(num_heads):
                scores = np.array([scale * math.fsum(q[b, i, h].astype(np.float64) * key) for key in keys])
                top = scores.max()
                weights = np.exp(scores - top)
                out[b, i, h] = (weights[:, None] * keys[:, :512]).sum(axis=0) / weights.sum()
                lse[b, i, h] = top + math.log(math.fsum(weights))
    return out, lse


def random_parents(rng: np.random.Generator, count: int) -> list[int]:
    return [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, count))]


def paged(rng: np.random.Generator, logical: Any, page_size: int) -> tuple[Any, Any]:
    """[B, S, 576] scattered over pages: the cache and its block table. Unused pages and row ends hold NaN."""
    batch_size, rows, _ = logical.shape
    columns = -(-rows // page_size)
    total = batch_size * columns + 2
    cache = np.full((total, page_size, 576), np.nan, np.float32)
    table = rng.permutation(total)[: batch_size * columns].reshape(batch_size, columns).astype(np.int32)
    for b in range(batch_size):
        for c in range(columns):
            part = logical[b, c * page_size : (c + 1) * page_size]
            cache[table[b, c], : len(part)] = part
    return cache, table


def strided(rng: np.random.Generator, array: Any) -> Any:
    """The same numbers, at times with gaps between rows or with the middle dimensions swapped."""
    kind = rng.integers(0, 3)
    if kind == 0 or array.size == 0:
        return array
    if kind == 1:
        wide = np.zeros((*array.shape[:-2], array.shape[-2] + 1, array.shape[-1] + 8), array.dtype)
        wide[..., :-1, :-8] = array
        return wide[..., :-1, :-8]
    axes = (0, 2, 1, 3) if array.ndim == 4 else (1, 0, 2)
    return np.ascontiguousarray(array.transpose(axes)).transpose(axes)


def error(got: Any, expected: Any) -> float:
    got = to_float32(got).astype(np.float64)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-300))


def assert_lse(got: Any, expected: Any) -> None:
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    live = ~np.isneginf(expected)
    assert (np.abs(got[live] - expected[live]) <= 1e-5 + 1e-6 * np.abs(expected[live])).all()


def test_five_hundred_random_cases_against_independent_loops() -> None:
    """Every layout, type and shape; NaN in all that no query sees, garbage page ids behind it."""
    rng = np.random.default_rng(1)
    worst = dict.fromkeys(TOLERANCE, 0.0)
    for case in range(510):
        dtype = ["float32", "bfloat16", "float16"][case % 3]
        batch_size, num_heads = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 8, 16]))
        num_queries = int(rng.choice([1, 2, 5, 17, 33])) if num_heads <= 3 else int(rng.integers(1, 6))
        longest = 700 if case % 50 == 0 else 90
        lens = [int(rng.choice([0, 1, 63, 64, 65, rng.integers(0, longest)])) for _ in range(batch_size)]
        counts = [int(rng.integers(1, num_queries + 1)) for _ in range(batch_size)]
        starts = [int(rng.integers(0, n + 1)) if case % 4 == 0 else 0 for n in lens]
        std = float(rng.choice([0.05, 1.0, 3.0]))
        rounded = lambda values, dtype=dtype: to_float32(cases.as_dtype(values.astype(np.float32), dtype))  # noqa: E731
        q = rounded(rng.normal(0, std, (batch_size, num_queries, num_heads, 576)))
        parents = [random_parents(rng, count) for count in counts]
        logical = np.full((batch_size, max(lens) + num_queries + 2, 576), np.nan, np.float32)
        for b in range(batch_size):
            seen = slice(starts[b], lens[b] + counts[b])
            logical[b, seen] = rounded(rng.normal(0, std, logical[b, seen].shape))
        expected_out, expected_lse = independent(q, logical, parents, lens, 0.1, starts)

        table = None
        cache = logical
        if case % 2:
            page_size = int(rng.choice([1, 2, 16, 64, 256]))
            cache, table = paged(rng, logical, page_size)
            for b in range(batch_size):
                table[b, -(-(lens[b] + counts[b]) // page_size) :] = rng.choice([-1, 10**6, 2**31 - 1])
                table[b, : starts[b] // page_size] = -7
        padded = np.full((batch_size, num_queries), -5, np.int32)
        for b in range(batch_size):
            padded[b, : counts[b]] = parents[b]
        tree = kdt.tree_from_parents(np.zeros_like(padded), padded, counts, [0] * batch_size)
        base2, wide_out = case % 5 == 0, case % 7 == 0
        out, lse, status = kdt.verify_attn(
            strided(rng, cases.as_dtype(q, dtype)),
            strided(rng, cases.as_dtype(cache, dtype)) if table is not None else cases.as_dtype(cache, dtype),
            tree,
            lens,
            scale=0.1,
            block_table=table,
            kv_starts=starts if case % 4 == 0 else None,
            lse_base="2" if base2 else "e",
            out_dtype=np.float32 if wide_out else None,
            return_status=True,
        )
        assert not status.any(), case
        tolerance = 1e-5 if wide_out else TOLERANCE[dtype]
        found = error(out, expected_out)
        assert found <= tolerance, (case, dtype, found)
        assert_lse(lse * math.log(2) if base2 else lse, expected_lse)
        for b in range(batch_size):
            assert not to_float32(out[b, counts[b] :]).any()
        if not wide_out:
            worst[dtype] = max(worst[dtype], found)
    print("worst ||out - ref|| / ||ref||:", {name: f"{value:.2e}" for name, value in worst.items()})
    assert all(0 < worst[name] <= TOLERANCE[name] for name in worst)


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_real_activations(layer: int) -> None:
    arguments = cases.attention_real(layer)(np.random.default_rng(layer))
    out, lse = kdt.verify_attn(**arguments)
    wide, _ = kdt.verify_attn(**arguments, out_dtype=np.float32)
    expected, expected_lse = kdt.reference.verify_attn(**arguments, out_dtype=np.float32)
    print(f"layer {layer}: bf16 {error(out, expected):.2e}, float32 out {error(wide, expected):.2e}")
    assert error(out, expected) <= TOLERANCE["bfloat16"]
    assert error(wide, expected) <= 1e-5
    assert_lse(lse, expected_lse)


def one_query(keys: Any, *, q: float = 1.0, scale: float = 1.0, **options: Any) -> tuple[Any, float]:
    """Attention of one query [q, 0, ...] over rows given by their first column; the second column holds the value."""
    queries = np.zeros((1, 1, 1, 576), np.float32)
    queries[..., 0] = q
    cache = np.zeros((1, len(keys), 576), np.float32)
    cache[0, :, 0], cache[0, :, 1] = np.array(keys).T
    out, lse = kdt.verify_attn(queries, cache, None, [len(keys) - 1], scale=scale, **options)
    return out[0, 0, 0], float(lse[0, 0, 0])


def test_lse_and_its_base() -> None:
    """One key of value 0 and two of value 1, all scores 0."""
    out, lse = one_query([(0, 0), (0, 1), (0, 1)])
    assert out[1] == pytest.approx(2 / 3, rel=1e-6)
    assert lse == pytest.approx(math.log(3), abs=1e-6)
    assert one_query([(0, 0), (0, 1), (0, 1)], lse_base="2")[1] == pytest.approx(math.log2(3), abs=1e-6)


def test_the_scale_counts() -> None:
    out, lse = one_query([(0, 0), (1, 1)], scale=cases.KIMI_SCALE)
    weight = math.exp(cases.KIMI_SCALE)
    assert out[1] == pytest.approx(weight / (1 + weight), rel=1e-6)
    assert lse == pytest.approx(math.log(1 + weight), rel=1e-6)


def test_zero_inputs_give_the_mean_of_what_is_seen() -> None:
    rng = np.random.default_rng(2)
    q = np.zeros((1, 4, 2, 576), np.float32)
    cache = np.zeros((1, 20, 576), np.float32)
    cache[..., :512] = rng.normal(size=(1, 20, 512))
    q[..., :] = 0
    tree = kdt.tree_from_parents(vector(0, 0, 0, 0)[None], vector(-1, 0, 0, 1)[None], [4], [0])
    out, lse = kdt.verify_attn(q, cache, tree, [10], scale=1.0)
    for query, slots in enumerate([[0], [0, 1], [0, 2], [0, 1, 3]]):
        seen = cache[0, [*range(10), *(10 + s for s in slots)], :512]
        assert np.allclose(out[0, query], seen.mean(axis=0), atol=1e-6)
        assert np.allclose(lse[0, query], math.log(len(seen)), atol=1e-6)


@pytest.mark.parametrize("level", [-6e4, -1e6, -1e30, 1e6])
def test_scores_far_from_zero(level: float) -> None:
    """A mask by a finite constant would lose to these, or be lost in them."""
    out, lse = one_query([(level, 3), (level, 5)])
    assert out[1] == pytest.approx(4, rel=1e-6)
    assert lse == pytest.approx(level + math.log(2), rel=1e-6)
    out, lse = one_query([(level, 3), (level * 2, 5)])
    assert out[1] == pytest.approx(5 if level > 0 else 3, rel=1e-6)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_gives_what_the_reference_does(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_CPU_ISA", isa)
    try:
        context = kdt.Context()
    except kdt.KdtValueError as error:
        if isa == "scalar" or "this processor has no" not in str(error):
            raise
        pytest.skip(str(error))
    rng = np.random.default_rng(17)
    for dtype, tolerance in TOLERANCE.items():
        for queries, heads, prefix in ((1, 1, 0), (1, 3, 700), (9, 8, 65), (65, 3, 1500)):
            q = cases.as_dtype(rng.normal(0, 1.5, (2, queries, heads, 576)).astype(np.float32), dtype)
            cache = cases.as_dtype(rng.normal(0, 1.5, (2, prefix + queries + 3, 576)).astype(np.float32), dtype)
            cache[:, prefix + queries :] = cases.as_dtype(np.full(1, np.nan, np.float32), dtype)[0]
            parents = vector(*random_parents(rng, queries))[None].repeat(2, axis=0)
            tree = kdt.tree_from_parents(np.zeros_like(parents), parents, [queries] * 2, [prefix] * 2)
            arguments = (q, cache, tree, [prefix, prefix // 2])
            out, lse = kdt.verify_attn(*arguments, scale=0.06, context=context)
            expected_out, expected_lse = kdt.reference.verify_attn(*arguments, scale=0.06)
            off = np.linalg.norm(to_float32(out) - to_float32(expected_out)) / np.linalg.norm(to_float32(expected_out))
            assert off <= tolerance, (dtype, queries, heads, prefix, off)
            assert_lse(lse, expected_lse)
            again, _ = kdt.verify_attn(*arguments, scale=0.06, context=context)
            assert again.tobytes() == out.tobytes()
            alone, _ = kdt.verify_attn(*arguments, scale=0.06, context=kdt.Context(num_threads=1))
            assert alone.tobytes() == out.tobytes()


def test_nan_goes_to_those_who_see_it_and_to_no_one_else() -> None:
    rng = np.random.default_rng(3)
    q = rng.normal(size=(1, 4, 3, 576)).astype(np.float32)
    cache = rng.normal(size=(1, 30, 576)).astype(np.float32)
    tree = kdt.tree_from_parents(vector(0, 0, 0, 0)[None], vector(-1, 0, 0, 1)[None], [4], [0])
    clean = kdt.verify_attn(q, cache, tree, [20], scale=0.1)
    for bad in (np.nan, np.inf):
        dirty = cache.copy()
        dirty[0, 21, 5] = bad  # slot 1: seen by queries 1 and 3
        out, lse = kdt.verify_attn(q, dirty, tree, [20], scale=0.1)
        for query in (0, 2):
            assert np.array_equal(out[0, query], clean[0][0, query])
            assert np.array_equal(lse[0, query], clean[1][0, query])
        for query in (1, 3):
            assert np.isnan(out[0, query]).any(axis=-1).all()


def test_scores_of_minus_infinity_alone_have_no_softmax() -> None:
    """NaN, also in lse: -inf would mean an empty side to a merge."""
    q = np.ones((1, 1, 1, 576), np.float32)
    cache = np.zeros((1, 4, 576), np.float32)
    cache[..., 575] = -np.inf
    for module in (kdt, kdt.reference):
        out, lse = module.verify_attn(q, cache, None, np.array([3], np.int32), scale=1.0)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
    cache[0, 1] = 0  # one finite score is enough
    out, lse = kdt.verify_attn(q, cache, None, [3], scale=1.0)
    assert np.array_equal(lse, [[[0]]])


def test_no_mask_is_a_chain_and_a_chain_is_no_mask() -> None:
    rng = np.random.default_rng(4)
    q = rng.normal(size=(2, 9, 4, 576)).astype(np.float32)
    cache = rng.normal(size=(2, 60, 576)).astype(np.float32)
    parents = np.tile(np.arange(-1, 8, dtype=np.int32), (2, 1))
    chain = kdt.tree_from_parents(np.zeros_like(parents), parents, [9, 9], [0, 0])
    expected = kdt.verify_attn(q, cache, chain, [50, 3], scale=0.1)
    nothing = dict.fromkeys(vars(chain))
    trees = [kdt.Tree(**{**nothing, name: getattr(chain, name)}) for name in ("visibility", "node_count")]
    for tree in (None, kdt.Tree(**nothing), *trees):
        got = kdt.verify_attn(q, cache, tree, [50, 3], scale=0.1)
        assert np.array_equal(got[0], expected[0])
        assert np.array_equal(got[1], expected[1])


def test_bit_zero_is_a_bit_like_any_other() -> None:
    rng = np.random.default_rng(5)
    q = rng.normal(size=(1, 3, 2, 576)).astype(np.float32)
    cache = rng.normal(size=(1, 10, 576)).astype(np.float32)
    tree = kdt.tree_from_parents(vector(0, 0, 0)[None], vector(-1, 0, 0)[None], [3], [0])
    tree.visibility[0, 1] &= ~np.uint64(1)  # query 1 sees itself alone
    tree.visibility[0, 2] = 0  # query 2 sees nothing of the tree
    out, lse = kdt.verify_attn(q, cache, tree, [0], scale=0.1)
    assert np.allclose(out[0, 1], cache[0, 1, :512], atol=1e-6)
    assert not out[0, 2].any()
    assert np.isneginf(lse[0, 2]).all()


def test_clamped_numbers() -> None:
    case = next(case for case in cases.CASES if case.name == "verify_attn/clamped")
    got = cases.run(kdt, "verify_attn", case.arguments())
    expected = cases.expected(case)
    assert got["status"].tolist() == expected["status"].tolist() == [8, 8, 8, 8, 8, 8]
    assert error(got["out"], to_float32(expected["out"]).astype(np.float64)) <= 1e-5


def test_a_batch_is_its_requests_one_by_one() -> None:
    """Bit for bit, with any number of threads."""
    arguments = cases.attention(20, 8, [100, 64, 0, 33], page_size=16)(np.random.default_rng(6))
    whole = kdt.verify_attn(**arguments, context=kdt.Context(num_threads=1))
    for threads in (2, 5):
        again = kdt.verify_attn(**arguments, context=kdt.Context(num_threads=threads))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again, whole, strict=True))
    for b in range(4):
        tree = kdt.Tree(**{name: value[b : b + 1] for name, value in vars(arguments["tree"]).items()})
        one = {**arguments, "q": arguments["q"][b : b + 1], "tree": tree}
        one["prefix_lens"], one["block_table"] = (
            arguments["prefix_lens"][b : b + 1],
            arguments["block_table"][b : b + 1],
        )
        out, lse = kdt.verify_attn(**one)
        assert out.tobytes() == whole[0][b : b + 1].tobytes()
        assert lse.tobytes() == whole[1][b : b + 1].tobytes()


def test_dead_requests_and_given_outputs() -> None:
    arguments = cases.attention(5, 2, [10, 20, 30])(np.random.default_rng(7))
    out = cases.as_dtype(np.full((3, 5, 2, 512), 7, np.float32), "bfloat16")
    lse = np.full((3, 2, 5), 7, np.float32).transpose(0, 2, 1)  # [B, H, Q] in memory, as other kernels have it
    status = np.full(3, 7, np.int32)
    got = kdt.verify_attn(**arguments, num_live=1, out=(out, lse, status), return_status=True)
    assert got[0] is out
    assert got[1] is lse
    expected = kdt.reference.verify_attn(**arguments, num_live=1)
    assert_lse(lse, expected[1])
    assert not to_float32(out[1:]).any()
    assert np.isneginf(lse[1:]).all()
    assert status.tolist() == [0, 0, 0]


def test_ml_dtypes_arrays_stay_what_they_are() -> None:
    arguments = cases.attention(3, 2, [10])(np.random.default_rng(8))
    expected, _ = kdt.verify_attn(**arguments)
    arguments["q"] = arguments["q"].view(ml_dtypes.bfloat16)
    arguments["kv_cache"] = arguments["kv_cache"].view(ml_dtypes.bfloat16)
    out, _ = kdt.verify_attn(**arguments)
    assert out.dtype == ml_dtypes.bfloat16
    assert out.tobytes() == expected.tobytes()


def test_long_prefix_with_bounded_scratch() -> None:
    """262,144 rows: a float32 sum over all of them would not do. Checked on its parts in float64."""
    rng = np.random.default_rng(9)
    rows = 262_144
    cache = rng.standard_normal((1, rows + 1, 576), np.float32)
    q = rng.standard_normal((1, 1, 2, 576), np.float32) * np.float32(0.3)
    out, lse = kdt.verify_attn(q, cache, None, [rows], scale=0.05)
    scores = np.concatenate(
        [0.05 * q[0, 0].astype(np.float64) @ part.astype(np.float64).T for part in np.array_split(cache[0], 64)], axis=1
    )
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    total = weights.sum(axis=1)
    values = np.zeros((2, 512))
    for part, weight in zip(np.array_split(cache[0, :, :512], 64), np.array_split(weights, 64, axis=1), strict=True):
        values += weight @ part.astype(np.float64)
    assert error(out[0, 0], values / total[:, None]) <= 1e-5
    assert_lse(lse[0, 0], scores.max(axis=1) + np.log(total))


# ---- merge_attn_states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_two_parts_merge_into_the_whole(dtype: str, base: str) -> None:
    """The tree's tail alone, and the prefix by another kernel: here the same one with the tail masked off."""
    arguments = cases.attention(9, 4, [50, 64], dtype=dtype)(np.random.default_rng(10))
    options: dict[str, Any] = {"lse_base": base, "out_dtype": np.float32}
    whole = kdt.reference.verify_attn(**arguments, **options)
    tail = kdt.verify_attn(**arguments, **options, kv_starts=[50, 64])
    blind = {**vars(arguments["tree"]), "visibility": np.zeros_like(arguments["tree"].visibility)}
    prefix = kdt.verify_attn(**{**arguments, "tree": kdt.Tree(**blind)}, **options)
    for module in (kdt, kdt.reference):
        out, lse = module.merge_attn_states(*prefix, *tail, lse_base=base)
        assert error(out, whole[0].astype(np.float64)) <= 1e-5
        assert_lse(lse, whole[1].astype(np.float64))


def test_empty_sides_and_nan() -> None:
    inf, nan = np.inf, np.nan
    lse_a = np.array([[0, -inf, 0, inf, -inf, inf, nan, 0, 1]], np.float32).T
    lse_b = np.array([[0, 0, -inf, 0, inf, -inf, 0, nan, inf]], np.float32).T
    out_a = np.array([1, nan, 1, inf, nan, nan, 1, 1, nan], np.float32).reshape(9, 1, 1)
    out_b = np.array([3, 3, nan, 3, nan, nan, 3, 3, inf], np.float32).reshape(9, 1, 1)
    for module in (kdt, kdt.reference):
        out, lse = module.merge_attn_states(out_a, lse_a, out_b, lse_b)
        assert np.array_equal(out.ravel(), [2, 3, 1, 3, 0, 0, nan, nan, nan], equal_nan=True)
        assert np.allclose(lse.ravel(), [math.log(2), 0, 0, 0, -inf, -inf, nan, nan, 1], equal_nan=True)


def test_merging_in_place() -> None:
    arguments = cases.states(20, 3, 40, "float32", "float32")(np.random.default_rng(11))
    expected = kdt.merge_attn_states(**arguments)
    for side in ("a", "b"):
        given = {name: value.copy() for name, value in arguments.items()}
        out = (given[f"out_{side}"], given[f"lse_{side}"])
        got = kdt.merge_attn_states(**given, out=out)
        assert got[0] is out[0]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, expected, strict=True))
    shifted = np.zeros(20 * 3 * 40 + 1, np.float32)
    view_a, view_out = shifted[:-1].reshape(20, 3, 40), shifted[1:].reshape(20, 3, 40)
    with pytest.raises(kdt.KdtValueError, match=r"'out'.*overlaps 'a'"):
        kdt.merge_attn_states(**{**arguments, "out_a": view_a}, out=(view_out, np.zeros((20, 3), np.float32)))


def test_merging_leaves_dead_rows_empty() -> None:
    arguments = cases.states(12, 2, 8, "float32", "float32")(np.random.default_rng(12))
    out, lse = kdt.merge_attn_states(**arguments, num_live=2, rows_per_request=4)
    expected = kdt.reference.merge_attn_states(**arguments, num_live=2, rows_per_request=4)
    assert not out[8:].any()
    assert np.isneginf(lse[8:]).all()
    assert np.allclose(out, expected[0], equal_nan=True, atol=1e-6)


def test_rounding_to_sixteen_bits_is_to_nearest_even() -> None:
    """Every float16 and bfloat16, the points between neighbours, and NaN: as ml_dtypes and numpy round."""
    for dtype, peer in ((np.dtype(np.float16), np.dtype(np.float16)), (kdt.bfloat16, np.dtype(ml_dtypes.bfloat16))):
        every = np.arange(2**16, dtype=np.uint16).view(peer)
        wide = to_float32(every.view(dtype))
        assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)
        finite = np.sort(wide[np.isfinite(wide)])
        middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
        points = np.concatenate([finite, middle, np.nextafter(middle, np.float32(np.inf)), -middle, [np.inf, 1e38]])
        points = points.astype(np.float32)
        points = points[points != 0]  # a merge adds to +0, so -0 does not survive it
        with np.errstate(over="ignore"):
            expected = points.astype(peer).view(np.uint16)
        assert np.array_equal(from_float32(points, dtype).view(np.uint16), expected)
        out = from_float32(np.zeros((len(points), 1, 1), np.float32), dtype)
        zero = np.zeros((len(points), 1), np.float32)
        empty = np.full_like(zero, -np.inf)
        kdt.merge_attn_states(points.reshape(-1, 1, 1), zero, points.reshape(-1, 1, 1), empty, out=(out, zero.copy()))
        assert np.array_equal(out.ravel().view(np.uint16), expected)
