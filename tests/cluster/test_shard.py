"""One shard: order, bounds, and that what fails is contained and told."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undertow.engine.api import erasure
from undertow.engine.api.engine import Engine
from undertow.engine.api.erasure import NotCertified
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.base.queries import (
    AnswerQuery,
    DeleteCommand,
    DrainCommand,
    EraseCommand,
    FlushCommand,
    GetQuery,
    HistoryQuery,
    MemoriesQuery,
    SearchQuery,
    StatsQuery,
    UpdateCommand,
)
from undertow.engine.base.results import Certificate, Updated
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.root_thresholds import agree, in_force
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.shard.call_queue import CallStamp, StaleSession
from undertow.engine.cluster.shard.engine_thread import EngineThread
from undertow.engine.cluster.shard.quarantine import Quarantine
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts, EngineUnusable
from undertow.engine.cluster.shard_map import STORES, Removed, ShardMap
from undertow.engine.cluster.wire import pack
from undertow.engine.policies.recmem import RecMem
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.journal import Fenced, Journal, JournalError
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.tenants.migration_records import Move, Moved
from undertow.engine.tenants.registry import UnknownTenant

from ..engine.api.test_erase import turns_of_topics
from ..support.cluster.in_process import PARTS, FailingEncoder, begin, cluster_state, mock_llm, settings
from ..support.engine import bytes_hold, turn_of
from ..support.faults.harness import THETA, assert_same_state, end_state, turns_of, write_log

SOON_S = 30


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return begin(tmp_path / "root", 1)


@pytest.fixture
def shard(root: Location) -> Iterator[Shard]:
    made = Shard(root, "s0", settings(), PARTS)
    yield made
    made.close()


class Sender:
    """A client of one shard, which numbers its calls."""

    def __init__(self, shard: Shard, name: str = "client") -> None:
        self.shard, self.name = shard, name
        self.greet()

    def greet(self) -> None:
        self.token = self.shard.hello(self.name, 1).result(SOON_S).token
        self.number = 0

    def stamp(self) -> CallStamp:
        self.number += 1
        return CallStamp(self.name, self.token, self.number - 1, 1)

    def add(self, turns: list[Turn]) -> list[dict[str, Any]]:
        receipts: list[dict[str, Any]] = self.shard.add(pack(turns), self.stamp()).result(SOON_S).to_pylist()
        return receipts


def some(tenant: str, *numbers: int) -> list[Turn]:
    return [turn_of(tenant, n, f"word{n} other{n}") for n in numbers]


# ---- the engine's calls


def test_a_shard_gives_what_an_engine_gives(root: Location, shard: Shard, tmp_path: Path) -> None:
    turns = [t for of in turns_of(write_log(tmp_path / "log.jsonl", ["ann", "bob"], 30)).values() for t in of]
    sender = Sender(shard)
    receipts = [r for start in range(0, len(turns), 13) for r in sender.add(turns[start : start + 13])]
    assert [r["status"] for r in receipts] == ["stored"] * len(turns)
    assert shard.ask(FlushCommand("ann")).result(SOON_S)
    assert shard.ask(DrainCommand()).result(SOON_S)
    found = shard.ask(SearchQuery("bob", turns[40].text, k_sub=3)).result(SOON_S)
    answer = shard.ask(AnswerQuery("bob", "What of the harbour?")).result(SOON_S)
    memories, figures = shard.ask(MemoriesQuery("bob")).result(SOON_S), shard.ask(StatsQuery()).result(SOON_S)
    shard.close()
    plain = tmp_path / "plain"
    with Engine(plain, settings(), PARTS.encoder(settings()), llm=mock_llm(settings())) as engine:
        stored = engine.add_batch(turns)
        assert engine.flush("ann")
        assert engine.drain()
        assert found == engine.search("bob", turns[40].text, k_sub=3)
        assert answer.text == engine.answer("bob", "What of the harbour?").text
        assert (memories, figures) == (engine.get_all("bob"), engine.stats())
    assert [(r["id"], r["seq"]) for r in receipts] == [(r.id, r.seq) for r in stored]
    assert_same_state(cluster_state(root), end_state(plain))


def test_calls_that_arrive_out_of_order_are_stored_in_order(shard: Shard) -> None:
    sender = Sender(shard)
    stamps = [sender.stamp() for _ in range(6)]
    arrivals = [3, 1, 5, 2, 4, 0]
    futures = {n: shard.add(pack(some("ann", 2 * n, 2 * n + 1)), stamps[n]) for n in arrivals}
    seqs = [seq for n in range(6) for seq in futures[n].result(SOON_S).column("seq").to_pylist()]
    assert seqs == list(range(12))


def test_an_earlier_line_of_a_client_is_refused(shard: Shard) -> None:
    old, ahead = Sender(shard), CallStamp("client", "", 0, 1)
    waiting = shard.add(pack(some("ann", 9)), CallStamp("client", old.token, 1, 1))
    new = Sender(shard)
    with pytest.raises(StaleSession):
        waiting.result(SOON_S)
    for stamp in (old.stamp(), ahead):
        with pytest.raises(StaleSession):
            shard.add(pack(some("ann", 0)), stamp).result(SOON_S)
    assert [r["seq"] for r in new.add(some("ann", 0))] == [0]


def test_a_full_shard_refuses_and_keeps_the_order(root: Location) -> None:
    slow = Shard(root, "s0", settings(queue_turns=8), PARTS)
    try:
        sender = Sender(slow)
        release = hold(slow)
        first = slow.add(pack(some("ann", *range(6))), sender.stamp())
        again = sender.stamp()
        behind = slow.add(pack(some("ann", 9)), sender.stamp())
        with pytest.raises(QueueFull):
            slow.add(pack(some("ann", 6, 7, 8)), again).result(SOON_S)
        release()
        assert first.result(SOON_S).column("seq").to_pylist() == list(range(6))
        assert not behind.done()
        assert slow.add(pack(some("ann", 6, 7, 8)), again).result(SOON_S).column("seq").to_pylist() == [
            6,
            7,
            8,
        ]
        assert behind.result(SOON_S).column("seq").to_pylist() == [9]
    finally:
        slow.close()


def hold(shard: Shard) -> Any:
    """Stop the shard's thread until the returned function is called."""
    began, gate = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return gate.wait(SOON_S)

    shard._engine_thread.ask_without(wait)
    assert began.wait(SOON_S)
    return gate.set


