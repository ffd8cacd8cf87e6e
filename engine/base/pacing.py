"""Pacing: while others are served, a tenant's heavy work takes a small share of the time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from threading import Lock

# A tenant is being served for so long after its last request.
SERVED_S = 1.0
# Heavy work runs for so long at full speed, then takes this share of the time. One piece that took very long
# is followed by a rest of at most so long.
BURST_S, SHARE, MOST_REST_S = 0.1, 0.04, 10.0
# Tenants whose work is remembered; those that worked longest ago are forgotten.
MOST_TENANTS = 4_096


class Served:
    """Whether tenants are being served, by their last requests."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        # who asked last and when, and when another one did
        self._last, self._last_s, self._other_s = "", -inf, -inf

    def note(self, tenant: str) -> None:
        """A request of the tenant has come; empty: of several tenants."""
        if tenant != self._last:
            self._last, self._other_s = tenant, self._last_s
        self._last_s = self._clock_s()

    @property
    def any(self) -> bool:
        return self._clock_s() < self._last_s + SERVED_S

    def others_than(self, tenant: str) -> bool:
        asked_s = self._other_s if tenant == self._last else self._last_s
        return self._clock_s() < asked_s + SERVED_S


class Pacing:
    """A token bucket for each tenant, filled with time for one kind of heavy work."""

    def __init__(
        self,
        served: Served | None,
        clock_s: Callable[[], float] = time.perf_counter,
        *,
        burst_s: float = BURST_S,
        share: float = SHARE,
    ) -> None:
        """`served`: None where others always are."""
        self._served, self._clock_s = served, clock_s
        self._burst_s, self._share = burst_s, share
        # by tenant, the moment when its bucket is full again
        self._full_s: OrderedDict[str, float] = OrderedDict()
        self._lock = Lock()

    def worked(self, tenant: str, seconds: float) -> None:
        """The tenant's work took so long. On any thread."""
        now_s = self._clock_s()
        with self._lock:
            full_s = max(self._full_s.get(tenant, -inf), now_s - seconds) + seconds / self._share
            self._full_s[tenant] = min(full_s, now_s + self._burst_s / self._share + MOST_REST_S)
            self._full_s.move_to_end(tenant)
            if len(self._full_s) > MOST_TENANTS:
                self._full_s.popitem(last=False)

    @contextmanager
    def measured(self, *tenants: str) -> Iterator[None]:
        """Around the work for these tenants, who share it, or as the decorator of a function that does it."""
        began_s = self._clock_s()
        try:
            yield
        finally:
            took_s = self._clock_s() - began_s
            for tenant in tenants:
                self.worked(tenant, took_s / len(tenants))

    def rest_s(self, tenant: str) -> float:
        """How long the tenant's next work is to wait; 0: it may begin."""
        full_s = self._full_s.get(tenant)
        if full_s is None or not (self._served is None or self._served.others_than(tenant)):
            return 0.0
        return max(0.0, full_s - self._burst_s / self._share - self._clock_s())
