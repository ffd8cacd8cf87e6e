"""How many requests may be under way: in total, per tenant, per key. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from undertow.serving.http.problems import CLOSE, Problem
from undertow.serving.http.service_settings import ServiceSettings

SOON_S = 1.0


class Refusal(NamedTuple):
    """The slug and the words of a 429. `headers`: whether the connection closes."""

    slug: str
    detail: str
    headers: Mapping[str, str] | None = None


OVERLOAD = Refusal("overload", "Too many requests are under way. Try again.")
KEY_BUSY = Refusal("key-busy", "Too many requests with this key are under way. Wait until some end.")
TENANT_BUSY = Refusal("tenant-busy", "Too many requests for this tenant are under way. Wait until some end.")
LONG = Refusal("long", "Too many answers, flushes and exports are under way. Try again.", CLOSE)
KEY_STREAMS = Refusal("streams", "Too many streams of events are open with this key. End one.", CLOSE)
TENANT_STREAMS = Refusal("streams", "Too many streams of this tenant's events are open. End one.", CLOSE)
STREAMS = Refusal("streams", "Too many streams of events are open. Try again when one has ended.", CLOSE)
IMPORTS = Refusal("imports", "Too many imports are under way. Try again when one has ended.", CLOSE)
QUEUE = Refusal("tenant-queue", "Too many turns of this tenant wait. Wait until some are stored.")
KEY_QUEUE = Refusal("key-queue", "Too many turns sent with this key wait. Wait until some are stored.")


class LoadLimits:
    """Counts requests under way. A request over a limit gets 429 and never waits for room.

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
        try:
            with self._counted("request", "", self._settings.max_requests, OVERLOAD):
                self._idle.clear()
                yield
        finally:
            if not self.under_way:
                self._idle.set()

    @contextmanager
    def share(self, key_id: str, tenant: str | None) -> Iterator[None]:
        """Around an authorized request. Problem 429: the key or the tenant has too many."""
        s = self._settings
        with self._counted("key", key_id, s.max_key_requests, KEY_BUSY):
            if tenant is None:
                yield
                return
            with self._counted("tenant", tenant, s.max_tenant_requests, TENANT_BUSY):
                yield

    @contextmanager
    def long(self) -> Iterator[None]:
        """Around a request that may wait for an LLM or a slow reader. Problem 429: there are too many.

        So adding and searching continue while the LLM does not respond.
        """
        with self._counted("long", "", self._settings.max_long_requests, LONG):
            yield

    @contextmanager
    def streaming(self, key_id: str, tenant: str) -> Iterator[None]:
        """Around a stream of events, for minutes. Problem 429: too many, also of the key or tenant.

        It has no share beside it, so that streams keep no other request of the tenant out.
        """
        s = self._settings
        with (
            self._counted("stream with key", key_id, s.max_key_streams, KEY_STREAMS),
            self._counted("stream of tenant", tenant, s.max_tenant_streams, TENANT_STREAMS),
            self._counted("stream", "", s.max_streams, STREAMS),
        ):
            yield

    @contextmanager
    def importing(self, key_id: str, tenant: str | None) -> Iterator[None]:
        """Around a request with a large body in memory. Problem 429: too many, also of the key or tenant."""
        most = self._settings.max_imports
        with (
            self._counted("import of tenant", tenant or "", 1, IMPORTS),
            self._counted("import with key", key_id, max(1, most // 2), IMPORTS),
            self._counted("import", "", most, IMPORTS),
        ):
            yield

    @contextmanager
    def storing(self, key_id: str, tenant: str, turns: int) -> Iterator[None]:
        """Around an add. Problem 429: the tenant or the key has its share of the turns that wait.

        An add that is larger than a share is taken where there is no other of its tenant or its key.
        """
        s = self._settings
        with (
            self._counted("turns", tenant, max(s.max_tenant_turns, turns), QUEUE, count=turns),
            self._counted("turns with key", key_id, max(s.max_key_turns, turns), KEY_QUEUE, count=turns),
        ):
            yield

    def require_room(self, key_id: str, tenant: str) -> None:
        """Problem 429: as many turns of the tenant, or with the key, are being stored as may be."""
        with self.storing(key_id, tenant, 1):
            pass

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    @contextmanager
    def _counted(
        self, kind: str, name: str, limit: int, refusal: Refusal, *, count: int = 1
    ) -> Iterator[None]:
        counted = self._counts[kind, name] + count
        if counted > limit:
            raise Problem(429, *refusal[:2], headers=refusal.headers, retry_after_s=SOON_S)
        self._counts[kind, name] = counted
        try:
            yield
        finally:
            self._counts[kind, name] -= count
            if not self._counts[kind, name]:
                del self._counts[kind, name]  # the names are unbounded
