"""Simulated time: the engine's thread, the LLM client's beside it, and the servers behind that.

Python runs one thread at a time, so what the client's thread does with a reply comes on top of
whatever the engine's thread is doing. Nothing here reads a real clock.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from undertow.bench.system.capacity.profile import Cost, LLMServer, Profile
from undertow.engine.base.model import Usage
from undertow.engine.base.trace import Trace
from undertow.engine.llm.client import PRIORITY, Completion, OnCall
from undertow.prompts.builders import Prompt
from undertow.prompts.reply_schemas import Reply

Write = Callable[[Prompt, str], Reply]
"""(prompt, tenant) -> what the LLM replies."""


@dataclass(order=True, slots=True)
class _Call:
    key: tuple[float, float]
    prompt: Prompt = field(compare=False)
    tenant: str = field(compare=False)
    submitted_s: float = field(compare=False)
    future: Future[Completion] = field(compare=False)


class Gauge:
    """A quantity over time: its time-weighted mean and its largest value."""

    def __init__(self) -> None:
        self.most = 0.0
        self._area = self._since_s = self._last_s = self._value = 0.0

    def restart(self, now_s: float) -> None:
        """Forget what was before."""
        self.most, self._area, self._since_s, self._last_s = self._value, 0.0, now_s, now_s

    def set(self, now_s: float, value: float) -> None:
        self._area += self._value * (now_s - self._last_s)
        self._last_s, self._value = now_s, value
        self.most = max(self.most, value)

    def mean(self, now_s: float) -> float:
        self.set(now_s, self._value)
        return self._area / (now_s - self._since_s) if now_s > self._since_s else self._value


class SimulatedLLM:
    """`Completions` whose servers are a profile's: so many slots, so many seconds a call."""

    def __init__(self, servers: LLMServer, write: Write, *, seed: int) -> None:
        self._servers, self._write = servers, write
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._busy: list[_Call] = []  # by the time they end
        self._queue: list[_Call] = []  # by urgency, as the real client's
        self.now_s = 0.0
        self.calls: Counter[str] = Counter()
        self.on_call: OnCall | None = None
        self.delivered = 0  # replies since the shard last looked
        self.at_servers, self.waiting = Gauge(), Gauge()
        self.tenant_s: defaultdict[str, float] = defaultdict(float)
        """Seconds from prompt to reply, by tenant: they cannot overlap within one tenant."""

    @property
    def in_flight(self) -> int:
        return len(self._busy)

    @property
    def unreachable_s(self) -> float | None:
        return None

    @property
    def last_error(self) -> str | None:
        return None

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        call = _Call((PRIORITY[prompt.operation], next(self._numbers)), prompt, tenant, self.now_s, Future())
        heapq.heappush(self._queue, call)
        self._start(self.now_s)
        return call.future

    def cancel(self, future: Future[Completion]) -> None:
        future.cancel()

    def close(self) -> None:
        """Nothing to end: it has no thread."""

    @property
    def due_s(self) -> float | None:
        """When the next reply leaves a server."""
        return self._busy[0].key[0] if self._busy else None

    def deliver(self, at_s: float) -> None:
        """The next reply has been read, at `at_s`; its slot was free from when it left the server."""
        call = heapq.heappop(self._busy)
        self._start(call.key[0])
        self.calls[call.prompt.operation] += 1
        self.delivered += 1
        self.tenant_s[call.tenant] += at_s - call.submitted_s
        reply = self._write(call.prompt, call.tenant)
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(Completion(reply, Usage(1), "simulated", at_s - call.submitted_s))

    def _start(self, at_s: float) -> None:
        slots = self._servers.slots
        while self._queue and (slots is None or len(self._busy) < slots):
            call = heapq.heappop(self._queue)
            spread = self._servers.spread * self._random.uniform(-1, 1)
            seconds = self._servers.seconds[call.prompt.operation] * (1 + spread)
            call.key = (at_s + seconds, next(self._numbers))
            heapq.heappush(self._busy, call)
        self.at_servers.set(self.now_s, len(self._busy))
        self.waiting.set(self.now_s, len(self._queue))


class Clock:
    """The time of one shard, and what it was spent on."""

    def __init__(self, profile: Profile, llm: SimulatedLLM, slowdown: float) -> None:
        """`slowdown`: what all work of the shard's process takes, in multiples of the profile's costs."""
        self._profile, self._llm, self._slowdown = profile, llm, slowdown
        self.now_s = 0.0
        self.charged = 0  # runs of phases so far
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    def charge(self, phase: str, items: float, extra: float = 0.0) -> None:
        """Let a run of a phase pass."""
        seconds = self._profile.cost(phase).seconds(items, extra) * self._slowdown
        self.spent_s[phase] += seconds
        self.charged += 1
        self._pass(self.now_s + seconds)

    def wait(self, until_s: float | None) -> bool:
        """The engine has nothing to do: to the next reply, or `until_s` if that is sooner. False: neither."""
        due_s = self._llm.due_s
        if due_s is not None and (until_s is None or due_s < until_s):
            self._set(max(self.now_s, due_s))
            self._read_reply()
            return True
        if until_s is None:
            return False
        self._pass(max(self.now_s, until_s))
        return True

    def _pass(self, end_s: float) -> None:
        """Time goes on to `end_s`, and by as much again as replies on the way take to be read."""
        while (due_s := self._llm.due_s) is not None and due_s <= end_s:
            self._set(max(self.now_s, due_s))
            began_s = self.now_s
            self._read_reply()
            end_s += self.now_s - began_s
        self._set(end_s)

    def _read_reply(self) -> None:
        seconds = self._reply.seconds(1) * self._slowdown
        self.spent_s["reply"] += seconds
        self._set(self.now_s + seconds)
        self._llm.deliver(self.now_s)

    @property
    def _reply(self) -> Cost:
        return self._profile.cost("reply")

    def _set(self, now_s: float) -> None:
        self.now_s = self._llm.now_s = now_s


class SimulatedTrace(Trace):
    """Charges each phase, as the scheduler names it, when it ends. So the names cannot drift apart."""

    def __init__(self, clock: Clock, scanned: Callable[[], int], running: Callable[[], int]) -> None:
        """`scanned`: arena bytes read since it was last asked; `running`: jobs under way."""
        super().__init__()
        self._clock, self._scanned, self._running = clock, scanned, running
        self._queries = 0

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        before = self._running() if name == "decide" else 0
        yield
        (count,) = (int(str(value)) for value in args.values())
        extra = self._scanned()
        if name == "decide":  # by the queries of the gate inside it, and the jobs that it has begun
            count, extra = self._queries, max(0, self._running() - before)
            self._queries = 0
        elif "queries" in args:
            self._queries = count
        if count:
            self._clock.charge(name, count, extra)
