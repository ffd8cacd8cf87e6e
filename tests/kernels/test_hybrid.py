"""Top-k by cosine and keywords, against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.kernels.arena.arena import Arena
from undertow.kernels.array_types import Float16s
from undertow.kernels.topk.combined_score import CANDIDATES, lent, raised
from undertow.kernels.topk.hybrid import hybrid_top_k

from ..support.kernels.arena import MEMORIES, arena_in
from ..support.kernels.gate_worlds import unit


@pytest.mark.parametrize("memory", MEMORIES)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3 * CANDIDATES),
    dim=st.sampled_from([1, 5, 16, 384]),
    k=st.sampled_from([0, 1, 3, 10, CANDIDATES + 7, 500]),
    filtered=st.booleans(),
    by_words=st.booleans(),
    by_neighbours=st.booleans(),
)
def test_the_best_rows_are_those_of_the_definition_to_the_last_bit(
    memory: str, seed: int, size: int, dim: int, k: int, filtered: bool, by_words: bool, by_neighbours: bool
) -> None:
    """Ties in cosines and in shares, redacted rows, filters, and shares of every size."""
    rng = np.random.default_rng(seed)
    arena = arena_in(memory, dim)
    segment = arena.new_segment()
    rows = unit(rng.standard_normal((size, dim)))[rng.integers(0, size, size)]  # some twice and more
    handles = arena.extend(np.full(size, segment), rows, live=False)
    arena.redact(handles[rng.random(size) < 0.1])
    query = rows[:1] if seed % 2 else unit(rng.standard_normal((1, dim)))
    allowed = rng.random(size) < rng.choice([0.02, 0.5, 1.0]) if filtered else None
    shares = None
    if by_words:
        levels = np.append(0.0, rng.random(rng.integers(1, 2 * size)))
        shares = levels[rng.integers(0, len(levels), size)] * (rng.random(size) < rng.random())
    beside = rng.integers(-1, size, (size, 2)) if by_neighbours else None
    assert hybrid_top_k(arena, segment, query, k, allowed, shares, beside=beside) == defined(
        arena, segment, query, k, allowed, shares, beside
    )


def defined(
    arena: Arena, segment: int, query: Float16s, k: int, allowed: Any, shares: Any, beside: Any
) -> list[tuple[float, int]]:
    """In NumPy and Python: fp64 cosines are exact, so that any order of their sums gives the same bits."""
    rows = arena.vector16(segment << 32 | np.arange(arena.length(segment)))
    cosines = (rows.astype(np.float64) @ query[0].astype(np.float64)).tolist()
    open_ = np.ones(len(cosines), bool) if allowed is None else allowed
    present = np.flatnonzero(open_ & (arena.flags(segment) != 0)).tolist()
    if shares is None:
        return sorted(((cosines[r], r) for r in present), key=lambda found: (-found[0], found[1]))[:k]
    depth = max(k, CANDIDATES)
    near = sorted(present, key=lambda row: (-cosines[row], row))[:depth]
    said = sorted(np.flatnonzero(open_ & (shares > 0)).tolist(), key=lambda row: (-shares[row], row))[:depth]
    around = {row: [] if beside is None else beside[row].tolist() for row in {*near, *said}}
    nearer = {row: max([cosines[n] for n in rows if n >= 0], default=-2.0) for row, rows in around.items()}
    both = [(raised(lent(cosines[row], nearer[row]), float(shares[row])), row) for row in around]
    return sorted(both, key=lambda found: (-found[0], found[1]))[:k]


def test_a_neighbour_lends_a_part_of_what_it_is_nearer() -> None:
    assert lent(0.2, 0.1) == lent(0.2, -2.0) == 0.2
    assert 0.2 < lent(0.2, 0.8) < 0.8


@pytest.mark.parametrize("memory", MEMORIES)
def test_words_move_a_row_up_wherever_the_rows_lie(memory: str) -> None:
    arena = arena_in(memory, 4)
    segment = arena.new_segment()
    axes = np.eye(4, dtype=np.float16)
    arena.extend(np.full(4, segment), axes, live=False)
    found = hybrid_top_k(arena, segment, axes[:1], 3, shares=np.array([0.0, 0.0, 0.4, 0.0]))
    assert [row for _, row in found] == [0, 2, 1]
    assert found[0][0] == 1.0 and 0.0 < found[1][0] < 1.0 and found[2][0] == 0.0
    without_first = np.array([False, True, True, True])
    assert [row for _, row in hybrid_top_k(arena, segment, axes[:1], 9, without_first)] == [1, 2, 3]
    assert hybrid_top_k(arena, arena.new_segment(), axes[:1], 9) == []
    with pytest.raises(ValueError, match=r"allowed must be bool \[4\]"):
        hybrid_top_k(arena, segment, axes[:1], 1, without_first[:3])
    with pytest.raises(ValueError):
        hybrid_top_k(arena, segment, np.full((1, 4), np.nan, np.float16), 1)
