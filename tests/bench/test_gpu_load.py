"""The loads of the GPU benchmark: sizes of tenants, texts, and vectors with questions about them."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from undertow.bench.gpu.load import World, equal_sizes, exchanges, zipf_sizes
from undertow.bench.gpu.rig import Rig
from undertow.kernels.gate.factory import make_gate


@pytest.fixture
def rig() -> Rig:
    return Rig("cpu")


@pytest.mark.parametrize(
    ("tenants", "total", "largest"), [(10_000, 10_000_000, 50_000), (10, 1_000, 500), (3, 7, 5), (1, 9, 9)]
)
def test_zipf_sizes_hold_all_rows_in_a_falling_curve(tenants: int, total: int, largest: int) -> None:
    sizes = zipf_sizes(tenants, total, largest)
    assert (len(sizes), int(sizes.sum()), int(sizes[0])) == (tenants, total, largest)
    assert (np.diff(sizes) <= 0).all()
    assert sizes[-1] >= 1
    if tenants == 10_000:  # 50,000 / sqrt(i) sums to ten million
        ranks = np.arange(1, tenants + 1)
        assert np.abs(np.log(sizes) - np.log(50_000 * ranks**-0.5)).max() < 0.05
    with pytest.raises(ValueError, match="cannot hold"):
        zipf_sizes(tenants, tenants * largest + 1, largest)


def test_exchanges_have_the_length_of_chat(rig: Rig) -> None:
    texts = exchanges(2_000)
    words = [len(text.split()) for text in texts]
    assert 66 < statistics.mean(words) + 4 < 74  # [CLS], [SEP] and the two colons are tokens too
    assert max(words) > 2 * statistics.median(words)
    assert all(text.startswith("john: ") and "\nmary: " in text for text in texts)
    assert texts == exchanges(2_000)
    assert texts != exchanges(2_000, seed=1)


def test_a_world_is_as_large_as_it_says_and_its_turns_are_alike(rig: Rig) -> None:
    world = World(rig, zipf_sizes(5, 100, 60), 3, 32, spare_rows=50)
    assert [world.arena.length(int(s)) for s in world.turns] == world.sizes.tolist()
    assert world.bytes_read == (100 - 5 + 5 * 3) * (world.arena.row_bytes + 1)
    rows = world.rows64(int(world.turns[0]))
    assert 0.3 < np.median((rows @ rows.T)[np.triu_indices(60, 1)]) < 0.7
    assert world.arena.length(world.grow(50, 5)) == 50


def test_a_wrong_answer_of_the_gate_is_noticed(rig: Rig) -> None:
    world = World(rig, equal_sizes(6, 240), 3, 32)
    asked = world.questions(2)
    found = make_gate(world.arena).read(**asked)
    everything = list(range(12))
    assert world.wrong_readings(asked, found, everything) == []
    assert found.count.sum() > 0
    listed = int(np.flatnonzero(np.diff(found.offsets))[0])
    for field, place in (("count", 3), ("nearest_row", 5), ("nearest_score", 5)):
        spoilt = getattr(found, field).copy()
        spoilt[place] = np.nextafter(spoilt[place], 9) if field == "nearest_score" else spoilt[place] + 1
        assert world.wrong_readings(asked, replace(found, **{field: spoilt}), everything) == [place]
    for field in ("rows", "scores"):
        spoilt = getattr(found, field).copy()
        spoilt[found.offsets[listed]] += 1
        assert world.wrong_readings(asked, replace(found, **{field: spoilt}), everything) == [listed]
