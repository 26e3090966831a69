"""What users have without this library: numpy and torch versions a sensible person would write.

Doubts go in the peers' favour. What can be made ready beforehand is not timed: pages gathered into one array, masks
and row numbers built, 16-bit numbers widened to float32 for numpy, dead queries left out. Peers take ordinary input
only, and skip the checks of the real thing.

Attention: MLA has one KV head, so heads are folded into the queries, one matrix product for all of them, and torch's
scaled_dot_product_attention gets the boolean mask repeated over heads. (With K and V expanded over the heads instead
it took twice as long: 32 against 16 ms at 65 queries, 8 heads, 2,113 rows in float32, on two cores of an AMD EPYC
machine with torch 2.13.)
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from .._cuda import DeviceArray
from .._floats import float_name, to_float32
from ..cases import Arguments, Results
from ..types import Tree
from .gpu import Clock
from .measure import Timing
from .model import seen_rows


@dataclass(frozen=True)
class Peer:
    run: Callable[[], Any]
    results: Callable[[Any], Results]
    """What in run's result must agree with the reference; nothing where it draws its own random numbers."""
    expected: Results | None = None
    """What it must agree with instead, where the peer means something else."""


Maker = Callable[[Arguments, Results], Peer]
"""Makes a peer for arguments, given what the reference says of them. May raise NoPeer."""


class NoPeer(Exception):
    """Why others' code is not run on such arguments."""


ARGUMENTS = {
    "topk_logprobs": {"logits", "k"},
    "topk_merge": {"logits", "token_ids", "lse"},
    "tree_from_parents": {"tokens", "parents", "node_counts", "prefix_lens"},
    "tree_from_visibility": {"visibility", "tokens", "node_counts", "prefix_lens"},
    "verify_attn": {"q", "kv_cache", "tree", "prefix_lens", "scale", "block_table", "kv_starts", "out_dtype"},
    "merge_attn_states": {"out_a", "lse_a", "out_b", "lse_b"},
    "argmax": {"logits"},
    "sample": {"logits", "temperatures", "seed", "positions", "request_ids"},
    "tree_accept": {"tree", "target_tokens"},
    "kv_compact": {"cache", "accepted", "prefix_lens", "block_table", "out"},
}
"""What peers understand; a case with another argument has none. tree_build's, the reference, takes all."""


def usable(operation: str, arguments: Arguments) -> bool:
    return arguments.keys() <= ARGUMENTS.get(operation, arguments.keys())


# ---- Rows of logits ----------------------------------------------------------------------------------------


def settle_ties(logits: Any, ids: Any, expected_ids: Any) -> Any:
    """ids with those replaced by the expected whose logits are the same: peers may break ties as they like."""
    here, there = (np.take_along_axis(logits, np.maximum(i, 0).astype(np.int64), axis=-1) for i in (ids, expected_ids))
    return np.where(here == there, expected_ids, ids).astype(np.int32)


def topk_results(logits: Any, expected: Results) -> Callable[[Any], Results]:
    def results(got: Any) -> Results:
        log_probs, ids = (np.asarray(values) for values in got)
        k = log_probs.shape[-1]
        if k < expected["log_probs"].shape[-1]:  # K > V: padding
            return {}
        return {"log_probs": log_probs, "token_ids": settle_ties(logits, ids, expected["token_ids"])}

    return results


def numpy_topk(values: Any, k: int) -> tuple[Any, Any]:
    """The k largest of each row, descending, and where they are."""
    k = min(k, values.shape[-1])
    places = np.argpartition(values, values.shape[-1] - k, axis=-1)[..., values.shape[-1] - k :]
    best = np.take_along_axis(values, places, axis=-1)
    order = np.argsort(-best, axis=-1)
    return np.take_along_axis(best, order, axis=-1), np.take_along_axis(places, order, axis=-1)


def numpy_topk_logprobs(a: Arguments, expected: Results) -> Peer:
    logits, k = to_float32(a["logits"]), a["k"]

    def run() -> Any:
        best, ids = numpy_topk(logits, k)
        largest = logits.max(axis=-1, keepdims=True)
        lse = largest + np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
        return np.minimum(best - lse, 0), ids

    return Peer(run, topk_results(logits, expected))


