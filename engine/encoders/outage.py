"""An outage of an embedding endpoint: most calls fail at once meanwhile, and one now and then tries it."""

from __future__ import annotations

import logging
import math
import time

from undertow.engine.encoders.model_files import EncoderError
from undertow.engine.llm.circuit_breaker import backoff_s

log = logging.getLogger(__name__)

_FIRST_PAUSE = 3  # the attempt of `backoff_s`: 0.2 to 0.4 s


class EncoderDown(EncoderError):
    """An embedding endpoint cannot be used now. Nothing was stored, and later calls try it again.

    `silent_s`: for how long it has been so; infinite if it answers, but waiting would not help.
    """

    def __init__(self, reason: str, silent_s: float) -> None:
        super().__init__(reason, silent_s)  # these arguments make it picklable, to be sent by a shard
        self.silent_s = silent_s


class Outage:
    """Whether an endpoint is out of use. Used by several threads; a lost update costs one request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._since_s: float | None = None
        self._due_s, self._failures, self._reason = 0.0, 0, ""

    def check(self) -> bool:
        """Whether there is an outage, and an attempt is due. EncoderDown: none is due yet."""
        since_s, now_s = self._since_s, time.monotonic()
        if since_s is not None and now_s < self._due_s:
            raise EncoderDown(self._reason, now_s - since_s)
        return since_s is not None

    def noted(self, reason: str, retry_after_s: float = 0.0, *, waiting_helps: bool = True) -> EncoderDown:
        """The error of a request that has failed."""
        since_s, now_s = self._since_s, time.monotonic()
        if since_s is None:
            since_s = now_s
            log.warning("%s", reason)
        self._since_s = since_s = since_s if waiting_helps else -math.inf
        self._reason = reason
        if now_s >= self._due_s:  # not for each of the requests in flight
            self._due_s = now_s + max(retry_after_s, backoff_s(self._failures + _FIRST_PAUSE))
            self._failures += 1
        return EncoderDown(reason, now_s - since_s)

    def end(self) -> None:
        """A request has succeeded."""
        if self._since_s is not None:
            log.info("%s can be used again", self._url)
            self._since_s, self._due_s, self._failures = None, 0.0, 0
