"""Admission: gives queued turns their seqs, vectors and rows, and drops duplicates. Calls no LLM."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    from undertow.engine.encoders.encode_ahead import EncodeAhead
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


@dataclass(eq=False)
class Block:
    """Turns of a bulk load; those from place `taken` on wait. `rows`: to be committed with the last one."""

    turns: TurnColumns
    rows: Sequence[Row] = ()
    taken: int = 0

    def __len__(self) -> int:
        return self.turns.size - self.taken

    @cached_property
    def tenants(self) -> frozenset[str]:
        return frozenset(self.turns.tenants)

    def drop(self, tenant: str) -> None:
        """Remove the waiting turns of a tenant."""
        if tenant in self.tenants:
            self.turns, self.taken = self.turns.part(self.taken, self.turns.size).without(tenant), 0
            self.tenants -= {tenant}


@dataclass(slots=True)
class Batch:
    """Turns taken from the queue: of a block, or with a ticket each. `rows`: to be committed with them."""

    turns: TurnColumns
    tickets: Sequence[tuple[int, Ticket]] = ()
    block: Block | None = None
    rows: Sequence[Row] = ()


class Inbox:
    """Owns the incoming turns: a bounded queue with one line per tenant, served round-robin.

    A bulk load brings its turns as blocks of columns, which are served in order once the lines are empty.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._line_turns = 0
        self._blocks: deque[Block] = deque()

    def __len__(self) -> int:
        return self._line_turns + sum(map(len, self._blocks))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take, not even a block's rows."""
        return not (self._line_turns or self._blocks)

    @property
    def room(self) -> int:
        """How many turns `put` can queue now: none while a block waits, whose turns must not be overtaken."""
        return 0 if self._blocks else self._limit - self._line_turns

    @property
    def has_tickets(self) -> bool:
        """Whether turns wait that somebody waits for."""
        return self._line_turns > 0

    @property
    def serves_block(self) -> bool:
        """Whether the next turns to be taken are those of a bulk load."""
        return not self._line_turns and bool(self._blocks)

    def has_room_for_block(self, turns: int) -> bool:
        """Whether a block of so many turns can wait now: beside one that is served, one is made ready."""
        return len(self._blocks) < 2 and self._line_turns + turns <= self._limit

    def put_block(self, turns: TurnColumns, rows: Sequence[Row] = ()) -> None:
        """Queue the turns of a bulk load, without tickets. `rows`: to be committed with the last of them.

        QueueFull: see `has_room_for_block`.
        """
        if not self.has_room_for_block(turns.size):
            raise QueueFull(f"{len(self)} turns are waiting to be stored. Try again after a step.")
        self._blocks.append(Block(turns, rows))

    def put(self, turn: Turn | PackedTurn, traceparent: str | None = None) -> Ticket:
        """Queue a turn. QueueFull at the bound, InputError if it cannot be stored; then nothing is queued."""
        if isinstance(turn, Turn):
            turn = pack_turn(turn)
        if self.room <= 0:
            raise QueueFull(f"{self._limit} turns are waiting to be stored. Try again in a moment.")
        ticket = Ticket(turn, traceparent=traceparent)
        self._lines.setdefault(turn.tenant, deque()).append(ticket)
        self._line_turns += 1
        return ticket

    def take(self, count: int) -> Batch:
        """Remove and return up to `count` turns: of a block, or an equal share of each tenant's line."""
        if self.serves_block:
            return self._take_of_block(self._blocks[0], count)
        taken: list[Ticket] = []
        share = max(1, count // max(1, len(self._lines)))
        while self._lines and len(taken) < count:
            name, line = self._lines.popitem(last=False)
            taken += [line.popleft() for _ in range(min(share, len(line), count - len(taken)))]
            if line:
                self._lines[name] = line  # to the back of the round
        self._line_turns -= len(taken)
        return Batch(TurnColumns.of([ticket.turn for ticket in taken]), list(enumerate(taken)))

    def _take_of_block(self, block: Block, count: int) -> Batch:
        start, block.taken = block.taken, min(block.taken + count, block.turns.size)
        turns = block.turns.part(start, block.taken)
        if len(block):
            return Batch(turns, block=block)
        self._blocks.popleft()
        return Batch(turns, block=block, rows=block.rows)

    def put_back(self, batch: Batch) -> None:
        """Undo the last `take`: lines and turns return to the front in their former order."""
        if batch.block is not None:
            if not len(batch.block):
                self._blocks.appendleft(batch.block)
            batch.block.taken -= batch.turns.size
            return
        lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        for _, ticket in batch.tickets:
            lines.setdefault(ticket.turn.tenant, deque()).append(ticket)
            self._line_turns += 1
        for name, line in self._lines.items():
            lines.setdefault(name, deque()).extend(line)
        self._lines = lines

    def peek(self, count: int) -> TurnColumns:
        """The turns that `take` would return now."""
        batch = self.take(count)
        self.put_back(batch)
        return batch.turns

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with waiting turns."""
        return self._lines.keys() | {name for block in self._blocks for name in block.tenants}

    def holds(self, tenant: str) -> bool:
        return tenant in self._lines or any(tenant in block.tenants for block in self._blocks)

    def clear(self) -> None:
        """Drop all that waits."""
        self._lines.clear()
        self._line_turns = 0
        self._blocks.clear()

    def drop(self, tenant: str) -> Sequence[Ticket]:
        """Remove the waiting turns of a tenant, and return their tickets."""
        dropped = self._lines.pop(tenant, deque())
        self._line_turns -= len(dropped)
        for block in self._blocks:
            block.drop(tenant)
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
        encoder: EncodeAhead,
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
        texts = self._as_embedded([new.texts[n] for n in missing], [new.timestamps[n] for n in missing])
        with self._trace.span("encode", texts=len(texts)):
            encoded = self._encoder.embed(names, texts)
        if given is None:
            return encoded
        vectors[missing] = encoded.host
        return Encoded(vectors)

    def encode_ahead(self, turns: TurnColumns) -> None:
        """Begin to embed turns that are to be admitted next, but for those that bring their vectors."""
        if turns.vectors is None:
            self._encoder.begin(turns.tenants, self._as_embedded(turns.texts, turns.timestamps))

    def _as_embedded(self, texts: Sequence[str], timestamps: Sequence[str | None]) -> Sequence[str]:
        if not self._embed_timestamp:
            return texts
        return [as_embedded(text, at, True) for text, at in zip(texts, timestamps, strict=True)]

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
