"""One table of cases for every operation. It drives the fixtures, the C++ and Python tests, and the bench.

A case is an operation and its arguments, made from a seed that follows from its name. `expected` runs the reference
on them; `tensors_of` and `attrs_of` turn arguments into what a KDTR fixture holds:

    in/NAME         an array argument; fields of a Tree or Accepted as in/tree.tokens, in/accepted.accept_index
    out/NAME        an expected result
    attrs           "case", "operation", and each scalar argument under its name (lists of ints: "1,2,3")
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from . import kdtr, reference
from ._floats import from_float32, to_float32
from .kdtr import bfloat16
from .types import Accepted, Tree

DATA = Path(__file__).resolve().parent / "data"
KIMI_SCALE = 0.144679626
"""192^-0.5 (0.1 ln 64 + 1)^2, Kimi K2.x"""

Arguments = dict[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    operation: str
    variant: str
    make: Callable[[np.random.Generator], Arguments]
    bench: bool = False
    """Also a shape that `kdtree bench` times by default."""

    @property
    def name(self) -> str:
        return f"{self.operation}/{self.variant}"

    def arguments(self) -> Arguments:
        """The arguments, the same on every call."""
        return self.make(np.random.default_rng(zlib.crc32(self.name.encode())))


RESULT_FIELDS: dict[str, tuple[str, ...]] = {
    "topk_logprobs": ("log_probs", "token_ids", "status"),
    "topk_merge": ("log_probs", "token_ids", "status"),
    "argmax": ("tokens", "values", "status"),
    "sample": ("tokens", "values", "status"),
    "verify_attn": ("out", "lse", "status"),
    "merge_attn_states": ("out", "lse"),
}


def run(module: Any, operation: str, arguments: Arguments, **extra: Any) -> Results:
    """Runs an operation of `kdtree_engine` or its reference; results by name. Inputs are not changed."""
    if operation == "step":
        return run_step(module, arguments)
    function = getattr(module, operation)
    if operation == "kv_compact":
        given = dict(arguments)
        written = "cache" if given.get("out") is None else "out"
        given[written] = given[written].copy()
        result, status = function(**given, return_status=True, **extra)
        return {written: result, "status": status}
    if operation in ("topk_logprobs", "topk_merge", "verify_attn"):
        extra["return_status"] = True
    elif operation in ("argmax", "sample"):
        extra.update(return_values=True, return_status=True)
    result = function(**arguments, **extra)
    if isinstance(result, (Tree, Accepted)):
        return {
            field.name: value
            for field in fields(result)
            if isinstance(value := getattr(result, field.name), np.ndarray)
        }
    names = RESULT_FIELDS[operation]
    if operation == "topk_logprobs" and arguments.get("raw"):
        names = ("log_probs", "token_ids", "lse", "status")
    return dict(zip(names, result, strict=True))


def run_step(module: Any, a: Arguments) -> Results:
    """The composition: from draft logits to the compacted cache, each stage fed with the one before."""
    batch_size, depth, vocab_size = a["draft_logits"].shape
    k, budget = a["k"], a["budget"]
    log_probs, ids = module.topk_logprobs(a["draft_logits"].reshape(batch_size * depth, vocab_size), k)
    log_probs, ids = log_probs.reshape(batch_size, depth, k), ids.reshape(batch_size, depth, k)
    tree = module.tree_build(log_probs, ids, a["root_tokens"], a["prefix_lens"], budget)
    attention = {"scale": a["scale"], "block_table": a["block_table"]}
    out, lse = module.verify_attn(a["q"], a["cache"], tree, a["prefix_lens"], **attention)
    # The target's logits: agreeing with the draft at each node's depth, for as long as `agree` says.
    target = module.argmax(a["target_logits"][np.arange(batch_size)[:, None], tree.depths])
    accepted = module.tree_accept(tree, target, stop_tokens=a["stop_tokens"])
    cache = a["cache"].copy()
    module.kv_compact(cache, accepted, a["prefix_lens"], block_table=a["block_table"])
    stages = {
        "topk.log_probs": log_probs,
        "topk.token_ids": ids,
        **{f"tree.{f.name}": getattr(tree, f.name) for f in fields(tree)},
        "out": out,
        "lse": lse,
        "target_tokens": target,
        **{f"accepted.{f.name}": getattr(accepted, f.name) for f in fields(accepted) if f.name != "num_slots"},
    }
    return {**stages, "cache": cache}


def expected(case: Case) -> Results:
    """What the reference says."""
    return run(reference, case.operation, case.arguments())


def tensors_of(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Arrays by name, those of trees and accepted paths field by field."""
    tensors = {}
    for name, value in values.items():
        if isinstance(value, (Tree, Accepted)):
            inner = {f"{name}.{f.name}": getattr(value, f.name) for f in fields(value)}
            tensors.update(tensors_of(prefix, inner))
        elif isinstance(value, np.ndarray):
            tensors[f"{prefix}/{name}"] = np.ascontiguousarray(value)
    return tensors


