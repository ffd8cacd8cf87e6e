"""Exact top-k: the oracle's scores and rows, ties and cuts included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.kernels import topk
from undertow.kernels.arena import Arena
from undertow.kernels.device import load_faiss
from undertow.kernels.topk import top_k, top_k_many

from .gate_oracle import Row, Store
from .gate_oracle import top_k as oracle


def unit(vectors: NDArray[Any]) -> NDArray[np.float16]:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    scaled: NDArray[np.float16] = (vectors / lengths).astype(np.float16)
    return scaled


def filled(*segments: NDArray[np.float16], gone: float = 0.0, seed: int = 0) -> tuple[Arena, Store]:
    """The same rows in an arena and in lists, some of them redacted."""
    arena, store, rng = Arena(segments[0].shape[1]), Store(), np.random.default_rng(seed)
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


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 400),
    k=st.sampled_from([0, 1, 3, 10, 500]),
    dtype=st.sampled_from([np.float16, np.float32]),
    filtered=st.booleans(),
)
def test_ties_and_last_bit_differences(seed: int, size: int, k: int, dtype: Any, filtered: bool) -> None:
    rng = np.random.default_rng(seed)
    pool = unit(rng.standard_normal((8, 16)))
    pool = np.concatenate((pool, np.nextafter(pool, np.float16(4))))
    arena, store = filled(pool[rng.integers(0, 16, size)], gone=0.1, seed=seed)
    allowed = rng.random(size) < 0.6 if filtered else None
    queries = pool[:3]
    found = top_k(arena, 0, queries.astype(dtype), k, allowed)
    check(found, [oracle(store, 0, q, k, allowed) for q in queries])


def test_distinct_rows_need_one_fetch_and_ties_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path through FAISS: one fetch where scores differ, repeated where the cut falls among equals."""
    rng = np.random.default_rng(1)
    distinct = unit(rng.standard_normal((600, 16)))
    tied = distinct.copy()
    tied[::5] = distinct[0]
    arena, store = filled(distinct, tied)
    fetches: list[int] = []
    knn = load_faiss().knn

    class Spy:
        METRIC_INNER_PRODUCT = load_faiss().METRIC_INNER_PRODUCT

        @staticmethod
        def knn(queries: Any, block: Any, take: int, metric: int) -> Any:
            fetches.append(take)
            return knn(queries, block, take, metric=metric)

    monkeypatch.setattr(topk, "load_faiss", lambda: Spy)
    for segment, expected in ((0, [21]), (1, [21, 84])):
        fetches.clear()
        check(top_k(arena, segment, distinct[:1], 5), [oracle(store, segment, distinct[0], 5)])
        assert fetches == expected


def test_blocks_join_into_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "_BLOCK_ROWS", 90)
    rng = np.random.default_rng(2)
    vectors = unit(rng.standard_normal((500, 16)))
    vectors[::7] = vectors[3]
    arena, store = filled(vectors, gone=0.2)
    for k in (1, 20, 80, 300):
        check(top_k(arena, 0, vectors[2:5], k), [oracle(store, 0, q, k) for q in vectors[2:5]])


def test_numbers_made_by_hand() -> None:
    rows = np.array([[0.5, 0.5, 0.5, 0.5], [1, 0, 0, 0], [0, -1, 0, 0], [1, 0, 0, 0]], np.float16)
    arena, _ = filled(rows)
    scores, found = top_k(arena, 0, rows[1:2], 6)
    assert found.tolist() == [[1, 3, 0, 2, -1, -1]]
    assert scores.tolist() == [[1, 1, 0.5, 0, -np.inf, -np.inf]]
    scores, found = top_k(arena, 0, rows[1:2], 2, np.array([True, False, True, True]))
    assert (scores.tolist(), found.tolist()) == ([[1, 0.5]], [[3, 0]])


def test_any_split_of_a_batch_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    vectors = unit(rng.standard_normal((3000, 48)))
    vectors[1::2] = np.nextafter(vectors[::2], np.float16(4))
    arena, _ = filled(vectors)
    queries = unit(rng.standard_normal((40, 48)))
    scores, rows = top_k(arena, 0, queries, 10)
    for size in (1, 7, 39):
        for start in range(0, 40, size):
            part = top_k(arena, 0, queries[start : start + size], 10)
            assert part[0].tobytes() == scores[start : start + size].tobytes()
            assert part[1].tobytes() == rows[start : start + size].tobytes()


def test_mixed_tenants_are_answered_each_from_its_own_segment() -> None:
    rng = np.random.default_rng(4)
    arena, store = filled(*(unit(rng.standard_normal((n, 16))) for n in (0, 1, 30, 200)), gone=0.1)
    owners = rng.integers(0, 4, 25)
    queries = unit(rng.standard_normal((25, 16)))
    expected = [oracle(store, int(s), q, 6) for s, q in zip(owners, queries, strict=True)]
    check(top_k_many(arena, owners, queries, 6), expected)
    check(top_k_many(arena, owners[:0], queries[:0], 6), [])


def test_bad_input_is_refused() -> None:
    arena, _ = filled(unit(np.eye(4)))
    query = np.eye(4, dtype=np.float16)[:1]
    with pytest.raises(ValueError, match="k must not be negative"):
        top_k(arena, 0, query, -1)
    with pytest.raises(ValueError, match=r"allowed must be bool \[4\]"):
        top_k(arena, 0, query, 1, np.ones(3, bool))
    with pytest.raises(ValueError, match="float16 or float32, not float64"):
        top_k(arena, 0, query.astype(np.float64), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not finite"):
        top_k(arena, 0, np.full((1, 4), np.inf, np.float32), 1)
    with pytest.raises(ValueError, match="no segment 1"):
        top_k(arena, 1, query, 1)
    with pytest.raises(ValueError, match="segments must be 1 integers"):
        top_k_many(arena, [0, 0], query, 1)
