"""The asynchronous face: the engine's answers, side by side, without a thread for each that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import InputError, Turn, UndertowError
from undertow.engine.base.queries import (
    AnswerQuery,
    DeleteCommand,
    EraseCommand,
    ExplainQuery,
    FlushCommand,
    GetQuery,
    HistoryQuery,
    ImportCommand,
    ListQuery,
    PurgeCommand,
    SearchQuery,
    StatsQuery,
    TenantsQuery,
    TenantStatsQuery,
    TenantUsageQuery,
    UpdateCommand,
    UsageQuery,
)
from undertow.engine.cluster.routing.in_process import InProcess
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.store_info import read_info
from undertow.engine.tenants.registry import UnknownTenant
from undertow.serving.async_memories import AsyncMemories, open_memories

from ...support.cluster.in_process import PARTS, begin, mock_llm, settings
from ...support.engine import HeldLLM, turn_of
from ...support.faults.harness import turns_of, write_log

SOON_S = 60
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def soon() -> T:
        async with asyncio.timeout(SOON_S):
            return await work

    return asyncio.run(soon())


def some(tenant: str, *numbers: int) -> list[Turn]:
    return [turn_of(tenant, n, f"word{n} other{n}") for n in numbers]


@asynccontextmanager
async def opened(store: Path, parts: EngineParts = PARTS) -> AsyncIterator[AsyncMemories]:
    async with await asyncio.to_thread(open_memories, store, settings(), parts=parts) as memories:
        yield memories


def log_of(folder: Path) -> list[Turn]:
    return [t for of in turns_of(write_log(folder / "log.jsonl", ["ann", "bob"], 30)).values() for t in of]


def test_it_gives_what_the_engine_gives(tmp_path: Path) -> None:
    turns = log_of(tmp_path)
    query, question = turns[40].text, "What of the harbour?"

    async def awaited() -> list[Any]:
        async with opened(tmp_path / "store") as memories:
            receipts = await memories.add(turns)
            assert await memories.call(FlushCommand("ann"))
            assert await memories.call(FlushCommand("bob"))
            found = await memories.call(SearchQuery("bob", query, k_sub=3, k_epi=2))
            answer = await memories.call(AnswerQuery("bob", question))
            episode, turn = found.episodes[0].id, receipts[3].id or ""
            updated = await memories.call(UpdateCommand(episode, "bob", "Bob has sold the boat."))
            kind = await memories.call(DeleteCommand(turn, "ann"))
            assert await memories.call(FlushCommand("bob"))
            assert await memories.call(FlushCommand("ann"))
            given = (
                await memories.call(GetQuery(episode, "bob")),
                await memories.call(HistoryQuery(episode, "bob")),
            )
            counts = await memories.call(StatsQuery())
            with pytest.raises(UndertowError, match="no memory"):
                await memories.call(GetQuery(turn, "ann"))
            with pytest.raises(UndertowError, match="no memory"):
                await memories.call(GetQuery(episode, "ann"))  # it is bob's
            return [[(r.id, r.seq) for r in receipts], found, answer.text, updated, kind, *given, counts]

    def called() -> list[Any]:
        engine = Engine(tmp_path / "plain", settings(), PARTS.encoder(settings()), llm=mock_llm(settings()))
        with engine:
            receipts = engine.add_batch(turns)
            assert engine.flush("ann")
            assert engine.flush("bob")
            found = engine.search("bob", query, k_sub=3, k_epi=2)
            answer = engine.answer("bob", question)
            episode, turn = found.episodes[0].id, receipts[3].id or ""
            updated = engine.update(episode, "Bob has sold the boat.", tenant="bob")
            kind = engine.delete(turn, tenant="ann")
            assert engine.flush("bob")
            assert engine.flush("ann")
            given = engine.get(episode, tenant="bob"), engine.history(episode, tenant="bob")
            return [
                [(r.id, r.seq) for r in receipts],
                found,
                answer.text,
                updated,
                kind,
                *given,
                engine.stats(),
            ]

    assert run(awaited()) == called()


def test_erasing_gives_a_certificate_under_the_tenants_key(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path / "store") as memories:
            await memories.add(some("ann", 1, 2))
            await memories.add(some("bob", 1))
            certificate = await memories.call(EraseCommand("ann", now=True))
            assert certificate is not None
            assert certificate.turns_removed == 2
            assert certificate.tenant_key == memories.tenant_key("ann")
            assert memories.tenant_key("ann") == read_info(tmp_path / "store").tenant_key("ann")
            with pytest.raises(UnknownTenant):
                await memories.call(SearchQuery("ann", "word1"))
            assert (await memories.call(SearchQuery("bob", "word1"))).turns
            assert await memories.call(EraseCommand("bob", now=False)) is None

    run(work())


def test_what_is_of_a_tenant_as_a_whole(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path / "store") as memories:
            await memories.add(log_of(tmp_path))
            assert await memories.call(FlushCommand("ann"))
            assert await memories.call(FlushCommand("bob"))
            page = await memories.call(ListQuery("ann", kinds=["fact"], limit=2))
            rest = await memories.call(ListQuery("ann", kinds=["fact"], after=page.after))
            facts = [item["id"] for item in (*page.items, *rest.items)]
            records = [record async for record in memories.export("ann")]
            assert (
                len(facts) == len(set(facts)) == (await memories.call(TenantStatsQuery("ann")))["facts"] > 2
            )
            imported = await memories.call(ImportCommand("eve", records))
            assert imported.turns == (await memories.call(TenantStatsQuery("ann")))["turns"] == 30
            again = [record async for record in memories.export("eve")]
            assert [record["kind"] for record in again] == [record["kind"] for record in records]
            assert (await memories.call(ExplainQuery("eve", limit=5)))[-1]["seq"] >= 4
            assert await memories.call(TenantsQuery()) == ["ann", "bob", "eve"]
            assert await memories.call(TenantsQuery("b", limit=1)) == ["bob"]
            spent = await memories.call(UsageQuery())
            ann, bob = (
                await memories.call(TenantUsageQuery("ann")),
                await memories.call(TenantUsageQuery("bob")),
            )
            assert spent["episode"]["calls"] >= ann["episode"]["calls"] + bob["episode"]["calls"] > 0
            await memories.call(EraseCommand("ann", now=False))
            assert set(await memories.call(PurgeCommand())) == {memories.tenant_key("ann")}

    run(work())


def test_errors_are_the_engines_own(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path / "store") as memories:
            with pytest.raises(UnknownTenant):
                await memories.call(SearchQuery("nobody", "word1"))
            with pytest.raises(InputError, match="tenant"):
                await memories.add(some("", 1))
            await memories.add(some("ann", 1))
            for how, named in (({"where": {"place": None}}, "place"), ({"since": "yesterday"}, "yesterday")):
                with pytest.raises(ValueError, match=named):
                    await memories.call(SearchQuery("ann", "word1", **how))
            with pytest.raises(ValueError, match="empty"):
                await memories.call(SearchQuery("ann", " "))
            states = await memories.status()
            assert [state["state"] for state in states.values()] == ["serving"]
            assert [state["reopened"] for state in states.values()] == [0]

    run(work())


# ---- side by side


class Held:
    """A shard's LLM client that the test holds."""

    def __init__(self) -> None:
        self.llm = HeldLLM()
        self.parts = EngineParts(PARTS.encoder, lambda _: self.llm)

    async def asked(self, count: int) -> None:
        """Wait until so many answers are asked for."""
        while len(self.llm.held) < count:
            await asyncio.sleep(0.005)


