"""A shard whose work an event loop does: reads of the journal beside steps, and long results in parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from undertow.engine.api import search_calls
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import InputError
from undertow.engine.base.queries import (
    DeleteCommand,
    EraseCommand,
    ExplainQuery,
    FlushCommand,
    ListQuery,
    MemoriesQuery,
    PurgeCommand,
    SearchQuery,
)
from undertow.engine.base.results import Report
from undertow.engine.cluster.shard.api import calls as api_calls
from undertow.engine.cluster.shard.quick import MOST_HELD
from undertow.engine.cluster.shard.supervisor import ShardSupervisor
from undertow.engine.storage import tail
from undertow.engine.storage.journal import Journal, JournalError
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.tenants.registry import UnknownTenant
from undertow.serving.async_memories import AsyncMemories

from ...support.api.erasure import turns_of_topics
from ...support.cluster.in_process import PARTS, settings
from ...support.cluster.shard import some
from ...support.engine import bytes_hold, turn_of
from .test_drivers import SOON_S, engine_of, opened, threads_of, word

pytestmark = pytest.mark.anyio


class Held:
    """Holds calls of a method, of one tenant or all, once they have begun; by default explanations'."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: type = Reports, name: str = "explain", tenant: str = ""
    ) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        method = getattr(kind, name)

        def held(owner: Any, *args: Any, **more: Any) -> Any:
            if tenant in ("", *args):
                self.begun.set()
                assert self.go.wait(SOON_S)
            return method(owner, *args, **more)

        monkeypatch.setattr(kind, name, held)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, SOON_S)


async def beside(memories: AsyncMemories, monkeypatch: pytest.MonkeyPatch, tenant: str, first: int) -> None:
    """On the loop: five turns each of ann and of a tenant are stored, found and decided."""
    monkeypatch.setattr(tail, "ROWS_PER_FLUSH", 1)  # a flush is due with each commit
    async with asyncio.timeout(SOON_S):
        for n in range(5):
            await memories.add([*some("ann", n + 5), *some(tenant, n + first)])
            assert (await memories.call(word(n + 5))).turns
            assert (await memories.call(word(n + first, tenant))).turns
        while engine_of(memories).lag.undecided_turns:
            await asyncio.sleep(0.001)


async def test_a_thread_reads_the_journal_while_the_loop_stores_decides_and_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = threads_of(monkeypatch, Journal, "_move")
    async with opened(tmp_path, theta_count=1_000) as memories:
        await memories.add(some("ann", *range(5)))
        held = Held(monkeypatch)
        read = asyncio.create_task(memories.call(ExplainQuery("ann")))
        await held.wait()
        moves.clear()
        await beside(memories, monkeypatch, "bob", 5)  # and of the tenant that is being read
        assert not read.done() and moves == [], "nothing moves to Lance while it is being read"
        held.go.set()
        assert [record["seq"] for record in await read] == [0, 1, 2, 3, 4], "what was there when it began"
        records: list[Report] = await memories.call(ExplainQuery("ann"))
        assert [record["seq"] for record in records] == list(range(10))
        assert moves, "from then on it does"


