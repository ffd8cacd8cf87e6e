"""A shard whose work an event loop does: what runs on it, what on a thread, and searches beside a commit."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import (
    DeleteCommand,
    FlushCommand,
    SearchQuery,
    StatsQuery,
    TenantsQuery,
    TurnsByKeyQuery,
)
from undertow.engine.base.results import Receipt
from undertow.engine.cluster.shard import commands, engine_work
from undertow.engine.cluster.shard.engine_work import POLL_S, EngineWork
from undertow.engine.cluster.shard.supervisor import EngineParts, ShardSupervisor
from undertow.engine.cluster.shard.turn_calls import TurnCalls
from undertow.engine.step.admission import Admission
from undertow.engine.step.batch_size import BRIEF
from undertow.engine.storage.journal import Fenced, Journal, JournalError
from undertow.engine.tenants.turn_columns import TurnColumns
from undertow.serving.async_memories import AsyncMemories, open_memories

from ...support.cluster.in_process import PARTS, FailingEncoder, mock_llm, settings
from ...support.cluster.shard import some
from ...support.engine import turn_of
from ...support.faults.harness import assert_same_state, end_state

pytestmark = pytest.mark.anyio
SOON_S = 30


@asynccontextmanager
async def opened(store: Path, parts: EngineParts = PARTS, **changes: Any) -> AsyncIterator[AsyncMemories]:
    """As the service opens them: the event loop does the store's work."""
    open_ = partial(open_memories, loop=asyncio.get_running_loop())
    async with await asyncio.to_thread(open_, store, settings(**changes), parts=parts) as memories:
        yield memories


def word(n: int, tenant: str = "ann") -> SearchQuery:
    return SearchQuery(tenant, f"word{n} other{n}", k_sub=1, k_epi=0, k_sem=0)


def engine_of(memories: AsyncMemories) -> Engine:
    engine = memories._router._shard._supervisor.engine  # type: ignore[union-attr]
    assert engine is not None
    return engine


def threads_of(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """The names of the threads that a method runs on, from now on."""
    seen: list[str] = []
    method: Callable[..., Any] = getattr(kind, name)

    def watched(self: Any, *args: Any, **more: Any) -> Any:
        seen.append(threading.current_thread().name)
        return method(self, *args, **more)

    monkeypatch.setattr(kind, name, watched)
    return seen


async def test_adds_searches_and_look_ups_run_on_the_loop_and_long_calls_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.current_thread().name
    async with opened(tmp_path) as memories:
        (receipt,) = await memories.add(some("ann", 1))
        steps, calls = threads_of(monkeypatch, Engine, "step"), threads_of(monkeypatch, Engine, "call")
        searches = threads_of(monkeypatch, Engine, "begin_search")
        await memories.add(some("ann", 2))
        await memories.add(some("bob", 1))  # a new tenant has nothing to be loaded
        assert set(steps) == {here}
        assert (await memories.call(word(2))).turns
        assert await memories.call(TurnsByKeyQuery("ann", ["none"])) == {}
        assert not (await memories.call(SearchQuery("ann", "word1", where={"topic": "boats"}))).turns
        assert set(calls) == set(searches) == {here}
        calls.clear()
        await memories.call(StatsQuery())
        assert receipt.id is not None
        await memories.call(DeleteCommand(receipt.id, "ann"))
        assert calls and here not in calls


async def test_a_tenant_that_is_to_be_loaded_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", *range(5)))
        await memories.call(FlushCommand("ann"))  # else opening the store would load it
    here = threading.current_thread().name
    async with opened(tmp_path) as memories:
        calls = threads_of(monkeypatch, Engine, "begin_search")
        reads = threads_of(monkeypatch, Journal, "batches")
        assert (await memories.call(word(3))).turns
        assert (await memories.call(word(4))).turns
        assert calls == [here, here] and reads and here not in reads


async def test_what_waits_and_is_slow_runs_on_a_thread_now_and_then_and_the_loop_stores_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, runs, over = threading.current_thread().name, list[str](), list[str]()

    def look(_: Engine) -> str | None:
        runs.append(threading.current_thread().name)
        return over[0] if over else None

    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        steps = threads_of(monkeypatch, Engine, "step")
        work: EngineWork = memories._router._shard._work  # type: ignore[union-attr]
        waiting = asyncio.wrap_future(work.ask(look, wait=True))
        for n in range(2, 6):
            await memories.add(some("ann", n))
        async with asyncio.timeout(SOON_S):
            while not runs:
                await asyncio.sleep(POLL_S)
            assert set(steps) == {here} and here not in runs
            runs.clear()
            began_s = time.monotonic()
            await asyncio.sleep(20 * POLL_S)
            while not runs:
                await asyncio.sleep(POLL_S)
        assert len(runs) <= 2 * (time.monotonic() - began_s) / POLL_S, "it looks now and then"
        over.append("over")
        assert await waiting == "over"


@pytest.mark.parametrize(("held_s", "follows"), [(1e9, "told"), (0.0, "look")])
async def test_answers_are_sent_before_long_calls_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_s: float, follows: str
) -> None:
    monkeypatch.setattr(commands, "HELD_S", held_s)
    monkeypatch.setattr(engine_work, "POLL_S", 60.0)  # nothing but the add makes it look
    seen = list[str]()

    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        work: EngineWork = memories._router._shard._work  # type: ignore[union-attr]
        waiting: Future[None] = work.ask(lambda _: seen.append("look"), wait=True, is_quick=lambda _: True)
        add = memories._router.begin_add(some("ann", 2))
        add.add_done_callback(lambda _: seen.append("stored"))
        await asyncio.wrap_future(add)
        seen.append("told")
        while seen[-1] != "look":
            await asyncio.sleep(0)
        assert seen[seen.index("stored") + 1] == follows
        waiting.cancel()


