"""Which of several LLM servers a request goes to: the one with the fewest requests under way.

One queue for all servers, most urgent first. A server that is out (`CircuitBreaker`) gets no requests: its
own go to the others, it is looked for and knocked at, and one request tries it before it is back. A
server that refuses is left out with its name told, unless all do: then the settings are wrong.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

from undertow.engine.llm.circuit_breaker import CircuitBreaker
from undertow.engine.llm.replies import Rejected, ServerRefused, Trouble
from undertow.engine.llm.server import Server

log = logging.getLogger(__name__)

QUIET_S = 15.0
"""A server with requests under way that has answered none for so long is asked whether it is there."""
_MOST_UNANSWERED = 3

Urgency = tuple[int, int]
"""(priority of the operation, number of the job); the least goes first."""


class _ServerSlot:
    """A server, what it can take, and what watches it."""

    def __init__(self, server: Server, slots: CircuitBreaker) -> None:
        self.server = server
        self.slots = slots
        self.calls: set[asyncio.Timeout] = set()
        self.told_out = False
        self.recovery: asyncio.Task[None] | None = None
        self.watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.server.url

    def rank(self, avoid: Server | None) -> tuple[bool, bool, int]:
        """The least is asked next."""
        return self.server is avoid, not self.slots.on_trial, self.slots.active

    def call_back(self) -> None:
        """End every request under way here by Trouble, so that it goes elsewhere."""
        for call in self.calls:
            call.reschedule(0.0)


class LoadBalancer:
    """The queue in front of all servers. Lives on one event loop."""

    def __init__(self, servers: Sequence[Server], limit: int, timeout_s: float) -> None:
        """`limit`: requests at once at each server. `timeout_s`: see `CircuitBreaker`."""
        self._places = [_ServerSlot(server, CircuitBreaker(limit, timeout_s)) for server in servers]
        # the first wins a tie; clients of many shards must not all tie to the same server
        random.shuffle(self._places)
        self._waiting: list[tuple[Urgency, asyncio.Future[_ServerSlot], Server | None]] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def active(self) -> int:
        """Requests under way at all servers."""
        return sum(place.slots.active for place in self._places)

    @property
    def silent_s(self) -> float | None:
        """Seconds that all usable servers have been silent; None if one is not."""
        silences = [place.slots.silent_s for place in self._places if place.slots.refusal is None]
        known = [silence for silence in silences if silence is not None]
        return min(known, default=None) if len(known) == len(silences) else None

    @property
    def all_refuse(self) -> bool:
        return all(place.slots.refusal is not None for place in self._places)

    @asynccontextmanager
    async def hold(self, urgency: Urgency, avoid: Server | None = None) -> AsyncIterator[Server]:
        """A server to send one request to, when its turn has come; not `avoid` if another is free.

        What the block raises (Trouble, Rejected, ServerRefused; nothing for an answer) is noted
        against the server. Raises Trouble itself when the server is lost with the request.
        """
        turn: asyncio.Future[_ServerSlot] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, turn, avoid))
        self._admit()
        try:
            place = await turn
            async with self._noting(place), asyncio.timeout(None) as call:
                place.calls.add(call)
                try:
                    yield place.server
                finally:
                    place.calls.discard(call)
        finally:
            if turn.done() and not turn.cancelled():
                turn.result().slots.active -= 1
            self._admit()

    async def close(self) -> None:
        tasks = [task for place in self._places for task in (place.recovery, place.watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(place.server.close() for place in self._places))

    @asynccontextmanager
    async def _noting(self, place: _ServerSlot) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError as called_back:
            text = f"{place.url} does not answer any more where it was; what was under way is asked anew"
            raise Trouble(text) from called_back
        except Trouble as trouble:
            place.slots.failed()
            self._note_outage(place, str(trouble))
            raise
        except ServerRefused as refusal:
            place.slots.refused(refusal)
            self._note_outage(place, str(refusal))
            raise
        except Rejected:
            place.slots.answered()
            raise
        else:
            place.slots.answered()
            if place.told_out:
                place.told_out = False
                log.info("%s is back", place.url)

    def _note_outage(self, place: _ServerSlot, why: str) -> None:
        if not place.slots.out:
            return
        if not place.told_out and len(self) > 1:
            place.told_out = True
            log.warning("%s gets no requests for now (%s)", place.url, why)
        if place.recovery is None or place.recovery.done():
            place.recovery = self._spawn(self._recover(place), f"recovery of {place.url}")

    def _admit(self) -> None:
        while self._waiting:
            _, turn, avoid = self._waiting[0]
            if turn.done():  # its job was cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            place = self._freest(avoid)
            if place is None:
                return
            heapq.heappop(self._waiting)
            place.slots.began()
            if place.watch is None or place.watch.done():
                place.watch = self._spawn(self._watch(place), f"watch over {place.url}")
            turn.set_result(place)

    def _freest(self, avoid: Server | None) -> _ServerSlot | None:
        """The server with the fewest requests under way among those that take one; None if none does.

        One on trial is first: whether it is back is known only when a request has tried it.
        """
        free = [place for place in self._places if place.slots.free]
        if not free and self.all_refuse:  # then each request asks again, and fails with the refusal
            free = [place for place in self._places if place.slots.active < place.slots.limit]
        return min(free, key=lambda place: place.rank(avoid), default=None)

    async def _recover(self, place: _ServerSlot) -> None:
        """Knock at a server that is out until it answers; then one request may try it."""
        while place.slots.out and not place.slots.on_trial:
            await asyncio.sleep(place.slots.pause_s)
            answered = await self._answers(place)
            place.slots.knocked(answered)
        self._admit()

    async def _watch(self, place: _ServerSlot) -> None:
        """Call requests back from a server that vanished without a word, long before they time out."""
        unanswered = 0
        while place.slots.active:
            await asyncio.sleep(QUIET_S)
            if time.monotonic() - place.slots.heard_s < QUIET_S or await self._answers(place):
                unanswered = 0
                continue
            unanswered += 1
            if unanswered >= _MOST_UNANSWERED and self._others_serve(place):
                place.slots.lost()
                self._note_outage(place, "it does not answer")
                place.call_back()
                return

    def _others_serve(self, place: _ServerSlot) -> bool:
        return any(other is not place and not other.slots.out for other in self._places)

    async def _answers(self, place: _ServerSlot) -> bool:
        """Whether it does, where it is now: one that an actor keeps may have moved."""
        try:
            if await place.server.find():
                place.call_back()
            await place.server.knock()
        except (Trouble, ServerRefused) as trouble:
            log.debug("%s", trouble)
            return False
        return True

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)