def test_a_call_of_more_turns_than_may_wait_is_taken_all_the_same(root: Location) -> None:
    small = Shard(root, "s0", settings(queue_turns=8), PARTS)
    try:
        assert [r["seq"] for r in Sender(small).add(some("ann", *range(40)))] == list(range(40))
    finally:
        small.close()


def test_errors_of_a_call_are_its_callers_and_the_shard_goes_on(shard: Shard) -> None:
    with pytest.raises(UnknownTenant):
        shard.ask(SearchQuery("nobody", "x")).result(SOON_S)
    with pytest.raises(ValueError, match="columns"):
        shard.add(pack(some("ann", 0)).drop_columns(["text"]), CallStamp("client", "", 0, 1)).result(SOON_S)
    sender = Sender(shard)
    sender.add(some("ann", 0))
    with pytest.raises(ValueError, match="empty"):
        shard.ask(SearchQuery("ann", " ")).result(SOON_S)
    assert shard.status().result(SOON_S)["reopened"] == 0


def test_a_closed_shard_says_so(root: Location) -> None:
    shard = Shard(root, "s0", settings(), PARTS)
    sender = Sender(shard)
    release = hold(shard)
    lost = shard.add(pack(some("ann", 0)), sender.stamp())
    release()
    shard.close()
    with pytest.raises(UndertowError, match="closed"):
        shard.add(pack(some("ann", 1)), sender.stamp()).result(SOON_S)
    assert lost.done()


# ---- repeats


def test_repeated_calls_change_nothing(shard: Shard) -> None:
    sender = Sender(shard)
    first = sender.add(some("ann", 0, 1, 2))
    assert [r["status"] for r in sender.add(some("ann", 0, 1, 2, 3))] == ["duplicate"] * 3 + ["stored"]
    turn_id = first[1]["id"]
    assert shard.ask(DeleteCommand(turn_id, "bo")).result(SOON_S) is None
    assert shard.ask(DeleteCommand(turn_id, "ann")).result(SOON_S) == "turn"
    assert shard.ask(DeleteCommand(turn_id, "ann", again=True)).result(SOON_S) == "turn"
    assert shard.ask(DeleteCommand(turn_id, None, again=True)).result(SOON_S) == "turn"
    assert shard.ask(DeleteCommand(turn_id, None)).result(SOON_S) is None
    before = records(shard)
    assert shard.ask(FlushCommand("ann")).result(SOON_S)
    assert shard.ask(FlushCommand("ann", again=True)).result(SOON_S)
    assert records(shard) == before + 1
    certificate = shard.ask(EraseCommand("ann", now=True)).result(SOON_S)
    repeated = shard.ask(EraseCommand("ann", now=True, again=True)).result(SOON_S)
    assert certificate is not None and repeated is not None
    assert repeated == certificate
    with pytest.raises(UnknownTenant):
        shard.ask(EraseCommand("ann")).result(SOON_S)


