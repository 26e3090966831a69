"""verify_attn at full size, beside FlashMLA and torch.

The tree is the trace's where there are 65 queries, else a chain; pages are shuffled over a cache whose memory is all
its own, though its rows repeat after DISTINCT_ROWS (no multiple of a page, so that pages differ). Results are checked
on a few queries and heads of a few requests, in float64; all others must be finite.

FlashMLA has no tree mask: its queries see the whole tree, which is no more work. It is checked against just that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import cases, ops
from .._floats import to_float32
from .._trace import Trace
from .._transfer import to_host
from ..cases import Results, as_dtype
from ..types import Tree
from . import check
from .bed import Bed, Target, Trial, repeated
from .peers import NoPeer, Peer
from .run import Row

PAGE_SIZE, WIDTH, VALUES = 64, 576, 512
DISTINCT_ROWS = 4099
TREE_QUERIES = 65
FLASH_MLA_RATIO = 2.5
"""To reach, as a geometric mean over the rows with a tree: so many times FlashMLA's time."""
DECODE_COPY_SHARE = 0.75
MOST_SCORES = 2**29
"""torch holds all scores, several times over, as float32."""


class Shape(NamedTuple):
    batch_size: int
    queries: int
    heads: int
    prefix: int

    @property
    def rows(self) -> int:
        """Of the prefix and the tree."""
        return self.prefix + self.queries

    @property
    def flop(self) -> int:
        """As if every query saw the whole tree."""
        return 2 * self.batch_size * self.heads * self.queries * self.rows * (WIDTH + VALUES)

    @property
    def name(self) -> str:
        return "verify_attn/" + "x".join(map(str, self))


SHAPES = (
    *(Shape(1, 65, 8, prefix) for prefix in (512, 2048, 8192, 32_768, 131_072, 262_144)),
    Shape(1, 65, 16, 8192),
    *(Shape(1, 65, 64, prefix) for prefix in (8192, 2048, 32_768, 131_072)),
    Shape(1, 8, 64, 8192),
    Shape(8, 65, 8, 8192),
    Shape(8, 65, 64, 8192),
    Shape(32, 65, 8, 8192),
    Shape(64, 65, 8, 4096),
    Shape(64, 65, 16, 4096),
    Shape(32, 1, 64, 8192),
    Shape(128, 1, 64, 8192),
)


