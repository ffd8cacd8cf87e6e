"""A shard whose work an event loop does: tenants are read beside it, and built from that on the loop."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.pacing import Pacing, Served
from undertow.engine.base.queries import (
    ApiCall,
    EraseCommand,
    ExplainQuery,
    FlushCommand,
    ListQuery,
    TurnsByKeyQuery,
    UpdateCommand,
)
from undertow.engine.base.results import Receipt
from undertow.engine.cluster.shard import arrivals, beside, quick
from undertow.engine.cluster.shard.api import calls as api_calls
from undertow.engine.cluster.shard.arrivals import ShardClosed
from undertow.engine.cluster.shard.commands import REPEATED_S, Command, FairQueue
from undertow.engine.cluster.shard.engine_work import POLL_S, EngineWork
from undertow.engine.cluster.shard.quick import never
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.storage.journal import JournalError
from undertow.engine.tenants.log import RecordLog
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry, UnknownTenant
from undertow.serving.async_memories import AsyncMemories

from ...support.cluster.in_process import PARTS, mock_llm, settings
from ...support.cluster.shard import some
from ...support.engine import bytes_hold, turn_of
from ...support.faults.harness import assert_same_state, end_state
from .test_drivers import SOON_S, engine_of, opened, threads_of, word
from .test_reads_beside_steps import Held

pytestmark = pytest.mark.anyio
COLD = ("ann", "dee")


@asynccontextmanager
async def reopened(store: Path, **changes: Any) -> AsyncIterator[AsyncMemories]:
    """A store in which ann and dee have five decided turns and a flush each, and only bob is in memory."""
    async with opened(store, theta_count=1_000) as memories:
        for name in COLD:
            await memories.add(some(name, *range(5)))
            await memories.call(FlushCommand(name))
    async with opened(store, theta_count=1_000, **changes) as memories:
        await memories.add(some("bob", 0))
        assert [tenant.name for tenant in engine_of(memories).tenants.loaded()] == ["bob"]
        yield memories


async def test_others_are_stored_and_searched_while_a_tenant_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        here, searches = threading.current_thread().name, threads_of(monkeypatch, Engine, "begin_search")
        held = Held(monkeypatch, TenantRegistry, "fetch")
        adds = [asyncio.create_task(memories.add(some("ann", n))) for n in (5, 6)]
        await held.wait()
        adds.append(asyncio.create_task(memories.add([*some("ann", 7), *some("dee", 5)])))
        late: asyncio.Task[Any] = asyncio.create_task(memories.call(word(5)))
        async with asyncio.timeout(SOON_S):
            for n in range(2, 6):
                await memories.add(some("bob", n))
                assert (await memories.call(word(n, "bob"))).turns
        assert not (late.done() or any(add.done() for add in adds))
        held.go.set()
        receipts = [receipt for add in adds for receipt in await add]
        assert [(r.tenant, r.seq) for r in receipts] == [("ann", 6), ("ann", 7), ("ann", 8), ("dee", 6)]
        assert (await late).turns and (await memories.call(word(6))).turns
        assert set(searches) == {here}


@pytest.mark.parametrize("asks", [word(3), ListQuery("ann", limit=9), FlushCommand("ann")], ids=type)
async def test_a_tenant_is_built_on_the_loop_if_it_is_small(
    asks: ApiCall[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        loads = threads_of(monkeypatch, TenantRegistry, "load")
        reads = threads_of(monkeypatch, TenantRegistry, "fetch")
        assert await memories.call(asks)
        assert loads == [threading.current_thread().name] and not {*loads} & {*reads}
        monkeypatch.setattr(beside, "BUILT_QUICKLY", 1)
        assert (await memories.call(word(3, "dee"))).turns
        assert len(loads) == 2 and loads[1] != loads[0]


@pytest.mark.parametrize("asks", [True, False], ids=["turns by key", "adds"])
async def test_the_keys_of_a_searched_tenant_are_read_in_parts_also_beside_another_load(
    asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "KEYS_AT_ONCE", 2)
    monkeypatch.setattr(quick, "FEW_KEYS", 2)
    index, turn_round = RecordLog.index_keys, EngineWork.round
    done = list[int]()

    def index_keys(log: RecordLog, most: int | None = None) -> None:
        if log.keys_missing:
            done.append(log.keys_missing)
            time.sleep(REPEATED_S)
        index(log, most)

    def round_(work: EngineWork, *, quickly: bool) -> bool:
        done.extend([0] * (done[-1:] != [0]))
        return turn_round(work, quickly=quickly)

    async with reopened(tmp_path) as memories, asyncio.timeout(SOON_S):
        assert (await memories.call(word(3))).turns
        held = Held(monkeypatch, TenantRegistry, "fetch", tenant="dee")
        late = asyncio.create_task(memories.call(word(3, "dee")))
        await held.wait()
        monkeypatch.setattr(RecordLog, "index_keys", index_keys)
        monkeypatch.setattr(EngineWork, "round", round_)
        (again,) = some("ann", 3)
        if asks:
            assert await memories.call(TurnsByKeyQuery("ann", {again.dedupe_key}))
        assert (await memories.add([again]))[0].duplicate
        assert not late.done()
        held.go.set()
        assert (await late).turns
    assert done[done.index(5) :][:5] == [5, 0, 3, 0, 1]


@pytest.mark.parametrize("busy", ["a slow encoder", "a large call"])
async def test_the_keys_of_a_searched_tenant_are_read_beside_a_reader_whatever_else_waits_for_it(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "KEYS_AT_ONCE", 1)
    monkeypatch.setattr(quick, "MOST_TURNS", 2)
    index = RecordLog.index_keys

    def index_slowly(log: RecordLog, most: int | None = None) -> None:
        time.sleep(2 * REPEATED_S)  # a round reads no second part
        index(log, most)

    monkeypatch.setattr(RecordLog, "index_keys", index_slowly)
    async with reopened(tmp_path) as memories, asyncio.timeout(SOON_S):
        assert (await memories.call(word(3))).turns
        held = Held(monkeypatch)
        read = asyncio.create_task(memories.call(ExplainQuery("bob")))
        await held.wait()
        if busy == "a slow encoder":
            monkeypatch.setattr(engine_of(memories)._texts, "text_s", 1.0)
        large = asyncio.create_task(memories.add(some("bob", 1, 2, 3)))
        (again,) = some("ann", 3)
        found = await memories.call(TurnsByKeyQuery("ann", [again.dedupe_key]))
        assert list(found) == [again.dedupe_key] and not (read.done() or large.done())
        held.go.set()
        assert len(await large) == 3


@pytest.mark.parametrize("lost", [False, True], ids=["the LLM answers", "the LLM is lost"])
async def test_rounds_stay_on_the_loop_while_turns_wait_for_the_tenants_that_fill_the_arena(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the LLM is lost: then they do not wait for it, and their tenants are needed."""
    monkeypatch.setattr(quick, "FEW_KEYS", 2)
    async with reopened(tmp_path) as memories, asyncio.timeout(SOON_S):
        engine = engine_of(memories)
        with monkeypatch.context() as full:
            full.setattr(Scheduler, "admission_paused", True)
            waiting = asyncio.create_task(memories.add(some("ann", 5)))
            while not engine.scheduler.inbox.holds("ann"):
                await asyncio.sleep(POLL_S)
            full.setattr(Engine, "server_lost", lost)
            engine.tenants.evict("ann")
            assert (await memories.call(word(3))).turns, "it is loaded, and few of its keys are known"
            rounds = threads_of(full, EngineWork, "round")
            for _ in range(5):
                assert (await memories.call(word(0, "bob"))).turns
                await asyncio.sleep(POLL_S)
            assert len(rounds) >= 5 and (set(rounds) == {threading.current_thread().name}) is not lost
            assert not waiting.done()
        assert (await waiting)[0].seq == 6


