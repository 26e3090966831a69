"""The operations on a GPU: the whole table of cases, eagerly and in graphs; arrays of others; streams; the commands."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from conftest import TEST_DATA, TREE_FIELDS, assert_same_accepted, assert_same_tree, vector

import kdtree_engine as kdt
from kdtree_engine import Status, _cuda, cases, ops
from kdtree_engine._cuda import DeviceArray, Event, Stream
from kdtree_engine._trace import load_trace, tree_digest
from kdtree_engine._transfer import place, to_host
from kdtree_engine.bench import check
from kdtree_engine.bench.targets import TARGETS

pytestmark = pytest.mark.cuda

OPERATIONS = sorted({case.operation for case in cases.CASES} - {"step"})
DIGESTS = json.loads((TEST_DATA / "trace_digests.json").read_text())["budgets"]
MEANS = {1: 1.7578, 4: 2.9049, 8: 3.3477, 15: 3.6953, 16: 3.7240, 32: 3.9792, 64: 4.2005, 128: 4.4193, 256: 4.6250}
F32, I32 = np.float32, np.int32


@pytest.fixture(scope="module")
def context() -> kdt.Context:
    return kdt.Context(backend="cuda")


def upload(array: Any) -> DeviceArray:
    return DeviceArray.from_numpy(array)


# ---- The table of cases ------------------------------------------------------------------------------------


def arrays_of(value: Any) -> Iterator[Any]:
    """The arrays in arguments or results, on the host or not, always in the same order."""
    if isinstance(value, (np.ndarray, DeviceArray)):
        yield value
    elif isinstance(value, (kdt.Tree, kdt.Accepted)):
        for field in fields(value):
            yield from arrays_of(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_of(item)


def bits_of(value: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays_of(to_host(value))]


class Twice:
    """Stands in for the package in `cases.run`, numpy on the outside: each call runs, and again as a graph's replay.

    Both must give the same bits, and leave what is no result as it was.
    """

    def __init__(self, context: kdt.Context) -> None:
        self.context, self.stream = context, Stream()

    def __getattr__(self, operation: str) -> Any:
        def function(*positional: Any, **named: Any) -> Any:
            host = (positional, named)
            given = place(host, self.context.memory)
            call = getattr(ops, operation).prepare(*given[0], **given[1], context=self.context)
            call.launch()
            eager = to_host(call.result)
            results = {array.pointer for array in arrays_of(call.result)}
            for before, after in zip(arrays_of(host), arrays_of(given), strict=True):
                if after.pointer not in results:
                    assert after.numpy().tobytes() == before.tobytes(), f"{operation} changed an input"

            with self.stream.capture() as graph:
                call.launch(self.stream)
            for array in arrays_of(call.result):
                array.fill_bytes(0xEE, None)
            for before, after in zip(arrays_of(host), arrays_of(given), strict=True):
                after.copy_from(before)
            _cuda.device(0).synchronize()  # the stream does not wait for the default one
            graph.launch(self.stream)
            assert bits_of(call.result) == bits_of(eager), f"{operation}: a replay gave other bits"
            return eager

        return function


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_case_agrees_with_the_reference(context: kdt.Context, operation: str) -> None:
    problems = {}
    for case in (case for case in cases.CASES if case.operation == operation):
        arguments = case.arguments()
        got = cases.run(Twice(context), operation, arguments)
        want = check.expected(operation, arguments)
        assert got.keys() == want.keys(), case.name
        problem = check.mismatch(operation, arguments, got, want)
        if problem is not None:
            problems[case.name] = problem
    assert problems == {}


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.operation == "step"], ids=lambda case: case.name)
def test_a_whole_step(context: kdt.Context, case: cases.Case) -> None:
    """Each stage against the reference on what the stage before it gave."""
    a = case.arguments()
    got = cases.run_step(Twice(context), a)
    rows = {"logits": a["draft_logits"], "k": a["k"]}
    parts = {name: got[f"topk.{name}"] for name in ("log_probs", "token_ids")}
    assert check.mismatch("topk_logprobs", rows, parts, check.expected("topk_logprobs", rows)) is None
    tree = kdt.reference.tree_build(*parts.values(), a["root_tokens"], a["prefix_lens"], a["budget"])
    assert_same_tree(kdt.Tree(**{field: got[f"tree.{field}"] for field in TREE_FIELDS}), tree)
    attention = {"q": a["q"], "kv_cache": a["cache"], "tree": tree, "prefix_lens": a["prefix_lens"]}
    attention |= {"scale": a["scale"], "block_table": a["block_table"]}
    want = check.expected("verify_attn", attention)
    assert check.mismatch("verify_attn", attention, {name: got[name] for name in ("out", "lse")}, want) is None
    chosen = a["target_logits"][np.arange(len(a["root_tokens"]))[:, None], tree.depths]
    assert np.array_equal(got["target_tokens"], kdt.reference.argmax(chosen))
    accepted = kdt.reference.tree_accept(tree, got["target_tokens"], stop_tokens=a["stop_tokens"])
    fields_of = {f.name: got[f"accepted.{f.name}"] for f in fields(accepted) if f.name != "num_slots"}
    assert_same_accepted(kdt.Accepted(**fields_of, num_slots=accepted.num_slots), accepted)
    moved = kdt.reference.kv_compact(a["cache"].copy(), accepted, a["prefix_lens"], block_table=a["block_table"])
    assert got["cache"].tobytes() == moved.tobytes()


def test_the_same_bits_on_every_run(context: kdt.Context) -> None:
    for name in ("topk_logprobs/v163840_bf16", "verify_attn/q65_h8_2048_bf16", "sample/v163840", "tree_build/ties"):
        case = next(case for case in cases.CASES if case.name == name)
        call = getattr(ops, case.operation).prepare(**place(case.arguments(), context.memory), context=context)
        runs = set()
        for _ in range(5):
            call.launch()
            runs.add(b"".join(bits_of(call.result)))
        assert len(runs) == 1, name


def test_a_graph_reads_lengths_and_counts_at_each_replay(context: kdt.Context) -> None:
    case = next(case for case in cases.CASES if case.name == "tree_build/batch64")
    arguments = {**case.arguments(), "budgets": np.full(64, 64, I32), "max_depths": np.full(64, 15, I32)}
    arguments["num_live"] = vector(64)
    given = place(arguments, context.memory)
    call, stream = ops.tree_build.prepare(**given, context=context), Stream()
    with stream.capture() as graph:
        call.launch(stream)
    rng = np.random.default_rng(0)
    for live in (64, 3, 0, 99, -1, 17):
        arguments["num_live"][0] = live
        arguments["budgets"][:] = rng.integers(-2, 70, 64)
        arguments["max_depths"][:] = rng.integers(-2, 18, 64)
        arguments["prefix_lens"][:] = rng.integers(0, 999, 64)
        for name in ("num_live", "budgets", "max_depths", "prefix_lens"):
            given[name].copy_from(arguments[name])
        graph.launch(stream)
        assert_same_tree(to_host(call.result), kdt.tree_build(**arguments), f"{live} live")


@pytest.mark.parametrize("budget", [int(b) for b in DIGESTS])
def test_digests_of_the_real_trace(context: kdt.Context, budget: int) -> None:
    trace = load_trace(cases.DATA / "trace_code.kdtr")
    digest = hashlib.sha256()
    for first in range(0, len(trace.root_tokens), 64):
        steps = slice(first, first + 64)
        inputs = [upload(array[steps]) for array in (trace.log_probs, trace.token_ids, trace.root_tokens)]
        tree = to_host(kdt.tree_build(*inputs, [0] * 64, budget, context=context))
        tree_digest(digest, tree, 64)
    assert digest.hexdigest() == DIGESTS[str(budget)]


# ---- Arrays ------------------------------------------------------------------------------------------------


def test_device_arrays() -> None:
    values = np.arange(24, dtype=I32).reshape(2, 3, 4)
    array = upload(values)
    assert (array.shape, array.dtype, array.nbytes, array.device) == ((2, 3, 4), np.dtype(I32), 96, 0)
    assert np.array_equal(array.numpy(), values)
    assert np.array_equal(array.reshape(6, -1)[1:3].numpy(), values.reshape(6, 4)[1:3])
    assert np.array_equal(array[-1][2].numpy(), values[-1, 2])
    assert np.array_equal(upload(values[:, ::2, 1:]).numpy(), values[:, ::2, 1:])
    assert len(array) == 2
    assert [part.numpy().tolist() for part in array] == values.tolist()
    other = DeviceArray((2, 3, 4), I32)
    other.copy_from(array)
    other[0].copy_from(values[0] * 2)
    assert np.array_equal(other.numpy(), np.stack([values[0] * 2, values[1]]))
    assert upload(np.zeros((0, 5), F32)).numpy().shape == (0, 5)
    assert upload(np.float32(3)).numpy() == 3
    bits = np.arange(8, dtype=np.uint16).view(kdt.bfloat16)
    assert upload(bits).dtype == kdt.bfloat16
    assert upload(bits).view(np.uint16).numpy().tolist() == list(range(8))
    with pytest.raises(kdt.KdtValueError, match="'source'"):
        array.copy_from(values.astype(np.int64))
    with pytest.raises(kdt.KdtValueError, match="'source'"):
        array.copy_from(values[0])
    with pytest.raises(kdt.KdtValueError, match="'shape'"):
        array.reshape(5, 5)
    with pytest.raises(IndexError):
        array[2]
    with pytest.raises(MemoryError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        DeviceArray(2**50, np.uint8)
    assert isinstance(caught.value, kdt.KdtError)
    with pytest.raises(kdt.NoDeviceError, match="CUDA_ERROR_INVALID_DEVICE"):
        DeviceArray(1, np.uint8, device=99)


def test_memory_is_given_back() -> None:
    """So much together that not all of it can be there at once."""
    for _ in range(64):
        part = DeviceArray(2**34, np.uint8)[5:9]
        gc.collect()
        part.copy_from(np.arange(4, dtype=np.uint8))  # what it was made from is gone, its memory is not
        assert part.numpy().tolist() == [0, 1, 2, 3]


class Foreign:
    """Someone else's array: nothing but the interface."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self._owner = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