def test_erasures_that_wait_share_a_purge(
    root: Location, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(shard)
    for n, name in enumerate(("ann", "bob", "cy"), 1):
        sender.add([turn_of(name, seq, f"words of {name}") for seq in range(n)])
    purges: list[set[str]] = []
    purge = Engine.purge

    def counted(engine: Engine) -> dict[str, Certificate]:
        certificates = purge(engine)
        purges.append(set(certificates))
        return certificates

    monkeypatch.setattr(Engine, "purge", counted)
    go = threading.Event()
    holding = shard._engine_thread.ask_without(lambda: go.wait(SOON_S))
    erasing = [shard.ask(EraseCommand(name, now=True)) for name in ("ann", "bob")]
    unknown = shard.ask(EraseCommand("nobody", now=True))
    erasing.append(shard.ask(EraseCommand("cy", now=True)))
    go.set()
    assert holding.result(SOON_S)
    certificates = [call.result(SOON_S) for call in erasing]
    with pytest.raises(UnknownTenant):
        unknown.result(SOON_S)
    assert purges == [{c.tenant_key for c in certificates if c is not None}]
    assert [c.turns_removed for c in certificates if c is not None] == [1, 2, 3]
    assert not bytes_hold(Path(str(root)), "words of")
    assert shard.ask(EraseCommand("nobody", now=True, again=True)).result(SOON_S) is None


def test_a_certificate_says_when_the_bytes_went_not_when_it_was_asked_for(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sender(shard).add([turn_of("ann", 0, "words of ann")])
    monkeypatch.setattr(erasure, "_now", lambda: "2026-01-01T00:00:00+00:00")
    certificate = shard.ask(EraseCommand("ann", now=True)).result(SOON_S)
    monkeypatch.setattr(erasure, "_now", lambda: "2027-01-01T00:00:00+00:00")
    assert shard.ask(EraseCommand("ann", now=True, again=True)).result(SOON_S) == certificate
    assert certificate is not None and certificate.purged_at == "2026-01-01T00:00:00+00:00"


def test_a_tenant_that_is_being_moved_is_erased_at_once_and_certified_later(shard: Shard) -> None:
    Sender(shard).add([turn_of("ann", 0, "words of ann")])
    assert shard._supervisor.engine is not None
    tenants, key = shard._supervisor.engine.tenants, shard._supervisor.open().journal.info.tenant_key("ann")
    tenants.arrived[key] = Move("arrived", "elsewhere", 1)
    for again in (False, True):
        with pytest.raises(NotCertified, match="ask again"):
            shard.ask(EraseCommand("ann", now=True, again=again)).result(SOON_S)
        with pytest.raises(UnknownTenant):
            shard.ask(MemoriesQuery("ann")).result(SOON_S)
    tenants.arrived.clear()
    certificate = shard.ask(EraseCommand("ann", now=True, again=True)).result(SOON_S)
    assert certificate is not None and certificate.turns_removed == 1


def test_repeated_updates_are_made_once(shard: Shard) -> None:
    turns = turns_of_topics("ann", 24)
    ids = [r["id"] for r in Sender(shard).add(turns)]
    assert shard.ask(FlushCommand("ann")).result(SOON_S)
    fact = next(m for m in shard.ask(MemoriesQuery("ann")).result(SOON_S) if m.kind == "fact")
    for tenant in ("ann", None):
        assert shard.ask(UpdateCommand(fact.id, tenant, "one ")).result(SOON_S) == Updated(fact.id, "fact")
        before = records(shard)
        assert shard.ask(UpdateCommand(fact.id, tenant, "one ", again=True)).result(SOON_S) == Updated(
            fact.id, "fact"
        )
        assert records(shard) == before
        assert shard.ask(UpdateCommand(fact.id, tenant, "two", again=True)).result(SOON_S) == Updated(
            fact.id, "fact"
        )
        assert records(shard) == before + 1, "the first attempt was lost before it was logged"
        assert shard.ask(DrainCommand()).result(SOON_S)
        known = shard.ask(GetQuery(fact.id, tenant)).result(SOON_S)
        assert known is not None and known["text"] == "two"
    versions = shard.ask(HistoryQuery(fact.id, "ann")).result(SOON_S)
    assert versions is not None and [v["text"] for v in versions[-4:]] == ["one", "two"] * 2
    new = shard.ask(UpdateCommand(ids[3], "ann", "the boat is green")).result(SOON_S)
    assert new is not None and new.kind == "turn"
    before = records(shard)
    for tenant in ("ann", None):
        assert shard.ask(UpdateCommand(ids[3], tenant, "the boat is green", again=True)).result(SOON_S) == new
        assert shard.ask(UpdateCommand(ids[3], tenant, "the boat is green")).result(SOON_S) is None
        assert shard.ask(GetQuery(ids[3], tenant)).result(SOON_S) is None
        assert shard.ask(HistoryQuery(ids[3], tenant)).result(SOON_S) is None
    assert records(shard) == before
    for call in (
        shard.ask(GetQuery(new.id, "bo")),
        shard.ask(HistoryQuery(new.id, "bo")),
        shard.ask(UpdateCommand(new.id, "bo", "x")),
    ):
        assert call.result(SOON_S) is None


def test_a_shard_filters_by_metadata_as_an_engine_does(shard: Shard) -> None:
    sender = Sender(shard)
    sender.add([replace(turn, metadata={"odd": n % 2 == 1}) for n, turn in enumerate(some("ann", *range(9)))])
    found = shard.ask(SearchQuery("ann", "word1", k_sub=20, where={"odd": True})).result(SOON_S)
    assert sorted(hit.source_seqs[0] for hit in found.turns) == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="empty list"):
        shard.ask(SearchQuery("ann", "word1", where={"odd": []})).result(SOON_S)
    assert shard.status().result(SOON_S)["reopened"] == 0


def test_a_flush_that_is_repeated_loads_nobody(root: Location, shard: Shard) -> None:
    Sender(shard).add(some("ann", 0, 1))
    assert shard.ask(FlushCommand("ann")).result(SOON_S)
    before = records(shard)
    shard.close()
    after = Shard(root, "s0", settings(), PARTS)
    try:
        assert after.ask(FlushCommand("ann", again=True)).result(SOON_S)
        assert loaded(after) == []
        Sender(after).add(some("ann", 2))
        assert after.ask(FlushCommand("ann", again=True)).result(SOON_S), (
            "there is a turn behind the last one"
        )
        assert records(after) == before + 2
        with pytest.raises(UnknownTenant):
            after.ask(FlushCommand("bob", again=True)).result(SOON_S)
    finally:
        after.close()


def loaded(shard: Shard) -> list[str]:
    engine = shard._supervisor.engine
    assert engine is not None
    return [tenant.name for tenant in engine.tenants.loaded()]


def records(shard: Shard) -> int:
    engine = shard._supervisor.engine
    assert engine is not None
    return engine.tenants.existing("ann").next_seq


# ---- whose tenants


def test_tenants_of_other_shards_come_back_while_the_others_are_stored(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 3)
    keys = shard_map.load(root)
    names = [f"tenant-{n}" for n in range(12)]
    shard = Shard(root, "s1", settings(), PARTS)
    try:
        receipts = Sender(shard).add([turn_of(name, 0, name) for name in names])
        for name, receipt in zip(names, receipts, strict=True):
            owner = keys.owner(name)
            expected = ("stored", None) if owner == "s1" else ("moved", owner)
            assert (receipt["status"], receipt["detail"]) == expected
        stranger = next(name for name in names if keys.owner(name) != "s1")
        for call in (
            shard.ask(SearchQuery(stranger, "x")),
            shard.ask(GetQuery("m", stranger)),
            shard.ask(HistoryQuery("m", stranger)),
            shard.ask(UpdateCommand("m", stranger, "x")),
            shard.ask(FlushCommand(stranger)),
            shard.ask(EraseCommand(stranger)),
        ):
            with pytest.raises(Moved):
                call.result(SOON_S)
    finally:
        shard.close()


def test_a_shard_reads_the_map_that_its_clients_know(root: Location, shard: Shard) -> None:
    sender = Sender(shard)
    names = [f"tenant-{n}" for n in range(12)]
    sender.add([turn_of(names[0], 0, "x")])
    shard_map.publish(root, ShardMap(2, ("s0", "s9"), None, shard_map.load(root).hash_key))
    sender.token, sender.number = shard.hello("client", 2).result(SOON_S).token, 0
    statuses = {r["status"] for r in sender.add([turn_of(name, 1, "y") for name in names])}
    assert statuses == {"stored", "moved"}
    assert shard.status().result(SOON_S)["map_version"] == 2


def test_a_call_brings_its_map_so_that_a_tenants_first_turns_keep_their_order(tmp_path: Path) -> None:
    """The line was begun while the resharding was closing; the router knows since that it clears."""
    root = begin(tmp_path / "root", 1)
    moving = shard_map.load(root).toward(["s0", "s1"])
    closing = moving.after()
    for newer in (moving, closing):
        shard_map.publish(root, newer)
    name = next(name for name in (f"tenant-{n}" for n in range(99)) if closing.owner(name) == "s1")
    shard = Shard(root, "s1", settings(), PARTS)
    try:
        token = shard.hello("client", closing.version).result(SOON_S).token
        early = shard.add(pack(some(name, 0)), CallStamp("client", token, 0, closing.version)).result(SOON_S)
        assert early.column("status").to_pylist() == ["moved"]
        shard_map.publish(root, closing.after())
        found = [
            shard.add(pack(some(name, n)), CallStamp("client", token, n + 1, closing.version + 1)).result(
                SOON_S
            )
            for n in range(2)
        ]
        assert [receipts.column("seq").to_pylist() for receipts in found] == [[0], [1]]
    finally:
        shard.close()


# ---- what fails


def test_poison_turns_are_parked_and_all_others_stored_in_order(root: Location, tmp_path: Path) -> None:
    encoder = FailingEncoder(["badger", "weasel"])
    parts = EngineParts(encoder=lambda _: encoder, llm=mock_llm)
    turns = some("ann", *range(20)) + some("bob", *range(20))
    turns[7] = turn_of("ann", 7, "a badger here")
    turns[30] = turn_of("bob", 10, "a weasel there")
    shard = Shard(root, "s0", settings(), parts)
    try:
        sender = Sender(shard)
        receipts = sender.add(turns)
        assert [n for n, r in enumerate(receipts) if r["status"] == "parked"] == [7, 30]
        told = receipts[7]["detail"]
        assert told.startswith("RuntimeError in encode (in_process.py:")
        sound = [r for n, r in enumerate(receipts) if n not in (7, 30)]
        assert [r["status"] for r in sound] == ["stored"] * 38
        assert [r["seq"] for r in sound] == [*range(19), *range(19)]
        assert shard.ask(DrainCommand()).result(SOON_S)
        status = shard.status().result(SOON_S)
        assert [entry["reason"] for entry in status["parked"]] == [told, told]
        # sent again, it is parked still, and costs nothing
        calls = encoder.calls
        again = sender.add([turns[7], turn_of("ann", 99, "new")])
        assert [r["status"] for r in again] == ["parked", "stored"]
        assert encoder.calls == calls + 1
    finally:
        shard.close()
    parking = Quarantine(root, "s0", shard_map.load(root).tenant_key)
    kept = [parking.read(entry["file"]) for entry in parking.report()]
    assert sorted(p.turn.text for p in kept) == sorted(turns[n].text for n in (7, 30))
    for p in kept:  # what the error says lies beside the turn that it is about, and nowhere else
        word, other = ("badger", "weasel") if p.turn.tenant == "ann" else ("weasel", "badger")
        assert f"no vector for {word}" in p.error and other not in p.error
    plain = tmp_path / "plain"
    sound_turns = [*(t for n, t in enumerate(turns) if n not in (7, 30)), turn_of("ann", 99, "new")]
    with Engine(plain, settings(), PARTS.encoder(settings()), llm=mock_llm(settings())) as engine:
        engine.add_batch(sound_turns)
        assert engine.drain()
    assert_same_state(cluster_state(root), end_state(plain))


def test_an_erasure_takes_parked_turns_along(root: Location) -> None:
    encoder = FailingEncoder(["badger"])
    shard = Shard(root, "s0", settings(), EngineParts(encoder=lambda _: encoder, llm=mock_llm))
    try:
        sender = Sender(shard)
        sender.add([turn_of("ann", 0, "a badger here"), turn_of("ann", 1, "hello")])
        sender.add([turn_of("bob", 0, "a badger too")])
        assert bytes_hold(Path(str(root)), "a badger here")
        assert shard.ask(EraseCommand("ann", now=True)).result(SOON_S) is not None
        assert not bytes_hold(Path(str(root)), "a badger here")
        assert len(shard.status().result(SOON_S)["parked"]) == 1
    finally:
        shard.close()


def test_a_failure_that_does_not_repeat_parks_nothing(root: Location) -> None:
    encoder = FailingEncoder(["badger"])

    def once(message: str) -> Exception:
        encoder.words.clear()
        return RuntimeError(message)

    encoder._error = once
    shard = Shard(root, "s0", settings(), EngineParts(encoder=lambda _: encoder, llm=mock_llm))
    try:
        receipts = Sender(shard).add([turn_of("ann", 0, "a badger"), turn_of("ann", 1, "hello")])
        assert [(r["status"], r["seq"]) for r in receipts] == [("stored", 0), ("stored", 1)]
        assert shard.status().result(SOON_S)["reopened"] == 1
    finally:
        shard.close()


def test_an_engine_that_fails_with_everything_parks_nothing(root: Location) -> None:
    encoder = FailingEncoder(["word", "hello"])
    shard = Shard(root, "s0", settings(), EngineParts(encoder=lambda _: encoder, llm=mock_llm))
    try:
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
    finally:
        shard.close()


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
    assert shard.ask(FlushCommand("ann")).result(SOON_S)
    assert not shard.ask(FlushCommand("bob")).result(SOON_S)
    assert not shard.ask(DrainCommand()).result(SOON_S)
    assert "a bug" in shard.status().result(SOON_S)["faulty_tenants"]["bob"]
    assert shard.ask(SearchQuery("bob", "word3")).result(SOON_S).turns
    assert [r["status"] for r in sender.add(some("bob", 7))] == ["stored"]


def test_a_disk_that_fails_fails_the_calls_and_heals(
    root: Location, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(shard)
    sender.add(some("ann", 0))
    write = Journal.append

    def full(self: Journal, rows: Any) -> None:
        if rows:
            raise JournalError("no space left")
        write(self, rows)

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(JournalError, match="no space"):
        sender.add(some("ann", 1, 2))
    assert shard.status().result(SOON_S)["parked"] == []
    monkeypatch.setattr(Journal, "append", write)
    sender.greet()
    assert [r["seq"] for r in sender.add(some("ann", 1, 2))] == [1, 2]
    assert shard.status().result(SOON_S)["state"] == "serving"


def test_what_came_in_during_a_step_that_fails_is_not_stored_past_it(
    root: Location, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the turns behind it would stand before those that are sent again."""
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
    assert asked.result(SOON_S)["waiting_turns"] == 0, "commands are obeyed all the same"
    sender.greet()
    assert [(r["status"], r["seq"]) for r in sender.add(some("ann", 1, 2))] == [("stored", 1), ("stored", 2)]


def test_a_turn_that_cannot_be_parked_fails_its_call_and_the_shard_goes_on(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(
        root, "s0", settings(), EngineParts(encoder=lambda _: FailingEncoder(["badger"]), llm=mock_llm)
    )
    try:
        sender = Sender(shard)
        with monkeypatch.context() as patch:

            def refuse(self: Quarantine, *_: Any) -> None:
                raise StoreError("503")

            patch.setattr(Quarantine, "park", refuse)
            with pytest.raises(StoreError, match="503"):
                sender.add([turn_of("ann", 0, "a badger")])
        assert shard.status().result(SOON_S)["state"] == "serving"
        sender.greet()
        receipts = sender.add([turn_of("ann", 0, "a badger"), turn_of("ann", 1, "hello")])
        assert [(r["status"], r["seq"]) for r in receipts] == [("parked", None), ("stored", 0)]
    finally:
        shard.close()


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

    def broken(self: EngineThread) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(EngineThread, "_work", broken)
        with pytest.raises(UndertowError, match="closed"):
            for _ in range(2):  # the first may be answered before the step
                actor._shard.status().result(SOON_S)
                time.sleep(0.1)
        watch.join(SOON_S)
    assert exits == [1]


def test_a_shard_that_cannot_open_says_why_and_tries_again(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [True]

    def encoder(_: Any) -> FailingEncoder:
        if broken[0]:
            raise UndertowError("the model is not there yet")
        return FailingEncoder([])

    shard = Shard(root, "s0", settings(), EngineParts(encoder=encoder, llm=mock_llm))
    try:
        with pytest.raises(UndertowError, match="not there yet"):
            shard.hello("client", 1).result(SOON_S)
        status = shard.status().result(SOON_S)
        assert status["state"] == "failed" and "not there yet" in status["failure"]
        broken[0] = False
        assert Sender(shard).add(some("ann", 0))[0]["status"] == "stored"
    finally:
        shard.close()


def test_a_zombie_is_fenced_and_acknowledges_nothing(root: Location) -> None:
    zombie = Shard(root, "s0", settings(), PARTS)
    heir: Shard | None = None
    try:
        sender = Sender(zombie)
        assert sender.add(some("ann", 0, 1))[1]["seq"] == 1
        release = hold(zombie)
        late = zombie.add(pack(some("ann", 77)), sender.stamp())
        heir = Shard(root, "s0", settings(), PARTS)
        assert [r["seq"] for r in Sender(heir).add(some("ann", 2))] == [2]
        release()
        with pytest.raises(Fenced):
            late.result(SOON_S)
        for call in (zombie.ask(SearchQuery("ann", "x")), zombie.hello("client", 1)):
            with pytest.raises(Fenced):
                call.result(SOON_S)
        assert heir.ask(DrainCommand()).result(SOON_S)
        assert [
            t.memory for t in heir.ask(SearchQuery("ann", "word77 other77", k_sub=9)).result(SOON_S).turns
        ] and (heir.ask(StatsQuery()).result(SOON_S)["turns"] == 3)
    finally:
        zombie.close()
        if heir is not None:
            heir.close()
    state = cluster_state(root)
    assert len([1 for line in state.exports["ann"] if '"kind":"turn"' in line]) == 3


def test_two_clusters_on_one_root_do_not_take_it_from_each_other_for_ever(root: Location) -> None:
    """A shard's life is the same through its restarts; who has lost the journal to another says so."""
    ours = Shard(root, "s0", settings(), PARTS, life="ours")
    Sender(ours).add(some("ann", 0))
    ours.close()
    ours = Shard(root, "s0", settings(), PARTS, life="ours")  # its own restart
    stamped = Sender(ours)
    theirs = Shard(root, "s0", settings(), PARTS, life="theirs")
    again: Shard | None = None
    try:
        sender = Sender(theirs)
        with pytest.raises(Fenced):
            stamped.add(some("ann", 1))
        again = Shard(root, "s0", settings(), PARTS, life="ours")
        for call in (again.hello("client", 1), again.ask(SearchQuery("ann", "word0"))):
            with pytest.raises(JournalError, match="another cluster works on this root"):
                call.result(SOON_S)
        status = again.status().result(SOON_S)
        assert status["state"] == "failed" and "another cluster works on" in status["failure"]
        assert [r["seq"] for r in sender.add(some("ann", 2))] == [1], "nobody has taken it from them"
        third = Shard(root, "s0", settings(), PARTS, life="started anew by somebody")
        assert Sender(third).add(some("ann", 3))[0]["seq"] == 2
        third.close()
    finally:
        for shard in (ours, theirs, again):
            if shard is not None:
                shard.close()


def test_an_llm_client_is_closed_where_no_engine_came_of_it(root: Location) -> None:
    made: list[Any] = []

    def llm(of: Any) -> Any:
        made.append(mock_llm(of))
        made[-1].closed = False
        made[-1].close = lambda of=made[-1]: setattr(of, "closed", True)
        return made[-1]

    Location.of(root / STORES / "s0").write("store.json", b"no JSON")
    shard = Shard(root, "s0", settings(), EngineParts(PARTS.encoder, llm))
    try:
        with pytest.raises(StoreError):
            shard.hello("client", 1).result(SOON_S)
        assert made and all(client.closed for client in made)
    finally:
        shard.close()


# ---- a shard that the map does without


def remove(root: Location, shard: str) -> ShardMap:
    """The maps of a resharding that takes a shard away; the last of them."""
    now = shard_map.load(root)
    now = now.toward([name for name in now.shards if name != shard])
    shard_map.publish(root, now)
    while now.phase is not None:
        now = now.after()
        shard_map.publish(root, now)
    return now


@pytest.mark.parametrize("how", ["add", "hello", "look"])
def test_a_shard_that_the_map_does_without_ends(tmp_path: Path, how: str) -> None:
    root = begin(tmp_path / "root", 2)
    shard = Shard(root, "s1", settings(), PARTS)
    try:
        sender = Sender(shard)
        settled = remove(root, "s1")
        calls = {
            "add": lambda: shard.add(
                pack(some("ann", 0)), CallStamp("client", sender.token, 0, settled.version)
            ),
            "hello": lambda: shard.hello("client", settled.version),
            "look": shard.look,
        }
        with pytest.raises(Removed, match="by map 5"):
            calls[how]().result(SOON_S)
        for call in (
            shard.ask(SearchQuery("ann", "x")),
            shard.ask(StatsQuery()),
            shard.ask(DrainCommand()),
            shard.look(),
        ):
            with pytest.raises(Removed):
                call.result(SOON_S)
    finally:
        shard.close()


def test_a_shard_that_the_map_does_without_makes_no_store(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)
    remove(root, "s1")
    shard = Shard(root, "s1", settings(), PARTS)
    try:
        with pytest.raises(Removed):
            shard.hello("client", 1).result(SOON_S)
        assert not root.exists(f"{STORES}/s1")
    finally:
        shard.close()


def test_all_shards_are_asked_again_where_one_was_removed_meanwhile(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)

    class Way:
        def __init__(self, shard: str) -> None:
            self.shard = shard

        async def call(self, method: str, *_: Any, **__: Any) -> Any:
            if self.shard == "s1":
                raise Removed("s1", remove(root, "s1").version)
            return {"turns": 3}

    with Router(root, Way) as router:
        assert router.stats() == {"turns": 3}


def test_the_actor_of_a_removed_shard_ends_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, though nobody calls it; and none is started for it again."""
    ray = pytest.importorskip("ray")
    from undertow.engine.cluster.ray import actors, shard_actor
    from undertow.engine.cluster.settings import ClusterSettings

    root = begin(tmp_path / "root", 2)
    ended = threading.Event()
    exits: list[int] = []

    def kill(who: str, *, no_restart: bool) -> None:
        assert (who, no_restart) == ("me", True)
        ended.set()

    monkeypatch.setattr(shard_actor, "LOOK_S", 0.01)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="me"))
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr("os._exit", exits.append)
    actor = shard_actor.ShardActor(str(root), "s1", settings().model_dump(), pickle.dumps(PARTS), "")
    assert actor._shard.look().result(SOON_S) == 1 and not ended.is_set()
    remove(root, "s1")
    assert ended.wait(SOON_S)
    assert actor._shard.join(SOON_S) and exits == []
    start = actors.Starter(root, settings(), ClusterSettings(), PARTS)
    with pytest.raises(Removed):
        start("s1")
    with pytest.raises(Removed):
        asyncio.run(actors.RayShard(start, "s1").call("search", "ann", "x"))


def test_a_caller_hears_that_a_shard_was_fenced_and_does_not_guess(root: Location) -> None:
    """Of a process that only dies it would have to think that it died of what it was sent."""
    ray = pytest.importorskip("ray")
    from undertow.engine.cluster.ray import actors
    from undertow.engine.cluster.routing.errors import ShardExited

    class Gone:
        async def remote(self, *_: Any) -> Any:
            raise ray.exceptions.RayTaskError("call", "its report", Fenced("another writer"))

    start: Any = lambda _: SimpleNamespace(call=Gone())  # noqa: E731
    with pytest.raises(ShardExited, match="another writer"):
        asyncio.run(actors.RayShard(start, "s0").call("search", "ann", "x"))


# ---- the thresholds of a root


def test_a_shard_decides_by_its_roots_thresholds_whoever_starts_it(root: Location) -> None:
    agree(root, settings())
    starter = Settings(device="cpu", encoder="hash:384", profile="assistant")
    shard = Shard(root, "s0", starter, PARTS)
    try:
        Sender(shard).add(some("ann", 0))
        engine = shard._supervisor.engine
        assert engine is not None
        found = engine.tenants.existing("ann").thresholds_at(0)
        assert (found.theta_sim, found.theta_merge, found.theta_count) == tuple(THETA.values())
    finally:
        shard.close()


def test_settings_that_name_other_thresholds_than_the_root_are_refused(root: Location) -> None:
    agree(root, Settings(profile="assistant"))
    agree(root, Settings())  # names none
    agree(root, Settings(theta_sim=0.6, theta_count=4))
    with pytest.raises(UndertowError, match=r"theta_sim 0\.6, .*say theta_sim 0\.7, .*thresholds\.json"):
        agree(root, Settings(profile="companion"))
    assert in_force(root, Settings()).recurrence_count == 4
    root.write("thresholds.json", b'{"theta_sim": 0.5}')
    with pytest.raises(StoreError, match="must hold theta_sim, theta_merge, theta_count"):
        agree(root, Settings())
    root.write("thresholds.json", b'{"theta_sim": 5, "theta_merge": 0.5, "theta_count": 3}')
    with pytest.raises(StoreError, match="holds no thresholds"):
        in_force(root, Settings())


def test_what_was_undecided_is_decided_after_a_restart_without_a_call(root: Location) -> None:
    with Engine(
        root / STORES / "s0", settings(), PARTS.encoder(settings()), hash_key=shard_map.load(root).hash_key
    ) as engine:
        engine.add_batch(some("ann", *range(6)))
    shard = Shard(root, "s0", settings(), PARTS)
    try:
        until_s = time.monotonic() + SOON_S
        while shard.status().result(SOON_S).get("undecided_turns", 1) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert shard.status().result(SOON_S)["undecided_turns"] == 0
    finally:
        shard.close()
