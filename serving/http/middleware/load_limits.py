"""How many requests are under way: in all, for each tenant, with each key. Used on the event loop alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from undertow.serving.http.problems import CLOSE, Problem
from undertow.serving.http.service_settings import ServiceSettings

SOON_S = 1.0


class LoadLimits:
    """Counts requests, and refuses at once what is above a bound: nothing waits in a line.

    So one tenant, or one key, never has more than its share of what the service does at a time, and beyond
    its capacity the service says so quickly.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._under_way = 0
        self._by_tenant: Counter[str] = Counter()
        self._by_key: Counter[str] = Counter()
        self._long = 0
        self._imports = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """The service is about to end: new requests are refused."""

    @property
    def under_way(self) -> int:
        return self._under_way

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around any request. Problem 429: there are too many; 503: the service is about to end."""
        if self.draining:
            raise Problem(
                503,
                "draining",
                "The service is ending. Try again in a moment.",
                headers=CLOSE,
                retry_after_s=SOON_S,
            )
        if self._under_way >= self._settings.max_requests:
            raise _busy("overload", "Too many requests are under way. Try again.")
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    @contextmanager
    def share(self, key_id: str, tenant: str | None) -> Iterator[None]:
        """Around a request whose sender may send it. Problem 429: the key or the tenant has its share."""
        s = self._settings
        if self._by_key[key_id] >= s.max_key_requests:
            raise _busy("key-busy", "Too many requests with this key are under way. Wait for some.")
        if tenant is not None and self._by_tenant[tenant] >= s.max_tenant_requests:
            raise _busy("tenant-busy", "Too many requests for this tenant are under way. Wait for some.")
        self._by_key[key_id] += 1
        if tenant is not None:
            self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            _less(self._by_key, key_id)
            if tenant is not None:
                _less(self._by_tenant, tenant)

    @contextmanager
    def long(self) -> Iterator[None]:
        """Around a request that may take long: for an LLM, or for whoever reads. Problem 429: enough do.

        So adding and searching go on where no LLM answers.
        """
        if self._long >= self._settings.max_long_requests:
            raise _too_much("long", "Too many answers, flushes and exports are under way. Try again.")
        self._long += 1
        try:
            yield
        finally:
            self._long -= 1

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Around a request whose body may be huge, and is held in memory. Problem 429."""
        if self._imports >= self._settings.max_imports:
            raise _too_much("imports", "Enough imports are under way. Try again when one has ended.")
        self._imports += 1
        try:
            yield
        finally:
            self._imports -= 1

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()


def _too_much(slug: str, detail: str) -> Problem:
    return Problem(429, slug, detail, headers=CLOSE, retry_after_s=SOON_S)


def _busy(slug: str, detail: str) -> Problem:
    return Problem(429, slug, detail, retry_after_s=SOON_S)


def _less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]  # names come and go
