"""Admission: gives queued turns their seqs, vectors and rows, and drops duplicates. Calls no LLM."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import PackedTurn, Turn, UndertowError, as_embedded
from undertow.engine.base.results import Receipt
from undertow.engine.storage.journal_rows import Row, Rows
from undertow.engine.storage.row_codec import Control, control_row, pack_turn, turn_id
from undertow.engine.tenants.turn_columns import PlacedTurns, TurnColumns

if TYPE_CHECKING:  # callers that only pack turns for a shard must not load torch
    from undertow.engine.base.trace import Trace
    from undertow.engine.encoders.base import Encoded
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

    turn: PackedTurn
    receipt: Receipt | None = None
    traceparent: str | None = None


Queued: TypeAlias = Ticket | PackedTurn
"""A turn in the queue, with a ticket if somebody waits for its receipt."""


def packed_of(queued: Queued) -> PackedTurn:
    return queued.turn if isinstance(queued, Ticket) else queued


class Inbox:
    """Owns the incoming turns: a bounded queue with one line per tenant, served round-robin."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, deque[Queued]] = OrderedDict()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def room(self) -> int:
        return self._limit - self._len

    def put_unwatched(self, turn: PackedTurn) -> None:
        """As `put`, for bulk loads: nobody waits for a receipt, so none is made. QueueFull."""
        self._put(turn.tenant, turn)

    def put(self, turn: Turn | PackedTurn, traceparent: str | None = None) -> Ticket:
        """Queue a turn. QueueFull at the bound, InputError if it cannot be stored; then nothing is queued."""
        if isinstance(turn, Turn):
            turn = pack_turn(turn)
        ticket = Ticket(turn, traceparent=traceparent)
        self._put(turn.tenant, ticket)
        return ticket

    def _put(self, tenant: str, queued: Queued) -> None:
        if self.room <= 0:
            raise QueueFull(f"{self._limit} turns are waiting to be stored. Try again in a moment.")
        self._lines.setdefault(tenant, deque()).append(queued)
        self._len += 1

    def take(self, count: int) -> list[Queued]:
        """Remove and return up to `count` turns: an equal share of each tenant's line, in its order."""
        taken: list[Queued] = []
        share = max(1, count // max(1, len(self._lines)))
        while self._lines and len(taken) < count:
            name, line = self._lines.popitem(last=False)
            taken += [line.popleft() for _ in range(min(share, len(line), count - len(taken)))]
            if line:
                self._lines[name] = line  # to the back of the round
        self._len -= len(taken)
        return taken

    def put_back(self, taken: Iterable[Queued]) -> None:
        """Undo the last `take`: lines and turns return to the front in their former order."""
        lines: OrderedDict[str, deque[Queued]] = OrderedDict()
        for queued in taken:
            lines.setdefault(packed_of(queued).tenant, deque()).append(queued)
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
        """Remove the waiting turns of a tenant, and return their tickets."""
        dropped = self._lines.pop(tenant, ())
        self._len -= len(dropped)
        return [queued for queued in dropped if isinstance(queued, Ticket)]


@dataclass(slots=True)
class Admitted:
    """Turns that are in memory: the rows to commit, and the tenants involved.

    `ids` and `seqs`: one entry a turn, None for a duplicate; to be handed out after the commit.
    """

    rows: list[Rows]
    ids: list[str | None]
    seqs: list[int | None]
    fresh_turns: int
    tenants: Sequence[Tenant]

    def receipt(self, place: int, tenant: str) -> Receipt:
        """The receipt of the turn at a place of the batch; `tenant`: its name."""
        id = self.ids[place]
        return Receipt(tenant, id, self.seqs[place], duplicate=id is None)


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

    def admit(self, turns: TurnColumns) -> Admitted:
        """Store turns in the tenants' logs and in the arena. ArenaFull: nothing changed."""
        try:
            return self._admit(turns)
        finally:
            self._tenants.unpin()

    def _admit(self, turns: TurnColumns) -> Admitted:
        tenants = self._tenants.get_many(list(dict.fromkeys(turns.tenants)))
        new = PlacedTurns.plan(turns, tenants)
        # Everything that can fail comes before any tenant changes: first arena memory, then the encoder.
        self._reserve(new.segments, tenants)
        vectors = self._encode(new)
        rows: list[Rows] = [row for tenant in tenants for row in self.settle_thresholds(tenant)]
        return self._append(new, vectors, rows, len(turns.tenants))

    def _encode(self, new: PlacedTurns) -> Encoded:
        names = [new.tenants[owner].name for owner in new.owners.tolist()]
        texts = new.texts
        if self._embed_timestamp:
            texts = [as_embedded(text, at, True) for text, at in zip(texts, new.timestamps, strict=True)]
        with self._trace.span("encode", texts=len(texts)):
            return self._encoder.embed(names, texts)

    def _append(self, new: PlacedTurns, vectors: Encoded, rows: list[Rows], count: int) -> Admitted:
        """Append the new ones of `count` turns to the logs and the arena, and their rows to `rows`."""
        segments = new.segments
        seqs = new.append()
        ids, of_turns = new.rows(seqs, vectors.host)
        with self._trace.span("append", rows=len(new)):
            self._arena.extend(segments, vectors.on(self._arena.device), live=True)
        if len(new):
            rows.append(of_turns)
        admitted = Admitted(rows, [None] * count, [None] * count, len(new), new.tenants)
        for place, id, seq in zip(new.places, ids, seqs.tolist(), strict=True):
            admitted.ids[place], admitted.seqs[place] = id, seq
        return admitted

    def replace(self, tenant: Tenant, deletion: Mapping[str, Any], turn: Turn) -> tuple[list[Rows], Receipt]:
        """Rows of a turn's deletion (`deletion` is its body) and of the turn that replaces it.

        The new turn keeps its own timestamp. When this returns, both are in the tenant's log and in the
        arena. ArenaFull: nothing changed. The thresholds in force stay: nothing is ingested.
        """
        new = PlacedTurns.single(pack_turn(turn), tenant)
        self._tenants.reserve(new.segments)
        vectors = self._encode(new)
        place = turn_id(tenant.name, tenant.incarnation, tenant.next_seq + 1)
        control = Control("delete", tenant.next_seq, {**deletion, "replaced_by": place})
        tenant.add_control(control)
        admitted = self._append(new, vectors, [control_row(tenant.name, tenant.key, control)], 1)
        return admitted.rows, admitted.receipt(0, tenant.name)

    def _reserve(self, segments: NDArray[np.int64], tenants: Iterable[Tenant]) -> None:
        """Reserve arena memory. ArenaFull: new tenants have nothing stored yet, so they are dropped."""
        try:
            self._tenants.reserve(segments)
        except UndertowError:
            for tenant in tenants:
                if not tenant.thresholds_from:  # no record yet, so this is a new tenant
                    self._tenants.remove(tenant.name)
            raise

    def settle_thresholds(self, tenant: Tenant) -> list[Row]:
        """Log the current thresholds if they differ from the tenant's. They apply from the next seq on."""
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
