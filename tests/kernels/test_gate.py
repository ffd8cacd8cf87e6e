"""The gate against an oracle in plain loops: the same bits, on every backend and for any batch.

The backend `shim` is the CUDA gate, host code and kernels, on the CPU (tests/support/kernels/cuda_shim/).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate, GateReadings

from ..support.kernels.gate_worlds import (
    EACH,
    EVERYTHING,
    NUMBA,
    ON_CPU,
    SHIM,
    Backend,
    World,
    close_world,
    host_arena,
    numba_gate,
    questions,
    same,
    unit,
)
from ..support.oracles.gate import cosine


@pytest.fixture(params=EACH, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), dim=st.sampled_from([1, 3, 16, 33]), count=st.integers(0, 12))
def test_near_threshold_pairs_and_ties_as_the_oracle_decides(seed: int, dim: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    world, pool = close_world(rng, dim, *ON_CPU)
    asked = questions(rng, pool, count)
    world.check(world.read(asked), asked)


def test_the_close_world_is_close() -> None:
    """The property above means little unless fp32 would decide some of its cases wrongly."""
    wrong = ties = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        _, pool = close_world(rng, 33)
        asked = questions(rng, pool, 12)
        for query, theta in zip(asked["queries"], asked["theta"], strict=True):
            exact = np.array([cosine(query, row) for row in pool])
            single = pool.astype(np.float32) @ query.astype(np.float32)
            wrong += int(((exact >= theta) != (single >= theta)).sum())
            ties += len(exact) - len(np.unique(exact))
    assert wrong > 20
    assert ties > 20


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), parts=st.integers(1, 9))
def test_any_split_of_a_batch_gives_the_same_bits(seed: int, parts: int) -> None:
    rng = np.random.default_rng(seed)
    world, pool = close_world(rng, 16, NUMBA, SHIM)
    asked = questions(rng, pool, 20)
    whole = world.read(asked)
    for places in np.array_split(rng.permutation(20), parts):
        part = world.read({name: value[places] for name, value in asked.items()})
        for j, i in enumerate(places):
            for name in ("nearest_row", "nearest_score", "count"):
                assert getattr(part, name)[j] == getattr(whole, name)[i]
            mine, theirs = slice(*part.offsets[j : j + 2]), slice(*whole.offsets[i : i + 2])
            assert part.rows[mine].tobytes() == whole.rows[theirs].tobytes()
            assert part.scores[mine].tobytes() == whole.scores[theirs].tobytes()


def test_numbers_made_by_hand(backend: Backend) -> None:
    """Halves and quarters: every score can be added up on paper."""
    arena = backend.arena(4)
    turns, episodes = arena.new_segment(), arena.new_segment()
    x, y, half, mixed = [1.0, 0, 0, 0], [0, 1.0, 0, 0], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, -0.5, 0.5]
    rows = [x, half, y, mixed, x, [-1.0, 0, 0, 0]]
    handles = arena.extend(np.full(6, turns), np.array(rows, np.float16), live=True)
    arena.set_live(handles[4], False)
    arena.extend(np.full(3, episodes), np.array([y, half, mixed], np.float16), live=False)
    readings = backend.gate(arena).read(
        queries=np.array([x, x, half, x], np.float16),
        turn_segments=np.full(4, turns),
        episode_segments=np.array([episodes, -1, episodes, episodes]),
        visible=np.array([6, 6, 6, 1]),
        theta=np.array([0.5, -1.0, 0.5, 0.5]),
        k=np.array([2, 10, 10, 10]),
    )
    assert readings.nearest_row.tolist() == [1, -1, 1, 1]
    assert readings.nearest_score.tolist() == [0.5, -np.inf, 1.0, 0.5]
    assert readings.count.tolist() == [3, 5, 4, 1]
    assert (readings.count > np.diff(readings.offsets)).tolist() == [True, False, False, False]
    assert readings.offsets.tolist() == [0, 2, 7, 11, 12]
    assert readings.rows.tolist() == [0, 1, 0, 1, 3, 2, 5, 1, 0, 2, 3, 0]
    assert readings.scores.tolist() == [1, 0.5, 1, 0.5, 0.5, 0, -1, 1, 0.5, 0.5, 0.5, 1]


@pytest.mark.parametrize("theta", [-1.0, 1.0, np.inf, -np.inf])
def test_extreme_thresholds(backend: Backend, theta: float) -> None:
    world = World(16, backend)
    vectors = unit(np.random.default_rng(5).standard_normal((50, 16)))
    vectors[10:20], vectors[20] = vectors[3], -vectors[3]
    segment = world.segment(vectors, np.ones(50, bool), np.arange(50) == 30)
    asked = {
        "queries": vectors[[3, 7]],
        "turn_segments": np.full(2, segment),
        "episode_segments": np.full(2, segment),
        "visible": np.array([50, 12]),
        "theta": np.full(2, theta),
        "k": np.array([4, 100]),
    }
    world.check(world.read(asked), asked)


def test_a_segment_of_100_000_equal_rows_and_small_ones() -> None:
    """All above theta, all tied: the count is whole, the lowest rows win; split over threads or not."""
    arena = host_arena(8)
    big, small = arena.new_segment(), arena.new_segment()
    vector = unit(np.ones((1, 8)))
    arena.extend(np.full(100_000, big), np.repeat(vector, 100_000, 0), live=True)
    arena.extend(np.full(3, small), np.repeat(vector, 3, 0), live=True)
    asked: dict[str, Any] = {
        "queries": np.repeat(vector, 4, 0),
        "turn_segments": np.array([big, small, big, big]),
        "episode_segments": np.array([big, big, -1, small]),
        "visible": np.array([EVERYTHING, EVERYTHING, 77_777, EVERYTHING]),
        "theta": np.array([0.5, 0.5, -1.0, 0.5]),
        "k": np.array([5, 5, 3, 100_000]),
    }
    readings = numba_gate(arena, threads=4).read(**asked)
    assert readings.count.tolist() == [100_000, 3, 77_777, 100_000]
    assert readings.nearest_row.tolist() == [0, 0, -1, 0]
    assert readings.rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, *range(100_000)]
    assert (readings.count > np.diff(readings.offsets)).tolist() == [True, False, True, False]
    same(readings, Gate(arena).read(**asked))
    same(readings, numba_gate(arena, threads=1).read(**asked))


def test_ragged_skew_is_split_evenly_and_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    arena = host_arena(64)
    sizes = np.concatenate(([20_000], rng.integers(0, 40, 300)))
    segments = np.array([arena.new_segment() for _ in sizes])
    owners = rng.permutation(np.repeat(segments, sizes))
    handles = arena.extend(owners, unit(rng.standard_normal((len(owners), 64))), live=True)
    arena.set_live(handles[rng.random(len(handles)) < 0.5], False)
    asked = {
        "queries": unit(rng.standard_normal((310, 64))),
        "turn_segments": np.concatenate((segments, np.full(9, segments[0]))),
        "episode_segments": rng.permutation(np.concatenate((segments, np.full(9, -1)))),
        "visible": rng.integers(0, 25_000, 310),
        "theta": rng.uniform(0.0, 0.4, 310),
        "k": rng.integers(0, 20, 310),
    }
    gate: Any = numba_gate(arena, threads=4)
    shares: list[int] = []
    run = gate._scan

    def spy(plan: Any, cells: Any, queries: Any, bounds: NDArray[np.int64]) -> None:
        group = np.repeat(np.arange(len(plan.group_rows)), np.diff(plan.group_task))
        begin = (np.arange(len(group)) - plan.group_task[group]) * plan.group_stride[group]
        rows = np.minimum(plan.group_stride[group], plan.group_rows[group] - begin)
        shares.extend(np.add.reduceat(rows * np.diff(plan.group_first)[group], bounds[:-1]).tolist())
        run(plan, cells, queries, bounds)

    monkeypatch.setattr(gate, "_scan", spy)
    same(gate.read(**asked), Gate(arena).read(**asked))
    assert len(shares) > 16
    assert max(shares) <= 2.1 * sum(shares) / 32


def test_every_output_is_written(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes poisoned: an entry that a kernel leaves alone would show."""
    world, pool = close_world(np.random.default_rng(3), 16, backend)
    asked = questions(np.random.default_rng(4), pool, 30)

    def poisoned(shape: Any, dtype: Any = np.float64) -> NDArray[Any]:
        return np.full(shape, 113 if np.dtype(dtype).kind in "iu" else np.nan, dtype)

    def poisoned_tensor(size: int, **options: Any) -> torch.Tensor:
        return torch.full((size,), torch.nan if options["dtype"].is_floating_point else 113, **options)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", poisoned)
        patch.setattr(torch, "empty", poisoned_tensor)
        readings = world.read(asked)
    world.check(readings, asked)


