"""Requests to the service at a fixed rate, whether it keeps up or not, and their outcomes.

An open loop: each request is due at a moment drawn beforehand (Poisson arrivals), and its latency counts from
then. A service that stalls gets as many requests, and its latencies include the waiting.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
import orjson

from undertow.bench.system.parts import percentiles
from undertow.bench.system.service.world import Request
from undertow.engine.cluster.processes.worker import new_loop

MOST_CONNECTIONS = 4_000  # with few, requests would wait here, and not in the service
# after the last request was due
ANSWERS_S = 120.0
# the status of a request without an answer
NO_ANSWER = 0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

Result = TypeVar("Result")
Done = Callable[[int, bytes, float], None]  # the status, the body, when it was sent


class Answer(NamedTuple):
    """What became of a request. Times in seconds since the stretch began; `body`: of an add."""

    adds: bool
    tenant: str
    due_s: float
    sent_s: float
    done_s: float
    status: int
    body: bytes

    @property
    def latency_s(self) -> float:
        return self.done_s - self.due_s

    def since(self, start_s: float) -> Answer:
        due_s, sent_s, done_s = (at_s - start_s for at_s in (self.due_s, self.sent_s, self.done_s))
        return self._replace(due_s=due_s, sent_s=sent_s, done_s=done_s)


@dataclass(slots=True)
class Outcome:
    """The answers to the requests of one stretch of time."""

    rate: float
    seconds: float
    answers: list[Answer] = field(default_factory=list)
    generator_cpu_s: float | None = None

    def figures(self) -> dict[str, Any]:
        """Plain data; latencies in milliseconds. Answers after the end do not count for the rate."""
        in_stretch = sum(a.status == 200 and a.done_s <= self.seconds for a in self.answers)
        return {
            "asked_per_s": self.rate,
            "answered_per_s": round(in_stretch / self.seconds, 1),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "search_ms": _ms(self.latencies_s(adds=False)),
            "add_ms": _ms(self.latencies_s(adds=True)),
            "refused_ms": _ms([a.latency_s for a in self.answers if a.status not in (200, NO_ANSWER)]),
            # how late the generator itself was, a free connection included; latencies include it
            "sent_late_ms": _ms([a.sent_s - a.due_s for a in self.answers]),
            "generator_cpu_share": self.generator_cpu_s and round(self.generator_cpu_s / self.seconds, 3),
        }

    def part(self, rate: float, start_s: float, seconds: float) -> Outcome:
        """What was due in so many seconds from `start_s` on, with times since then."""
        due = (a for a in self.answers if start_s <= a.due_s < start_s + seconds)
        return Outcome(rate, seconds, [answer.since(start_s) for answer in due])

    @property
    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers)

    def latencies_s(self, *, adds: bool) -> list[float]:
        """Of answers with 200."""
        return [a.latency_s for a in self.answers if a.status == 200 and a.adds is adds]

    def p95_ms(self, *, adds: bool) -> float:
        """Infinite where any request was not answered with 200, or none of this kind was made."""
        latencies_s = self.latencies_s(adds=adds)
        if not latencies_s or set(self.statuses) != {200}:
            return float("inf")
        return float(np.percentile(latencies_s, 95) * 1e3)

    def acknowledged(self) -> dict[str, set[str]]:
        """The ids of turns that were acknowledged, by tenant."""
        ids: dict[str, set[str]] = {}
        for answer in self.answers:
            if answer.adds and answer.status == 200:
                results = orjson.loads(answer.body)["results"]
                ids.setdefault(answer.tenant, set()).update(result["id"] for result in results)
        return ids


def _ms(latencies_s: Sequence[float]) -> dict[str, float]:
    return percentiles([1e3 * latency_s for latency_s in latencies_s], digits=2)


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run on uvloop where it is installed: the generator shares the machine with the service."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of a Poisson process, in seconds."""
    drawn, moments = random.Random(seed), []
    at_s = drawn.expovariate(rate)
    while at_s < seconds:
        moments.append(at_s)
        at_s += drawn.expovariate(rate)
    return moments


