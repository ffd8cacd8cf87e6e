"""One shard: order, bounds, and that what fails is contained and told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.api.erasure import NotCertified, Removal, remove_bytes
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import (
    DeleteCommand,
    DrainCommand,
    EraseCommand,
    FlushCommand,
    GetQuery,
    HistoryQuery,
    MemoriesQuery,
    SearchQuery,
    UpdateCommand,
)
from undertow.engine.base.results import Updated
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.root import agree_on_thresholds, with_policy, with_thresholds
from undertow.engine.cluster.shard import call_queue
from undertow.engine.cluster.shard.call_queue import CallStamp, StaleSession, TableCall
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import ShardSupervisor
from undertow.engine.cluster.shard_map import STORES, ShardMap
from undertow.engine.cluster.wire import Status, pack
from undertow.engine.step.admission import Admitted, Inbox, QueueFull
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.tenants.migration_records import Move, Moved
from undertow.engine.tenants.registry import TenantRegistry, UnknownTenant

from ...support.api.erasure import turns_of_topics
from ...support.cluster.in_process import PARTS, begin, settings
from ...support.cluster.shard import SOON_S, Sender, ask, hold, some
from ...support.engine import bytes_hold, turn_of
from ...support.faults.harness import THETA
from .conftest import Start

pytestmark = pytest.mark.usefixtures("either_way")

# ---- the engine's calls


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


def test_a_full_shard_refuses_and_keeps_the_order(start: Start) -> None:
    slow = start(queue_turns=8)
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
    assert slow.add(pack(some("ann", 6, 7, 8)), again).result(SOON_S).column("seq").to_pylist() == [6, 7, 8]
    assert behind.result(SOON_S).column("seq").to_pylist() == [9]


def test_a_call_that_waits_for_a_block_is_not_overtaken(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_queue, "BLOCK_TURNS", 5)
    shard = start(batch_turns=2)
    senders = [Sender(shard, name) for name in ("bulk", "mixed", "late", "other")]
    calls = [some("ann", *range(8)), some("ann", 8) + some("bob", 0), some("bob", 1), some("cat", 0)]
    release = hold(shard)
    futures = [shard.add(pack(turns), s.stamp()) for s, turns in zip(senders, calls, strict=True)]
    ended: list[Future[pa.Table]] = []
    for future in futures:
        future.add_done_callback(ended.append)
    release()
    seqs = [future.result(SOON_S).column("seq").to_pylist() for future in futures]
    assert seqs == [list(range(8)), [8, 0], [1], [0]]
    assert ended[0] is futures[3], "another tenant's turn does not wait for the block"


def test_turns_of_a_block_that_the_engine_has_dropped_are_returned_and_the_others_stored() -> None:
    turns = [*some("ann", 0), *some("bob", 0), *some("ann", 1), *some("bob", 1), *some("ann", 2)]
    call, inbox = TableCall(pack(turns)), Inbox(8)
    call.feed(inbox, None)
    stored = inbox.take(2)
    stored.acknowledge(Admitted([], ["a0", "b0"], [0, 0], 2, []))
    assert inbox.drop("ann")
    call.withdraw("ann", (Status.IN_TRANSIT, None, None, "elsewhere"))
    released: list[int] = []
    call.future.add_done_callback(lambda _: released.append(-1))
    assert not call.settle(released.append)
    inbox.take(8).acknowledge(Admitted([], [None], [None], 0, []))
    assert call.settle(released.append)
    assert released == [len(turns), -1], "who is answered may send more"
    receipts = call.future.result().to_pylist()
    assert [(r["status"], r["id"]) for r in receipts] == [
        (Status.STORED, "a0"),
        (Status.STORED, "b0"),
        (Status.IN_TRANSIT, None),
        (Status.DUPLICATE, None),
        (Status.IN_TRANSIT, None),
    ]


def test_a_call_of_more_turns_than_may_wait_is_taken_all_the_same(start: Start) -> None:
    small = start(queue_turns=8)
    assert [r["seq"] for r in Sender(small).add(some("ann", *range(40)))] == list(range(40))


def test_errors_of_a_call_are_its_callers_and_the_shard_goes_on(shard: Shard) -> None:
    with pytest.raises(UnknownTenant):
        ask(shard, SearchQuery("nobody", "x"))
    with pytest.raises(ValueError, match="columns"):
        shard.add(pack(some("ann", 0)).drop_columns(["text"]), CallStamp("client", "", 0, 1)).result(SOON_S)
    sender = Sender(shard)
    sender.add(some("ann", 0))
    with pytest.raises(ValueError, match="empty"):
        ask(shard, SearchQuery("ann", " "))
    assert shard.status().result(SOON_S)["reopened"] == 0


def test_a_closed_shard_says_so(start: Start) -> None:
    shard = start()
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
    sender.add(some("bo", 0))
    assert [r["status"] for r in sender.add(some("ann", 0, 1, 2, 3))] == ["duplicate"] * 3 + ["stored"]
    turn_id = first[1]["id"]
    assert ask(shard, DeleteCommand(turn_id, "bo")) is None
    assert ask(shard, DeleteCommand(turn_id, "ann")) == "turn"
    assert ask(shard, DeleteCommand(turn_id, "ann", again=True)) == "turn"
    assert ask(shard, DeleteCommand(turn_id, None, again=True)) == "turn"
    assert ask(shard, DeleteCommand(turn_id, "bo", again=True)) is None
    assert ask(shard, DeleteCommand(turn_id, None)) is None
    before = records(shard)
    assert ask(shard, FlushCommand("ann"))
    assert ask(shard, FlushCommand("ann", again=True))
    assert records(shard) == before + 1
    certificate = ask(shard, EraseCommand("ann", now=True))
    repeated = ask(shard, EraseCommand("ann", now=True, again=True))
    assert certificate is not None and repeated == certificate
    with pytest.raises(UnknownTenant):
        ask(shard, EraseCommand("ann"))


def test_erasures_that_wait_share_a_purge(
    root: Location, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(shard)
    for n, name in enumerate(("ann", "bob", "cy"), 1):
        sender.add([turn_of(name, seq, f"words of {name}") for seq in range(n)])
    made: list[set[str]] = []

    def counted(journal: Journal, tenants: TenantRegistry) -> Removal:
        removal = remove_bytes(journal, tenants)
        made.append(set(removal.tombstones))
        return removal

    monkeypatch.setattr("undertow.engine.cluster.shard.api.purges.remove_bytes", counted)
    go = threading.Event()
    holding = shard._work.ask_without(lambda: go.wait(SOON_S))
    erasing = [shard.ask(EraseCommand(name, now=True)) for name in ("ann", "bob")]
    unknown = shard.ask(EraseCommand("nobody", now=True))
    erasing.append(shard.ask(EraseCommand("cy", now=True)))
    go.set()
    assert holding.result(SOON_S)
    certificates = [call.result(SOON_S) for call in erasing]
    with pytest.raises(UnknownTenant):
        unknown.result(SOON_S)
    assert made == [{c.tenant_key for c in certificates if c is not None}]
    assert [c.turns_removed for c in certificates if c is not None] == [1, 2, 3]
    assert not bytes_hold(Path(str(root)), "words of")
    assert ask(shard, EraseCommand("nobody", now=True, again=True)) is None


def test_a_tenant_that_is_being_moved_is_erased_at_once_and_certified_later(shard: Shard) -> None:
    Sender(shard).add([turn_of("ann", 0, "words of ann")])
    tenants, key = engine_of(shard).tenants, engine_of(shard).journal.info.tenant_key("ann")
    tenants.arrived[key] = Move("arrived", "elsewhere", 1)
    for again in (False, True):
        with pytest.raises(NotCertified, match="ask again"):
            ask(shard, EraseCommand("ann", now=True, again=again))
        with pytest.raises(UnknownTenant):
            ask(shard, MemoriesQuery("ann"))
    tenants.arrived.clear()
    certificate = ask(shard, EraseCommand("ann", now=True, again=True))
    assert certificate is not None and certificate.turns_removed == 1


def test_repeated_updates_are_made_once(shard: Shard) -> None:
    sender = Sender(shard)
    ids = [r["id"] for r in sender.add(turns_of_topics("ann", 24))]
    sender.add(some("bo", 0))
    assert ask(shard, FlushCommand("ann"))
    fact = next(m for m in ask(shard, MemoriesQuery("ann")) if m.kind == "fact")
    for tenant in ("ann", None):
        assert ask(shard, UpdateCommand(fact.id, tenant, "one ")) == Updated(fact.id, "fact")
        before = records(shard)
        assert ask(shard, UpdateCommand(fact.id, tenant, "one ", again=True)) == Updated(fact.id, "fact")
        assert records(shard) == before
        assert ask(shard, UpdateCommand(fact.id, tenant, "two", again=True)) == Updated(fact.id, "fact")
        assert records(shard) == before + 1, "the first attempt was lost before it was logged"
        assert ask(shard, DrainCommand())
        known = ask(shard, GetQuery(fact.id, tenant))
        assert known is not None and known["text"] == "two"
    versions = ask(shard, HistoryQuery(fact.id, "ann"))
    assert versions is not None and [v["text"] for v in versions[-4:]] == ["one", "two"] * 2
    new = ask(shard, UpdateCommand(ids[3], "ann", "the boat is green"))
    assert new is not None and new.kind == "turn"
    before = records(shard)
    for tenant in ("ann", None):
        assert ask(shard, UpdateCommand(ids[3], tenant, "the boat is green", again=True)) == new
        assert ask(shard, UpdateCommand(ids[3], tenant, "the boat is green")) is None
        assert ask(shard, GetQuery(ids[3], tenant)) is None
        assert ask(shard, HistoryQuery(ids[3], tenant)) is None
    assert records(shard) == before
    for call in (
        shard.ask(GetQuery(new.id, "bo")),
        shard.ask(HistoryQuery(new.id, "bo")),
        shard.ask(UpdateCommand(new.id, "bo", "x")),
        shard.ask(UpdateCommand(ids[3], "bo", "the boat is green", again=True)),
    ):
        assert call.result(SOON_S) is None


def test_a_flush_that_is_repeated_loads_nobody(shard: Shard, start: Start) -> None:
    Sender(shard).add(some("ann", 0, 1))
    assert ask(shard, FlushCommand("ann"))
    before = records(shard)
    shard.close()
    after = start()
    assert ask(after, FlushCommand("ann", again=True))
    assert engine_of(after).tenants.loaded() == []
    Sender(after).add(some("ann", 2))
    assert ask(after, FlushCommand("ann", again=True)), "there is a turn behind the last one"
    assert records(after) == before + 2
    with pytest.raises(UnknownTenant):
        ask(after, FlushCommand("bob", again=True))


def engine_of(shard: Shard) -> Engine:
    engine = shard._supervisor.engine
    assert engine is not None
    return engine


def records(shard: Shard) -> int:
    return engine_of(shard).tenants.existing("ann").next_seq


# ---- whose tenants


def test_tenants_of_other_shards_come_back_while_the_others_are_stored(tmp_path: Path, start: Start) -> None:
    root = begin(tmp_path / "root", 3)
    keys = shard_map.load(root)
    names = [f"tenant-{n}" for n in range(48)]  # some of s1 and some of others, by any hash key
    shard = start(name="s1", where=root)
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


def test_a_shard_reads_the_map_that_its_clients_know(root: Location, shard: Shard) -> None:
    newer = ShardMap(2, ("s0", "s9"), None, shard_map.load(root).hash_key)
    names = sorted((f"tenant-{n}" for n in range(99)), key=newer.owner)  # of each shard some, by any hash key
    known, new = [names[0], names[-1]], [names[1], names[-2]]
    sender = Sender(shard)
    sender.add([turn_of(name, 0, "x") for name in known])
    shard_map.publish(root, newer)
    sender.token, sender.number = shard.hello("client", 2).result(SOON_S).token, 0
    receipts = sender.add([turn_of(name, 1, "y") for name in known + new])
    assert [r["status"] for r in receipts] == ["stored", "moved"] * 2
    assert shard.status().result(SOON_S)["map_version"] == 2


def test_a_call_brings_its_map_so_that_a_tenants_first_turns_keep_their_order(
    tmp_path: Path, start: Start
) -> None:
    """The line was begun while the resharding was closing; the router knows since that it clears."""
    root = begin(tmp_path / "root", 1)
    moving = shard_map.load(root).toward(["s0", "s1"])
    closing = moving.after()
    for newer in (moving, closing):
        shard_map.publish(root, newer)
    name = next(name for name in (f"tenant-{n}" for n in range(99)) if closing.owner(name) == "s1")
    shard = start(name="s1", where=root)
    token = shard.hello("client", closing.version).result(SOON_S).token
    early = shard.add(pack(some(name, 0)), CallStamp("client", token, 0, closing.version)).result(SOON_S)
    assert early.column("status").to_pylist() == ["moved"]
    shard_map.publish(root, closing.after())
    found = [
        shard.add(pack(some(name, n)), CallStamp("client", token, n + 1, closing.version + 1)).result(SOON_S)
        for n in range(2)
    ]
    assert [receipts.column("seq").to_pylist() for receipts in found] == [[0], [1]]


def test_a_shard_goes_by_the_map_that_is_newest_once_it_has_the_journal(
    root: Location, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, newer = ShardSupervisor._made, shard_map.load(root).toward(["s0", "s1"])

    def late(*args: Any) -> Any:
        engine = made(*args)
        shard_map.publish(root, newer)  # as if this process had been stopped since it read the map
        return engine

    monkeypatch.setattr(ShardSupervisor, "_made", late)
    assert start(where=root).hello("client", 1).result(SOON_S).map_version == newer.version


# ---- the thresholds of a root


def test_a_shard_decides_by_its_roots_thresholds_whoever_starts_it(root: Location) -> None:
    agree_on_thresholds(root, settings())
    starter = Settings(device="cpu", encoder="hash:384", profile="assistant")
    shard = Shard(root, "s0", starter, PARTS)
    Sender(shard).add(some("ann", 0))
    found = engine_of(shard).tenants.existing("ann").thresholds_at(0)
    assert (found.theta_sim, found.theta_merge, found.theta_count) == tuple(THETA.values())
    shard.close()


def test_settings_that_name_other_thresholds_than_the_root_are_refused(root: Location) -> None:
    agree_on_thresholds(root, Settings(profile="assistant"))
    agree_on_thresholds(root, Settings())  # names none
    agree_on_thresholds(root, Settings(theta_share=0.1, theta_count=4))
    with pytest.raises(
        UndertowError, match=r"theta_share 0\.1, .*say .*theta_share 0\.02\..*thresholds\.json"
    ):
        agree_on_thresholds(root, Settings(profile="companion"))
    with pytest.raises(UndertowError, match=r"say theta_sim 0\.6, theta_merge 0\.6, theta_count 4\."):
        agree_on_thresholds(root, Settings(theta_sim=0.6, theta_count=4))
    assert with_thresholds(root, Settings()).recurrence_count == 4
    assert with_thresholds(root, Settings()).sim_share == 0.1
    root.write("thresholds.json", b'{"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 3}')  # no share
    assert with_thresholds(root, Settings()).sim_share is None
    root.write("thresholds.json", b'{"theta_sim": 0.5}')
    with pytest.raises(StoreError, match="must hold theta_sim, theta_merge, theta_count"):
        agree_on_thresholds(root, Settings())
    root.write("thresholds.json", b'{"theta_sim": 5, "theta_merge": 0.5, "theta_count": 3}')
    with pytest.raises(StoreError, match="holds no thresholds"):
        with_thresholds(root, Settings())


def test_settings_that_name_no_policy_take_that_of_the_roots_shards(root: Location) -> None:
    assert with_policy(root, Settings()).policy == "recmem"
    given = Settings(device="cpu", policy="nemori")
    Engine(root / STORES / "s0", given, PARTS.encoder(given), hash_key=shard_map.load(root).hash_key).close()
    assert with_policy(root, Settings()).policy == "nemori"
    assert with_policy(root, Settings(policy="recmem")).policy == "recmem"  # which its shards refuse


def test_what_was_undecided_is_decided_after_a_restart_without_a_call(root: Location, start: Start) -> None:
    with Engine(
        root / STORES / "s0", settings(), PARTS.encoder(settings()), hash_key=shard_map.load(root).hash_key
    ) as engine:
        engine.add_batch(some("ann", *range(6)))
    shard = start()
    until_s = time.monotonic() + SOON_S
    while shard.status().result(SOON_S).get("undecided_turns", 1) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert shard.status().result(SOON_S)["undecided_turns"] == 0
