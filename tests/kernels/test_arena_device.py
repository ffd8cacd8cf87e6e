"""The arena's device memory, on torch's CPU device: one pool, packed when scattered, flags in step."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
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
from undertow.kernels.arena.vector_checks import CheckedRows, check_tensor
from undertow.kernels.device import HAS_CUDA
from undertow.kernels.gate.gate import NO_SEGMENT

DIM = 20
ROW_BYTES = 48


def pool_bytes(rows: int) -> int:
    """What a pool of at least `rows` rows takes, with the room for moving them."""
    return int(rows * (ROW_BYTES + 1) * 1.02) + 2 * ROW_BYTES


def arena_of(rows: int) -> Arena:
    return Arena(DIM, DeviceMemory(DIM, "cpu", pool_bytes(rows)))


def random_vectors(rng: np.random.Generator, count: int) -> NDArray[np.float16]:
    return (rng.standard_normal((count, DIM)) / 8).astype(np.float16)


class PoolMachine(RuleBasedStateMachine):
    """A small pool under arbitrary use, against lists; it may refuse only what it has no rows for."""

    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.memory = DeviceMemory(DIM, self.device, pool_bytes(600))
        self.arena = Arena(DIM, self.memory)
        self.model: dict[int, list[tuple[bytes, int]]] = {}
        for _ in range(5):
            self.model[self.arena.new_segment()] = []

    @property
    def free_rows(self) -> int:
        capacity, taken = self.arena.capacity_bytes, self.arena.nbytes
        assert capacity is not None
        return (capacity - taken) // (ROW_BYTES + 1)

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
        if seed % 2:
            given = torch.from_numpy(vectors).to(self.device)
        free = self.free_rows
        grown = {s: len(rows) + int((owners == s).sum()) for s, rows in self.model.items()}
        try:
            handles = self.arena.extend(owners, given, live)
        except MemoryError:
            # each segment that outgrows its slab needs a new one while it still has the old
            assert free < sum(class_rows(count) for s, count in grown.items() if count > len(self.model[s]))
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
        held = sum(class_rows(len(rows)) for rows in self.model.values() if rows)
        assert self.arena.nbytes == held * (ROW_BYTES + 1)

    @invariant()
    def reads_like_lists(self) -> None:
        segments = sorted(self.model)
        addresses, flag_addresses, lengths = self.arena.locate(segments)
        first, first_flag = self.memory._rows.data_ptr(), self.memory._flags.data_ptr()
        rows = self.memory._rows.cpu().numpy().copy()
        flags = self.memory._flags.cpu().numpy().copy()
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
            assert flags[here].tolist() == self.arena.flags(segment).tolist() == [f for _, f in expected]
            assert torch.equal(self.arena.vectors(segment).cpu(), torch.from_numpy(rows[here, :DIM].copy()))
            rows[here], flags[here] = 0, 0
        # padding, room for growth and free rows are zero
        assert not rows.any()
        assert not flags.any()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_history_of_a_small_pool_reads_like_lists = PoolMachine.TestCase


class CardPoolMachine(PoolMachine):
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


def test_tensors_stay_where_they_are_and_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor goes in and comes out as a tensor; the rows are those that a NumPy array would give.

    Here the device is the host, so torch's ways off a device are refused by name; its verdict on the
    norms is the only value waited for. The gpu twin below has torch itself judge.
    """
    arena, rng = arena_of(500), np.random.default_rng(0)
    segment = arena.new_segment()
    vectors = random_vectors(rng, 100)

    def refused(self: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
        raise AssertionError("copied to the host")

    waits: list[int] = []
    truth, to = torch.Tensor.__bool__, torch.Tensor.to

    def waited(self: torch.Tensor) -> bool:
        waits.append(self.numel())
        return truth(self)

    def indexes_only(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        assert self.dtype != torch.float16, "vectors were moved"
        return to(self, *args, **named)

    for name in ("cpu", "numpy", "item", "tolist", "__array__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    monkeypatch.setattr(torch.Tensor, "__bool__", waited)
    monkeypatch.setattr(torch.Tensor, "to", indexes_only)
    handles = arena.extend(np.full(100, segment), torch.from_numpy(vectors), live=True)
    arena.write(handles[:2], torch.from_numpy(vectors[5:7]))
    assert len(waits) == 2
    taken = arena.take(handles)
    assert isinstance(taken, torch.Tensor)
    check_tensor(taken, DIM)
    arena.extend(np.full(100, segment), taken, live=True)
    arena.set_live(handles, False)
    assert len(waits) == 2
    monkeypatch.undo()
    assert taken.dtype == torch.float16 and taken.is_contiguous()
    vectors[:2] = vectors[5:7]
    np.testing.assert_array_equal(taken.numpy(), vectors)
    np.testing.assert_array_equal(arena.vector16(handles), vectors)


@pytest.mark.gpu
def test_on_a_card_only_the_check_of_a_tensor_waits() -> None:
    from undertow.kernels.gate.cuda_gate import CudaGate

    arena = make_arena(DIM, "cuda", 16 << 20)
    rng, segment, other = np.random.default_rng(0), arena.new_segment(), arena.new_segment()
    vectors = random_vectors(rng, 100)
    on_card = torch.from_numpy(vectors).cuda()
    gate = CudaGate(arena)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            arena.extend(np.full(100, segment), on_card, live=True)
        handles = arena.extend(np.full(100, segment), vectors, live=True)
        # a slab that moves, rows that are taken and appended again, flags, wiping, packing
        arena.extend(np.full(100, segment), arena.take(handles), live=True)
        arena.extend(np.full(100, other), vectors, live=False)
        arena.set_live(handles[:50], False)
        arena.redact(handles[90:])
        arena.release(other)
        arena.compact()
        prepared = gate.prepare(
            queries=arena.take(handles),
            turn_segments=np.full(100, segment),
            episode_segments=np.full(100, NO_SEGMENT),
            visible=np.arange(100, 200),
            theta=np.full(100, 0.1),
            k=np.full(100, 5),
        )
        gate.launch(prepared)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    found = gate.collect(prepared)
    assert (found.count[:90] > 0).all()
    vectors[90:] = 0
    np.testing.assert_array_equal(arena.vector16(handles), vectors)


def test_only_what_was_taken_goes_unchecked() -> None:
    """What is computed from taken rows is a plain tensor, and refused as one."""
    arena = arena_of(100)
    segment = arena.new_segment()
    handles = arena.extend([segment], np.full((1, DIM), 0.25, np.float16), live=True)
    taken = arena.take(handles)
    assert isinstance(taken, CheckedRows)
    for derived in (taken * 100, taken.clone().fill_(torch.inf), torch.cat((taken, taken)) / 0):
        assert type(derived) is torch.Tensor
        with pytest.raises(ValueError, match="vector 0"):
            check_tensor(derived, DIM)
    with pytest.raises(ValueError, match=r"\[n, 19\], not \[1, 20\]"):
        check_tensor(taken, 19)


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


def test_a_taken_row_is_a_copy() -> None:
    arena = arena_of(100)
    handles = arena.extend([arena.new_segment()], np.full((1, DIM), 0.25, np.float16), live=True)
    taken = arena.take(handles)
    arena.redact(handles)
    assert taken[0, 0] == 0.25


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros((1, DIM)), "tensor of float16, not float32"),
        (torch.zeros((1, DIM + 1), dtype=torch.float16), r"\[n, 20\], not \[1, 21\]"),
        (torch.zeros(DIM, dtype=torch.float16).reshape(1, 1, DIM), "shape"),
        (torch.zeros((2, DIM), dtype=torch.float16), "2 vectors for 1 rows"),
        (torch.full((1, DIM), torch.nan, dtype=torch.float16), "vector 0 is not finite"),
        (torch.full((1, DIM), torch.inf, dtype=torch.float16), "vector 0 is not finite"),
        (torch.ones((1, DIM), dtype=torch.float16), "vector 0 has a norm above 4"),
        (torch.zeros((1, DIM), dtype=torch.float16, device="meta"), "vectors are on meta"),
    ],
)
def test_bad_tensors_are_refused_and_change_nothing(bad: torch.Tensor, message: str) -> None:
    arena = arena_of(100)
    segment = arena.new_segment()
    handle = arena.extend([segment], np.full((1, DIM), 0.25, np.float16), live=True)
    with pytest.raises(ValueError, match=message):
        arena.extend([segment], bad, live=True)
    with pytest.raises(ValueError, match=message):
        arena.write(handle, bad)
    assert arena.vector16(handle).tolist() == [[0.25] * DIM]
    assert arena.length(segment) == 1


