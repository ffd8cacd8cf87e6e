"""Streamed answers: a shard keeps the text that an LLM has written so far; callers poll for more of it.

Callers in another process poll in the same way, and repeat a poll that got lost. If the polls of an answer
end, its LLM call is cancelled.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow.engine.base.model import UndertowError

if TYPE_CHECKING:
    from undertow.engine.base.results import Answer

# how long a poll waits for text before it returns without any
POLL_S = 10.0
# an answer without polls is cancelled and forgotten after so long
ABANDONED_S = 60.0

Said = tuple[str, "Answer | None"]
"""(new text, the answer if that is all)."""


class UnknownTicket(UndertowError):
    """The shard has no such answer: it was restarted, or the answer was not polled for long. Ask anew."""


@dataclass(frozen=True, slots=True)
class AnswerTicket:
    """An answer that a shard is giving."""

    shard: str
    id: str


class AnswerStream:
    """One answer, as its text comes. Safe from several threads."""

    def __init__(self, tenant: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.dropped = False
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._text = ""
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        # polls: from which character, since when
        self._waiting: list[tuple[int, float, Future[Said]]] = []
        self._asked_s = clock_s()

    @property
    def begun(self) -> bool:
        """Whether there is some text."""
        return bool(self._text)

    @property
    def abandoned(self) -> bool:
        """Whether no caller waits for it any more."""
        with self._lock:
            idle = not self._waiting and self._clock_s() - self._asked_s > ABANDONED_S
        return self.dropped or idle

    def add(self, text: str) -> None:
        """Append text."""
        with self._lock:
            self._text += text
        self.serve()

    def end(self, answered: Future[Answer]) -> None:
        """Set the answer, or its error."""
        with self._lock:
            self._error = answered.exception()
            self._answer = None if self._error else answered.result()
        self.serve()

    def more(self, at: int) -> Future[Said]:
        """The text from `at` on, once there is some or POLL_S have passed. Raises the answer's error."""
        asked: Future[Said] = Future()
        asked.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._lock:
            self._waiting.append((at, self._clock_s(), asked))
        self.serve()
        return asked

    def serve(self) -> None:
        """Answer the polls that have new text, or have waited for POLL_S."""
        with self._lock:
            now_s = self._clock_s()
            over = self._answer is not None or self._error is not None
            served = [w for w in self._waiting if over or w[0] < len(self._text) or now_s - w[1] >= POLL_S]
            self._waiting = [w for w in self._waiting if w not in served]
            self._asked_s = now_s if served else self._asked_s
        for at, _, asked in served:
            if self._error is not None and at >= len(self._text):
                asked.set_exception(self._error)
            else:
                asked.set_result((self._text[at:], None if self._error else self._answer))


class AnswerStreams:
    """The answers that one shard is giving, by ticket. Safe from several threads."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._streams: dict[str, AnswerStream] = {}

    def add(self, stream: AnswerStream) -> AnswerTicket:
        """Add a stream. Abandoned ones are forgotten."""
        kept = {id: earlier for id, earlier in self._streams.items() if not earlier.abandoned}
        ticket = AnswerTicket(self._shard, secrets.token_hex(8))
        self._streams = {**kept, ticket.id: stream}
        return ticket

    def more(self, id: str, at: int) -> Future[Said]:
        """See AnswerStream.more. UnknownTicket."""
        if (stream := self._streams.get(id)) is not None:
            return stream.more(at)
        unknown: Future[Said] = Future()
        unknown.set_exception(
            UnknownTicket(f"shard {self._shard} gives no such answer (any more). Ask again.")
        )
        return unknown

    def forget(self, tenant: str) -> None:
        """Cancel and forget all answers of a tenant."""
        for stream in self._streams.values():
            stream.dropped |= stream.tenant == tenant
        self._streams = {id: stream for id, stream in self._streams.items() if stream.tenant != tenant}

    def drop(self, id: str) -> None:
        """Cancel an answer whose caller has gone."""
        if (stream := self._streams.get(id)) is not None:
            stream.dropped = True
