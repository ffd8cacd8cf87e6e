"""Admission: gives queued turns their seqs, vectors and rows, and drops duplicates. Calls no LLM."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from undertow.engine.base.model import PackedTurn, Turn, UndertowError, as_embedded
from undertow.engine.base.results import Receipt
from undertow.engine.encoders.base import Encoded
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.storage.journal_rows import Row, Rows
from undertow.engine.storage.row_codec import Control, control_row, pack_turn, vector_row
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

    `traceparent` belongs to the request that brought the turn, see engine/base/trace.py.
    """

    turn: PackedTurn
    receipt: Receipt | None = None
    traceparent: str | None = None


@dataclass(eq=False)
class Block:
    """Turns that came together, as columns; those from place `taken` on wait.

    `rows`: to be committed with the last turn. `stored`: the id and seq of each turn that is durable and
    searchable, in order; None and None for a duplicate. Whoever wants them removes them.
    """

    turns: TurnColumns
    rows: Sequence[Row] = ()
    traceparent: str | None = None
    taken: int = 0
    stored: list[tuple[str | None, int | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.turns.size - self.taken

    @cached_property
    def tenants(self) -> frozenset[str]:
        return frozenset(self.turns.tenants)

    def drop(self, tenant: str) -> bool:
        """Remove the waiting turns of a tenant. Whether there were any."""
        if tenant not in self.tenants:
            return False
        before = len(self)
        self.turns, self.taken = self.turns.part(self.taken, self.turns.size).without(tenant), 0
        self.tenants -= {tenant}
        return len(self) < before


@dataclass(slots=True)
class Batch:
    """Turns taken from the queue: those with a ticket each, then parts of blocks with their numbers of turns.

    `rows`: to be committed with them.
    """

    turns: TurnColumns
    tickets: Sequence[Ticket] = ()
    parts: Sequence[tuple[Block, int]] = ()
    rows: Sequence[Row] = ()

    @property
    def traceparents(self) -> Sequence[str | None]:
        """That of each turn; nothing if none has one."""
        parents = [ticket.traceparent for ticket in self.tickets]
        for block, count in self.parts:
            parents += [block.traceparent] * count
        return parents if any(parents) else ()

    def acknowledge(self, new: Admitted) -> None:
        """Hand out what the turns have become. They are durable and searchable."""
        for place, ticket in enumerate(self.tickets):
            ticket.receipt = new.receipt(place, ticket.turn.tenant)
        start = len(self.tickets)
        for block, count in self.parts:
            end = start + count
            block.stored += zip(new.ids[start:end], new.seqs[start:end], strict=True)
            start = end


class Inbox:
    """Owns the incoming turns: a queue with one line per tenant, served round-robin.

    Turns that come together may wait as a block of columns. Blocks are served in order, beside the lines. A
    tenant's turns never overtake each other.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: of the turns in lines, and of those in blocks."""
        self._limit = limit
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._line_turns = 0
        self._blocks: deque[Block] = deque()
        # who gets the odd turn next, if turns wait in both: 1: the lines, 0: the blocks
        self._odd = 1

    def __len__(self) -> int:
        return self._line_turns + sum(map(len, self._blocks))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take, not even a block's rows."""
        return not (self._line_turns or self._blocks)

    @property
    def has_tickets(self) -> bool:
        """Whether turns wait in lines."""
        return self._line_turns > 0

    @property
    def has_blocks(self) -> bool:
        """Whether turns wait in blocks."""
        return bool(self._blocks)

    def _may_serve(self, block: Block) -> bool:
        """Whether a block has no tenant whose turns wait in a line: those came first."""
        return block.tenants.isdisjoint(self._lines)

    def has_room_for(self, tenant: str) -> bool:
        """Whether a turn of the tenant can be queued now: not while a block waits that holds earlier ones."""
        return self._line_turns < self._limit and not any(tenant in block.tenants for block in self._blocks)

    def has_room_for_block(self, turns: int) -> bool:
        """Whether a block of so many turns can wait now, whatever waits in lines.

        Beside one that is served, one is made ready; more wait up to the bound.
        """
        return len(self._blocks) < 2 or sum(map(len, self._blocks)) + turns <= self._limit

    def put_block(self, block: Block) -> None:
        """Queue turns that came together. QueueFull: see `has_room_for_block`."""
        if not self.has_room_for_block(len(block)):
            raise QueueFull(f"{len(self)} turns are waiting to be stored. Try again after a step.")
        self._blocks.append(block)

    def put(self, turn: Turn | PackedTurn, traceparent: str | None = None) -> Ticket:
        """Queue a turn. QueueFull: see `has_room_for`. InputError: it cannot be stored."""
        if isinstance(turn, Turn):
            turn = pack_turn(turn)
        if not self.has_room_for(turn.tenant):
            raise QueueFull(f"{len(self)} turns are waiting to be stored. Try again in a moment.")
        ticket = Ticket(turn, traceparent=traceparent)
        self._lines.setdefault(turn.tenant, deque()).append(ticket)
        self._line_turns += 1
        return ticket

    def take(self, count: int) -> Batch:
        """Remove and return up to `count` turns: an equal share of each tenant's line, and of blocks.

        Where turns wait in both, half of the count is for each, and what one does not need is for the other.
        """
        taken = self._take_of_lines((count + self._odd) // 2 if self._blocks else count)
        self._odd ^= 1
        count -= len(taken)
        columns: list[TurnColumns] = []
        parts: list[tuple[Block, int]] = []
        rows: list[Row] = []
        while self._blocks and count > 0 and self._may_serve(self._blocks[0]):
            block = self._blocks[0]
            start, block.taken = block.taken, min(block.taken + count, block.turns.size)
            columns.append(block.turns.part(start, block.taken))
            parts.append((block, block.taken - start))
            count -= block.taken - start
            if not len(block):
                rows += self._blocks.popleft().rows
        taken += self._take_of_lines(count)  # of other tenants than those of the blocks: see `_may_serve`
        if taken or not parts:
            columns = [TurnColumns.of([ticket.turn for ticket in taken]), *columns]
        return Batch(TurnColumns.joined(columns), taken, parts, rows)

    def _take_of_lines(self, count: int) -> list[Ticket]:
        taken: list[Ticket] = []
        share = max(1, count // max(1, len(self._lines)))
        while self._lines and len(taken) < count:
            name, line = self._lines.popitem(last=False)
            taken += [line.popleft() for _ in range(min(share, len(line), count - len(taken)))]
            if line:
                self._lines[name] = line  # to the back of the round
        self._line_turns -= len(taken)
        return taken

    def put_back(self, batch: Batch) -> None:
        """Undo the last `take`: lines, blocks and turns return to the front in their former order."""
        self._odd ^= 1
        for block, count in reversed(batch.parts):
            if not len(block):
                self._blocks.appendleft(block)
            block.taken -= count
        lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        for ticket in batch.tickets:
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

    def drop(self, tenant: str) -> bool:
        """Remove the waiting turns of a tenant. Whether there were any."""
        dropped = self._lines.pop(tenant, deque())
        self._line_turns -= len(dropped)
        of_blocks = [block.drop(tenant) for block in self._blocks]
        return bool(dropped) or any(of_blocks)


@dataclass(slots=True)
class Admitted:
    """Turns that are in memory: the rows to commit, and the tenants involved.

    `ids` and `seqs`: one entry a turn, None for a duplicate; to be handed out after the commit. `outage`: why
    some turns have no vector yet.
    """

    rows: list[Rows]
    ids: list[str | None]
    seqs: list[int | None]
    fresh_turns: int
    tenants: Sequence[Tenant]
    outage: EncoderDown | None = None

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
        """Store turns in the tenants' logs and in the arena. ArenaFull, EncoderDown: nothing changed.

        In an outage of the encoder turns are stored without vectors, which `embed_awaited` makes later.
        EncoderDown: waiting for the encoder would not help.
        """
        try:
            return self._admit(turns)
        finally:
            self._tenants.unpin()

    def _admit(self, turns: TurnColumns) -> Admitted:
        tenants = self._tenants.get_many(list(dict.fromkeys(turns.tenants)))
        new = PlacedTurns.plan(turns, tenants)
        # Everything that can fail comes before any tenant changes: first arena memory, then the encoder.
        try:
            self._tenants.reserve(new.segments)
            vectors, outage = self._encoded(new, turns.vectors)
        except UndertowError:
            for tenant in tenants:
                if not tenant.thresholds_from:  # no record yet, so this is a new tenant
                    self._tenants.remove(tenant.name)
            raise
        rows: list[Rows] = [row for tenant in tenants for row in self.settle_thresholds(tenant)]
        return self._append(new, vectors, rows, len(turns.tenants), outage)

    def _encoded(self, new: PlacedTurns, given: Float16 | None) -> tuple[Encoded, EncoderDown | None]:
        """The vectors of the new turns, or the outage in which those that were not given are zeros."""
        try:
            return self._encode(new, given), None
        except EncoderDown as down:
            if not math.isfinite(down.silent_s):
                raise
            none = np.zeros((len(new), self._arena.dim), np.float16)
            return Encoded(none if given is None else given[new.places]), down

    def embed_awaited(self, turns: Sequence[tuple[Tenant, int]]) -> list[Rows]:
        """Make the vectors of turns that were stored without, given by seq. EncoderDown: nothing changed.

        When this returns, they are in the arena. Returns their rows.
        """
        said = [tenant.said(seq) for tenant, seq in turns]
        texts = self._as_embedded([text for text, _ in said], [at for _, at in said])
        with self._trace.span("encode", texts=len(texts)):
            vectors = self._encoder.embed([tenant.name for tenant, _ in turns], texts).host
        at = [self._arena.handle(of.turns_segment, of.row_by_seq[seq]) for of, seq in turns]
        self._arena.write(np.array(at, np.int64), vectors)
        rows: list[Rows] = []
        for (tenant, seq), vector in zip(turns, vectors, strict=True):
            del tenant.awaiting[seq]
            id = tenant.turn_id(seq)
            rows.append(vector_row(tenant.name, tenant.key, seq, id, vector))
        return rows

    def _encode(self, new: PlacedTurns, given: Float16 | None = None) -> Encoded:
        """The vectors of the new turns. `given`: vectors that the batch brings along, see TurnColumns."""
        missing: Sequence[int] = range(len(new))
        if given is not None:
            vectors = given[new.places]
            missing = np.flatnonzero(~vectors.any(axis=1)).tolist()
            if not missing:
                return Encoded(vectors)
        of_owner = [tenant.name for tenant in new.tenants]
        names = [of_owner[owner] for owner in new.owners[missing].tolist()]
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

    def _append(
        self,
        new: PlacedTurns,
        vectors: Encoded,
        rows: list[Rows],
        count: int,
        outage: EncoderDown | None = None,
    ) -> Admitted:
        """Append the new ones of `count` turns to the logs and the arena, and their rows to `rows`.

        In an `outage` a turn whose vector is zero waits for one.
        """
        segments = new.segments
        missing = None if outage is None else np.logical_not(vectors.host.any(axis=1))
        seqs = new.append()
        ids, of_turns = new.rows(seqs, vectors.host, missing)
        for place in () if missing is None else np.flatnonzero(missing).tolist():
            new.tenants[new.owners[place]].awaiting[int(seqs[place])] = None
        with self._trace.span("append", rows=len(new)):
            self._arena.extend(segments, vectors.on(self._arena.device), live=True)
        rows += of_turns
        admitted = Admitted(rows, [None] * count, [None] * count, len(new), new.tenants, outage)
        for place, id, seq in zip(new.places, ids, seqs.tolist(), strict=True):
            admitted.ids[place], admitted.seqs[place] = id, seq
        return admitted

    def replace(self, tenant: Tenant, deletion: Mapping[str, Any], turn: Turn) -> tuple[list[Rows], Receipt]:
        """Rows of a turn's deletion (`deletion` is its body) and of the turn that replaces it.

        The new turn keeps its own timestamp. When this returns, both are in the tenant's log and in the
        arena. ArenaFull, EncoderDown: nothing changed. The thresholds in force stay: nothing is ingested.
        """
        new = PlacedTurns.single(pack_turn(turn), tenant)
        self._tenants.reserve(new.segments)
        vectors = self._encode(new)
        place = tenant.turn_id(tenant.next_seq + 1)
        control = Control("delete", tenant.next_seq, {**deletion, "replaced_by": place})
        tenant.add_control(control)
        admitted = self._append(new, vectors, [control_row(tenant.name, tenant.key, control)], 1)
        return admitted.rows, admitted.receipt(0, tenant.name)

    def settle_thresholds(self, tenant: Tenant) -> list[Row]:
        """Log the current thresholds if they differ from the tenant's. They apply from the next seq on."""
        if tenant.thresholds_from and tenant.thresholds_from[-1][1] == self._thresholds:
            return []
        seq = tenant.next_seq if tenant.thresholds_from else -1
        control = Control("settings", seq, self._thresholds.body)
        tenant.add_control(control)
        return [control_row(tenant.name, tenant.key, control)]
