"""What one LLM server can take now: its in-flight limit, its outages and refusals, backoff."""

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
    """At most `limit` requests at once; none in an outage, then one on trial until it succeeds.

    An outage is `_OUTAGE_AFTER_FAILURES` failures in a row over all requests. Without it thousands
    of waiting jobs would each keep knocking at a server that is gone. A server that refuses is out
    too, for as long as another does not. Who is out comes back by way of `knocked`.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        """`timeout_s`: after how long a request that is not answered fails."""
        self.limit = limit
        self.active = 0
        self.failures = 0
        self.refusal: ServerRefused | None = None
        self.on_trial = False
        self.silent_s: float | None = None
        """For how long failures, with no answer among them, have shown the server silent; None if healthy."""
        self.heard_s = 0.0
        """When a request last ended here, or began with nothing else under way (time.monotonic)."""
        self._timeout_s = timeout_s
        self._failing_since = 0.0

    @property
    def out(self) -> bool:
        return self.failures >= _OUTAGE_AFTER_FAILURES or self.refusal is not None

    @property
    def free(self) -> int:
        """How many more requests may begin now."""
        limit = self.limit if not self.out else 1 if self.on_trial else 0
        return max(0, limit - self.active)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next knock."""
        return _REFUSAL_PAUSE_S if self.refusal else backoff_s(self.failures - _OUTAGE_AFTER_FAILURES)

    def began(self) -> None:
        if not self.active:
            self.heard_s = time.monotonic()
        self.active += 1

    def answered(self) -> None:
        """A request got an answer, good or bad: nothing is wrong here."""
        self.heard_s = time.monotonic()
        self.failures, self.silent_s, self.refusal, self.on_trial = 0, None, None, False

    def refused(self, refusal: ServerRefused) -> None:
        self.answered()
        self.refusal = refusal

    def failed(self) -> None:
        """A request, still counted in `active`, met trouble on the way."""
        self.heard_s = time.monotonic()
        if self.out and not self.on_trial:  # sent before the outage was noticed: says nothing new
            return
        self._count_failure(others=self.active - 1)

    def knocked(self, answered: bool) -> None:
        """A knock at a server that is out: let one request try it, or wait longer."""
        if not self.out:  # a request that was under way has been answered meanwhile
            return
        if answered:
            self.on_trial = True
        else:
            self._count_failure(others=self.active)

    def lost(self) -> None:
        """Out at once: it does not even answer a knock."""
        self._count_failure(others=self.active)
        self.failures = max(self.failures, _OUTAGE_AFTER_FAILURES)

    def _count_failure(self, others: int) -> None:
        """Only a failure proves silence, and only where no other request may be at a slow reply.

        So neither a wait nor a request under way counts against the server. Whatever was under way
        at the first failure has ended `timeout_s` later, by a reply or not.
        """
        now = time.monotonic()
        self.failures += 1
        self.on_trial = False
        if self.silent_s is None:
            self._failing_since, self.silent_s = now, 0.0
        elapsed_s = now - self._failing_since
        if not others or elapsed_s >= self._timeout_s:
            self.silent_s = elapsed_s
