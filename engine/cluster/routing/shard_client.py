"""Sends a router's turns to one shard: in order, a bounded number at a time, lost ones again.

The order of each tenant's turns holds through all failures. The shard puts the calls of a session back in
order (`CallQueues`). Calls that were under way when it died are sent again before all others. While turns
come back because their tenant has moved, nothing new is sent until all calls under way have come back.

A turn is blamed for the death of a shard only if it was alone there, among the turns of all routers: a
suspect is sent once the shard has granted a trial (`CallQueues.trial`), and the death counts if another
process answers then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import Any

from undertow.engine.base.model import UndertowError
from undertow.engine.base.trace import use_traceparent
from undertow.engine.cluster.routing.batch import Receipts, ShardBatch
from undertow.engine.cluster.routing.errors import (
    Backoff,
    CapacityWait,
    ShardCalls,
    ShardDown,
    ShardExited,
    ShardGone,
)
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.call_queue import CallStamp, SessionStart, StaleSession
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.cluster.wire import Status, receipts_table
from undertow.engine.step.admission import QueueFull

log = logging.getLogger(__name__)

# how long to retry a shard that answers that it cannot serve
REFUSAL_PATIENCE_S = 15.0
# deaths of a shard with one batch alone in it before that is split or, a single turn, gets its last trial
DEATHS = 2
# how long a batch that has killed the shard alone waits, so that all others go first
COURTESY_S = 1.0
# how long the shard must live without a turn before that turn is parked for its deaths
PROBATION_S = 2.0


class ShardClient:
    """The batches for one shard. All methods are called on the router's event loop."""

    def __init__(
        self,
        shard: str,
        calls: ShardCalls,
        client: str,
        settings: ClusterSettings,
        *,
        map_version: Callable[[], int],
        on_change: Callable[[ShardBatch, Sequence[ShardBatch]], None],
        read_map: Callable[[], Awaitable[None]],
        on_returned: Callable[[Sequence[ShardBatch], dict[str, str], AbstractSet[str]], None],
    ) -> None:
        """`client`: a name of this client's own. `on_change`: a batch has left, others took its place.
        `on_returned`: these batches must be routed again, in this order; it is also given the new shards of
        moved tenants, and the tenants in transit. `read_map` is awaited before that. An error of either
        fails the batches.
        """
        self.shard = shard
        self.calls = calls
        self.waiting_turns = 0
        self.room = asyncio.Event()
        self.deaths = 0
        self._client, self._settings = client, settings
        self._map_version, self._read_map = map_version, read_map
        self._on_change, self._on_returned = on_change, on_returned
        self._queue: deque[ShardBatch] = deque()
        self._under_way: dict[int, ShardBatch] = {}
        # batches that came back, by number: to be sent here again, or elsewhere
        self._lost: dict[int, ShardBatch] = {}
        self._returned: dict[int, ShardBatch] = {}
        self._moved: dict[str, str] = {}
        self._in_transit: set[str] = set()
        self._rest = Backoff(math.inf)
        self._failure: Exception | None = None
        self._token: str | None = None
        self._next_number = 0
        self._process = ""
        self._news = asyncio.Event()
        self._under_way_turns, self._exchanged_s = 0, -math.inf  # when a call was last sent, or over
        # calls under way, and what follows some of them
        self._sending: set[asyncio.Future[Any]] = set()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def has_room(self, turns: int) -> bool:
        return not self.waiting_turns or self.waiting_turns + turns <= self._settings.lane_turns

    @property
    def ended(self) -> bool:
        """Whether it was stopped, or has failed."""
        return self._task.done()

    def put(self, batch: ShardBatch) -> None:
        """Send a batch, at once if nothing waits before it."""
        self._queue.append(batch)
        self.waiting_turns += len(batch)
        is_next = len(self._queue) == 1 and not batch.suspected and not self._settling
        if is_next and self._token is not None and self._may_send:
            self._try(batch)
        else:
            self._news.set()

    async def stop(self) -> None:
        """End the client, and fail all its batches; calls under way may still be carried out."""
        while not self._task.done():  # `wait_for` of Python 3.11 may lose a cancellation
            self._task.cancel()
            await asyncio.sleep(0)
        self._token = None
        while self._sending:  # what has ended may be followed by more
            for sending in self._sending:
                sending.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)
        closed = UndertowError(
            f"the router was closed; whether shard {self.shard} has stored this is unknown"
        )
        self._fail(closed)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (cause := task.exception()) is None:
            return
        error = UndertowError(f"the way to shard {self.shard} failed: {cause!r}. Please report it.")
        for sending in self._sending:
            sending.cancel()
        under_way, self._under_way = self._under_way, {}
        for batch in under_way.values():
            self._end(batch, error)
        self._fail(error)

    # ---- the client's own task

    async def _run(self) -> None:
        while True:
            if self._settling and not self._under_way:
                await self._regroup()
            elif self._settling or not self._queue or not self._may_send:
                patience_s = self._settings.patience_s
                silent_s = time.monotonic() - self._exchanged_s if self._under_way else 0.0
                try:
                    async with asyncio.timeout(patience_s - silent_s):
                        await self._news.wait()
                except TimeoutError:  # is the process still the shard's where calls have been for so long?
                    if time.monotonic() - self._exchanged_s >= patience_s:
                        await self._end_session()
                        self._exchanged_s = time.monotonic()
                self._news.clear()
            elif self._token is not None or await self._greet():
                await self._dispatch(self._queue[0])

    @property
    def _settling(self) -> bool:
        """Whether something has come back: nothing more is sent until that is done with."""
        return bool(self._lost or self._returned) or self._failure is not None

    @property
    def _may_send(self) -> bool:
        """Batches that were under way at a death go one at a time, so that the culprit is found."""
        if not self._under_way:
            return True
        first, longest_under_way = self._queue[0], next(iter(self._under_way.values()))
        if first.suspected or longest_under_way.suspected:
            return False
        own = self._settings  # _leave_room says why a quarter
        has_place = len(self._under_way) < min(own.window_calls, own.max_pending_calls // 4)
        return has_place and self._under_way_turns + len(first) <= own.window_turns

    async def _greet(self) -> bool:
        """Begin a session at the shard. False: the waiting batches have failed, or are to be routed again."""
        pause, refused_s = Backoff(self._settings.patience_s), 0.0
        error: object = "it does not answer"
        while pause.left_s > 0:
            try:
                asked = self.calls.call("hello", self._client, self._map_version())
                hello: SessionStart = await asyncio.wait_for(asked, pause.left_s)
            except ShardGone as gone:
                error = gone
            except TimeoutError:
                pass
            except Removed:
                self._take_back()
                return False
            except Exception as refusal:  # noqa: BLE001 - it is alive, and says why it cannot serve
                error = refusal
                refused_s = refused_s or time.monotonic()
                if time.monotonic() - refused_s > REFUSAL_PATIENCE_S:
                    break
            else:
                self.deaths += self._process not in ("", hello.process)
                self._token, self._next_number, self._process = hello.token, 0, hello.process
                return True
            await pause()
        self._fail(ShardDown(self.shard, pause.waited_s, error))
        return False

    def _take_back(self) -> None:
        """The shard was removed: the first batch of the queue is routed again, and all behind it."""
        self._returned[self._next_number] = self._queue.popleft()

    async def _dispatch(self, batch: ShardBatch) -> None:
        """Send the first batch of the queue. A suspect is sent alone; after deaths it is split or parked."""
        batch.deaths += batch.tried_in not in ("", self._process)
        batch.tried_in = ""
        if not batch.suspected:
            self._try(batch)
        elif batch.deaths >= DEATHS and len(batch) > 1:
            self._queue.popleft()
            halves = batch.halves()
            self._on_change(batch, halves)
            self._queue.extendleft(reversed(halves))
        else:
            await self._judge(batch)

    async def _judge(self, batch: ShardBatch) -> None:
        try:
            if batch.deaths > DEATHS:
                await self._park(batch)
            else:
                self._try(batch, await self._alone(batch))
        except ShardGone:
            self._token = None
        except Removed:
            self._take_back()
        except Exception as error:  # noqa: BLE001 - the shard's error is the caller's, as in _answered
            self._failure = error
            self._queue.popleft()
            self._end(batch, error)

    async def _alone(self, batch: ShardBatch) -> str:
        """Reserve the shard for one batch: the token of the trial. ShardGone, QueueFull.

        Before a turn's last trial the shard must have lived for a while with no call in it.
        """
        if batch.deaths:
            await asyncio.sleep(COURTESY_S)
        room = CapacityWait(self.shard, self.calls, self._settings.patience_s)
        while (trial := await self._asked_for_trial()) is None:
            await room.wait("another call has the shard to itself, or is not over.")
        until_s = time.monotonic() + PROBATION_S
        while batch.deaths == DEATHS and time.monotonic() < until_s:
            await asyncio.sleep(PROBATION_S / 20)
            try:
                if await self._asked_for_trial() != trial:
                    raise ShardGone(f"shard {self.shard} no longer waits for this call")
            except ShardGone:  # something else kills it
                batch.deaths = 0
                raise
        return trial

    async def _asked_for_trial(self) -> str | None:
        try:
            trial: str | None = await self.calls.call("trial", self._client)
        except QueueFull:
            return None
        return trial

    async def _park(self, turn: ShardBatch) -> None:
        reason = f"the shard's process died {turn.deaths} times while it stored this turn alone"
        await self.calls.call("park", turn.table, reason)
        self._queue.popleft()
        turn.settle(receipts_table([(Status.PARKED, None, None, reason)]))
        self._leave(turn)

    def _try(self, batch: ShardBatch, trial: str = "") -> None:
        """Send the first batch of the queue. `trial`: the token that it is alone with."""
        self._queue.popleft()
        number, self._next_number = self._next_number, self._next_number + 1
        self._under_way[number], self._exchanged_s = batch, time.monotonic()
        self._under_way_turns += len(batch)
        stamp = CallStamp(self._client, self._token or "", number, self._map_version(), trial)
        with use_traceparent(batch.pending.traceparent):
            asked = asyncio.ensure_future(self.calls.call("add", batch.turns, stamp))
        self._follow(asked, partial(self._asked, batch, stamp))

    def _follow(self, sending: asyncio.Future[Any], then: Callable[..., None] | None = None) -> None:
        """Cancel this if the client ends before. `then` comes after it, and costs less than a task."""
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        if then is not None:
            sending.add_done_callback(then)

    def _asked(self, batch: ShardBatch, stamp: CallStamp, asked: asyncio.Future[Receipts]) -> None:
        """The shard has answered, or has no room: then the call is repeated, and later ones wait for it."""
        full = None if asked.cancelled() else asked.exception()
        if isinstance(full, QueueFull) and stamp.number in self._under_way:
            room = CapacityWait(self.shard, self.calls, self._settings.patience_s)
            with use_traceparent(batch.pending.traceparent):
                repeated = asyncio.create_task(room.repeat(full, "add", batch.turns, stamp))
            self._follow(repeated, partial(self._answered, batch, stamp))
        else:
            self._answered(batch, stamp, asked)

    def _answered(self, batch: ShardBatch, stamp: CallStamp, answered: asyncio.Future[Receipts]) -> None:
        error = asyncio.CancelledError() if answered.cancelled() else answered.exception()
        self._exchanged_s = time.monotonic()
        if self._under_way.pop(stamp.number, None) is None:
            return  # the client has ended
        self._under_way_turns -= len(batch)
        has_gap = False
        if error is None:
            self._settle(stamp.number, batch, answered.result())
        elif isinstance(error, ShardGone | StaleSession | asyncio.CancelledError):
            batch.tried_in = self._process if stamp.trial and _is_silent(error) else ""
            self._lose(stamp.number, batch, error)
            has_gap = not answered.cancelled()
        elif isinstance(error, Removed):
            self._returned[stamp.number] = batch
        elif isinstance(error, Exception):  # the shard's error is the caller's
            self._failure, has_gap = self._failure or error, self._failure is None
            self._end(batch, error)
        if self._queue or self._settling:  # else the client's task has nothing to do
            self._news.set()
        if has_gap:
            self._follow(asyncio.create_task(self._end_session()))

    async def _end_session(self) -> None:
        """A call has failed, or never came: have the shard return the calls that wait there behind it.

        If another process answers, those under way are lost: the former one may never answer them.
        """
        pause = Backoff(self._settings.patience_s)
        while self._under_way:
            with suppress(Exception):
                asked = self.calls.call("hello", self._client, self._map_version())
                hello: SessionStart = await asyncio.wait_for(asked, pause.left_s)
                if hello.process != self._process:
                    for sending in self._sending - {asyncio.current_task()}:
                        sending.cancel()
                return
            if not await pause():
                return

    def _lose(self, number: int, batch: ShardBatch, error: BaseException) -> None:
        """The shard died, or has forgotten the session: the batch is to be sent again."""
        if self._failure is not None:  # the session ends for that
            self._end(batch, self._failure)
            return
        batch.suspected |= _is_silent(error)
        self._token = None
        self._lost[number] = batch

    def _settle(self, number: int, batch: ShardBatch, receipts: Receipts) -> None:
        if (returned := batch.settle(receipts)) is None:
            self._rest = Backoff(math.inf)
            self._leave(batch)
            return
        self._on_change(batch, [returned.batch])
        self.waiting_turns -= len(batch) - len(returned.batch)
        self._returned[number] = returned.batch
        self._moved |= returned.moved
        self._in_transit |= returned.in_transit

    async def _regroup(self) -> None:
        """Nothing is under way: queue lost batches before all others, or have all of them routed again."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            self._token = None
            self._fail(error)
            return
        if self._lost:
            log.warning("shard %s is gone with %d calls under way", self.shard, len(self._lost))
        back = self._lost | self._returned
        batches = [back[number] for number in sorted(back)]
        if self._returned:
            await self._send_anew(batches)
        else:
            self._lost = {}
            self._queue.extendleft(reversed(batches))

    async def _send_anew(self, batches: Sequence[ShardBatch]) -> None:
        """Route returned batches again, with all that wait.

        Turns that keep coming back are sent ever more rarely, and fail after the patience.
        """
        back, now_s = self._returned.values(), time.monotonic()
        if any(batch.back_since_s is not None for batch in back):
            await self._rest()
        for batch in back:
            batch.back_since_s = batch.back_since_s or now_s
        try:
            if any(now_s - (p.back_since_s or now_s) > self._settings.patience_s for p in back):
                raise self._lingering()
            await self._read_map()
        except Exception as error:  # noqa: BLE001 - their senders must learn of any error
            self._fail(error)
            return
        batches = [*batches, *self._queue]  # more may have been put meanwhile, behind them
        moved, in_transit = self._moved, self._in_transit
        self._clear()
        self.waiting_turns = 0
        try:
            self._on_returned(batches, moved, in_transit)
        except Exception as error:  # noqa: BLE001 - as above
            for batch in batches:
                batch.pending.fail(error)
        self.room.set()

    def _clear(self) -> None:
        self._lost, self._returned, self._moved, self._in_transit = {}, {}, {}, set()
        self._queue.clear()

    def _lingering(self) -> UndertowError:
        patience_s = self._settings.patience_s
        if self._in_transit:
            return UndertowError(
                f"turns wait for {len(self._in_transit)} tenants that have been on their way from shard "
                f"{self.shard} for {patience_s:g} s. If their move was cut off, end it (`undertow cluster "
                "move`); then send them again."
            )
        return UndertowError(
            f"shards have sent turns on from one to another for {patience_s:g} s; the last was {self.shard}. "
            "`undertow cluster status` shows which map each goes by. Please report it."
        )

    def _fail(self, error: Exception) -> None:
        """Fail all batches that wait or have come back: after a gap they would be out of order."""
        failed = [*self._lost.values(), *self._returned.values(), *self._queue]
        self._clear()  # first, as in _end
        for batch in failed:
            self._end(batch, error)

    def _end(self, batch: ShardBatch, error: Exception) -> None:
        self._leave(batch)  # first: who learns of the error may add again at once
        batch.pending.fail(error)

    def _leave(self, batch: ShardBatch) -> None:
        self.waiting_turns -= len(batch)
        self._on_change(batch, [])
        self.room.set()


def _is_silent(error: BaseException) -> bool:
    """Whether the shard's process may have died of the batch."""
    return isinstance(error, ShardGone) and not isinstance(error, ShardExited)
