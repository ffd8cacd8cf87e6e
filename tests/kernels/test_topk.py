"""Exact top-k: the oracle's scores and rows, ties and cuts included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk import rows as topk_rows
from undertow.kernels.topk.topk import scanned, top_k, top_k_many

from ..support.kernels.arena import MEMORIES, arena_in
from ..support.kernels.cuda_shim.shim import COMPILER
from ..support.kernels.gate_worlds import shim_gate, unit
from ..support.oracles.gate import Row, Store
from ..support.oracles.gate import top_k as oracle


def scan_of(memory: str, arena: Arena, shim: bool = False) -> Gate:
    """The arena's gate; for a pool in the host's memory the reference, or gate.cu compiled for the host."""
    if memory != "cpu":
        return make_gate(arena)
    return shim_gate(arena) if shim and COMPILER is not None else Gate(arena)


def filled(
    *segments: NDArray[np.float16], gone: float = 0.0, seed: int = 0, memory: str = "host"
) -> tuple[Arena, Store]:
    """The same rows in an arena and in lists, some of them redacted."""
    arena, store, rng = arena_in(memory, segments[0].shape[1]), Store(), np.random.default_rng(seed)
    for vectors in segments:
        segment = arena.new_segment()
        handles = arena.extend(np.full(len(vectors), segment), vectors, live=False)
        redacted = rng.random(len(vectors)) < gone
        arena.redact(handles[redacted])
        store.segments.append([Row(v, present=not r) for v, r in zip(vectors, redacted, strict=True)])
    return arena, store


def check(found: tuple[NDArray[Any], NDArray[Any]], expected: list[tuple[list[float], list[int]]]) -> None:
    scores, rows = found
    assert scores.dtype == np.float64
    assert rows.dtype == np.int64
    assert scores.tolist() == [s for s, _ in expected]
    assert rows.tolist() == [r for _, r in expected]


@pytest.mark.parametrize("memory", MEMORIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 400),
    dim=st.sampled_from([5, 16]),
    k=st.sampled_from([0, 1, 3, 10, 500]),
    filtered=st.booleans(),
)
def test_ties_and_last_bit_differences(
    memory: str, seed: int, size: int, dim: int, k: int, filtered: bool
) -> None:
    """On a device, 5 values are padded to 8."""
    rng = np.random.default_rng(seed)
    pool = unit(rng.standard_normal((8, dim)))
    pool = np.concatenate((pool, np.nextafter(pool, np.float16(4))))
    arena, store = filled(pool[rng.integers(0, 16, size)], gone=0.1, seed=seed, memory=memory)
    allowed = rng.random(size) < 0.6 if filtered else None
    queries = pool[:3]
    expected = [oracle(store, 0, q, k, allowed) for q in queries]
    check(top_k(arena, 0, queries, k, allowed), expected)
    check(top_k(arena, 0, queries, k, allowed, scan_of(memory, arena)), expected)


def test_distinct_rows_need_one_fetch_and_ties_more(calls_of: Callable[..., list[int]]) -> None:
    """On a device: one fetch where scores differ, repeated where the cut falls among equals."""
    distinct = unit(np.random.default_rng(1).standard_normal((600, 16)))
    tied = distinct.copy()
    tied[::5] = distinct[0]
    arena, store = filled(distinct, tied, memory="cpu")
    fetches = calls_of(topk_rows.DeviceRows, "nearest", lambda rows, queries, take: take)
    for segment, expected in ((0, [21]), (1, [21, 84])):
        fetches.clear()
        check(top_k(arena, segment, distinct[:1], 5), [oracle(store, segment, distinct[0], 5)])
        assert fetches == expected


def test_blocks_join_into_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_rows.DeviceRows, "block_rows", lambda self, queries: 90)
    vectors = unit(np.random.default_rng(2).standard_normal((500, 16)))
    vectors[::7] = vectors[3]
    arena, store = filled(vectors, gone=0.2, memory="cpu")
    for k in (1, 20, 80, 300):
        check(top_k(arena, 0, vectors[2:5], k), [oracle(store, 0, q, k) for q in vectors[2:5]])


@pytest.mark.parametrize("memory", MEMORIES)
def test_numbers_made_by_hand(memory: str) -> None:
    rows = np.array([[0.5, 0.5, 0.5, 0.5], [1, 0, 0, 0], [0, -1, 0, 0], [1, 0, 0, 0]], np.float16)
    arena, _ = filled(rows, memory=memory)
    scores, found = top_k(arena, 0, rows[1:2], 6)
    assert found.tolist() == [[1, 3, 0, 2, -1, -1]]
    assert scores.tolist() == [[1, 1, 0.5, 0, -np.inf, -np.inf]]
    scores, found = top_k(arena, 0, rows[1:2], 2, np.array([True, False, True, True]))
    assert (scores.tolist(), found.tolist()) == ([[1, 0.5]], [[3, 0]])


@pytest.mark.parametrize("memory", MEMORIES)
def test_any_split_of_a_batch_gives_the_same_bits(memory: str) -> None:
    rng = np.random.default_rng(3)
    vectors = unit(rng.standard_normal((3000, 48)))
    vectors[1::2] = np.nextafter(vectors[::2], np.float16(4))
    arena, _ = filled(vectors, memory=memory)
    queries = unit(rng.standard_normal((40, 48)))
    scores, rows = top_k(arena, 0, queries, 10)
    for size in (1, 7, 39):
        for start in range(0, 40, size):
            part = top_k(arena, 0, queries[start : start + size], 10)
            assert part[0].tobytes() == scores[start : start + size].tobytes()
            assert part[1].tobytes() == rows[start : start + size].tobytes()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("k", [1, 10, 2000, 2500, 7000])
def test_large_k_and_filters(memory: str, k: int) -> None:
    """Beyond FAISS's k of 2,048 on a GPU, and beyond the rows; 20 values are padded to 24 there."""
    rng = np.random.default_rng(5)
    vectors = unit(rng.standard_normal((6000, 20)))
    vectors[1::3] = np.nextafter(vectors[::3], np.float16(4))
    vectors[2::9] = vectors[::9]
    arena, store = filled(vectors, gone=0.05, memory=memory)
    present = np.array([row.present for row in store.segments[0]])
    queries = unit(rng.standard_normal((3, 20)))
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for allowed in (None, rng.random(6000) < 0.5, np.arange(6000) > 5990, np.zeros(6000, bool)):
        wanted = np.flatnonzero(present if allowed is None else present & allowed)
        order = np.argsort(-exact[:, wanted], axis=1, kind="stable")[:, :k]
        expected_scores, expected_rows = np.full((3, k), -np.inf), np.full((3, k), -1)
        expected_rows[:, : order.shape[1]] = wanted[order]
        expected_scores[:, : order.shape[1]] = np.take_along_axis(exact, wanted[order], 1)
        scores, rows = top_k(arena, 0, queries, k, allowed)
        assert (rows == expected_rows).all()
        assert (scores == expected_scores).all()


