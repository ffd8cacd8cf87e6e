"""The `move` rows of a journal: tenants that leave a shard or have arrived at it.

During a resharding such a row names a tenant by its key alone. On the source shard it is `sealed` (nothing
more is written for the tenant here), then `released` (the tenant has arrived). On the target shard it is
`arrived`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.journal_rows import Row


class _LeavesShard(UndertowError):
    """The tenant leaves, or has left, for the shard `to`."""

    def __init__(self, tenant: str, to: str) -> None:
        super().__init__(tenant, to)
        self.tenant, self.to = tenant, to


class Moved(_LeavesShard):
    """The tenant is on the shard `to`. Ask there."""

    def __str__(self) -> str:
        return f"tenant {self.tenant!r} lives at shard {self.to}. Ask there."


class InTransit(_LeavesShard):
    """The tenant is moving to the shard `to`. Nothing was done; ask the same shard again shortly."""

    def __str__(self) -> str:
        return f"tenant {self.tenant!r} is moving to shard {self.to}. Try again in a moment."


class MoveError(UndertowError):
    """A step of a move is impossible; nothing changed."""


class NotYet(MoveError):
    """The other shard's journal is being taken over or purged. Try again."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a tenant in one of the two journals. `peer` is the other shard.

    `map_version` is that of the shard map that requires the move.
    """

    state: Literal["sealed", "released", "arrived"]
    peer: str
    map_version: int

    def refusal(self, tenant: str) -> Moved | InTransit:
        """The error for calls to a tenant that leaves this shard."""
        return (Moved if self.state == "released" else InTransit)(tenant, self.peer)


def move_row(tenant_key: str, move: Move) -> Row:
    body = {"state": move.state, "peer": move.peer, "map": move.map_version}
    return Row("move", "", tenant_key, -1, orjson.dumps(body))


def move_of(row: Row) -> Move:
    body = orjson.loads(row.payload)
    return Move(body["state"], body["peer"], body["map"])