def attrs_of(case: Case, arguments: Arguments) -> dict[str, str]:
    """The scalar arguments as text."""
    attrs = {"case": case.name, "operation": case.operation}
    for name, value in arguments.items():
        if isinstance(value, (bool, int, float, str)):
            attrs[name] = (
                str(int(value)) if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
            )
        elif isinstance(value, list):
            attrs[name] = ",".join(str(item) for item in value)
        elif isinstance(value, (type, np.dtype)):
            attrs[name] = np.dtype(value).name
        elif isinstance(value, Accepted):
            attrs["num_slots"] = str(value.num_slots)
    return attrs


# ---- Makers ------------------------------------------------------------------------------------------------


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def as_dtype(values: Any, dtype: str) -> Any:
    """float32 values in "float32", "float16" or "bfloat16"."""
    return from_float32(values, bfloat16 if dtype == "bfloat16" else np.dtype(dtype))


def draft_rows(rng: np.random.Generator, shape: tuple[int, int, int], kind: str) -> tuple[Any, Any]:
    """Candidate rows: smooth (all different), ties (logits rounded to bfloat16), zeros."""
    if kind == "zeros":
        log_probs = np.zeros(shape, np.float32)
    else:
        logits = -np.sort(rng.exponential(1.5, shape), axis=-1)
        if kind == "ties":
            logits = np.round(logits * 4) / 4
        lse = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        log_probs = np.minimum(np.float32(0), logits.astype(np.float32) - lse.astype(np.float32))
    ids = np.argsort(rng.random((*shape[:2], max(shape[2], 200))), axis=-1)[..., : shape[2]].astype(np.int32)
    return log_probs, np.ascontiguousarray(ids)


