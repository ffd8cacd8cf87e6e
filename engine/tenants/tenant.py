"""One tenant's live state. The same methods build it live and at replay from the journal.

Arena rows are positions: the turn segment has one row per turn in seq order, the episode and fact segments
one row per memory in order of creation (a new version overwrites its row). So a lower row means a lower seq,
then a lower ordinal, and that is how ties are broken everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Decision, Memory, MemoryKind, Usage
from undertow.engine.policies.base import Thresholds
from undertow.engine.storage.row_codec import Control, LlmJob, usage_from_json
from undertow.engine.tenants.generations import Generation, Tier
from undertow.engine.tenants.log import NO_ROW, RecordLog
from undertow.engine.tenants.payload_file import PayloadFile
from undertow.kernels.arena.arena import Arena

# The entries of `counts` that belong to the generation that the cursor builds.
DECISION_COUNTS = ("merges", "merge_refusals", "consolidations", "partition_repairs")
NO_SEQ = -1


class Tenant(RecordLog):
    """Log, cursor, live flags, jobs and memories of one tenant.

    The cursor builds the generation `making`, to which flags and jobs belong; searches see `shown`. The two
    differ only while the log is read again after a change of policy.
    """

    def __init__(self, name: str, key: str, arena: Arena, texts: PayloadFile, incarnation: int = 1) -> None:
        """`incarnation`: 1, and higher with each earlier one of the name that was erased."""
        super().__init__(name, incarnation, texts)
        self.key = key
        self.cursor = 0
        self.turns_segment = arena.new_segment()
        self.making = self.shown = Generation(1, None, arena)
        self.retired: list[Generation] = []
        # Changes of policy in the log, (seq, name), oldest first.
        self.changes: list[tuple[int, str]] = []
        # The seq of the change for which the log is being read again.
        self.reread_to: int | None = None
        # Meanwhile, for the turns before the reread, bool [rows]: not consolidated in `shown`.
        self.unconsolidated: NDArray[np.bool_] | None = None
        # By id of an episode or fact: the seq of the last record that deletes or updates it.
        self._changes: dict[str, int] = {}
        self.jobs: dict[str, LlmJob] = {}
        self.counts: Counter[str] = Counter(deleted=0)
        self.meter: dict[str, Usage] = {}
        self._arena = arena

    @property
    def tiers(self) -> Mapping[MemoryKind, Tier]:
        """The tiers that searches see."""
        return self.shown.tiers

    def current(self, kind: MemoryKind) -> list[Memory]:
        return self.tiers[kind].current()

    def episode_of(self, fact: Memory) -> Memory | None:
        """The episode shown when the fact was written; its last version if it was deleted."""
        if fact.episode_id is None:
            return None
        return self.tiers["episode"].find(fact.episode_id)

    def is_changing(self, memory: Memory) -> bool:
        """Whether a user's deletion or update of the memory is still undecided.

        Always False while the log is read again: no memory can be edited then.
        """
        return self.reread_to is None and self._changes.get(memory.id, NO_SEQ) >= self.cursor

    # ---- changes of policy

    @property
    def generation(self) -> int:
        """The number that ids of memories and jobs contain; unique over all incarnations of the name."""
        return self.incarnation + self.making.number - 1

    @property
    def change_ahead(self) -> tuple[int, str] | None:
        """The newest change of policy, until searches see its memories."""
        return self.changes[-1] if self.shown.number <= len(self.changes) else None

    def begins_reread(self, seq: int) -> bool:
        """Whether deciding this record starts a reread of the log."""
        is_change = any(seq == change for change, _ in self.changes)
        return is_change and (self.reread_to is None or seq > self.reread_to)

    def upcoming(self, count: int) -> range:
        """The next records to decide, at most `count`, up to a change of policy.

        During a reread, a newer change comes first: it makes the reread obsolete.
        """
        target = self.reread_to
        if target is not None and (newest := self.changes[-1][0]) > target:
            return range(newest, newest + 1)
        ends = [seq for seq, _ in self.changes if seq >= self.cursor and target in (None, seq)]
        most = min(self.cursor + count, self.decidable_end)
        return range(self.cursor, min(most, *(seq + 1 for seq in ends)) if ends else most)

    def _reread(self, target: int) -> None:
        """Start to read the log again, up to the change of policy at record `target`."""
        if self.reread_to is None:
            self.unconsolidated = self._not_consolidated()
        else:
            self._retire(self.making)
        number = [seq for seq, _ in self.changes].index(target)
        self.making = Generation(number + 2, self.changes[number][1], self._arena)
        self.reread_to, self.cursor, self.jobs, self.told_from = target, 0, {}, []
        for count in DECISION_COUNTS:
            del self.counts[count]
        self._arena.set_live(self._turn_handles(s for s in self.seq_by_row if self.exists(s)), True)

    def _switch(self) -> None:
        """The reread is complete: searches see the new generation."""
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
        """bool [rows]: turns that `shown` has not consolidated; they are live, or wait in a parked job."""
        if self.unconsolidated is None:
            return self._not_consolidated()
        later = np.ones(len(self.seq_by_row) - len(self.unconsolidated), dtype=bool)
        return np.concatenate([self.unconsolidated, later])

    def is_live(self, seq: int) -> bool:
        """Whether the turn counts in the gates."""
        return bool(self._arena.flags(self.turns_segment)[self.row_by_seq[seq]] & Arena.LIVE)

    @property
    def may_change(self) -> bool:
        """Whether `is_changing` may be True for some memory."""
        return bool(self._changes) and self.cursor < self.next_seq

    # ---- sizes

    @property
    def undecided_count(self) -> int:
        return sum(self.row_by_seq[s] != NO_ROW for s in range(self.cursor, self.next_seq))

    @property
    def waiting_count(self) -> int:
        """The number of decided turns that still count in gates."""
        live = self._arena.flags(self.turns_segment)[: self.rows_before(self.cursor)] & Arena.LIVE
        return int(np.count_nonzero(live))

    # ---- replay

    def add_control(self, control: Control) -> None:
        """Append a control record. One with seq -1 stands before the log."""
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
        self.append_control(control)

    def redact_turn(self, seq: int) -> None:
        """Remove a deleted turn from every answer at once, before the cursor reaches the deletion."""
        if self.exists(seq):
            self.clear_turn(seq)
            self.counts["deleted"] += 1
        self._arena.redact(self._turn_handles([seq]))

    def set_memory(self, memory: Memory, vector: NDArray[np.float16] | None) -> None:
        """See Tier.set."""
        made = next(g for g in self.generations if g.number == memory.generation)
        made.tiers[memory.kind].set(memory, vector, self._arena)

    def add_decision(self, seq: int, body: Mapping[str, Any]) -> None:
        """Move the cursor past `seq`, and update the flags, jobs and counts.

        A body with `reread`, the seq of a change of policy, starts a reread of the log instead.
        """
        if (target := body.get("reread")) is not None:
            self._reread(target)
            return
        self.cursor = seq + 1
        self.making.note(seq, self.control(seq), body)
        if thetas := body.get("thetas"):
            self.told_from.append((seq + 1, replace(self.thresholds_at(seq), **thetas)))
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
        """The arena segments of this tenant."""
        shown = [] if self.shown is self.making else self.shown.segments
        return [self.turns_segment, *self.making.segments, *shown]

    @property
    def generations(self) -> list[Generation]:
        """All generations, `making` first."""
        shown = [] if self.shown is self.making else [self.shown]
        return [self.making, *shown, *self.retired]

    def reserve_rows(self, memories: Iterable[Memory]) -> bool:
        """Reserve arena memory for the new memories. False: there is none, and nothing changed."""
        tiers = [(self.making.tiers[m.kind], m.id) for m in memories if not m.deleted]
        new = [tier.segment for tier, memory_id in tiers if memory_id not in tier.row_of]
        try:
            self._arena.reserve(np.array(new, dtype=np.int64))
        except MemoryError:
            return False
        return True

    def release(self) -> None:
        """Release the tenant's arena segments and payloads."""
        for segment in self.segments:
            self._arena.release(segment)
        self.release_payloads()