def merge_results(a: Arguments, expected: Results) -> Callable[[Any], Results]:
    logits, ids = (np.moveaxis(a[name], 0, -2).reshape(*a[name].shape[1:-1], -1) for name in ("logits", "token_ids"))

    def results(got: Any) -> Results:
        log_probs, places = (np.asarray(values) for values in got)
        wanted = expected["token_ids"]
        # Where an id of the reference lies in the joined shards, so that ties can be settled by place.
        spots = (ids[..., None, :] == wanted[..., :, None]).argmax(axis=-1)
        settled = settle_ties(logits, places, spots)
        return {"log_probs": log_probs, "token_ids": np.take_along_axis(ids, settled.astype(np.int64), axis=-1)}

    return results


def numpy_topk_merge(a: Arguments, expected: Results) -> Peer:
    logits, lses = a["logits"], a["lse"]

    def run() -> Any:
        joined = np.moveaxis(logits, 0, -2).reshape(*logits.shape[1:-1], -1)
        best, places = numpy_topk(joined, logits.shape[-1])
        lse = np.logaddexp.reduce(lses, axis=0)
        return np.minimum(best - lse[..., None].astype(np.float32), 0), places

    return Peer(run, merge_results(a, expected))


def argmax_results(logits: Any, expected: Results) -> Callable[[Any], Results]:
    def results(got: Any) -> Results:
        return {"tokens": settle_ties(logits, np.asarray(got)[..., None], expected["tokens"][..., None])[..., 0]}

    return results


def numpy_argmax(a: Arguments, expected: Results) -> Peer:
    logits = to_float32(a["logits"])
    return Peer(lambda: logits.argmax(axis=-1), argmax_results(logits, expected))


def numpy_sample(a: Arguments, _expected: Results) -> Peer:
    """Gumbel-max with numpy's own noise: a Gumbel number is -log of an exponential one."""
    logits, heat = to_float32(a["logits"]), np.asarray(a["temperatures"], np.float32)
    rng = np.random.default_rng(0)

    def run() -> Any:
        noise = np.log(rng.standard_exponential(logits.shape, dtype=np.float32))
        return (logits / heat[..., None] - noise).argmax(axis=-1)

    return Peer(run, lambda _got: {})


# ---- Attention ---------------------------------------------------------------------------------------------


