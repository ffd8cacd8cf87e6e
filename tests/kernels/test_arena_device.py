"""The arena's device memory, on torch's CPU device: one pool, packed when scattered, flags in step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from undertow.kernels.arena.arena import LIVE, PRESENT, Arena, make_arena
from undertow.kernels.arena.device_memory import DeviceMemory
from undertow.kernels.arena.range_allocator import (
    DOUBLING_ROWS,
    SMALLEST_ROWS,
    Range,
    RangeAllocator,
    class_rows,
)
from undertow.kernels.arena.row_codes import codes_of
from undertow.kernels.device import HAS_CUDA

from ..support.kernels.arena import DIM, ROW_BYTES, arena_of, pool_bytes, random_vectors


class ArenaMachine(RuleBasedStateMachine):
    """An arena on the host under arbitrary use, against lists."""

    device = "cpu"
    memory: DeviceMemory | None = None

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(DIM, self.memory)
        self.model: dict[int, list[tuple[bytes, int]]] = {}
        for _ in range(5):
            self.model[self.arena.new_segment()] = []

    def check_refusal(self, free: int, slabs: list[int]) -> None:
        """Whether a MemoryError was right: `free` rows for these new slabs."""
        raise AssertionError("the host refused memory")

    def check_compacted(self) -> None:
        assert self.arena.used_bytes <= self.arena.nbytes

    @rule(
        counts=st.lists(st.integers(0, 130), min_size=5, max_size=5),
        seed=st.integers(0, 999),
        live=st.booleans(),
    )
    def extend(self, counts: list[int], seed: int, live: bool) -> None:
        rng = np.random.default_rng(seed)
        owners = rng.permutation(np.repeat(sorted(self.model), counts))
        vectors = random_vectors(rng, len(owners))
        given: NDArray[np.float16] | torch.Tensor = vectors
        if seed % 2 and self.memory is not None:
            given = torch.from_numpy(vectors).to(self.device)
        free = ((self.arena.capacity_bytes or 0) - self.arena.nbytes) // self.arena.stored_bytes
        grown = {s: len(rows) + int((owners == s).sum()) for s, rows in self.model.items()}
        try:
            handles = self.arena.extend(owners, given, live)
        except MemoryError:
            # each segment that outgrows its slab needs a new one while it still has the old
            self.check_refusal(free, [n for s, n in grown.items() if n > len(self.model[s])])
            return
        for owner, vector, handle in zip(owners.tolist(), vectors, handles.tolist(), strict=True):
            assert handle == Arena.handle(owner, len(self.model[owner]))
            self.model[owner].append((vector.tobytes(), PRESENT | (LIVE if live else 0)))

    @rule(seed=st.integers(0, 999), what=st.sampled_from(["redact", "dead", "write"]))
    def change(self, seed: int, what: str) -> None:
        rng = np.random.default_rng(seed)
        rows = [(s, r) for s, of in self.model.items() for r, (_, flag) in enumerate(of) if flag & PRESENT]
        if not rows:
            return
        chosen = [rows[i] for i in rng.integers(0, len(rows), 6)]  # with repetitions
        handles = np.array([Arena.handle(s, r) for s, r in chosen])
        if what == "redact":
            self.arena.redact(handles)
        elif what == "dead":
            self.arena.set_live(handles, False)
        vectors = random_vectors(rng, 6)
        if what == "write":
            self.arena.write(handles, vectors)
        for (s, r), vector in zip(chosen, vectors, strict=True):
            value, flag = self.model[s][r]
            after = {
                "redact": (bytes(2 * DIM), 0),
                "dead": (value, PRESENT),
                "write": (vector.tobytes(), flag),
            }
            self.model[s][r] = after[what]

    @rule(which=st.integers(0, 4))
    def release(self, which: int) -> None:
        segment = sorted(self.model)[which]
        self.arena.release(segment)
        del self.model[segment]
        self.model[self.arena.new_segment()] = []

    @precondition(lambda self: any(self.model.values()))
    @rule()
    def compact(self) -> None:
        before = self.arena.nbytes
        assert self.arena.compact() == before - self.arena.nbytes
        self.check_compacted()

    @invariant()
    def reads_like_lists(self) -> None:
        for segment, expected in self.model.items():
            assert self.arena.length(segment) == len(expected)
            handles = [Arena.handle(segment, row) for row in range(len(expected))]
            assert self.arena.vector16(handles).tobytes() == b"".join(v for v, _ in expected)
            assert self.arena.flags(segment).tolist() == [f for _, f in expected]
        rows = sum(map(len, self.model.values()))
        assert self.arena.used_bytes == rows * self.arena.stored_bytes <= self.arena.nbytes


class PoolMachine(ArenaMachine):
    """A small pool: it may refuse only what it has no rows for, and what is free is zero."""

    memory: DeviceMemory
    coded = False

    def __init__(self) -> None:
        self.memory = DeviceMemory(DIM, self.device, pool_bytes(600), self.coded)
        super().__init__()

    def check_refusal(self, free: int, slabs: list[int]) -> None:
        assert free < sum(map(class_rows, slabs))

    def check_compacted(self) -> None:
        held = sum(class_rows(len(rows)) for rows in self.model.values() if rows)
        assert self.arena.nbytes == held * self.memory.stored_bytes

    @invariant()
    def the_pool_holds_them_and_nothing_else(self) -> None:
        segments = sorted(self.model)
        addresses, flag_addresses, lengths = self.arena.locate(segments)
        first, first_flag = self.memory._rows.data_ptr(), self.memory._flags.data_ptr()
        rows = self.memory._rows.cpu().numpy().copy()
        flags = self.memory._flags.cpu().numpy().copy()
        codes = self.memory._codes.cpu().numpy()
        expected_codes = codes_of(self.memory._values).cpu().numpy()[:, : codes.shape[1]]
        np.testing.assert_array_equal(codes, np.where(flags[:, None], expected_codes, 0))
        np.testing.assert_array_equal(flags, self.memory._mirror)
        for i, segment in enumerate(segments):
            expected = self.model[segment]
            assert self.arena.length(segment) == lengths[i] == len(expected)
            if not expected:
                continue
            start = int(addresses[i] - first) // ROW_BYTES
            assert (addresses[i] - first) % ROW_BYTES == 0 and flag_addresses[i] - first_flag == start
            here = slice(start, start + len(expected))
            assert rows[here, :DIM].tobytes() == b"".join(v for v, _ in expected)
            assert flags[here].tolist() == [f for _, f in expected]
            assert torch.equal(self.arena.vectors(segment).cpu(), torch.from_numpy(rows[here, :DIM].copy()))
            rows[here], flags[here] = 0, 0
        # padding, room for growth and free rows are zero
        assert not rows.any()
        assert not flags.any()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_history_of_an_arena_on_the_host_reads_like_lists = ArenaMachine.TestCase

PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_history_of_a_small_pool_reads_like_lists = PoolMachine.TestCase


class CodedPoolMachine(PoolMachine):
    """Codes go where their rows go, and nowhere else."""

    coded = True


CodedPoolMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
test_any_history_of_a_pool_with_codes_reads_like_lists = CodedPoolMachine.TestCase


class CardPoolMachine(CodedPoolMachine):
    device = "cuda"


CardPoolMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
test_any_history_of_a_pool_on_a_card_reads_like_lists = pytest.mark.gpu(CardPoolMachine.TestCase)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(60, 3000))
def test_growing_segments_are_served_while_their_slabs_fill_half_the_pool(seed: int, total: int) -> None:
    """The promise: however segments grow and go, half the pool is theirs. Scattering costs none of it."""
    rng, arena = np.random.default_rng(seed), arena_of(total)
    lengths: dict[int, int] = {}
    for _ in range(120):
        if not lengths or rng.random() < 0.2:
            lengths[arena.new_segment()] = 0
        segment = int(rng.choice(list(lengths)))
        grown = lengths[segment] + int(rng.choice([1, 1, 3, 20, 200]))
        others = sum(class_rows(n) for s, n in lengths.items() if s != segment and n)
        if rng.random() < 0.1 or 2 * (others + class_rows(grown)) > total:
            arena.release(segment)
            del lengths[segment]
            continue
        count = grown - lengths[segment]
        arena.extend(np.full(count, segment), random_vectors(rng, count), live=True)
        lengths[segment] = grown
    assert {s: arena.length(s) for s in lengths} == lengths


def test_every_free_row_of_a_scattered_pool_can_be_had() -> None:
    """Every other small slab is given back; then one segment takes all that is free, others moving up."""
    arena, rng = arena_of(400), np.random.default_rng(0)
    segments = [arena.new_segment() for _ in range(64)]
    vectors = random_vectors(rng, 64 * 4)
    arena.extend(np.repeat(segments, 4), vectors, live=True)
    filler = arena.new_segment()
    capacity = arena.capacity_bytes
    assert capacity is not None
    while True:
        rows = arena.length(filler) + 1
        try:
            arena.extend([filler], random_vectors(rng, 1), live=True)
        except MemoryError:
            break
    assert rows == 129  # its slab cannot become one of 256 rows
    for segment in segments[::2]:
        arena.release(segment)
    large = arena.new_segment()
    arena.extend(np.full(128, large), random_vectors(rng, 128), live=False)
    kept = np.arange(256).reshape(64, 4)[1::2].ravel()
    handles = [Arena.handle(segment, row) for segment in segments[1::2] for row in range(4)]
    np.testing.assert_array_equal(arena.vector16(handles), vectors[kept])
    assert arena.flags(segments[1]).tolist() == [PRESENT | LIVE] * 4
    assert arena.flags(large).tolist() == [PRESENT] * 128


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=60))
def test_ranges_are_disjoint_and_free_neighbours_are_joined(steps: list[tuple[int, int]]) -> None:
    ranges, held = RangeAllocator(200), list[Range]()
    for step, rows in steps:
        if step == 0 and (taken := ranges.take(rows)) is not None:
            held.append(taken)
        elif step == 0:
            assert ranges.largest_free < rows
        elif step == 1 and held:
            ranges.give(held.pop(rows % len(held)))
        elif step == 2 and held:
            ranges.stretch(held[rows % len(held)], rows)
        elif step == 3:
            before = {id(r): r.start for r in held}
            first, sources = ranges.pack()
            for r in held:
                assert r.start <= before[id(r)]
                if r.start >= first:
                    assert sources[r.start - first] == before[id(r)]
            assert ranges.largest_free == ranges.free
        used = sorted((r.start, r.end) for r in held)
        bounds = [0, *(edge for pair in used for edge in pair), 200]
        assert bounds == sorted(bounds)
        gaps = [b - a for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
        assert (ranges.free, ranges.largest_free) == (sum(gaps), max(gaps))


def test_classes_double_and_then_grow_by_a_quarter() -> None:
    assert [class_rows(n) for n in (1, 4, 5, 9, 256, 257)] == [4, 4, 8, 16, 256, 320]
    for rows in range(1, 20_000, 7):
        size = class_rows(rows)
        assert size >= rows and size % SMALLEST_ROWS == 0
        assert size <= (
            max(2 * rows, SMALLEST_ROWS) if rows <= DOUBLING_ROWS else 1.25 * rows + SMALLEST_ROWS
        )


def test_a_closed_arena_has_given_its_memory_back_and_says_so() -> None:
    memory = DeviceMemory(DIM, "cpu", pool_bytes(100))
    arena, gone = Arena(DIM, memory), weakref.ref(memory)
    handles = arena.extend([arena.new_segment()], np.full((1, DIM), 0.25, np.float16), live=True)
    del memory
    arena.close()
    arena.close()
    assert gone() is None
    assert (arena.nbytes, arena.capacity_bytes) == (0, 0)
    uses: list[Callable[[], object]] = [
        lambda: arena.take(handles),
        lambda: arena.locate([0]),
        lambda: arena.extend([arena.new_segment()], np.zeros((1, DIM), np.float16), live=True),
        lambda: arena.row_bytes,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="the arena was closed"):
            use()


def test_a_full_pool_refuses_with_figures_and_changes_nothing() -> None:
    arena = arena_of(100)
    segment = arena.new_segment()
    rng = np.random.default_rng(0)
    handles = arena.extend(np.full(40, segment), random_vectors(rng, 40), live=True)
    before = arena.vector16(handles)
    with pytest.raises(MemoryError, match=r"room for \d+ of \d+ rows, \d+ of them together.* needs 128"):
        arena.extend(np.full(60, segment), random_vectors(rng, 60), live=True)
    np.testing.assert_array_equal(arena.vector16(handles), before)
    assert arena.length(segment) == 40
    arena.extend([segment], random_vectors(rng, 1), live=True)


def test_one_call_can_use_the_room_that_it_has_freed() -> None:
    """In a full pool the second segment grows into the slab that the first one left in the same call."""
    arena, rng = arena_of(19), np.random.default_rng(0)
    first, second, third = (arena.new_segment() for _ in range(3))
    owners = np.repeat([second, first, third], 4)  # in this order they lie in the pool
    vectors = random_vectors(rng, 12)
    handles = np.concatenate([arena.extend(owners[i : i + 4], vectors[i : i + 4], True) for i in (0, 4, 8)])
    arena.reserve([first, second])
    assert arena.nbytes == arena.capacity_bytes == 20 * (ROW_BYTES + 1)
    np.testing.assert_array_equal(arena.vector16(handles), vectors)


@pytest.mark.parametrize("failing", range(1, 12))
def test_a_move_that_fails_loses_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve slabs are outgrown in one call, and an upload fails somewhere: the next calls go on."""
    arena, rng = (
        Arena(DIM, memory := DeviceMemory(DIM, "cpu", pool_bytes(800), coded=True)),
        np.random.default_rng(0),
    )
    owners = np.repeat([arena.new_segment() for _ in range(12)], 4)
    vectors = random_vectors(rng, 48)
    handles = np.concatenate([arena.extend(owners[i::4], vectors[i::4], True) for i in range(4)])
    upload, uploads = memory._upload, itertools.count(1)

    def fragile(values: NDArray[Any]) -> torch.Tensor:
        if next(uploads) == failing:
            raise RuntimeError("no memory")
        return upload(values)

    monkeypatch.setattr(memory, "_upload", fragile)
    with pytest.raises(RuntimeError, match="no memory"):
        for _ in range(2):
            arena.reserve(np.repeat(owners, 2))
    gone = int(owners[0])
    arena.release(gone)
    arena.reserve(np.repeat(owners[owners != gone], 3))
    expected, kept = np.concatenate([vectors[i::4] for i in range(4)]), handles >> 32 != gone
    np.testing.assert_array_equal(arena.vector16(handles[kept]), expected[kept])
    for pool in (memory._rows, memory._codes, memory._mirror):
        assert np.count_nonzero(np.asarray(pool).reshape(len(memory._mirror), -1).any(1)) == 44


