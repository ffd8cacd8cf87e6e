"""Admission: gives queued turns their seqs, vectors and rows, and drops duplicates. Calls no LLM."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import PackedTurn, Turn, UndertowError, as_embedded
from undertow.engine.base.results import Receipt
from undertow.engine.encoders.base import Encoded
from undertow.engine.storage.journal_rows import Row, Rows
from undertow.engine.storage.row_codec import Control, control_row, pack_turn, turn_id
from undertow.engine.tenants.turn_columns import PlacedTurns, TurnColumns

if TYPE_CHECKING:  # callers that only pack turns for a shard must not load torch
    from undertow.engine.base.trace import Trace
    from undertow.engine.encoders.base import Float16
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


@dataclass(slots=True)
class Batch:
    """Turns taken from the queue, and the tickets of those that somebody waits for, by place."""

    turns: TurnColumns
    tickets: Sequence[tuple[int, Ticket]] = ()


class Inbox:
    """Owns the incoming turns: a bounded queue with one line per tenant, served round-robin.

    A bulk load brings its turns as a block of columns, which is served once the lines are empty.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._len = 0
        self._set_block(TurnColumns.of(()))

    def _set_block(self, turns: TurnColumns) -> None:
        self._block, self._taken = turns, 0
        self._block_tenants = frozenset(turns.tenants)

    def __len__(self) -> int:
        return self._len + self._block_len

    @property
    def _block_len(self) -> int:
        return self._block.size - self._taken

    @property
    def room(self) -> int:
        """How many turns `put` can queue now: none while a block waits, whose turns must not be overtaken."""
        return 0 if self._block_len else self._limit - self._len

    @property
    def serves_block(self) -> bool:
        """Whether the next turns to be taken are those of a bulk load."""
        return not self._len and self._block_len > 0

    def put_block(self, turns: TurnColumns) -> None:
        """Queue the turns of a bulk load, without tickets. QueueFull: a block is waiting, or at the bound."""
        if turns.size > self.room:
            raise QueueFull(f"{len(self)} turns are waiting to be stored. Try again after a step.")
        self._set_block(turns)

    def put(self, turn: Turn | PackedTurn, traceparent: str | None = None) -> Ticket:
        """Queue a turn. QueueFull at the bound, InputError if it cannot be stored; then nothing is queued."""
        if isinstance(turn, Turn):
            turn = pack_turn(turn)
        if self.room <= 0:
            raise QueueFull(f"{self._limit} turns are waiting to be stored. Try again in a moment.")
        ticket = Ticket(turn, traceparent=traceparent)
        self._lines.setdefault(turn.tenant, deque()).append(ticket)
        self._len += 1
        return ticket

    def take(self, count: int) -> Batch:
        """Remove and return up to `count` turns: an equal share of each tenant's line, in its order."""
        if self.serves_block:
            start, self._taken = self._taken, min(self._taken + count, self._block.size)
            return Batch(self._block.part(start, self._taken))
        taken: list[Ticket] = []
        share = max(1, count // max(1, len(self._lines)))
        while self._lines and len(taken) < count:
            name, line = self._lines.popitem(last=False)
            taken += [line.popleft() for _ in range(min(share, len(line), count - len(taken)))]
            if line:
                self._lines[name] = line  # to the back of the round
        self._len -= len(taken)
        return Batch(TurnColumns.of([ticket.turn for ticket in taken]), list(enumerate(taken)))

    def put_back(self, batch: Batch) -> None:
        """Undo the last `take`: lines and turns return to the front in their former order."""
        if not batch.tickets:
            self._taken -= batch.turns.size
            return
        lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        for _, ticket in batch.tickets:
            lines.setdefault(ticket.turn.tenant, deque()).append(ticket)
            self._len += 1
        for name, line in self._lines.items():
            lines.setdefault(name, deque()).extend(line)
        self._lines = lines

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with waiting turns."""
        return self._lines.keys() | self._block_tenants if self._block_len else self._lines.keys()

    def holds(self, tenant: str) -> bool:
        return tenant in self._lines or (self._block_len > 0 and tenant in self._block_tenants)

    def clear(self) -> None:
        """Drop all waiting turns."""
        self._lines.clear()
        self._len = 0
        self._set_block(TurnColumns.of(()))

    def drop(self, tenant: str) -> Sequence[Ticket]:
        """Remove the waiting turns of a tenant, and return their tickets."""
        dropped = self._lines.pop(tenant, deque())
        self._len -= len(dropped)
        if tenant in self._block_tenants:
            self._set_block(self._block.part(self._taken, self._block.size).without(tenant))
        return list(dropped)


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
        vectors = self._encode(new, turns.vectors)
        rows: list[Rows] = [row for tenant in tenants for row in self.settle_thresholds(tenant)]
        return self._append(new, vectors, rows, len(turns.tenants))

    def _encode(self, new: PlacedTurns, given: Float16 | None = None) -> Encoded:
        """The vectors of the new turns. `given`: vectors that the batch brings along, see TurnColumns."""
        missing: Sequence[int] = range(len(new))
        if given is not None:
            vectors = given[new.places]
            missing = np.flatnonzero(~vectors.any(axis=1)).tolist()
            if not missing:
                return Encoded(vectors)
        names = [new.tenants[owner].name for owner in new.owners[missing].tolist()]
        texts = [new.texts[n] for n in missing]
        if self._embed_timestamp:
            times = [new.timestamps[n] for n in missing]
            texts = [as_embedded(text, at, True) for text, at in zip(texts, times, strict=True)]
        with self._trace.span("encode", texts=len(texts)):
            encoded = self._encoder.embed(names, texts)
        if given is None:
            return encoded
        vectors[missing] = encoded.host
        return Encoded(vectors)

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
