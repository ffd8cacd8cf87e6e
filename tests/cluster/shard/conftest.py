"""Shards over a root of one shard, closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.cluster.shard import call_queue
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.storage.location import Location

from ...support.cluster.in_process import PARTS, begin, settings

Start = Callable[..., Shard]


@pytest.fixture(params=[1, 10_000], ids=["as blocks", "turn by turn"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to the engine as blocks of columns, whatever their size, or turn by turn."""
    monkeypatch.setattr(call_queue, "BLOCK_TURNS", request.param)


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return begin(tmp_path / "root-of-one", 1)


@pytest.fixture
def start(root: Location) -> Iterator[Start]:
    """Starts a shard; keywords beside these are of the settings."""
    started: list[Shard] = []

    def shard(
        parts: Any = PARTS, *, name: str = "s0", where: Location = root, life: str = "", **changes: Any
    ) -> Shard:
        started.append(Shard(where, name, settings(**changes), parts, life=life))
        return started[-1]

    yield shard
    for shard_ in started:
        shard_.close()


@pytest.fixture
def shard(start: Start) -> Shard:
    return start()
