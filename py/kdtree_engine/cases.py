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
I32_MIN, I32_MAX = -(2**31), 2**31 - 1
NAN, INF = float("nan"), float("inf")

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
    cache = module.kv_compact(a["cache"].copy(), accepted, a["prefix_lens"], block_table=a["block_table"])
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


def build_faults(**options: Any) -> Callable[[np.random.Generator], Arguments]:
    """One fault a request in the middle of three rows, unless its place is given: (row, ranks, log-prob, id)."""
    end = slice(3, None)
    faults: list[list[tuple[int, int | slice, float | None, int | None]]] = [
        [],
        [(1, 2, NAN, None)],
        [(1, 0, NAN, None)],
        [(0, 0, NAN, None)],
        [(2, 4, NAN, None)],
        [(1, 0, INF, None)],
        [(1, 0, 1e-45, None)],  # positive
        [(1, 3, -0.0, None)],  # larger than the one before it
        [(1, 2, None, -1)],
        [(1, 2, None, I32_MIN)],
        [(1, 2, None, 999)],  # the last id of a vocabulary of 1000
        [(1, 2, None, 1000)],
        [(1, 2, None, I32_MAX)],
        [(1, end, -INF, None)],  # not padding: the ids are good
        [(1, end, None, -1)],  # nor is this
        [(1, end, -INF, -2)],
        [(1, end, NAN, -1)],
        [(1, end, -INF, -1)],  # padding
        [(1, slice(None), -INF, -1)],
        [(1, slice(3, 5), -INF, -1)],  # padding, and then an entry
        [(1, end, -INF, -1), (1, 5, -INF, 7)],
    ]

    def make(rng: np.random.Generator) -> Arguments:
        arguments = build(1, 3, 6, 14, "smooth")(rng)
        for name in ("log_probs", "token_ids", "root_tokens", "prefix_lens"):
            arguments[name] = np.repeat(arguments[name], len(faults), axis=0)
        for b, entries in enumerate(faults):
            for row, ranks, log_prob, token in entries:
                if log_prob is not None:
                    arguments["log_probs"][b, row, ranks] = log_prob
                if token is not None:
                    arguments["token_ids"][b, row, ranks] = token
        per_request = {n: np.full(len(faults), v, np.int32) for n, v in options.items() if n != "vocab_size"}
        return {**arguments, **options, **per_request}

    return make


def build_dead(rng: np.random.Generator) -> Arguments:
    """Everything in a dead request is garbage."""
    arguments = build(3, 3, 4, 10, budgets=i32(5, 10, -7), max_depths=i32(3, 3, 99), num_live=i32(2))(rng)
    arguments["log_probs"][2], arguments["token_ids"][2] = NAN, I32_MIN
    arguments["root_tokens"][:2], arguments["prefix_lens"][2] = [0, -5], -1
    return arguments


def build_equal_ids(rng: np.random.Generator) -> Arguments:
    """Every candidate is token 0."""
    arguments = build(1, 3, 4, 20)(rng)
    return {**arguments, "token_ids": np.zeros_like(arguments["token_ids"])}


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


def parents_of(rng: np.random.Generator, count: int, shape: str) -> Any:
    """Parents of a chain, a star, or a random tree whose links reach 2, 6 or 40 slots back."""
    reach = {"chain": 1, "narrow": 2, "random": 6, "wide": 40, "star": count}[shape]
    slots = range(1, count)
    if shape == "star":
        return np.array([-1, *(0 for _ in slots)], np.int32)
    return np.array([-1, *(int(rng.integers(max(0, i - reach), i)) for i in slots)], np.int32)


def closure(parents: Any) -> Any:
    """The boolean ancestor mask of parents."""
    mask = np.eye(len(parents), dtype=bool)
    for slot in range(1, len(parents)):
        mask[slot] |= mask[parents[slot]]
    return mask


def tree_arrays(rng: np.random.Generator, num_slots: int, counts: list[int], shape: str) -> tuple[Any, Any]:
    """tokens and parents; slots from the count on hold garbage."""
    parents = rng.integers(-99, 2000, (len(counts), num_slots), dtype=np.int32)
    for b, count in enumerate(counts):
        parents[b, :count] = parents_of(rng, count, shape)[:count]
    return rng.integers(0, 100, parents.shape, dtype=np.int32), parents


