"""A router's way to one shard: calls in order, a bounded number of turns under way, lost ones sent again.

The order of each tenant's turns holds through everything: a shard puts a line's calls back in order
(`Lines`); what was under way when it died is sent again before anything else; and while turns come back
because their tenant has moved, nothing new is sent until all that is under way has come back.

A turn is to blame for a shard's death only if it was alone there, among all that any router sends: a suspect
is sent once the shard has granted that (`Lines.trial`), and its death counts if another process answers then.
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

import pyarrow as pa

from undertow.engine.base.model import UndertowError
from undertow.engine.base.trace_context import use_traceparent
from undertow.engine.cluster.routing.batch import ShardBatch
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

# how long a shard is asked again that answers, but says that it cannot serve
REFUSAL_PATIENCE_S = 15.0
# deaths of a shard with one parcel alone in it, before that is cut or, a single turn, put to its last trial
DEATHS = 2
# how long a parcel of which the shard has died alone lets all others go first, before it is there again
COURTESY_S = 1.0
# how long the shard must live without a turn that is to be parked for its deaths
PROBATION_S = 2.0


class ShardClient:
    """One shard's parcels. All methods are called from the router's event loop."""

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
        """`client` is of this lane alone. `on_change`: a parcel has left the lane, others stand in its place.
        `on_returned`: these parcels must find their way anew, in this order; with them the new shards of
        tenants that have moved, and the tenants that are on their way. `read_map` is awaited before that.
        What any of them raises fails the parcels.
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
        # what came back, by number: to be sent here again, or elsewhere
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
        self._sending: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def has_room(self, turns: int) -> bool:
        return not self.waiting_turns or self.waiting_turns + turns <= self._settings.lane_turns

    @property
    def ended(self) -> bool:
        """Whether it sends nothing any more: it was stopped, or has failed."""
        return self._task.done()

    @property
    def idle(self) -> bool:
        return not self.waiting_turns

    def put(self, parcel: ShardBatch) -> None:
        self._queue.append(parcel)
        self.waiting_turns += len(parcel)
        self._news.set()

    async def stop(self) -> None:
        """End the lane; what is under way is left to itself, and its senders are told."""
        for task in (self._task, *self._sending):
            task.cancel()
        await asyncio.gather(self._task, *self._sending, return_exceptions=True)
        closed = UndertowError(
            f"the router was closed; whether shard {self.shard} has stored this is unknown"
        )
        for parcel in self._under_way.values():
            parcel.delivery.fail(closed)
        self._fail(closed)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (cause := task.exception()) is None:
            return
        error = UndertowError(f"the way to shard {self.shard} failed: {cause!r}. Please report it.")
        for sending in self._sending:
            sending.cancel()
        for parcel in self._under_way.values():
            self._end(parcel, error)
        self._fail(error)

    # ---- the lane's own task

    async def _run(self) -> None:
        while True:
            settling = self._lost or self._returned or self._failure is not None
            if settling and not self._under_way:
                await self._regroup()
            elif settling or not self._queue or not self._may_send:
                await self._news.wait()
                self._news.clear()
            elif self._token is not None or await self._greet():
                await self._dispatch(self._queue[0])

    @property
    def _may_send(self) -> bool:
        """One at a time until all that was under way at a death is stored: so the culprit is found."""
        first, under_way = self._queue[0], self._under_way.values()
        if not under_way:
            return True
        if len(under_way) >= self._settings.window_calls:
            return False
        if first.suspected or any(parcel.suspected for parcel in under_way):
            return False
        return sum(map(len, under_way)) + len(first) <= self._settings.window_turns

    async def _greet(self) -> bool:
        """Begin a line at the shard, until it is there. False: what waits has failed or moves on."""
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
            except Exception as refusal:  # noqa: BLE001 - it is there, and says why it cannot serve
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
        """The shard is one no more: the first parcel of the queue finds its way anew, and all behind it."""
        self._returned[self._next_number] = self._queue.popleft()

    async def _dispatch(self, parcel: ShardBatch) -> None:
        """Send the first parcel of the queue. A suspect is sent alone; or cut, or parked, for its deaths."""
        parcel.deaths += parcel.tried_in not in ("", self._process)
        parcel.tried_in = ""
        if not parcel.suspected:
            self._try(parcel)
        elif parcel.deaths >= DEATHS and len(parcel) > 1:
            self._queue.popleft()
            halves = parcel.halves()
            self._on_change(parcel, halves)
            self._queue.extendleft(reversed(halves))
        else:
            await self._judge(parcel)

    async def _judge(self, parcel: ShardBatch) -> None:
        try:
            if parcel.deaths > DEATHS:
                await self._park(parcel)
            else:
                self._try(parcel, await self._alone(parcel))
        except ShardGone:
            self._token = None
        except Removed:
            self._take_back()
        except Exception as error:  # noqa: BLE001 - the shard's error is the caller's, as in _send
            self._failure = error
            self._queue.popleft()
            self._end(parcel, error)

    async def _alone(self, parcel: ShardBatch) -> str:
        """Have the shard to ourselves: what to stamp the parcel with. ShardGone, QueueFull.

        Before a turn's last trial the shard must have lived for a while with nothing in it.
        """
        if parcel.deaths:
            await asyncio.sleep(COURTESY_S)
        room = self._room()
        while (trial := await self._asked_for_trial()) is None:
            await room.wait("another call is alone there, or not over.")
        until_s = time.monotonic() + PROBATION_S
        while parcel.deaths == DEATHS and time.monotonic() < until_s:
            await asyncio.sleep(PROBATION_S / 20)
            try:
                if await self._asked_for_trial() != trial:
                    raise ShardGone(f"shard {self.shard} no longer waits for this call")
            except ShardGone:  # something else kills it
                parcel.deaths = 0
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

    def _try(self, parcel: ShardBatch, trial: str = "") -> None:
        """Send the first parcel of the queue; `trial`: alone."""
        self._queue.popleft()
        number, self._next_number = self._next_number, self._next_number + 1
        self._under_way[number] = parcel
        task = asyncio.create_task(self._send(number, parcel, trial))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, number: int, parcel: ShardBatch, trial: str) -> None:
        stamp = CallStamp(self._client, self._token or "", number, self._map_version(), trial)
        try:
            with use_traceparent(parcel.delivery.traceparent):
                receipts = await self._sent(parcel.table, stamp)
        except (ShardGone, StaleSession) as error:
            parcel.tried_in = self._process if trial and _is_silent(error) else ""
            self._lose(number, parcel, error)
        except Removed:
            self._returned[number] = parcel
        except Exception as error:  # noqa: BLE001 - the shard's error is the caller's
            self._end(parcel, error)
            await self._break_off(error)
        else:
            self._settle(number, parcel, receipts)
        del self._under_way[number]
        self._news.set()

    async def _sent(self, table: pa.Table, stamp: CallStamp) -> pa.Table:
        room = self._room()
        while True:
            try:
                return await self.calls.call("add", table, stamp)
            except QueueFull as full:  # the same call again; those behind it wait for it at the shard
                await room.wait(full)

    def _room(self) -> CapacityWait:
        return CapacityWait(self.shard, self.calls, self._settings.patience_s)

    async def _break_off(self, error: Exception) -> None:
        """A call has failed: those behind it, which wait for it at the shard, come back with a new line."""
        if self._failure is not None:
            return
        self._failure = error
        with suppress(Exception):  # whatever ails the shard, the next greeting hears it too
            asked = self.calls.call("hello", self._client, self._map_version())
            await asyncio.wait_for(asked, self._settings.patience_s)

    def _lose(self, number: int, parcel: ShardBatch, error: Exception) -> None:
        """The shard is gone, or knows nothing of us any more: all this is to be sent again."""
        if self._failure is not None:  # it has given up this line for that
            self._end(parcel, self._failure)
            return
        parcel.suspected |= _is_silent(error)
        self._token = None
        self._lost[number] = parcel

    def _settle(self, number: int, parcel: ShardBatch, receipts: pa.Table) -> None:
        if (returned := parcel.settle(receipts)) is None:
            self._rest = Backoff(math.inf)
            self._leave(parcel)
            return
        self._on_change(parcel, [returned.parcel])
        self.waiting_turns -= len(parcel) - len(returned.parcel)
        self._returned[number] = returned.parcel
        self._moved |= returned.moved
        self._in_transit |= returned.in_transit

    async def _regroup(self) -> None:
        """Nothing is under way: put what was lost before all else, or send all of it on its way anew."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            self._token = None
            self._fail(error)
            return
        if self._lost:
            log.warning("shard %s is gone with %d calls under way", self.shard, len(self._lost))
        back = self._lost | self._returned
        parcels = [back[number] for number in sorted(back)]
        if self._returned:
            await self._send_anew(parcels)
        else:
            self._lost = {}
            self._queue.extendleft(reversed(parcels))

    async def _send_anew(self, parcels: Sequence[ShardBatch]) -> None:
        """Turns were not this shard's to store: with all that waits they find their way anew.

        What comes back again, and again, is sent less and less often, and fails after our patience.
        """
        back, now_s = self._returned.values(), time.monotonic()
        if any(parcel.back_since_s is not None for parcel in back):
            await self._rest()
        for parcel in back:
            parcel.back_since_s = parcel.back_since_s or now_s
        try:
            if any(now_s - (p.back_since_s or now_s) > self._settings.patience_s for p in back):
                raise self._lingering()
            await self._read_map()
        except Exception as error:  # noqa: BLE001 - whatever it is, their senders must hear of it
            self._fail(error)
            return
        parcels = [*parcels, *self._queue]  # now, as more may have been put meanwhile, behind them
        moved, in_transit = self._moved, self._in_transit
        self._lost, self._returned, self._moved, self._in_transit = {}, {}, {}, set()
        self._queue.clear()
        self.waiting_turns = 0
        try:
            self._on_returned(parcels, moved, in_transit)
        except Exception as error:  # noqa: BLE001 - as above
            for parcel in parcels:
                parcel.delivery.fail(error)
        self.room.set()

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
        """All that waits or has come back fails: what comes after a gap would be out of order."""
        for parcel in [*self._lost.values(), *self._returned.values(), *self._queue]:
            parcel.delivery.fail(error)
            self._leave(parcel)
        self._lost, self._returned, self._moved, self._in_transit = {}, {}, {}, set()
        self._queue.clear()

    def _end(self, parcel: ShardBatch, error: Exception) -> None:
        parcel.delivery.fail(error)
        self._leave(parcel)

    def _leave(self, parcel: ShardBatch) -> None:
        self.waiting_turns -= len(parcel)
        self._on_change(parcel, [])
        self.room.set()


def _is_silent(error: Exception) -> bool:
    """Whether the shard's process may have died of what it was given."""
    return isinstance(error, ShardGone) and not isinstance(error, ShardExited)
