"""Who may send a request to the LLM server now: the in-flight limit, priorities, outages, backoff."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 15.0
_OUTAGE_AFTER_FAILURES = 12


def backoff_s(attempt: int) -> float:
    """Jittered exponential wait before attempt `attempt + 2`, at most 15 s."""
    longest_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(attempt, 16))
    return random.uniform(0.5, 1.0) * longest_s


class Slots:
    """At most `limit` requests at once, most urgent first; in an outage one probe at a time.

    An outage is `_OUTAGE_AFTER_FAILURES` failures in a row over all requests. Without it thousands
    of waiting jobs would each keep knocking at a server that is gone. Lives on the event loop.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        """`timeout_s`: after how long a request that is not answered fails."""
        self.limit = limit
        self.active = 0
        self.failures = 0
        self.silent_s: float | None = None
        """For how long failures, with no answer among them, have shown the server silent; None if healthy."""
        self._timeout_s = timeout_s
        self._failing_since = 0.0
        self._paused_until = 0.0
        self._waiting: list[tuple[tuple[int, int], asyncio.Future[None]]] = []

    @asynccontextmanager
    async def hold(self, urgency: tuple[int, int]) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.active -= 1
            self._admit()

    def succeeded(self) -> None:
        self.failures, self.silent_s, self._paused_until = 0, None, 0.0

    def failed(self) -> None:
        now = time.monotonic()
        if now < self._paused_until:  # sent before the outage was noticed: says nothing new
            return
        self.failures += 1
        self._note_silence(now)
        past = self.failures - _OUTAGE_AFTER_FAILURES
        if past >= 0:
            pause_s = backoff_s(past)
            self._paused_until = now + pause_s
            asyncio.get_running_loop().call_later(pause_s, self._admit)

    def _note_silence(self, now: float) -> None:
        """Only a failure proves silence, and only where no other request may be at a slow reply.

        So neither a wait nor a request under way counts against the server. Whatever was under way
        at the first failure has ended `timeout_s` later, by a reply or not.
        """
        if self.silent_s is None:
            self._failing_since, self.silent_s = now, 0.0
        elapsed_s = now - self._failing_since
        if self.active == 1 or elapsed_s >= self._timeout_s:
            self.silent_s = elapsed_s

    def _admit(self) -> None:
        outage = self.failures >= _OUTAGE_AFTER_FAILURES
        if outage and time.monotonic() < self._paused_until:
            return
        while self._waiting and self.active < (1 if outage else self.limit):
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else its job was cancelled while it waited
                self.active += 1
                turn.set_result(None)