def test_arrays_of_others(context: kdt.Context) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 16)).astype(F32)
    device = upload(logits)
    expected = logits.argmax(axis=1)
    assert to_host(kdt.argmax(Foreign(device), context=context)).tolist() == expected.tolist()
    assert (
        to_host(kdt.argmax(Foreign(device, version=2, strides=(64, 4)), context=context)).tolist() == expected.tolist()
    )
    wide = Foreign(device, shape=(4, 9), strides=(64, 4))
    assert to_host(kdt.argmax(wide, context=context)).tolist() == logits[:, :9].argmax(axis=1).tolist()
    producer = Stream()
    for stream in (1, 2, producer.cuda_stream):
        assert to_host(kdt.argmax(Foreign(device, stream=stream), context=context)).tolist() == expected.tolist()
    out = DeviceArray(4, I32)
    assert kdt.argmax(device, out=Foreign(out), context=context) is not None
    assert out.numpy().tolist() == expected.tolist()
    with pytest.raises(kdt.KdtValueError, match=r"'out'.*read-only"):
        kdt.argmax(device, out=Foreign(out, data=(out.pointer, True)), context=context)
    read_only = Foreign(device, data=(device.pointer, True))
    assert to_host(kdt.argmax(read_only, context=context)).tolist() == expected.tolist()
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*stride"):
        kdt.argmax(Foreign(device, shape=(4, 8), strides=(64, 8)), context=context)
    empty = Foreign(DeviceArray((0, 16), F32), data=(0, False))
    assert kdt.argmax(empty, context=context).shape == (0,)


