"""When the turns arrived that are not decided yet, and at whose request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Arrival:
    """Records of one log up to `last`, from where the arrival before it ends."""

    last: int
    at_s: float
    cause: str | None


class LagTracker:
    """Of each tenant with undecided records: since when they have been here. Not thread-safe.

    "Here" is this engine: what an earlier one left undecided arrives when it is taken up again.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lines: dict[str, deque[_Arrival]] = {}

    def note(self, tenant: str, seq: int, cause: str | None = None) -> None:
        """The tenant's log reaches to `seq` now. No effect where that is known."""
        line = self._lines.get(tenant)
        if line is None:
            self._lines[tenant] = deque([_Arrival(seq, self._clock_s(), cause)])
        elif line[-1].last < seq:
            line.append(_Arrival(seq, self._clock_s(), cause))

    def decided(self, tenant: str, cursor: int) -> None:
        """All records before `cursor` are decided."""
        line = self._lines.get(tenant)
        while line and line[0].last < cursor:
            line.popleft()
        if not line:
            self._lines.pop(tenant, None)

    def forget(self, tenant: str) -> None:
        self._lines.pop(tenant, None)

    def cause_of(self, tenant: str, seq: int) -> str | None:
        """The request that an undecided record came with."""
        return next((a.cause for a in self._lines.get(tenant, ()) if seq <= a.last), None)

    @property
    def oldest_s(self) -> float:
        """For how long the oldest undecided record has been here; 0 for none."""
        if not self._lines:
            return 0.0
        return self._clock_s() - min(line[0].at_s for line in self._lines.values())
