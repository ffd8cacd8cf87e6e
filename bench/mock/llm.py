"""A mock LLM in process, for tests and benchmarks; `mock_server` is the same behind HTTP.

It gives the replies of `mock_replies`, and is never a default.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from undertow.bench.mock.replies import MockReplies, share, usage_of, words_of
from undertow.engine.base.model import Usage
from undertow.engine.llm.client import BadReply, Completion, OnCall, OnText, read_reply
from undertow.prompts.builders import Prompt, repair_messages

__all__ = ["MODEL", "MockLLM", "MockReplies"]

MODEL = "mock-llm"


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    prompt: Prompt = field(compare=False)
    tenant: str = field(compare=False)
    started_s: float = field(compare=False)
    future: Future[Completion] = field(compare=False)
    on_text: OnText | None = field(compare=False, default=None)


class MockLLM:
    """`LLMClient` without a server: the same reply function, validation and repair, in process.

    With no latency and no jitter `submit` returns a future that is done; otherwise one timer
    thread finishes it `latency_s` and up to `jitter_s` (by hash of the prompt) later. Any number
    of requests may be in flight; `max_in_flight` keeps the most, `calls` counts by operation.
    """

    def __init__(
        self,
        replies: MockReplies | None = None,
        *,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        on_call: OnCall | None = None,
    ) -> None:
        self.replies = replies or MockReplies()
        self.calls: Counter[str] = Counter()
        self.max_in_flight = 0
        self._latency_s, self._jitter_s = latency_s, jitter_s
        self.on_call = on_call
        self._numbers = itertools.count()
        self._due: list[_Due] = []
        self._in_flight = 0
        self._changed = threading.Condition()
        self._closed = False
        self._timer = threading.Thread(target=self._tick, name="mock-llm", daemon=True)
        if latency_s or jitter_s:
            self._timer.start()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def unreachable_s(self) -> float | None:
        return None

    @property
    def last_error(self) -> str | None:
        return None

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        return self._ask(prompt, tenant)

    def stream(self, prompt: Prompt, *, tenant: str, on_text: OnText) -> Future[Completion]:
        """The words of the reply are told one by one, without a pause, before the future is done."""
        return self._ask(prompt, tenant, on_text)

    def _ask(self, prompt: Prompt, tenant: str, on_text: OnText | None = None) -> Future[Completion]:
        if self._closed:
            raise RuntimeError("this LLM client is closed")
        now_s = time.perf_counter()
        due = _Due(now_s, next(self._numbers), prompt, tenant, now_s, Future(), on_text)
        if not self._timer.is_alive():
            self._finish(due)
            return due.future
        key = f"{self.replies.seed}\x1f{prompt.user}".encode()
        due.at_s += self._latency_s + self._jitter_s * share(key, "jitter")
        with self._changed:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            heapq.heappush(self._due, due)
            self._changed.notify()
        return due.future

    def cancel(self, future: Future[Completion]) -> None:
        future.cancel()

    def close(self) -> None:
        """Cancel what is not done, end the timer thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._timer.is_alive():
            self._timer.join()
        for due in self._due:
            due.future.cancel()
            due.future.set_running_or_notify_cancel()
        self._due.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick(self) -> None:
        while (due := self._next_due()) is not None:
            self._finish(due)

    def _next_due(self) -> _Due | None:
        """Wait for the next request's time; None when closed."""
        with self._changed:
            while not self._closed:
                wait_s = self._due[0].at_s - time.perf_counter() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    self._in_flight -= 1
                    return heapq.heappop(self._due)
                self._changed.wait(wait_s)
            return None

    def _finish(self, due: _Due) -> None:
        if not due.future.set_running_or_notify_cancel():
            return
        try:
            completion = self._complete(due)
        except BadReply as bad:
            due.future.set_exception(bad)
        else:
            if due.on_text is not None:
                for word in words_of(str(completion.reply)):
                    due.on_text(word)
            due.future.set_result(completion)

    def _complete(self, due: _Due) -> Completion:
        prompt, usage, problem = due.prompt, Usage(), ""
        schema = None if prompt.reply is None else prompt.reply.wire_schema()
        messages = prompt.messages
        for _ in ("first", "repair"):
            content = self.replies.reply(messages, schema)
            used = usage_of(messages, content)
            usage += used
            self.calls[prompt.operation] += 1
            try:
                reply = read_reply(prompt, content)
            except ValueError as invalid:
                problem = str(invalid)
                messages = repair_messages(prompt, content, problem)
                self._trace(due, used, "bad")
            else:
                self._trace(due, used, "ok")
                return Completion(reply, usage, MODEL, time.perf_counter() - due.started_s)
        raise BadReply(problem, usage)

    def _trace(self, due: _Due, usage: Usage, outcome: str) -> None:
        if self.on_call is not None:
            operation, now_s = due.prompt.operation, time.perf_counter()
            self.on_call(due.tenant, operation, due.started_s, now_s, usage, outcome)
