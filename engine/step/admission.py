"""Admission: gives queued turns their seqs, vectors and rows, and drops duplicates. Calls no LLM."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput, InputError, PackedTurn, Turn, UndertowError, as_embedded
from undertow.engine.base.results import Receipt
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import Control, control_row, key_hash, turn_id, turn_row

if TYPE_CHECKING:  # callers that only pack turns for a shard must not load torch
    from undertow.engine.base.trace import Trace
    from undertow.engine.encoders.embedding_cache import EmbeddingCache
    from undertow.engine.policies.base import Thresholds
    from undertow.engine.tenants.registry import TenantRegistry
    from undertow.engine.tenants.tenant import Tenant
    from undertow.kernels.arena.arena import Arena


class QueueFull(UndertowError):
    """The queue of incoming turns is full. Try again after a step."""


@dataclass(slots=True)
class Ticket:
    """A turn in the queue. It gets its receipt once the turn is durable and searchable.

    `traceparent` belongs to the request that brought the turn, see engine/base/trace_context.py.
    """

    turn: Turn | PackedTurn
    receipt: Receipt | None = None
    traceparent: str | None = None


def check_turn(turn: Turn) -> None:
    """InputError for what JSON and the journal cannot store. The readers have checked the texts."""
    for field, value in (("tenant", turn.tenant), ("session", turn.session_id)):
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(field, "holds half a surrogate pair", "Send valid Unicode.")
    if not turn.tenant or "\x00" in turn.tenant:
        _refuse("tenant", "is empty or holds a NUL", "Name the owner of the memory.")
    if turn.metadata:
        try:
            orjson.dumps({"metadata": dict(turn.metadata)})  # nested as deep as in the payload
        except TypeError as error:
            _refuse("metadata", f"is no JSON ({error})", "Give plain JSON values.")


def _refuse(field: str, reason: str, cure: str) -> NoReturn:
    raise InputError(BadInput("add", None, field, reason, cure))


class Inbox:
    """Owns the incoming turns: a bounded queue with one line per tenant, served round-robin."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def room(self) -> int:
        return self._limit - self._len

    def put(self, turn: Turn | PackedTurn, traceparent: str | None = None) -> Ticket:
        """Queue a turn. QueueFull at the bound, InputError if it cannot be stored; then nothing is queued."""
        if isinstance(turn, Turn):
            check_turn(turn)
        if self.room <= 0:
            raise QueueFull(f"{self._limit} turns are waiting to be stored. Try again in a moment.")
        ticket = Ticket(turn, traceparent=traceparent)
        self._lines.setdefault(turn.tenant, deque()).append(ticket)
        self._len += 1
        return ticket

    def take(self, count: int) -> list[Ticket]:
        """Remove and return up to `count` turns: an equal share of each tenant's line, in its order."""
        taken: list[Ticket] = []
        share = max(1, count // max(1, len(self._lines)))
        while self._lines and len(taken) < count:
            name, line = self._lines.popitem(last=False)
            taken += [line.popleft() for _ in range(min(share, len(line), count - len(taken)))]
            if line:
                self._lines[name] = line  # to the back of the round
        self._len -= len(taken)
        return taken

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """Undo the last `take`: lines and turns return to the front in their former order."""
        lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        for ticket in tickets:
            lines.setdefault(ticket.turn.tenant, deque()).append(ticket)
            self._len += 1
        for name, line in self._lines.items():
            lines.setdefault(name, deque()).extend(line)
        self._lines = lines

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with waiting turns."""
        return self._lines.keys()

    def holds(self, tenant: str) -> bool:
        return tenant in self._lines

    def clear(self) -> None:
        """Drop all waiting turns."""
        self._lines.clear()
        self._len = 0

    def drop(self, tenant: str) -> Sequence[Ticket]:
        """Remove and return the waiting turns of a tenant."""
        dropped = self._lines.pop(tenant, ())
        self._len -= len(dropped)
        return dropped


class _Planned(NamedTuple):
    turn: Turn | PackedTurn
    tenant: Tenant
    key: int
    timestamp: str | None


class Admission:
    """Gives each incoming turn its seq, vector and row, and each tenant its thresholds in force."""

    def __init__(
        self,
        tenants: TenantRegistry,
        arena: Arena,
        encoder: EmbeddingCache,
        thresholds: Thresholds,
        *,
        embed_timestamp: bool,
        trace: Trace,
    ) -> None:
        self._tenants = tenants
        self._arena = arena
        self._encoder = encoder
        self._thresholds = thresholds
        self._embed_timestamp = embed_timestamp
        self._trace = trace

    def admit(self, tickets: list[Ticket]) -> tuple[list[Row], list[Receipt], list[Tenant]]:
        """Journal rows, one receipt per ticket to hand out after their commit, and the tenants involved.

        When this returns, the turns are in the tenants' logs and in the arena. ArenaFull: nothing changed.
        """
        try:
            return self._admit(tickets)
        finally:
            self._tenants.unpin()

    def _admit(self, tickets: list[Ticket]) -> tuple[list[Row], list[Receipt], list[Tenant]]:
        names = list(dict.fromkeys(ticket.turn.tenant for ticket in tickets))
        by_name = dict(zip(names, self._tenants.get_many(names), strict=True))
        planned = self._plan(tickets, by_name)
        fresh = [p for p in planned if p is not None]
        # Everything that can fail comes before any tenant changes: first arena memory, then the encoder.
        segments = np.array([p.tenant.turns_segment for p in fresh], dtype=np.int64)
        self._reserve(segments, by_name.values())
        with self._trace.span("encode", texts=len(fresh)):
            vectors = self._encoder.embed([p.tenant.name for p in fresh], [self._text(p) for p in fresh])
        rows = [row for tenant in by_name.values() for row in self.settle_thresholds(tenant)]
        receipts = [
            Receipt(ticket.turn.tenant, None, None, duplicate=True) if p is None else self._append(p, rows)
            for ticket, p in zip(tickets, planned, strict=True)
        ]
        for row, vector in zip(rows[len(rows) - len(fresh) :], vectors.host, strict=True):
            row.vector = vector
        with self._trace.span("append", rows=len(fresh)):
            self._arena.extend(segments, vectors.on(self._arena.device), live=True)
        return rows, receipts, list(by_name.values())

    def replace(self, tenant: Tenant, deletion: Mapping[str, Any], turn: Turn) -> tuple[list[Row], Receipt]:
        """Rows of a turn's deletion (`deletion` is its body) and of the turn that replaces it.

        The new turn keeps its own timestamp. When this returns, both are in the tenant's log and in the
        arena. ArenaFull: nothing changed. The thresholds in force stay: nothing is ingested.
        """
        planned = _Planned(turn, tenant, key_hash(turn.dedupe_key), turn.timestamp)
        segment = np.array([tenant.turns_segment], dtype=np.int64)
        self._tenants.reserve(segment)
        vectors = self._encoder.embed([tenant.name], [self._text(planned)])
        place = turn_id(tenant.name, tenant.incarnation, tenant.next_seq + 1)
        control = Control("delete", tenant.next_seq, {**deletion, "replaced_by": place})
        tenant.add_control(control)
        rows = [control_row(tenant.name, tenant.key, control)]
        receipt = self._append(planned, rows)
        rows[-1].vector = vectors.host[0]
        self._arena.extend(segment, vectors.on(self._arena.device), live=True)
        return rows, receipt

    def _reserve(self, segments: NDArray[np.int64], tenants: Iterable[Tenant]) -> None:
        """Reserve arena memory. ArenaFull: new tenants have nothing stored yet, so they are dropped."""
        try:
            self._tenants.reserve(segments)
        except UndertowError:
            for tenant in tenants:
                if not tenant.thresholds_from:  # the first record of every log: none yet
                    self._tenants.remove(tenant.name)
            raise

    def _plan(self, tickets: list[Ticket], by_name: Mapping[str, Tenant]) -> list[_Planned | None]:
        """Each ticket's turn with its key and effective timestamp; None for a duplicate.

        A turn without a timestamp inherits the previous one of its session.
        """
        planned: list[_Planned | None] = []
        seen: set[tuple[str, int]] = set()
        latest: dict[tuple[str, str], str] = {}
        for ticket in tickets:
            turn = ticket.turn
            tenant = by_name[turn.tenant]
            key = key_hash(turn.dedupe_key)
            if key in tenant.keys or (turn.tenant, key) in seen:
                planned.append(None)
                continue
            seen.add((turn.tenant, key))
            session = (turn.tenant, turn.session_id)
            timestamp = turn.timestamp or latest.get(session) or tenant.last_timestamp.get(turn.session_id)
            if timestamp is not None:
                latest[session] = timestamp
            planned.append(_Planned(turn, tenant, key, timestamp))
        return planned

    def _text(self, planned: _Planned) -> str:
        """The text to embed."""
        return as_embedded(planned.turn.text, planned.timestamp, self._embed_timestamp)

    def _append(self, p: _Planned, rows: list[Row]) -> Receipt:
        """Append a turn to its tenant's log, and its row to `rows`."""
        tenant = p.tenant
        row = turn_row(tenant.name, tenant.key, tenant.incarnation, tenant.next_seq, p.turn, p.timestamp)
        tenant.add_turn(row.payload, p.key, p.turn.session_id, p.timestamp)
        rows.append(row)
        return Receipt(tenant.name, row.id, row.seq, duplicate=False)

    def settle_thresholds(self, tenant: Tenant) -> list[Row]:
        """Log the thresholds if the tenant has others. They apply to later seqs only."""
        if tenant.thresholds_from and tenant.thresholds_from[-1][1] == self._thresholds:
            return []
        seq = tenant.next_seq if tenant.thresholds_from else -1
        t = self._thresholds
        body: dict[str, Any] = {
            "theta_sim": t.theta_sim,
            "theta_merge": t.theta_merge,
            "theta_count": t.theta_count,
        }
        control = Control("settings", seq, body)
        tenant.add_control(control)
        return [control_row(tenant.name, tenant.key, control)]
