"""Turns wait while undecided tenants fill the arena; nothing is refused that could still be stored.

The pool is on torch's CPU device, as in test_eviction.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.bench.mock.replies import MockReplies
from undertow.engine.api.engine import WAIT_FOR_REPLY_S, Engine
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.config import Settings
from undertow.engine.step.admission import Admitted, Block, Inbox, QueueFull
from undertow.engine.step.scheduler import StepReport
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import pack_turn
from undertow.engine.tenants.turn_columns import TurnColumns

from ...support.cli import turn_line, write_log
from ...support.engine import (
    ALONE,
    ENCODER,
    NEVER,
    HeldLLM,
    RecordingLLM,
    ingest,
    interleaved,
    open_engine,
    put,
    read_back,
    rows_of,
    settle,
    step_until_paused,
    turns_of,
)
from .conftest import Watched
from .test_eviction import THETA, use_pool, world

REPLIES = MockReplies()


def test_the_queue_keeps_its_order_while_it_waits_and_nobody_spins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    use_pool(monkeypatch, 200)
    with open_engine(tmp_path, HeldLLM(), **ALONE, batch_turns=8) as engine:
        names = [f"t{n}" for n in range(60)]
        tickets = put(engine, [turn for name in names for turn in turns_of(name, 2)])
        step_until_paused(engine)
        stored = [ticket for ticket in tickets if ticket.receipt is not None]
        assert 8 < len(stored) < 100
        assert len(engine.scheduler.inbox) == len(tickets) - len(stored)
        attempts = watched.attempts
        for _ in range(10):
            assert engine.step(0.001).admitted == 0
        assert watched.attempts == attempts, "nothing has come free, so nothing is tried"
        settle(engine)
        assert watched.failures <= watched.attempts / 2
    turns = sorted(rows_of(tmp_path, "turn"), key=lambda row: row.lsn)
    rounds: Counter[str] = Counter()
    for row in turns:
        assert row.seq == rounds[row.tenant]
        rounds[row.tenant] += 1
        assert max(rounds.values()) - min(rounds.get(name, 0) for name in names) <= 2
    assert rounds == Counter(dict.fromkeys(names, 2))


def test_turns_that_wait_for_room_get_it_before_tenants_who_are_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: as one comes to rest the next would take the room that the turns wait for."""
    behind = [f"old{n}" for n in range(30)]
    with open_engine(tmp_path, None, **ALONE) as engine:
        engine.add_batch([turn for name in behind for turn in turns_of(name, 1)])
    use_pool(monkeypatch, 200)
    llm = HeldLLM()
    with Engine(tmp_path, Settings(device="cpu", **ALONE), ENCODER, llm=llm) as engine:
        engine.add_batch(turns_of("big", 33))
        tickets = put(engine, [turn for n in range(40) for turn in turns_of(f"new{n}", 1)])
        step_until_paused(engine)
        engine.take_up(behind)
        while tickets[0].receipt is None:
            llm.release()
            engine.step(0.01)
        assert not any(row.tenant in behind for row in rows_of(tmp_path, "decision"))
        settle(engine)
    assert {row.tenant for row in rows_of(tmp_path, "decision")} >= set(behind)


def test_room_that_nobody_waits_for_any_more_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pool(monkeypatch, 200)
    with open_engine(tmp_path, HeldLLM(), **ALONE) as engine:
        engine.add_batch(turns_of("big", 33))
        put(engine, [turn for n in range(40) for turn in turns_of(f"new{n}", 1)])
        step_until_paused(engine)
        for n in range(40):
            engine.scheduler.drop_tenant(f"new{n}")
        engine.step()
        assert [receipt.seq for receipt in engine.add_batch(turns_of("late", 1))] == [0]


def test_tenants_at_rest_stay_while_others_are_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: list[str]
) -> None:
    """Room is made when it is needed: what is read often is not put out for one tenant that is behind."""
    with open_engine(tmp_path, None, **ALONE) as engine:
        engine.add_batch(turns_of("old", 1))
    with open_engine(tmp_path, None, **NEVER) as engine:
        engine.add_batch([turn for n in range(30) for turn in turns_of(f"read{n}", 1)])
        assert not engine.drain()
    use_pool(monkeypatch, 200)
    with Engine(tmp_path, Settings(device="cpu", **ALONE), ENCODER, llm=HeldLLM()) as engine:
        for n in range(30):
            assert engine.search(f"read{n}", "word0").turns
        evicted.clear()
        engine.take_up(["old"])
        assert engine.scheduler.decisions.is_active("old")
        assert not evicted


