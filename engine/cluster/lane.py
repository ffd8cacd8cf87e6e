"""A router's way to one shard: calls in order, a bounded number under way, repeated where they are lost.

The order of each tenant's turns holds through everything: a shard puts a line's calls back in order
(`Lines`); what was under way when it died is sent again before anything else; and while turns come back
because their tenant has moved, nothing new is sent until all that is under way has come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from undertow.engine.admission import QueueFull
from undertow.engine.cluster.calls import Hello, StaleSession, Stamp
from undertow.engine.cluster.delivery import Parcel
from undertow.engine.cluster.resources import ClusterSettings
from undertow.engine.cluster.wire import Status, receipts_table
from undertow.engine.model import UndertowError

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
# how long a shard is asked again that answers, but says that it cannot serve
REFUSAL_PATIENCE_S = 15.0
# deaths of a shard with one parcel alone under way, before that is cut or, a single turn, parked
DEATHS = 2
# how long the shard must live without a turn that is to be parked for its deaths
PROBATION_S = 2.0


class ShardGone(UndertowError):
    """The shard's process has died, or cannot be reached; whether it did what was asked is unknown."""


class ShardDown(UndertowError):
    """A shard was down for longer than the router's patience."""


class ShardCalls(Protocol):
    """A shard as its callers see it: the methods of `Shard` by name. ShardGone, QueueFull, its own errors."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


class Pause:
    """Waits that grow, up to a deadline."""

    def __init__(self, patience_s: float) -> None:
        self._until_s = time.monotonic() + patience_s
        self._next_s = SHORTEST_PAUSE_S

    @property
    def left_s(self) -> float:
        return self._until_s - time.monotonic()

    async def __call__(self) -> bool:
        """Wait a little; False: the patience is at its end."""
        if self.left_s <= 0:
            return False
        await asyncio.sleep(min(self._next_s, self.left_s))
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)
        return True


class Lane:
    """One shard's parcels. All methods are called from the router's event loop."""

    def __init__(
        self,
        shard: str,
        calls: ShardCalls,
        client: str,
        settings: ClusterSettings,
        *,
        map_version: Callable[[], int],
        on_change: Callable[[Parcel, Sequence[Parcel]], None],
        read_map: Callable[[], Awaitable[None]],
        on_returned: Callable[[Sequence[Parcel], dict[str, str]], None],
    ) -> None:
        """`on_change`: a parcel has left the lane, others stand in its place. `on_returned`: these parcels
        must find their way anew, in this order; with them the new shards of tenants that have moved.
        `read_map` is awaited before that. What any of them raises fails the parcels.
        """
        self.shard = shard
        self.calls = calls
        self.waiting_turns = 0
        self.room = asyncio.Event()
        self.deaths = 0
        self._client, self._settings = client, settings
        self._map_version, self._read_map = map_version, read_map
        self._on_change, self._on_returned = on_change, on_returned
        self._queue: deque[Parcel] = deque()
        self._under_way: dict[int, Parcel] = {}
        # what came back, by number: to be sent here again, or elsewhere
        self._lost: dict[int, Parcel] = {}
        self._returned: dict[int, Parcel] = {}
        self._moved: dict[str, str] = {}
        self._in_transit = False
        self._failure: Exception | None = None
        self._token: str | None = None
        self._next_number = 0
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

    def put(self, parcel: Parcel) -> None:
        self._queue.append(parcel)
        self.waiting_turns += len(parcel)
        self._news.set()

    async def stop(self) -> None:
        """End the lane; what is under way is left to itself."""
        for task in (self._task, *self._sending):
            task.cancel()
        await asyncio.gather(self._task, *self._sending, return_exceptions=True)

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
            elif settling or not self._queue or len(self._under_way) >= self._window:
                await self._news.wait()
                self._news.clear()
            elif self._token is not None or await self._greet():
                await self._dispatch(self._queue.popleft())

    @property
    def _window(self) -> int:
        """One at a time until all that was under way at a death is stored: so the culprit is found."""
        suspects = self._queue[0].suspected if self._queue else False
        return (
            1
            if suspects or any(p.suspected for p in self._under_way.values())
            else (self._settings.window_calls)
        )

    async def _greet(self) -> bool:
        """Begin a line at the shard, waiting until it is there. False: in vain, what waits has failed."""
        pause, refused_s = Pause(self._settings.patience_s), 0.0
        error: Exception | None = None
        while pause.left_s > 0:
            try:
                asked = self.calls.call("hello", self._client, self._map_version())
                hello: Hello = await asyncio.wait_for(asked, pause.left_s)
            except (ShardGone, TimeoutError) as gone:
                error = gone
            except Exception as refusal:  # noqa: BLE001 - it is there, and says why it cannot serve
                error = refusal
                refused_s = refused_s or time.monotonic()
                if time.monotonic() - refused_s > REFUSAL_PATIENCE_S:
                    break
            else:
                self._token, self._next_number = hello.token, 0
                return True
            await pause()
        self._fail(ShardDown(f"shard {self.shard} cannot be used: {error or 'it does not answer'}"))
        return False

    async def _watch(self) -> None:
        """See whether the shard lives while nothing is sent. ShardGone: it does not."""
        until_s = time.monotonic() + PROBATION_S
        while time.monotonic() < until_s:
            await self.calls.call("status")
            await asyncio.sleep(PROBATION_S / 20)

    async def _dispatch(self, parcel: Parcel) -> None:
        if parcel.deaths >= DEATHS:
            await self._convict(parcel)
        else:
            self._try(parcel)

    def _try(self, parcel: Parcel) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        self._under_way[number] = parcel
        task = asyncio.create_task(self._send(number, parcel))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, number: int, parcel: Parcel) -> None:
        stamp = Stamp(self._client, self._token or "", number, self._map_version())
        try:
            receipts = await self._sent(parcel.table, stamp)
        except (ShardGone, StaleSession) as error:
            self._lose(number, parcel, error)
        except Exception as error:  # noqa: BLE001 - the shard's error is the caller's
            self._failure = self._failure or error
            self._end(parcel, error)
        else:
            self._settle(number, parcel, receipts)
        del self._under_way[number]
        self._news.set()

    async def _sent(self, table: pa.Table, stamp: Stamp) -> pa.Table:
        pause_s = SHORTEST_PAUSE_S
        while True:
            try:
                return await self.calls.call("add", table, stamp)
            except QueueFull:  # the same call again; those behind it wait for it at the shard
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _lose(self, number: int, parcel: Parcel, error: Exception) -> None:
        """The shard is gone, or knows nothing of us any more: all this is to be sent again."""
        if self._failure is not None:  # it has given up this line for that
            self._end(parcel, self._failure)
            return
        if isinstance(error, ShardGone):
            parcel.suspected = True
            parcel.deaths += len(self._under_way) == 1 and not self._lost
        self._token = None
        self._lost[number] = parcel

    def _settle(self, number: int, parcel: Parcel, receipts: pa.Table) -> None:
        returned, moved, in_transit = parcel.settle(receipts)
        if returned is None:
            self._leave(parcel)
            return
        self._on_change(parcel, [returned])
        self.waiting_turns -= len(parcel) - len(returned)
        self._returned[number] = returned
        self._moved |= moved
        self._in_transit |= in_transit

    async def _regroup(self) -> None:
        """Nothing is under way: put what was lost before all else, or send all of it on its way anew."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            self._token = None
            self._fail(error)
            return
        if self._in_transit:
            await asyncio.sleep(SHORTEST_PAUSE_S)
            self._in_transit = False
        if self._returned:  # before the parcels are gathered: more may be put meanwhile, behind them
            try:
                await self._read_map()
            except Exception as error:  # noqa: BLE001 - whatever it is, their senders must hear of it
                self._fail(error)
                return
        if self._lost:
            self.deaths += any(parcel.suspected for parcel in self._lost.values())
            log.warning("shard %s is gone with %d calls under way", self.shard, len(self._lost))
        back = self._lost | self._returned
        parcels = [back[number] for number in sorted(back)]
        self._lost, returned = {}, self._returned
        self._returned = {}
        if not returned:
            self._queue.extendleft(reversed(parcels))
            return
        parcels += self._queue
        self._queue.clear()
        self.waiting_turns = 0
        moved, self._moved = self._moved, {}
        try:
            self._on_returned(parcels, moved)
        except Exception as error:  # noqa: BLE001 - as above
            for parcel in parcels:
                parcel.delivery.fail(error)
        self.room.set()

    async def _convict(self, parcel: Parcel) -> None:
        """A parcel under which the shard dies again and again, alone: cut it, or park the one turn."""
        if len(parcel) > 1:
            halves = parcel.halves()
            self._on_change(parcel, halves)
            self._queue.extendleft(reversed(halves))
            return
        reason = f"the shard's process died {parcel.deaths} times while it stored this turn"
        try:
            if parcel.deaths == DEATHS:  # and does it live without? Then once more, to be sure
                await self._watch()
                self._try(parcel)
                return
            await self.calls.call("park", parcel.table, reason)
        except ShardGone:  # something else kills it
            self._token = None
            parcel.deaths = 0
            self._queue.appendleft(parcel)
        except Exception as error:  # noqa: BLE001 - the shard's error is the caller's, as in _send
            self._failure = error
            self._end(parcel, error)
        else:
            parcel.settle(receipts_table([(Status.PARKED, None, None, reason)]))
            self._leave(parcel)

    def _fail(self, error: Exception) -> None:
        """All that waits or has come back fails: what comes after a gap would be out of order."""
        for parcel in [*self._lost.values(), *self._returned.values(), *self._queue]:
            parcel.delivery.fail(error)
            self._leave(parcel)
        self._lost, self._returned, self._moved = {}, {}, {}
        self._queue.clear()

    def _end(self, parcel: Parcel, error: Exception) -> None:
        parcel.delivery.fail(error)
        self._leave(parcel)

    def _leave(self, parcel: Parcel) -> None:
        self.waiting_turns -= len(parcel)
        self._on_change(parcel, [])
        self.room.set()
