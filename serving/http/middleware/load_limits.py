"""How many requests may be under way: in total, per tenant, per key. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from undertow.serving.http.problems import CLOSE, Problem
from undertow.serving.http.service_settings import ServiceSettings

SOON_S = 1.0
# how often a service that ends looks whether the last request has ended
POLL_S = 0.01
# a kind, and of whom; every request counts under ALL
Name = tuple[str, str]
ALL: Name = ("request", "")


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
        self._counts: dict[Name, int] = {}
        self.draining = False
        """The service is shutting down: new requests are refused."""

    @property
    def under_way(self) -> int:
        return self._counts.get(ALL, 0)

    def request(self) -> AbstractContextManager[None]:
        """Around any request. Problem 429: there are too many; 503: the service is shutting down."""
        if self.draining:
            words = "The service is ending. Try again in a moment."
            raise Problem(503, "draining", words, headers=CLOSE, retry_after_s=SOON_S)
        return _Counted(self._counts, (ALL, self._settings.max_requests, OVERLOAD))

    def share(self, key_id: str, tenant: str | None) -> AbstractContextManager[None]:
        """Around an authorized request. Problem 429: the key or the tenant has too many."""
        s = self._settings
        of_key = ("key", key_id), s.max_key_requests, KEY_BUSY
        if tenant is None:
            return _Counted(self._counts, of_key)
        return _Counted(self._counts, of_key, (("tenant", tenant), s.max_tenant_requests, TENANT_BUSY))

    def long(self) -> AbstractContextManager[None]:
        """Around a request that may wait for an LLM or a slow reader. Problem 429: there are too many.

        So adding and searching continue while the LLM does not respond.
        """
        return _Counted(self._counts, (("long", ""), self._settings.max_long_requests, LONG))

    def streaming(self, key_id: str, tenant: str) -> AbstractContextManager[None]:
        """Around a stream of events, for minutes. Problem 429: too many, also of the key or tenant.

        It has no share beside it, so that streams keep no other request of the tenant out.
        """
        s = self._settings
        return _Counted(
            self._counts,
            (("stream with key", key_id), s.max_key_streams, KEY_STREAMS),
            (("stream of tenant", tenant), s.max_tenant_streams, TENANT_STREAMS),
            (("stream", ""), s.max_streams, STREAMS),
        )

    def importing(self, key_id: str, tenant: str | None) -> AbstractContextManager[None]:
        """Around a request with a large body in memory. Problem 429: too many, also of the key or tenant."""
        most = self._settings.max_imports
        return _Counted(
            self._counts,
            (("import of tenant", tenant or ""), 1, IMPORTS),
            (("import with key", key_id), max(1, most // 2), IMPORTS),
            (("import", ""), most, IMPORTS),
        )

    def storing(self, key_id: str, tenant: str, turns: int) -> AbstractContextManager[None]:
        """Around an add. Problem 429: the tenant or the key has its share of the turns that wait.

        An add that is larger than a share is taken where there is no other of its tenant or its key.
        """
        s = self._settings
        return _Counted(
            self._counts,
            (("turns", tenant), max(s.max_tenant_turns, turns), QUEUE),
            (("turns with key", key_id), max(s.max_key_turns, turns), KEY_QUEUE),
            count=turns,
        )

    def require_room(self, key_id: str, tenant: str) -> None:
        """Problem 429: as many turns of the tenant, or with the key, are being stored as may be."""
        with self.storing(key_id, tenant, 1):
            pass

    async def idle(self) -> None:
        """Wait until no request is under way."""
        while self.under_way:
            await asyncio.sleep(POLL_S)


class _Counted:
    """A block that counts under each of these names. Problem 429: with it, one has more than its limit."""

    __slots__ = ("_count", "_counts", "_limits")

    def __init__(self, counts: dict[Name, int], *limits: tuple[Name, int, Refusal], count: int = 1) -> None:
        self._counts, self._limits, self._count = counts, limits, count

    def __enter__(self) -> None:
        counts = self._counts
        for name, limit, refusal in self._limits:
            if counts.get(name, 0) + self._count > limit:
                raise Problem(429, *refusal[:2], headers=refusal.headers, retry_after_s=SOON_S)
        for name, _, _ in self._limits:
            counts[name] = counts.get(name, 0) + self._count

    def __exit__(self, *error: object) -> None:
        for name, _, _ in self._limits:
            if left := self._counts.get(name, 0) - self._count:
                self._counts[name] = left
            else:
                self._counts.pop(name, None)  # the names are unbounded