class _Connection(asyncio.Protocol):
    """A kept-alive connection with at most one request under way."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._done: Done | None = None
        self._sent_s = 0.0
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, sent: bytes, done: Done) -> None:
        assert self._transport is not None
        self._done, self._sent_s = done, time.perf_counter()
        self._transport.write(sent)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if (head_ends := self._received.find(b"\r\n\r\n")) < 0:
            return
        head = bytes(self._received[:head_ends])
        length = _LENGTH.search(head)
        body_ends = head_ends + 4 + (int(length[1]) if length else 0)
        if b"chunked" in head:  # one request at a time: its last bytes are the last that have come
            if not self._received.endswith(b"\r\n0\r\n\r\n"):
                return
            body_ends = len(self._received)
        if len(self._received) < body_ends:
            return
        status, body = int(head[9:12]), bytes(self._received[head_ends + 4 : body_ends])
        self._received.clear()
        self._finish(status, body)
        if b"\r\nconnection: close" in head.lower():
            self.close()
        else:
            self._pool.released(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        self._finish(NO_ANSWER, b"")

    def _finish(self, status: int, body: bytes) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(status, body, self._sent_s)


class _Pool:
    """Connections to one address, opened as they are needed, and the requests that wait for one."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._host, self._port = address.hostname, address.port
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._waiting: deque[tuple[bytes, Done]] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    def send(self, sent: bytes, done: Done) -> None:
        if self._idle:
            self._idle.pop().send(sent, done)
            return
        self._waiting.append((sent, done))
        self._open_another()

    def _open_another(self) -> None:
        if len(self._open) + len(self._opening) < MOST_CONNECTIONS:
            task = asyncio.get_running_loop().create_task(self._opened())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _opened(self) -> None:
        try:
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self), self._host, self._port
            )
        except OSError:
            if self._waiting:
                self._waiting.popleft()[1](NO_ANSWER, b"", time.perf_counter())
            return
        self._open.add(made)
        self.released(made)

    def released(self, connection: _Connection) -> None:
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting:
            self._open_another()

    def close(self) -> None:
        for connection in self._open:
            connection.close()


class Caller:
    """Sends prepared requests over a pool of connections. Use and close it in one event loop.

    It speaks HTTP itself: library clients use as much of a core as the service, and both share this machine.
    """

    def __init__(self, url: str) -> None:
        self._pool = _Pool(url)

    async def run(self, requests: Sequence[Request], due_s: Sequence[float], outcome: Outcome) -> Outcome:
        """Send each request when it is due; returns when each was answered or failed. TimeoutError."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        under_way = 0
        ended = asyncio.Event()

        def send(request: Request, due: float) -> None:
            def done(status: int, body: bytes, sent_s: float) -> None:
                nonlocal under_way
                times = due, sent_s - began_s, time.perf_counter() - began_s
                kept = body if request.adds else b""
                outcome.answers.append(Answer(request.adds, request.tenant, *times, status, kept))
                under_way -= 1
                if not under_way:
                    ended.set()

            self._pool.send(request.sent, done)

        for request, due in zip(requests, due_s, strict=True):
            while (early_s := began_s + due - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            under_way += 1
            send(request, due)
        while under_way:
            ended.clear()
            await asyncio.wait_for(ended.wait(), ANSWERS_S)
        outcome.generator_cpu_s = time.process_time() - began_cpu_s
        return outcome

    async def all_of(self, requests: Sequence[Request], at_once: int) -> Outcome:
        """Send all, so many at a time. RuntimeError: one was not answered with 200."""
        outcome, waiting = Outcome(0.0, 1.0), iter(requests)

        async def one_after_another() -> None:
            for request in waiting:
                await self.run([request], [0.0], outcome)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))
        if set(outcome.statuses) - {200}:
            raise RuntimeError(f"requests of the preparation failed, by status: {dict(outcome.statuses)}")
        return outcome

    def close(self) -> None:
        self._pool.close()
