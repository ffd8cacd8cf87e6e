"""AsyncMemories: concurrent calls without a thread each, cancellation, and closing."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import AnswerQuery, FlushCommand, SearchQuery, StatsQuery
from undertow.engine.base.results import Answer
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.llm.client import Completion
from undertow.engine.search import ranking
from undertow.engine.step.admission import QueueFull
from undertow.serving.async_memories import AsyncMemories

from ...cluster.shard.test_drivers import opened
from ...support.cluster.in_process import PARTS
from ...support.cluster.shard import some
from ...support.engine import HeldLLM

pytestmark = pytest.mark.anyio


class Held:
    """A shard's LLM client that the test holds."""

    def __init__(self) -> None:
        self.llm = HeldLLM()
        self.parts = EngineParts(PARTS.encoder, lambda _: self.llm)

    @property
    def answers(self) -> list[Future[Completion]]:
        """The LLM calls of answers; those of decisions are held beside them."""
        return [call for _, prompt, call in self.llm.held if prompt.operation == "answer"]

    async def asked(self, count: int) -> None:
        """Wait until so many answers are asked for."""
        while len(self.answers) < count:
            await asyncio.sleep(0.005)


async def test_many_calls_wait_without_a_thread_each(tmp_path: Path) -> None:
    held = Held()
    async with opened(tmp_path / "store", held.parts) as memories:
        await memories.add(some("ann", *range(5)))
        threads = threading.active_count()
        answers = [
            asyncio.create_task(memories.call(AnswerQuery("ann", f"What of word{n}?"))) for n in range(100)
        ]
        await held.asked(100)
        assert threading.active_count() <= threads
        found = await memories.call(SearchQuery("ann", "word3", k_sub=1))  # meanwhile
        assert "word3" in found.turns[0].memory
        held.llm.release()
        texts = [answer.text for answer in await asyncio.gather(*answers)]
        assert all(texts)


async def test_answers_under_way_hold_back_no_other_call_of_a_large_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "QUICK_ROWS", 1)
    held = Held()
    submit = held.llm.submit
    monkeypatch.setattr(held.llm, "stream", lambda prompt, *, tenant, on_text: submit(prompt, tenant=tenant))
    async with opened(tmp_path / "store", held.parts) as memories, asyncio.timeout(30.0):
        await memories.add(some("ann", *range(5)))
        query = AnswerQuery("ann", "What of word3?")
        answers = [asyncio.create_task(memories.call(query)) for _ in range(3)]
        streamed = asyncio.create_task(anext(memories.answer_stream(query)))
        await held.asked(4)
        await asyncio.sleep(0.05)
        work = memories._router._shard._work  # type: ignore[union-attr]
        assert work._long.rest_s is None, "no thread asks for them again and again"
        assert "word3" in (await memories.call(SearchQuery("ann", "word3", k_sub=1))).turns[0].memory
        held.llm.release()
        assert await streamed and all(answer.text for answer in await asyncio.gather(*answers))


async def asked_once(memories: AsyncMemories, held: Held) -> asyncio.Task[Answer]:
    """A question whose prompt the LLM holds."""
    await memories.add(some("ann", 1))
    waiting = asyncio.create_task(memories.call(AnswerQuery("ann", "What of word1?")))
    await held.asked(1)
    return waiting


async def test_a_cancelled_call_ends_and_others_continue(tmp_path: Path) -> None:
    held = Held()
    async with opened(tmp_path / "store", held.parts) as memories:
        waiting = await asked_once(memories, held)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (call,) = held.answers
        while not call.cancelled():  # its LLM call is given up
            await asyncio.sleep(0.005)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await memories.call(FlushCommand("ann"))
        other = asyncio.create_task(memories.call(AnswerQuery("ann", "What of word1 now?")))
        await held.asked(2)
        held.llm.release()
        assert (await other).text


async def test_a_cancelled_add_is_stored_and_its_repeat_is_a_duplicate(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as memories:
        adding = asyncio.create_task(memories.add(some("ann", *range(20))))
        await asyncio.sleep(0)  # it has begun
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        receipts = await memories.add(some("ann", *range(20)))
        assert [receipt.duplicate for receipt in receipts] == [True] * 20
        assert (await memories.call(StatsQuery()))["turns"] == 20


async def test_turns_of_a_tenant_are_stored_in_the_order_of_the_calls(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as memories:
        calls = [memories.add(some("ann", n)) for n in range(50)]
        receipts = await asyncio.gather(*calls)
        assert [receipt.seq for (receipt,) in receipts] == list(range(50))


async def test_a_full_queue_is_refused_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path / "store", queue_turns=4) as memories:
        calls = [memories.add(some("ann", 2 * n, 2 * n + 1)) for n in range(30)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [n for n, result in enumerate(results) if isinstance(result, QueueFull)]
        assert refused
        for n in refused:
            assert len(await memories.add(some("ann", 2 * n, 2 * n + 1))) == 2
        assert (await memories.call(StatsQuery()))["turns"] == 60


async def test_calls_under_way_at_closing_raise(tmp_path: Path) -> None:
    held = Held()
    async with opened(tmp_path / "store", held.parts) as memories:
        waiting = await asked_once(memories, held)
    with pytest.raises(UndertowError, match="was closed"):
        await waiting
    with pytest.raises(UndertowError, match="were closed"):
        await memories.call(SearchQuery("ann", "word1"))
