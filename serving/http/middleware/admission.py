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
# What the loop begins, until it has been measured, each time over so long in which any waited.
FIRST_PER_S, MEASURED_S = 500.0, 0.1
# Refusals are told together, after this time.
TOLD_S = 1.0


class Admission:
    """At most as many requests wait as the loop begins in a given time, by what it has begun lately.

    The places are shared as water fills vessels: a tenant with fewer waiting requests than others is not
    refused for theirs.
    """

    def __init__(
        self, max_wait_s: float, tell: Callable[[int], None], clock_s: Callable[[], float] = perf_counter
    ) -> None:
        """`tell`: is told how many were refused."""
        self._max_wait_s, self._tell, self._clock_s = max_wait_s, tell, clock_s
        self.waiting: Counter[bytes] = Counter()
        self._total, self.most = 0, max(LEAST_WAITING, int(FIRST_PER_S * max_wait_s))
        # since when some wait without a break, how long they did before, and how many have begun in all that
        self._since_s, self._busy_s, self._begun = 0.0, 0.0, 0
        self._refused = 0

    def refuses(self, tenant: bytes) -> bool:
        """Whether one more request of the tenant would wait too long. If so, it counts as refused."""
        if self._total < self.most:
            return False
        level = self.waiting.get(tenant, 0) + 1
        if sum(min(count, level) for count in self.waiting.values()) < self.most:
            return False
        if not self._refused:
            asyncio.get_running_loop().call_later(TOLD_S, self.tell)
        self._refused += 1
        return True

    def enter(self, tenant: bytes) -> None:
        if not self._total:
            self._since_s = self._clock_s()
        self._total += 1
        self.waiting[tenant] += 1

    def leave(self, tenant: bytes) -> None:
        now_s = self._clock_s()
        self._busy_s, self._since_s = self._busy_s + now_s - self._since_s, now_s
        self._total, self._begun = self._total - 1, self._begun + 1
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        if self._busy_s >= MEASURED_S:
            self.most = max(LEAST_WAITING, round(self._begun / self._busy_s * self._max_wait_s))
            self._busy_s, self._begun = 0.0, 0

    def tell(self) -> None:
        """One log line for all refusals since the last."""
        refused, self._refused = self._refused, 0
        self._tell(refused)
        fields = {"problem": "overload", "refused": refused, "waiting": self._total, "most": self.most}
        log.warning("requests refused unread", extra={"fields": fields})


class Place:
    """Of one request: it waits from when all of it has come until its turn, or its end, in any order."""

    def __init__(self, admission: Admission, tenant: bytes) -> None:
        self._admission, self._tenant = admission, tenant
        self._waits: bool | None = None

    def enter(self) -> None:
        if self._waits is None:
            self._waits = True
            self._admission.enter(self._tenant)

    def leave(self) -> None:
        if self._waits:
            self._admission.leave(self._tenant)
        self._waits = False


# of a request that is given none: it came from this process, or is of no tenant
NOWHERE = Place(Admission(1.0, lambda _: None), b"")