async def test_an_encoder_that_takes_long_runs_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.current_thread().name
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        engine_of(memories)._texts.text_s = 1.0
        steps = threads_of(monkeypatch, Engine, "step")
        calls = threads_of(monkeypatch, Engine, "begin_search")
        await memories.call(word(1))
        await memories.add(some("ann", 2))
        assert here not in {*steps, *calls}


class HeldCommits:
    """Holds commits that are slow by nature, once `hold` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hold = False
        self.begun, self.go = threading.Event(), threading.Event()
        self.failing = False
        append = Journal.append

        def held(journal: Journal, rows: Any) -> None:
            if self.hold and rows:
                self.begun.set()
                assert self.go.wait(SOON_S)
                if self.failing:
                    raise JournalError("the disk is full")
            append(journal, rows)

        monkeypatch.setattr(Journal, "append", held)
        monkeypatch.setattr(Journal, "commits_quickly", property(lambda _: False))

    @asynccontextmanager
    async def under_way(
        self, store: Path, parts: EngineParts = PARTS
    ) -> AsyncIterator[tuple[AsyncMemories, asyncio.Task[Any]]]:
        """A turn of ann's and one of bob's are stored; an add of ann's second one waits for its commit."""
        async with opened(store, parts) as memories:
            await memories.add([*some("ann", 1), *some("bob", 1)])
            self.hold = True
            adding = asyncio.create_task(memories.add(some("ann", 2)))
            assert await asyncio.to_thread(self.begun.wait, SOON_S)
            yield memories, adding


async def test_searches_do_not_wait_for_a_commit_and_see_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = HeldCommits(monkeypatch)
    async with commits.under_way(tmp_path) as (memories, adding):
        async with asyncio.timeout(SOON_S):
            assert (await memories.call(word(1, "bob"))).turns
        of_ann = asyncio.create_task(memories.call(word(2)))
        later = asyncio.create_task(memories.add(some("bob", 2)))
        await asyncio.sleep(0.05)
        assert not (adding.done() or of_ann.done() or later.done())
        commits.go.set()
        assert "word2" in (await of_ann).turns[0].memory
        assert (await adding)[0].seq == 1
        assert (await later)[0].seq == 1


async def test_a_commit_that_fails_acknowledges_nothing_and_the_shard_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = HeldCommits(monkeypatch)
    async with commits.under_way(tmp_path) as (memories, adding):
        commits.failing = True
        commits.go.set()
        with pytest.raises(JournalError, match="full"):
            await adding
        commits.hold = False
        found = await memories.call(word(2))
        assert "word1" in found.turns[0].memory
        (receipt,) = await memories.add(some("ann", 2))
        assert not receipt.duplicate


async def test_a_search_that_breaks_the_engine_beside_a_commit_does_not_break_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, encoder = HeldCommits(monkeypatch), FailingEncoder(["badger"])
    async with commits.under_way(tmp_path, EngineParts(lambda _: encoder, mock_llm)) as (memories, adding):
        with pytest.raises(RuntimeError, match="badger"):
            await memories.call(SearchQuery("bob", "the badger"))
        commits.go.set()
        assert not (await adding)[0].duplicate
        assert (await memories.call(word(2))).turns
        (state,) = (await memories.status()).values()
        assert state["reopened"] == 1


async def test_a_round_that_fails_unexpectedly_ends_the_shard_and_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        with monkeypatch.context() as broken:
            broken.setattr(TurnCalls, "settle", lambda _: 1 / 0)
            with pytest.raises(UndertowError, match="closed"):
                await memories.add(some("ann", 2))
        receipts = await memories.add(some("ann", 1, 2))
        assert [receipt.seq for receipt in receipts] == [None, 1] or receipts[1].duplicate


