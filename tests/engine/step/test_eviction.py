"""The engine on a pool that does not hold all its tenants: what is decided does not depend on it.

The pool is on torch's CPU device, which no setting offers; the gate is the reference.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from undertow.bench.mock.replies import MockReplies
from undertow.engine.api import engine as engine_module
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn
from undertow.engine.step.admission import Block
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import pack_turn
from undertow.engine.tenants.registry import ArenaFull, UnknownTenant
from undertow.engine.tenants.turn_columns import TurnColumns
from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.device_memory import DeviceMemory
from undertow.kernels.gate.gate import Gate

from ...support.engine import (
    ALONE,
    ENCODER,
    NEVER,
    HeldLLM,
    RecordingLLM,
    Run,
    SilentLLM,
    assert_same,
    ingest,
    interleaved,
    open_engine,
    put,
    read_back,
    rows_of,
    settings_of,
    settle,
    turns_of,
)
from .conftest import Watched

REPLIES = MockReplies()
# about half of the turns find others that are alike
THETA: dict[str, Any] = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 2}


class ReadableArena(Arena):
    """Rows as the reference gate and the host's search read them."""

    def vectors(self, segment: int) -> NDArray[np.float16]:
        rows: NDArray[np.float16] = super().vectors(segment).contiguous().numpy()
        return rows

    def take(self, handles: ArrayLike) -> NDArray[np.float16]:
        return self.vector16(handles)


