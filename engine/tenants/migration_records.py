"""Tenants that leave a shard or have come to it: what the `move` rows of its journal say of them.

While a resharding goes on, such a row stands for a tenant by its key alone. At the shard that it leaves:
`sealed` (nothing more is written for it here), then `released` (it has arrived). At the other: `arrived`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.journal import Row


class Moved(UndertowError):
    """The tenant lives at the shard `to`: ask there."""

    def __init__(self, tenant: str, to: str) -> None:
        super().__init__(tenant, to)
        self.tenant, self.to = tenant, to

    def __str__(self) -> str:
        return f"tenant {self.tenant!r} lives at shard {self.to}. Ask there."


class InTransit(UndertowError):
    """The tenant is on its way to the shard `to`: nothing was done; ask the same shard again shortly."""

    def __init__(self, tenant: str, to: str) -> None:
        super().__init__(tenant, to)
        self.tenant, self.to = tenant, to

    def __str__(self) -> str:
        return f"tenant {self.tenant!r} is moving to shard {self.to}. Try again in a moment."


class MoveError(UndertowError):
    """A step of a move cannot be taken; nothing has changed by it."""


class NotYet(MoveError):
    """The other shard's journal cannot be read now: it is being taken over or purged. Try again."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a tenant, as one of the two journals has it. `peer`: the shard at the other end.

    `map_version`: of the shard map that asked for it.
    """

    state: Literal["sealed", "released", "arrived"]
    peer: str
    map_version: int

    def refusal(self, tenant: str) -> Moved | InTransit:
        """What a shard answers for a tenant that leaves it."""
        return (Moved if self.state == "released" else InTransit)(tenant, self.peer)


def move_row(tenant_key: str, move: Move) -> Row:
    body = {"state": move.state, "peer": move.peer, "map": move.map_version}
    return Row("move", "", tenant_key, -1, orjson.dumps(body))


def move_of(row: Row) -> Move:
    body = orjson.loads(row.payload)
    return Move(body["state"], body["peer"], body["map"])