@dataclass
class Inputs:
    """Of one call, on the host; the cache by its distinct rows."""

    shape: Shape
    q: Any
    """[B, Q, H, 576]"""
    block: Any
    """[DISTINCT_ROWS, 576]: row r of the cache, counting through all pages, is r % DISTINCT_ROWS of these."""
    table: Any
    """[B, pages of a request]"""
    prefix_lens: Any
    tree: Tree | None
    mask: Any
    """bool [B, Q, Q]"""

    @classmethod
    def of(cls, shape: Shape, trace: Trace) -> Inputs:
        rng = np.random.default_rng(list(shape))
        batch_size, queries, heads, prefix = shape
        q = rng.standard_normal((batch_size, queries, heads, WIDTH), np.float32)
        block = rng.standard_normal((DISTINCT_ROWS, WIDTH), np.float32)
        columns = -(-shape.rows // PAGE_SIZE)
        table = rng.permutation(batch_size * columns).astype(np.int32).reshape(batch_size, columns)
        lens = np.full(batch_size, prefix, np.int32)
        tree, mask = None, np.tile(np.tri(queries, dtype=bool), (batch_size, 1, 1))
        if queries == TREE_QUERIES:
            steps = slice(0, batch_size)
            rows = (trace.log_probs[steps], trace.token_ids[steps], trace.root_tokens[steps])
            tree = ops.tree_build(*rows, lens, queries - 1)
            octets = tree.visibility.view(np.uint8)
            mask = np.unpackbits(octets, axis=-1, bitorder="little")[..., :queries].astype(bool)
        return cls(shape, as_dtype(q, "bfloat16"), as_dtype(block, "bfloat16"), table, lens, tree, mask)

    @property
    def num_pages(self) -> int:
        return int(self.table.size)

    def keys(self, b: int) -> Any:
        """A request's rows as float32, the tree's last."""
        places = (self.table[b, :, None].astype(np.int64) * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
        return to_float32(self.block)[places[: self.shape.rows] % DISTINCT_ROWS]

    def picked(self) -> tuple[Any, ...]:
        """An index of what is checked of [B, Q, H, ...]: first, middle and last requests and queries, outer heads."""
        batch_size, queries, heads, _ = self.shape
        some = [sorted({0, size // 2, size - 1}) for size in (batch_size, queries)]
        return np.ix_(*some, sorted({0, heads - 1}))

    def expected(self, masked: bool) -> Results:
        """out and lse of what is picked, under the mask or as if everybody saw the whole tree."""
        picked = self.picked()
        requests, queries, heads = (np.ravel(places) for places in picked)
        out = np.zeros((len(requests), len(queries), len(heads), VALUES), np.float32)
        lse = np.zeros(out.shape[:3], np.float32)
        for i, b in enumerate(requests):
            visible = np.ones((len(queries), self.shape.rows), bool)
            if masked:
                visible[:, self.shape.prefix :] = self.mask[b, queries]
            q = to_float32(self.q[b][np.ix_(queries, heads)])
            out[i], lse[i] = attended(q, self.keys(int(b)), visible)
        return {"out": out, "lse": lse}


def attended(q: Any, keys: Any, visible: Any) -> tuple[Any, Any]:
    """[q, h, 576] over [S, 576] where visible [q, S], in float64: [q, h, 512] and [q, h]."""
    parts = range(0, len(keys), 2**14)  # of rows, so that float64 copies stay small
    flat = q.astype(np.float64).reshape(-1, WIDTH) * cases.KIMI_SCALE
    scores = np.concatenate([flat @ keys[i : i + 2**14].astype(np.float64).T for i in parts], axis=1)
    scores = np.where(visible[:, None], scores.reshape(*q.shape[:2], -1), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.zeros((*q.shape[:2], VALUES))
    for i in parts:
        out += weights[..., i : i + 2**14] @ keys[i : i + 2**14, :VALUES].astype(np.float64)
    return out / total, (top + np.log(total))[..., 0]


def attention(shape: Shape) -> Callable[[Bed], Trial]:
    def make(bed: Bed) -> Trial:
        inputs = Inputs.of(shape, bed.trace)
        cache = repeated(inputs.block, inputs.num_pages * PAGE_SIZE, bed.context.device)
        cache = cache.reshape(inputs.num_pages, PAGE_SIZE, WIDTH)
        q, table, lens = (bed.put(array) for array in (inputs.q, inputs.table, inputs.prefix_lens))
        call = ops.verify_attn.prepare(
            q,
            cache,
            bed.put(inputs.tree),
            lens,
            scale=cases.KIMI_SCALE,
            block_table=table,
            return_status=True,
            context=bed.context,
        )
        expected, picked = inputs.expected(masked=True), inputs.picked()
        arguments = {"q": inputs.q[picked]}

        def problem() -> str | None:
            out, lse, status = to_host(call.result)
            if status.any() or not np.isfinite(lse).all() or not np.isfinite(to_float32(out)).all():
                return "a status or a result that is not finite"
            return check.mismatch("verify_attn", arguments, {"out": out[picked], "lse": lse[picked]}, expected)

        def flash_mla() -> Peer:
            torch = bed.bench.torch
            assert torch is not None
            ends = torch.tensor(inputs.prefix_lens + shape.queries)
            run = torch.run_flash_mla(torch.shared(q), torch.shared(cache), torch.shared(table), ends, cases.KIMI_SCALE)
            unmasked = inputs.expected(masked=False)
            return Peer(run, lambda got: {"out": torch.numpy(got[0])[picked]}, unmasked)

        def sdpa() -> Peer:
            torch = bed.bench.torch
            assert torch is not None
            scores = shape.batch_size * shape.queries * shape.heads * shape.rows
            if scores > MOST_SCORES:
                raise NoPeer(f"torch would hold {scores / 1e6:,.0f} million scores, several times over")
            pages = torch.shared(cache)[torch.shared(table).long()]
            rows = pages.reshape(shape.batch_size, -1, WIDTH)[:, : shape.rows]
            visible = np.ones((shape.batch_size, shape.queries, shape.rows), bool)
            visible[..., shape.prefix :] = inputs.mask
            run = torch.run_attention(torch.shared(q), rows, torch.tensor(visible), cases.KIMI_SCALE)
            return Peer(run, lambda got: {"out": torch.numpy(got)[picked]})

        arrays = [q, table, lens, *call.result]
        if inputs.tree is not None:
            arrays += [inputs.tree.visibility, inputs.tree.node_count]
        size = sum(array.nbytes for array in arrays) + shape.batch_size * shape.rows * WIDTH * cache.dtype.itemsize
        peers = {"torch": sdpa}
        if bed.bench.torch is not None and bed.bench.torch.flash_mla is not None:
            peers = {"flash_mla": flash_mla, "torch": sdpa}  # next to ours: clocks drift
        return Trial([call.launch], problem, size, peers, expected, arguments, flop=shape.flop)

    return make


def against_flash_mla(rows: Sequence[Row]) -> Row | None:
    """Our time over FlashMLA's, the geometric mean of the rows with a tree; None without such rows."""
    trees = {shape.name for shape in SHAPES if shape.queries == TREE_QUERIES}
    peers = [row["peers"].get("flash_mla", {}) for row in rows if row["case"] in trees]
    ratios = [peer["ratio"] for peer in peers if "ratio" in peer]
    if not ratios:
        return None
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {"rows": len(ratios), "ratio": mean, "target": FLASH_MLA_RATIO, "met": mean <= FLASH_MLA_RATIO}


ATTENTION = tuple(
    Target(shape.name, attention(shape), copy_share=DECODE_COPY_SHARE if shape.queries == 1 else None)
    for shape in SHAPES
)