async def test_a_look_up_that_has_begun_fails_with_its_shard_beside_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "read_keys", Mock(return_value=False))
    monkeypatch.setattr(api_calls, "read_keys", Mock(return_value=False))  # there are always more
    async with reopened(tmp_path) as memories, asyncio.timeout(SOON_S):
        assert (await memories.call(word(3))).turns
        held = Held(monkeypatch)
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(memories.call(ExplainQuery("bob")))]
        await held.wait()
        work: EngineWork = memories._router._shard._work  # type: ignore[union-attr]
        waiting.append(asyncio.create_task(memories.call(TurnsByKeyQuery("ann", {"none"}))))
        while not work.arrived.parts:
            await asyncio.sleep(0)
        threading.Timer(0.2, held.go.set).start()  # the shard ends beside the reader
        monkeypatch.setattr(EngineWork, "round", Mock(side_effect=RuntimeError("unexpected")))
        failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(failed[1], ShardClosed)


async def test_a_tenant_that_is_evicted_after_each_part_of_its_keys_is_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "KEYS_AT_ONCE", 2)
    async with reopened(tmp_path) as memories, asyncio.timeout(SOON_S):
        evict = engine_of(memories).tenants.evict
        parts = Mock(side_effect=lambda engine, tenant: quick.read_keys(engine, tenant) or evict(tenant))
        monkeypatch.setattr(arrivals, "read_keys", parts)
        assert (await memories.add(some("ann", 3)))[0].duplicate and parts.call_count > 1


