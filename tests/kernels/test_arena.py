"""The arena: rows stay where they were put, memory comes and goes, bad input is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.kernels.arena.arena import LIVE, PRESENT, Arena, make_arena
from undertow.kernels.arena.device_memory import DeviceMemory
from undertow.kernels.arena.segment_ids import SLOT_BITS, SegmentIds
from undertow.kernels.arena.slab_pool import LARGEST_SLAB_BYTES, STEP_BYTES, slab_bytes

DIM = 20
DEVICE_BYTES = 8 << 20
Make = Callable[[int], Arena]


def on_host(dim: int) -> Arena:
    return Arena(dim)


def on_device(dim: int) -> Arena:
    return Arena(dim, DeviceMemory(dim, "cpu", DEVICE_BYTES))


def on_card(dim: int) -> Arena:
    return make_arena(dim, "cuda", DEVICE_BYTES)


MAKES = pytest.mark.parametrize("make", [on_host, on_device, pytest.param(on_card, marks=pytest.mark.gpu)])


def rows_of(arena: Arena, segment: int) -> NDArray[np.float32]:
    """The rows as a kernel finds them, wherever they are."""
    view = arena.vectors(segment)
    rows = (view.cpu().numpy() if isinstance(view, torch.Tensor) else view).astype(np.float32)
    assert rows.shape == (arena.length(segment), arena.dim)
    return rows


def numbered(first: int, count: int, dim: int = DIM) -> NDArray[np.float16]:
    """Vectors that tell which row they are: distinct and short."""
    vectors = np.zeros((count, dim), np.float16)
    ids = np.arange(first, first + count)
    vectors[:, 0], vectors[:, -1] = ids % 1000 / 1024, ids // 1000 / 1024
    return vectors


@MAKES
def test_rows_are_appended_in_order_and_found_by_handle(make: Make) -> None:
    arena = make(DIM)
    a, b = arena.new_segment(), arena.new_segment()
    handles = arena.extend(np.array([b, a, b, b, a]), numbered(0, 5), live=True)
    assert (a, b) == (0, 1)
    assert handles.tolist() == [1 << 32, 0, 1 << 32 | 1, 1 << 32 | 2, 1]
    assert [arena.length(a), arena.length(b)] == [2, 3]
    np.testing.assert_array_equal(rows_of(arena, b), numbered(0, 5)[[0, 2, 3]])
    np.testing.assert_array_equal(arena.vector16(handles[::-1]), numbered(0, 5)[::-1])
    assert Arena.handle(1, 2) == handles[3]


@MAKES
def test_a_redacted_row_is_neither_written_nor_made_live(make: Make) -> None:
    arena = make(DIM)
    segment = arena.new_segment()
    handles = arena.extend(np.full(3, segment), numbered(1, 3), live=False)
    arena.set_live(handles[1], True)
    arena.redact(handles[2:])
    with pytest.raises(ValueError, match="redacted"):
        arena.write(handles[2], numbered(5, 1)[0])
    with pytest.raises(ValueError, match="redacted"):
        arena.set_live(handles, True)
    assert arena.flags(segment).tolist() == [PRESENT, PRESENT | LIVE, 0]
    assert not rows_of(arena, segment)[2].any()


def test_growth_is_amortised_and_a_large_segment_reserves_at_most_a_third_more() -> None:
    arena = Arena(384)
    segment, moves, address = arena.new_segment(), 0, -1
    for _ in range(60):
        arena.extend(np.full(50, segment), numbered(0, 50, 384), live=True)
        moves += address != (address := int(arena.locate(segment)[0][0]))
    assert arena.nbytes <= 1.34 * arena.used_bytes
    assert moves < 25


def test_a_slab_is_a_sixteenth_or_a_kilobyte_larger_than_its_rows_at_most() -> None:
    sizes = sorted(
        {size + more for bits in range(8, 42) for size in (1 << bits, 5 << bits - 3) for more in (-1, 0, 1)}
    )
    for small, large in pairwise(sizes):
        assert small <= slab_bytes(small) <= slab_bytes(large) < max(large * 17 / 16, large + STEP_BYTES)
        assert slab_bytes(small) == slab_bytes(slab_bytes(small))
    with pytest.raises(MemoryError, match="split the tenant"):
        slab_bytes(LARGEST_SLAB_BYTES + 1)


def test_many_growing_segments_keep_the_process_within_its_memory_bound() -> None:
    """Segments that grow together a row at a time leave outgrown slabs behind: these must cost nothing."""
    before = psutil.Process().memory_info().rss
    arena = Arena(384)
    owners = np.array([arena.new_segment() for _ in range(2000)])
    rng = np.random.default_rng(0)
    for step in range(60):
        arena.extend(rng.permutation(owners), numbered(step, 2000, 384), live=True)
    assert arena.used_bytes == 2000 * 60 * (384 * 2 + 1)
    assert psutil.Process().memory_info().rss - before < 1.3 * arena.used_bytes + (64 << 20)
    assert {len(arena.vectors(s)) for s in owners} == {60}


@MAKES
def test_bytes_of_segments_add_up_to_those_of_the_arena(make: Make) -> None:
    arena = make(DIM)
    segments = [arena.new_segment() for _ in range(4)]
    for segment, count in zip(segments, (1, 40, 300, 0), strict=True):
        arena.extend(np.full(count, segment), numbered(0, count), live=True)
    assert arena.bytes_of(segments[3]) == arena.bytes_of([]) == 0
    assert arena.bytes_of(segments) == sum(map(arena.bytes_of, segments))
    assert arena.used_bytes <= arena.bytes_of(segments) <= arena.nbytes
    if arena.capacity_bytes is not None:
        assert arena.bytes_of(segments) == arena.nbytes


@MAKES
def test_released_memory_is_zero_and_used_again(make: Make) -> None:
    arena = make(DIM)
    first = arena.new_segment()
    arena.extend(np.full(100, first), numbered(1, 100), live=True)
    view = arena.vectors(first)
    arena.release(first)
    assert not view.any()
    assert (arena.nbytes, arena.used_bytes) == (0, 0)
    second = arena.new_segment()
    arena.extend(np.full(100, second), numbered(1, 100), live=True)
    assert second == 1 << SLOT_BITS, "another life of the same slot"
    for use in (arena.length, arena.vectors, arena.flags, arena.release):
        with pytest.raises(ValueError, match="segment 0 was released"):
            use(first)
    with pytest.raises(ValueError, match="segment 0 was released"):
        arena.extend(np.array([first]), numbered(0, 1), live=True)
    with pytest.raises(ValueError, match="segment 0 was released"):
        arena.vector16([Arena.handle(0, 0)])


@MAKES
def test_bookkeeping_follows_the_segments_that_are_there_not_all_that_were(make: Make) -> None:
    """Tenants that come and go cost nothing for good, and packing looks only at slabs that are held."""
    arena, former = make(DIM), []
    kept = arena.extend(np.full(5, arena.new_segment()), numbered(1, 5), live=True)
    for n in range(200):
        segments = [arena.new_segment() for _ in range(3)]
        handles = arena.extend(segments[:2], numbered(n, 2), live=True)
        former.append((segments[0], handles))
        for segment in segments:
            arena.release(segment)
    assert len({int(handle) for _, handles in former for handle in handles}) == 400
    assert arena._ids.slots == 4
    assert [len(table) for table in (arena._length, arena._address, arena._slabs)] == [16, 16, 1]
    # others now live where these lived
    heirs = [arena.new_segment() for _ in range(3)]
    arena.extend(heirs, numbered(7, 3), live=True)
    for segment, handles in former:
        with pytest.raises(ValueError, match=f"segment {segment} was released"):
            arena.locate([heirs[0], segment])
        with pytest.raises(ValueError, match="was released"):
            arena.redact(handles)
    assert arena.flags(heirs[0]).tolist() == [PRESENT | LIVE]
    np.testing.assert_array_equal(arena.vector16(kept), numbered(1, 5))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=120))
def test_an_id_is_given_once_until_all_are_used_up(steps: list[int | None]) -> None:
    """Against sets, with 4 slots of 8 lives each: `None` takes an id, a number gives one back."""
    ids = SegmentIds(slot_bits=2, id_bits=5)
    here: list[int] = []
    ever: set[int] = set()
    for step in steps:
        if step is None:
            spent = [sum(one % 4 == slot for one in ever) == 8 for slot in range(4)]
            taken = {one % 4 for one in here}
            if all(spent[slot] or slot in taken for slot in range(4)):
                with pytest.raises(MemoryError, match="release some"):
                    ids.take()
                continue
            segment = ids.take()
            assert segment not in ever and 0 <= segment < 32
            here.append(segment)
            ever.add(segment)
        elif here:
            ids.give(here.pop(step % len(here)))
        slots = ids.slots_of(here)
        assert len(set(slots.tolist())) == len(here) and [ids.id_of(s) for s in slots.tolist()] == here
        for segment in range(-40, 40):
            if segment not in here:
                with pytest.raises(ValueError, match="released" if segment in ever else "no segment"):
                    ids.slots_of([*here, segment])


@MAKES
def test_outgrown_slabs_are_wiped(make: Make) -> None:
    arena = make(DIM)
    segment, neighbour = arena.new_segment(), arena.new_segment()
    arena.extend(np.full(3, segment), numbered(1, 3), live=True)
    arena.extend([neighbour], numbered(1, 1), live=True)
    view = arena.vectors(segment)
    arena.extend(np.full(5000, segment), numbered(4, 5000), live=True)
    assert not view.any()


def test_views_are_read_only() -> None:
    arena = Arena(DIM)
    segment = arena.new_segment()
    arena.extend([segment], numbered(1, 1), live=True)
    for view in (arena.vectors(segment), arena.flags(segment)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0


@MAKES
def test_empty_segments_and_batches(make: Make) -> None:
    arena = make(DIM)
    segment = arena.new_segment()
    assert arena.extend(np.zeros(0, np.int64), np.zeros((0, DIM), np.float16), live=True).shape == (0,)
    assert arena.vectors(segment).shape == (0, DIM)
    assert arena.flags(segment).shape == (0,)
    assert arena.vector16(np.zeros(0, np.int64)).shape == (0, DIM)
    assert (arena.nbytes, arena.used_bytes, arena.compact()) == (0, 0, 0)


@MAKES
@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros((1, DIM), np.float32), "float16, not float32"),
        (np.zeros((1, DIM), ">f2"), "float16, not >f2"),
        ([[0.0] * DIM], "float16, not list"),
        (np.zeros((1, DIM + 1), np.float16), r"\[n, 20\], not \[1, 21\]"),
        (np.zeros(DIM, np.float16), "shape"),
        (np.zeros((2, DIM), np.float16), "2 vectors for 1 rows"),
        (np.full((1, DIM), np.nan, np.float16), "vector 0 is not finite"),
        (np.full((1, DIM), -np.inf, np.float16), "vector 0 is not finite"),
        (np.ones((1, DIM), np.float16), "norm above 4"),
    ],
)
def test_bad_vectors_are_refused_and_change_nothing(
    make: Make, vectors: NDArray[np.float16], message: str
) -> None:
    arena = make(DIM)
    segment = arena.new_segment()
    handle = arena.extend([segment], numbered(7, 1), live=True)
    forms: list[Any] = [vectors]
    if make is not on_host and isinstance(vectors, np.ndarray) and vectors.dtype.isnative:
        forms.append(torch.from_numpy(vectors).to(arena.device))
    for form in forms:
        with pytest.raises(ValueError, match=message):
            arena.extend([segment], form, live=True)
        if isinstance(vectors, np.ndarray) and vectors.ndim == 2:
            with pytest.raises(ValueError, match=message):
                arena.write(handle, form)
    assert rows_of(arena, segment).tolist() == numbered(7, 1).tolist()


@MAKES
def test_one_bad_vector_in_a_large_batch_is_named_and_nothing_is_taken(make: Make) -> None:
    arena = make(DIM)
    segment = arena.new_segment()
    vectors = numbered(0, 10_000)
    vectors[9_000, 3] = np.nan
    with pytest.raises(ValueError, match="vector 9000 is not finite"):
        arena.extend(np.full(10_000, segment), vectors, live=True)
    assert (arena.length(segment), arena.nbytes) == (0, 0)


@MAKES
def test_unknown_segments_and_rows_are_refused(make: Make) -> None:
    arena = make(DIM)
    segment = arena.new_segment()
    for use in (arena.length, arena.vectors, arena.flags, arena.release):
        for unknown in (-1, 1):
            with pytest.raises(ValueError, match=f"no segment {unknown}"):
                use(unknown)
    with pytest.raises(ValueError, match="no row 0"):
        arena.redact([Arena.handle(segment, 0)])
    with pytest.raises(ValueError, match="no segment"):
        arena.set_live([-1], True)
    with pytest.raises(ValueError, match="dim"):
        Arena(0)