def test_reclaim_is_asked_before_a_refusal() -> None:
    arena, rng = arena_of(100), np.random.default_rng(0)
    idle, segment = [arena.new_segment() for _ in range(3)], arena.new_segment()
    for other in idle:
        arena.extend(np.full(16, other), random_vectors(rng, 16), live=True)
    asked = []

    def reclaim(rows: int) -> bool:
        asked.append(rows)
        if not idle:
            return False
        arena.release(idle.pop())
        return True

    arena.reclaim = reclaim
    arena.reserve(np.full(50, segment))
    assert arena.length(segment) == 0
    assert asked == [50]
    arena.extend(np.full(50, segment), random_vectors(rng, 50), live=True)
    assert asked == [50], "reserved room was not there"
    with pytest.raises(MemoryError):
        arena.extend(np.full(100, segment), random_vectors(rng, 100), live=True)
    assert not idle and len(asked) == 4


def test_a_pool_too_small_or_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least"):
        DeviceMemory(DIM, "cpu", 100)
    with pytest.raises(MemoryError, match=r"cannot have its \d+ bytes on cpu"):
        DeviceMemory(DIM, "cpu", 1 << 60)
    with pytest.raises(ValueError, match="8 values, not 20"):
        Arena(DIM, DeviceMemory(8, "cpu", 10_000))


@pytest.mark.parametrize(("dim", "row_bytes"), [(384, 768), (64, 128), (20, 48), (1, 16)])
def test_rows_are_aligned_for_sixteen_byte_loads(dim: int, row_bytes: int) -> None:
    arena = Arena(dim, DeviceMemory(dim, "cpu", 1 << 16))
    segments = [arena.new_segment() for _ in range(3)]
    arena.extend(segments, np.zeros((3, dim), np.float16), live=True)
    assert arena.row_bytes == row_bytes
    assert not (arena.locate(segments)[0] % 16).any()
    assert arena.vectors(segments[1]).stride() == (row_bytes // 2, 1)


def test_make_arena_keeps_its_promises() -> None:
    arena = make_arena(DIM, "cpu")
    assert (arena.device, arena.row_bytes, arena.capacity_bytes) == ("cpu", 2 * DIM, None)
    if not HAS_CUDA:
        assert make_arena(DIM).device == "cpu"
        with pytest.raises(ValueError, match="'cuda' was asked for"):
            make_arena(DIM, "cuda")
