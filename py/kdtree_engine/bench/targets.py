"""What the project set out to reach on a GPU (an H200), at full size: the small operations, then attention.py's rows.

Large arrays are made cheaply: DISTINCT rows from numpy, repeated on the device. Then the results of the distinct rows
are compared with the reference, and those of the repeated ones with the first of them, bit for bit. Trees and caches
are compared with the CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from .. import cases, ops
from .._floats import to_float32
from .._trace import targets_of
from .._transfer import to_host
from ..cases import Arguments, Results, as_dtype
from ..kdtr import bfloat16
from ..types import Tree
from . import check, model
from .attention import ATTENTION
from .bed import Bed, Target, Trial, repeated
from .peers import Peer, argmax_results, topk_results

VOCABULARY = 163_840
CANDIDATES = 64
LAYERS, PAGE_SIZE, ROW_WIDTH, PATH = 61, 64, 576, 5
DISTINCT = 64
SAMPLED_ROWS = 16
"""Of `sample`, where every row has noise of its own, so many are compared with the reference."""
STEPS = 64
"""Steps of the trace that a row of one request is timed over."""


# ---- Trees of the trace ------------------------------------------------------------------------------------


def build_of_trace(budget: int, batch: int) -> Callable[[Bed], Trial]:
    def make(bed: Bed) -> Trial:
        trace = bed.trace
        inputs = (trace.log_probs[:STEPS], trace.token_ids[:STEPS], trace.root_tokens[:STEPS])
        lens = np.arange(STEPS, dtype=np.int32)
        placed = [bed.put(array) for array in (*inputs, lens)]
        calls = []
        for first in range(0, STEPS, batch):
            rows, ids, roots, starts = (array[first : first + batch] for array in placed)
            calls.append(ops.tree_build.prepare(rows, ids, roots, starts, budget, context=bed.context))
        expected = ops.tree_build(*inputs, lens, budget)

        def problem() -> str | None:
            trees = [to_host(call.result) for call in calls]
            for field in fields(Tree):
                got = np.concatenate([getattr(tree, field.name) for tree in trees])
                if got.tobytes() != getattr(expected, field.name).tobytes():
                    return f"{field.name} is not what the CPU's is"
            return None

        arrays = (*(array[:batch] for array in (*inputs, lens)), to_host(calls[0].result))
        return Trial([call.launch for call in calls], problem, sum(model.nbytes(array) for array in arrays))

    return make


def accept_of_trace(bed: Bed) -> Trial:
    trace = bed.trace
    inputs = (trace.log_probs[:STEPS], trace.token_ids[:STEPS], trace.root_tokens[:STEPS])
    tree = ops.tree_build(*inputs, np.zeros(STEPS, np.int32), 64)
    arguments = {"tree": tree, "target_tokens": targets_of(trace, slice(0, STEPS), tree.depths)}
    call = ops.tree_accept.prepare(**bed.put(arguments), context=bed.context)
    expected = ops.tree_accept(**arguments)

    def problem() -> str | None:
        return difference(to_host(call.result), expected)

    work = model.tree_accept(arguments, {f.name: getattr(expected, f.name) for f in fields(expected)})
    return Trial([call.launch], problem, work.bytes)


def difference(got: Any, expected: Any) -> str | None:
    """Of trees or accepted paths, bit for bit."""
    for field in fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(b, np.ndarray) and a.tobytes() != b.tobytes():
            return f"{field.name} is not what the CPU's is"
    return None


# ---- Rows of the vocabulary --------------------------------------------------------------------------------


def logit_rows(count: int) -> Any:
    """Distinct rows of a whole vocabulary, bfloat16."""
    return as_dtype(np.random.default_rng(count).normal(0, 3, (count, VOCABULARY)).astype(np.float32), "bfloat16")


def repeats(results: Results, distinct: int) -> str | None:
    """Equal rows must have equal results."""
    for name, got in results.items():
        if got.tobytes() != got[np.arange(len(got)) % distinct].tobytes():
            return f"{name}: rows that are alike have results that differ"
    return None


def topk_rows(count: int) -> Callable[[Bed], Trial]:
    def make(bed: Bed) -> Trial:
        distinct = logit_rows(min(count, DISTINCT))
        logits = repeated(distinct, count, bed.context.device)
        call = ops.topk_logprobs.prepare(logits, CANDIDATES, return_status=True, context=bed.context)
        arguments = {"logits": distinct, "k": CANDIDATES}
        expected = check.expected("topk_logprobs", arguments)

        def problem() -> str | None:
            got = dict(zip(("log_probs", "token_ids", "status"), to_host(call.result), strict=True))
            first = {name: array[: len(distinct)] for name, array in got.items()}
            return check.mismatch("topk_logprobs", arguments, first, expected) or repeats(got, len(distinct))

        def peer() -> Peer:
            torch = bed.bench.torch
            assert torch is not None
            results = topk_results(to_float32(distinct), expected)

            def first(got: Any) -> Results:
                return results(tuple(array[: len(distinct)] for array in torch.numpy(got)))

            return Peer(torch.run_topk(torch.shared(logits), CANDIDATES), first)

        size = logits.nbytes + sum(array.nbytes for array in call.result)
        return Trial([call.launch], problem, size, {"torch": peer}, expected, arguments)

    return make


def argmax_rows(count: int) -> Callable[[Bed], Trial]:
    def make(bed: Bed) -> Trial:
        distinct = logit_rows(min(count, DISTINCT))
        logits = repeated(distinct, count, bed.context.device)
        call = ops.argmax.prepare(logits, context=bed.context)
        arguments = {"logits": distinct}
        expected = check.expected("argmax", arguments)

        def problem() -> str | None:
            got = {"tokens": to_host(call.result)}
            first = {"tokens": got["tokens"][: len(distinct)]}
            return check.mismatch("argmax", arguments, first, expected) or repeats(got, len(distinct))

        def peer() -> Peer:
            torch = bed.bench.torch
            assert torch is not None
            shared, results = torch.shared(logits), argmax_results(to_float32(distinct), expected)
            return Peer(lambda: shared.argmax(-1), lambda got: results(torch.numpy(got)[: len(distinct)]))

        return Trial([call.launch], problem, logits.nbytes + call.result.nbytes, {"torch": peer}, expected, arguments)

    return make


def sample_rows(count: int) -> Callable[[Bed], Trial]:
    def make(bed: Bed) -> Trial:
        distinct = logit_rows(min(count, DISTINCT))
        logits = repeated(distinct, count, bed.context.device)
        per_row: Arguments = {
            "temperatures": np.ones(count, np.float32),
            "positions": np.arange(1000, 1000 + count, dtype=np.int32),
            "request_ids": np.arange(count, dtype=np.int64) // 65,
        }
        placed = bed.put(per_row)
        call = ops.sample.prepare(logits, seed=7, **placed, return_values=True, context=bed.context)
        chosen = np.linspace(0, count - 1, SAMPLED_ROWS).astype(int)
        arguments: Arguments = {name: values[chosen] for name, values in per_row.items()}
        arguments.update(logits=distinct[chosen % len(distinct)], seed=7)
        expected = check.expected("sample", arguments)
        argmax = ops.argmax.prepare(logits, context=bed.context)

        def problem() -> str | None:
            got = dict(zip(("tokens", "values"), to_host(call.result), strict=True))
            return check.mismatch("sample", arguments, {n: array[chosen] for n, array in got.items()}, expected)

        def peer() -> Peer:
            torch = bed.bench.torch
            assert torch is not None
            heat = torch.shared(placed["temperatures"])[:, None]
            return Peer(torch.run_sample(torch.shared(logits), heat), lambda _got: {})

        arrays = (logits, *placed.values(), *call.result)
        size = sum(array.nbytes for array in arrays)
        return Trial([call.launch], problem, size, {"torch": peer}, expected, arguments, argmax.launch)

    return make


# ---- The cache ---------------------------------------------------------------------------------------------


def cache_pages(rng: np.random.Generator, pages: int) -> Any:
    shape = (LAYERS, pages, PAGE_SIZE, ROW_WIDTH)
    bits = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.uint16).reshape(shape)
    return bits.view(bfloat16)


def compact_layers(batch: int) -> Callable[[Bed], Trial]:
    """A page a request, paths of PATH slots."""

    def make(bed: Bed) -> Trial:
        rng = np.random.default_rng(batch)
        accepted = cases.path_of(rng, 40, [PATH] * batch, 65)
        accepted.num_slots = 65
        arguments: Arguments = {
            "cache": cache_pages(rng, batch),
            "accepted": accepted,
            "prefix_lens": rng.integers(0, PAGE_SIZE - 40, batch, dtype=np.int32),
            "block_table": rng.permutation(batch).astype(np.int32)[:, None],
        }
        call = ops.kv_compact.prepare(**bed.put(arguments), return_status=True, context=bed.context)
        written, status = ops.kv_compact(**{**arguments, "cache": arguments["cache"].copy()}, return_status=True)
        expected = {"cache": written, "status": status}

        def problem() -> str | None:
            got = dict(zip(("cache", "status"), to_host(call.result), strict=True))
            return check.mismatch("kv_compact", arguments, got, expected)

        def peer() -> Peer:
            assert bed.bench.torch is not None
            return bed.bench.torch.kv_compact(arguments, expected)

        work = model.kv_compact(arguments, expected)
        return Trial([call.launch], problem, work.bytes, {"torch": peer}, expected, arguments)

    return make


# ---- A whole step ------------------------------------------------------------------------------------------


def whole_step(bed: Bed) -> Trial:
    """From the draft's logits to the compacted cache, without attention: five calls, one request.

    The draft's logits hold the candidates of a step of the trace, those of the target agree with the tree built
    from them along its deepest path.
    """
    rng, trace, context, budget = np.random.default_rng(5), bed.trace, bed.context, 64
    depth = trace.log_probs.shape[1]
    draft = rng.normal(0, 1, (depth, VOCABULARY)).astype(np.float32)
    np.put_along_axis(draft, trace.token_ids[0].astype(np.int64), trace.log_probs[0] + np.float32(20), axis=1)
    draft_logits = as_dtype(draft, "bfloat16")
    target = rng.normal(0, 3, (1, budget + 1, VOCABULARY)).astype(np.float32)
    # Where candidates tie at the end of a row the tree may miss a path; so it comes from the same top-k.
    rows = ops.topk_logprobs(draft_logits, CANDIDATES)
    drafted_rows, drafted_ids = (array.reshape(1, depth, CANDIDATES) for array in rows)
    lens, root = np.array([10], np.int32), trace.root_tokens[:1]
    drafted = ops.tree_build(drafted_rows, drafted_ids, root, lens, budget)
    slot = next(i for i in range(budget + 1) if drafted.depths[0, i] == min(PATH - 1, drafted.depths.max()))
    while slot > 0:
        parent = int(drafted.parents[0, slot])
        target[0, parent, drafted.tokens[0, slot]] = 60
        slot = parent
    target_logits = as_dtype(target, "bfloat16")
    cache = cache_pages(rng, 4)
    table = rng.permutation(4).astype(np.int32)[None]

    placed = bed.put({"draft": draft_logits, "target": target_logits, "root": root, "lens": lens, "table": table})
    pages = bed.put(cache)
    topk = ops.topk_logprobs.prepare(placed["draft"], CANDIDATES, context=context)
    log_probs, ids = (array.reshape(1, depth, CANDIDATES) for array in topk.result)
    build = ops.tree_build.prepare(log_probs, ids, placed["root"], placed["lens"], budget, context=context)
    argmax = ops.argmax.prepare(placed["target"], context=context)
    accept = ops.tree_accept.prepare(build.result, argmax.result, context=context)
    compact = ops.kv_compact.prepare(
        pages, accept.result, placed["lens"], block_table=placed["table"], return_status=True, context=context
    )
    calls: list[ops.Call[Any]] = [topk, build, argmax, accept, compact]

    def launch(stream: Any) -> None:
        for call in calls:
            call.launch(stream)

    def problem() -> str | None:
        """Each stage on what the one before it gave on the GPU."""
        (got_log_probs, got_ids), tree, tokens, accepted, (got_cache, got_status) = (
            to_host(call.result) for call in calls
        )
        shape = log_probs.shape
        built = ops.tree_build(got_log_probs.reshape(shape), got_ids.reshape(shape), root, lens, budget)
        kept, status = ops.kv_compact(cache.copy(), accepted, lens, block_table=table, return_status=True)
        top = {"logits": draft_logits, "k": CANDIDATES}, {"log_probs": got_log_probs, "token_ids": got_ids}
        best = {"logits": target_logits}, {"tokens": tokens}
        problems = (
            check.mismatch("topk_logprobs", *top, check.expected("topk_logprobs", top[0])),
            difference(tree, built),
            check.mismatch("argmax", *best, check.expected("argmax", best[0])),
            difference(accepted, ops.tree_accept(tree, tokens)),
            check.mismatch(
                "kv_compact", {}, {"cache": got_cache, "status": got_status}, {"cache": kept, "status": status}
            ),
            None if accepted.accept_len[0] > 1 else "nothing was accepted, so no row moves",
        )
        return next((found for found in problems if found is not None), None)

    return Trial([launch], problem, None)


# ---- The table ---------------------------------------------------------------------------------------------

TARGETS = (
    Target("tree_build/budget64_b1", build_of_trace(64, 1), us=8),
    Target("tree_build/budget64_b64", build_of_trace(64, STEPS), us=10),
    Target("tree_build/budget256_b1", build_of_trace(256, 1), us=20),
    Target("tree_build/budget1024_b1", build_of_trace(1024, 1), us=60),
    Target("topk_logprobs/rows15", topk_rows(15), us=15),
    Target("topk_logprobs/rows960", topk_rows(960), us=140),
    Target("argmax/rows65", argmax_rows(65), us=8),
    Target("argmax/rows4160", argmax_rows(4160), us=340),
    Target("sample/rows65", sample_rows(65), yardsticks=2),
    Target("sample/rows4160", sample_rows(4160), us=750),
    Target("tree_accept/b64", accept_of_trace, us=3),
    Target("kv_compact/layers61_b1", compact_layers(1), us=4),
    Target("kv_compact/layers61_b64", compact_layers(64), copy_share=0.5),
    Target("step/b1", whole_step, us=40),
    *ATTENTION,
)
