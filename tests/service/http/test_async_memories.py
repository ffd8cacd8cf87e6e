"""The asynchronous face: the engine's answers, side by side, without a thread for each that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import InputError, Turn, UndertowError
from undertow.engine.base.queries import (
    AnswerQuery,
    ApiCall,
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


FIRST: list[ApiCall[Any]] = [
    FlushCommand("ann"),
    FlushCommand("bob"),
    SearchQuery("bob", "the harbour", 3, 2),
    AnswerQuery("bob", "What of the harbour?"),
    ListQuery("ann", ["fact"], limit=2),
    ExplainQuery("ann", 5),
    TenantsQuery(),
    TenantsQuery("b", 1),
    StatsQuery(),
    TenantStatsQuery("ann"),
    GetQuery("nothing", "ann"),
    SearchQuery("nobody", "word1"),
    SearchQuery("ann", " "),
    SearchQuery("ann", "word1", where={"place": None}),
    SearchQuery("ann", "word1", since="yesterday"),
]


async def outcome(calling: Awaitable[Any]) -> Any:
    """The result of a call, or the type and message of its error."""
    try:
        return await calling
    except (UndertowError, ValueError) as error:
        return type(error), str(error).replace("/plain", "/store")


def test_a_call_has_the_result_or_the_error_of_the_engine(tmp_path: Path) -> None:
    turns = log_of(tmp_path)
    alone = Engine(tmp_path / "plain", settings(), PARTS.encoder(settings()), llm=mock_llm(settings()))

    async def work(engine: Engine) -> None:
        async with opened(tmp_path / "store") as memories:
            receipts = await memories.add(turns)
            plain = engine.add_batch(turns)
            assert [(r.id, r.seq) for r in receipts] == [(r.id, r.seq) for r in plain]
            for call in FIRST:
                expected = await outcome(asyncio.to_thread(engine.call, call))
                assert await outcome(memories.call(call)) == expected, call
            episode = (await memories.call(SearchQuery("bob", "the harbour"))).episodes[0].id
            turn = receipts[3].id or ""
            changes: list[ApiCall[Any]] = [
                UpdateCommand(episode, "bob", "Bob has sold the boat."),
                DeleteCommand(turn, "ann"),
                FlushCommand("bob"),
                FlushCommand("ann"),
                GetQuery(episode, "bob"),
                GetQuery(episode, "ann"),  # it is bob's
                GetQuery(turn, "ann"),
                HistoryQuery(episode, "bob"),
                StatsQuery(),
            ]
            for call in changes:
                expected = await outcome(asyncio.to_thread(engine.call, call))
                assert await outcome(memories.call(call)) == expected, call
            with pytest.raises(InputError, match="tenant"):
                await memories.add(some("", 1))

    with alone as engine:
        run(work(engine))


def test_a_tenant_is_exported_imported_and_erased(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path / "store") as memories:
            await memories.add(log_of(tmp_path))
            assert await memories.call(FlushCommand("ann"))
            records = [record async for record in memories.export("ann")]
            imported = await memories.call(ImportCommand("eve", records))
            assert imported.turns == (await memories.call(TenantStatsQuery("ann")))["turns"] == 30
            again = [record async for record in memories.export("eve")]
            assert [record["kind"] for record in again] == [record["kind"] for record in records]
            spent = await memories.call(UsageQuery())
            assert (
                spent["episode"]["calls"]
                >= (await memories.call(TenantUsageQuery("ann")))["episode"]["calls"]
                > 0
            )
            certificate = await memories.call(EraseCommand("ann", now=True))
            assert certificate is not None and certificate.turns_removed == 30
            key = read_info(tmp_path / "store").tenant_key("ann")
            assert certificate.tenant_key == memories.tenant_key("ann") == key
            with pytest.raises(UnknownTenant):
                await memories.call(SearchQuery("ann", "word1"))
            assert await memories.call(EraseCommand("eve", now=False)) is None
            purged = await memories.call(PurgeCommand())
            assert set(purged) == {memories.tenant_key("eve")}
            (state,) = (await memories.status()).values()
            assert (state["state"], state["reopened"]) == ("serving", 0)

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