async def test_a_command_that_asks_for_more_does_not_begin_a_round_beside_a_thread(
    tmp_path: Path, calls_of: Callable[..., list[bool]]
) -> None:
    """As a streamed answer does."""
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        work = memories._router._shard._work  # type: ignore[union-attr]
        in_use, go = threading.Event(), threading.Event()

        def long(_: Engine) -> bool:
            in_use.set()
            time.sleep(0.1)
            in_use.clear()
            return True

        beside = calls_of(EngineWork, "round", lambda *_, **__: in_use.is_set())
        held = work.ask_without(lambda: go.wait(SOON_S))
        await asyncio.sleep(0.02)
        asking = work.ask(lambda _: work.ask(lambda _: True, is_quick=quick), is_quick=quick)
        last = work.ask(long)
        go.set()
        for future in (held, asking, last):
            assert await asyncio.wrap_future(future)
        assert await asyncio.wrap_future(asking.result())
        assert not any(beside)


def quick(_: Engine) -> bool:
    return True


async def test_commits_that_follow_each_other_do_not_keep_long_calls_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "commits_quickly", property(lambda _: False))
    async with opened(tmp_path) as memories:
        await memories.add(some("ann", 1))
        numbers = itertools.count(2)

        async def add() -> None:
            while True:
                await memories.add(some("ann", next(numbers)))

        adders = [asyncio.create_task(add()) for _ in range(8)]
        try:
            async with asyncio.timeout(SOON_S):
                assert (await memories.call(StatsQuery()))["turns"] > 0
                assert await memories.call(TenantsQuery()) == ["ann"]
        finally:
            for adder in adders:
                adder.cancel()
            await asyncio.gather(*adders, return_exceptions=True)


@pytest.mark.parametrize("at_once", [300, 1], ids=["a large add", "small adds"])
async def test_a_few_turns_at_a_time_are_stored_on_the_loop(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BRIEF, "turns beside a large call", (60.0, 16))
    async with opened(tmp_path, batch_turns=None) as memories:
        await memories.add(some("ann", 0))
        sizes, admit = list[int](), Admission.admit

        def watched(self: Admission, turns: TurnColumns) -> Any:
            sizes.append(turns.size)
            time.sleep(0.001 * turns.size)  # other threads embed them: that takes no CPU time of this one
            return admit(self, turns)

        monkeypatch.setattr(Admission, "admit", watched)
        adds = [memories.add(some("ann", *range(n, n + at_once))) for n in range(1, 301, at_once)]
        receipts = itertools.chain(*await asyncio.gather(*adds))
        assert [receipt.seq for receipt in receipts] == list(range(1, 301))
        assert max(sizes) == 16 if at_once > 1 else max(sizes) <= 32 and max(sizes[-5:]) <= 4


async def test_an_engine_that_fails_on_the_loop_is_opened_again_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = FailingEncoder(["badger"])
    async with opened(tmp_path, EngineParts(lambda _: encoder, mock_llm)) as memories:
        await memories.add(some("ann", 1))
        isolations = threads_of(monkeypatch, ShardSupervisor, "isolate")
        receipts = await memories.add([*some("ann", 2), turn_of("ann", 9, "a badger"), *some("ann", 3)])
        assert [receipt.parked is None for receipt in receipts] == [True, False, True]
        assert isolations and threading.current_thread().name not in isolations


@pytest.mark.parametrize("quick", [True, False])
async def test_what_the_loop_has_stored_and_decided_is_what_an_engine_stores_and_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    if not quick:
        monkeypatch.setattr(Journal, "commits_quickly", property(lambda _: False))
    turns = [turn for n in range(40) for name in ("ann", "bob", "cy") for turn in some(name, n % 7 + 100 * n)]
    async with opened(tmp_path / "loop") as memories:

        async def send(name: str) -> list[Receipt]:
            return [r for t in turns if t.tenant == name for r in await memories.add([t])]

        await asyncio.gather(*(send(name) for name in ("ann", "bob", "cy")))
        for name in ("ann", "bob", "cy"):
            assert await memories.call(FlushCommand(name)) is not None
    with Engine(
        tmp_path / "engine", settings(), PARTS.encoder(settings()), llm=mock_llm(settings())
    ) as engine:
        engine.add_batch(turns)
        for name in ("ann", "bob", "cy"):
            engine.flush(name)
    assert_same_state(end_state(tmp_path / "loop"), end_state(tmp_path / "engine"))


async def test_a_shard_without_an_engine_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as memories:
        memories._router._shard._supervisor._discard(Fenced("another writer has the store"))  # type: ignore[union-attr]
        rounds = threads_of(monkeypatch, EngineWork, "round")
        with pytest.raises(Fenced):
            await memories.call(word(1))
        await asyncio.sleep(0.2)
        assert len(rounds) < 10
