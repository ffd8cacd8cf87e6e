"""A Redis stream as a source: a consumer group, and entries of consumers that have died."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from undertow.engine.base.model import BadInput
from undertow.serving.streams.source import (
    NO_VALUE,
    Delivery,
    Letter,
    Source,
    StreamError,
    Unavailable,
    envelope_text,
    letter_notes,
)

FIELD, TENANT = b"message", b"tenant"
BEGINNING = b"0-0"
CONNECT_S, REPLY_S = 5.0, 30.0
# errors of a server that is starting, failing over or out of memory
PASSING = (
    *("LOADING", "READONLY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "OOM", "MISCONF", "NOREPLICAS"),
    "BUSY ",
)


class RedisSource(Source):
    """A consumer of a group. An entry has the fields `message`, a JSON object, and `tenant`."""

    def __init__(
        self,
        url: str,
        stream: str,
        group: str,
        consumer: str,
        *,
        dead_letters: str | None = None,
        claim_idle_s: float = 60.0,
    ) -> None:
        """`consumer`: a name that stays the same when this one starts again. `dead_letters`: a stream.

        `claim_idle_s`: entries that another consumer has had for so long without acknowledging them are taken
        over. ImportError names the extra; StreamError: the URL is wrong. Connects at the first read.
        """
        self._redis = import_module("redis")
        self.name = stream
        self._stream, self._group, self._consumer = stream, group, consumer
        self._dead_letters, self._claim_idle_s = dead_letters, claim_idle_s
        self._has_group = False
        # where to go on in our own pending entries, which the last run may have left; None: at the end
        self._own: bytes | None = BEGINNING
        self._claim_from, self._claim_due_s = BEGINNING, 0.0
        try:
            self._client = self._redis.Redis.from_url(
                url, socket_connect_timeout=CONNECT_S, socket_timeout=REPLY_S, protocol=2, retry=None
            )
        except ValueError as error:
            raise StreamError(f"Redis cannot be reached: {error}") from None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        errors = self._redis.exceptions
        try:
            yield
        except errors.AuthenticationError as error:
            raise StreamError(f"Redis refuses us: {error}") from None
        except (errors.ConnectionError, errors.TimeoutError) as error:
            raise Unavailable(f"Redis cannot be used: {error}.") from None
        except errors.RedisError as error:
            text = str(error)
            if text.startswith("NOGROUP"):
                self._has_group = False
                raise Unavailable(f"the group is gone: {text}.") from None
            kind = (
                Unavailable
                if text.startswith(PASSING) or isinstance(error, errors.OutOfMemoryError)
                else StreamError
            )
            raise kind(f"Redis refuses {self._stream}: {text}") from None

    # ---- reading

    def read(self, most: int, wait_s: float) -> list[Delivery]:
        try:
            with self._errors():
                self._make_group()
                if self._own is not None and (entries := self._pending(most)):
                    return entries
                if time.monotonic() >= self._claim_due_s and (entries := self._claimed(most)):
                    return entries
                return self._entries(b">", most, max(int(wait_s * 1_000), 1))
        except Unavailable:
            self._own = BEGINNING  # the reply may be lost, and what it held is ours
            raise

    def _make_group(self) -> None:
        """Make the group, from the stream's beginning, if it is missing."""
        if self._has_group:
            return
        try:
            self._client.xgroup_create(self._stream, self._group, BEGINNING, mkstream=True)
        except self._redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._has_group = True

    def _pending(self, most: int) -> list[Delivery]:
        """Entries that were delivered to us and not acknowledged, in order."""
        assert self._own is not None
        entries = self._entries(self._own, most, None)
        self._own = entries[-1].raw[0] if entries else None
        return entries

    def _entries(self, after: bytes, most: int, block_ms: int | None) -> list[Delivery]:
        found: Any = self._client.xreadgroup(
            self._group, self._consumer, {self._stream: after}, count=most, block=block_ms
        )
        return [self._delivery(*entry) for _, entries in found or () for entry in entries]

    def _claimed(self, most: int) -> list[Delivery]:
        """Entries of consumers that seem to be dead."""
        found: Any = self._client.xautoclaim(
            self._stream,
            self._group,
            self._consumer,
            int(self._claim_idle_s * 1_000),
            start_id=self._claim_from,
            count=most,
        )
        self._claim_from = found[0]
        if self._claim_from == BEGINNING:
            self._claim_due_s = time.monotonic() + self._claim_idle_s / 2
        if any(id is None for id, _ in found[1]):
            self._own = BEGINNING  # entries that were deleted, and are ours now: there they have ids
        return [self._delivery(id, fields) for id, fields in found[1] if id is not None]

    def _delivery(self, id: bytes, fields: dict[bytes, bytes] | None) -> Delivery:
        place = f"{self._stream}/{id.decode()}"
        fields = fields or {}
        tenant, problem = envelope_text(fields.get(TENANT), place, "tenant")
        value = fields.get(FIELD)
        if not fields:
            reason = "was deleted from the stream before it was read"
            problem = BadInput(place, None, None, reason, "Let the stream hold more entries.")
        elif value is None:
            problem = problem or BadInput(place, None, FIELD.decode(), *NO_VALUE)
        return Delivery(place, tenant, value or b"", problem, (id, fields))

    def is_caught_up(self) -> bool:
        """Whether nothing is left for the group: entries that others have had for long come to us."""
        if self._own is not None:
            return False
        with self._errors():
            pending: Any = self._client.xpending(self._stream, self._group)
        return not pending["pending"]

    def hold(self) -> None:
        """A group of Redis has no members to be kept alive."""

    def resume(self) -> None:
        """See `hold`."""

    # ---- acknowledging

    def bury(self, letters: Sequence[Letter]) -> None:
        assert self._dead_letters is not None
        with self._errors(), self._client.pipeline(transaction=True) as pipeline:
            for letter in letters:
                id, fields = letter.delivery.raw
                notes = {"stream": self._stream, "id": id, **letter_notes(letter)}
                pipeline.xadd(
                    self._dead_letters, {**fields, **{f"undertow.{n}": v for n, v in notes.items()}}
                )
            pipeline.execute()

    def commit(self, batch: Sequence[Delivery]) -> None:
        with self._errors():
            self._client.xack(self._stream, self._group, *(delivery.raw[0] for delivery in batch))

    def close(self) -> None:
        self._client.close()
