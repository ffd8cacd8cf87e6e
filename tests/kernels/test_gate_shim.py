"""gate.cu run on the CPU, lane by lane: wide vectors, many queries, many tasks; and wrong kernels are found.

The tensor cores' fragments follow the PTX ISA, and their sums either fp32 or what is known of the
hardware, which cuts bits off (see `kernels/error_bounds.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.kernels.arena.row_codes import codes_of
from undertow.kernels.error_bounds import CODE_SLACK, MAX_NORM, tensor_core_slack
from undertow.kernels.gate import planned_gate
from undertow.kernels.gate.cuda_gate import CudaGate, Rings, source
from undertow.kernels.gate.gate import Gate
from undertow.kernels.gate.plan import MAX_SPACE_BYTES, MAX_TASKS, ProbeBatch, TaskLimits, lay_out

from ..support.kernels.cuda_shim.shim import COMPILER, ShimError, ShimKernels, build, guarded
from ..support.kernels.gate_mutants import CODE_MUTANTS, MESSAGES, MUTANTS, RING_MUTANTS
from ..support.kernels.gate_worlds import (
    CODE_SHIM,
    EVERYTHING,
    NUMBA,
    NUMPY_ON_DEVICE,
    PLANNED,
    SHIM,
    SHIMS,
    Backend,
    World,
    close_world,
    fill,
    questions,
    same,
    shim_arena,
    shim_gate,
    shim_library,
    shim_rings,
    unit,
)
from ..support.oracles.gate import cosine

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

# 72 and 200 leave steps of 32 columns incomplete, 1000 a whole batch of them
DIMS = [64, 72, 96, 200, 384, 768, 1000, 1024]


def many_questions(rng: np.random.Generator, pool: NDArray[np.float16]) -> dict[str, Any]:
    """1 to 20 queries a segment, in any order."""
    asked = questions(rng, pool, 40)
    owners = np.repeat(np.arange(5), rng.integers(1, 21, 5))[:40]
    asked["turn_segments"][: len(owners)] = owners
    order = rng.permutation(40)
    return {name: values[order] for name, values in asked.items()}


@pytest.mark.rarely(dim=(96, 200, 768, 1024))
@pytest.mark.parametrize("dim", DIMS)
def test_every_width_reads_as_the_cpu_does(dim: int) -> None:
    rng = np.random.default_rng(dim)
    world, pool = close_world(rng, dim, NUMBA, *SHIMS)
    asked = many_questions(rng, pool)
    for name, value in {"turn_segments": 4, "visible": EVERYTHING, "theta": -1.0, "k": 20}.items():
        asked[name][0] = value
    readings = world.read(asked)
    few = {name: values[:1] for name, values in asked.items()}
    world.check(world.read(few), few)
    assert readings.count[0] > 30


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), dim=st.sampled_from([64, 72]), segments=st.integers(1, 40))
def test_ragged_batches_read_as_the_cpu_does(seed: int, dim: int, segments: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(dim, NUMBA, *SHIMS)
    sizes = np.minimum(rng.zipf(1.6, segments), 700) - rng.integers(0, 2, segments)
    pool = fill(world, rng, dim, tuple(sizes.tolist()))
    asked = questions(rng, pool, 60)
    for name, lowest in (("turn_segments", 0), ("episode_segments", -1)):
        asked[name] = rng.integers(lowest, segments, 60)
    world.read(asked)


def tall_world(*backends: Backend) -> tuple[World, dict[str, Any]]:
    """3,000 rows of one direction and its last-bit variants: near ties, split over many tasks."""
    rng = np.random.default_rng(8)
    world = World(64, *backends)
    vector = unit(rng.standard_normal((1, 64)))
    variants = np.concatenate(
        (vector, np.nextafter(vector, np.float16(4)), np.nextafter(vector, np.float16(-4)))
    )
    for size in (3000, 40):
        picks = variants[rng.integers(0, 3, size)]
        world.segment(picks, rng.random(size) < 0.9, rng.random(size) < 0.05)
    return world, {
        "queries": variants[[0, 1, 2, 0, 1]],
        "turn_segments": np.array([0, 0, 1, 0, 0]),
        "episode_segments": np.array([0, 1, 0, -1, 0]),
        "visible": np.array([EVERYTHING, 1777, EVERYTHING, 2999, 31]),
        "theta": np.array([0.5, 1.0, -1.0, np.inf, -np.inf]),
        "k": np.array([10, 100, 5, 3, 40]),
    }


def test_all_rows_above_theta_none_and_exact_ties() -> None:
    world, asked = tall_world(NUMBA, *SHIMS)
    readings = world.read(asked)
    assert readings.count[0] > 2000
    cut = readings.count > np.diff(readings.offsets)
    assert cut.tolist() == [True, readings.count[1] > 100, True, False, False]
    assert readings.count[3] == 0


@pytest.mark.parametrize("cut_block", [1, 4, 8, 16])
@pytest.mark.parametrize("descending", [False, True])
def test_sums_that_lose_bits_and_the_order_of_lanes_change_nothing(cut_block: int, descending: bool) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        world, pool = close_world(rng, 64, NUMPY_ON_DEVICE, SHIM)
        asked = many_questions(rng, pool)
        same(
            world.read(asked),
            shim_gate(world.arenas[1], cut_block=cut_block, descending=descending).read(**asked),
        )


def adversarial(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float16]:
    """Vectors of norm close to 4: one sign, alternating signs, few large values among tiny ones."""
    kinds = [
        np.abs(rng.standard_normal((rows, dim))),
        np.ones((rows, dim)) * np.where(np.arange(dim) % 2, -1, 1),
        rng.standard_normal((rows, dim)) * 2.0 ** rng.integers(-14, 1, (rows, dim)),
        rng.standard_normal((rows, dim)) * np.where(rng.random((rows, dim)) < 0.02, 1.0, 1e-4),
    ]
    vectors = np.stack(kinds)[rng.integers(0, 4, rows), np.arange(rows)]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    near: NDArray[np.float16] = (vectors / lengths * (MAX_NORM - 0.01)).astype(np.float16)
    return near


@pytest.mark.parametrize("cut_block", [0, 1, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 384, 1024])
def test_tensor_scores_are_within_the_slack(dim: int, cut_block: int) -> None:
    rng, scores, worst = np.random.default_rng(dim), np.empty((32, 8), np.float32), 0.0
    for _ in range(5):
        rows, queries = adversarial(rng, 32, dim), adversarial(rng, 8, dim)
        queries[:4] = rows[:4]
        told = shim_library(dim).tensor_scores(
            *(ctypes.c_void_p(array.ctypes.data) for array in (rows, queries, scores)), cut_block
        )
        assert told is None
        exact = rows.astype(np.float64) @ queries.astype(np.float64).T
        worst = max(worst, float(np.abs(scores - exact).max()))
    assert 0 < worst <= tensor_core_slack(dim)


@pytest.mark.parametrize("dim", [1, 16, 72, 384, 1024])
def test_scores_of_codes_are_within_their_bounds(dim: int) -> None:
    rng, told = np.random.default_rng(dim), np.empty((2, 32, 8), np.float32)
    for _ in range(5):
        rows, queries = adversarial(rng, 32, dim), adversarial(rng, 8, dim)
        queries[:4], rows[5] = rows[:4], 0
        codes = [codes_of(torch.from_numpy(vectors)).numpy() for vectors in (rows, queries)]
        error = shim_library(dim, coded=True).tensor_scores(
            *(ctypes.c_void_p(array.ctypes.data) for array in (*codes, told)), 0
        )
        assert error is None
        highest, lowest = told.astype(np.float64)
        exact = rows.astype(np.float64) @ queries.astype(np.float64).T
        assert (lowest - CODE_SLACK <= exact).all() and (exact <= highest + CODE_SLACK).all()
        assert (highest - lowest).mean() < 0.2 * MAX_NORM**2, "bounds that say nothing"


def test_segments_without_rows_are_read() -> None:
    world = World(64, NUMBA, SHIM)
    for _ in range(3):
        world.segment(np.zeros((0, 64), np.float16), np.zeros(0, bool), np.zeros(0, bool))
    asked = {
        "queries": np.zeros((3, 64), np.float16),
        "turn_segments": np.array([0, 2, 2]),
        "episode_segments": np.array([1, -1, 0]),
        "visible": np.full(3, EVERYTHING),
        "theta": np.full(3, -1.0),
        "k": np.full(3, 5),
    }
    world.check(world.read(asked), asked)


def test_a_prepared_batch_can_be_launched_again() -> None:
    rng = np.random.default_rng(2)
    world, pool = close_world(rng, 64, SHIM)
    asked = many_questions(rng, pool)
    gate = shim_gate(world.arenas[0])
    prepared = gate.prepare(**asked)
    for _ in range(2):
        gate.launch(prepared)
        same(gate.collect(prepared), world.read(asked))


def test_queries_as_a_tensor_of_the_device_in_any_layout() -> None:
    rng = np.random.default_rng(3)
    for dim in (64, 33):
        world, pool = close_world(rng, dim, SHIM)
        asked = many_questions(rng, pool)
        expected, queries = world.read(asked), torch.from_numpy(asked["queries"])
        strided = torch.zeros((len(queries), dim + 5), dtype=torch.float16)[:, 3 : dim + 3].copy_(queries)
        shifted = torch.zeros(queries.numel() + 1, dtype=torch.float16)[1:].view_as(queries).copy_(queries)
        for form in (queries, strided, shifted):
            same(expected, world.read(asked | {"queries": form}))


def test_tasks_of_a_large_tenant_are_as_small_as_the_others() -> None:
    """Bytes of the largest task, with one tenant of 12,000 rows beside 150 small ones."""
    arena = shim_arena(64)
    sizes = [12_000, *([60] * 150)]
    for size in sizes:
        segment = arena.new_segment()
        arena.extend(np.full(size, segment), np.zeros((size, 64), np.float16), live=True)
    gate = shim_gate(arena)
    prepared = gate.prepare(
        queries=np.zeros((151, 64), np.float16),
        turn_segments=np.arange(151),
        episode_segments=np.full(151, -1),
        visible=np.full(151, EVERYTHING),
        theta=np.full(151, 0.5),
        k=np.full(151, 10),
    )
    assert prepared.scanned_bytes == sum(sizes) * 128
    tasks = int(prepared.plan["tasks"])
    largest = (ctypes.c_int64 * 151).from_address(int(prepared.plan["stride"]))[0]
    assert tasks >= 150 + gate._kernels.warps * 4
    assert largest <= sum(sizes) / (gate._kernels.warps * 8) + 32


@pytest.mark.parametrize(
    ("queries", "tenants", "rows", "k"),
    [(256, 1, 1_000_000, 101), (8192, 128, 7_800, 100), (1, 1, 1_000_000, 101)],
)
def test_a_plan_keeps_within_its_space(queries: int, tenants: int, rows: int, k: int) -> None:
    """On a card with 132 multiprocessors; unbounded, the first two would take 4.2 and 1.7 GB."""
    warps = 132 * 16
    cut = TaskLimits(tasks=8 * warps, least_work=32, abreast=8, step_rows=32, enough=warps // 4)
    asked = ProbeBatch(
        query=np.arange(queries),
        segment=np.arange(queries) % tenants,
        vectors=np.zeros(queries, np.int64),
        flags=np.zeros(queries, np.int64),
        limit=np.full(queries, rows),
        flag=np.ones(queries, np.int64),
        theta=np.full(queries, -np.inf),
        k=np.full(queries, k),
    )
    plan = lay_out(asked, cut, lambda size: np.empty(size, np.int64), MAX_SPACE_BYTES)
    assert plan.space_bytes == 16 * int(plan.probe_cell[-1] + plan.probe_list[-1])
    assert plan.space_bytes <= MAX_SPACE_BYTES
    assert np.diff(plan.probe_cell).max() <= MAX_TASKS
    assert plan.group_task[-1] >= warps // 8
    # the tasks of each group cover its rows, and none is empty
    tasks = np.diff(plan.group_task)
    assert (tasks * plan.group_stride >= rows).all()
    assert ((tasks - 1) * plan.group_stride < rows).all()


@pytest.mark.parametrize("backend", [PLANNED, SHIM])
def test_a_batch_read_in_parts_reads_as_the_whole(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, calls_of: Callable[..., list[int]]
) -> None:
    rng = np.random.default_rng(6)
    world, pool = close_world(rng, 64, backend)
    asked = many_questions(rng, pool)
    whole = world.read(asked)
    gate = backend.gate(world.arenas[0])
    parts = calls_of(gate, "_run", lambda probes, plan: len(probes))
    monkeypatch.setattr(planned_gate, "MAX_SPACE_BYTES", 1024)
    same(whole, gate.read(**asked))
    assert sum(parts) == 40
    assert 1 < len(parts) <= 40


# -- planted errors


def thin_world(*backends: Backend) -> tuple[World, dict[str, Any]]:
    """Segments of 4 rows that lie side by side, every second one asked, with the exact score as theta."""
    world, vector = World(64, *backends), unit(np.random.default_rng(4).standard_normal(64))
    for _ in range(40):
        world.segment(np.stack([vector] * 4), np.ones(4, bool), np.zeros(4, bool))
    return world, {
        "queries": np.stack([vector] * 20),
        "turn_segments": np.arange(0, 40, 2),
        "episode_segments": np.full(20, -1),
        "visible": np.full(20, EVERYTHING),
        "theta": np.full(20, cosine(vector, vector)),
        "k": np.full(20, 2),
    }


def rising_world(*backends: Backend) -> tuple[World, dict[str, Any]]:
    """Each row is a little nearer than the one before, by less than what sums lose."""
    rng = np.random.default_rng(5)
    world, vector = World(64, *backends), np.abs(unit(rng.standard_normal(64)))
    rows = np.stack([vector] * 300)
    for row in rows:
        some = rng.integers(0, 64, 20)
        row[some] = np.nextafter(row[some], rng.choice(np.array([-4, 4], np.float16), 20))
    rows = rows[np.argsort(rows.astype(np.float64) @ vector.astype(np.float64))]
    world.segment(rows, np.ones(300, bool), np.zeros(300, bool))
    return world, {
        "queries": np.stack([vector] * 2),
        "turn_segments": np.zeros(2, np.int64),
        "episode_segments": np.array([0, -1]),
        "visible": np.array([EVERYTHING, 200]),
        "theta": np.full(2, -1.0),
        "k": np.array([1, 3]),
    }


def leaning_world(*backends: Backend) -> tuple[World, dict[str, Any]]:
    """Rounding to codes takes as much of these scores as it can: each error is parallel to the other vector.

    Only what fp32 loses then decides whether the bound reaches the theta, so that some need the slack.
    """
    variants = np.full((40, 64), 30.4) + np.arange(40)[:, None] / 500
    variants[:, 0] = 127
    flat, leaning = (
        (3.7 * v / np.linalg.norm(v, axis=-1, keepdims=True)).astype(np.float16)
        for v in (np.minimum(np.arange(64.0), 1), variants)
    )
    world = World(64, *backends)
    for rows in (np.stack([flat] * 40), leaning):
        world.segment(rows, np.ones(40, bool), np.zeros(40, bool))
    exact = np.array([cosine(flat, row) for row in leaning])
    return world, {
        "queries": np.concatenate((leaning, np.stack([flat] * 40))),
        "turn_segments": np.repeat([0, 1], 40),
        "episode_segments": np.repeat([1, 0], 40),
        "visible": np.full(80, EVERYTHING),
        "theta": np.concatenate((exact, exact)),
        "k": np.full(80, 3),
    }


@cache
def hard_cases() -> list[tuple[World, dict[str, Any]]]:
    held = (NUMBA, SHIM, CODE_SHIM)
    cases = [world(*held) for world in (thin_world, rising_world, leaning_world)]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        world, pool = close_world(rng, 64, *held)
        cases.append((world, many_questions(rng, pool)))
    return [*cases, tall_world(*held)]


def hard_reads(library: ctypes.CDLL, rings: Rings | None = None, coded: bool = False) -> None:
    """Read hard cases by a library, each with an order of warps. AssertionError or ShimError: it errs."""
    for seed, (world, asked) in enumerate(hard_cases()):
        reference = world.backends[0].gate(world.arenas[0]).read(**asked)
        for descending in (False, True):
            kernels = ShimKernels(library, 64, cut_block=4, descending=descending, seed=seed, rings=rings)
            same(reference, poisoned_read(CudaGate(world.arenas[1 + coded], kernels), asked))


def poisoned_read(gate: Gate, asked: dict[str, Any]) -> Any:
    """Read with plan, cells and results in guarded memory."""
    empty = torch.empty

    def poisoned(size: int, *, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        return guarded(size, dtype) if size else empty(size, dtype=dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        return gate.read(**asked)


def test_the_right_kernel_passes_what_wrong_ones_are_put_to() -> None:
    for stages, coded in ((0, False), (1, False), (2, False), (3, False), (0, True), (2, True)):
        hard_reads(shim_library(64, stages, coded), shim_rings(64, stages, coded), coded)


EVERY_MUTANT = [
    *((name, 0, False) for name in MUTANTS),
    *((name, 2, False) for name in RING_MUTANTS),
    *((name, 0, True) for name in CODE_MUTANTS),
]


@pytest.mark.rarely(name=[mutant[0] for n, mutant in enumerate(EVERY_MUTANT) if n % 3])
@pytest.mark.parametrize(("name", "stages", "coded"), EVERY_MUTANT)
def test_a_planted_error_is_found(name: str, stages: int, coded: bool, tmp_path: Path) -> None:
    right, wrong = (MUTANTS | RING_MUTANTS | CODE_MUTANTS)[name]
    text, rings = source(), shim_rings(64, stages, coded)
    assert text.count(right) == 1
    library = build(tmp_path, 64, text.replace(right, wrong), rings, coded)
    errors = (AssertionError, ShimError, RuntimeError, IndexError, ValueError)
    with pytest.raises(errors, match=MESSAGES.get(name)):
        hard_reads(library, rings, coded)