def build(
    batch_size: int, depth: int, candidates: int, budget: int, kind: str = "ties", **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        log_probs, ids = draft_rows(rng, (batch_size, depth, candidates), kind)
        return {
            "log_probs": log_probs,
            "token_ids": ids,
            "root_tokens": rng.integers(0, 200, batch_size, dtype=np.int32),
            "prefix_lens": rng.integers(0, 5000, batch_size, dtype=np.int32),
            "budget": budget,
            **options,
        }

    return make


def build_ragged(rng: np.random.Generator) -> Arguments:
    arguments = build(16, 15, 32, 64)(rng)
    arguments["budgets"] = rng.integers(-2, 67, 16, dtype=np.int32)
    arguments["max_depths"] = rng.integers(-2, 18, 16, dtype=np.int32)
    arguments["prefix_lens"][:4] = [-5, 2**31 - 1, 2**31 - 16, -(2**31)]
    arguments["num_live"] = i32(13)
    return arguments


def build_truncated(rng: np.random.Generator) -> Arguments:
    arguments = build(16, 5, 12, 40)(rng)
    log_probs, ids = arguments["log_probs"], arguments["token_ids"]
    bad = [np.nan, np.inf, -np.inf, 0.5, -0.0]
    for b in range(10):
        log_probs[b, b % 5, rng.integers(0, 12)] = bad[b % 5]
    ids[10, 2, 3], ids[11, 0, 0], ids[12, 1, 1] = -1, -7, 500
    for b in (13, 14):  # a suffix of padding; then garbage behind it
        log_probs[b, 1, 4:], ids[b, 1, 4:] = -np.inf, -1
    log_probs[14, 1, 11], ids[14, 1, 11] = -9.0, 3
    arguments["vocab_size"] = 400
    return arguments


def build_worked(rows: list[list[float]], budget: int) -> Callable[[np.random.Generator], Arguments]:
    def make(_rng: np.random.Generator) -> Arguments:
        log_probs = np.array([rows], np.float32)
        ids = np.ascontiguousarray(np.broadcast_to(np.arange(log_probs.shape[2], dtype=np.int32), log_probs.shape))
        return {
            "log_probs": log_probs,
            "token_ids": ids,
            "root_tokens": i32(9),
            "prefix_lens": i32(10),
            "budget": budget,
        }

    return make


def build_trace(budget: int, steps: int) -> Callable[[np.random.Generator], Arguments]:
    def make(_rng: np.random.Generator) -> Arguments:
        tensors, _ = kdtr.load(DATA / "trace_code.kdtr")
        flat = {name: tensors[name].reshape(-1, *tensors[name].shape[2:])[:steps] for name in tensors}
        names = ("log_probs", "token_ids", "root_tokens")
        return {**{n: flat[n] for n in names}, "prefix_lens": np.arange(steps, dtype=np.int32), "budget": budget}

    return make


def random_parents(rng: np.random.Generator, count: int) -> Any:
    return np.array([-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, count))], np.int32)


def closure(parents: Any) -> Any:
    """The boolean ancestor mask of parents."""
    mask = np.eye(len(parents), dtype=bool)
    for slot in range(1, len(parents)):
        mask[slot] |= mask[parents[slot]]
    return mask


def tree_arrays(rng: np.random.Generator, num_slots: int, counts: list[int]) -> tuple[Any, Any]:
    """tokens and parents; slots from the count on hold garbage."""
    parents = rng.integers(-99, 2000, (len(counts), num_slots), dtype=np.int32)
    for b, count in enumerate(counts):
        parents[b, :count] = random_parents(rng, count)
    return rng.integers(0, 100, parents.shape, dtype=np.int32), parents


def from_parents(num_slots: int, counts: list[int], chain: bool = False) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        tokens, parents = tree_arrays(rng, num_slots, counts)
        if chain:
            parents[:] = np.arange(-1, num_slots - 1)
        lens = rng.integers(0, 1000, len(counts), dtype=np.int32)
        return {"tokens": tokens, "parents": parents, "node_counts": i32(*counts), "prefix_lens": lens}

    return make


def malformed_parents(rng: np.random.Generator) -> Arguments:
    arguments = from_parents(9, [9] * 10)(rng)
    parents = arguments["parents"]
    parents[0, 0], parents[1, 3], parents[2, 4], parents[3, 5], parents[4, 1] = 0, 3, 7, -1, 2**31 - 1
    arguments["node_counts"][5:8] = [-1, 10, 0]
    arguments["prefix_lens"][8:] = [-1, 2**31 - 1]
    return arguments