def use_pool(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Engines opened from now on keep their vectors in a pool of about so many rows."""

    def arena_of(settings: object, dim: int) -> Arena:
        return ReadableArena(dim, DeviceMemory(dim, "cpu", rows * (dim * 2 + 1)))

    monkeypatch.setattr(engine_module, "arena_of", arena_of)
    monkeypatch.setattr(engine_module, "make_gate", Gate)


def world(tenants: int, turns: int) -> dict[str, list[Turn]]:
    """Logs that recur: each tenant speaks of a few things, again and again, in other words."""
    things = ["my dog Rex runs", "the garden wants rain", "a train to Ghent", "piano on Sundays"]
    return {
        f"t{n}": [
            turn
            for i in range(turns)
            for turn in turns_of(f"t{n}", 1, i, f"{things[(i + n) % 4]} word{(i * 7 + n) % 11}")
        ]
        for n in range(tenants)
    }


# how the turns come: to which LLM, and how many at a time
Session = tuple[type[RecordingLLM] | None, int]


def say(engine: Engine, llm: RecordingLLM | None, turns: list[Turn]) -> None:
    """An LLM that holds its replies gives them only when the pool is full."""
    if type(llm) is HeldLLM:
        tickets = put(engine, turns)
        while any(ticket.receipt is None for ticket in tickets):
            assert len(engine.scheduler.inbox), "turns that found no room wait"
            engine.step(0.001)
            if engine.scheduler.admission_paused:
                llm.release()
    else:
        engine.add_batch(turns)
        if type(llm) is RecordingLLM:
            assert engine.drain()


def play(folder: Path, log: dict[str, list[Turn]], *sessions: Session) -> Run:
    """All turns come in the first session, and what is still undecided then is taken up in the next."""
    turns = interleaved(log, seed=3)
    for kind, chunk in sessions:
        llm = kind(REPLIES) if kind else None
        with open_engine(folder, llm, **THETA) as engine:
            assert turns or (not engine.idle and len(engine.tenants.loaded()) < len(log))
            for start in range(0, len(turns), chunk):
                say(engine, llm, turns[start : start + chunk])
            if kind in (None, SilentLLM):
                assert not engine.drain() and engine.idle == (llm is None)
            else:
                settle(engine)
                assert engine.resume() == 0
            capacity = engine.arena.capacity_bytes
            assert capacity is None or engine.arena.nbytes <= capacity
        turns = []
    return read_back(folder, llm.prompts if llm else {})


@pytest.mark.parametrize(
    ("tenants", "turns", "rows", "sessions", "put_out"),
    [
        pytest.param(16, 14, 240, [(RecordingLLM, 4)], 0, id="drained"),
        pytest.param(30, 8, 160, [(HeldLLM, 5)], 1, id="held, 160 rows"),
        pytest.param(30, 12, 240, [(HeldLLM, 5)], 1, id="held, 240 rows"),
        pytest.param(30, 18, 320, [(HeldLLM, 5)], 1, id="held, 320 rows"),
        # jobs are blocked, and what is stored goes on, far beyond the pool
        pytest.param(40, 3, 120, [(None, 3), (RecordingLLM, 1)], 0, id="no server at first"),
        pytest.param(30, 8, 200, [(SilentLLM, 8), (RecordingLLM, 1)], 20, id="a silent server at first"),
    ],
)
def test_decisions_do_not_depend_on_the_size_of_the_pool(
    tenants: int,
    turns: int,
    rows: int,
    sessions: list[Session],
    put_out: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evicted: list[str],
    watched: Watched,
) -> None:
    """`put_out`: at least so many tenants that were at work."""
    log = world(tenants, turns)
    expected = play(tmp_path / "host", log, (RecordingLLM, 48))
    assert not evicted and watched.failures == 0
    use_pool(monkeypatch, rows)
    assert_same(play(tmp_path / "pool", log, *sessions), expected)
    assert len(evicted) > len(set(evicted)) > 10, "most of them, and not only once"
    assert len(watched.put_out) >= put_out
    assert watched.failures > 0 or sessions[0][0] is not HeldLLM, "the pool was full at some time"
    assert sum(d.decision == "fired" for of in expected.decisions.values() for d in of) > 20


def test_searches_and_figures_go_round_more_tenants_than_the_pool_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: list[str]
) -> None:
    log = world(tenants=12, turns=12)
    play(tmp_path, log, (RecordingLLM, 64))
    names = sorted(log) * 2
    with open_engine(tmp_path, None, **THETA) as engine:
        expected = [engine.search(name, "a dog in the garden") for name in names]
        figures = engine.stats()
    use_pool(monkeypatch, 150)
    with open_engine(tmp_path, None, **THETA) as engine:
        assert [engine.search(name, "a dog in the garden") for name in names] == expected
        assert engine.stats() == figures
        assert engine.replay_jobs() == 0, "nothing is parked"
    assert len(evicted) > 12


def test_a_tenant_that_the_pool_cannot_hold_is_refused_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = world(tenants=2, turns=10)
    log["t1"] = turns_of("t1", 400)
    with open_engine(tmp_path, None, **THETA) as engine:
        ingest(engine, interleaved(log, seed=None), 64)
    use_pool(monkeypatch, 200)
    with engine_module.Engine(tmp_path, settings_of(**THETA), ENCODER) as engine:
        size = engine.arena.capacity_bytes
        with pytest.raises(
            ArenaFull, match=rf"{size} bytes has no room for tenant 't1'.*UNDERTOW_CARD_SHARES"
        ):
            engine.search("t1", "word3")
        assert engine.arena.nbytes == 0
        assert engine.search("t0", "a dog").turns
        assert len(engine.add_batch(turns_of("t0", 1, start=10))) == 1


def test_a_batch_that_the_pool_cannot_hold_is_refused_and_nothing_of_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pool(monkeypatch, 200)
    with engine_module.Engine(tmp_path, settings_of(**NEVER), ENCODER) as engine:
        engine.add_batch(turns_of("a", 20))
        batch = [turn for n in range(100) for turn in turns_of(f"new{n}", 1)]
        # a source's position goes with the turns before it, or not at all
        columns = TurnColumns.of([pack_turn(turn) for turn in batch])
        engine.scheduler.inbox.put_block(Block(columns, [Row("source_offset", "", "", -1, b"{}")]))
        with pytest.raises(ArenaFull, match=r"no room for .*UNDERTOW_CARD_SHARES.*UNDERTOW_BATCH_TURNS"):
            while not engine.scheduler.inbox.is_empty:
                engine.step(storing=True)
        assert engine.scheduler.inbox.is_empty
        with pytest.raises(ArenaFull):
            engine.add_batch(batch)
        assert len(engine.add_batch(turns_of("a", 1, start=20))) == 1
    assert {row.kind for row in rows_of(tmp_path)} == {"control", "turn", "decision"}
    assert {row.tenant for row in rows_of(tmp_path)} == {"a"}
    with engine_module.Engine(tmp_path, settings_of(**NEVER, batch_turns=20), ENCODER) as engine:
        engine.resume()
        for start in range(0, 100, 20):
            engine.add_batch(batch[start : start + 20])
            assert engine.drain()
    assert len(rows_of(tmp_path, "turn")) == 121


def crowded(engine: Engine, name: str) -> None:
    """Fill the pool with tenants whose replies do not come, until it has no room for one more tenant."""
    for n in range(40):
        engine.add_batch(turns_of(f"busy{n}", 1))
    with pytest.raises(ArenaFull, match=f"tenant '{name}' from the journal") as refusal:
        engine.search(name, "word3")
    assert "decided" in str(refusal.value)
    assert "UNDERTOW_BATCH_TURNS" not in str(refusal.value), "that would not help a search"


def prepared(store: Path) -> None:
    """A tenant with memories, parked jobs and a deleted turn; no pool bounds it."""
    ill = MockReplies(malformed_rate=0.5, malformed_sticky=True)
    with open_engine(store, RecordingLLM(ill), **ALONE) as engine:
        receipts = engine.add_batch(turns_of("quiet", 40))
        assert engine.drain()
        engine.delete(str(receipts[7].id))
        assert engine.drain()
        assert engine.stats()["dead_letters"] > 5 and len(engine.get_all("quiet")) > 5


def test_deleting_and_updating_need_no_room_in_a_full_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions, updates and replays are logged at once and decided later, as where there is room."""

    def act(engine: Engine, llm: HeldLLM) -> tuple[object, ...]:
        turn = engine.journal.read(tenant_keys=[engine.journal.info.tenant_key("quiet")], kinds=["turn"])
        last = [row.id for row in turn][-1]
        episode = next(row for row in engine.journal.read(kinds=["episode"]) if row.tenant == "quiet")
        fact = next(row for row in engine.journal.read(kinds=["fact"]) if row.tenant == "quiet")
        done = (engine.delete(str(last)), engine.delete(str(episode.id)), engine.replay_jobs())
        assert engine.update(str(fact.id), "other words").kind == "fact"
        settle(engine)
        return *done, engine.get_all("quiet"), engine.search("quiet", "word3 other3"), engine.stats()

    found = []
    for name in ("host", "pool"):
        prepared(tmp_path / name)
    for name in ("host", "pool"):
        if name == "pool":
            use_pool(monkeypatch, 240)
        llm = HeldLLM()
        with open_engine(tmp_path / name, llm, **ALONE) as engine:
            if name == "pool":
                crowded(engine, "quiet")
            else:
                engine.add_batch([turn for n in range(40) for turn in turns_of(f"busy{n}", 1)])
            found.append(act(engine, llm))
            assert not engine.scheduler.blocked
    assert found[1] == found[0]
    assert found[0][:2] == ("turn", "episode") and int(str(found[0][2])) > 5
    assert "other words" in repr(found[0][3])


def test_a_tenant_is_erased_though_a_full_pool_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    with open_engine(tmp_path, None, **ALONE) as engine:
        current = Counter(memory.kind for memory in engine.get_all("quiet"))
    use_pool(monkeypatch, 240)
    with open_engine(tmp_path, HeldLLM(), **ALONE) as engine:
        crowded(engine, "quiet")
        rows = engine.journal.count([engine.journal.info.tenant_key("quiet")])
        certificate = engine.erase("quiet", now=True)
        assert certificate is not None
        assert (certificate.turns_removed, certificate.rows_removed) == (40, rows)
        assert (certificate.episodes_removed, certificate.facts_removed) == (
            current["episode"],
            current["fact"],
        )
        assert "quiet" not in engine.tenants.names()
        with pytest.raises(UnknownTenant):
            engine.erase("quiet")
    assert {row.kind for row in rows_of(tmp_path) if row.tenant in ("", "quiet")} == {"tombstone"}


def test_tenants_at_work_stay_while_others_are_put_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: list[str]
) -> None:
    """What waits for an LLM reply keeps its state, however much room newcomers want."""
    use_pool(monkeypatch, 200)
    llm = HeldLLM()
    with open_engine(tmp_path, llm, theta_sim=1.0, theta_merge=1.0, theta_count=1) as engine:
        engine.add_batch(turns_of("first", 3))
        assert llm.in_flight == 1
        for n in range(8):
            engine.add_batch(turns_of(f"busy{n}", 1))
        settle(engine)
        held = engine.tenants.get("first")
        engine.add_batch(turns_of("first", 1, start=3))
        for n in range(60):
            engine.add_batch(turns_of(f"other{n}", 1))
            while llm.in_flight > 1:
                call = llm.held[-1]
                llm.held = [call, *llm.held[:-1]]
                mine = [h for h in llm.held if h[0] == "first"]
                llm.held = [h for h in llm.held if h[0] != "first"]
                llm.release()
                llm.held = mine
                engine.step(0.01)
        assert "first" not in evicted
        assert engine.tenants.get("first") is held
        assert len(evicted) > 20
        settle(engine)
        assert held.cursor == held.next_seq == 4
