"""A shard whose engine, disk, turns or actor fail."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import DrainCommand, FlushCommand, SearchQuery, StatsQuery
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.shard.call_queue import StaleSession
from undertow.engine.cluster.shard.engine_work import EngineWork
from undertow.engine.cluster.shard.quarantine import Quarantine
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts, EngineUnusable
from undertow.engine.cluster.shard_map import STORES
from undertow.engine.cluster.wire import pack
from undertow.engine.policies.recmem import RecMem
from undertow.engine.storage.journal import Fenced, Journal, JournalError
from undertow.engine.storage.location import Location, StoreError

from ...support.cluster.in_process import PARTS, FailingEncoder, cluster_state, mock_llm, settings
from ...support.cluster.shard import SOON_S, Sender, ask, hold, some
from ...support.engine import turn_of
from ...support.faults.harness import assert_same_state, end_state
from .conftest import Start

pytestmark = pytest.mark.usefixtures("either_way")

# ---- what fails


def test_poison_turns_are_parked_and_all_others_stored_in_order(
    root: Location, tmp_path: Path, start: Start
) -> None:
    encoder = FailingEncoder(["badger", "weasel"])
    parts = EngineParts(encoder=lambda _: encoder, llm=mock_llm)
    turns = some("ann", *range(20)) + some("bob", *range(20))
    turns[7] = turn_of("ann", 7, "a badger here")
    turns[30] = turn_of("bob", 10, "a weasel there")
    shard = start(parts)
    sender = Sender(shard)
    receipts = sender.add(turns)
    assert [n for n, r in enumerate(receipts) if r["status"] == "parked"] == [7, 30]
    told = receipts[7]["detail"]
    assert told.startswith("RuntimeError in encode (in_process.py:")
    sound = [r for n, r in enumerate(receipts) if n not in (7, 30)]
    assert [r["status"] for r in sound] == ["stored"] * 38
    assert [r["seq"] for r in sound] == [*range(19), *range(19)]
    assert ask(shard, DrainCommand())
    status = shard.status().result(SOON_S)
    assert [entry["reason"] for entry in status["parked"]] == [told, told]
    # sent again, it is parked still, and costs nothing
    before = len(encoder.asked)
    again = sender.add([turns[7], turn_of("ann", 99, "new")])
    assert [r["status"] for r in again] == ["parked", "stored"]
    assert ask(shard, DrainCommand())
    (first, *of_memories) = encoder.asked[before:]
    assert len(first) == 1 and "new" in first[0]
    assert not any(word in text for texts in of_memories for text in texts for word in encoder.words)
    shard.close()
    parking = Quarantine(root, "s0", shard_map.load(root).tenant_key)
    kept = [parking.read(entry["file"]) for entry in parking.report()]
    assert sorted(p.turn.text for p in kept) == sorted(turns[n].text for n in (7, 30))
    for p in kept:  # an error message lies beside the turn that it is about, and nowhere else
        word, other = ("badger", "weasel") if p.turn.tenant == "ann" else ("weasel", "badger")
        assert f"no vector for {word}" in p.error and other not in p.error
    plain = tmp_path / "plain"
    sound_turns = [*(t for n, t in enumerate(turns) if n not in (7, 30)), turn_of("ann", 99, "new")]
    with Engine(plain, settings(), PARTS.encoder(settings()), llm=mock_llm(settings())) as engine:
        engine.add_batch(sound_turns)
        assert engine.drain()
    assert_same_state(cluster_state(root), end_state(plain))


def test_a_failure_that_does_not_repeat_parks_nothing(start: Start) -> None:
    encoder = FailingEncoder(["badger"])

    def once(message: str) -> Exception:
        encoder.words.clear()
        return RuntimeError(message)

    encoder._error = once
    shard = start(EngineParts(encoder=lambda _: encoder, llm=mock_llm))
    receipts = Sender(shard).add([turn_of("ann", 0, "a badger"), turn_of("ann", 1, "hello")])
    assert [(r["status"], r["seq"]) for r in receipts] == [("stored", 0), ("stored", 1)]
    assert shard.status().result(SOON_S)["reopened"] == 1


def test_an_engine_that_fails_with_everything_parks_nothing(start: Start) -> None:
    encoder = FailingEncoder(["word", "hello"])
    shard = start(EngineParts(encoder=lambda _: encoder, llm=mock_llm))
    sender = Sender(shard)
    for turns in (some("ann", *range(12)), some("ann", 0)):
        with pytest.raises(EngineUnusable, match="no vector"):
            sender.add(turns)
        with pytest.raises(StaleSession):  # nothing may come after a gap
            sender.add(some("ann", 50))
        sender.greet()
    assert shard.status().result(SOON_S)["parked"] == []
    encoder.words.clear()
    assert [r["seq"] for r in sender.add(some("ann", *range(12)))] == list(range(12))


def test_a_tenant_whose_deciding_fails_is_left_alone(
    root: Location, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = RecMem.decide

    def failing(self: RecMem, seq: int, view: Any) -> Any:
        if view.tenant == "bob":
            raise ZeroDivisionError("a bug")
        return (yield from decide(self, seq, view))

    monkeypatch.setattr(RecMem, "decide", failing)
    sender = Sender(shard)
    receipts = sender.add([turn_of(name, n, f"word{n}") for n in range(5) for name in ("ann", "bob")])
    assert {r["status"] for r in receipts} <= {"stored", "duplicate"}
    assert ask(shard, FlushCommand("ann"))
    assert not ask(shard, FlushCommand("bob"))
    assert not ask(shard, DrainCommand())
    assert "a bug" in shard.status().result(SOON_S)["faulty_tenants"]["bob"]
    assert ask(shard, SearchQuery("bob", "word3")).turns
    assert [r["status"] for r in sender.add(some("bob", 7))] == ["stored"]


def test_a_failed_write_fails_the_turns_queued_behind_it_and_the_shard_recovers(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the turns behind it would be stored before those that are sent again."""
    sender = Sender(shard)
    sender.add(some("ann", 0))
    write = Journal.append
    inside, go_on = threading.Event(), threading.Event()

    def full_once(self: Journal, rows: Any) -> None:
        if rows and not inside.is_set():
            inside.set()
            assert go_on.wait(SOON_S)
            raise JournalError("no space left")
        write(self, rows)

    monkeypatch.setattr(Journal, "append", full_once)
    failing = shard.add(pack(some("ann", 1)), sender.stamp())
    assert inside.wait(SOON_S)
    behind = shard.add(pack(some("ann", 2)), sender.stamp())
    asked = shard.status()
    go_on.set()
    for call in (failing, behind):
        with pytest.raises(JournalError, match="no space"):
            call.result(SOON_S)
    status = asked.result(SOON_S)
    assert status["waiting_turns"] == 0, "commands are still obeyed"
    assert shard.status().result(SOON_S)["parked"] == []
    sender.greet()
    assert [(r["status"], r["seq"]) for r in sender.add(some("ann", 1, 2))] == [("stored", 1), ("stored", 2)]
    assert shard.status().result(SOON_S)["state"] == "serving"