def test_where_arrays_must_be(context: kdt.Context) -> None:
    logits = np.zeros((4, 9), F32)
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*memory of device 0.*numpy array in host memory"):
        kdt.argmax(logits, context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*numpy array, got DeviceArray in device memory"):
        kdt.argmax(upload(logits))
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*numpy array, got Foreign in device memory"):
        kdt.argmax(Foreign(upload(logits)))
    with pytest.raises(kdt.KdtValueError, match=r"'workspace'.*host memory"):
        kdt.argmax(upload(logits), workspace=np.zeros(9999, np.uint8), context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'out'.*host memory"):
        kdt.argmax(upload(logits), out=np.zeros(4, I32), context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*device 0.*got list"):
        kdt.argmax([[1.0]], context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*float32, float16 or bfloat16, got int32"):
        kdt.argmax(upload(logits.astype(I32)), context=context)
    tree = kdt.Tree.empty(1, 4, context)
    with pytest.raises(kdt.KdtValueError, match=r"'target_tokens'.*int32.*int64"):
        kdt.tree_accept(tree, upload(np.zeros((1, 4), np.int64)), context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'tree.tokens'.*host memory"):
        kdt.tree_accept(kdt.Tree.empty(1, 4), upload(np.zeros((1, 4), I32)), context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'tree.tokens'.*numpy array"):
        kdt.tree_accept(tree, np.zeros((1, 4), I32))
    host = np.zeros((4, 9), F32)
    pointer_to_host = Foreign(upload(logits), data=(host.ctypes.data, False))
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*memory of device 0"):  # the library's own check
        kdt.argmax(pointer_to_host, context=context)
    large = upload(np.zeros((64, 163840), F32))
    needed = ops.topk_logprobs.prepare(large, 64, context=context).workspace_size
    if needed:
        with pytest.raises(kdt.KdtValueError, match="'workspace'") as caught:
            kdt.topk_logprobs(large, 64, workspace=DeviceArray(needed - 1, np.uint8), context=context)
        assert caught.value.status == Status.WORKSPACE


def test_small_numbers_are_uploaded(context: kdt.Context) -> None:
    case = next(case for case in cases.CASES if case.name == "tree_build/ties")
    arguments = case.arguments()
    expected = kdt.tree_build(**{**arguments, "num_live": 5})
    given = place(arguments, context.memory)
    for name in ("root_tokens", "prefix_lens"):
        given[name] = arguments[name].tolist()
    assert_same_tree(to_host(kdt.tree_build(**given, num_live=5, context=context)), expected)

    case = next(case for case in cases.CASES if case.name == "sample/temperatures")
    arguments = case.arguments()
    arguments["logits"] = arguments["logits"].reshape(4, 4, -1)
    arguments["positions"] = arguments["positions"].reshape(4, 4)
    arguments |= {"temperatures": np.array([0.5, 0, 1, np.inf], F32), "request_ids": np.arange(4)}
    expected = kdt.sample(**arguments)
    got = kdt.sample(**place(arguments, context.memory), context=context)  # [B] spread over [B, N]
    assert np.array_equal(to_host(got), expected)
    numbers = {name: array.tolist() for name, array in arguments.items() if name in ("temperatures", "request_ids")}
    given = {**place(arguments, context.memory), **numbers}
    assert np.array_equal(to_host(kdt.sample(**given, context=context)), expected)


def test_a_cache_of_separate_layers(context: kdt.Context) -> None:
    case = next(case for case in cases.CASES if case.name == "kv_compact/page64_layers")
    arguments = case.arguments()
    expected = kdt.kv_compact(**{**arguments, "cache": arguments["cache"].copy()})
    given = place({**arguments, "cache": list(arguments["cache"])}, context.memory)
    got = kdt.kv_compact(**given, context=context)
    assert np.stack([layer.numpy() for layer in got]).tobytes() == expected.tobytes()


def test_empty_results_are_padding(context: kdt.Context) -> None:
    assert_same_tree(to_host(kdt.Tree.empty(2, 70, context)), kdt.Tree.empty(2, 70))
    assert_same_accepted(to_host(kdt.Accepted.empty(2, 3, 70, context)), kdt.Accepted.empty(2, 3, 70))


def test_contexts(context: kdt.Context) -> None:
    assert (context.backend, context.device) == ("cuda", 0)
    again = pickle.loads(pickle.dumps(context))
    assert to_host(kdt.argmax(upload(np.eye(3, dtype=F32)), context=again)).tolist() == [0, 1, 2]
    with pytest.raises(kdt.KdtValueError, match="'device'"):
        kdt.Context(backend="cuda", device=99)
    assert kdt.tree_build_workspace_size(64, 15, 64, 64, context=context) >= 0


# ---- Streams -----------------------------------------------------------------------------------------------


def test_streams(context: kdt.Context) -> None:
    logits = np.random.default_rng(1).normal(size=(65, 5000)).astype(F32)
    device, expected = upload(logits), logits.argmax(axis=1).tolist()
    side = Stream()
    for stream in (None, 0, side, side.cuda_stream, np.int64(side.cuda_stream)):
        assert kdt.argmax(device, context=context, stream=stream).numpy().tolist() == expected
    call = ops.argmax.prepare(device, context=context, stream=side)
    for stream in (None, side, Stream()):
        call.result.copy_from(np.zeros(65, I32))
        call.launch(stream)
        assert call.result.numpy().tolist() == expected
    for bad in ("x", -1, True, 1.5, object()):
        with pytest.raises(kdt.KdtValueError, match="'stream'"):
            kdt.argmax(device, context=context, stream=bad)


def test_a_captured_call_does_not_run(context: kdt.Context) -> None:
    call, stream = ops.argmax.prepare(upload(np.eye(3, dtype=F32)), context=context), Stream()
    call.result.copy_from(np.full(3, 77, I32))
    with stream.capture() as graph:
        call.launch(stream)
    assert call.result.numpy().tolist() == [77] * 3
    graph.launch(stream)
    assert call.result.numpy().tolist() == [0, 1, 2]
    broken = stream.capture()
    broken.__enter__()
    call.launch(stream)
    error = ZeroDivisionError()
    assert broken.__exit__(ZeroDivisionError, error, None) is not True  # raised again
    call.launch(stream)  # the stream is of use again
    assert call.result.numpy().tolist() == [0, 1, 2]
    start, end = Event(), Event()
    start.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    assert 0 < end.seconds_since(start) < 1


@pytest.mark.filterwarnings("default")  # torch's own
def test_torch_tensors(context: kdt.Context) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    logits = torch.randn(4, 7, 3000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out = torch.full((4, 7), -5, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    assert kdt.argmax(logits, out=out, context=context, stream=stream) is out
    stream.synchronize()
    assert torch.equal(out, logits.argmax(-1).int())
    rows = logits[:, 2:5, 100:2100]  # strided in all but the last dimension
    with pytest.raises(kdt.KdtValueError, match="evenly strided"):
        kdt.argmax(rows, context=context)
    assert kdt.argmax(rows[:, 0], context=context).numpy().tolist() == rows[:, 0].argmax(-1).tolist()
    half = logits.bfloat16()
    got = kdt.argmax(half, context=context).numpy()
    assert np.array_equal(
        np.take_along_axis(half.float().cpu().numpy(), got[..., None], -1)[..., 0], half.amax(-1).float().cpu()
    )
    with pytest.raises(kdt.KdtValueError, match="'logits'"):
        kdt.argmax(logits.clone().requires_grad_(), context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*memory of device 0.*got Tensor"):
        kdt.argmax(logits.cpu(), context=context)
    with pytest.raises(kdt.KdtValueError, match=r"'logits'.*numpy array, got Tensor in device memory"):
        kdt.argmax(logits)
    with pytest.raises(kdt.KdtValueError, match=r"'out'.*int32.*int64"):
        kdt.argmax(logits, out=out.long(), context=context)

    # In a graph of torch's.
    call = ops.argmax.prepare(logits, out=out, context=context)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call.launch(torch.cuda.current_stream())
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, logits.argmax(-1).int())
    # Our arrays in torch, without a copy.
    array = upload(np.arange(6, dtype=F32).reshape(2, 3))
    tensor = torch.as_tensor(array, device="cuda")
    tensor += 1
    torch.cuda.synchronize()
    assert array.numpy().tolist() == [[1, 2, 3], [4, 5, 6]]


# ---- The commands ------------------------------------------------------------------------------------------


def kdtree(*arguments: str, code: int = 0) -> Any:
    """Runs the command; its JSON."""
    command = [sys.executable, "-m", "kdtree_engine", *arguments, "--json"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_replay_gives_the_recorded_means_and_trees() -> None:
    """One step a call and 64 steps a call: the command compares the two itself."""
    result = kdtree("replay", "--backend", "cuda")
    assert result["steps"] == 768
    assert {row["budget"]: round(row["accept_len_mean"], 4) for row in result["rows"]} == pytest.approx(MEANS, abs=5e-5)
    for row in result["rows"]:
        for key in ("build_us_p50", "accept_us_p50", "build_us_p50_batch64", "accept_us_p50_batch64"):
            assert row[key] > 0
        if str(row["budget"]) in DIGESTS:
            assert row["trees_sha256"] == DIGESTS[str(row["budget"])]


def test_info_lists_the_gpu() -> None:
    cuda = kdtree("info")["backends"]["cuda"]
    assert cuda["available"]
    assert cuda["devices"][0]["multiprocessors"] > 0


def test_bench() -> None:
    options = ("--backend", "cuda", "--min-time", "0")
    result = kdtree("bench", "run", "-k", "tree_accept/middle", *options)
    facts, row = result["environment"], result["rows"][0]
    assert facts["device"]
    assert facts["copy_gb_per_s"] > 1
    assert facts["empty_graph_us"] > 0
    assert (row["ok"], row["backend"]) == (True, "cuda")
    for key in ("median_us", "cold_median_us", "event_median_us", "copy_share", "calls_per_replay"):
        assert row[key] > 0
    assert row["peers"]["numpy"]["ratio"] > 0
    row = kdtree("bench", "run", "-k", "argmax/ties", *options)["rows"][0]
    assert all("error" not in peer for peer in row["peers"].values())


def test_targets() -> None:
    rows = kdtree("bench", "targets", "-k", "b1", "--min-time", "0")["rows"]
    assert [row["case"] for row in rows] == [target.name for target in TARGETS if "b1" in target.name]
    for row in rows:
        assert row["ok"], row["error"]
        assert row["met"] in (True, False)