async def test_a_tenant_that_cannot_be_read_or_built_beside_is_loaded_by_the_call_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        with monkeypatch.context() as failing:
            slow = Mock(side_effect=JournalError("the disk is slow to answer"))
            failing.setattr(TenantRegistry, "fetch", slow)
            assert (await memories.call(word(3))).turns
            failing.undo()
            failing.setattr(TenantRegistry, "load", Mock(side_effect=ArenaFull("no room")))
            (receipt,) = await memories.add(some("dee", 5))
            assert receipt.seq == 6


async def test_an_erasure_does_not_overtake_a_turn_that_waits_for_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        held = Held(monkeypatch, TenantRegistry, "fetch")
        adding = asyncio.create_task(memories.add([turn_of("ann", 6, "a word that goes")]))
        await held.wait()
        erasing: asyncio.Task[Any] = asyncio.create_task(memories.call(EraseCommand("ann", now=True)))
        await asyncio.sleep(0.01)
        held.go.set()
        assert (await adding)[0].seq == 6
        assert (await erasing).turns_removed == 6
        with pytest.raises(UnknownTenant):
            await memories.call(word(3))
    assert not bytes_hold(tmp_path, "a word that goes")


async def test_edits_of_a_tenant_that_is_read_run_once_and_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        ids = {hit.id for n in range(5) for hit in (await memories.call(word(n, "dee"))).turns}
        engine_of(memories).tenants.evict("dee")
        held = Held(monkeypatch, TenantRegistry, "fetch")
        edits: list[asyncio.Task[Any]] = [
            asyncio.create_task(memories.call(UpdateCommand(next(iter(ids)), "dee", text="a first text"))),
            asyncio.create_task(memories.call(EraseCommand("dee"))),
        ]
        await held.wait()
        await memories.add(some("bob", 1))  # the log is to move once more before the edit
        held.go.set()
        async with asyncio.timeout(SOON_S):
            assert [done is None for done in await asyncio.gather(*edits)] == [False, True]
            with pytest.raises(UnknownTenant):
                await memories.call(word(3, "dee"))


@contextmanager
def evicted(store: Path) -> Iterator[tuple[Engine, FairQueue]]:
    """An engine that has evicted ann, who has a log of six records."""
    given = settings(theta_count=1_000)
    with Engine(store, given, PARTS.encoder(given)) as engine:
        engine.add_batch(some("ann", *range(5)))
        engine.flush("ann")
        engine.tenants.evict("ann")
        yield engine, FairQueue(Pacing(Served()), Pacing(Served()))


async def test_a_tenant_that_was_evicted_meanwhile_is_read_with_its_last_turns(tmp_path: Path) -> None:
    """A command whose part of the log has moved to Lance, before the tenant was in memory and out again."""
    with evicted(tmp_path) as (engine, waiting):
        command = Command(lambda: None, Future(), never, tenant="ann", loads=True, sees_until=0)
        parts = 0
        while command.fetched is None:
            part = beside.part_beside(engine, command, waiting, lambda _: None)
            assert part is not None
            part()
            parts += 1
        assert parts == 2, "the log has moved once more"
        beside.load(engine, command)
        tenant = engine.tenants.in_memory("ann")
        assert tenant is not None and tenant.next_seq == 6


async def test_a_tenant_that_was_loaded_before_the_thread_reads_stays_as_it_is(tmp_path: Path) -> None:
    with evicted(tmp_path) as (engine, waiting):
        command = Command(lambda: None, Future(), never, tenant="ann", loads=True)
        while (part := beside.part_beside(engine, command, waiting, lambda _: None)) and command.moves:
            part()
        assert part is not None, "the log has moved, and the tenant's rows are to be read"
        (added,) = engine.add_batch(some("ann", 5))
        part()
        beside.load(engine, command)
        tenant = engine.tenants.in_memory("ann")
        assert added.seq == 6 and tenant is not None and tenant.next_seq == 7


async def test_calls_of_several_tenants_come_after_earlier_ones_of_each(tmp_path: Path) -> None:
    async with reopened(tmp_path) as memories:
        calls = [some("ann", 5), some("dee", 5), [*some("ann", 6), *some("dee", 6)], some("ann", 7)]
        adds = [asyncio.create_task(memories.add(call)) for call in calls]
        async with asyncio.timeout(SOON_S):
            receipts = [receipt for add in adds for receipt in await add]
        told = [(r.tenant, r.seq) for r in receipts]
        assert told == [("ann", 6), ("dee", 6), ("ann", 7), ("dee", 7), ("ann", 8)]