def test_what_faiss_gets_on_a_gpu() -> None:
    """The slab as it lies, padding included; one set of resources with little memory of its own."""
    made: list[dict[str, int]] = []
    calls: list[dict[str, Any]] = []

    class Resources:
        def __init__(self) -> None:
            self.settings: dict[str, int] = {}
            made.append(self.settings)

        def setTempMemory(self, size: int) -> None:
            self.settings["temp"] = size

        def setPinnedMemory(self, size: int) -> None:
            self.settings["pinned"] = size

    class Faiss:
        METRIC_INNER_PRODUCT = 0
        StandardGpuResources = Resources

        @staticmethod
        def knn_gpu(
            res: Any, xq: torch.Tensor, xb: torch.Tensor, k: int, **options: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append({"rows": xb, "queries": xq, **options})
            return topk_rows.search_by_torch(xb, xq, k)

    vectors = unit(np.random.default_rng(7).standard_normal((500, 20)))
    arena, _ = filled(vectors, memory="cpu")
    slab = arena.vectors(0)
    asked: Any = []
    searched = topk_rows.DeviceRows.of(slab)
    rows = searched._rows
    for _ in range(2):
        queries = torch.zeros((2, 24), dtype=torch.float16)
        queries[:, :20] = torch.from_numpy(vectors[:2])
        near, found = topk_rows.search_by_faiss(Faiss, rows, queries, 7)
        asked.append((near.tolist(), found.tolist()))
    assert asked[0] == asked[1]
    assert [row[0] for row in asked[0][1]] == [0, 1]
    assert made == [{"temp": 64 << 20, "pinned": 0}]
    for call in calls:
        assert call["rows"].data_ptr() == slab.data_ptr()
        assert call["rows"].shape == (500, 24)
        assert call["rows"].is_contiguous()
        assert call["rows"].dtype == call["queries"].dtype == torch.float16
        assert (call["metric"], call["device"]) == (0, 0)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("scanned", [False, True])
def test_mixed_tenants_are_answered_each_from_its_own_segment(memory: str, scanned: bool) -> None:
    rng = np.random.default_rng(4)
    arena, store = filled(
        *(unit(rng.standard_normal((n, 16))) for n in (0, 1, 30, 200)), gone=0.1, memory=memory
    )
    scan = scan_of(memory, arena, shim=True) if scanned else None
    owners = rng.integers(0, 4, 25)
    queries = unit(rng.standard_normal((25, 16)))
    for k in (0, 1, 6, 300):
        expected = [oracle(store, int(s), q, k) for s, q in zip(owners, queries, strict=True)]
        check(top_k_many(arena, owners, queries, k, scan), expected)
        check(top_k_many(arena, owners[:0], queries[:0], k, scan), [])


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_scan_sees_rows_that_are_not_live_and_none_that_are_gone(memory: str) -> None:
    rows = np.array([[1, 0], [0, 1], [0.5, 0], [1, 0]], np.float16)
    arena, _ = filled(rows, memory=memory)
    arena.set_live([1, 2], True)
    arena.redact([3])
    scan = scan_of(memory, arena, shim=True)
    scores, found = top_k_many(arena, [0, 0], rows[:2], 3, scan)
    assert found.tolist() == [[0, 2, 1], [1, 0, 2]]
    assert scores.tolist() == [[1, 0.5, 0], [1, 0, 0]]
    scores, found = top_k(arena, 0, rows[:2], 2, np.array([True, False, False, True]), scan)
    assert found.tolist() == [[0, -1], [0, -1]]
    assert scores.tolist() == [[1, -np.inf], [0, -np.inf]]


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_scan_reads_any_subset_of_rows(memory: str) -> None:
    rng = np.random.default_rng(8)
    vectors = unit(rng.standard_normal((700, 16)))
    vectors[::5] = vectors[1]
    arena, store = filled(vectors[:40], vectors, gone=0.1, memory=memory)
    scan = scan_of(memory, arena, shim=True)
    queries = unit(rng.standard_normal((9, 16)))
    for share in (0.0, 0.01, 0.3, 1.0):
        allowed = rng.random(700) < share
        expected = [oracle(store, 1, q, 12, allowed) for q in queries]
        check(top_k(arena, 1, queries, 12, allowed, scan), expected)
        if memory != "host":
            held = torch.from_numpy(allowed).to(arena.device)
            check(scanned(scan, np.ones(9, np.int64), queries, 12, held), expected)
    with pytest.raises(ValueError, match="the only segment"):
        scan.nearest(queries=queries[:2], segments=[0, 1], k=[1, 1], wanted=np.ones(40, bool))
    with pytest.raises(ValueError, match="bool"):
        scan.nearest(queries=queries[:1], segments=[0], k=[1], wanted=np.full(40, 2))


@pytest.mark.parametrize("memory", MEMORIES)
def test_bad_input_is_refused(memory: str) -> None:
    arena, _ = filled(unit(np.eye(4)), memory=memory)
    query = np.eye(4, dtype=np.float16)[:1]
    with pytest.raises(ValueError, match="k must not be negative"):
        top_k(arena, 0, query, -1)
    with pytest.raises(ValueError, match=r"allowed must be bool \[4\]"):
        top_k(arena, 0, query, 1, np.ones(3, bool))
    with pytest.raises(ValueError, match="float16, not float64"):
        top_k(arena, 0, query.astype(np.float64), 1)
    with pytest.raises(ValueError, match="not finite"):
        top_k(arena, 0, np.full((1, 4), np.inf, np.float16), 1)
    with pytest.raises(ValueError, match="no segment 1"):
        top_k(arena, 1, query, 1)
    with pytest.raises(ValueError, match="no segment 1"):
        top_k(arena, 1, query, 1, None, scan_of(memory, arena))
    with pytest.raises(ValueError, match="segments must be 1 integers"):
        top_k_many(arena, [0, 0], query, 1)


def test_a_scan_needs_no_pass_over_the_flags_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    arena, _ = filled(unit(rng.standard_normal((200, 16))), memory="cpu")
    queries, some = unit(rng.standard_normal((3, 16))), rng.random(200) < 0.5
    expected = top_k(arena, 0, queries, 5), top_k(arena, 0, queries, 5, some)
    scanned = [
        Gate(arena).nearest(queries=queries, segments=[0] * 3, k=[5] * 3, wanted=w) for w in (None, some)
    ]

    class Scan(Gate):
        def nearest(self, *, wanted: Any = None, **asked: Any) -> Any:
            return scanned[0 if wanted is None else 1]

    monkeypatch.setattr(arena, "flags", Mock(side_effect=AssertionError("the flags were read")))
    for allowed, (scores, rows) in zip((None, some), expected, strict=True):
        found = top_k(arena, 0, queries, 5, allowed, Scan(arena))
        assert (found[0] == scores).all()
        assert (found[1] == rows).all()
    with pytest.raises(ValueError, match="allowed must be bool"):
        top_k(arena, 0, queries, 5, some[:-1], Scan(arena))
