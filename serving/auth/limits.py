"""What a key may use: requests per second as a token bucket, and the most LLM tokens that an answer takes."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from undertow.engine.base.model import AnswerMode
from undertow.serving.auth.principal import Principal

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings

NS_PER_S = 1_000_000_000
MOST_BUCKETS = 65_536
# maximum prompts an answer, by mode (engine/search/answer_modes.py); a bad reply is asked for once more
PROMPTS: Mapping[AnswerMode, int] = {"hybrid": 1, "best_effort": 3}
CALLS_A_PROMPT = 2


def answer_tokens(engine: Settings, mode: AnswerMode | None = None) -> int:
    """The most that an answer in this mode (None: as set) may take; a budget must have it left."""
    return PROMPTS[mode or engine.answer_mode] * CALLS_A_PROMPT * engine.context_tokens


class RequestRates:
    """A token bucket per key: `burst_size` requests at once, `requests_per_s` in the long run. Thread-safe.

    The generic cell rate algorithm: only the time at which a bucket is full again is stored, in whole
    nanoseconds, so that a caller who waits as long as it was told is let through.
    """

    def __init__(
        self, *, clock_ns: Callable[[], int] = time.monotonic_ns, most_buckets: int = MOST_BUCKETS
    ) -> None:
        self._clock_ns = clock_ns
        self._most_buckets = most_buckets
        self._full_at_ns: dict[str, int] = {}
        self._taking = threading.Lock()

    def __len__(self) -> int:
        """The number of buckets stored."""
        return len(self._full_at_ns)

    def take(self, principal: Principal) -> float:
        """0 if a request may begin now, which is then counted; else how many seconds to wait."""
        limits = principal.limits
        if limits.requests_per_s is None:
            return 0.0
        interval_ns = round(NS_PER_S / limits.requests_per_s)
        with self._taking:
            now_ns = self._clock_ns()
            full_at_ns = max(self._full_at_ns.get(principal.key_id, now_ns), now_ns) + interval_ns
            wait_ns = full_at_ns - limits.burst_size * interval_ns - now_ns
            if wait_ns > 0:
                return wait_ns / NS_PER_S
            self._full_at_ns[principal.key_id] = full_at_ns
            if len(self._full_at_ns) > self._most_buckets:
                self._make_room(now_ns)
            return 0.0

    def _make_room(self, now_ns: int) -> None:
        """Drop the full buckets, then the fullest others until an eighth of the room is free."""
        lacking = {key: full_at for key, full_at in self._full_at_ns.items() if full_at > now_ns}
        keep = self._most_buckets - self._most_buckets // 8
        self._full_at_ns = dict(heapq.nlargest(keep, lacking.items(), key=lambda item: item[1]))