def test_a_turn_that_cannot_be_parked_fails_its_call_and_the_shard_goes_on(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    shard = start(EngineParts(encoder=lambda _: FailingEncoder(["badger"]), llm=mock_llm))
    sender = Sender(shard)
    with monkeypatch.context() as patch:
        patch.setattr(Quarantine, "park", Mock(side_effect=StoreError("503")))
        with pytest.raises(StoreError, match="503"):
            sender.add([turn_of("ann", 0, "a badger")])
    assert shard.status().result(SOON_S)["state"] == "serving"
    sender.greet()
    receipts = sender.add([turn_of("ann", 0, "a badger"), turn_of("ann", 1, "hello")])
    assert [(r["status"], r["seq"]) for r in receipts] == [("parked", None), ("stored", 0)]


def test_an_actor_whose_shard_ends_of_itself_ends_too(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from undertow.engine.cluster.ray.shard_actor import ShardActor

    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def watched() -> tuple[ShardActor, threading.Thread]:
        before = set(threading.enumerate())
        actor = ShardActor(str(root), "s0", settings().model_dump(), pickle.dumps(PARTS), "")
        (watch,) = [t for t in set(threading.enumerate()) - before if t.name.startswith("watch")]
        return actor, watch

    actor, watch = watched()
    asyncio.run(actor.close())
    watch.join(SOON_S)
    assert exits == []
    actor, watch = watched()
    with monkeypatch.context() as patch:
        patch.setattr(EngineWork, "_work", Mock(side_effect=RuntimeError("a bug")))
        with pytest.raises(UndertowError, match="closed"):
            for _ in range(2):  # the first may be answered before the step
                actor._shard.status().result(SOON_S)
                time.sleep(0.1)
        watch.join(SOON_S)
    assert exits == [1]


def test_a_shard_that_cannot_open_says_why_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    broken = [True]

    def encoder(_: Any) -> FailingEncoder:
        if broken[0]:
            raise UndertowError("the model is not there yet")
        return FailingEncoder([])

    shard = start(EngineParts(encoder=encoder, llm=mock_llm))
    with pytest.raises(UndertowError, match="not there yet"):
        shard.hello("client", 1).result(SOON_S)
    status = shard.status().result(SOON_S)
    assert status["state"] == "failed" and "not there yet" in status["failure"]
    broken[0] = False
    assert Sender(shard).add(some("ann", 0))[0]["status"] == "stored"


def test_a_zombie_is_fenced_and_acknowledges_nothing(root: Location, start: Start) -> None:
    zombie = start()
    sender = Sender(zombie)
    assert sender.add(some("ann", 0, 1))[1]["seq"] == 1
    release = hold(zombie)
    late = zombie.add(pack(some("ann", 77)), sender.stamp())
    heir = start()
    assert [r["seq"] for r in Sender(heir).add(some("ann", 2))] == [2]
    release()
    with pytest.raises(Fenced):
        late.result(SOON_S)
    for call in (zombie.ask(SearchQuery("ann", "x")), zombie.hello("client", 1)):
        with pytest.raises(Fenced):
            call.result(SOON_S)
    assert ask(heir, DrainCommand())
    assert [t.memory for t in ask(heir, SearchQuery("ann", "word77 other77", k_sub=9)).turns] and (
        ask(heir, StatsQuery())["turns"] == 3
    )
    zombie.close()
    heir.close()
    state = cluster_state(root)
    assert len([1 for line in state.exports["ann"] if '"kind":"turn"' in line]) == 3


def test_two_clusters_on_one_root_do_not_take_it_from_each_other_for_ever(
    root: Location, start: Start
) -> None:
    """A shard's life is the same through its restarts; who has lost the journal to another says so."""
    ours = start(life="ours")
    Sender(ours).add(some("ann", 0))
    ours.close()
    ours = start(life="ours")  # its own restart
    stamped = Sender(ours)
    sender = Sender(start(life="theirs"))
    with pytest.raises(Fenced):
        stamped.add(some("ann", 1))
    again = start(life="ours")
    for call in (again.hello("client", 1), again.ask(SearchQuery("ann", "word0"))):
        with pytest.raises(JournalError, match="another cluster works on this root"):
            call.result(SOON_S)
    status = again.status().result(SOON_S)
    assert status["state"] == "failed" and "another cluster works on" in status["failure"]
    assert [r["seq"] for r in sender.add(some("ann", 2))] == [1], "nobody has taken it from them"
    third = start(life="started anew by somebody")
    assert Sender(third).add(some("ann", 3))[0]["seq"] == 2


def test_an_llm_client_is_closed_where_no_engine_came_of_it(root: Location, start: Start) -> None:
    made: list[Any] = []

    def llm(of: Any) -> Any:
        made.append(mock_llm(of))
        made[-1].closed = False
        made[-1].close = lambda of=made[-1]: setattr(of, "closed", True)
        return made[-1]

    Location.of(root / STORES / "s0").write("store.json", b"no JSON")
    shard = start(EngineParts(PARTS.encoder, llm))
    with pytest.raises(StoreError):
        shard.hello("client", 1).result(SOON_S)
    assert made and all(client.closed for client in made)


def test_vectors_of_another_device_are_told_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start().ready().result(SOON_S)
    encoder = FailingEncoder(["badger"])
    encoder.fingerprint = replace(encoder.fingerprint, device="cuda")
    shard = start(EngineParts(encoder=lambda _: encoder, llm=mock_llm))
    Sender(shard).add([turn_of("ann", 0, "a badger")])
    assert shard.status().result(SOON_S)["reopened"] > 0
    assert caplog.text.count("shard s0: the store's vectors were computed in float64 on cpu") == 1