def from_parents(
    num_slots: int, counts: list[int], shape: str = "random", **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        tokens, parents = tree_arrays(rng, num_slots, counts, shape)
        lens = rng.integers(0, 1000, len(counts), dtype=np.int32)
        return {"tokens": tokens, "parents": parents, "node_counts": i32(*counts), "prefix_lens": lens, **options}

    return make


SOUND = [-1, 0, 0, 1, 1, 2, 5, 4]
"""Parents of a small tree that the malformed ones are made from."""


def malformed_parents(rng: np.random.Generator) -> Arguments:
    """A fault each; the first and the last request are sound."""
    changes: list[tuple[int, ...]] = [
        (),
        (3, 3),  # itself
        (3, 4, 4, 3),  # a cycle
        (2, 5),  # forward
        (4, -1),  # a second root
        (7, I32_MIN),
        (7, 8),  # beyond the slots
        (1, I32_MAX),
        (0, 0),
        (0, -2),
        (0, 3),
        (),
    ]
    arguments = from_parents(8, [8] * len(changes))(rng)
    arguments["parents"][:] = SOUND
    for b, change in enumerate(changes):
        arguments["parents"][b, list(change[::2])] = change[1::2]
    return arguments


NODE_COUNTS = i32(8, 9, -1, I32_MIN, I32_MAX, 0, 1, 8)
LENS_AT_LIMITS = i32(0, -1, I32_MIN, I32_MAX, I32_MAX - 12, I32_MAX - 13, I32_MAX - 11)


def parents_counts(rng: np.random.Generator) -> Arguments:
    arguments = from_parents(8, [8] * 8, node_counts=NODE_COUNTS)(rng)
    arguments["parents"][:] = SOUND
    arguments["prefix_lens"][[3, 6]] = [-8, I32_MAX]
    return arguments


def from_visibility(
    num_slots: int, counts: list[int], shape: str = "random", damage: bool = False, **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        tokens, parents = tree_arrays(rng, num_slots, counts, shape)
        mask = rng.random((len(counts), num_slots, num_slots)) < 0.5
        for b, count in enumerate(counts):
            mask[b, :count, :count] = closure(parents[b, :count])
            if damage and b % 2:
                mask[b, rng.integers(0, count), rng.integers(0, count)] ^= True
        lens = rng.integers(0, 1000, len(counts), dtype=np.int32)
        return {"visibility": mask, "tokens": tokens, "node_counts": i32(*counts), "prefix_lens": lens, **options}

    return make


def malformed_masks(rng: np.random.Generator) -> Arguments:
    """Entries turned over, a fault a request; the first is sound. Then masks that are empty and full."""
    faults: list[list[tuple[int, int]]] = [
        [],
        [(4, 4)],  # the diagonal
        [(0, 0)],
        [(3, 6)],  # above it
        [(0, 7)],
        [(4, 0)],  # the root
        [(6, 2)],  # an ancestor too few
        [(6, 1)],  # and too many
        [(6, 4)],
        [(1, 0)],  # a second root
        [(4, 0), (4, 1), (4, 4)],  # an empty row
    ]
    arguments = from_visibility(8, [8] * (len(faults) + 2))(rng)
    mask = arguments["visibility"]
    mask[:] = closure(SOUND)
    for b, entries in enumerate(faults):
        for i, j in entries:
            mask[b, i, j] ^= True
    mask[-2], mask[-1] = False, True
    return arguments


def malformed_far(rng: np.random.Generator) -> Arguments:
    """Faults in another word of the row than the diagonal's; that of request 2 is beyond its nodes, so none."""
    arguments = from_visibility(70, [70, 70, 69], "chain")(rng)
    mask = arguments["visibility"]
    mask[0, 68, 3], mask[1, 20, 69], mask[2, 69, 64] = False, True, False
    return arguments


def visibility_counts(rng: np.random.Generator) -> Arguments:
    arguments = from_visibility(8, [8] * 8, node_counts=NODE_COUNTS)(rng)
    arguments["visibility"][:] = closure(SOUND)
    arguments["prefix_lens"][[3, 6]] = [-8, I32_MAX]
    return arguments


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


SPELLED = {0: 10, 1: 12, 3: 16, 7: 60}
"""Targets that accept 0-1-3-7 of the eight-slot tree below, 60 being the bonus."""


def eight_slots(batch_size: int, tokens: tuple[int, ...] = (90, 10, 11, 12, 13, 14, 15, 16)) -> Tree:
    """The paths 0-1-3-7, 0-1-4 and 0-2-5-6."""
    parents = np.tile(i32(-1, 0, 0, 1, 1, 2, 5, 3), (batch_size, 1))
    counts, lens = np.full(batch_size, 8, np.int32), np.zeros(batch_size, np.int32)
    return reference.tree_from_parents(np.tile(i32(*tokens), (batch_size, 1)), parents, counts, lens)


def walk(
    targets: dict[int, int], batch_size: int = 1, change: Callable[[Tree, Any], None] | None = None, **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    """Targets by slot, 50 elsewhere, which matches nothing; then `change` of the tree and the targets."""

    def make(_rng: np.random.Generator) -> Arguments:
        tree = eight_slots(batch_size)
        target_tokens = np.full((batch_size, 8), 50, np.int32)
        for slot, target in targets.items():
            target_tokens[:, slot] = target
        if change is not None:
            change(tree, target_tokens)
        return {"tree": tree, "target_tokens": target_tokens, **options}

    return make


def same_tokens(tree: Tree, targets: Any) -> None:
    tree.tokens[:], targets[:] = 5, 5


def token_zero(tree: Tree, targets: Any) -> None:
    tree.tokens[:], targets[:] = [0, 0, 0, 0, 1, 0, 0, 0], 0


def negative_targets(_tree: Tree, targets: Any) -> None:
    for b, (slot, target) in enumerate(((0, -1), (1, -2), (3, I32_MIN), (7, -1), (2, -1), (0, -1))):
        targets[b, slot] = target


def negative_token(tree: Tree, _targets: Any) -> None:
    tree.tokens[0, 1] = -1  # a target < 0 matches nothing, not even itself


def odd_counts(tree: Tree, _targets: Any) -> None:
    tree.node_count[:] = [8, 0, 1, 3, 7, 9, -1, I32_MIN, I32_MAX]


BAD_LINKS = (
    *(("first_child", 0, link) for link in (0, -2, I32_MIN, I32_MAX, 8)),
    *(("first_child", slot, link) for slot, link in ((1, 1), (1, 0), (3, 2), (7, 8), (6, 0))),
    *(("next_sibling", slot, link) for slot, link in ((1, 1), (2, 1), (2, 0), (2, 8), (1, I32_MIN), (4, 3), (5, 6))),
)


def bad_links(tree: Tree, _targets: Any) -> None:
    """One a request; the last is sound."""
    for b, (array, slot, link) in enumerate(BAD_LINKS):
        getattr(tree, array)[b, slot] = link


def bad_links_below(tree: Tree, targets: Any) -> None:
    bad_links(tree, targets)
    tree.node_count[:] = 7  # so slot 7 is beyond


def linked(
    tokens: list[int], first_child: list[int], next_sibling: list[int], targets: list[list[int]]
) -> Callable[[np.random.Generator], Arguments]:
    """A tree of hand-made links, the same for each row of targets."""

    def make(_rng: np.random.Generator) -> Arguments:
        tree = Tree.empty(len(targets), len(tokens))
        tree.tokens[:], tree.first_child[:], tree.next_sibling[:] = tokens, first_child, next_sibling
        tree.node_count[:] = len(tokens)
        return {"tree": tree, "target_tokens": np.array(targets, np.int32)}

    return make


def accept_random(**options: Any) -> Callable[[np.random.Generator], Arguments]:
    """Few tokens, so that random targets often agree."""

    def make(rng: np.random.Generator) -> Arguments:
        arguments = build(12, 6, 6, 40)(rng)
        arguments["token_ids"] %= 4
        targets = rng.integers(0, 4, (12, 41), dtype=np.int32)
        return {"tree": reference.tree_build(**arguments), "target_tokens": targets, **options}

    return make


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


PATHS = [[0, 1, 2], [0, 2, 5, 9], [0], [], [0, 1, 4, 15], [1, 2, 3], [5, 6, 7, 8, 9, 10], [15]]
PATH_LENS = [0, 1, 2, 3, 5, 6, 7, 8]
BAD_PATHS = [
    [0, 2, 3],  # sound
    [0, 2, 2],
    [0, 3, 2],
    [-1, 2, 3],
    [I32_MIN, 1, 2],
    [0, 2, 16],  # N
    [0, 2, I32_MAX],
    [0, 1, -1],
    [0, 1, 15],  # sound
]


def moves(
    paths: list[list[int]],
    lens: list[int],
    shape: tuple[int, ...],
    table: int = 0,
    *,
    dtype: str = "uint16",
    num_slots: int = 16,
    max_len: int = 8,
    accept_lens: list[int] | None = None,
    destination: bool = False,
    page: int | None = None,
    **options: Any,
) -> Callable[[np.random.Generator], Arguments]:
    """Given paths in a cache of `shape`, paged with `table` columns a request. `page` is put in some of its entries."""

    def make(rng: np.random.Generator) -> Arguments:
        accepted = Accepted.empty(len(paths), max_len, num_slots)
        for b, path in enumerate(paths):
            accepted.accept_index[b, : len(path)] = path
        accepted.accept_len[:] = [len(path) for path in paths] if accept_lens is None else accept_lens
        arguments: Arguments = {"accepted": accepted, "prefix_lens": i32(*lens)}
        if table:
            pages = rng.permutation(shape[-3])[: len(paths) * table].astype(np.int32).reshape(len(paths), table)
            if page is not None:
                pages[0, 0] = pages[1, 1] = pages[2, 2] = pages[3, 0] = page
            arguments["block_table"] = pages
        high = np.iinfo(np.dtype(dtype)).max
        arguments["cache"] = rng.integers(0, high, shape, dtype=np.dtype(dtype))
        if destination:
            arguments["out"] = rng.integers(0, high, shape, dtype=np.dtype(dtype))
        return {**arguments, **options}

    return make


def compact_bad(rng: np.random.Generator) -> Arguments:
    arguments = compact(16, [5] * 8, width=8)(rng)
    accepted = arguments["accepted"]
    accepted.accept_index[0, 2], accepted.accept_index[1, 0], accepted.accept_index[2, 4] = 0, -1, 65
    accepted.accept_len[3:5] = [-1, 17]
    arguments["prefix_lens"][5:7] = [-1, 205]
    arguments["num_live"] = i32(7)
    return arguments


LOWEST = {"float32": -3.4028235e38, "float16": -65504.0, "bfloat16": -3.3895314e38}


def hide(logits: Any, lowest: Any) -> None:
    """Six rows as people mask them: with large finite numbers instead of -inf."""
    shown = logits[:, [5, 17]].copy()
    logits[0], logits[1, ::2], logits[2], logits[5] = lowest, max(lowest, -1e10), max(lowest, -1e30), lowest
    logits[3, 100:200] = -lowest
    logits[4] *= min(-lowest / 100, 1e9)
    logits[:4, [5, 17]] = shown[:4]


def vocabulary(
    rows: int, vocab_size: int, dtype: str, kind: str = "smooth", **options: Any
) -> Callable[[np.random.Generator], Arguments]:
    """Logits; "ties" has few values, "bad" rows with NaN, infinities and nothing finite, "huge" large finite ones."""

    def make(rng: np.random.Generator) -> Arguments:
        logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
        if kind == "ties":
            logits = np.round(logits)
            logits[:, ::7] *= -0.0
        if kind == "bad":
            logits[0, vocab_size // 2], logits[1, vocab_size - 1], logits[2] = np.nan, np.inf, -np.inf
            logits[3, 1:], logits[4, ::2] = -np.inf, -np.inf
            logits[5, 0], logits[5, 1] = np.nan, np.inf
        if kind == "huge":
            hide(logits, np.float32(LOWEST[dtype]))
        return {"logits": as_dtype(logits, dtype), **options}

    return make


def shards(
    num_shards: int, rows: int, vocab_size: int, k: int, **options: Any
) -> Callable[[np.random.Generator], Arguments]:
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
        return {"logits": values, "token_ids": ids, "lse": lse, **options}

    return make


def sampling(
    rows: int, vocab_size: int, dtype: str, kind: str = "smooth", **options: Any
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
            **options,
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
    full: bool = False,
    **options: Any,
) -> Callable[[np.random.Generator], Arguments]:
    """Random queries and cache; page_size 0 is contiguous.

    `poison` plants NaN in every row that nobody may see; `full` makes every query a node (else counts vary).
    """

    def make(rng: np.random.Generator) -> Arguments:
        batch_size = len(lens)
        rows = max(lens) + queries + 3
        q = as_dtype(rng.normal(0, std, (batch_size, queries, heads, 576)).astype(np.float32), dtype)
        budgets = rng.integers(queries - 1 if full else 0, queries, batch_size, dtype=np.int32)
        draft = drafted_tree(rng, batch_size, queries - 1, budgets=budgets)
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
LIVE = {"none": i32(0), "two": i32(2), "all": i32(4), "above": i32(5), "most": i32(I32_MAX), "negative": i32(-1)}
BUILD_LENS = i32(0, -1, I32_MIN, I32_MAX, I32_MAX - 9, I32_MAX - 10, I32_MAX - 8)
SEEN = {"none": {}, "all": SPELLED, "middle": {0: 11, 2: 14}, "second_sibling": {0: 10, 1: 13, 4: 61}}
STOPS = {
    "first": [10],
    "middle": [12],
    "last_accepted": [16],
    "bonus": [60],
    "root_untested": [90],
    "not_met": [1, 2, 3],
    "two": [777, 16, 12],
    "off_path": [11, 13],
}
SIZES = (1, 2, 32, 33, 63, 64, 65, 129)
LIMITS = i32(I32_MIN, -1, 0, 1, 2, 3, 4, 5, I32_MAX)
RANDOM_LIMITS = i32(-1, 0, 1, 2, 3, 4, 5, 3, 2, 4, 5, 1)
FAULTY = len(BAD_LINKS) + 1
PAGES = {"minus1": -1, "num_pages": 24, "int32_min": I32_MIN, "int32_max": I32_MAX}
ROWS_BEYOND = [-1, -2, I32_MIN, I32_MAX, 26, 27, 28, 30]

CASES: tuple[Case, ...] = (
    Case("topk_logprobs", "small", vocabulary(4, 100, "float32", k=10)),
    Case("topk_logprobs", "ties_f16", vocabulary(6, 3000, "float16", "ties", k=64)),
    Case("topk_logprobs", "ties_bf16", vocabulary(6, 3000, "bfloat16", "ties", k=64)),
    Case("topk_logprobs", "bad_rows", vocabulary(8, 333, "float32", "bad", k=20)),
    Case("topk_logprobs", "huge_f32", vocabulary(6, 2500, "float32", "huge", k=8)),
    Case("topk_logprobs", "huge_f16", vocabulary(6, 2500, "float16", "huge", k=8)),
    Case("topk_logprobs", "huge_bf16_raw", vocabulary(6, 12000, "bfloat16", "huge", k=70, raw=True)),
    Case("topk_logprobs", "k_above_v", vocabulary(3, 7, "float32", k=12)),
    Case("topk_logprobs", "k1024", vocabulary(2, 5000, "bfloat16", "ties", k=1024)),
    Case("topk_logprobs", "raw_shard", vocabulary(8, 500, "float32", "bad", k=16, raw=True, id_offset=1500)),
    Case("topk_logprobs", "num_live", vocabulary(6, 64, "float32", k=4, num_live=i32(2), rows_per_request=2)),
    Case("topk_logprobs", "v163840_f32", vocabulary(15, 163840, "float32", k=64), bench=True),
    Case("topk_logprobs", "v163840_bf16", vocabulary(15, 163840, "bfloat16", k=64), bench=True),
    *(Case("topk_merge", f"shards{s}", shards(s, 6, 4096, 32), bench=s == 8) for s in (1, 2, 4, 8)),
    Case("topk_merge", "num_live", shards(3, 8, 300, 16, num_live=i32(3), rows_per_request=2)),
    Case("tree_build", "chain", build(2, 15, 1, 15, "smooth")),
    Case("tree_build", "underfull", build(2, 2, 2, 64)),
    Case("tree_build", "maxbudget", build(2, 15, 64, 64, "smooth")),
    Case("tree_build", "deep15", build(4, 15, 4, 64, "zeros")),
    Case("tree_build", "batch1", build(1, 15, 64, 64), bench=True),
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
    Case("tree_build", "no_candidates", build_worked([[]] * 3, 8)),
    *(Case("tree_build", f"budget{n}", build(1, 15, 16, n)) for n in (1, 63, 64, 65)),
    Case("tree_build", "deep_chain", build_worked([[0.0, -9.0]] * 64, 100)),
    Case("tree_build", "equal_ids", build_equal_ids),
    Case("tree_build", "nearly_equal_sums", build_worked([[-0.1, -0.2, -0.3]] * 3, 39)),
    Case("tree_build", "cancelled_low_bits", build_worked([[-1e8, -1e8], [-0.25, -0.5], [-1e-9, -2e-9]], 14)),
    Case("tree_build", "tiny", build_worked([[-1e-45, -2e-45, -1.2e-38], [-1e-45, -1e-40, -1e-38]], 12)),
    Case("tree_build", "below_float32", build_worked([[-3e38, -3.4e38]] * 4, 30)),
    Case("tree_build", "negative_zero", build_worked([[0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]], 12)),
    Case("tree_build", "faults", build_faults()),
    Case("tree_build", "faults_vocab1000", build_faults(vocab_size=1000)),
    # A fault counts only above the request's own depth, even where the tree never gets there.
    Case("tree_build", "faults_below_depth1", build_faults(max_depths=1)),
    Case("tree_build", "faults_budget1", build_faults(budgets=1)),
    Case("tree_build", "budgets", build(9, 4, 6, 20, budgets=i32(0, 1, 2, 19, 20, 21, -1, I32_MIN, I32_MAX))),
    Case("tree_build", "max_depths", build(8, 4, 6, 20, max_depths=i32(0, 1, 3, 4, 5, -1, I32_MIN, I32_MAX))),
    Case(
        "tree_build",
        "budgets_and_max_depths",
        build(6, 5, 4, 30, budgets=i32(30, 7, 99, 0, 3, 30), max_depths=i32(5, 2, 9, 5, 0, -3)),
    ),
    Case("tree_build", "prefix_lens", build(7, 9, 4, 20, prefix_lens=BUILD_LENS)),
    *(Case("tree_build", f"live_{name}", build(4, 3, 4, 10, num_live=live)) for name, live in LIVE.items()),
    Case("tree_build", "dead_garbage", build_dead),
    Case("tree_build", "worked1", build_worked([[-1, -1]] * 3, 6)),
    Case("tree_build", "worked2", build_worked([[0, 0, 0]] * 2, 6)),
    Case("tree_build", "worked3", build_worked([[-1, -2]] * 2, 5)),
    Case("tree_build", "trace64", build_trace(64, 64), bench=True),
    *(Case("tree_from_parents", f"chain{n}", from_parents(n, [n], "chain")) for n in SIZES),
    Case("tree_from_parents", "chains", from_parents(129, [129, 33, 64], "chain")),
    Case("tree_from_parents", "star", from_parents(65, [65], "star")),
    Case("tree_from_parents", "narrow", from_parents(66, [40, 54], "narrow")),
    Case("tree_from_parents", "wide", from_parents(66, [10, 66], "wide")),
    Case("tree_from_parents", "random", from_parents(65, [65, 1, 2, 63, 64, 0]), bench=True),
    Case("tree_from_parents", "n1025", from_parents(1025, [1025, 1000])),
    Case("tree_from_parents", "prefix_lens", from_parents(12, [12] * 7, prefix_lens=LENS_AT_LIMITS)),
    Case("tree_from_parents", "malformed", malformed_parents),
    Case("tree_from_parents", "node_counts", parents_counts),
    *(Case("tree_from_parents", f"live_{n}", from_parents(9, [7, 2, 9, 1], num_live=v)) for n, v in LIVE.items()),
    *(Case("tree_from_visibility", f"chain{n}", from_visibility(n, [n], "chain")) for n in SIZES),
    Case("tree_from_visibility", "star", from_visibility(65, [65], "star")),
    Case("tree_from_visibility", "narrow", from_visibility(66, [40, 54], "narrow")),
    Case("tree_from_visibility", "wide", from_visibility(66, [10, 66], "wide")),
    Case("tree_from_visibility", "random", from_visibility(65, [65, 1, 2, 63, 64, 0]), bench=True),
    Case("tree_from_visibility", "n129", from_visibility(129, [129, 128])),
    Case("tree_from_visibility", "prefix_lens", from_visibility(12, [12] * 7, prefix_lens=LENS_AT_LIMITS)),
    Case("tree_from_visibility", "malformed", malformed_masks),
    Case("tree_from_visibility", "malformed_far", malformed_far),
    Case("tree_from_visibility", "damaged", from_visibility(20, [20] * 12, damage=True)),
    Case("tree_from_visibility", "node_counts", visibility_counts),
    *(Case("tree_from_visibility", f"live_{n}", from_visibility(9, [7, 2, 9, 1], num_live=v)) for n, v in LIVE.items()),
    Case("tree_accept", "all", accept(4, 64, [99])),
    Case("tree_accept", "none", accept(4, 64, [0])),
    Case("tree_accept", "middle", accept(8, 64, [1, 2, 3, 4])),
    Case("tree_accept", "stop", accept_stop),
    Case("tree_accept", "cap", accept(6, 64, [5], max_tokens=i32(1, 2, 3, 0, -1, 100))),
    Case("tree_accept", "max_len", accept(4, 64, [8], max_len=3)),
    Case("tree_accept", "hostile", accept_hostile),
    *(Case("tree_accept", f"walk_{name}", walk(targets)) for name, targets in SEEN.items()),
    *(Case("tree_accept", f"stop_{name}", walk(SPELLED, stop_tokens=stops)) for name, stops in STOPS.items()),
    Case("tree_accept", "stop_token0", walk({0: 10, 1: 0}, stop_tokens=[0])),
    Case("tree_accept", "token0", walk({}, change=token_zero)),
    Case("tree_accept", "equal_siblings", walk({}, change=same_tokens)),
    Case("tree_accept", "root_alone", linked([90], [-1], [-1], [[0]])),
    *(Case("tree_accept", f"limits_len{m}", walk(SPELLED, 9, max_tokens=LIMITS, max_len=m)) for m in (1, 3, 4, 5, 11)),
    *(
        Case("tree_accept", f"limits_stop_len{m}", walk(SPELLED, 9, max_tokens=LIMITS, max_len=m, stop_tokens=[16]))
        for m in (1, 3, 4, 5, 11)
    ),
    Case("tree_accept", "negative_targets", walk(SPELLED, 6, negative_targets)),
    Case(
        "tree_accept",
        "negative_targets_limited",
        walk(SPELLED, 6, negative_targets, max_tokens=i32(1, 1, 2, 3, 9, 0), max_len=3),
    ),
    Case("tree_accept", "negative_token", walk({0: -1}, change=negative_token)),
    Case("tree_accept", "node_counts", walk(SPELLED, 9, odd_counts)),
    *(
        Case("tree_accept", f"live_{name}", walk(SPELLED, 4, num_live=live, max_tokens=i32(9, 0, 9, 9)))
        for name, live in LIVE.items()
    ),
    Case("tree_accept", "bad_links_root", walk({}, FAULTY, bad_links)),
    Case("tree_accept", "bad_links_whole", walk(SPELLED, FAULTY, bad_links)),
    Case("tree_accept", "bad_links_second", walk({0: 11, 2: 14, 5: 15, 6: 13}, FAULTY, bad_links)),
    Case("tree_accept", "bad_links_limited", walk(SPELLED, FAULTY, bad_links, max_tokens=np.full(FAULTY, 2, np.int32))),
    Case("tree_accept", "bad_links_stop", walk(SPELLED, FAULTY, bad_links, stop_tokens=[10])),
    Case("tree_accept", "bad_links_beyond", walk(SPELLED, FAULTY, bad_links_below)),
    # Siblings in any order are followed as given; the bound on hops is N.
    Case(
        "tree_accept",
        "descending_siblings",
        linked([1, 2, 3, 4], [3, -1, -1, -1], [-1, -1, 1, 2], [[2, 9, 9, 9], [9, 9, 9, 9]]),
    ),
    Case(
        "tree_accept",
        "sibling_cycle",
        linked([1, 2, 3, 4], [1, -1, -1, 3], [-1, 2, 3, 1], [[9, 9, 9, 9], [4, 9, 9, 9], [2, 9, 9, 9]]),
    ),
    # Lists that share slots: root 3-1-2, then 2: 4-3, five links in all. The sixth, to the match of 3, is one too many.
    Case(
        "tree_accept",
        "links_used_up",
        linked([90, 1, 2, 3, 4], [3, -1, 4, 4, -1], [-1, 2, -1, 1, 3], [[2, 9, 3, 4, 9], [2, 9, 9, 9, 9]]),
    ),
    Case("tree_accept", "random", accept_random()),
    Case("tree_accept", "random_limited", accept_random(max_tokens=RANDOM_LIMITS, stop_tokens=[3], max_len=4)),
    Case("tree_accept", "batch64", accept(64, 64, [0, 1, 3, 5, 9]), bench=True),
    Case("kv_compact", "page1", compact(1, [5, 0, 1, 7])),
    Case("kv_compact", "page16", compact(16, [5, 16, 9])),
    Case("kv_compact", "page48_odd_width", compact(48, [5, 3], width=37, dtype="float32")),
    Case("kv_compact", "page64_layers", compact(64, [5, 4, 6], layers=3)),
    Case("kv_compact", "contiguous", compact(0, [5, 16, 2], dtype="float16")),
    Case("kv_compact", "destination", compact(16, [5, 1, 0], layers=2, destination=True)),
    Case("kv_compact", "bad_paths", compact_bad),
    *(
        Case("kv_compact", name + "_to" * to, moves(PATHS, lens, shape, table, dtype=dtype, destination=to))
        for to in (False, True)
        for name, lens, shape, table, dtype in (
            ("paths_page1", PATH_LENS, (194, 1, 5), 24, "uint8"),
            ("paths_page3", PATH_LENS, (66, 3, 3), 8, "uint16"),
            ("paths_page16", PATH_LENS, (18, 16, 2), 2, "uint32"),
            ("paths_page64", [0, 39, 40, 41, 42, 43, 44, 45], (10, 64, 1), 1, "uint64"),
            ("paths_layers", PATH_LENS, (3, 50, 4, 3), 6, "uint16"),
        )
    ),
    *(Case("kv_compact", f"paths_{t}", moves(PATHS, PATH_LENS, (2, 8, 24, 1), dtype=t)) for t in ("uint8", "uint64")),
    Case("kv_compact", "across_pages", moves([[0, 3, 5, 9, 12]], [60], (3, 64, 2), 2)),
    Case("kv_compact", "shifted_by_one", moves([[0, *range(2, 32)]], [7], (1, 40, 2), num_slots=32, max_len=31)),
    Case("kv_compact", "faults", moves(BAD_PATHS, [10] * 9, (9, 30, 3))),
    Case("kv_compact", "faults_to", moves(BAD_PATHS, [10] * 9, (9, 30, 3), destination=True)),
    Case(
        "kv_compact",
        "accept_lens",
        moves([[0, 2, 3, 5, 6, 8, 9, 11]] * 8, [10] * 8, (8, 30, 3), accept_lens=[3, 8, 9, -1, I32_MIN, I32_MAX, 0, 4]),
    ),
    Case("kv_compact", "rows_beyond", moves([[0, 3]] * 8, ROWS_BEYOND, (8, 30, 3))),
    Case("kv_compact", "no_path", moves([[]] * 4, [-1, I32_MIN, I32_MAX, 30], (4, 30, 3))),
    Case("kv_compact", "rows_before", moves([[2, 3]] * 2, [-2, -1], (2, 30, 3))),
    Case(
        "kv_compact", "rows_beyond_table", moves([[0, 3]] * 8, [-1, 0, 8, 9, 10, 12, I32_MAX, I32_MIN], (24, 4, 3), 3)
    ),
    # The page is not met, met at a source (twice), at a target; other requests are sound.
    *(
        Case("kv_compact", f"page_id_{name}", moves([[0, 3]] * 8, [4, 1, 7, 3, 2, 2, 2, 2], (24, 4, 3), 3, page=page))
        for name, page in PAGES.items()
    ),
    *(
        Case("kv_compact", f"live_{name}", moves(BAD_PATHS, [10] * 9, (9, 30, 3), num_live=live))
        for name, live in LIVE.items()
    ),
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
    Case("verify_attn", "budget256", attention(257, 2, [100], dtype="float32", full=True)),
    Case("verify_attn", "budget1024", attention(1025, 1, [33], full=True)),
    Case("verify_attn", "one_head", attention(9, 1, [20])),
    Case("verify_attn", "heads128", attention(2, 128, [20])),
    Case("verify_attn", "clamped", attention_clamped),
    *(Case("verify_attn", f"real_layer{n}", attention_real(n)) for n in (0, 3, 7)),
    Case("verify_attn", "q65_h8_2048", attention(65, 8, [2048], dtype="float32", full=True), bench=True),
    Case("verify_attn", "q65_h8_2048_bf16", attention(65, 8, [2048], full=True), bench=True),
    Case("merge_attn_states", "f32", states(12, 8, 512, "float32", "float32"), bench=True),
    Case("merge_attn_states", "bf16_f32", states(12, 8, 512, "bfloat16", "float32")),
    Case("merge_attn_states", "base2_f16", states(12, 3, 7, "float16", "float16", lse_base="2", out_dtype=np.float32)),
    Case("merge_attn_states", "num_live", states(12, 2, 40, "float32", "float32", num_live=i32(3), rows_per_request=3)),
    Case("argmax", "ties", vocabulary(6, 3000, "bfloat16", "ties")),
    Case("argmax", "bad_rows", vocabulary(8, 333, "float32", "bad", id_offset=7)),
    Case("argmax", "num_live", vocabulary(6, 64, "float16", num_live=i32(1), rows_per_request=3)),
    Case("argmax", "v163840", vocabulary(65, 163840, "bfloat16"), bench=True),
    Case("sample", "temperatures", sampling(16, 1000, "float32")),
    Case("sample", "bad_rows", sampling(8, 333, "float16", "bad")),
    Case("sample", "huge", sampling(6, 2500, "float32", "huge", temperatures=np.full(6, 0.7, np.float32))),
    Case("sample", "id_offset", sampling(8, 500, "float32", id_offset=1_000_001)),
    Case("sample", "num_live", sampling(8, 64, "float32", num_live=i32(1), rows_per_request=4)),
    Case("sample", "v163840", sampling(8, 163840, "bfloat16", "bench"), bench=True),
    Case("step", "f32", step(4, "float32")),
    Case("step", "bf16", step(4, "bfloat16")),
)


def select(pattern: str | None) -> list[Case]:
    """Cases whose name contains the pattern; all without one."""
    return [case for case in CASES if pattern is None or pattern in case.name]
