"""How many requests may be under way: in total, per tenant, per key. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from undertow.serving.http.problems import CLOSE, Problem
from undertow.serving.http.service_settings import ServiceSettings

SOON_S = 1.0


class LoadLimits:
    """Counts requests under way. A request over a limit gets 429 at once and is never queued.

    So no tenant and no key has more than its share of the service, and an overloaded service says so quickly.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        # of all requests, and per ("key", id) and ("tenant", name); and what else is bounded, by its kind
        self._counts: Counter[tuple[str, str]] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """The service is shutting down: new requests are refused."""

    @property
    def under_way(self) -> int:
        return self._counts["request", ""]

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around any request. Problem 429: there are too many; 503: the service is shutting down."""
        if self.draining:
            words = "The service is ending. Try again in a moment."
            raise Problem(503, "draining", words, headers=CLOSE, retry_after_s=SOON_S)
        busy = _busy("overload", "Too many requests are under way. Try again.")
        try:
            with self._counted("request", "", self._settings.max_requests, busy):
                self._idle.clear()
                yield
        finally:
            if not self.under_way:
                self._idle.set()

    @contextmanager
    def share(self, key_id: str, tenant: str | None) -> Iterator[None]:
        """Around an authorized request. Problem 429: the key or the tenant has too many."""
        s = self._settings
        with ExitStack() as stack:
            busy = _busy("key-busy", "Too many requests with this key are under way. Wait for some.")
            stack.enter_context(self._counted("key", key_id, s.max_key_requests, busy))
            if tenant is not None:
                busy = _busy("tenant-busy", "Too many requests for this tenant are under way. Wait for some.")
                stack.enter_context(self._counted("tenant", tenant, s.max_tenant_requests, busy))
            yield

    @contextmanager
    def long(self) -> Iterator[None]:
        """Around a request that may wait for an LLM or a slow reader. Problem 429: there are too many.

        So adding and searching continue while the LLM does not respond.
        """
        words = "Too many answers, flushes and exports are under way. Try again."
        with self._counted("long", "", self._settings.max_long_requests, _busy("long", words, close=True)):
            yield

    @contextmanager
    def importing(self, key_id: str, tenant: str | None) -> Iterator[None]:
        """Around a request with a large body in memory. Problem 429: too many, also of the key or tenant."""
        most = self._settings.max_imports
        busy = _busy("imports", "Enough imports are under way. Try again when one has ended.", close=True)
        with (
            self._counted("import of tenant", tenant or "", 1, busy),
            self._counted("import with key", key_id, max(1, most // 2), busy),
            self._counted("import", "", most, busy),
        ):
            yield

    @contextmanager
    def storing(self, tenant: str, turns: int) -> Iterator[None]:
        """Around an add. Problem 429: the tenant has its share of the turns that wait to be stored.

        An add that is larger than the share is taken where the tenant has no other.
        """
        most = max(self._settings.max_tenant_turns, turns)
        busy = _busy("tenant-queue", "Too many turns of this tenant are being stored. Wait for some.")
        with self._counted("turns", tenant, most, busy, count=turns):
            yield

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    @contextmanager
    def _counted(
        self, kind: str, name: str, limit: int, refusal: Problem, *, count: int = 1
    ) -> Iterator[None]:
        if self._counts[kind, name] + count > limit:
            raise refusal
        self._counts[kind, name] += count
        try:
            yield
        finally:
            self._counts[kind, name] -= count
            if not self._counts[kind, name]:
                del self._counts[kind, name]  # the names are unbounded


def _busy(slug: str, detail: str, *, close: bool = False) -> Problem:
    return Problem(429, slug, detail, headers=CLOSE if close else None, retry_after_s=SOON_S)
