"""A mock LLM in process, for tests and benchmarks; `mock.server` offers the same over HTTP.

It gives the replies of `mock.replies`, and is never a default.
"""

from __future__ import annotations

import sched
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from undertow.bench.mock.replies import MockReplies, share, usage_of, words_of
from undertow.engine.base.model import Usage
from undertow.engine.llm.client import BadReply, Completion, OnCall, OnText, read_reply
from undertow.prompts.builders import Prompt, repair_messages

__all__ = ["MODEL", "MockLLM", "MockReplies"]

MODEL = "mock-llm"


@dataclass(frozen=True, slots=True)
class _Call:
    prompt: Prompt
    tenant: str
    on_text: OnText | None
    started_s: float = field(default_factory=time.perf_counter)
    future: Future[Completion] = field(default_factory=Future)


class MockLLM(AbstractContextManager["MockLLM"]):
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
        self.on_call = on_call
        self._latency_s, self._jitter_s = latency_s, jitter_s
        self._waiting: set[Future[Completion]] = set()
        self._schedule = sched.scheduler(time.perf_counter)
        self._changed = threading.Event()
        self._closed = False
        self._timer = threading.Thread(target=self._tick, name="mock-llm", daemon=True)
        if latency_s or jitter_s:
            self._timer.start()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    @property
    def unreachable_s(self) -> float | None:
        return None

    @property
    def last_error(self) -> str | None:
        return None

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        return self._ask(prompt, tenant)

    def stream(self, prompt: Prompt, *, tenant: str, on_text: OnText) -> Future[Completion]:
        """Passes the reply to `on_text` word by word, without a pause, before the future is done."""
        return self._ask(prompt, tenant, on_text)

    def _ask(self, prompt: Prompt, tenant: str, on_text: OnText | None = None) -> Future[Completion]:
        if self._closed:
            raise RuntimeError("this LLM client is closed")
        call = _Call(prompt, tenant, on_text)
        if not self._timer.is_alive():
            self._finish(call)
            return call.future
        key = f"{self.replies.seed}\x1f{prompt.user}".encode()
        delay_s = self._latency_s + self._jitter_s * share(key, "jitter")
        self._waiting.add(call.future)
        self.max_in_flight = max(self.max_in_flight, len(self._waiting))
        self._schedule.enterabs(call.started_s + delay_s, 0, self._finish, (call,))
        self._changed.set()
        return call.future

    def cancel(self, future: Future[Completion]) -> None:
        future.cancel()

    def close(self) -> None:
        """Cancel what is not done, end the timer thread."""
        self._closed = True
        self._changed.set()
        if self._timer.is_alive():
            self._timer.join()
        for future in self._waiting:
            future.cancel()
            future.set_running_or_notify_cancel()
        self._waiting.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick(self) -> None:
        while not self._closed:
            self._changed.wait(self._schedule.run(blocking=False))
            self._changed.clear()

    def _finish(self, call: _Call) -> None:
        self._waiting.discard(call.future)
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            completion = self._complete(call)
        except BadReply as bad:
            call.future.set_exception(bad)
        else:
            if call.on_text is not None:
                for word in words_of(str(completion.reply)):
                    call.on_text(word)
            call.future.set_result(completion)

    def _complete(self, call: _Call) -> Completion:
        prompt, usage, problem = call.prompt, Usage(), ""
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
                self._trace(call, used, "bad")
            else:
                self._trace(call, used, "ok")
                return Completion(reply, usage, MODEL, time.perf_counter() - call.started_s)
        raise BadReply(problem, usage)

    def _trace(self, call: _Call, usage: Usage, outcome: str) -> None:
        if self.on_call is not None:
            operation, now_s = call.prompt.operation, time.perf_counter()
            self.on_call(call.tenant, operation, call.started_s, now_s, usage, outcome)
