"""Answers in pieces: a shard keeps what an LLM has written so far, and whoever asks is told what is new.

Asked again and again, each time from where they are, callers in another process are served as those in this
one, and a question that gets lost on the way is asked again. Who asks no more has gone: the LLM call is given
up.
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

# how long a question for more waits for a piece, before it is told that there is none yet
POLL_S = 10.0
# an answer that nobody has asked for is given up, and forgotten, after so long
ABANDONED_S = 60.0

Said = tuple[str, "Answer | None"]
"""(text from where one asked, the answer if that was its end)."""


class UnknownTicket(UndertowError):
    """The shard gives no such answer: it was restarted, or nobody asked for so long. Ask anew."""


@dataclass(frozen=True, slots=True)
class AnswerTicket:
    """An answer that a shard is giving."""

    shard: str
    id: str


class AnswerStream:
    """One answer, as it comes. Safe from several threads."""

    def __init__(self, tenant: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.dropped = False
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._text = ""
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        # who waits: from where, and since when
        self._waiting: list[tuple[int, float, Future[Said]]] = []
        self._asked_s = clock_s()

    @property
    def begun(self) -> bool:
        """Whether some of it was told."""
        return bool(self._text)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        with self._lock:
            idle = not self._waiting and self._clock_s() - self._asked_s > ABANDONED_S
        return self.dropped or idle

    def add(self, text: str) -> None:
        """The next piece."""
        with self._lock:
            self._text += text
        self._serve()

    def end(self, answered: Future[Answer]) -> None:
        """The answer is there, or why there is none."""
        with self._lock:
            self._error = answered.exception()
            self._answer = None if self._error else answered.result()
        self._serve()

    def more(self, at: int) -> Future[Said]:
        """The text from `at` on, once there is some, or the end; at times nothing. The answer's error."""
        asked: Future[Said] = Future()
        asked.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._lock:
            self._waiting.append((at, self._clock_s(), asked))
        self._serve()
        return asked

    def tick(self) -> None:
        """Time has passed: who has waited for long is told that nothing came."""
        self._serve()

    def _serve(self) -> None:
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
        self._tellings: dict[str, AnswerStream] = {}

    def add(self, telling: AnswerStream) -> AnswerTicket:
        """A new one. Those that nobody asks for any more are forgotten."""
        kept = {id: earlier for id, earlier in self._tellings.items() if not earlier.abandoned}
        ticket = AnswerTicket(self._shard, secrets.token_hex(8))
        self._tellings = {**kept, ticket.id: telling}
        return ticket

    def more(self, id: str, at: int) -> Future[Said]:
        """See Telling.more. UnknownTicket."""
        if (telling := self._tellings.get(id)) is not None:
            return telling.more(at)
        unknown: Future[Said] = Future()
        unknown.set_exception(
            UnknownTicket(f"shard {self._shard} gives no such answer (any more). Ask again.")
        )
        return unknown

    def forget(self, tenant: str) -> None:
        """Give up and forget all that a tenant is told."""
        tellings, kept = self._tellings, {}
        for id, telling in tellings.items():
            if telling.tenant == tenant:
                telling.dropped = True
            else:
                kept[id] = telling
        self._tellings = kept

    def drop(self, id: str) -> None:
        """Its caller has gone."""
        if (telling := self._tellings.get(id)) is not None:
            telling.dropped = True