@pytest.mark.parametrize("asks", [EraseCommand("cy", now=True), PurgeCommand()], ids=["erase", "purge"])
async def test_the_loop_stores_decides_and_searches_beside_a_purge(
    asks: EraseCommand | PurgeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = threads_of(monkeypatch, Journal, "_move")
    async with opened(tmp_path, theta_count=1_000) as memories:
        await memories.add([*some("ann", *range(5)), turn_of("cy", 0, "words of cy")])
        if isinstance(asks, PurgeCommand):
            await memories.call(EraseCommand("cy"))
        held = Held(monkeypatch, LanceLog, "rewrite_deleted")
        purge: asyncio.Task[Any] = asyncio.create_task(memories.call(asks))
        await held.wait()
        moves.clear()
        await beside(memories, monkeypatch, "cy", 0)  # who begins a new life
        assert not purge.done() and moves == [], "nothing moves to Lance while it is rewritten"
        held.go.set()
        ended = await purge
        certificate = ended if isinstance(asks, EraseCommand) else next(iter(ended.values()))
        assert certificate.turns_removed == 1
    assert not bytes_hold(tmp_path, "words of cy")
    async with opened(tmp_path, theta_count=1_000) as memories:
        assert len((await memories.call(ListQuery("ann"))).items) == 10
        assert len((await memories.call(ListQuery("cy"))).items) == 5
        assert await memories.call(PurgeCommand()) == {}, "the certificate is stored"


async def test_searches_do_not_wait_for_a_purge_while_turns_of_many_cold_tenants_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls_of: Callable[..., list[bool]]
) -> None:
    """More tenants than calls are held for, and more turns than one brief step takes."""
    cold = [f"cold {n}" for n in range(2 * MOST_HELD)]
    async with opened(tmp_path, theta_count=1_000) as memories:
        await memories.add([turn for name in cold for turn in some(name, 0)])
        await memories.add([turn_of("cy", 0, "words of cy")])
    async with opened(tmp_path, theta_count=1_000) as memories:
        await memories.add(some("bob", 0))
        await memories.call(EraseCommand("cy"))
        journal = engine_of(memories).journal
        rewritten = calls_of(LanceLog, "rewrite_deleted", lambda *_: journal.is_read_beside)
        held = Held(monkeypatch, LanceLog, "rewrite_deleted")
        assert (await memories.call(word(0, "bob"))).turns  # steps are brief from now on
        calls = [[turn for name in cold for turn in some(name, *range(n, n + 20))] for n in (1, 21)]
        work: list[asyncio.Task[Any]] = [
            asyncio.create_task(memories.add(calls[0])),
            asyncio.create_task(memories.call(PurgeCommand())),
            asyncio.create_task(memories.add(calls[1])),
        ]
        await held.wait()
        async with asyncio.timeout(SOON_S):
            for _ in range(5):
                assert (await memories.call(word(0, "bob"))).turns
        assert not work[1].done()
        held.go.set()
        async with asyncio.timeout(SOON_S):
            first, certificates, second = await asyncio.gather(*work)
        assert rewritten == [True] and len(certificates) == 1
        for name in cold:  # calls under way together have no order
            seqs = [[receipt.seq for receipt in call if receipt.tenant == name] for call in (first, second)]
            assert sorted(seqs) == [list(range(1, 21)), list(range(21, 41))]


async def first_of_topics(memories: AsyncMemories) -> str:
    """Have turns of topics decided; the id of the first memory."""
    await memories.add(turns_of_topics("ann", 12, "secret"))
    await memories.call(FlushCommand("ann"))
    return str((await memories.call(ListQuery("ann", limit=20))).items[0]["id"])


async def test_rows_that_a_deletion_makes_obsolete_are_removed_after_a_purge_and_do_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = threads_of(monkeypatch, Journal, "delete_rows")
    async with opened(tmp_path) as memories:
        first = await first_of_topics(memories)
        assert "episode" in {memory.kind for memory in await memories.call(MemoriesQuery("ann"))}
        held = Held(monkeypatch, LanceLog, "rewrite_deleted")
        await memories.call(DeleteCommand(first, "ann"))
        removals.clear()
        purge: asyncio.Task[Any] = asyncio.create_task(memories.call(PurgeCommand()))
        await held.wait()
        async with asyncio.timeout(SOON_S):
            flushing = asyncio.create_task(memories.call(FlushCommand("ann")))
            while engine_of(memories).scheduler.running_count or engine_of(memories).lag.undecided_turns:
                await memories.add(some("bob", len(removals)))
                await asyncio.sleep(0.001)
            await memories.add(some("bob", 99))
        assert not purge.done()
        held.go.set()
        await purge
        assert await flushing
        async with asyncio.timeout(SOON_S):
            while engine_of(memories).scheduler.deletes_rows:  # though nothing else is to be done
                await asyncio.sleep(0.001)
    assert threading.current_thread().name not in removals


async def test_the_loop_does_not_wait_for_the_deletion_of_what_its_own_step_makes_obsolete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = threads_of(monkeypatch, Journal, "delete_rows")
    async with opened(tmp_path) as memories:
        await memories.call(DeleteCommand(await first_of_topics(memories), "ann"))
        removals.clear()
        await memories.call(FlushCommand("ann"))
        async with asyncio.timeout(SOON_S):
            while not removals or engine_of(memories).scheduler.deletes_rows:
                await asyncio.sleep(0.001)
    assert threading.current_thread().name not in removals