def from_visibility(
    num_slots: int, counts: list[int], damage: bool = False
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        tokens, parents = tree_arrays(rng, num_slots, counts)
        mask = rng.random((len(counts), num_slots, num_slots)) < 0.5
        for b, count in enumerate(counts):
            mask[b, :count, :count] = closure(parents[b, :count])
            if damage and b % 2:
                mask[b, rng.integers(0, count), rng.integers(0, count)] ^= True
        lens = rng.integers(0, 1000, len(counts), dtype=np.int32)
        return {"visibility": mask, "tokens": tokens, "node_counts": i32(*counts), "prefix_lens": lens}

    return make


def drafted_tree(rng: np.random.Generator, batch_size: int, budget: int, depth: int = 15, **options: Any) -> Tree:
    return reference.tree_build(**build(batch_size, depth, 32, budget, "ties", **options)(rng))


def agreeing_targets(rng: np.random.Generator, tree: Tree, hops: list[int]) -> Any:
    """Targets that agree with the tree for `hops` nodes along a random path, and with nothing else."""
    targets = np.full(tree.tokens.shape, 10_000, np.int32)
    for b in range(tree.batch_size):
        slot = 0
        for _ in range(hops[b % len(hops)]):
            children = np.flatnonzero(tree.parents[b] == slot)
            if slot < 0 or len(children) == 0:
                break
            child = int(rng.choice(children))
            targets[b, slot] = tree.tokens[b, child]
            slot = child
    return targets


def accept(batch_size: int, budget: int, hops: list[int], **options: Any) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        tree = drafted_tree(rng, batch_size, budget)
        return {"tree": tree, "target_tokens": agreeing_targets(rng, tree, hops), **options}

    return make


def accept_stop(rng: np.random.Generator) -> Arguments:
    arguments = accept(6, 64, [5])(rng)
    accepted = reference.tree_accept(**arguments)
    return {**arguments, "stop_tokens": [int(accepted.tokens[0, 2]), int(accepted.tokens[1, 0]), 10_000]}


def accept_hostile(rng: np.random.Generator) -> Arguments:
    arguments = accept(12, 20, [6])(rng)
    tree = arguments["tree"]
    for b in range(8):
        links = (tree.first_child, tree.next_sibling)[b % 2]
        links[b, rng.integers(0, 4, 3)] = rng.integers(-3, 24, 3)
    tree.next_sibling[8, :21] = np.arange(21)  # every list is a loop
    tree.node_count[9:] = [-1, 99, 0]
    arguments["target_tokens"][3, 0] = -1
    return arguments


def path_of(rng: np.random.Generator, num_slots: int, lengths: list[int], max_len: int) -> Accepted:
    """Ascending random paths from the root."""
    accepted = Accepted.empty(len(lengths), max_len, num_slots)
    for b, length in enumerate(lengths):
        if length:
            rest = np.sort(rng.choice(np.arange(1, num_slots), length - 1, replace=False))
            accepted.accept_index[b, :length] = [0, *rest]
        accepted.accept_len[b] = length
    return accepted


def compact(
    page_size: int,
    lengths: list[int],
    layers: int = 1,
    width: int = 576,
    dtype: str = "bfloat16",
    destination: bool = False,
) -> Callable[[np.random.Generator], Arguments]:
    """page_size 0: a contiguous cache."""

    def make(rng: np.random.Generator) -> Arguments:
        batch_size = len(lengths)
        rows = 200
        lens = rng.integers(0, 130, batch_size, dtype=np.int32)
        arguments: Arguments = {"accepted": path_of(rng, 65, lengths, 16), "prefix_lens": lens}
        if page_size:
            pages = -(-rows // page_size)
            table = rng.permutation(batch_size * pages).reshape(batch_size, pages).astype(np.int32)
            shape = (layers, batch_size * pages, page_size, width)
            arguments["block_table"] = table
        else:
            shape = (layers, batch_size, rows, width)
        arguments["cache"] = as_dtype(rng.normal(size=shape).astype(np.float32), dtype)
        if destination:
            arguments["out"] = np.zeros_like(arguments["cache"])
        return arguments

    return make


def compact_bad(rng: np.random.Generator) -> Arguments:
    arguments = compact(16, [5] * 8, width=8)(rng)
    accepted = arguments["accepted"]
    accepted.accept_index[0, 2], accepted.accept_index[1, 0], accepted.accept_index[2, 4] = 0, -1, 65
    accepted.accept_len[3:5] = [-1, 17]
    arguments["prefix_lens"][5:7] = [-1, 205]
    arguments["num_live"] = i32(7)
    return arguments


def vocabulary(
    rows: int, vocab_size: int, dtype: str, kind: str = "smooth", **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    """Logits; "ties" has few values, "bad" has rows with NaN, infinities and nothing finite."""

    def make(rng: np.random.Generator) -> Arguments:
        logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
        if kind == "ties":
            logits = np.round(logits)
            logits[:, ::7] *= -0.0
        if kind == "bad":
            logits[0, vocab_size // 2], logits[1, vocab_size - 1], logits[2] = np.nan, np.inf, -np.inf
            logits[3, 1:], logits[4, ::2] = -np.inf, -np.inf
            logits[5, 0], logits[5, 1] = np.nan, np.inf
        return {"logits": as_dtype(logits, dtype), **options}

    return make


def shards(num_shards: int, rows: int, vocab_size: int, k: int) -> Callable[[np.random.Generator], Arguments]:
    """The raw top-k of a tied vocabulary's shards; row 0 has a NaN, row 1 nothing finite, shard 0 of row 2 neither."""

    def make(rng: np.random.Generator) -> Arguments:
        logits = np.round(rng.normal(0, 3, (rows, vocab_size)).astype(np.float32))
        logits[0, 3], logits[1] = np.nan, -np.inf
        size = vocab_size // num_shards
        logits[2, :size] = -np.inf
        parts = [
            reference.topk_logprobs(
                np.ascontiguousarray(logits[:, s * size : (s + 1) * size]), k, raw=True, id_offset=s * size
            )
            for s in range(num_shards)
        ]
        values, ids, lse = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        return {"logits": values, "token_ids": ids, "lse": lse}

    return make


def sampling(
    rows: int, vocab_size: int, dtype: str, kind: str = "smooth"
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        temperatures = np.resize(np.array([1.0, 0.6, 0.0, np.inf, 1e-30, 2.5, -1.0, np.nan], np.float32), rows)
        if kind == "bench":
            temperatures = np.full(rows, 0.7, np.float32)
        return {
            **vocabulary(rows, vocab_size, dtype, "smooth" if kind == "bench" else kind)(rng),
            "temperatures": temperatures,
            "seed": 2**63 + 12345,
            "positions": rng.integers(0, 2**31 - 1, rows, dtype=np.int32),
            "request_ids": rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64),
        }

    return make


def attention(
    queries: int,
    heads: int,
    lens: list[int],
    *,
    page_size: int = 64,
    dtype: str = "bfloat16",
    std: float = 1.0,
    tree: bool = True,
    poison: bool = False,
    **options: Any,
) -> Callable[[np.random.Generator], Arguments]:
    """Random queries and cache; page_size 0 is contiguous. `poison` plants NaN in every row that nobody may see."""

    def make(rng: np.random.Generator) -> Arguments:
        batch_size = len(lens)
        rows = max(lens) + queries + 3
        q = as_dtype(rng.normal(0, std, (batch_size, queries, heads, 576)).astype(np.float32), dtype)
        draft = drafted_tree(rng, batch_size, queries - 1, budgets=rng.integers(0, queries, batch_size, dtype=np.int32))
        counts = draft.node_count if tree else np.full(batch_size, queries)
        arguments: Arguments = {"q": q, "tree": draft if tree else None, "prefix_lens": i32(*lens), "scale": KIMI_SCALE}
        logical = rng.normal(0, std, (batch_size, rows, 576)).astype(np.float32)
        if poison:
            starts = options.get("kv_starts", np.zeros(batch_size, np.int32))
            for b in range(batch_size):
                logical[b, : starts[b]] = np.nan
                logical[b, lens[b] + counts[b] :] = np.nan
        if page_size:
            pages = -(-rows // page_size) + 1
            padded = np.full((batch_size, pages * page_size, 576), np.nan if poison else 0, np.float32)
            padded[:, :rows] = logical
            order = rng.permutation(batch_size * pages)
            cache = np.empty((batch_size * pages, page_size, 576), np.float32)
            cache[order] = padded.reshape(batch_size * pages, page_size, 576)
            table = order.reshape(batch_size, pages).astype(np.int32)
            if poison:  # pages past what is seen may be anything
                for b in range(batch_size):
                    table[b, -(-(lens[b] + int(counts[b])) // page_size) :] = [-1, 2**31 - 1][b % 2]
            arguments["block_table"] = table
        else:
            cache = logical
        arguments["kv_cache"] = as_dtype(cache, dtype)
        return {**arguments, **options}

    return make


def attention_real(layer: int) -> Callable[[np.random.Generator], Arguments]:
    """Real absorbed queries and latent rows of a small MLA model; the queries are the last 65 positions."""

    def make(rng: np.random.Generator) -> Arguments:
        tensors, attrs = kdtr.load(DATA / "mla_real.kdtr")
        return {
            "q": tensors[f"q{layer}"][None],
            "kv_cache": tensors[f"kv{layer}"][None],
            "tree": drafted_tree(rng, 1, 64),
            "prefix_lens": i32(2113 - 65),
            "scale": float(attrs["scale"]),
        }

    return make


def attention_clamped(rng: np.random.Generator) -> Arguments:
    """Every device-side number out of range, and pages that are not there."""
    arguments = attention(9, 4, [40, 40, 40, 40, 40, 40], page_size=16, dtype="float32")(rng)
    table = arguments["block_table"]
    arguments["prefix_lens"][:2] = [-1, 2**31 - 1]
    arguments["tree"].node_count[2:4] = [-1, 10]
    arguments["kv_starts"] = i32(0, 0, 0, 0, 41, -1)
    table[4, 2], table[5, 0] = -1, 10_000
    return {**arguments, "num_live": i32(6)}


def states(
    rows: int, heads: int, dim: int, dtype_a: str, dtype_b: str, **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        lse_a, lse_b = (rng.normal(0, 4, (rows, heads)).astype(np.float32) for _ in range(2))
        if rows > 8:
            lse_a[0], lse_b[1], lse_a[2], lse_b[3] = -np.inf, -np.inf, np.inf, np.inf
            lse_a[4], lse_b[4], lse_a[5], lse_b[5] = -np.inf, np.inf, np.inf, np.inf
            lse_a[6, 0], lse_b[7, 0] = np.nan, np.nan
        out_a, out_b = (rng.normal(size=(rows, heads, dim)).astype(np.float32) for _ in range(2))
        if rows > 8:
            out_a[0], out_b[3], out_a[8, 0, 0] = np.nan, np.nan, np.nan
        return {
            "out_a": as_dtype(out_a, dtype_a),
            "lse_a": lse_a,
            "out_b": as_dtype(out_b, dtype_b),
            "lse_b": lse_b,
            **options,
        }

    return make


def step(batch_size: int, dtype: str) -> Callable[[np.random.Generator], Arguments]:
    """A whole step; request b's target agrees with the draft's best tokens at the first b + 1 depths."""

    def make(rng: np.random.Generator) -> Arguments:
        depth, vocab_size, heads, page_size, pages = 7, 1000, 4, 16, 12
        draft = as_dtype(rng.normal(0, 4, (batch_size, depth, vocab_size)).astype(np.float32), dtype)
        target = rng.normal(0, 1, (batch_size, depth + 1, vocab_size)).astype(np.float32)
        best = to_float32(draft).argmax(axis=-1)
        for b in range(batch_size):
            for d in range(min(b + 1, depth)):
                target[b, d, best[b, d]] = 50.0
        return {
            "draft_logits": draft,
            "k": 16,
            "budget": 40,
            "root_tokens": rng.integers(0, vocab_size, batch_size, dtype=np.int32),
            "prefix_lens": rng.integers(0, 140, batch_size, dtype=np.int32),
            "q": as_dtype(rng.normal(size=(batch_size, 41, heads, 576)).astype(np.float32), dtype),
            "cache": as_dtype(rng.normal(size=(batch_size * pages, page_size, 576)).astype(np.float32), dtype),
            "block_table": rng.permutation(batch_size * pages).reshape(batch_size, pages).astype(np.int32),
            "scale": 0.05,
            "target_logits": as_dtype(target, dtype),
            "stop_tokens": [int(best[batch_size - 1, 3])],
        }

    return make


# ---- The table ---------------------------------------------------------------------------------------------

PREFIXES = (0, 1, 63, 64, 65, 2000)

CASES: tuple[Case, ...] = (
    Case("topk_logprobs", "small", vocabulary(4, 100, "float32", k=10)),
    Case("topk_logprobs", "ties_f16", vocabulary(6, 3000, "float16", "ties", k=64)),
    Case("topk_logprobs", "ties_bf16", vocabulary(6, 3000, "bfloat16", "ties", k=64)),
    Case("topk_logprobs", "bad_rows", vocabulary(8, 333, "float32", "bad", k=20)),
    Case("topk_logprobs", "k_above_v", vocabulary(3, 7, "float32", k=12)),
    Case("topk_logprobs", "k1024", vocabulary(2, 5000, "bfloat16", "ties", k=1024)),
    Case("topk_logprobs", "raw_shard", vocabulary(8, 500, "float32", "bad", k=16, raw=True, id_offset=1500)),
    Case("topk_logprobs", "num_live", vocabulary(6, 64, "float32", k=4, num_live=i32(2), rows_per_request=2)),
    Case("topk_logprobs", "v163840_f32", vocabulary(15, 163840, "float32", k=64), bench=True),
    Case("topk_logprobs", "v163840_bf16", vocabulary(15, 163840, "bfloat16", k=64), bench=True),
    *(Case("topk_merge", f"shards{s}", shards(s, 6, 4096, 32), bench=s == 8) for s in (1, 2, 4, 8)),
    Case("tree_build", "chain", build(2, 15, 1, 15, "smooth")),
    Case("tree_build", "underfull", build(2, 2, 2, 64)),
    Case("tree_build", "maxbudget", build(2, 15, 64, 64, "smooth")),
    Case("tree_build", "deep15", build(4, 15, 4, 64, "zeros")),
    Case("tree_build", "batch64", build(64, 15, 64, 64), bench=True),
    Case("tree_build", "ties", build(8, 15, 64, 64)),
    Case("tree_build", "depth1", build(2, 1, 64, 40)),
    Case("tree_build", "depth64", build(1, 64, 8, 200)),
    Case("tree_build", "k1024", build(1, 3, 1024, 300)),
    Case("tree_build", "budget0", build(2, 4, 4, 0)),
    Case("tree_build", "budget256", build(2, 15, 64, 256), bench=True),
    Case("tree_build", "budget1024", build(2, 15, 64, 1024), bench=True),
    Case("tree_build", "ragged", build_ragged),
    Case("tree_build", "truncated", build_truncated),
    Case("tree_build", "empty_batch", build(0, 4, 4, 8)),
    Case("tree_build", "no_rows", build(2, 0, 4, 8)),
    Case("tree_build", "worked1", build_worked([[-1, -1]] * 3, 6)),
    Case("tree_build", "worked2", build_worked([[0, 0, 0]] * 2, 6)),
    Case("tree_build", "worked3", build_worked([[-1, -2]] * 2, 5)),
    Case("tree_build", "trace64", build_trace(64, 64), bench=True),
    Case("tree_from_parents", "chain129", from_parents(129, [129, 33, 64], chain=True)),
    Case("tree_from_parents", "random", from_parents(65, [65, 1, 2, 63, 64, 0]), bench=True),
    Case("tree_from_parents", "n1025", from_parents(1025, [1025, 1000])),
    Case("tree_from_parents", "malformed", malformed_parents),
    Case("tree_from_visibility", "random", from_visibility(65, [65, 1, 2, 63, 64]), bench=True),
    Case("tree_from_visibility", "n129", from_visibility(129, [129, 128])),
    Case("tree_from_visibility", "damaged", from_visibility(20, [20] * 12, damage=True)),
    Case("tree_accept", "all", accept(4, 64, [99])),
    Case("tree_accept", "none", accept(4, 64, [0])),
    Case("tree_accept", "middle", accept(8, 64, [1, 2, 3, 4])),
    Case("tree_accept", "stop", accept_stop),
    Case("tree_accept", "cap", accept(6, 64, [5], max_tokens=i32(1, 2, 3, 0, -1, 100))),
    Case("tree_accept", "max_len", accept(4, 64, [8], max_len=3)),
    Case("tree_accept", "hostile", accept_hostile),
    Case("tree_accept", "batch64", accept(64, 64, [0, 1, 3, 5, 9]), bench=True),
    Case("kv_compact", "page1", compact(1, [5, 0, 1, 7])),
    Case("kv_compact", "page16", compact(16, [5, 16, 9])),
    Case("kv_compact", "page48_odd_width", compact(48, [5, 3], width=37, dtype="float32")),
    Case("kv_compact", "page64_layers", compact(64, [5, 4, 6], layers=3)),
    Case("kv_compact", "contiguous", compact(0, [5, 16, 2], dtype="float16")),
    Case("kv_compact", "destination", compact(16, [5, 1, 0], layers=2, destination=True)),
    Case("kv_compact", "bad_paths", compact_bad),
    Case("kv_compact", "layers61", compact(64, [5], layers=61), bench=True),
    *(Case("verify_attn", f"heads{h}", attention(33, h, [200, 70])) for h in (8, 16, 64)),
    *(Case("verify_attn", f"prefix{n}", attention(17, 8, [n])) for n in PREFIXES),
    *(Case("verify_attn", f"page{s}", attention(12, 4, [90, 33], page_size=s)) for s in (1, 16, 64, 256)),
    Case("verify_attn", "contiguous_f32", attention(20, 8, [100, 64, 0], page_size=0, dtype="float32")),
    Case("verify_attn", "f16", attention(20, 8, [100, 64], dtype="float16")),
    Case("verify_attn", "std005", attention(65, 8, [500], std=0.05)),
    Case("verify_attn", "chain", attention(16, 8, [100], tree=False)),
    Case("verify_attn", "decode", attention(1, 8, [300, 1], tree=False), bench=True),
    Case("verify_attn", "tail_only", attention(33, 8, [300, 64], kv_starts=i32(300, 64), out_dtype=np.float32)),
    Case("verify_attn", "window_base2", attention(33, 8, [300, 64], kv_starts=i32(250, 64), lse_base="2")),
    Case("verify_attn", "poison", attention(40, 8, [130, 64, 1], page_size=16, poison=True)),
    Case("verify_attn", "poison_window", attention(9, 4, [130, 64], poison=True, kv_starts=i32(100, 64))),
    Case("verify_attn", "budget256", attention(257, 2, [100], dtype="float32")),
    Case("verify_attn", "one_head", attention(9, 1, [20])),
    Case("verify_attn", "heads128", attention(2, 128, [20])),
    Case("verify_attn", "clamped", attention_clamped),
    *(Case("verify_attn", f"real_layer{n}", attention_real(n)) for n in (0, 3, 7)),
    Case("verify_attn", "q65_h8_2048", attention(65, 8, [2048], dtype="float32"), bench=True),
    Case("verify_attn", "q65_h8_2048_bf16", attention(65, 8, [2048]), bench=True),
    Case("merge_attn_states", "f32", states(12, 8, 512, "float32", "float32"), bench=True),
    Case("merge_attn_states", "bf16_f32", states(12, 8, 512, "bfloat16", "float32")),
    Case("merge_attn_states", "base2_f16", states(12, 3, 7, "float16", "float16", lse_base="2", out_dtype=np.float32)),
    Case("argmax", "ties", vocabulary(6, 3000, "bfloat16", "ties")),
    Case("argmax", "bad_rows", vocabulary(8, 333, "float32", "bad", id_offset=7)),
    Case("argmax", "v163840", vocabulary(65, 163840, "bfloat16"), bench=True),
    Case("sample", "temperatures", sampling(16, 1000, "float32")),
    Case("sample", "bad_rows", sampling(8, 333, "float16", "bad")),
    Case("sample", "v163840", sampling(8, 163840, "bfloat16", "bench"), bench=True),
    Case("step", "f32", step(4, "float32")),
    Case("step", "bf16", step(4, "bfloat16")),
)


def select(pattern: str | None) -> list[Case]:
    """Cases whose name contains the pattern; all without one."""
    return [case for case in CASES if pattern is None or pattern in case.name]
