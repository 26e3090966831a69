"""Bad arguments: a KdtError that names the argument, with the right status, and nothing written."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from conftest import TREE_FIELDS, vector

import kdtree_engine as kdt
from kdtree_engine import Status

F32, I32 = np.float32, np.int32
BAD = Status.INVALID_ARGUMENT


def build_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "log_probs": np.full((2, 3, 4), -1, F32),
        "token_ids": np.zeros((2, 3, 4), I32),
        "root_tokens": vector(1, 2),
        "prefix_lens": vector(3, 4),
        "budget": 5,
        **changes,
    }


def with_out(**changes: Any) -> kdt.Tree:
    tree = kdt.Tree.empty(2, 6)
    for name, value in changes.items():
        setattr(tree, name, value)
    return tree


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


SHARED = np.full((2, 6), 7, I32)
ROWS = np.full((2, 3, 4), -1, F32)


@pytest.mark.parametrize(
    ("changes", "names", "status"),
    [
        ({"log_probs": np.full((2, 3, 4), -1.0)}, "'log_probs'.*float32.*float64", BAD),
        ({"log_probs": np.full((2, 3, 4), -1, ">f4")}, "'log_probs'.*float32", BAD),
        ({"log_probs": [[1.0]]}, "'log_probs'.*numpy array, got list", BAD),
        ({"log_probs": None}, "'log_probs'.*NoneType", BAD),
        ({"log_probs": np.full((3, 4), -1, F32)}, r"'log_probs'.*\[any, any, any\].*\[3, 4\]", Status.SHAPE),
        ({"log_probs": np.full((2, 3, 8), -1, F32)[:, :, ::2]}, "'log_probs'.*stride", Status.STRIDE),
        ({"log_probs": np.full((2, 3, 4), -1, F32)[::-1]}, "'log_probs'.*stride", Status.STRIDE),
        ({"log_probs": np.broadcast_to(np.full((1, 3, 4), -1, F32), (2, 3, 4))}, "'log_probs'.*stride", Status.STRIDE),
        ({"log_probs": np.ma.masked_array(np.full((2, 3, 4), -1, F32))}, "MaskedArray", BAD),
        ({"log_probs": np.broadcast_to(F32(0), (1, 1, 2**32 + 2))}, r"'log_probs'.*2\^31", Status.LIMIT),
        ({"context": "cpu"}, "'context'.*Context or None, got str", BAD),
        ({"context": 0}, "'context'.*got int", BAD),
        ({"token_ids": np.zeros((2, 3, 4), np.int64)}, "'token_ids'.*int32.*int64", BAD),
        ({"token_ids": np.zeros((2, 3, 5), I32)}, r"'token_ids'.*\[2, 3, 4\].*\[2, 3, 5\]", Status.SHAPE),
        ({"root_tokens": vector(1)}, r"'root_tokens'.*\[2\].*\[1\]", Status.SHAPE),
        ({"root_tokens": [1, 2**31]}, r"'root_tokens\[1\]'.*32-bit.*2147483648", BAD),
        ({"root_tokens": [1, "x"]}, r"'root_tokens\[1\]'.*integer, got str", BAD),
        ({"root_tokens": [1, 2.0]}, r"'root_tokens\[1\]'.*integer, got float", BAD),
        ({"prefix_lens": np.zeros(2, np.int64)}, "'prefix_lens'.*int64", BAD),
        ({"prefix_lens": np.zeros(4, I32)[::2]}, "'prefix_lens'.*stride", Status.STRIDE),
        ({"budget": -1}, r"'budget'.*0\.\.1024, got -1", Status.LIMIT),
        ({"budget": 1025}, r"'budget'.*0\.\.1024, got 1025", Status.LIMIT),
        ({"budget": 2**40}, "'budget'", Status.LIMIT),
        ({"budget": 5.0}, "'budget'.*integer, got float", BAD),
        ({"budget": None}, "'budget'", BAD),
        ({"budgets": vector(1)}, "'budgets'", Status.SHAPE),
        ({"max_depths": vector(1, 2, 3)}, "'max_depths'", Status.SHAPE),
        ({"vocab_size": 0}, "'vocab_size'", BAD),
        ({"vocab_size": 2**31}, "'vocab_size'", BAD),
        ({"num_live": 2**31}, "'num_live'", BAD),
        ({"num_live": vector(1, 2)}, "'num_live'", Status.SHAPE),
        ({"log_probs": np.zeros((2, 65, 1), F32), "token_ids": np.zeros((2, 65, 1), I32)}, "'depth'.*64", Status.LIMIT),
        (
            {"log_probs": np.zeros((2, 1, 1025), F32), "token_ids": np.zeros((2, 1, 1025), I32)},
            "'num_candidates'.*1024",
            Status.LIMIT,
        ),
        ({"out": 3}, "'out'.*Tree, got int", BAD),
        ({"out": kdt.Tree.empty(2, 7)}, r"'out.tokens'.*\[2, 6\].*\[2, 7\]", Status.SHAPE),
        ({"out": with_out(depths=np.zeros((2, 6), np.int64))}, "'out.depths'.*int64", BAD),
        ({"out": with_out(status=np.zeros(3, I32))}, "'out.status'", Status.SHAPE),
        (
            {"out": with_out(tokens=read_only(np.zeros((2, 6), I32)))},
            "'out.tokens'.*read-only",
            BAD,
        ),
        ({"out": with_out(parents=np.zeros((2, 9), I32)[:, :6])}, "'out.parents'.*batch stride", Status.STRIDE),
        ({"out": with_out(tokens=SHARED, parents=SHARED)}, "tree.(tokens|parents)'.*overlaps", Status.OVERLAP),
        (
            {"log_probs": ROWS, "out": with_out(log_probs=ROWS.reshape(2, 12)[:, :6])},
            "batch stride|overlaps",
            None,
        ),
        ({"workspace": np.zeros(3, np.uint8)}, "'workspace'.*got 3", Status.WORKSPACE),
        ({"workspace": np.zeros(99999)}, "'workspace'.*uint8", BAD),
    ],
)
def test_tree_build(changes: dict[str, Any], names: str, status: Status | None) -> None:
    with pytest.raises(ValueError, match=names) as caught:
        kdt.tree_build(**build_arguments(**changes))
    assert isinstance(caught.value, kdt.KdtError)
    if status is not None:
        assert caught.value.status == status


def test_nothing_is_written_by_a_failing_call() -> None:
    out = kdt.Tree.empty(2, 6)
    for field in TREE_FIELDS:
        getattr(out, field)[:] = 3
    with pytest.raises(kdt.KdtValueError):
        kdt.tree_build(**build_arguments(out=out, workspace=np.zeros(3, np.uint8)))
    assert all((getattr(out, field) == 3).all() for field in TREE_FIELDS)


def test_an_input_may_not_be_the_output() -> None:
    tree = kdt.Tree.empty(2, 6)
    with pytest.raises(kdt.KdtValueError, match=r"'tree.tokens'.*overlaps 'tokens'") as caught:
        kdt.tree_from_parents(tree.tokens, np.zeros((2, 6), I32), [1, 1], [0, 0], out=tree)
    assert caught.value.status == Status.OVERLAP


@pytest.mark.parametrize(
    ("changes", "names", "status"),
    [
        (
            {"tokens": np.zeros((1, 0), I32), "parents": np.zeros((1, 0), I32)},
            "num_slots'.*got 0",
            Status.SHAPE,
        ),
        ({"tokens": np.zeros((1, 1026), I32), "parents": np.zeros((1, 1026), I32)}, "num_slots'.*1026", Status.LIMIT),
        ({"parents": np.zeros((1, 3), I32)}, "'parents'", Status.SHAPE),
        ({"tokens": np.zeros((1, 4), np.int16)}, "'tokens'.*int16", BAD),
        ({"node_counts": [1, 1]}, "'node_counts'", Status.SHAPE),
        ({"prefix_lens": 3}, "'prefix_lens'.*list of ints, got int", BAD),
    ],
)
def test_tree_from_parents(changes: dict[str, Any], names: str, status: Status) -> None:
    arguments: dict[str, Any] = {
        "tokens": np.zeros((1, 4), I32),
        "parents": np.zeros((1, 4), I32),
        "node_counts": [1],
        "prefix_lens": [0],
        **changes,
    }
    with pytest.raises(kdt.KdtValueError, match=names) as caught:
        kdt.tree_from_parents(**arguments)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (np.ones((1, 4, 4), np.uint8), "'visibility'.*bool"),
        (np.ones((1, 4, 5), bool), "'visibility'"),
        (np.ones((4, 4), bool), "'visibility'"),
        (np.ones((1, 4, 8), bool)[:, :, ::2], "'visibility'.*stride"),
    ],
)
def test_tree_from_visibility(mask: Any, names: str) -> None:
    with pytest.raises(kdt.KdtValueError, match=names):
        kdt.tree_from_visibility(mask, np.zeros((1, 4), I32), [1], [0])


@pytest.mark.parametrize(
    ("changes", "names", "status"),
    [
        ({"tree": None}, "'tree'.*Tree, got NoneType", BAD),
        ({"target_tokens": np.zeros((1, 5), I32)}, r"'target_tokens'.*\[1, 4\]", Status.SHAPE),
        ({"target_tokens": np.zeros((1, 4), np.int64)}, "'target_tokens'.*int64", BAD),
        ({"max_len": 0}, "'max_len'.*got 0", BAD),
        ({"max_len": -1}, "'max_len'", BAD),
        ({"max_tokens": [1, 2]}, "'max_tokens'", Status.SHAPE),
        ({"stop_tokens": [2**31]}, r"'stop_tokens\[0\]'", BAD),
        ({"stop_tokens": np.zeros((1, 1), I32)}, "'stop_tokens'", Status.SHAPE),
        ({"stop_tokens": 5}, "'stop_tokens'.*got int", BAD),
        ({"out": kdt.Accepted.empty(1, 3, 4)}, "'out.tokens'", Status.SHAPE),
        ({"out": kdt.Accepted.empty(1, 4, 5)}, "'out.num_slots'", Status.SHAPE),
        ({"out": ()}, "'out'", BAD),
    ],
)
def test_tree_accept(changes: dict[str, Any], names: str, status: Status) -> None:
    arguments: dict[str, Any] = {"tree": kdt.Tree.empty(1, 4), "target_tokens": np.zeros((1, 4), I32), **changes}
    with pytest.raises(kdt.KdtValueError, match=names) as caught:
        kdt.tree_accept(**arguments)
    assert caught.value.status == status


CACHE = np.zeros((3, 2, 8, 4), F32)  # as a paged cache: 3 layers, 2 pages of 8 rows


@pytest.mark.parametrize(
    ("changes", "names", "status"),
    [
        ({"cache": np.zeros((8, 4), F32)}, "'cache'.*3 or 4 dimensions", BAD),
        ({"cache": 5}, "'cache'", BAD),
        ({"cache": []}, "'cache'.*at least one layer", Status.SHAPE),
        ({"cache": [CACHE[0], CACHE[1, :1]]}, r"'cache\[1\]'", Status.SHAPE),
        ({"cache": [CACHE[0], CACHE[0]]}, "'cache.layer_data'.*overlaps", Status.OVERLAP),
        ({"cache": np.zeros((2, 8, 8), F32)[:, :, ::2]}, "'cache'.*stride", Status.STRIDE),
        ({"cache": read_only(np.zeros((2, 8, 4), F32))}, "'cache'.*read-only", BAD),
        ({"cache": np.zeros((2, 8, 4), object)}, "'cache'.*object", BAD),
        ({"cache": np.zeros((2, 8, 4), "S65")}, "'cache.element_size'.*65", BAD),
        ({"cache": np.zeros((2, 8, 0), F32)}, "'cache.row_width'.*got 0", Status.SHAPE),
        ({"block_table": None, "cache": CACHE[0, :0]}, "'cache'.*at least 1 requests, got 0", Status.SHAPE),
        ({"block_table": np.zeros((2, 2), I32)}, "'block_table'", Status.SHAPE),
        ({"block_table": np.zeros((1, 2), np.int64)}, "'block_table'.*int64", BAD),
        ({"accepted": 3}, "'accepted'", BAD),
        ({"accepted": kdt.Accepted.empty(1, 4, 1026)}, "'accepted.num_slots'", Status.LIMIT),
        ({"out": np.zeros((2, 8, 4), F32)[:, :7]}, "'out'", Status.SHAPE),
        ({"out": CACHE[0]}, "overlaps", Status.OVERLAP),
        ({"out": np.zeros((2, 8, 4), I32)}, "'out'.*dtype of 'cache'.*float32.*int32", Status.SHAPE),
        ({"cache": np.broadcast_to(F32(0), (2**31, 8, 4)), "out": CACHE[0]}, r"'cache'.*2\^31", Status.LIMIT),
        (
            {"cache": np.lib.stride_tricks.as_strided(np.zeros(99, F32), (3, 2, 8, 4), (16, 128, 16, 4))},
            "'cache.layer_stride'|'cache.row_stride'|'cache.page_stride'",
            Status.STRIDE,
        ),
        ({"prefix_lens": [1, 2]}, "'prefix_lens'", Status.SHAPE),
    ],
)
def test_kv_compact(changes: dict[str, Any], names: str, status: Status) -> None:
    arguments: dict[str, Any] = {
        "cache": CACHE[0],
        "accepted": kdt.Accepted.empty(1, 4, 4),
        "prefix_lens": [0],
        "block_table": np.zeros((1, 2), I32),
        **changes,
    }
    with pytest.raises(kdt.KdtValueError, match=names) as caught:
        kdt.kv_compact(**arguments)
    assert caught.value.status == status


LOGITS, IDS = np.zeros((4, 9), F32), np.zeros((4, 9), I32)
ATTENTION = {
    "q": np.zeros((1, 3, 2, 576), F32),
    "kv_cache": np.zeros((4, 16, 576), F32),
    "tree": None,
    "prefix_lens": [5],
    "block_table": np.zeros((1, 2), I32),
    "scale": 1.0,
}
STATES = {"out_a": np.zeros((2, 3, 4), F32), "lse_a": np.zeros((2, 3), F32)}
STATES |= {"out_b": np.zeros((2, 3, 4), F32), "lse_b": np.zeros((2, 3), F32)}
SAMPLING = {"logits": LOGITS, "temperatures": 1.0, "seed": 0, "positions": np.zeros(4, I32), "request_ids": 0}


@pytest.mark.parametrize(
    ("operation", "arguments", "names", "status"),
    [
        ("topk_logprobs", {"logits": np.zeros((4, 9)), "k": 2}, "'logits'.*float64", BAD),
        ("topk_logprobs", {"logits": [[1.0]], "k": 2}, "'logits'.*list", BAD),
        ("topk_logprobs", {"logits": np.zeros((), F32), "k": 2}, "'logits'.*0 dimensions", BAD),
        ("topk_logprobs", {"logits": np.zeros((4, 9), ">f4"), "k": 2}, "'logits'", BAD),
        ("topk_logprobs", {"logits": LOGITS[:, ::2], "k": 2}, "'logits'.*stride", Status.STRIDE),
        ("topk_logprobs", {"logits": LOGITS[::-1], "k": 2}, "'logits'.*stride", Status.STRIDE),
        (
            "topk_logprobs",
            {"logits": np.zeros((4, 5, 9), F32)[:, :3], "k": 2},
            "'logits'.*evenly strided",
            Status.STRIDE,
        ),
        ("topk_logprobs", {"logits": LOGITS, "k": -1}, "'k'.*-1", Status.LIMIT),
        ("topk_logprobs", {"logits": LOGITS, "k": 1025}, "'k'.*1025", Status.LIMIT),
        ("topk_logprobs", {"logits": LOGITS, "k": 2, "id_offset": -1}, "'id_offset'", BAD),
        ("topk_logprobs", {"logits": LOGITS, "k": 2, "id_offset": 2**31 - 8}, "'id_offset'", BAD),
        ("topk_logprobs", {"logits": LOGITS, "k": 2, "rows_per_request": 3}, "'rows_per_request'", Status.SHAPE),
        (
            "topk_logprobs",
            {"logits": LOGITS, "k": 2, "rows_per_request": 0},
            "'rows_per_request'",
            BAD,
        ),
        ("topk_logprobs", {"logits": LOGITS, "k": 2, "out": (1,)}, "'out'.*2 arrays, got 1", BAD),
        ("topk_logprobs", {"logits": LOGITS, "k": 2, "out": 5}, "'out'.*tuple of 2 arrays, got int", BAD),
        ("topk_logprobs", {"logits": LOGITS, "k": 2, "raw": 2**32}, "'raw'.*bool, got int", BAD),
        (
            "topk_logprobs",
            {"logits": LOGITS, "k": 9, "out": (LOGITS, IDS)},
            "overlaps",
            Status.OVERLAP,
        ),
        (
            "topk_merge",
            {"logits": LOGITS, "token_ids": LOGITS, "lse": LOGITS},
            "'token_ids'.*int32",
            BAD,
        ),
        (
            "topk_merge",
            {"logits": np.zeros((257, 1, 2), F32), "token_ids": np.zeros((257, 1, 2), I32), "lse": np.zeros((257, 1))},
            "'num_shards'.*256",
            Status.LIMIT,
        ),
        (
            "topk_merge",
            {"logits": np.zeros((0, 1, 2), F32), "token_ids": np.zeros((0, 1, 2), I32), "lse": np.zeros((0, 1))},
            "'num_shards'.*got 0",
            Status.SHAPE,
        ),
        (
            "topk_merge",
            {"logits": np.zeros((2, 1, 2), F32), "token_ids": np.zeros((2, 1, 2), I32), "lse": np.zeros((2, 1), F32)},
            "'lse'.*float64",
            BAD,
        ),
        ("argmax", {"logits": np.zeros((4, 9), I32)}, "'logits'.*int32", BAD),
        ("argmax", {"logits": LOGITS, "out": np.zeros(3, I32)}, "'out'", Status.SHAPE),
        ("argmax", {"logits": LOGITS, "out": np.zeros(8, I32)[::2]}, "'out'", Status.STRIDE),
        ("sample", {**SAMPLING, "seed": -1}, "'seed'", BAD),
        ("sample", {**SAMPLING, "seed": 2**64}, "'seed'", BAD),
        ("sample", {**SAMPLING, "temperatures": np.zeros(4)}, "'temperatures'.*float32", BAD),
        ("sample", {**SAMPLING, "temperatures": "hot"}, "'temperatures'.*'hot'", BAD),
        ("sample", {**SAMPLING, "temperatures": 1e300}, "'temperatures'.*1e\\+300", BAD),
        ("sample", {**SAMPLING, "temperatures": 1e-50}, "'temperatures'.*1e-50", BAD),
        ("sample", {**SAMPLING, "temperatures": True}, "'temperatures'", BAD),
        ("sample", {**SAMPLING, "temperatures": np.zeros(3, F32)}, "'temperatures'", Status.SHAPE),
        ("sample", {**SAMPLING, "positions": np.zeros(4, np.int64)}, "'positions'.*int32", BAD),
        ("sample", {**SAMPLING, "positions": [0, 1, 2, 2**31]}, "'positions'", BAD),
        ("sample", {**SAMPLING, "request_ids": [0.5] * 4}, "'request_ids'", BAD),
        ("sample", {**SAMPLING, "request_ids": 2**63}, "'request_ids'", BAD),
        ("verify_attn", {"q": np.zeros((1, 3, 2, 512), F32)}, r"'q'.*576\].*512", Status.SHAPE),
        ("verify_attn", {"q": np.zeros((1, 3, 2, 576), np.float64)}, "'q'.*float64", BAD),
        ("verify_attn", {"q": np.zeros((1, 3, 129, 576), F32)}, "'num_heads'.*128", Status.LIMIT),
        ("verify_attn", {"q": np.zeros((1, 1026, 1, 576), F32)}, "'num_queries'.*1025", Status.LIMIT),
        ("verify_attn", {"q": np.zeros((1, 0, 1, 576), F32)}, "'num_queries'.*got 0", Status.SHAPE),
        (
            "verify_attn",
            {"kv_cache": np.zeros((4, 16, 576), np.float16)},
            "'kv_cache'.*float32",
            BAD,
        ),
        ("verify_attn", {"kv_cache": np.zeros((4, 24, 576), F32)}, "'cache.page_size'.*power of two", Status.LIMIT),
        ("verify_attn", {"kv_cache": np.zeros((4, 512, 576), F32)}, "'cache.page_size'.*256", Status.LIMIT),
        (
            "verify_attn",
            {"kv_cache": np.zeros((1, 4, 16, 576), F32)},
            "'kv_cache'.*3 dimensions",
            BAD,
        ),
        (
            "verify_attn",
            {"block_table": None, "kv_cache": np.zeros((0, 16, 576), F32)},
            "'kv_cache'.*at least 1 requests, got 0",
            Status.SHAPE,
        ),
        ("verify_attn", {"block_table": np.zeros((2, 2), I32)}, "'block_table'", Status.SHAPE),
        ("verify_attn", {"prefix_lens": [1, 2]}, "'prefix_lens'", Status.SHAPE),
        ("verify_attn", {"kv_starts": [1, 2]}, "'kv_starts'", Status.SHAPE),
        ("verify_attn", {"scale": float("nan")}, "'scale'.*finite", BAD),
        ("verify_attn", {"scale": float("inf")}, "'scale'.*finite", BAD),
        ("verify_attn", {"scale": None}, "'scale'", BAD),
        ("verify_attn", {"scale": "0.5"}, "'scale'.*'0.5'", BAD),
        ("verify_attn", {"scale": True}, "'scale'.*True", BAD),
        ("verify_attn", {"scale": 10**400}, "'scale'.*finite", BAD),
        ("verify_attn", {"lse_base": []}, "'lse_base'", BAD),
        ("verify_attn", {"out_dtype": "x"}, "'out_dtype'.*'x'", BAD),
        ("verify_attn", {"out_dtype": []}, "'out_dtype'", BAD),
        ("verify_attn", {"out_dtype": np.int32}, "'out_dtype'", BAD),
        ("verify_attn", {"out": 5}, "'out'.*tuple of 2 arrays, got int", BAD),
        (
            "verify_attn",
            {"out": (np.lib.stride_tricks.as_strided(np.zeros(9999, F32), (1, 3, 2, 512), (4, 2048, 2048, 4)), None)},
            "'out_(head|row)_stride'.*overlap",
            Status.STRIDE,
        ),
        ("verify_attn", {"lse_base": "10"}, "'lse_base'.*'10'", BAD),
        ("verify_attn", {"out_dtype": np.float16}, "'out_dtype'", Status.UNSUPPORTED),
        ("verify_attn", {"tree": 5}, "'tree'.*got int", BAD),
        ("verify_attn", {"tree": kdt.Tree.empty(1, 2)}, r"'num_queries'.*1\.\.2, got 3", Status.SHAPE),
        ("verify_attn", {"tree": kdt.Tree.empty(2, 3)}, "'tree.visibility'", Status.SHAPE),
        ("verify_attn", {"out": (1, 2, 3)}, "'out'.*2 arrays, got 3", BAD),
        ("merge_attn_states", {**STATES, "lse_b": np.zeros((2, 2), F32)}, "'lse_b'", Status.SHAPE),
        ("merge_attn_states", {**STATES, "out_b": np.zeros((2, 3, 5), F32)}, "'out_b'", Status.SHAPE),
        ("merge_attn_states", {**STATES, "lse_a": np.zeros((2, 3))}, "'lse_a'.*float32", BAD),
        ("merge_attn_states", {**STATES, "out_a": np.zeros((2, 3, 4), I32)}, "'out_a'.*int32", BAD),
        ("merge_attn_states", {**STATES, "lse_base": 2}, "'lse_base'", BAD),
        ("merge_attn_states", {**STATES, "out": 5}, "'out'", BAD),
    ],
)
def test_rows_and_attention(operation: str, arguments: dict[str, Any], names: str, status: Status) -> None:
    if operation == "verify_attn":
        arguments = {**ATTENTION, **arguments}
    with pytest.raises(kdt.KdtError, match=names) as caught:
        getattr(kdt, operation)(**arguments)
    assert caught.value.status == status
    assert isinstance(caught.value, ValueError) or status == Status.UNSUPPORTED


def test_the_cpu_has_no_streams() -> None:
    call = kdt.argmax.prepare(LOGITS)
    for stream in (0, 5, object()):
        with pytest.raises(kdt.KdtValueError, match="'stream'"):
            kdt.argmax(LOGITS, stream=stream)
        with pytest.raises(kdt.KdtValueError, match="'stream'"):
            call.launch(stream)
    call.launch()
    assert kdt.argmax(LOGITS, stream=None).tolist() == [0] * 4


def test_contexts() -> None:
    assert kdt.Context(num_threads=3).num_threads == 3
    for arguments, names in (
        ({"backend": "tpu"}, "'backend'"),
        ({"backend": None}, "'backend'"),
        ({"device": 1}, "'device'"),
        ({"device": -1}, "'device'"),
        ({"num_threads": -1}, "'num_threads'"),
        ({"num_threads": 1025}, "'num_threads'"),
        ({"num_threads": "4"}, "'num_threads'"),
        ({"num_threads": 2.5}, "'num_threads'"),
        ({"num_threads": 2**32 + 1}, "'num_threads'"),
        ({"device": 2**32}, "'device'"),
    ):
        with pytest.raises(kdt.KdtValueError, match=names):
            kdt.Context(**arguments)  # type: ignore[arg-type]
    for sizes in ((2**32, 3, 2, 4), (1, 2**32 + 3, 2, 4), (1, 3, 2, 2**32), (1.0, 3, 2, 4)):
        with pytest.raises(kdt.KdtValueError, match="expected"):
            kdt.tree_build_workspace_size(*sizes)  # type: ignore[arg-type]
    context = pickle.loads(pickle.dumps(kdt.Context(num_threads=2)))
    assert context.num_threads == 2
    assert kdt.Tree.empty(1, 2) != kdt.Tree.empty(1, 2)  # compared by identity, like arrays must be
    if not kdt.backends()["cuda"]["available"]:
        with pytest.raises(kdt.NoDeviceError) as caught:
            kdt.Context(backend="cuda")
        assert caught.value.status in (Status.NO_BACKEND, Status.NO_DEVICE)
