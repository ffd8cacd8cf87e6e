"""A made-up shard for the tests of lanes and routers: its lines are real, its engine is a list of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import pyarrow as pa

from undertow.engine.base.model import PackedTurn
from undertow.engine.cluster.routing.errors import ShardGone
from undertow.engine.cluster.shard.call_queue import CallQueues, CallStamp, SessionStart, TurnCall, sent_call
from undertow.engine.cluster.wire import Outcome, Status, unpack
from undertow.engine.step.admission import QueueFull

BOUND_TURNS = 1_000_000


@dataclass
class FakeShard:
    """Stores texts. It dies of some words, and whenever the test says so, and is another process then."""

    deadly: str = "badger"
    stored: list[str] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)
    deaths: int = 0
    hellos: int = 0
    under_way: int = 0
    most_under_way: int = 0
    kill_when: Callable[[list[str]], bool] = lambda _: False
    # how often it dies while a turn is kept from it to see whether it does
    dies_idle: int = 0
    # so many calls get lost: what they hold is stored, or not
    loses: int = 0
    full: int = 0
    broken: Exception | None = None
    # calls of which it has returned turns
    returned: int = 0
    away: dict[str, tuple[Status, str]] = field(default_factory=dict)
    # clients that have had the shard to themselves, one for each time
    trials: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    lines: CallQueues = field(default_factory=lambda: CallQueues(BOUND_TURNS))
    # calls that are in the shard, by their client, and of those the accepted ones, in order
    inside: list[tuple[str, TurnCall]] = field(default_factory=list)
    ready: list[TurnCall] = field(default_factory=list)
    _granted: str | None = None

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return await getattr(self, method)(*args)

    async def hello(self, client: str, map_version: int) -> SessionStart:
        self.hellos += 1
        return SessionStart(self.lines.begin(client), map_version, self.lines.process)

    async def trial(self, client: str) -> str | None:
        trial = self.lines.trial(client, sum(map(len, self.ready)))
        if trial is not None and trial == self._granted and self.dies_idle:
            self.dies_idle -= 1
            self.die()
        if trial != self._granted and trial is not None:
            self.trials.append(client)
        self._granted = trial
        return trial

    async def status(self) -> dict[str, Any]:
        return {"journal_rows": len(self.stored)}

    async def ping(self) -> None:
        return None

    async def park(self, table: pa.Table, reason: str) -> int:
        texts = [turn.text for turn in unpack(table)]
        self.parked += texts
        return len(texts)

    def die(self) -> None:
        self.lines, self.ready, self._granted = CallQueues(BOUND_TURNS), [], None
        self.deaths += 1
        raise ShardGone("dead")

    async def add(self, table: pa.Table | Sequence[PackedTurn], stamp: CallStamp) -> Any:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        call = sent_call(table, stamp)
        self.inside.append((stamp.client, call))
        try:
            return await self._added(call, stamp)
        finally:
            self.under_way -= 1
            self.inside.remove((stamp.client, call))

    async def _added(self, call: TurnCall, stamp: CallStamp) -> Any:
        lines = self.lines
        self.ready += lines.accept(call, stamp, BOUND_TURNS if self.full else 0)
        self.full = max(0, self.full - call.future.done())
        while not call.future.done():
            await asyncio.sleep(0.001)
            if lines is not self.lines:
                raise ShardGone("died meanwhile")
            if await self.is_due(stamp.client, call):
                self._store(call)
        receipts = call.future.result()
        if self.loses:
            self.loses -= 1
            raise ShardGone("nobody knows")
        return receipts

    async def is_due(self, client: str, call: TurnCall) -> bool:
        """Whether the shard does this call now."""
        return self.ready[:1] == [call]

    def _store(self, call: TurnCall) -> None:
        if self.broken is not None:
            for waiting in self.ready:
                waiting.fail(self.broken)
            self.ready = []
            self.lines.end_all()
            return
        texts = [turn.text for turn in call.turns]
        if any(self.deadly in text for text in texts) or self.kill_when(texts):
            self.die()
        rows: list[Outcome] = []
        for turn in call.turns:
            if turn.tenant in self.away:
                status, to = self.away[turn.tenant]
                rows.append((status, None, None, to))
            else:
                known = turn.text in self.stored
                if not known:
                    self.stored.append(turn.text)
                rows.append((Status.DUPLICATE if known else Status.STORED, None, None, None))
        self.returned += any(turn.tenant in self.away for turn in call.turns)
        self.ready.remove(call)
        call.future.set_result(call._answer(rows))


def always_full(shard: FakeShard) -> None:
    """Make a shard refuse every call."""
    shard.add = AsyncMock(side_effect=QueueFull("no room."))  # type: ignore[method-assign]


def said(*texts: str) -> list[str]:
    """As the texts of `turn_of` are stored."""
    return [f"user: {text}\nassistant: I see." for text in texts]
