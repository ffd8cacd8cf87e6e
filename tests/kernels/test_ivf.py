"""The index of large tenants: its recall as measured here, and what it must never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from undertow.kernels.arena.arena import PRESENT
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk import ivf
from undertow.kernels.topk.ivf import IvfIndex
from undertow.kernels.topk.topk import top_k

from ..support.kernels.arena import MEMORIES, arena_in
from ..support.kernels.gate_worlds import unit

DIM = 36  # padded to 40 on a device


def topical(rng: np.random.Generator, topics: NDArray[np.float64], count: int) -> NDArray[np.float16]:
    """Unit vectors, each near one of the topics."""
    return unit(topics[rng.integers(0, len(topics), count)] + rng.standard_normal((count, DIM)))


class World:
    """One large segment, and one small one that no index is to touch."""

    def __init__(self, count: int, memory: str = "cpu", seed: int = 1) -> None:
        self.memory = memory
        self.rng = np.random.default_rng(seed)
        self.topics = self.rng.standard_normal((80, DIM))
        self.arena = arena_in(memory, DIM)
        self.segment, self.other = self.arena.new_segment(), self.arena.new_segment()
        self.vectors = np.zeros((0, DIM), np.float16)
        self.append(count)
        self.arena.extend(np.full(50, self.other), topical(self.rng, self.topics, 50), live=True)

    def append(self, count: int) -> None:
        vectors = topical(self.rng, self.topics, count)
        self.arena.extend(np.full(count, self.segment), vectors, live=True)
        self.vectors = np.concatenate((self.vectors, vectors))

    def queries(self, count: int) -> NDArray[np.float16]:
        return topical(self.rng, self.topics, count)

    def redact(self, rows: Any) -> None:
        self.arena.redact(np.int64(self.segment) << 32 | np.asarray(rows, np.int64))


def index_of(world: World, target: float = 0.95) -> IvfIndex:
    # a pool in the host's memory has only the reference gate
    gate = Gate(world.arena) if world.memory == "cpu" else make_gate(world.arena)
    return IvfIndex(world.arena, world.segment, gate, target=target)


def recall(found: NDArray[np.int64], expected: NDArray[np.int64]) -> float:
    return float(np.mean([np.isin(e, f).mean() for f, e in zip(found, expected, strict=True)]))


@pytest.mark.parametrize("memory", MEMORIES)
def test_recall_against_exact_search_is_what_the_index_says(memory: str) -> None:
    world = World(6000, memory)
    index = index_of(world)
    queries = world.queries(300)
    exact = queries.astype(np.float64) @ world.vectors.astype(np.float64).T
    for k, probe in zip((10, 100), index.report.probes, strict=True):
        scores, rows = index.search(queries, k)
        expected = np.argsort(-exact, axis=1, kind="stable")[:, :k]
        measured = recall(rows, expected)
        assert measured >= 0.95
        assert abs(probe.recall - measured) < 0.03
        assert index.recall(k) == probe.recall
        # what is found has its exact score and place
        assert (scores == np.take_along_axis(exact, rows, 1)).all()
        assert (np.diff(scores, axis=1) <= 0).all()
    ten = index.report.probes[0]
    assert ten.k == 10
    assert 1 <= ten.lists < index.report.lists / 3
    assert (index.report.method, index.report.rows) == ("ivf", 6000)
    assert index.report.queries == 128


def test_a_target_of_one_opens_what_it_takes() -> None:
    world = World(1500)
    index = index_of(world, target=1.0)
    easy = index_of(world, target=0.5)
    assert easy.report.probes[0].lists < index.report.probes[0].lists
    assert easy.report.probes[0].recall < index.report.probes[0].recall


@pytest.mark.parametrize("memory", MEMORIES[:2])
def test_the_same_rows_give_the_same_index(memory: str) -> None:
    one, two = World(2000, memory), World(2000, memory)
    a, b = index_of(one), index_of(two)
    assert a.report == b.report
    queries = one.queries(20)
    for left, right in zip(a.search(queries, 10), b.search(queries, 10), strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("memory", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_search_on_a_device_makes_no_pass_over_the_flags_on_the_host(
    memory: str, monkeypatch: pytest.MonkeyPatch, calls_of: Callable[..., list[torch.Tensor]]
) -> None:
    """Membership goes to the gate as a tensor, and flags are read where the rows are."""
    world = World(3000, memory)
    index = index_of(world)
    world.redact(np.arange(0, 3000, 7))
    world.append(40)
    queries = world.queries(4)
    # what the lists hold, by the definition: rows of the opened lists that are there, and new rows
    present = world.arena.flags(world.segment) & PRESENT != 0
    near = np.argsort(-(queries.astype(np.float32) @ index._centroids.T), axis=1, kind="stable")
    opened = near[:, : index.report.probes[0].lists]
    expected = []
    for query, lists in zip(queries, opened, strict=True):
        member = np.append(np.isin(index._list_of, lists), np.ones(40, bool)) & present
        exact = np.where(member, world.vectors.astype(np.float64) @ query.astype(np.float64), -np.inf)
        expected.append(np.argsort(-exact, kind="stable")[:10])

    wanted = calls_of(index._scan, "nearest", lambda **asked: asked["wanted"])
    refuse = Mock(side_effect=AssertionError("the host went over the flags"))
    monkeypatch.setattr(world.arena, "flags", refuse)
    assert (index.search(queries, 10)[1] == np.stack(expected)).all()
    assert [(one.device.type, one.dtype, len(one)) for one in wanted] == [(memory, torch.bool, 3040)] * 4


@pytest.mark.parametrize("memory", MEMORIES)
def test_redacted_rows_are_gone_at_once(memory: str) -> None:
    world = World(3000, memory)
    index = index_of(world)
    query = world.queries(1)
    gone: list[int] = []
    for _ in range(2):
        best = index.search(query, 10)[1][0]
        assert not np.isin(best, gone).any()
        world.redact(best)
        gone += best.tolist()
    left = np.setdiff1d(np.arange(3000), gone)
    exact = world.vectors[left].astype(np.float64) @ query[0].astype(np.float64)
    expected = left[np.argsort(-exact, kind="stable")[:10]]
    assert recall(index.search(query, 10)[1], expected[None]) >= 0.9


def test_where_the_lists_run_out_the_search_is_exact() -> None:
    world = World(3000)
    index = index_of(world)
    kept = np.array([5, 1700, 2999])
    world.redact(np.setdiff1d(np.arange(3000), kept))
    scores, rows = index.search(world.queries(4), 5)
    for i in range(4):
        assert sorted(rows[i, :3]) == kept.tolist()
        assert (rows[i, 3:] == -1).all()
        assert (scores[i, 3:] == -np.inf).all()


def test_more_than_recall_was_measured_at_is_exact() -> None:
    world = World(2000)
    index = index_of(world)
    queries = world.queries(3)
    for found, expected in zip(
        index.search(queries, 101), top_k(world.arena, world.segment, queries, 101), strict=True
    ):
        assert found.tobytes() == expected.tobytes()
    assert index.recall(101) == 1.0
    scores, rows = index.search(queries[:0], 10)
    assert scores.shape == rows.shape == (0, 10)


@pytest.mark.parametrize("memory", MEMORIES)
def test_new_rows_are_found_before_and_after_they_are_listed(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ivf, "_TAIL_ROWS", 300)
    world = World(2000, memory)
    index = index_of(world)
    lists = index.report.lists

    def found() -> bool:
        new = world.vectors[2000:]
        return bool(
            (index.search(new, 1)[0][:, 0] == np.einsum("nd,nd->n", *(new.astype(np.float64),) * 2)).all()
        )

    world.append(250)
    assert not index.refresh()
    assert index.report.rows == 2000
    assert found()
    world.append(250)
    assert index.refresh()
    assert (index.report.rows, index.report.lists) == (2500, lists)
    assert found()
    world.append(1500)
    assert index.refresh()
    assert index.report.rows == 4000
    assert index.report.lists > lists
    assert found()
    assert not index.refresh()


def test_training_asks_few_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch, calls_of: Callable[..., list[int]]
) -> None:
    world = World(2000)
    expected = index_of(world).report
    asked = calls_of(ivf, "top_k", lambda arena, segment, queries, k, **options: len(queries))
    assert index_of(world).report == expected
    assert sum(asked) == 256
    assert max(asked) <= 32
    asked.clear()
    monkeypatch.setattr(ivf, "_MEASURED_AT_A_TIME", 7)
    assert index_of(world).report == expected
    assert max(asked) == 7


def test_small_and_empty_segments() -> None:
    world = World(1)
    index = index_of(world)
    assert index.search(world.vectors, 3)[1].tolist() == [[0, -1, -1]]
    world.redact([0])
    assert index.search(world.vectors, 3)[1].tolist() == [[-1, -1, -1]]
    with pytest.raises(ValueError, match="no row to train"):
        index_of(world)
