"""Streamed answers: kept by a shard, and delivered through it to async callers."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.mock.server import spawn_server
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.base.model import UndertowError, Usage
from undertow.engine.base.queries import AnswerQuery, SearchQuery, TenantUsageQuery
from undertow.engine.base.results import Answer, SearchResult
from undertow.engine.cluster.in_process import InProcess
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.api import answer_streams as answering
from undertow.engine.cluster.shard.api.answer_streams import AnswerStream, AnswerStreams, UnknownTicket
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.llm.client import BadReply, BrokenOff, Completion
from undertow.engine.tenants.registry import UnknownTenant
from undertow.prompts.builders import Prompt
from undertow.serving.async_memories import AsyncMemories, open_memories

from ..support.cluster.in_process import PARTS, FailingEncoder, settings
from ..support.cluster.shard import some
from ..support.llm_servers import SOON_S, scripted, server_stats
from ..support.service.clock import Seconds

pytestmark = pytest.mark.anyio

# ---- the client


def test_errors_can_be_sent_from_a_shard() -> None:
    bad, broken = BadReply("it was empty", Usage(1, 2, 3, 4)), BrokenOff("gone", Usage(1))
    for error in (bad, broken, UnknownTicket("gone")):
        sent = pickle.loads(pickle.dumps(error))
        assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))


# ---- a telling


def answered(text: str) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result(Answer(text, SearchResult((), (), ()), Usage()))
    return future


def test_more_is_what_is_new_and_waits_for_it() -> None:
    telling = AnswerStream("ann", Seconds())
    first = telling.more(0)
    assert not first.done()
    telling.add("Ann ")
    telling.add("sails")
    assert first.result() == ("Ann ", None)
    assert telling.more(4).result() == ("sails", None)
    assert telling.more(0).result() == ("Ann sails", None)  # asked again: its answer was lost
    last = telling.more(9)
    telling.end(answered("Ann sails"))
    assert last.result() == telling.more(9).result() == ("", answered("Ann sails").result())
    assert telling.more(4).result()[0] == "sails"


def test_an_error_comes_after_the_text_before_it() -> None:
    telling = AnswerStream("ann", Seconds())
    telling.add("Ann")
    failed: Future[Answer] = Future()
    failed.set_exception(BrokenOff("gone"))
    telling.end(failed)
    assert telling.more(0).result() == ("Ann", None)
    with pytest.raises(BrokenOff):
        telling.more(3).result()


def test_who_waits_long_is_told_that_nothing_came_and_who_asks_no_more_has_gone() -> None:
    clock = Seconds()
    telling = AnswerStream("ann", clock)
    waiting = telling.more(0)
    clock.now_s += answering.POLL_S - 1
    telling.serve()
    assert not waiting.done()
    clock.now_s += 1
    telling.serve()
    assert waiting.result() == ("", None)
    clock.now_s += answering.ABANDONED_S
    assert not telling.abandoned
    clock.now_s += 1
    assert telling.abandoned
    waiting = telling.more(0)
    clock.now_s += 10 * answering.ABANDONED_S
    assert not telling.abandoned  # somebody waits


def test_an_answer_that_nobody_asks_for_is_forgotten() -> None:
    clock, answers = Seconds(), AnswerStreams("s0")
    old = answers.add(AnswerStream("ann", clock))
    clock.now_s += answering.ABANDONED_S + 1
    new = answers.add(AnswerStream("ann", clock))
    with pytest.raises(UnknownTicket, match="s0"):
        answers.more(old.id, 0).result()
    assert not answers.more(new.id, 0).done()


# ---- through a shard, to whoever awaits


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawn_server(piece_ms=1) as url:
        yield url


@asynccontextmanager
async def served(store: Path, url: str) -> AsyncIterator[AsyncMemories]:
    """Memories that ask their LLM for answers alone, as no topic recurs that often."""
    of_server = settings(llm_url=url, theta_count=100)
    async with await asyncio.to_thread(open_memories, store, of_server) as memories:
        await memories.add(some("ann", *range(6)))
        yield memories


async def until(condition: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(condition):
        await asyncio.sleep(0.01)


async def heard(memories: AsyncMemories, asked: str = "What of word3?") -> tuple[list[str], Answer]:
    *pieces, last = [piece async for piece in memories.answer_stream(AnswerQuery("ann", asked))]
    assert isinstance(last, Answer)
    return [piece for piece in pieces if isinstance(piece, str)], last


async def test_the_pieces_and_the_answer_are_those_of_the_engine(tmp_path: Path, server: str) -> None:
    async with served(tmp_path / "store", server) as memories:
        pieces, told = await heard(memories)
    of_server = settings(llm_url=server)
    with Engine(tmp_path / "store", of_server, PARTS.encoder(of_server), llm=make_llm(of_server)) as engine:
        spent = engine.tenants.existing("ann").meter["answer"]
        assert spent == told.usage  # metered, once
        answer = engine.answer("ann", "What of word3?")
        assert (told.text, told.found, told.usage) == (answer.text, answer.found, answer.usage)
    assert "".join(pieces) == told.text
    assert len(pieces) > 1


async def test_many_answers_side_by_side_do_not_mix(tmp_path: Path, server: str) -> None:
    async with served(tmp_path / "store", server) as memories:
        questions = [f"What of word{n}?" for n in range(20)]
        told = await asyncio.gather(*(heard(memories, asked) for asked in questions))
        for asked, (pieces, answer) in zip(questions, told, strict=True):
            whole = await memories.call(AnswerQuery("ann", asked))
            assert "".join(pieces) == answer.text == whole.text


@pytest.mark.parametrize("way", ["closed", "cancelled", "before the first piece"])
async def test_who_leaves_ends_the_request_at_the_server(tmp_path: Path, way: str) -> None:
    async def leave(memories: AsyncMemories, url: str) -> None:
        async with aclosing(memories.answer_stream(AnswerQuery("ann", "What of word3?"))) as pieces:
            if way == "before the first piece":
                first = asyncio.ensure_future(anext(pieces))
                await until(lambda: server_stats(url)["in_flight"] == 1)
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
                return
            async for _ in pieces:
                if way == "closed":
                    return
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

    slow = {"latency_ms": 0.0, "piece_ms": 500.0 if way == "before the first piece" else 100.0}
    with spawn_server(**slow) as url:
        async with served(tmp_path / "store", url) as memories:
            left = asyncio.create_task(leave(memories, url))
            await asyncio.wait([left])
            assert left.cancelled() == (way == "cancelled")
            await until(lambda: server_stats(url)["faults"] == {"client left": 1})
            assert [state["state"] for state in (await memories.status()).values()] == ["serving"]


async def test_errors_come_where_the_pieces_end(tmp_path: Path) -> None:
    with scripted(["Answer: Ann sails", None]) as (url, _):
        async with served(tmp_path / "store", url) as memories:
            pieces: list[str | Answer] = []
            with pytest.raises(BrokenOff):
                async for piece in memories.answer_stream(AnswerQuery("ann", "Where?")):
                    pieces.append(piece)
            assert pieces == ["Ann sails"]
            assert (await memories.call(TenantUsageQuery("ann")))["answer"]["calls"] == 1
            with pytest.raises(UnknownTenant):
                await anext(memories.answer_stream(AnswerQuery("nobody", "Where?")))
            with pytest.raises(ValueError, match="empty"):
                await anext(memories.answer_stream(AnswerQuery("ann", " ")))


class Breaking(MockLLM):
    """Its shard fails while it answers: the engine is opened anew, with another client."""

    def __init__(self, said: str) -> None:
        super().__init__(MockReplies())
        self.said, self.asked = said, threading.Event()

    def stream(self, prompt: Prompt, *, tenant: str, on_text: Callable[[str], None]) -> Future[Completion]:
        if self.said:
            on_text(self.said)
        self.asked.set()
        return Future()


@pytest.mark.parametrize("said", ["", "Ann"])
async def test_a_shard_that_is_opened_anew_asks_again_unless_it_has_begun(tmp_path: Path, said: str) -> None:
    breaking = Breaking(said)
    clients = iter([breaking, MockLLM(MockReplies())])
    encoder = FailingEncoder(["badger"])
    parts = EngineParts(lambda _: encoder, lambda _: next(clients))

    router = await asyncio.to_thread(InProcess, tmp_path / "store", settings(), parts)
    async with AsyncMemories(router) as memories:
        await memories.add(some("ann", 1))
        telling = asyncio.create_task(heard(memories))
        assert await asyncio.to_thread(breaking.asked.wait, SOON_S)
        with pytest.raises(RuntimeError, match="badger"):  # that costs the shard its engine
            await memories.call(SearchQuery("ann", "the badger"))
        if said:
            with pytest.raises(BrokenOff, match="opened anew"):
                await telling
        else:
            assert (await telling)[1].text


async def test_closing_tells_who_listens(tmp_path: Path) -> None:
    breaking = Breaking("Ann")
    router = await asyncio.to_thread(
        InProcess, tmp_path / "store", settings(), EngineParts(PARTS.encoder, lambda _: breaking)
    )
    async with AsyncMemories(router) as memories:
        await memories.add(some("ann", 1))
        telling = asyncio.create_task(heard(memories))
        assert await asyncio.to_thread(breaking.asked.wait, SOON_S)
    with pytest.raises(UndertowError, match="closed"):
        await telling


async def test_over_ray_it_is_the_same(ray_address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.engine.storage.location import Location

    # slowly, so that the caller leaves before the answer's end
    with spawn_server(piece_ms=40) as server:
        small = ClusterSettings(num_cpus=0.5, threads=1, patience_s=SOON_S)
        root, of_server = Location.of(tmp_path / "root"), settings(llm_url=server)
        cluster = await asyncio.to_thread(Cluster.open, root, of_server, shards=1, resources=small)
        async with AsyncMemories(cluster, cluster.stop) as memories:
            await memories.add(some("ann", *range(6)))
            pieces, answer = await heard(memories)
            whole = await memories.call(AnswerQuery("ann", "What of word3?"))
            assert "".join(pieces) == answer.text == whole.text
            assert len(pieces) > 1
            gone = server_stats(server)["faults"].get("client left", 0)
            async with aclosing(memories.answer_stream(AnswerQuery("ann", "What of word4?"))) as left:
                await anext(left)
            await until(lambda: server_stats(server)["faults"].get("client left", 0) == gone + 1)


def test_what_an_erased_tenant_was_told_is_forgotten() -> None:
    answers = AnswerStreams("s0")
    hers, his = answers.add(AnswerStream("ann", Seconds())), answers.add(AnswerStream("bob", Seconds()))
    answers.forget("ann")
    with pytest.raises(UnknownTicket):
        answers.more(hers.id, 0).result(0)
    assert not answers.more(his.id, 0).done()
