"""topk_logprobs, topk_merge, argmax and sample: CPU and reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conftest import vector

import kdtree_engine as kdt
from kdtree_engine import StatusFlag, cases
from kdtree_engine._floats import to_float32
from kdtree_engine.reference.sample import philox4x32

INVALID = StatusFlag.ROW_INVALID
INF, NAN = np.inf, np.nan


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


# ---- topk_logprobs and topk_merge --------------------------------------------------------------------------


def stable_sort(row: Any, k: int) -> list[int]:
    """Ids by descending logit, equal ones in ascending id: Python's sort, which is stable."""
    return sorted(range(len(row)), key=lambda i: -float(row[i]) + 0.0)[:k]


def assert_log_probs(got: Any, expected: Any, lse: float) -> None:
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    live = ~np.isneginf(expected)
    bound = 2e-6 + 1e-6 * np.abs(expected[live]) + 1.2e-7 * abs(lse)
    assert (np.abs(got[live] - expected[live]) <= bound).all()


def test_two_hundred_matrices_with_heavy_ties(backend: Any) -> None:
    rng = np.random.default_rng(1)
    for case in range(200):
        dtype = ["float32", "float16", "bfloat16"][case % 3]
        rows, vocab_size = int(rng.integers(1, 5)), int(rng.choice([1, 2, 17, 100, 777, 2500]))
        k = int(rng.choice([1, 2, 16, 64, 1024]))
        logits = np.round(rng.normal(0, 2, (rows, vocab_size)) * rng.choice([1, 4, 64])).astype(np.float32)
        logits[rng.random(logits.shape) < 0.1] *= -0.0
        logits[:, 1:][rng.random((rows, vocab_size - 1)) < 0.1] = -INF
        given = cases.as_dtype(logits, dtype)
        log_probs, ids, status = backend.topk_logprobs(given, k, return_status=True)
        exact = to_float32(given)
        for r in range(rows):
            best = stable_sort(exact[r], k)
            assert ids[r].tolist() == best + [-1] * (k - len(best)), case
            lse = math.log(math.fsum(math.exp(float(x) - float(exact[r].max())) for x in exact[r])) + float(
                exact[r].max()
            )
            expected = np.minimum(f32(0), exact[r, best] - np.float32(lse))
            assert_log_probs(log_probs[r, : len(best)], expected, lse)
            assert np.isneginf(log_probs[r, len(best) :]).all()
            assert (log_probs[r] <= 0).all()
        assert not status.any()


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards_merge_into_the_whole(num_shards: int) -> None:
    """ids exactly; log-probs bit for bit in the reference, within tolerance on the CPU."""
    rng = np.random.default_rng(num_shards)
    for case in range(40):
        vocab_size, k = 8 * int(rng.integers(1, 200)), int(rng.choice([1, 8, 64, 300]))
        logits = np.round(rng.normal(0, 3, (5, vocab_size)) * rng.choice([1, 1000])).astype(np.float32)
        logits[0] = -INF
        logits[1, : vocab_size // num_shards] = -INF
        logits[2, rng.integers(vocab_size)] = NAN
        logits[3, rng.integers(vocab_size)] = INF
        for module in (kdt, kdt.reference):
            whole = module.topk_logprobs(logits, k, return_status=True)
            parts = [
                module.topk_logprobs(np.ascontiguousarray(part), k, raw=True, id_offset=s * (vocab_size // num_shards))
                for s, part in enumerate(np.split(logits, num_shards, axis=1))
            ]
            merged = module.topk_merge(*(np.stack(arrays) for arrays in zip(*parts, strict=True)), return_status=True)
            assert merged[1].tolist() == whole[1].tolist(), case
            alone = INVALID if num_shards == 1 else 0  # row 1 is -inf in all of the first shard
            assert merged[2].tolist() == whole[2].tolist() == [INVALID, alone, INVALID, INVALID, 0]
            if module is kdt.reference:
                assert merged[0].tobytes() == whole[0].tobytes(), case
            else:
                assert_log_probs(merged[0], whole[0], float(np.abs(logits[np.isfinite(logits)]).max()))


def test_rows_that_are_no_distribution(backend: Any) -> None:
    logits = np.array([[1, NAN, 2], [1, INF, 2], [-INF] * 3, [-INF, 5, -INF], [NAN, INF, -INF], [1, 2, 3]], np.float32)
    log_probs, ids, status = backend.topk_logprobs(logits, 2, return_status=True)
    assert status.tolist() == [INVALID, INVALID, INVALID, 0, INVALID, 0]
    assert ids.tolist() == [[-1, -1]] * 3 + [[1, 0], [-1, -1], [2, 1]]
    assert log_probs[3].tolist() == [0, -INF]
    values, ids, lse, status = backend.topk_logprobs(logits, 2, raw=True, id_offset=100, return_status=True)
    assert status.tolist() == [INVALID, INVALID, 0, 0, INVALID, 0]
    assert ids.tolist() == [[-1, -1]] * 2 + [[100, 101], [101, 100], [-1, -1], [102, 101]]
    assert values[3].tolist() == [5, -INF]
    assert np.array_equal(np.isnan(lse), [True, True, False, False, True, False])
    assert np.isneginf(lse[2])


def test_empty_vocabularies_and_no_candidates(backend: Any) -> None:
    log_probs, ids, status = backend.topk_logprobs(np.empty((2, 0), np.float32), 3, return_status=True)
    assert (ids.tolist(), status.tolist()) == ([[-1] * 3] * 2, [INVALID] * 2)
    _, ids, lse, status = backend.topk_logprobs(np.empty((2, 0), np.float32), 3, raw=True, return_status=True)
    assert (ids.tolist(), lse.tolist(), status.tolist()) == ([[-1] * 3] * 2, [-INF] * 2, [0, 0])
    log_probs, ids = backend.topk_logprobs(np.zeros((2, 5), np.float32), 0)
    assert log_probs.shape == ids.shape == (2, 0)
    log_probs, ids = backend.topk_logprobs(np.zeros((0, 5), np.float32), 2)
    assert log_probs.shape == (0, 2)


def test_the_log_prob_is_one_float32_subtraction(backend: Any) -> None:
    """That formula decides ties downstream."""
    logits = np.random.default_rng(2).normal(0, 5, (50, 1000)).astype(np.float32)
    log_probs, ids = backend.topk_logprobs(logits, 8)
    for r in range(50):
        top = float(logits[r].max())
        lse = top + math.log(math.fsum(math.exp(float(x) - top) for x in logits[r]))
        assert log_probs[r].tolist() == [min(0.0, float(logits[r, i] - np.float32(lse))) for i in ids[r]]


def test_large_logits_give_log_probs_at_most_zero(backend: Any) -> None:
    log_probs, _ = backend.topk_logprobs(f32(3e38, -3e38, 1e5)[None], 3)
    assert log_probs[0].tolist() == [0, float(np.float32(1e5) - np.float32(3e38)), -INF]


def test_leading_dimensions_strides_and_dead_rows(backend: Any) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, 4, 50)).astype(np.float32)
    flat = backend.topk_logprobs(logits.reshape(12, 50), 5)
    got = backend.topk_logprobs(logits, 5, num_live=2, return_status=True)
    assert got[0].shape == (3, 4, 5)
    assert got[1].reshape(12, 5)[:8].tolist() == flat[1][:8].tolist()
    assert (got[1][2] == -1).all()
    assert np.isneginf(got[0][2]).all()
    assert not got[2].any()
    same = backend.topk_logprobs(logits.reshape(12, 50), 5, num_live=2, rows_per_request=4)
    assert same[1].tolist() == got[1].reshape(12, 5).tolist()
    if backend is kdt:
        wide = np.full((3, 4, 60), NAN, np.float32)
        wide[..., :50] = logits
        assert kdt.topk_logprobs(wide[..., :50], 5)[1].tolist() == flat[1].reshape(3, 4, 5).tolist()


def test_given_outputs_are_used() -> None:
    logits = np.random.default_rng(4).normal(size=(4, 30)).astype(np.float32)
    expected = kdt.topk_logprobs(logits, 3, return_status=True)
    out = (np.zeros((4, 5), np.float32)[:, :3], np.zeros((4, 3), np.int32), np.ones(4, np.int32))
    got = kdt.topk_logprobs(logits, 3, return_status=True, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def test_merge_takes_the_first_of_repeated_ids(backend: Any) -> None:
    logits = f32(1, 0, -INF, 5, 1, -INF).reshape(2, 1, 3)
    ids = vector(7, 3, -1, 7, 9, -1).reshape(2, 1, 3)
    log_probs, got = backend.topk_merge(logits, ids, np.full((2, 1), 5.0))
    assert got.tolist() == [[7, 9, 3]]
    assert np.allclose(log_probs[0], f32(1, 1, 0) - 5 - math.log(2))


@pytest.mark.parametrize(
    ("lse", "logit", "flag"),
    [
        (NAN, 0, INVALID),
        (INF, 0, INVALID),
        (-INF, 0, INVALID),
        (0, NAN, INVALID),
        (0, INF, INVALID),
        (0, -INF, 0),
        (0, 0, 0),
    ],
)
def test_merge_flags_bad_rows(backend: Any, lse: float, logit: float, flag: int) -> None:
    logits, ids = f32(0, logit).reshape(1, 2, 1), vector(4, 5).reshape(1, 2, 1)
    log_probs, got, status = backend.topk_merge(logits, ids, np.array([[0, lse]], np.float64), return_status=True)
    assert status.tolist() == [0, flag]
    assert got.tolist() == [[4], [-1 if flag else 5]]
    assert np.isneginf(log_probs[1, 0]) == bool(flag or logit == -INF)


# ---- argmax ------------------------------------------------------------------------------------------------


def test_argmax(backend: Any) -> None:
    logits = np.array(
        [
            [1, 3, 3, 2],
            [-0.0, 0.0, -1, -1],
            [0.0, -0.0, -1, -1],
            [1, INF, 2, INF],
            [NAN, 9, 9, 9],
            [-INF, -INF, -INF, -INF],
            [-INF, INF, -INF, -INF],
            [-INF, -INF, -3e38, -INF],
        ],
        np.float32,
    )
    tokens, values, status = backend.argmax(logits, return_values=True, return_status=True, id_offset=10)
    assert tokens.tolist() == [11, 10, 10, 11, -1, -1, -1, 12]
    assert status.tolist() == [0, 0, 0, 0, INVALID, INVALID, INVALID, 0]
    assert np.array_equal(values, f32(3, 0, 0, INF, NAN, -INF, INF, -3e38), equal_nan=True)
    assert backend.argmax(logits).tolist() == [1, 0, 0, 1, -1, -1, -1, 2]


def test_argmax_over_shards_and_shapes(backend: Any) -> None:
    rng = np.random.default_rng(5)
    logits = cases.as_dtype(np.round(rng.normal(0, 2, (2, 3, 64)).astype(np.float32)), "bfloat16")
    whole = backend.argmax(logits)
    parts = [
        backend.argmax(np.ascontiguousarray(logits[..., s * 16 : (s + 1) * 16]), id_offset=s * 16, return_values=True)
        for s in range(4)
    ]
    values = np.stack([part[1] for part in parts])
    best = np.take_along_axis(np.stack([part[0] for part in parts]), values.argmax(axis=0)[None], axis=0)[0]
    assert best.tolist() == whole.tolist()
    dead = backend.argmax(logits, num_live=1, return_status=True)
    assert dead[0].tolist() == [whole[0].tolist(), [-1] * 3]
    assert not dead[1].any()
    assert backend.argmax(np.zeros((0, 5), np.float32)).shape == (0,)
    assert backend.argmax(np.zeros((2, 0), np.float32)).tolist() == [-1, -1]


# ---- sample ------------------------------------------------------------------------------------------------


def test_philox_known_answers() -> None:
    """The vectors of the Random123 distribution."""
    for counter, key, words in (
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        assert philox4x32(np.array([counter], np.uint64), key)[0].tolist() == words


def chi_square_p(counts: Any, probabilities: Any) -> float:
    """P(chi-square >= observed) for an even number of degrees of freedom, where it is a finite sum."""
    expected = counts.sum() * probabilities
    half = float((((counts - expected) ** 2) / expected).sum()) / 2
    freedom = len(counts) - 1
    assert freedom % 2 == 0
    return math.exp(-half) * math.fsum(half**i / math.factorial(i) for i in range(freedom // 2))


@pytest.mark.parametrize("varying", ["position", "request", "seed"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0, INF])
def test_a_million_draws_follow_the_distribution(temperature: float, varying: str) -> None:
    draws, vocab_size = 1_000_000, 13
    logits = np.random.default_rng(6).normal(0, 1.5, vocab_size).astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64) / temperature)
    probabilities /= probabilities.sum()
    rows = np.tile(logits, (10_000 if varying == "seed" else draws, 1))
    n = len(rows)
    numbers = np.arange(n)
    counts = np.zeros(vocab_size)
    for seed in range(draws // n):
        tokens = kdt.sample(
            rows,
            temperatures=temperature,
            seed=77 + seed,
            positions=(numbers if varying == "position" else np.full(n, 5)).astype(np.int32),
            request_ids=(numbers * 2**20 if varying != "position" else np.full(n, 3)).astype(np.int64),
        )
        counts += np.bincount(tokens, minlength=vocab_size)
    p = chi_square_p(counts, probabilities)
    print(f"T={temperature}, {varying} varying: p = {p:.4f}")
    assert counts.sum() == draws
    assert p > 1e-4


def test_different_streams_are_independent() -> None:
    """Pairs of draws at neighbouring positions, requests and seeds: all combinations equally likely."""
    n = 200_000
    rows = np.zeros((n, 3), np.float32)
    numbers = np.arange(n)

    def draw(position: int = 0, request: int = 0, seed: int = 0) -> Any:
        return kdt.sample(
            rows,
            temperatures=1.0,
            seed=seed,
            positions=(numbers * 4 + position).astype(np.int32),
            request_ids=np.full(n, request, np.int64),
        )

    first = draw()
    for other in (draw(position=1), draw(request=1), draw(request=2**32), draw(seed=1), draw(seed=2**32)):
        p = chi_square_p(np.bincount(first * 3 + other, minlength=9).astype(float), np.full(9, 1 / 9))
        assert p > 1e-4


def sampling_arguments(rng: np.random.Generator, rows: int, vocab_size: int) -> dict[str, Any]:
    return {
        "logits": rng.normal(0, 3, (rows, vocab_size)).astype(np.float32),
        "temperatures": rng.choice(f32(0, 0.3, 1, 2, INF), rows),
        "seed": 2**64 - 3,
        "positions": rng.integers(0, 2**31 - 1, rows, dtype=np.int32),
        "request_ids": rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64),
    }


def test_batch_order_neighbours_and_dead_requests_change_nothing() -> None:
    rng = np.random.default_rng(7)
    arguments = sampling_arguments(rng, 40, 301)
    tokens = kdt.sample(**arguments)
    assert tokens.tolist() == kdt.reference.sample(**arguments).tolist()
    order = rng.permutation(40)
    turned = {name: value[order] if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    assert kdt.sample(**turned).tolist() == tokens[order].tolist()
    dead = kdt.sample(**arguments, num_live=3, rows_per_request=8)
    assert dead.tolist() == tokens[:24].tolist() + [-1] * 16
    for r in (0, 13, 39):
        one = {name: value[r : r + 1] if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
        assert kdt.sample(**one).tolist() == [tokens[r]]
    for threads in (1, 3):
        assert kdt.sample(**arguments, context=kdt.Context(num_threads=threads)).tolist() == tokens.tolist()


def test_shards_agree_with_the_whole() -> None:
    arguments = sampling_arguments(np.random.default_rng(8), 30, 240)
    whole = kdt.sample(**arguments)
    logits = arguments.pop("logits")
    parts = [
        kdt.sample(np.ascontiguousarray(part), **arguments, id_offset=s * 60, return_values=True)
        for s, part in enumerate(np.split(logits, 4, axis=1))
    ]
    values = np.stack([part[1] for part in parts])
    best = np.take_along_axis(np.stack([part[0] for part in parts]), values.argmax(axis=0)[None], axis=0)[0]
    assert best.tolist() == whole.tolist()


def test_a_prepared_call_reads_its_arrays_at_each_launch() -> None:
    arguments = sampling_arguments(np.random.default_rng(12), 30, 240)
    other = sampling_arguments(np.random.default_rng(13), 30, 240)
    call = kdt.sample.prepare(**arguments)
    for name in ("logits", "temperatures", "positions", "request_ids"):
        arguments[name][:] = other[name]
        call.launch()
        assert call.result.tolist() == kdt.reference.sample(**arguments).tolist(), name
    assert call.result.tolist() == kdt.sample(**other).tolist()


def test_what_is_no_distribution_or_no_temperature(backend: Any) -> None:
    rows = [[1, 2, 3]] * 4 + [[1, NAN, 2], [-INF] * 3, [1, INF, INF], [-INF, INF, -INF], [-INF, 4, -INF], [3, 3, 1]]
    tokens, values, status = backend.sample(
        np.array(rows, np.float32),
        temperatures=f32(-1, NAN, -0.0, 1e-30, 1, 1, 1, 1, 5, 0),
        seed=0,
        positions=np.arange(10, dtype=np.int32),
        request_ids=np.arange(10),
        return_values=True,
        return_status=True,
    )
    assert tokens.tolist() == [-1, -1, 2, 2, -1, -1, 1, -1, 1, 0]
    assert status.tolist() == [INVALID, INVALID, 0, 0, INVALID, INVALID, 0, INVALID, 0, 0]
    assert values[2] == 3


def test_a_single_row_has_no_leading_dimension(backend: Any) -> None:
    logits = f32(1, 5, 2)
    token = backend.sample(logits, temperatures=1e-6, seed=1, positions=0, request_ids=0)
    assert (token.shape, int(token)) == ((), 1)
    assert int(backend.argmax(logits)) == 1
    log_probs, ids = backend.topk_logprobs(logits, 2)
    assert ids.tolist() == [1, 2]
    assert log_probs.shape == (2,)


def test_per_request_numbers_serve_all_rows(backend: Any) -> None:
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(2, 5, 40)).astype(np.float32)
    positions = rng.integers(0, 100, (2, 5), dtype=np.int32)
    short = backend.sample(logits, temperatures=f32(0.5, 2), seed=1, positions=positions, request_ids=np.array([7, 8]))
    full = backend.sample(
        logits,
        temperatures=np.repeat(f32(0.5, 2), 5).reshape(2, 5),
        seed=1,
        positions=positions,
        request_ids=np.repeat(np.array([7, 8]), 5).reshape(2, 5),
    )
    assert short.tolist() == full.tolist()


def test_a_sampled_tree_walk_is_the_sampled_chain() -> None:
    """Token for token: a toy target whose logits depend on the whole context, drafted badly on purpose."""
    vocab_size, depth, budget, wanted = 12, 5, 30, 300

    def target_logits(context: tuple[int, ...]) -> Any:
        return np.random.default_rng(abs(hash(context[-3:])) % 2**32).normal(0, 2, vocab_size).astype(np.float32)

    def draw(logits: Any, positions: Any) -> Any:
        return kdt.sample(logits, temperatures=0.8, seed=5, positions=positions, request_ids=11)

    chain = [0]
    while len(chain) < wanted:
        chain.append(int(draw(target_logits(tuple(chain))[None], vector(len(chain)))[0]))

    rng = np.random.default_rng(10)
    text, steps = [0], 0
    while len(text) < wanted:
        # The drafter knows the right token at each depth about half of the time.
        rows = rng.normal(0, 1, (depth, vocab_size)).astype(np.float32)
        for d, token in enumerate(chain[len(text) : len(text) + depth]):
            rows[d, token] += 2
        log_probs, ids = kdt.topk_logprobs(rows, 6)
        prefix_len = len(text) - 1  # the root, the last token, is not in the cache yet
        tree = kdt.tree_build(log_probs[None], ids[None], [text[-1]], [prefix_len], budget)
        logits = np.zeros((1, budget + 1, vocab_size), np.float32)
        paths: list[tuple[int, ...]] = []
        for slot in range(tree.node_count[0]):
            parent = tree.parents[0, slot]
            paths.append(tuple(text) if parent < 0 else (*paths[parent], int(tree.tokens[0, slot])))
            logits[0, slot] = target_logits(paths[slot])
        targets = draw(logits, tree.positions + 1)
        accepted = kdt.tree_accept(tree, targets)
        text += accepted.tokens[0, : accepted.token_count[0]].tolist()
        steps += 1
    assert text[:wanted] == chain
    assert steps < wanted * 0.7  # and it did accept drafts