def test_many_calls_wait_side_by_side_without_a_thread_each(tmp_path: Path) -> None:
    async def work() -> None:
        held = Held()
        async with opened(tmp_path / "store", held.parts) as memories:
            await memories.add(some("ann", *range(5)))
            threads = threading.active_count()
            answers = [
                asyncio.create_task(memories.call(AnswerQuery("ann", f"What of word{n}?")))
                for n in range(100)
            ]
            await held.asked(100)
            assert threading.active_count() <= threads
            found = await memories.call(SearchQuery("ann", "word3", k_sub=1))  # meanwhile
            assert "word3" in found.turns[0].memory
            held.llm.release()
            texts = [answer.text for answer in await asyncio.gather(*answers)]
            assert all(texts)

    run(work())


def test_who_is_cancelled_is_let_go_and_the_rest_goes_on(tmp_path: Path) -> None:
    async def work() -> None:
        held = Held()
        async with opened(tmp_path / "store", held.parts) as memories:
            await memories.add(some("ann", 1))
            waiting = asyncio.create_task(memories.call(AnswerQuery("ann", "What of word1?")))
            await held.asked(1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            call = held.llm.held[0][2]
            while not call.cancelled():  # its LLM call is given up
                await asyncio.sleep(0.005)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.0):
                    await memories.call(FlushCommand("ann"))
            other = asyncio.create_task(memories.call(AnswerQuery("ann", "What of word1 now?")))
            await held.asked(2)
            held.llm.release()
            assert (await other).text

    run(work())


def test_an_add_that_nobody_waits_for_is_stored_and_its_repetition_is_a_duplicate(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path / "store") as memories:
            adding = asyncio.create_task(memories.add(some("ann", *range(20))))
            await asyncio.sleep(0)  # it has begun
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
            receipts = await memories.add(some("ann", *range(20)))
            assert [receipt.duplicate for receipt in receipts] == [True] * 20
            assert (await memories.call(StatsQuery()))["turns"] == 20

    run(work())


def test_turns_of_a_tenant_are_stored_in_the_order_of_the_calls(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path / "store") as memories:
            calls = [memories.add(some("ann", n)) for n in range(50)]
            receipts = await asyncio.gather(*calls)
            assert [receipt.seq for (receipt,) in receipts] == list(range(50))

    run(work())


def test_a_full_queue_is_refused_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        narrow = ClusterSettings(lane_turns=4, call_turns=2)
        router = await asyncio.to_thread(InProcess, tmp_path / "store", settings(), PARTS, cluster=narrow)
        async with AsyncMemories(router) as memories:
            calls = [memories.add(some("ann", 2 * n, 2 * n + 1)) for n in range(30)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [n for n, result in enumerate(results) if isinstance(result, QueueFull)]
            assert refused
            for n in refused:
                assert len(await memories.add(some("ann", 2 * n, 2 * n + 1))) == 2
            assert (await memories.call(StatsQuery()))["turns"] == 60

    run(work())


# ---- its end


def test_what_is_under_way_when_it_closes_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        held = Held()
        async with opened(tmp_path / "store", held.parts) as memories:
            await memories.add(some("ann", 1))
            waiting = asyncio.create_task(memories.call(AnswerQuery("ann", "What of word1?")))
            await held.asked(1)
        with pytest.raises(UndertowError, match="were closed"):
            await waiting
        with pytest.raises(UndertowError, match="was closed"):
            await memories.call(SearchQuery("ann", "word1"))

    run(work())


def test_a_clusters_root_cannot_be_opened_as_a_store(tmp_path: Path) -> None:
    with pytest.raises(UndertowError, match="--ray"):
        open_memories(begin(tmp_path / "root", 1), settings(), parts=PARTS)
