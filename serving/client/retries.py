"""When a failed call is retried, and after how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from undertow.serving.client.errors import Conflict, RateLimited, ServiceError, Unavailable, Unreachable

# the response to a retry whose first try is still under way at the service
UNDER_WAY = "urn:undertow:error:under-way"
# the caller decides whether another LLM call is worth its price; a service without an LLM will not get one
FOR_GOOD = frozenset(
    {"urn:undertow:error:llm-reply", "urn:undertow:error:llm-broke-off", "urn:undertow:error:no-llm"}
)


@dataclass(frozen=True, slots=True)
class Retries:
    """How patient a client is. ValueError.

    Retried: no response (Unreachable), and a service that is busy or away (429, 503; not a bad reply of its
    LLM), as long as the next try begins within `patience_s`; 0: never. The waits double from `first_s` to
    `longest_s`, each shortened by a random part up to half, and are no shorter than the service asks for.
    A changing call has an Idempotency-Key, so that it takes effect once however often it is sent.
    """

    patience_s: float = 30.0
    first_s: float = 0.25
    longest_s: float = 8.0

    def __post_init__(self) -> None:
        if self.patience_s < 0 or not 0 < self.first_s <= self.longest_s:
            raise ValueError(
                f"patience_s {self.patience_s}, first_s {self.first_s}, longest_s {self.longest_s}: "
                "give a patience of 0 or more, and 0 < first_s <= longest_s"
            )

    def begin(self, now: Callable[[], float] = time.monotonic) -> Waits:
        return Waits(self, now)


class Waits:
    """The waits of one call."""

    def __init__(self, retries: Retries, now: Callable[[], float]) -> None:
        self._retries = retries
        self._now = now
        self._ends_at = now() + retries.patience_s
        self._next_s = retries.first_s

    def after(self, failure: ServiceError) -> float | None:
        """Seconds until the next try; None: there is none."""
        if not _may_pass(failure):
            return None
        wait_s = max(random.uniform(self._next_s / 2, self._next_s), failure.retry_after_s or 0.0)
        self._next_s = min(2 * self._next_s, self._retries.longest_s)
        return wait_s if self._now() + wait_s < self._ends_at else None


def _may_pass(failure: ServiceError) -> bool:
    if isinstance(failure, Conflict):
        return failure.kind == UNDER_WAY
    if failure.kind in FOR_GOOD:
        return False
    return isinstance(failure, Unreachable | RateLimited | Unavailable)