def test_norms_are_judged_alike_on_host_and_device() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((2000, 64))
    near = (wide / np.linalg.norm(wide, axis=1, keepdims=True) * rng.uniform(3.9, 4.1, (2000, 1))).astype(
        np.float16
    )
    arena = Arena(64)
    segment, disagreed = arena.new_segment(), 0
    for row in near:
        verdicts = []
        for check in (
            lambda v: arena.extend([segment], v, live=False),
            lambda v: check_tensor(torch.from_numpy(v), 64),
        ):
            try:
                check(row.reshape(1, -1))
                verdicts.append(True)
            except ValueError:
                verdicts.append(False)
        if verdicts[0] != verdicts[1]:
            disagreed += 1
            assert abs(np.linalg.norm(row.astype(np.float64)) - 4) < 1e-5
    assert disagreed < 5


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
    assert (arena.device, arena.row_bytes, arena.capacity_bytes) == ("cpu", 4 * DIM, None)
    if not HAS_CUDA:
        assert make_arena(DIM).device == "cpu"
        with pytest.raises(ValueError, match="'cuda' was asked for"):
            make_arena(DIM, "cuda")


def test_an_arena_on_a_device_needs_none_of_what_the_host_needs(tmp_path: Path) -> None:
    """With torch and NumPy alone: numba and FAISS made unimportable."""
    program = """
import sys
for name in ("numba", "llvmlite", "faiss"):
    sys.modules[name] = None
import numpy as np
from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.device_memory import DeviceMemory
arena = Arena(4, DeviceMemory(4, "cpu", 10_000))
handles = arena.extend([arena.new_segment()] * 9, np.eye(4, dtype=np.float16)[np.arange(9) % 4], live=True)
arena.redact(handles[:1])
print(arena.vector16(handles).argmax(1), arena.flags(0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[0 1 2 3 0 1 2 3 0] [0 3 3 3 3 3 3 3 3]\n"


@pytest.mark.gpu
def test_the_pool_of_a_card_is_shared_with_cupy() -> None:
    import cupy

    arena = make_arena(384, "cuda", 64 << 20)
    assert arena.device == "cuda"
    before = torch.cuda.memory_allocated()
    block = cupy.zeros(1 << 20, cupy.uint8)
    assert torch.cuda.memory_allocated() - before >= 1 << 20
    del block
    assert torch.cuda.memory_allocated() == before
    segment = arena.new_segment()
    vectors = torch.full((100, 384), 0.05, dtype=torch.float16, device="cuda")
    handles = arena.extend(np.full(100, segment), vectors, live=True)
    np.testing.assert_array_equal(arena.vector16(handles), vectors.cpu().numpy())
