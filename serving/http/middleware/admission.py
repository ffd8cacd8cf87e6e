"""Refuses requests that would wait too long for the event loop, before anything is done for them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import perf_counter

from starlette.types import Scope

from undertow.serving.http.service_settings import ServiceSettings

log = logging.getLogger(__name__)

# in a request's scope: what is called when it waits no longer
PLACE = "undertow.place"
# So many may wait however slow the loop is: connections of one caller, and a burst.
LEAST_WAITING = 16
# What the loop begins, until it has been measured, each time over so long in which any waited.
FIRST_PER_S, MEASURED_S = 500.0, 0.1


def leave(scope: Scope) -> None:
    """The request waits no longer. If it has not come as a whole, it takes no place when it has."""
    scope.setdefault(PLACE, lambda: None)()


class Admission:
    """No more requests wait than the loop begins in `max_wait_s` at its recent pace, or fit in a key's share.

    A tenant with fewer waiting requests than others is not refused for theirs.
    """

    def __init__(self, settings: ServiceSettings, tell: Callable[[int], None]) -> None:
        """`tell`: is told how many were refused."""
        self._max_wait_s, self._tell = settings.max_wait_s, tell
        # fewer than fill the share of a key, whose refusals cost more
        self._bound = 3 * settings.max_key_requests // 4
        self.waiting: Counter[bytes] = Counter()
        self.most = self._most_at(FIRST_PER_S)
        # since when some wait without a break, how long they did before, and how many have begun in all that
        self._since_s, self._busy_s, self._begun, self._refused = 0.0, 0.0, 0, 0

    def refuses(self, tenant: bytes) -> bool:
        """Whether one more request of the tenant would wait too long. If so, it counts as refused."""
        level = self.waiting.get(tenant, 0) + 1
        if sum(min(count, level) for count in self.waiting.values()) < self.most:
            return False
        if not self._refused:
            asyncio.get_running_loop().call_later(1.0, self.tell)  # of all at once
        self._refused += 1
        return True

    def enter(self, tenant: bytes) -> Callable[[], None]:
        """A request that has come as a whole waits, until it calls the result; that may be repeated."""
        if not self.waiting:
            self._since_s = perf_counter()
        self.waiting[tenant] += 1
        return partial(self._leave, [tenant])

    def _leave(self, place: list[bytes]) -> None:
        for tenant in place:
            now_s = perf_counter()
            self._busy_s, self._since_s = self._busy_s + now_s - self._since_s, now_s
            self._begun += 1
            self.waiting[tenant] -= 1
            if not self.waiting[tenant]:
                del self.waiting[tenant]
        place.clear()
        if self._busy_s >= MEASURED_S:
            self.most = self._most_at(self._begun / self._busy_s)
            self._busy_s, self._begun = 0.0, 0

    def _most_at(self, per_s: float) -> int:
        return max(LEAST_WAITING, min(self._bound, round(per_s * self._max_wait_s)))

    def tell(self) -> None:
        """Tell of all refusals since the last time, in one log line."""
        refused, self._refused = self._refused, 0
        self._tell(refused)
        counts = {"refused": refused, "waiting": self.waiting.total(), "most": self.most}
        log.warning("requests refused unread", extra={"fields": {"problem": "overload", **counts}})