def test_a_caller_waits_for_replies_without_spinning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    use_pool(monkeypatch, 60)
    llm = HeldLLM()
    with open_engine(tmp_path, llm, **ALONE) as engine:
        for n in range(6):
            engine.add_batch(turns_of(f"first{n}", 1))
        assert llm.in_flight == 6
        before, began_s = len(watched.steps), time.monotonic()
        stored = threading.Event()

        def release_now_and_then() -> None:
            while not stored.wait(0.3):
                llm.release()

        later = threading.Thread(target=release_now_and_then)
        later.start()
        receipts = engine.add_batch([turn for n in range(12) for turn in turns_of(f"new{n}", 1)])
        stored.set()
        later.join()
        assert [receipt.tenant for receipt in receipts] == [f"new{n}" for n in range(12)]
        assert watched.failures >= 1
        waits = (time.monotonic() - began_s) / WAIT_FOR_REPLY_S
        steps = len(watched.steps) - before
        assert 0 < steps <= waits + 30, "one for each turn and reply, and those that wait"


def test_flush_and_erase_of_tenants_that_wait_to_be_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    log = world(tenants=24, turns=8)
    use_pool(monkeypatch, 240)
    with open_engine(tmp_path, RecordingLLM(REPLIES, latency_s=0.05), **THETA) as engine:
        ingest(engine, interleaved(log, seed=5), 6)
        watched.put_out.clear()
        engine.scheduler.suspend()
        gone, waiting = watched.put_out[:2]
        assert engine.erase(gone) is None
        assert engine.flush(waiting), "the barrier finds a tenant that is not in memory"
        assert engine.tenants.get(waiting).undecided_count == 0
        assert engine.drain()
        assert engine.tenants.names() == sorted(log.keys() - {gone})
    assert len(read_back(tmp_path, {}).decisions[waiting]) == 9, "eight turns and the barrier"


def test_a_tenant_that_fits_nowhere_is_blocked_and_the_others_are_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = {"big": turns_of("big", 400), **world(tenants=6, turns=6)}
    with open_engine(tmp_path, None, **ALONE) as engine:
        ingest(engine, interleaved(log, seed=None), 64)
    use_pool(monkeypatch, 200)
    with open_engine(tmp_path, RecordingLLM(REPLIES), **ALONE) as engine:
        assert not engine.drain()
        assert list(engine.scheduler.blocked) == ["big"]
        assert "no room" in engine.scheduler.blocked["big"]
        assert engine.add_batch(turns_of("other", 1))
    decided = read_back(tmp_path, {}).decisions
    assert all(len(decided[name]) == len(turns) for name, turns in log.items() if name != "big")


def test_a_blocks_rows_are_committed_with_the_last_of_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    use_pool(monkeypatch, 200)
    llm = HeldLLM()
    with open_engine(tmp_path, llm, **ALONE, batch_turns=8) as engine:
        turns = [pack_turn(turn) for n in range(60) for turn in turns_of(f"t{n}", 1)]
        engine.scheduler.inbox.put_block(
            Block(TurnColumns.of(turns), [Row("source_offset", "", "", -1, b"{}")])
        )
        step_until_paused(engine)
        engine.step()
        assert not rows_of(tmp_path, "source_offset")
        while len(engine.scheduler.inbox):
            llm.release()
            engine.step(0.01)
        assert len(rows_of(tmp_path, "source_offset")) == 1
        engine.step()
        assert len(rows_of(tmp_path, "source_offset")) == 1


def test_files_are_fed_through_a_full_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    lines = [turn_line(f"t{n % 40}", n, f"word{n}") for n in range(160)]
    log = write_log(tmp_path / "log", lines)
    use_pool(monkeypatch, 150)
    steps: list[StepReport] = []
    llm = RecordingLLM(REPLIES, latency_s=0.002)
    with open_engine(tmp_path / "store", llm, **ALONE, batch_turns=6) as engine:
        feeding = Ingest(engine, format="messages", on_step=steps.append)
        feeding.feed([log])
        assert (feeding.report.read_turns, feeding.report.new_turns) == (160, 160)
        assert len(engine.scheduler.inbox) == 0
        assert engine.drain()
    assert watched.failures > 0
    assert len(steps) > 27, "some steps stored nothing"
    assert sum(step.admitted for step in steps) == 160