async def test_a_purge_after_one_that_failed_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        with monkeypatch.context() as failing:
            refuse = Mock(side_effect=JournalError("no space left on device"))
            failing.setattr(ShardSupervisor, "open", refuse)
            with pytest.raises(JournalError, match="no space"):
                await memories.call(PurgeCommand())
        assert await memories.call(PurgeCommand()) == {}


async def test_searches_do_not_wait_for_a_purge_where_a_commit_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, theta_count=1_000, durability="fsync") as memories:
        await memories.add([*some("ann", 1), *some("cy", 1)])
        assert (await memories.call(word(1))).turns
        held = Held(monkeypatch, LanceLog, "rewrite_deleted")
        purge: asyncio.Task[Any] = asyncio.create_task(memories.call(EraseCommand("cy", now=True)))
        await held.wait()
        async with asyncio.timeout(SOON_S):
            assert (await memories.call(word(1))).turns
        assert not purge.done()
        held.go.set()
        assert (await purge).turns_removed == 1


async def test_a_read_sees_whatever_was_acknowledged_before(tmp_path: Path) -> None:
    async with opened(tmp_path) as memories:
        for n in range(20):
            await memories.add(some("ann", n))
            records: list[Report] = await memories.call(ExplainQuery("ann"))
            assert len(records) == n + 1


async def test_a_read_of_rows_that_cannot_be_moved_to_lance_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        with monkeypatch.context() as failing:
            failing.setattr(LanceLog, "append", Mock(side_effect=OSError("no space left on device")))
            with pytest.raises(JournalError, match="no space left"):
                await memories.call(ExplainQuery("ann"))
        records: list[Report] = await memories.call(ExplainQuery("ann"))
        assert len(records) == 1
        assert (await memories.call(word(1))).turns


async def test_a_tenant_whose_first_turn_came_after_a_read_had_begun_is_unknown_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        held = Held(monkeypatch)
        read = asyncio.create_task(memories.call(ExplainQuery("bob")))
        await held.wait()
        await memories.add(some("bob", 1))
        held.go.set()
        with pytest.raises(UnknownTenant):
            await read


async def test_hits_and_lists_that_come_in_parts_are_those_that_an_engine_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_calls, "HITS_AT_ONCE", 7)
    monkeypatch.setattr(api_calls, "LISTED_AT_ONCE", 7)
    many = SearchQuery("ann", "word1", k_sub=50)
    lists = [ListQuery("ann", limit=limit) for limit in (1, 7, 20, 50, 1_000)]
    async with opened(tmp_path, theta_count=1_000) as memories:
        await memories.add(some("ann", *range(50)))
        found = await memories.call(many)
        pages = [await memories.call(query) for query in lists]
        rest = await memories.call(ListQuery("ann", limit=1_000, after=pages[2].after))
        assert [*pages[2].items, *rest.items] == [*pages[4].items]
        with pytest.raises(InputError):
            await memories.call(ListQuery("ann", limit=1_001))
        begun, go_on = 0, Engine.go_on_searching

        def evicted(engine: Engine, search: Any) -> Any:  # between two parts
            nonlocal begun
            begun += 1
            if begun == 3:
                engine.tenants.evict("ann")
            return go_on(engine, search)

        monkeypatch.setattr(Engine, "go_on_searching", evicted)
        assert await memories.call(many) == found
        assert begun > 50 // 7 + 1, "it was begun anew"
    with Engine(tmp_path, settings(theta_count=1_000), PARTS.encoder(settings())) as engine:
        assert engine.call(many) == found and len(found.turns) == 50
        assert [engine.call(query) for query in lists] == pages


async def test_a_turn_that_is_deleted_between_two_parts_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_calls, "HITS_AT_ONCE", 7)
    async with opened(tmp_path, theta_count=1_000) as memories:
        await memories.add(some("ann", *range(50)))
        go_on, parts = Engine.go_on_searching, iter(range(100))

        def deleted(engine: Engine, search: Any) -> Any:
            if next(parts) == 2:
                engine.delete(search.hits[0].id)
            return go_on(engine, search)

        monkeypatch.setattr(Engine, "go_on_searching", deleted)
        assert len((await memories.call(SearchQuery("ann", "word1", k_sub=50))).turns) == 49
