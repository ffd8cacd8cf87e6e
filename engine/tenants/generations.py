"""Generations of memories: those that one policy has made from a tenant's log.

The first generation begins with the log. A change of policy begins another one: the log is read again from
its start, while searches use the previous generation, until the new one reaches the record of the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import Decision, Memory, MemoryKind, Usage
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import Control, control_of, usage_from_json

if TYPE_CHECKING:
    from undertow.kernels.arena.arena import Arena

# The segment of a tier whose memories are no longer searched.
NO_SEGMENT = -1
# The seq of a decision that starts a reread of the log: before all records.
BEFORE_LOG = -1


@dataclass(slots=True)
class Tier:
    """The episodes or the facts of a generation: one arena row each, in order of creation.

    `ended`: the last versions of deleted memories, by id; the journal has the earlier versions.
    """

    segment: int
    rows: list[Memory | None] = field(default_factory=list)
    row_of: dict[str, int] = field(default_factory=dict)
    ended: dict[str, Memory] = field(default_factory=dict)

    def current(self) -> list[Memory]:
        return [m for m in self.rows if m is not None]

    def find(self, memory_id: str) -> Memory | None:
        """The current version of a memory, or the last version of a deleted one. None: unknown id."""
        row = self.row_of.get(memory_id)
        current = None if row is None else self.rows[row]
        return current or self.ended.get(memory_id)

    def set(self, memory: Memory, vector: NDArray[np.float16] | None, arena: Arena) -> None:
        """Store a version. A first version gets a new row; later ones replace it."""
        row = self.row_of.get(memory.id)
        if memory.deleted:
            self.ended[memory.id] = memory
        if self.segment == NO_SEGMENT:
            memory = replace(memory, text="")
        if row is None and vector is not None:
            self.row_of[memory.id] = len(self.rows)
            self.rows.append(memory)
            if self.segment != NO_SEGMENT:
                arena.extend(np.array([self.segment]), vector.reshape(1, -1), live=False)
        elif row is not None and (memory.deleted or vector is None):
            self.rows[row] = None
            if self.segment != NO_SEGMENT:
                arena.redact(np.array([arena.handle(self.segment, row)]))
        elif row is not None and vector is not None:
            self.rows[row] = memory
            if self.segment != NO_SEGMENT:
                arena.write(arena.handle(self.segment, row), vector)


Missed = tuple[str, frozenset[str]]
"""A question that facts did not cover, and the ids of the episodes that covered it."""


def missed_of(body: Mapping[str, Any]) -> Missed:
    """The question and episodes of a `reconsolidate` record."""
    return body["question"], frozenset(body["episode_ids"])


class Generation:
    """The memories that `policy` (None: the store's) has made from a log. `number` counts from 1."""

    def __init__(self, number: int, policy: str | None, arena: Arena) -> None:
        self.number = number
        self.policy = policy
        # One after the last settled turn.
        self.settled_end = 0
        # By id of a fact: the number of answers that used it, as far as the log is decided.
        self.uses: Counter[str] = Counter()
        # The tokens that salient turns have cost, on the day of the last that were read.
        self.salient_day, self.salient_tokens = "", 0
        self.last_read_at_flush = -1
        # Questions already learned from since anything but a question changed the memories. Bounded by the
        # number of such records in the log.
        self.learned: set[Missed] = set()
        self.tiers: dict[MemoryKind, Tier] = {
            "episode": Tier(arena.new_segment()),
            "fact": Tier(arena.new_segment()),
        }

    def note(self, seq: int, control: Control | None, body: Mapping[str, Any]) -> None:
        """Note a decided record, a turn if `control` is None; `body` is its decision."""
        if (day := body.get("salient_day")) is not None:
            spent = usage_from_json(body.get("usage", {})).get("salient", Usage())
            before = self.salient_tokens if day == self.salient_day else 0
            self.salient_tokens = before + spent.prompt_tokens + spent.completion_tokens
            self.salient_day = day
        match control:
            case Control(kind="used"):
                self.uses.update(control.body["fact_ids"])
            case Control(kind="flush") if body.get("salient_seqs"):
                self.last_read_at_flush = seq
            case Control(kind="reconsolidate"):
                if body["decision"] == Decision.FIRED:
                    self.learned.add(missed_of(control.body))
            case _ if body.get("episode_ids") or body.get("fact_ids"):
                self.learned.clear()

    @property
    def segments(self) -> list[int]:
        return [tier.segment for tier in self.tiers.values() if tier.segment != NO_SEGMENT]

    def retire(self, arena: Arena) -> None:
        """Release its arena rows and texts. Provenance stays in memory; the journal has the texts."""
        for tier in self.tiers.values():
            arena.release(tier.segment)
            tier.segment = NO_SEGMENT
            tier.rows = [m if m is None else replace(m, text="") for m in tier.rows]


def shown_generation(rows: Iterable[Row]) -> int:
    """The number of the searched generation. `rows`: a tenant's control and decision rows, oldest first."""
    rows = list(rows)
    changes = sorted(row.seq for row in rows if row.kind == "control" and is_change(row))
    shown, target = 1, None
    for row in rows if changes else ():
        if row.kind != "decision":
            continue
        if row.seq == BEFORE_LOG:
            target = int(orjson.loads(row.payload)["reread"])
        elif row.seq == target:
            shown, target = 2 + changes.index(target), None
    return shown


def is_change(row: Row) -> bool:
    """Whether a control row is a change of policy within the log."""
    return row.seq >= 0 and control_of(row).kind == "policy"


def since_reread(rows: Iterable[Row]) -> list[Row]:
    """A tenant's rows, oldest first, without decisions and jobs of earlier generations."""
    rows = list(rows)
    begun = max((row.lsn for row in rows if row.kind == "decision" and row.seq == BEFORE_LOG), default=-1)
    return [row for row in rows if row.kind not in ("decision", "job") or row.lsn > begun]
