"""Refuses requests that would wait too long for the event loop, before anything is done for them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from time import perf_counter

log = logging.getLogger(__name__)

# in the scope of a request that a connection brought: its Place
PLACE = "undertow.place"
# So many may wait however slow the loop is: connections of one caller, and a burst.
LEAST_WAITING = 16
# What the loop begins is assumed until it has been measured, each time over so long in which any waited.
FIRST_PER_S, MEASURED_S = 500.0, 0.1
# Refusals are told together, after this time.
TOLD_S = 1.0


def call_later(seconds: float, act: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, act)


class Admission:
    """Bounds how long requests wait for their turn, by how many wait (Little's law).

    At most as many may wait as the loop begins in `max_wait_s`, by what it has begun lately. The places are
    shared as water fills vessels: a tenant with fewer waiting requests than others is not refused for theirs.
    """

    def __init__(
        self,
        max_wait_s: float,
        on_refused: Callable[[int], None],
        *,
        later: Callable[[float, Callable[[], None]], object] = call_later,
        clock_s: Callable[[], float] = perf_counter,
    ) -> None:
        """`on_refused`: told how many were refused, after a second. `later` calls after so many seconds."""
        self._max_wait_s = max_wait_s
        self._on_refused = on_refused
        self._later = later
        self._clock_s = clock_s
        self._waiting: Counter[bytes] = Counter()
        self._total = 0
        self.most = max(LEAST_WAITING, int(FIRST_PER_S * max_wait_s))
        """So many may wait now."""
        # since when some wait without a break, and what was measured before that
        self._since_s = 0.0
        self._busy_s, self._begun = 0.0, 0
        self._refused = 0

    def refuses(self, tenant: bytes) -> bool:
        """Whether one more request of the tenant would wait too long. If so, it counts as refused."""
        if self._total < self.most:
            return False
        level = self._waiting.get(tenant, 0) + 1
        if sum(min(count, level) for count in self._waiting.values()) < self.most:
            return False
        if not self._refused:
            self._later(TOLD_S, self._tell)
        self._refused += 1
        return True

    def enter(self, tenant: bytes) -> None:
        """A request that has come as a whole waits from now on."""
        if not self._total:
            self._since_s = self._clock_s()
        self._total += 1
        self._waiting[tenant] += 1

    def leave(self, tenant: bytes) -> None:
        """It waits no longer."""
        self._total -= 1
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        now_s = self._clock_s()
        self._begun += 1
        self._busy_s, self._since_s = self._busy_s + now_s - self._since_s, now_s
        if self._busy_s >= MEASURED_S:
            self.most = max(LEAST_WAITING, round(self._begun / self._busy_s * self._max_wait_s))
            self._busy_s, self._begun = 0.0, 0

    def _tell(self) -> None:
        refused, self._refused = self._refused, 0
        self._on_refused(refused)
        fields = {
            "refused": refused,
            "problem": "overload",
            "waiting": self._total,
            "most_waiting": self.most,
        }
        log.warning("requests refused unread", extra={"fields": fields})


class Place:
    """Of one request: it waits from when all of it has come until its turn, or its end."""

    __slots__ = ("_admission", "_tenant", "_waits")

    def __init__(self, admission: Admission, tenant: bytes) -> None:
        self._admission = admission
        self._tenant = tenant
        self._waits: bool | None = None

    def enter(self) -> None:
        if self._waits is None:
            self._waits = True
            self._admission.enter(self._tenant)

    def leave(self) -> None:
        """May come before `enter`, which then does nothing, and be repeated."""
        if self._waits:
            self._admission.leave(self._tenant)
        self._waits = False
