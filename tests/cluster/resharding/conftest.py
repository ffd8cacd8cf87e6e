"""The log of all tests of resharding, what one engine makes of it, and two shards that move tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from undertow.engine.base.model import PolicyName, Turn
from undertow.engine.cluster.resharding import coordinator

from ...support.cluster.resharding import TENANTS, TURNS, begin_move, logged
from ...support.faults.harness import KINDS, State, write_log
from ...support.faults.moving import Shards, alone


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", TENANTS, TURNS, session_turns=4)


@pytest.fixture
def policy() -> PolicyName:
    """The policy of the shards; some tests are parametrised with it."""
    return "recmem"


@pytest.fixture
def turns(log: Path, policy: PolicyName) -> list[Turn]:
    return logged(log, policy)


@pytest.fixture(scope="session")
def stayed(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[PolicyName], State]:
    """What a policy makes of its turns if no tenant moves."""

    @cache
    def of(policy: PolicyName) -> State:
        state = alone(tmp_path_factory.mktemp("alone"), logged(log, policy), policy)
        assert KINDS[policy] | {"parked", "turn"} <= state.kinds()
        return state

    return of


@pytest.fixture
def expected(stayed: Callable[[PolicyName], State], policy: PolicyName) -> State:
    return stayed(policy)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "TENANTS_PER_BATCH", 2)


@pytest.fixture
def shards(tmp_path: Path, turns: list[Turn]) -> Iterator[Shards]:
    """Two shards with some turns each, under the map that brings in a third."""
    with Shards(tmp_path / "root") as shards:
        shards.add(turns[:50])
        shards.drain()

        begin_move(shards)
        yield shards
