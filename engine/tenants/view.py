"""What a policy sees of a tenant while it decides a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Memory, MemoryKind
from undertow.engine.policies.base import Thresholds, TurnView
from undertow.engine.tenants.generations import Generation
from undertow.engine.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class View:
    """One generation of a tenant's memories as of record `seq`; implements `MemoryView`."""

    of: Tenant
    seq: int
    made: Generation

    @property
    def tenant(self) -> str:
        return self.of.name

    @property
    def generation(self) -> int:
        return self.of.incarnation + self.made.number - 1

    @property
    def thresholds(self) -> Thresholds:
        return self.of.thresholds_at(self.seq)

    def thetas_are_due(self, seq: int) -> bool:
        return self.of.thetas_are_due(seq)

    def turn(self, seq: int) -> TurnView:
        return self.of.turn(seq)

    def exists(self, seq: int) -> bool:
        return self.of.exists(seq)

    def open_turns(self) -> list[int]:
        return [seq for seq in range(self.made.settled_end, self.seq) if self.of.exists(seq)]

    def turns_before(self, seq: int) -> int:
        return self.of.rows_before(seq)

    def turns_to(self, seq: int, count: int) -> list[int]:
        end = self.of.rows_before(seq + 1)
        return [s for s in self.of.seq_by_row[max(0, end - count) : end] if self.of.exists(s)]

    def look_back(
        self, seqs: Sequence[int], count: int, measure: Callable[[TurnView], int]
    ) -> NDArray[np.int32]:
        last = np.frombuffer(self.of.row_by_seq, np.int32)[list(seqs)]
        return self.of.measured(last[:, None] + np.arange(1 - count, 1), measure)

    def counts(self, seq: int) -> bool:
        return self.of.is_live(seq)

    def salient_tokens(self, day: str) -> int:
        return self.made.salient_tokens if day == self.made.salient_day else 0

    def last_read_at_flush(self) -> int:
        return self.made.last_read_at_flush

    def uses(self) -> Mapping[str, int]:
        return self.made.uses

    def current(self, kind: MemoryKind) -> list[Memory]:
        return self.made.tiers[kind].current()

    def ended(self, kind: MemoryKind) -> list[Memory]:
        return list(self.made.tiers[kind].ended.values())
