"""One tenant's live state, as a fold over its journal rows: the same code runs live and at replay.

Row numbers of the arena are positions: the turn segment holds one row a turn in seq order, the
episode and fact segments one row a memory in order of birth (a new version overwrites its row). So
"lower row" is "lower seq, then lower ordinal", which is how ties are settled everywhere.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import Decision, Memory, MemoryKind, Usage, lines_of
from undertow.engine.policies.base import Thresholds, TurnView
from undertow.engine.storage.row_codec import Control, LlmJob, messages_of, usage_from_json, without_words
from undertow.engine.tenants.generations import Generation, Tier
from undertow.kernels.arena.arena import Arena

# what `counts` has of the decisions of the generation that the cursor makes
DECISION_COUNTS = ("merges", "merge_refusals", "consolidations", "partition_repairs")
NO_ROW = -1
NO_SEQ = -1


class Tenant:
    """Log, cursor, marks and memories of one tenant.

    Marks and jobs are those of `making`, the generation that the cursor makes; searches see `shown`. They
    are two only while the log is read again for a change of policy.
    """

    def __init__(self, name: str, key: str, arena: Arena) -> None:
        self.name = name
        self.key = key
        # which life of its name: 1, and one more with each that was erased
        self.life = 1
        self.cursor = 0
        self.turns_segment = arena.new_segment()
        self.making = self.shown = Generation(1, None, arena)
        self.retired: list[Generation] = []
        # changes of policy in the log, (seq, name), oldest first
        self.changes: list[tuple[int, str]] = []
        # the change for which the log is being read again
        self.reread_to: int | None = None
        # meanwhile: of the turns at its beginning, bool [rows], those that `shown` had made nothing of
        self.unconsolidated: NDArray[np.bool_] | None = None
        # By seq: the payload of a turn (None once deleted), or the control record.
        self.records: list[bytes | Control | None] = []
        self.row_by_seq = array("q")
        self.seq_by_row = array("q")
        # By hash of a turn's dedupe key: its seq, also of a deleted one. About 100 bytes a turn.
        self.keys: dict[int, int] = {}
        self.last_timestamp: dict[str, str] = {}
        self.thresholds_from: list[tuple[int, Thresholds]] = []
        # by id of an episode or fact: the last record that deletes or updates it
        self._changes: dict[str, int] = {}
        self.jobs: dict[str, LlmJob] = {}
        self.counts: Counter[str] = Counter()
        self.meter: dict[str, Usage] = {}
        self._arena = arena

    # ---- the log

    def thresholds_at(self, seq: int) -> Thresholds:
        return next(t for since, t in reversed(self.thresholds_from) if since <= seq)

    def turn(self, seq: int) -> TurnView:
        record = self.records[seq]
        if record is None:
            return TurnView(seq, "", None)
        if isinstance(record, Control):
            raise ValueError(f"record {seq} of the log is no turn")
        body = orjson.loads(record)
        lines = lines_of(messages_of(body))
        return TurnView(seq, "\n".join(lines), body.get("timestamp"), lines, body["session"])

    def exists(self, seq: int) -> bool:
        return isinstance(self.records[seq], bytes)

    def controls_after(self, seq: int) -> Iterator[Control]:
        """The control records behind record `seq`."""
        return (record for record in self.records[seq + 1 :] if isinstance(record, Control))

    @property
    def tiers(self) -> Mapping[MemoryKind, Tier]:
        """What is searched."""
        return self.shown.tiers

    def current(self, kind: MemoryKind) -> list[Memory]:
        return self.tiers[kind].current()

    def episode_of(self, fact: Memory) -> Memory | None:
        """The episode that the fact was written in sight of, or its last version where it was deleted."""
        if fact.episode_id is None:
            return None
        return self.tiers["episode"].find(fact.episode_id)

    def is_changing(self, memory: Memory) -> bool:
        """Whether a user has deleted or updated the memory, and the cursor has yet to come to it.

        While the log is read again, that is so of none: no memory can be edited then.
        """
        return self.reread_to is None and self._changes.get(memory.id, NO_SEQ) >= self.cursor

    # ---- changes of policy

    @property
    def generation(self) -> int:
        """What the ids of memories and jobs are made with; no other life of the name has it."""
        return self.life + self.making.number - 1

    @property
    def change_ahead(self) -> tuple[int, str] | None:
        """The newest change of policy, while searches do not see what it makes."""
        return self.changes[-1] if self.shown.number <= len(self.changes) else None

    def begins_reread(self, seq: int) -> bool:
        """Whether to decide this record is to read the log again."""
        is_change = any(seq == change for change, _ in self.changes)
        return is_change and (self.reread_to is None or seq > self.reread_to)

    def upcoming(self, count: int) -> range:
        """The next records to be decided, `count` at most; a change of policy ends them.

        While the log is read again a newer change comes first: what was begun is of no use any more.
        """
        target = self.reread_to
        if target is not None and (newest := self.changes[-1][0]) > target:
            return range(newest, newest + 1)
        ends = [seq for seq, _ in self.changes if seq >= self.cursor and target in (None, seq)]
        return range(self.cursor, min(self.cursor + count, self.next_seq, *(seq + 1 for seq in ends)))

    def _reread(self, target: int) -> None:
        """Begin to read the log again, up to the change of policy at record `target`."""
        if self.reread_to is None:
            self.unconsolidated = self._not_consolidated()
        else:
            self._retire(self.making)
        number = [seq for seq, _ in self.changes].index(target)
        self.making = Generation(number + 2, self.changes[number][1], self._arena)
        self.reread_to, self.cursor, self.jobs = target, 0, {}
        for count in DECISION_COUNTS:
            del self.counts[count]
        self._arena.set_live(self._turn_handles(s for s in self.seq_by_row if self.exists(s)), True)

    def _switch(self) -> None:
        """The log was read again: from here on searches see what came of it."""
        self._retire(self.shown)
        self.shown = self.making
        self.reread_to = self.unconsolidated = None

    def _retire(self, generation: Generation) -> None:
        generation.retire(self._arena)
        self.retired.append(generation)

    def _not_consolidated(self) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = (self._arena.flags(self.turns_segment) & Arena.LIVE) != 0
        for job in self.jobs.values():
            if job.state == "parked":
                kept[[self.row_by_seq[seq] for seq in job.cluster]] = True
        return kept

    def not_consolidated(self) -> NDArray[np.bool_]:
        """The turns that no memory in `shown` was made of, bool [rows]: live, or of a job that is parked."""
        if self.unconsolidated is None:
            return self._not_consolidated()
        later = np.ones(len(self.seq_by_row) - len(self.unconsolidated), dtype=bool)
        return np.concatenate([self.unconsolidated, later])

    @property
    def may_change(self) -> bool:
        """Whether `is_changing` can be true of any memory."""
        return bool(self._changes) and self.cursor < self.next_seq

    # ---- sizes

    @property
    def next_seq(self) -> int:
        return len(self.records)

    @property
    def undecided_count(self) -> int:
        return sum(self.row_by_seq[s] != NO_ROW for s in range(self.cursor, self.next_seq))

    @property
    def waiting_count(self) -> int:
        """Decided turns that still count in gates."""
        live = self._arena.flags(self.turns_segment)[: self.rows_before(self.cursor)] & Arena.LIVE
        return int(np.count_nonzero(live))

    def rows_before(self, seq: int) -> int:
        """How many turn rows stand before record `seq`: the causal mask of its gate."""
        return int(np.searchsorted(np.frombuffer(self.seq_by_row, dtype=np.int64), seq))

    # ---- the fold

    def add_turn(self, payload: bytes | None, key: int, session: str, timestamp: str | None) -> int:
        """The next record of the log is a turn (None: a deleted one). Returns its arena row.

        The caller appends the turn's vector to `turns_segment`, in the same order.
        """
        row = len(self.seq_by_row)
        self.keys[key] = len(self.records)
        self.row_by_seq.append(row)
        self.seq_by_row.append(len(self.records))
        self.records.append(payload)
        if payload is None:
            self.counts["deleted"] += 1
        if timestamp is not None:
            self.last_timestamp[session] = timestamp
        return row

    def add_control(self, control: Control) -> None:
        """The next record of the log is a control record (or, with seq -1, stands before it)."""
        if control.kind == "settings":
            self.thresholds_from.append((control.seq + 1, Thresholds(**control.body)))
        if control.kind == "policy":
            if control.seq < 0:
                self.making.policy = control.body["policy"]
            else:
                self.changes.append((control.seq, control.body["policy"]))
        if control.seq < 0:
            return
        if "memory_id" in control.body:
            self._changes[control.body["memory_id"]] = control.seq
        self.records.append(control)
        self.row_by_seq.append(NO_ROW)

    def redact_turn(self, seq: int) -> None:
        """A deleted turn is gone from every answer at once, before the cursor reaches its record."""
        if self.records[seq] is not None:
            self.records[seq] = None
            self.counts["deleted"] += 1
        self._arena.redact(self._turn_handles([seq]))

    def redact_updates(self, before: int, memory_ids: Collection[str]) -> list[Control]:
        """Take the words out of these memories' updates in front of record `before`; what is left of them."""
        redacted = []
        for seq, record in enumerate(self.records[:before]):
            if not isinstance(record, Control) or record.kind != "update" or "text" not in record.body:
                continue
            if record.body["memory_id"] in memory_ids:
                redacted.append(without_words(record))
                self.records[seq] = redacted[-1]
        return redacted

    def set_memory(self, memory: Memory, vector: NDArray[np.float16] | None) -> None:
        """See Tier.set."""
        made = next(g for g in self.generations if g.number == memory.generation)
        made.tiers[memory.kind].set(memory, vector, self._arena)

    def add_decision(self, seq: int, body: Mapping[str, Any]) -> None:
        """Move the cursor past `seq` and mark what the decision settled.

        One before the log, with the change of policy that it is for (`reread`), begins to read it again.
        """
        if (target := body.get("reread")) is not None:
            self._reread(target)
            return
        self.cursor = seq + 1
        self.making.note(self.records[seq], body)
        if settled := body.get("settled"):
            self._arena.set_live(self._turn_handles(settled), False)
            self.making.settled_end = max(self.making.settled_end, max(settled) + 1)
        if revived := body.get("revived"):
            alive = [s for s in revived if self.exists(s)]
            self._arena.set_live(self._turn_handles(alive), True)
        for job in [j for j in self.jobs.values() if j.seq == seq and j.state == "pending"]:
            del self.jobs[job.id]
        self._count(body)
        for operation, usage in usage_from_json(body.get("usage", {})).items():
            self.add_usage(operation, usage)
        if seq == self.reread_to:
            self._switch()

    def _count(self, body: Mapping[str, Any]) -> None:
        decision = body["decision"]
        if decision == Decision.MERGED:
            self.counts["merges"] += 1
        elif body.get("merge_asked") and not (
            decision == Decision.PARKED and body.get("operation") == "merge"
        ):
            self.counts["merge_refusals"] += 1
        if decision == Decision.FIRED and body.get("cluster_seqs"):
            self.counts["consolidations"] += 1
        self.counts["partition_repairs"] += body.get("repairs", 0)

    def add_usage(self, operation: str, usage: Usage) -> None:
        self.meter[operation] = self.meter.get(operation, Usage()) + usage

    def add_job(self, job: LlmJob) -> None:
        if job.state == "replayed":
            self.jobs.pop(job.id, None)
        else:
            self.jobs[job.id] = job

    def _turn_handles(self, seqs: Iterable[int]) -> NDArray[np.int64]:
        rows = [self.row_by_seq[s] for s in seqs]
        return np.array([Arena.handle(self.turns_segment, r) for r in rows], dtype=np.int64)

    @property
    def segments(self) -> list[int]:
        """Where the arena has this tenant's rows."""
        shown = [] if self.shown is self.making else self.shown.segments
        return [self.turns_segment, *self.making.segments, *shown]

    @property
    def generations(self) -> list[Generation]:
        """All of them, the one that the cursor makes first."""
        shown = [] if self.shown is self.making else [self.shown]
        return [self.making, *shown, *self.retired]

    def make_place(self, memories: Iterable[Memory]) -> bool:
        """Room in the arena for those that are new; False where there is none, and nothing has changed."""
        tiers = [(self.making.tiers[m.kind], m.id) for m in memories if not m.deleted]
        new = [tier.segment for tier, memory_id in tiers if memory_id not in tier.row_of]
        try:
            self._arena.reserve(np.array(new, dtype=np.int64))
        except MemoryError:
            return False
        return True

    def release(self) -> None:
        """Give the arena back what this tenant holds there."""
        for segment in self.segments:
            self._arena.release(segment)


@dataclass(frozen=True, slots=True)
class View:
    """A generation of a tenant's memories as record `seq` sees them: the `MemoryView` of policies."""

    of: Tenant
    seq: int
    made: Generation

    @property
    def tenant(self) -> str:
        return self.of.name

    @property
    def generation(self) -> int:
        return self.of.life + self.made.number - 1

    @property
    def thresholds(self) -> Thresholds:
        return self.of.thresholds_at(self.seq)

    def turn(self, seq: int) -> TurnView:
        return self.of.turn(seq)

    def exists(self, seq: int) -> bool:
        return self.of.exists(seq)

    def open_turns(self) -> list[int]:
        return [seq for seq in range(self.made.settled_end, self.seq) if self.of.exists(seq)]

    def uses(self) -> Mapping[str, int]:
        return self.made.uses

    def current(self, kind: MemoryKind) -> list[Memory]:
        return self.made.tiers[kind].current()

    def ended(self, kind: MemoryKind) -> list[Memory]:
        return list(self.made.tiers[kind].ended.values())
