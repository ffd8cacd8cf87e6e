"""The gate against an oracle in plain loops: the same bits, on every backend and for any batch."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.kernels import device
from undertow.kernels.arena import Arena
from undertow.kernels.gate import Gate, GateReadings, NumbaGate, make_gate

from .gate_oracle import Row, Store, cosine, nearest, relevant

BACKENDS = [Gate, NumbaGate]
EVERYTHING = np.iinfo(np.int64).max


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.__name__)
def backend(request: pytest.FixtureRequest) -> type[Gate]:
    chosen: type[Gate] = request.param
    return chosen


def unit(vectors: NDArray[Any]) -> NDArray[np.float16]:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float16)


def same(a: GateReadings, b: GateReadings) -> None:
    """Equal in every bit, dtypes included."""
    for field in fields(GateReadings):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes(), field.name


def gate_of(backend: type[Gate], arena: Arena) -> Gate:
    return NumbaGate(arena, threads=3) if backend is NumbaGate else backend(arena)


class World:
    """The same segments twice: as an arena, and as the oracle's lists."""

    def __init__(self, dim: int) -> None:
        self.arena, self.store = Arena(dim), Store()

    def segment(self, vectors: NDArray[np.float16], live: NDArray[np.bool_], gone: NDArray[np.bool_]) -> int:
        segment = self.arena.new_segment()
        handles = self.arena.extend(np.full(len(vectors), segment), vectors, live=True)
        self.arena.set_live(handles[~live], False)
        self.arena.redact(handles[gone])
        self.store.segments.append(
            [
                Row(np.zeros_like(v) if g else v, present=not g, live=bool(alive and not g))
                for v, alive, g in zip(vectors, live, gone, strict=True)
            ]
        )
        return segment

    def check(self, readings: GateReadings, asked: dict[str, Any]) -> None:
        assert readings.rows.dtype == readings.count.dtype == readings.offsets.dtype == np.int64
        for i, query in enumerate(asked["queries"]):
            best = nearest(self.store, int(asked["episode_segments"][i]), query)
            assert (readings.nearest_row[i], readings.nearest_score[i]) == best
            hits = relevant(
                self.store, int(asked["turn_segments"][i]), query, asked["visible"][i], asked["theta"][i]
            )
            kept = slice(readings.offsets[i], readings.offsets[i + 1])
            assert readings.count[i] == len(hits)
            assert readings.cut_bound[i] == (len(hits) > asked["k"][i])
            got = list(zip(readings.scores[kept].tolist(), readings.rows[kept].tolist(), strict=True))
            assert got == hits[: asked["k"][i]]
        assert readings.offsets[0] == 0
        assert readings.offsets[-1] == len(readings.rows) == len(readings.scores)


def close_world(rng: np.random.Generator, dim: int) -> tuple[World, NDArray[np.float16]]:
    """Segments of very different sizes made of few directions and their last-bit variants: ties abound."""
    world = World(dim)
    pool = unit(rng.standard_normal((6, dim)))
    pool = np.concatenate((pool, np.nextafter(pool, np.float16(4)), -pool[:1], unit(pool + pool[0])))
    for size in (0, 1, int(rng.integers(2, 9)), int(rng.integers(10, 90)), int(rng.integers(90, 300))):
        picks = pool[rng.integers(0, len(pool), size)]
        world.segment(picks, rng.random(size) < 0.7, rng.random(size) < 0.15)
    return world, pool