def test_empty_batch(backend: Backend) -> None:
    readings = backend.gate(backend.arena(4)).read(
        queries=np.zeros((0, 4), np.float16),
        turn_segments=[],
        episode_segments=[],
        visible=[],
        theta=[],
        k=[],
    )
    assert readings.offsets.tolist() == [0]
    assert [len(getattr(readings, f.name)) for f in fields(GateReadings)] == [0, 0, 0, 1, 0, 0]


BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"queries": np.zeros((1, 4), np.float32)}, "float16"),
    ({"queries": np.zeros((1, 5), np.float16)}, "shape"),
    ({"queries": np.full((1, 4), np.inf, np.float16)}, "not finite"),
    ({"turn_segments": [-1]}, "no segment -1"),
    ({"turn_segments": [9]}, "no segment 9"),
    ({"turn_segments": [1]}, "segment 1 was released"),
    ({"episode_segments": [1]}, "segment 1 was released"),
    ({"episode_segments": [-2]}, "no segment -2"),
    ({"turn_segments": [0, 0]}, "turn_segments must be 1 integers"),
    ({"visible": [0.5]}, "visible must be 1 integers"),
    ({"visible": [-1]}, "negative"),
    ({"k": [-1]}, "negative"),
    ({"theta": [np.nan]}, "NaN"),
    ({"theta": [0.5, 0.5]}, "theta"),
]


@pytest.mark.parametrize(("change", "message"), BAD_INPUT)
def test_bad_input_is_refused(backend: Backend, change: dict[str, Any], message: str) -> None:
    arena = backend.arena(4)
    arena.new_segment()
    arena.release(arena.new_segment())
    good = {"turn_segments": [0], "episode_segments": [-1], "visible": [1], "theta": [0.5], "k": [1]}
    asked: dict[str, Any] = {"queries": np.zeros((1, 4), np.float16), **good}
    assert backend.gate(arena).read(**asked).count.tolist() == [0]
    with pytest.raises(ValueError, match=message):
        backend.gate(arena).read(**(asked | change))


def test_the_arena_says_which_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_gate(host_arena(4))).__name__ == "NumbaGate"
    arena = SHIM.arena(4)
    monkeypatch.setattr(type(arena), "device", "cuda")
    monkeypatch.setattr("undertow.kernels.gate.cuda_gate.CudaGate", lambda arena: ("cuda", arena))
    made: Any = make_gate(arena)
    assert made == ("cuda", arena)
