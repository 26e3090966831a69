"""What the Python tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtree_engine as kdt
from kdtree_engine import _library

ROOT = Path(__file__).resolve().parents[2]
TEST_DATA = Path(__file__).resolve().parent / "data"

TREE_FIELDS = ["tokens", "parents", "first_child", "next_sibling", "depths", "positions", "log_probs", "visibility"]
TREE_FIELDS += ["node_count", "status"]
ACCEPTED_FIELDS = ["tokens", "token_count", "accept_index", "accept_len", "next_root", "finished", "status"]


def assert_same(got: Any, expected: Any, fields: list[str], context: str = "") -> None:
    """Every field equal, bit for bit."""
    for field in fields:
        a, b = getattr(got, field), getattr(expected, field)
        assert a.dtype == b.dtype, f"{context} {field}: {a.dtype} != {b.dtype}"
        assert a.shape == b.shape, f"{context} {field}: {a.shape} != {b.shape}"
        if a.tobytes() != b.tobytes():
            bits = f"u{a.dtype.itemsize}"
            where = np.argwhere(a.copy().view(bits) != b.copy().view(bits))
            index = tuple(where[0])
            raise AssertionError(f"{context} {field}{list(index)}: got {a[index]}, expected {b[index]}")


def assert_same_tree(got: kdt.Tree, expected: kdt.Tree, context: str = "") -> None:
    assert_same(got, expected, TREE_FIELDS, context)


def assert_same_accepted(got: kdt.Accepted, expected: kdt.Accepted, context: str = "") -> None:
    assert_same(got, expected, ACCEPTED_FIELDS, context)


BACKEND = os.environ.get("KDTREE_TEST_BACKEND", "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With KDTREE_TEST_BACKEND=cuda the tests marked `cuda` run, which need a GPU, and no others; else the others."""
    if BACKEND not in ("cpu", "cuda"):
        raise pytest.UsageError(f"KDTREE_TEST_BACKEND: expected cpu or cuda, got {BACKEND!r}")
    wanted = {item for item in items if (item.get_closest_marker("cuda") is not None) == (BACKEND == "cuda")}
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A machine with a GPU need not have what the other tests import."""
    if BACKEND == "cuda" and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return "pytest.mark.cuda" not in collection_path.read_text() or None
    return None


@pytest.fixture(scope="session")
def library_path() -> Path:
    return _library.library_path()


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Any:
    """The module whose functions to test: both have the operations under the same names."""
    return kdt if request.param == "cpu" else kdt.reference


def vector(*values: int) -> Any:
    return np.array(values, np.int32)


def random_rows(rng: np.random.Generator, batch_size: int, depth: int, candidates: int, kind: str) -> tuple[Any, Any]:
    """Rows of log-probs and ids of one kind: smooth, ties (few values), zeros, bad (entries that end rows)."""
    shape = (batch_size, depth, candidates)
    if kind == "zeros":
        log_probs = np.zeros(shape, np.float32)
    elif kind == "ties":
        log_probs = -np.sort(rng.integers(0, 4, shape).astype(np.float32) * rng.choice([0.25, 0.1, 1.0]), axis=-1)
    else:
        log_probs = -np.sort(rng.exponential(rng.choice([0.1, 1.0, 4.0]), shape).astype(np.float32), axis=-1)
    log_probs = log_probs.astype(np.float32)
    token_ids = rng.integers(0, 50, shape, dtype=np.int32)
    if kind == "bad" and log_probs.size:
        for _ in range(rng.integers(1, 2 + log_probs.size // 8)):
            place = tuple(rng.integers(0, size) for size in shape)
            what = rng.integers(0, 7)
            if what < 5:
                log_probs[place] = [np.nan, np.inf, -np.inf, 0.5, -0.0][what]
            elif what == 5:
                token_ids[place] = rng.choice(np.array([-1, -7, 50, 2**31 - 1, -(2**31)], np.int32))
            else:  # a suffix of padding, at times with something behind it
                log_probs[place[0], place[1], place[2] :] = -np.inf
                token_ids[place[0], place[1], place[2] :] = -1
                if rng.random() < 0.3:
                    log_probs[place[0], place[1], -1] = rng.choice([-np.inf, -1.0])
                    token_ids[place[0], place[1], -1] = rng.integers(-2, 3)
    return log_probs, token_ids
