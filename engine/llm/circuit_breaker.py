"""Circuit breaker of one LLM server: in-flight limit, outages, refusals and backoff."""

from __future__ import annotations

import random
import time

from undertow.engine.llm.replies import ServerRefused

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 15.0
_OUTAGE_AFTER_FAILURES = 12
_REFUSAL_PAUSE_S = 60.0


def backoff_s(attempt: int) -> float:
    """Jittered exponential wait before attempt `attempt + 2`, at most 15 s."""
    longest_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(attempt, 16))
    return random.uniform(0.5, 1.0) * longest_s


class CircuitBreaker:
    """Closed: at most `limit` requests in flight. Open: none. Half-open: one trial request.

    It opens after `_OUTAGE_AFTER_FAILURES` consecutive failures over all requests. Otherwise thousands of
    waiting jobs would each keep trying a server that is gone. It also opens on a refusal. `probed` makes it
    half-open, and an answer closes it.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        """`timeout_s`: the timeout of a request."""
        self.limit = limit
        self.active = 0
        self.failures = 0
        self.refusal: ServerRefused | None = None
        self.half_open = False
        self.silent_s: float | None = None
        """How long consecutive failures have shown the server silent, in seconds; None if healthy."""
        self.heard_s = 0.0
        """When a request last ended, or began while none was in flight (time.monotonic)."""
        self._timeout_s = timeout_s
        self._failing_since = 0.0

    @property
    def is_open(self) -> bool:
        return self.failures >= _OUTAGE_AFTER_FAILURES or self.refusal is not None

    @property
    def free(self) -> int:
        """The number of requests that may begin now."""
        limit = self.limit if not self.is_open else 1 if self.half_open else 0
        return max(0, limit - self.active)

    @property
    def pause_s(self) -> float:
        """The wait before the next probe."""
        return _REFUSAL_PAUSE_S if self.refusal else backoff_s(self.failures - _OUTAGE_AFTER_FAILURES)

    def began(self) -> None:
        if not self.active:
            self.heard_s = time.monotonic()
        self.active += 1

    def answered(self) -> None:
        """A request got an answer, good or bad: the server works."""
        self.heard_s = time.monotonic()
        self.failures, self.silent_s, self.refusal, self.half_open = 0, None, None, False

    def refused(self, refusal: ServerRefused) -> None:
        self.answered()
        self.refusal = refusal

    def failed(self) -> None:
        """A request, still counted in `active`, failed on the way."""
        self.heard_s = time.monotonic()
        if self.is_open and not self.half_open:  # sent before the outage was noticed: no new information
            return
        self._count_failure(others=self.active - 1)

    def probed(self, answered: bool) -> None:
        """Result of a probe of a failed server: allow one trial request, or wait longer."""
        if not self.is_open:  # a request in flight was answered meanwhile
            return
        if answered:
            self.half_open = True
        else:
            self._count_failure(others=self.active)

    def lost(self) -> None:
        """Open at once: the server does not even answer a probe."""
        self._count_failure(others=self.active)
        self.failures = max(self.failures, _OUTAGE_AFTER_FAILURES)

    def _count_failure(self, others: int) -> None:
        """Count a failure. It shows silence only if no other request may be getting a slow reply.

        So neither waiting nor a request in flight counts against the server. All requests that were in flight
        at the first failure have ended `timeout_s` later.
        """
        now = time.monotonic()
        self.failures += 1
        self.half_open = False
        if self.silent_s is None:
            self._failing_since, self.silent_s = now, 0.0
        elapsed_s = now - self._failing_since
        if not others or elapsed_s >= self._timeout_s:
            self.silent_s = elapsed_s
