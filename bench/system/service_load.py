"""Requests to the service at a fixed rate, whether it keeps up or not, and their outcomes.

An open loop: a request is due at a moment drawn beforehand (Poisson arrivals), and its latency counts from
then. So a service that stalls gets as many requests, and its latencies include the waiting.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
import orjson

from undertow.bench.system.parts import percentiles

TENANTS = 1_000
ADD_SHARE = 0.5
MOST_CONNECTIONS = 512
WORDS = ("harbour boat sail mast rope deck", "bread flour oven yeast salt crust", "violin bow string concert")
# the status of a request without an answer
NO_ANSWER = 0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Outcome:
    """What became of the requests of one stretch of time. Latencies in seconds, of answers with 200."""

    rate: float
    seconds: float
    search_s: list[float] = field(default_factory=list)
    add_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    # ids of turns that were acknowledged, by tenant
    acknowledged: dict[str, list[str]] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        """Plain data; latencies in milliseconds."""
        return {
            "asked_per_s": self.rate,
            "answered_per_s": round((len(self.search_s) + len(self.add_s)) / self.seconds, 1),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "search_ms": _ms(self.search_s),
            "add_ms": _ms(self.add_s),
            "refused_ms": _ms(self.refused_s),
        }

    def p95_ms(self) -> float:
        """Of searches; infinite where one was not answered with 200."""
        if not self.search_s or set(self.statuses) != {200}:
            return float("inf")
        return float(np.percentile(self.search_s, 95) * 1e3)


def _ms(latencies_s: Sequence[float]) -> dict[str, float]:
    return percentiles([1e3 * latency_s for latency_s in latencies_s], digits=2)


class Caller:
    """Makes requests for many tenants with one key. Close it in its event loop.

    It speaks HTTP itself: library clients use as much of a core as the service, and both share this machine.
    """

    def __init__(self, url: str, key: str, *, seed: int = 0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._key = key
        self._seed = seed
        self._random = random.Random(seed)
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(MOST_CONNECTIONS)
        self._numbers = 0

    async def run(self, rate: float, seconds: float, *, add_share: float = ADD_SHARE) -> Outcome:
        """`rate` requests a second for so long; returns when each was answered or failed."""
        outcome = Outcome(rate, seconds)
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for due_s in self._arrivals(rate, seconds):
                if (early_s := began_s + due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(early_s)
                tenant = f"tenant-{self._random.randrange(TENANTS)}"
                adds = self._random.random() < add_share
                tasks.create_task(self._one(outcome, tenant, adds, began_s + due_s))
        return outcome

    async def fill(self, turns: int) -> Outcome:
        """Give each tenant so many turns."""
        outcome = Outcome(0.0, 1.0)
        for tenant in range(TENANTS):
            await self._one(outcome, f"tenant-{tenant}", True, time.perf_counter(), turns=turns)
        return outcome

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _arrivals(self, rate: float, seconds: float) -> Iterator[float]:
        at_s = self._random.expovariate(rate)
        while at_s < seconds:
            yield at_s
            at_s += self._random.expovariate(rate)

    async def _one(self, outcome: Outcome, tenant: str, adds: bool, due_s: float, *, turns: int = 1) -> None:
        request = self._add(tenant, turns) if adds else self._search(tenant)
        status, body = await self._sent(request)
        took_s = time.perf_counter() - due_s
        outcome.statuses[status] += 1
        if status != 200:
            outcome.refused_s.append(took_s)
            return
        if adds:
            outcome.add_s.append(took_s)
            ids = [result["id"] for result in orjson.loads(body)["results"]]
            outcome.acknowledged.setdefault(tenant, []).extend(ids)
        else:
            outcome.search_s.append(took_s)

    async def _sent(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; NO_ANSWER if the connection failed."""
        async with self._free:
            writer = None
            try:
                reader, writer = await self._connection()
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
                body = await reader.readexactly(length)
            except (OSError, asyncio.IncompleteReadError):
                if writer is not None:
                    writer.close()
                return NO_ANSWER, b""
            if "connection: close" in head:
                writer.close()
            else:
                self._idle.append((reader, writer))
            return int(head.split(" ", 2)[1]), body

    async def _connection(self) -> Connection:
        """An idle connection that the service has not closed, or a new one."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port)

    def _add(self, tenant: str, turns: int) -> bytes:
        said = []
        for _ in range(turns):
            self._numbers += 1
            said.append(
                {"role": "user", "content": f"{self._random.choice(WORDS)} n{self._seed}-{self._numbers}"}
            )
        return self._request(f"/v1/tenants/{tenant}/memories", {"messages": said})

    def _search(self, tenant: str) -> bytes:
        return self._request(
            f"/v1/tenants/{tenant}/search", {"query": self._random.choice(WORDS), "top_k": 10}
        )

    def _request(self, path: str, body: object) -> bytes:
        data = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data
