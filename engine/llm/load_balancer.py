"""Load balancer over several LLM servers: a request goes to the one with the fewest in flight.

All servers share one queue, most urgent first. A server with an open `CircuitBreaker` gets no requests: its
requests go to the others, it is probed, and then gets one trial request (half-open). A server that refuses is
skipped and logged by name, unless all refuse: then the settings are wrong.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from undertow.engine.llm.circuit_breaker import CircuitBreaker
from undertow.engine.llm.replies import Rejected, ServerRefused, Trouble
from undertow.engine.llm.server import Server

log = logging.getLogger(__name__)

QUIET_S = 15.0
"""A server with requests in flight that has answered none for this long is probed."""
_MOST_UNANSWERED = 3

Urgency = tuple[int, int]
"""(priority of the operation, number of the job); the lowest goes first."""


class _ServerSlot:
    """A server with its circuit breaker, its requests in flight, and its background tasks."""

    def __init__(self, server: Server, breaker: CircuitBreaker) -> None:
        self.server = server
        self.breaker = breaker
        self.calls: set[asyncio.Timeout] = set()
        self.logged_outage = False
        self.recovery: asyncio.Task[None] | None = None
        self.watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.server.url

    def rank(self, avoid: Server | None) -> tuple[bool, bool, int]:
        """Sort key: the lowest gets the next request."""
        return self.server is avoid, not self.breaker.half_open, self.breaker.active

    def requeue(self) -> None:
        """Fail every request in flight here with Trouble, so that it is retried elsewhere."""
        for call in self.calls:
            call.reschedule(0.0)


class LoadBalancer:
    """The queue in front of all servers. Lives on one event loop."""

    def __init__(self, servers: Sequence[Server], limit: int, timeout_s: float) -> None:
        """`limit`: requests at once at each server. `timeout_s`: see `CircuitBreaker`."""
        self._slots = [_ServerSlot(server, CircuitBreaker(limit, timeout_s)) for server in servers]
        # Ties go to the first server; the clients of many shards must not all choose the same one.
        random.shuffle(self._slots)
        self._waiting: list[tuple[Urgency, asyncio.Future[_ServerSlot], Server | None]] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def active(self) -> int:
        """Requests in flight at all servers."""
        return sum(slot.breaker.active for slot in self._slots)

    @property
    def silent_s(self) -> float | None:
        """How long all usable servers have been silent, in seconds; None if one is not."""
        silences = [slot.breaker.silent_s for slot in self._slots if slot.breaker.refusal is None]
        known = [silence for silence in silences if silence is not None]
        return min(known, default=None) if len(known) == len(silences) else None

    @property
    def all_refuse(self) -> bool:
        return all(slot.breaker.refusal is not None for slot in self._slots)

    @asynccontextmanager
    async def hold(self, urgency: Urgency, avoid: Server | None = None) -> AsyncIterator[Server]:
        """Wait for a server to send one request to; not `avoid` if another is free.

        What the block raises (Trouble, Rejected, ServerRefused; nothing for an answer) is recorded for the
        server. Raises Trouble if the server is lost during the request.
        """
        turn: asyncio.Future[_ServerSlot] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, turn, avoid))
        self._admit()
        try:
            slot = await turn
            async with self._recording(slot), asyncio.timeout(None) as call:
                slot.calls.add(call)
                try:
                    yield slot.server
                finally:
                    slot.calls.discard(call)
        finally:
            if turn.done() and not turn.cancelled():
                turn.result().breaker.active -= 1
            self._admit()

    async def close(self) -> None:
        tasks = [task for slot in self._slots for task in (slot.recovery, slot.watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(slot.server.close() for slot in self._slots))

    @asynccontextmanager
    async def _recording(self, slot: _ServerSlot) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError as called_back:
            text = f"{slot.url} stopped responding at its former address; its pending requests are retried"
            raise Trouble(text) from called_back
        except Trouble as trouble:
            slot.breaker.failed()
            self._note_outage(slot, str(trouble))
            raise
        except ServerRefused as refusal:
            slot.breaker.refused(refusal)
            self._note_outage(slot, str(refusal))
            raise
        except Rejected:
            slot.breaker.answered()
            raise
        else:
            slot.breaker.answered()
            if slot.logged_outage:
                slot.logged_outage = False
                log.info("%s is back", slot.url)

    def _note_outage(self, slot: _ServerSlot, why: str) -> None:
        if not slot.breaker.is_open:
            return
        if not slot.logged_outage and len(self) > 1:
            slot.logged_outage = True
            log.warning("%s gets no requests for now (%s)", slot.url, why)
        if slot.recovery is None or slot.recovery.done():
            slot.recovery = asyncio.create_task(self._recover(slot), name=f"recovery of {slot.url}")

    def _admit(self) -> None:
        while self._waiting:
            _, turn, avoid = self._waiting[0]
            if turn.done():  # cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            slot = self._least_busy(avoid)
            if slot is None:
                return
            heapq.heappop(self._waiting)
            slot.breaker.began()
            if slot.watch is None or slot.watch.done():
                slot.watch = asyncio.create_task(self._watch(slot), name=f"watch over {slot.url}")
            turn.set_result(slot)

    def _least_busy(self, avoid: Server | None) -> _ServerSlot | None:
        """The server with the fewest requests in flight among those with room; None if none has room.

        A half-open server comes first: only a request shows whether it has recovered.
        """
        free = [slot for slot in self._slots if slot.breaker.free]
        if not free and self.all_refuse:  # then each request is sent, and fails with the refusal
            free = [slot for slot in self._slots if slot.breaker.active < slot.breaker.limit]
        return min(free, key=lambda slot: slot.rank(avoid), default=None)

    async def _recover(self, slot: _ServerSlot) -> None:
        """Probe a failed server until it answers; then allow one trial request."""
        while slot.breaker.is_open and not slot.breaker.half_open:
            await asyncio.sleep(slot.breaker.pause_s)
            answered = await self._answers(slot)
            slot.breaker.probed(answered)
        self._admit()

    async def _watch(self, slot: _ServerSlot) -> None:
        """Retry requests elsewhere if their server vanishes silently, long before they time out."""
        unanswered = 0
        while slot.breaker.active:
            await asyncio.sleep(QUIET_S)
            if time.monotonic() - slot.breaker.heard_s < QUIET_S or await self._answers(slot):
                unanswered = 0
                continue
            unanswered += 1
            if unanswered >= _MOST_UNANSWERED and self._others_serve(slot):
                slot.breaker.lost()
                self._note_outage(slot, "it does not answer")
                slot.requeue()
                return

    def _others_serve(self, slot: _ServerSlot) -> bool:
        return any(other is not slot and not other.breaker.is_open for other in self._slots)

    async def _answers(self, slot: _ServerSlot) -> bool:
        """Whether the server answers a probe at its current address: an actor's server may have moved."""
        try:
            if await slot.server.find():
                slot.requeue()
            await slot.server.probe()
        except (Trouble, ServerRefused) as trouble:
            log.debug("%s", trouble)
            return False
        return True
