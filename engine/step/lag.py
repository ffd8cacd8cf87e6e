"""When the undecided records arrived, and with which request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lag:
    """Consolidation lag: what is stored and searchable but not yet decided.

    `oldest_undecided_s`: for how long this engine has had the oldest such record.
    """

    undecided_turns: int
    oldest_undecided_s: float
    running_jobs: int
    blocked_tenants: int


@dataclass(slots=True)
class _Arrival:
    """The records of one log from the end of the previous arrival up to `last`."""

    last: int
    at_s: float
    traceparent: str | None


class LagTracker:
    """Arrival times of the undecided records of each tenant. Not thread-safe.

    Records that an earlier engine left undecided arrive when this one loads their tenant.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._arrivals: dict[str, deque[_Arrival]] = {}

    def note(self, tenant: str, seq: int, traceparent: str | None = None) -> None:
        """The tenant's log now ends at `seq`. No effect if that is known."""
        arrivals = self._arrivals.get(tenant)
        if arrivals is None:
            self._arrivals[tenant] = deque([_Arrival(seq, self._clock_s(), traceparent)])
        elif arrivals[-1].last < seq:
            arrivals.append(_Arrival(seq, self._clock_s(), traceparent))

    def note_all(
        self, tenants: Sequence[str], seqs: Sequence[int | None], traceparents: Sequence[str | None]
    ) -> None:
        """Note new records, None: not new. Without traceparents `DecisionQueue.add` notes the last."""
        if traceparents:
            for tenant, seq, parent in zip(tenants, seqs, traceparents, strict=True):
                if seq is not None:
                    self.note(tenant, seq, parent)

    def decided(self, tenant: str, cursor: int) -> None:
        """All records before `cursor` are decided."""
        arrivals = self._arrivals.get(tenant)
        while arrivals and arrivals[0].last < cursor:
            arrivals.popleft()
        if not arrivals:
            self._arrivals.pop(tenant, None)

    def forget(self, tenant: str) -> None:
        self._arrivals.pop(tenant, None)

    def traceparent_of(self, tenant: str, seq: int) -> str | None:
        """The traceparent of the request that brought an undecided record."""
        arrivals = self._arrivals.get(tenant, ())
        return next((arrival.traceparent for arrival in arrivals if seq <= arrival.last), None)

    @property
    def oldest_s(self) -> float:
        """The age of the oldest undecided record; 0 for none."""
        if not self._arrivals:
            return 0.0
        return self._clock_s() - min(arrivals[0].at_s for arrivals in self._arrivals.values())