def gathered(a: Arguments) -> tuple[Any, Any, Any]:
    """Live queries [B, Q, H, 576], the rows they see [B, S, 576] and who sees what, bool [B, Q, S]; float32."""
    cache, table = a["kv_cache"], a.get("block_table")
    seen = list(seen_rows(a))
    queries = max((len(s.mask) for s in seen), default=0)
    size = max((s.prefix_len - s.start + len(s.mask) for s in seen), default=0)
    rows = np.zeros((len(seen), size, cache.shape[-1]), np.float32)
    visible = np.zeros((len(seen), queries, size), bool)
    for s in seen:
        count, prefix = len(s.mask), s.prefix_len - s.start
        logical = np.arange(s.start, s.prefix_len + count)
        page = np.full(len(logical), s.request) if table is None else table[s.request, logical // cache.shape[1]]
        rows[s.request, : len(logical)] = to_float32(cache[page, logical % cache.shape[1]])
        visible[s.request, :count, :prefix] = True
        visible[s.request, :count, prefix : prefix + count] = s.mask
    return to_float32(a["q"])[:, :queries], rows, visible


def attention_results(a: Arguments, expected: Results) -> Callable[[Any], Results]:
    def results(got: Any) -> Results:
        """With the queries that see nothing as the reference has them."""
        out = expected["out"].copy()
        sees = np.isfinite(expected["lse"])[:, : got.shape[1]]
        out[:, : got.shape[1]][sees] = to_float32(got)[sees]
        return {"out": out}

    return results


def flash_mla_lens(a: Arguments) -> Any:
    """The rows of each request's prefix and tree; NoPeer where FlashMLA has not what the case asks for."""
    if float_name(a["q"].dtype) != "bfloat16" or a.get("block_table") is None or a["kv_cache"].shape[1] != 64:
        raise NoPeer("FlashMLA wants bfloat16 and pages of 64 rows")
    if a.get("kv_starts") is not None or a.get("out_dtype") is not None:
        raise NoPeer("FlashMLA has no window and no other type of out")
    lens = [s.prefix_len + len(s.mask) for s in seen_rows(a)]
    if 0 in lens:
        raise NoPeer("FlashMLA wants some row in each request")
    return np.array(lens, np.int32)


def numpy_verify_attn(a: Arguments, expected: Results) -> Peer:
    q, rows, visible = gathered(a)
    batch_size, queries, heads, width = q.shape
    scale = np.float32(a["scale"])
    out = np.zeros((batch_size, queries, heads, 512), np.float32)

    def run() -> Any:
        scores = (q * scale).reshape(batch_size, queries * heads, width) @ rows.transpose(0, 2, 1)
        scores = scores.reshape(batch_size, queries, heads, -1)
        np.copyto(scores, -np.inf, where=~visible[:, :, None])
        largest = scores.max(axis=-1, keepdims=True, initial=np.float32(-1e30))  # finite also where nothing is seen
        np.exp(np.subtract(scores, largest, out=scores), out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        weighed = scores.reshape(batch_size, queries * heads, -1) @ rows[..., :512]
        np.divide(weighed.reshape(out.shape), total, out=out, where=total > 0)
        return out

    return Peer(run, attention_results(a, expected))


def merged_results(a: Arguments, expected: Results) -> Callable[[Any], Results]:
    def results(got: Any) -> Results:
        """Without the empty and the broken rows."""
        out, lse = (np.asarray(values).copy() for values in got)
        odd = ~np.isfinite(a["lse_a"]) | ~np.isfinite(a["lse_b"]) | ~np.isfinite(expected["out"]).all(axis=-1)
        out[odd], lse[odd] = expected["out"][odd], expected["lse"][odd]
        return {"out": out, "lse": lse}

    return results


def numpy_merge_attn_states(a: Arguments, expected: Results) -> Peer:
    out_a, out_b, lse_a, lse_b = (to_float32(a[name]) for name in ("out_a", "out_b", "lse_a", "lse_b"))

    def run() -> Any:
        with np.errstate(invalid="ignore"):
            lse = np.logaddexp(lse_a, lse_b)
            return np.exp(lse_a - lse)[..., None] * out_a + np.exp(lse_b - lse)[..., None] * out_b, lse

    return Peer(run, merged_results(a, expected))


# ---- Trees -------------------------------------------------------------------------------------------------


def numpy_tree_build(a: Arguments, _expected: Results) -> Peer:
    """The published host heap: Python's heapq."""
    return Peer(lambda: reference.tree_build(**a), tree_results)


TREE_FIELDS = ("tokens", "parents", "first_child", "next_sibling", "depths", "positions", "visibility", "node_count")


def tree_results(tree: Tree) -> Results:
    return {name: getattr(tree, name) for name in (*TREE_FIELDS, "log_probs")}


def laid_out(tokens: Any, parents: Any, visible: Any, counts: Any, prefix_lens: Any) -> Tree:
    """The layout from parents and ancestor masks [B, N, N], a batch at a time."""
    batch_size, num_slots = tokens.shape
    live = np.arange(num_slots) < counts[:, None]
    tree = Tree.empty(batch_size, num_slots)
    tree.node_count[:] = counts
    tree.tokens[live], tree.parents[live], tree.log_probs[live] = tokens[live], parents[live], 0
    visible &= live[:, :, None] & live[:, None, :]
    tree.depths[live] = visible.sum(axis=2)[live] - 1
    tree.positions[live] = (tree.depths + prefix_lens[:, None])[live]
    octets = np.zeros((*tree.visibility.shape[:2], tree.visibility.shape[2] * 8), np.uint8)
    octets[..., : (num_slots + 7) // 8] = np.packbits(visible, axis=2, bitorder="little")
    tree.visibility[:] = octets.view("<u8")
    # Slots sorted by parent, in slot order: neighbours with the same parent are siblings.
    by = np.where(live, parents, num_slots)
    order = np.argsort(by, axis=1, kind="stable")
    by = np.take_along_axis(by, order, axis=1)
    real, same = (by >= 0) & (by < num_slots), by[:, 1:] == by[:, :-1]
    b, i = np.nonzero(real[:, 1:] & same)
    tree.next_sibling[b, order[b, i]] = order[b, i + 1]
    real[:, 1:] &= ~same
    b, i = np.nonzero(real)
    tree.first_child[b, by[b, i]] = order[b, i]
    return tree


def numpy_tree_from_parents(a: Arguments, _expected: Results) -> Peer:
    tokens, parents, counts, lens = (
        a["tokens"],
        a["parents"],
        np.asarray(a["node_counts"]),
        np.asarray(a["prefix_lens"]),
    )
    requests = np.arange(len(tokens))

    def run() -> Tree:
        num_slots = tokens.shape[1]
        visible = np.zeros((*tokens.shape, num_slots), bool)
        for slot in range(num_slots):
            if slot:
                visible[:, slot] = visible[requests, parents[:, slot].clip(0, slot - 1)]
            visible[:, slot, slot] = True
        return laid_out(tokens, parents, visible, counts, lens)

    return Peer(run, tree_results)


def numpy_tree_from_visibility(a: Arguments, _expected: Results) -> Peer:
    mask, tokens = a["visibility"], a["tokens"]
    counts, lens = np.asarray(a["node_counts"]), np.asarray(a["prefix_lens"])

    def run() -> Tree:
        num_slots = tokens.shape[1]
        above = np.tril(mask, -1)
        parents = num_slots - 1 - above[:, :, ::-1].argmax(axis=2)  # the highest slot seen, but itself
        parents[~above.any(axis=2)] = -1
        return laid_out(tokens, parents, mask.copy(), counts, lens)

    return Peer(run, tree_results)


def numpy_tree_accept(a: Arguments, _expected: Results) -> Peer:
    """All requests a step at a time."""
    tree, targets = a["tree"], a["target_tokens"]

    def run() -> Any:
        batch_size, num_slots = tree.tokens.shape
        requests, live = np.arange(batch_size), np.arange(num_slots) < tree.node_count[:, None]
        tokens, path = np.full((2, batch_size, num_slots), -1, np.int32)
        slot, walking = np.zeros(batch_size, np.int64), tree.node_count > 0
        count = np.zeros(batch_size, np.int32)
        for step in range(num_slots):
            target = targets[requests, slot]
            tokens[walking, step], path[walking, step] = target[walking], slot[walking]
            count += walking
            matches = (tree.parents == slot[:, None]) & (tree.tokens == target[:, None]) & live
            child = matches.argmax(axis=1)
            walking = walking & matches[requests, child]
            if not walking.any():
                break
            slot = np.where(walking, child, slot)
        return tokens, path, count

    return Peer(run, lambda got: dict(zip(("tokens", "accept_index", "accept_len"), got, strict=True)))


# ---- The cache ---------------------------------------------------------------------------------------------


def moved_rows(a: Arguments, expected: Results) -> tuple[Any, Any]:
    """Numbers of the rows to move, as rows of [pages * page_size]: from, to."""
    accepted, table, page_size = a["accepted"], a.get("block_table"), a["cache"].shape[-2]
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for b in np.flatnonzero(expected["status"] == 0).tolist():
        path = accepted.accept_index[b, : accepted.accept_len[b]].astype(np.int64)
        kept = np.arange(len(path))
        moving = np.ones(len(path), bool) if a.get("out") is not None else path != kept
        for rows, places in ((path, sources), (kept, targets)):
            logical = int(a["prefix_lens"][b]) + rows[moving]
            pages = b if table is None else table[b, logical // page_size].astype(np.int64)
            places.append(pages * page_size + logical % page_size)
    return np.concatenate(sources), np.concatenate(targets)


def as_bits(array: Any) -> Any:
    """Plain integers: bfloat16 is a tagged dtype in numpy."""
    return array.view(f"i{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else array


def flat_rows(cache: Any) -> Any:
    """[layers, pages * page_size, width]"""
    return as_bits(cache).reshape(-1, cache.shape[-3] * cache.shape[-2], cache.shape[-1])


def numpy_kv_compact(a: Arguments, expected: Results) -> Peer:
    name = "cache" if a.get("out") is None else "out"
    written = a[name].copy()
    read = written if name == "cache" else a["cache"]
    sources, targets = moved_rows(a, expected)
    from_rows, to_rows = flat_rows(read), flat_rows(written)

    def run() -> Any:
        to_rows[:, targets] = from_rows[:, sources]
        return written

    return Peer(run, lambda got: {name: got})


NUMPY: dict[str, Maker] = {
    "topk_logprobs": numpy_topk_logprobs,
    "topk_merge": numpy_topk_merge,
    "tree_build": numpy_tree_build,
    "tree_from_parents": numpy_tree_from_parents,
    "tree_from_visibility": numpy_tree_from_visibility,
    "verify_attn": numpy_verify_attn,
    "merge_attn_states": numpy_merge_attn_states,
    "argmax": numpy_argmax,
    "sample": numpy_sample,
    "tree_accept": numpy_tree_accept,
    "kv_compact": numpy_kv_compact,
}


# ---- torch -------------------------------------------------------------------------------------------------


class Torch:
    """torch's versions, where it has the operation, on the CPU. Raises ImportError without torch."""

    device = "cpu"

    def __init__(self, threads: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(threads)
        self.version = str(self.torch.__version__)
        self.makers: dict[str, Maker] = {
            "topk_logprobs": self.topk_logprobs,
            "topk_merge": self.topk_merge,
            "verify_attn": self.verify_attn,
            "merge_attn_states": self.merge_attn_states,
            "argmax": self.argmax,
            "sample": self.sample,
            "kv_compact": self.kv_compact,
        }

    def tensor(self, array: Any) -> Any:
        """On the same memory; for a GPU a copy."""
        if array.dtype.names is None and array.dtype.name != "bfloat16":
            tensor = self.torch.from_numpy(array)
        else:
            tensor = self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return tensor.to(self.device)

    def peer(self, run: Callable[[], Any], results: Callable[[Any], Results]) -> Peer:
        return Peer(run, lambda got: results(self.numpy(got)))

    def numpy(self, got: Any) -> Any:
        """A tensor, or a tuple of them, as numpy arrays; bfloat16 widened."""
        if isinstance(got, tuple):
            return tuple(self.numpy(tensor) for tensor in got)
        return (got.float() if got.dtype == self.torch.bfloat16 else got).cpu().numpy()

    def topk_logprobs(self, a: Arguments, expected: Results) -> Peer:
        run = self.run_topk(self.tensor(a["logits"]), min(a["k"], a["logits"].shape[-1]))
        return self.peer(run, topk_results(to_float32(a["logits"]), expected))

    def run_topk(self, logits: Any, k: int) -> Callable[[], Any]:
        torch = self.torch

        def run() -> Any:
            best, ids = torch.topk(logits, k)
            return (best.float() - torch.logsumexp(logits.float(), -1, keepdim=True)).clamp(max=0), ids

        return run

    def topk_merge(self, a: Arguments, expected: Results) -> Peer:
        torch, logits, lse = self.torch, self.tensor(a["logits"]), self.tensor(a["lse"])

        def run() -> Any:
            best, places = torch.topk(logits.movedim(0, -2).flatten(-2), logits.shape[-1])
            return (best - torch.logsumexp(lse, 0)[..., None].float()).clamp(max=0), places

        return self.peer(run, merge_results(a, expected))

    def argmax(self, a: Arguments, expected: Results) -> Peer:
        logits = self.tensor(a["logits"])
        return self.peer(lambda: logits.argmax(-1), argmax_results(to_float32(a["logits"]), expected))

    def sample(self, a: Arguments, _expected: Results) -> Peer:
        heat = self.tensor(np.asarray(a["temperatures"], np.float32))[..., None]
        return self.peer(self.run_sample(self.tensor(a["logits"]), heat), lambda _got: {})

    def run_sample(self, logits: Any, heat: Any) -> Callable[[], Any]:
        return lambda: self.torch.multinomial(self.torch.softmax(logits.float() / heat, -1), 1)

    def verify_attn(self, a: Arguments, expected: Results) -> Peer:
        q, rows, visible = gathered(a)
        dtype = self.tensor(a["q"][:0]).dtype
        tensors = self.tensor(q).to(dtype), self.tensor(rows).to(dtype), self.tensor(visible)
        return self.peer(self.run_attention(*tensors, float(a["scale"])), attention_results(a, expected))

    def run_attention(self, q: Any, rows: Any, visible: Any, scale: float) -> Callable[[], Any]:
        """[B, Q, H, 576], [B, S, 576] and bool [B, Q, S], to [B, Q, H, 512]."""
        batch_size, queries, heads, width = q.shape
        folded, keys = q.reshape(batch_size, 1, queries * heads, width), rows[:, None]
        mask = visible.repeat_interleave(heads, dim=1)[:, None]
        attend = self.torch.nn.functional.scaled_dot_product_attention

        def run() -> Any:
            out = attend(folded, keys, keys[..., :512], attn_mask=mask, scale=scale)
            return out.reshape(batch_size, queries, heads, 512)

        return run

    def merge_attn_states(self, a: Arguments, expected: Results) -> Peer:
        torch = self.torch
        out_a, out_b, lse_a, lse_b = (self.tensor(a[name]) for name in ("out_a", "out_b", "lse_a", "lse_b"))

        def run() -> Any:
            lse = torch.logaddexp(lse_a, lse_b)
            return torch.exp(lse_a - lse)[..., None] * out_a + torch.exp(lse_b - lse)[..., None] * out_b, lse

        return self.peer(run, merged_results(a, expected))

    def kv_compact(self, a: Arguments, expected: Results) -> Peer:
        name = "cache" if a.get("out") is None else "out"
        sources, targets = (self.tensor(rows) for rows in moved_rows(a, expected))
        to_rows = self.tensor(flat_rows(a[name].copy()))
        from_rows = to_rows if name == "cache" else self.tensor(flat_rows(a["cache"]))

        def run() -> Any:
            return to_rows.index_copy_(1, targets, from_rows.index_select(1, sources))

        return self.peer(run, lambda got: {name: got.view(a[name].dtype).reshape(a[name].shape)})


class TorchOnGpu(Torch):
    """On a GPU. Raises ImportError also where torch cannot use it."""

    def __init__(self, threads: int, ordinal: int) -> None:
        super().__init__(threads)
        if not self.torch.cuda.is_available():
            raise ImportError("torch has no CUDA device")
        self.device = f"cuda:{ordinal}"
        self.stream = self.torch.cuda.Stream(self.device)
        self.flash_mla: Any = None
        with contextlib.suppress(ImportError):
            self.flash_mla = importlib.import_module("flash_mla")

    def shared(self, array: DeviceArray) -> Any:
        """On the same memory."""
        plain = array.dtype.names is None
        tensor = self.torch.as_tensor(array if plain else array.view(np.int16), device=self.device)
        return tensor if plain else tensor.view(self.torch.bfloat16)

    def run_flash_mla(self, q: Any, pages: Any, table: Any, lens: Any, scale: float) -> Callable[[], Any]:
        """FlashMLA, to (out [B, Q, H, 512], its lse): every query sees all `lens` rows, FlashMLA having no tree mask.

        It plans its work beforehand; that is not timed.
        """
        flash, pages = self.flash_mla, pages[:, :, None]  # one KV head
        plan, splits = flash.get_mla_metadata(lens, q.shape[1] * q.shape[2], 1)
        return lambda: flash.flash_mla_with_kvcache(
            q, pages, table, lens, 512, plan, splits, softmax_scale=scale, causal=False
        )

    def flash_mla_verify_attn(self, a: Arguments, expected: Results) -> Peer:
        """Checked only where the mask hides nothing."""
        lens = flash_mla_lens(a)
        q, pages = self.tensor(a["q"]), self.tensor(a["kv_cache"])
        table, counts = self.tensor(a["block_table"]), self.tensor(lens)
        hides = any(not s.mask.all() or len(s.mask) < q.shape[1] for s in seen_rows(a))
        results = attention_results(a, expected)
        run = self.run_flash_mla(q, pages, table, counts, float(a["scale"]))
        return self.peer(run, lambda got: {} if hides else results(got[0]))

    def run_sample(self, logits: Any, heat: Any) -> Callable[[], Any]:
        """Gumbel-max, as multinomial looks at its numbers on the host."""
        torch = self.torch

        def run() -> Any:
            noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
            return (logits.float() / heat - noise).argmax(-1)

        return run

    def capture(self, run: Callable[[], Any], times: int) -> Callable[[], None]:
        """A graph of so many calls: what replays it, on this object's stream."""
        torch = self.torch
        with torch.cuda.stream(self.stream):
            for _ in range(2):  # what the first call loads and allocates may not come up in a capture
                run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(times):
                run()

        def replay() -> None:
            with torch.cuda.stream(self.stream):
                graph.replay()

        return replay

    def time(self, clock: Clock, run: Callable[[], Any]) -> Timing:
        """As our own calls are timed, hot."""
        self.torch.cuda.synchronize()
        timing = clock.hot_graph(lambda times: self.capture(run, times), self.stream)[0]
        self.torch.cuda.empty_cache()  # graphs have memory of their own, which ours would have to do without
        return timing

    def bf16_flop_per_s(self, clock: Clock, size: int = 8192) -> float:
        a, b = (self.torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        return 2 * size**3 / self.time(clock, lambda: a @ b).median