def test_tenants_in_memory_but_at_no_work_make_room_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: list[str]
) -> None:
    """Read while undecided, by an engine that has not taken them up: they are no reason to refuse."""
    with open_engine(tmp_path, None, **ALONE) as engine:
        ingest(engine, [turn for n in range(12) for turn in turns_of(f"t{n}", 3)], 64)
    use_pool(monkeypatch, 60)
    with Engine(tmp_path, Settings(device="cpu", **ALONE), ENCODER) as engine:
        for n in range(12):
            engine.search(f"t{n}", "word1")
        evicted.clear()
        assert len(engine.add_batch([turn for n in range(10) for turn in turns_of(f"new{n}", 1)])) == 10
        assert evicted


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30))
def test_what_is_put_back_stands_as_it_stood(seed: int, count: int) -> None:
    rng = random.Random(seed)
    names = [f"t{rng.randrange(5)}" for _ in range(rng.randrange(1, 25))]
    turns = [turn for n, name in enumerate(names) for turn in turns_of(name, 1, start=n)]
    one, two = Inbox(100), Inbox(100)
    blocks = [turns[:9], turns[9:20], turns[20:]] if seed % 3 else []
    lined = turns_of("t5", 3) if blocks else turns
    for inbox in (one, two):
        for turn in lined:
            inbox.put(turn)
        for block in blocks:
            inbox.put_block(Block(TurnColumns.of(list(map(pack_turn, block)))))
    one.put_back(one.take(count))
    later = turns_of("t6", 2, start=90)
    while len(two):
        assert len(one) == len(two)
        size = rng.randrange(1, 6)
        assert one.take(size).turns == two.take(size).turns
        if later and rng.random() < 0.3:
            turn = later.pop()
            one.put(turn)
            two.put(turn)
    assert len(one) == 0


def test_lines_and_blocks_are_taken_together_and_no_turn_overtakes_one_of_its_tenant() -> None:
    first = turns_of("t0", 6)
    blocks = [
        Block(TurnColumns.of([pack_turn(turn) for turn in turns_of(name, 2)])) for name in ("t1", "t0", "t2")
    ]
    inbox = Inbox(10)
    for turn in first:
        inbox.put(turn)
    for block in blocks:
        inbox.put_block(block)
    assert (len(inbox), set(inbox.tenants)) == (12, {"t0", "t1", "t2"})
    with pytest.raises(QueueFull):
        inbox.put(turns_of("t1", 1)[0])
    assert list(inbox.take(1).turns.tenants) == ["t0"]
    batch = inbox.take(8)
    assert list(batch.turns.tenants) == ["t0"] * 5 + ["t1"] * 2, "blocks up to t0's, and lines for the rest"
    batch.acknowledge(Admitted([], [*"abcdefg"], [*range(7)], 7, []))
    assert [ticket.receipt and ticket.receipt.id for ticket in batch.tickets] == [*"abcde"]
    assert [block.stored for block in blocks] == [[("f", 5), ("g", 6)], [], []]
    for turn in turns_of("t3", 4):
        inbox.put(turn)
    assert list(inbox.take(4).turns.tenants) == ["t3", "t3", "t0", "t0"], "half for each"
    alternately = [inbox.take(1).turns.tenants[0] for _ in range(4)]
    assert alternately in (["t3", "t2", "t3", "t2"], ["t2", "t3", "t2", "t3"])
    assert inbox.is_empty and inbox.has_room_for("t1")


def test_turns_with_and_without_vectors_are_taken_together() -> None:
    plain, inbox = TurnColumns.of([pack_turn(turn) for turn in turns_of("t0", 2)]), Inbox(10)
    given = plain._replace(vectors=np.ones((2, 4), np.float16))
    for columns in (plain, given, plain):
        inbox.put_block(Block(columns))
    taken = inbox.take(5).turns
    assert taken.texts == [*plain.texts, *plain.texts, plain.texts[0]]
    assert taken.vectors is not None and taken.vectors.any(axis=1).tolist() == [False] * 2 + [True] * 2 + [
        False
    ]
    assert inbox.take(5).turns.vectors is None


def test_a_block_loses_an_erased_tenant() -> None:
    inbox = Inbox(10)
    block = Block(TurnColumns.of([pack_turn(turn) for n in (1, 2, 1) for turn in turns_of(f"t{n}", 2)]))
    inbox.put_block(block)
    assert list(inbox.take(1).turns.tenants) == ["t1"]
    assert inbox.drop("t1") and not inbox.holds("t1") and inbox.holds("t2")
    assert not inbox.drop("t1") and not inbox.drop("t3")
    assert list(inbox.take(9).turns.tenants) == ["t2", "t2"]
    assert inbox.is_empty