async def test_what_was_read_of_a_tenant_is_not_used_once_the_tenant_was_in_memory(tmp_path: Path) -> None:
    given = settings(theta_count=1_000)
    with Engine(tmp_path, given, PARTS.encoder(given)) as engine:
        for changes in (False, True):
            engine.add_batch(some("ann", *range(5)))
            engine.flush("ann")
            engine.tenants.evict("ann")
            engine.tenants.expect("ann")
            fetched = engine.tenants.fetch("ann")
            if changes:
                engine.add_batch(some("ann", 6))
                engine.flush("ann")
                engine.tenants.evict("ann")
            engine.tenants.load(fetched)
            assert (engine.tenants.in_memory("ann") is None) is changes
        engine.tenants.expect("ann")
        engine.tenants.load(engine.tenants.fetch("ann"))
        assert len(engine.tenants.loaded()) == 1
        engine.tenants.expect("ann")
        fetched = engine.tenants.fetch("ann")
        engine.erase("ann")
        engine.tenants.load(fetched)
        assert not engine.tenants.loaded()


async def test_a_call_does_not_wait_for_the_tenants_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        held = Held(monkeypatch, TenantRegistry, "fetch", tenant="dee")
        adds = [asyncio.create_task(memories.add(some(name, 5))) for name in COLD]
        await held.wait()
        async with asyncio.timeout(SOON_S):
            assert (await adds[0])[0].seq == 6
        assert not adds[1].done()
        held.go.set()
        assert (await adds[1])[0].seq == 6


async def test_a_list_with_a_bad_filter_tells_its_caller(tmp_path: Path) -> None:
    async with reopened(tmp_path) as memories:
        with pytest.raises(ValueError, match="yesterday"):
            await memories.call(ListQuery("ann", since="yesterday"))
        assert (await memories.call(word(3))).turns


@pytest.mark.parametrize("ends", ["closed", "a round fails"])
async def test_calls_that_wait_for_a_tenant_fail_with_the_shard(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path) as memories:
        held = Held(monkeypatch, TenantRegistry, "fetch")
        waiting = [
            asyncio.create_task(memories.call(word(3))),
            asyncio.create_task(memories.add(some("ann", 5))),
            asyncio.create_task(memories.add(some("dee", 5))),
        ]
        await held.wait()
        threading.Timer(0.2, held.go.set).start()  # the shard ends once the read has
        if ends == "closed":
            await asyncio.to_thread(memories._router._shard.close)  # type: ignore[union-attr]
        else:
            monkeypatch.setattr(EngineWork, "round", Mock(side_effect=RuntimeError("unexpected")))
            waiting.append(asyncio.create_task(memories.add(some("bob", 1))))
        async with asyncio.timeout(SOON_S):
            failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, ShardClosed) for error in failed)


@pytest.mark.parametrize("seed", range(3))
async def test_tenants_evicted_again_and_again_store_and_decide_what_an_engine_does(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("ann", "bob", "cy", "dee")
    turns = [turn for n in range(40) for name in names for turn in some(name, (n + seed) % 7 + 100 * n)]
    monkeypatch.setattr(beside, "BUILT_QUICKLY", 20)
    reads = threads_of(monkeypatch, TenantRegistry, "fetch")
    async with opened(tmp_path / "loop") as memories:
        round_, chance = EngineWork.round, random.Random(seed)

        def evicting(work: EngineWork, *, quickly: bool = False) -> bool:
            engine = work.supervisor.engine
            if engine is not None and not work.rounds_go_on and chance.random() < 0.5:
                for tenant in engine.tenants.loaded():
                    if engine._residency._may_evict(tenant) and not engine.scheduler.inbox.holds(tenant.name):
                        engine.tenants.evict(tenant.name)
            return round_(work, quickly=quickly)

        monkeypatch.setattr(EngineWork, "round", evicting)

        async def send(name: str) -> list[Receipt]:
            of_tenant = [turn for turn in turns if turn.tenant == name]
            receipts = []
            for n, turn in enumerate(of_tenant):
                receipts += await memories.add([turn])
                if n % 3 == seed:
                    assert await memories.call(word(0, name)) is not None
                if n % 5 == seed:
                    await memories.call(FlushCommand(name))
            await memories.call(FlushCommand(name))
            return receipts

        async with asyncio.timeout(4 * SOON_S):
            sent = await asyncio.gather(*(send(name) for name in names))
        for seqs in ([receipt.seq for receipt in receipts] for receipts in sent):
            assert all(later > one for one, later in pairwise(seq for seq in seqs if seq is not None))
    assert len(reads) > 5
    with Engine(
        tmp_path / "engine", settings(), PARTS.encoder(settings()), llm=mock_llm(settings())
    ) as engine:
        for name in names:
            for n, turn in enumerate(turn for turn in turns if turn.tenant == name):
                engine.add_batch([turn])
                if n % 5 == seed:
                    engine.flush(name)
            engine.flush(name)
    assert_same_state(end_state(tmp_path / "loop"), end_state(tmp_path / "engine"))
