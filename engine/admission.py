"""From the queue to durable and searchable: seqs, dedupe, vectors, rows. No LLM stands here."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from undertow.engine.encoder import TenantTextCache
from undertow.engine.journal import Row
from undertow.engine.model import Turn, UndertowError
from undertow.engine.policies.base import Thresholds
from undertow.engine.records import Control, control_row, key_hash, turn_row
from undertow.engine.tenants import Tenant, Tenants
from undertow.kernels.arena import Arena


class QueueFull(UndertowError):
    """The queue of incoming turns is at its bound: try again after a step."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A turn is stored under this id; `duplicate` when it had been stored before."""

    tenant: str
    id: str | None
    seq: int | None
    duplicate: bool


@dataclass(slots=True)
class Ticket:
    """A turn in the queue; its receipt comes once the turn is durable and searchable."""

    turn: Turn
    receipt: Receipt | None = None


class Inbox:
    """Bounded queue of incoming turns, one line a tenant, served round-robin."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def room(self) -> int:
        return self._limit - self._len

    def put(self, turn: Turn) -> Ticket:
        """QueueFull at the bound: nothing was taken."""
        if self.room <= 0:
            raise QueueFull(f"{self._limit} turns are waiting to be stored. Try again in a moment.")
        ticket = Ticket(turn)
        self._lines.setdefault(turn.tenant, deque()).append(ticket)
        self._len += 1
        return ticket

    def take(self, count: int) -> list[Ticket]:
        """Up to `count` turns: an equal share of each tenant's line, in its order."""
        taken: list[Ticket] = []
        share = max(1, count // max(1, len(self._lines)))
        while self._lines and len(taken) < count:
            name, line = self._lines.popitem(last=False)
            taken += [line.popleft() for _ in range(min(share, len(line), count - len(taken)))]
            if line:
                self._lines[name] = line  # to the back of the round
        self._len -= len(taken)
        return taken

    def holds(self, tenant: str) -> bool:
        return tenant in self._lines

    def drop(self, tenant: str) -> None:
        """Forget what a tenant that is being erased had waiting."""
        self._len -= len(self._lines.pop(tenant, ()))


class Admission:
    """Gives each incoming turn its seq, vector and row, and each tenant its settings in force."""

    def __init__(
        self,
        tenants: Tenants,
        arena: Arena,
        encoder: TenantTextCache,
        thresholds: Thresholds,
        *,
        embed_timestamp: bool,
    ) -> None:
        self._tenants = tenants
        self._arena = arena
        self._encoder = encoder
        self._thresholds = thresholds
        self._embed_timestamp = embed_timestamp

    def admit(self, tickets: list[Ticket]) -> tuple[list[Row], list[Receipt], list[Tenant]]:
        """Rows for the journal, receipts (one a ticket) to give once they are committed, and tenants.

        The turns are in the tenants' logs and in the arena when this returns.
        """
        names = list(dict.fromkeys(ticket.turn.tenant for ticket in tickets))
        by_name = dict(zip(names, self._tenants.get_many(names), strict=True))
        rows: list[Row] = []
        for tenant in by_name.values():
            rows += self.settle_thresholds(tenant)
        receipts: list[Receipt] = []
        turns: list[tuple[Row, Tenant, str]] = []
        for ticket in tickets:
            turn = ticket.turn
            tenant = by_name[turn.tenant]
            key = key_hash(turn.dedupe_key)
            if key in tenant.keys:
                receipts.append(Receipt(turn.tenant, None, None, duplicate=True))
                continue
            row, text = self._append(tenant, turn, key)
            turns.append((row, tenant, text))
            receipts.append(Receipt(turn.tenant, row.id, row.seq, duplicate=False))
        self._embed(turns)
        return rows + [row for row, _, _ in turns], receipts, list(by_name.values())

    def _append(self, tenant: Tenant, turn: Turn, key: int) -> tuple[Row, str]:
        """A turn without a time of its own inherits its session's previous one."""
        timestamp = turn.timestamp or tenant.last_timestamp.get(turn.session_id)
        row = turn_row(tenant.name, tenant.key, tenant.generation, tenant.next_seq, turn, timestamp)
        tenant.add_turn(row.payload, key, turn.session_id, timestamp)
        text = turn.text
        if self._embed_timestamp and timestamp is not None:
            text = f"{timestamp}\n{text}"
        return row, text

    def _embed(self, turns: list[tuple[Row, Tenant, str]]) -> None:
        if not turns:
            return
        vectors = self._encoder.encode([t.name for _, t, _ in turns], [text for _, _, text in turns])
        segments = np.array([t.turns_segment for _, t, _ in turns], dtype=np.int64)
        self._arena.extend(segments, vectors, live=True)
        for (row, _, _), vector in zip(turns, vectors, strict=True):
            row.vector = vector

    def settle_thresholds(self, tenant: Tenant) -> list[Row]:
        """Log the thresholds where they are new to the tenant: they hold for later seqs only."""
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