def questions(rng: np.random.Generator, pool: NDArray[np.float16], count: int) -> dict[str, Any]:
    queries = pool[rng.integers(0, len(pool), count)]
    # thresholds that are the score of some pair, or its neighbour among the doubles
    theta = np.array([cosine(q, pool[rng.integers(len(pool))]) for q in queries])
    nudge = rng.integers(-1, 2, count)
    theta = np.where(nudge < 0, np.nextafter(theta, -2), np.where(nudge > 0, np.nextafter(theta, 2), theta))
    theta[rng.random(count) < 0.1] = -1.0
    return {
        "queries": queries,
        "turn_segments": rng.integers(0, 5, count),
        "episode_segments": rng.integers(-1, 5, count),
        "visible": rng.choice([0, 1, 7, 40, 250, EVERYTHING], count),
        "theta": theta,
        "k": rng.choice([0, 1, 2, 8, 1000], count),
    }


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), dim=st.sampled_from([1, 3, 16, 33]), count=st.integers(0, 12))
def test_near_threshold_pairs_and_ties_as_the_oracle_decides(seed: int, dim: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    world, pool = close_world(rng, dim)
    asked = questions(rng, pool, count)
    readings = [gate_of(backend, world.arena).read(**asked) for backend in BACKENDS]
    for reading in readings:
        world.check(reading, asked)
    same(*readings)


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
    world, pool = close_world(rng, 16)
    asked = questions(rng, pool, 20)
    gate = NumbaGate(world.arena, threads=2)
    whole = gate.read(**asked)
    shuffled = rng.permutation(20)
    for places in np.array_split(shuffled, parts):
        part = gate.read(**{name: value[places] for name, value in asked.items()})
        for j, i in enumerate(places):
            for name in ("nearest_row", "nearest_score", "count", "cut_bound"):
                assert getattr(part, name)[j] == getattr(whole, name)[i]
            mine, theirs = slice(*part.offsets[j : j + 2]), slice(*whole.offsets[i : i + 2])
            assert part.rows[mine].tobytes() == whole.rows[theirs].tobytes()
            assert part.scores[mine].tobytes() == whole.scores[theirs].tobytes()


def test_numbers_made_by_hand(backend: type[Gate]) -> None:
    """Halves and quarters: every score can be added up on paper."""
    arena = Arena(4)
    turns, episodes = arena.new_segment(), arena.new_segment()
    x, y, half, mixed = [1.0, 0, 0, 0], [0, 1.0, 0, 0], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, -0.5, 0.5]
    rows = [x, half, y, mixed, x, [-1.0, 0, 0, 0]]
    handles = arena.extend(np.full(6, turns), np.array(rows, np.float16), live=True)
    arena.set_live(handles[4], False)
    arena.extend(np.full(3, episodes), np.array([y, half, mixed], np.float16), live=False)
    readings = gate_of(backend, arena).read(
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
    assert readings.cut_bound.tolist() == [True, False, False, False]
    assert readings.offsets.tolist() == [0, 2, 7, 11, 12]
    assert readings.rows.tolist() == [0, 1, 0, 1, 3, 2, 5, 1, 0, 2, 3, 0]
    assert readings.scores.tolist() == [1, 0.5, 1, 0.5, 0.5, 0, -1, 1, 0.5, 0.5, 0.5, 1]


@pytest.mark.parametrize("theta", [-1.0, 1.0, np.inf, -np.inf])
def test_extreme_thresholds(backend: type[Gate], theta: float) -> None:
    world = World(16)
    rng = np.random.default_rng(5)
    vectors = unit(rng.standard_normal((50, 16)))
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
    world.check(gate_of(backend, world.arena).read(**asked), asked)


def test_a_segment_of_100_000_equal_rows_and_small_ones() -> None:
    """All above theta, all tied: the count is whole, the lowest rows win; split over threads or not."""
    arena = Arena(8)
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
    readings = NumbaGate(arena, threads=4).read(**asked)
    assert readings.count.tolist() == [100_000, 3, 77_777, 100_000]
    assert readings.nearest_row.tolist() == [0, 0, -1, 0]
    assert readings.rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, *range(100_000)]
    assert readings.cut_bound.tolist() == [True, False, True, False]
    same(readings, Gate(arena).read(**asked))
    same(readings, NumbaGate(arena, threads=1).read(**asked))


def test_ragged_skew_is_split_evenly_and_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    arena = Arena(64)
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
    gate = NumbaGate(arena, threads=4)
    shares: list[int] = []
    run = gate._scan

    def spy(plan: Any, cells: Any, bounds: NDArray[np.int64]) -> None:
        work = (plan.task_end - plan.task_begin) * np.diff(plan.group_start)[plan.task_group]
        shares.extend(np.add.reduceat(work, bounds[:-1]).tolist())
        run(plan, cells, bounds)

    monkeypatch.setattr(gate, "_scan", spy)
    same(gate.read(**asked), Gate(arena).read(**asked))
    assert len(shares) > 16
    assert max(shares) <= 2.1 * sum(shares) / 32


def test_every_output_is_written(backend: type[Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes poisoned: an entry that a kernel leaves alone would show."""
    world, pool = close_world(np.random.default_rng(3), 16)
    asked = questions(np.random.default_rng(4), pool, 30)

    def poisoned(shape: Any, dtype: Any = np.float64) -> NDArray[Any]:
        return np.full(shape, 113 if np.dtype(dtype).kind in "iu" else np.nan, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", poisoned)
        readings = gate_of(backend, world.arena).read(**asked)
    world.check(readings, asked)


def test_empty_batch(backend: type[Gate]) -> None:
    readings = gate_of(backend, Arena(4)).read(
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
def test_bad_input_is_refused(backend: type[Gate], change: dict[str, Any], message: str) -> None:
    arena = Arena(4)
    arena.new_segment()
    arena.release(arena.new_segment())
    good = {"turn_segments": [0], "episode_segments": [-1], "visible": [1], "theta": [0.5], "k": [1]}
    asked: dict[str, Any] = {"queries": np.zeros((1, 4), np.float16), **good}
    assert backend(arena).read(**asked).count.tolist() == [0]
    with pytest.raises(ValueError, match=message):
        backend(arena).read(**(asked | change))


def test_backends_have_one_signature() -> None:
    for name in ("read", "_read", "_check"):
        assert len({str(inspect.signature(getattr(backend, name))) for backend in BACKENDS}) == 1


def test_a_device_named_is_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "HAS_CUDA", False)
    arena = Arena(4)
    assert isinstance(make_gate(arena), NumbaGate)
    assert isinstance(make_gate(arena, "cpu"), NumbaGate)
    with pytest.raises(ValueError, match="no CUDA device"):
        make_gate(arena, "cuda")
    with pytest.raises(ValueError, match="unknown device"):
        make_gate(arena, "tpu")  # type: ignore[arg-type]
