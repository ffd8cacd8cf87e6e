"""One tenant's live state, as a fold over its journal rows: the same code runs live and at replay.

Row numbers of the arena are positions: the turn segment holds one row a turn in seq order, the
episode and fact segments one row a memory in order of birth (a new version overwrites its row). So
"lower row" is "lower seq, then lower ordinal", which is how ties are settled everywhere.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.card import SETTING as SHARES_SETTING
from undertow.engine.departures import Move, move_of
from undertow.engine.generations import Generation, Tier
from undertow.engine.journal import Journal, JournalError, Kind, Row
from undertow.engine.model import Decision, Memory, MemoryKind, UndertowError, Usage, lines_of
from undertow.engine.policies.base import Thresholds, TurnView
from undertow.engine.records import (
    Control,
    Job,
    control_of,
    job_of,
    key_hash,
    memory_of,
    messages_of,
    usage_from_json,
    without_words,
)
from undertow.kernels.arena import Arena

# what `counts` has of the decisions of the generation that the cursor makes
DECISION_COUNTS = ("merges", "merge_refusals", "consolidations")
NO_ROW = -1
NO_SEQ = -1

# what helps against a full arena beside more memory: a batch, and one tenant alone
FEWER = "lower UNDERTOW_BATCH_TURNS, so that fewer tenants are needed at a time"
LATER = "ask again once the turns of other tenants are decided"


class UnknownTenant(UndertowError, KeyError):
    """No such tenant in this store."""

    def __str__(self) -> str:
        return str(self.args[0])


class ArenaFull(UndertowError):
    """What is needed at one time does not fit into the arena; nothing of it was stored."""


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
        self.jobs: dict[str, Job] = {}
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
        record = self.records[seq]
        if isinstance(record, Control) and record.kind == "used":
            self.making.uses.update(record.body["fact_ids"])
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

    def add_usage(self, operation: str, usage: Usage) -> None:
        self.meter[operation] = self.meter.get(operation, Usage()) + usage

    def add_job(self, job: Job) -> None:
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


def fold(tenant: Tenant, rows: Sequence[Row], arena: Arena) -> None:
    """Rebuild a tenant from its rows: first the log in seq order, then decisions, then memories.

    Decisions say which generations there are, and so where each memory belongs.

    A turn whose row was purged after its deletion is filled in from the delete record. Of two records with
    one place in the log the later one counts: that is the one without words.
    """
    _fold_log(tenant, rows, arena)
    memories: dict[str, tuple[Memory, NDArray[np.float16] | None]] = {}
    for row in rows:
        if row.kind in ("episode", "fact"):
            memory = memory_of(row)
            memories[memory.id] = (memory, row.vector)
    for row in rows:
        match row.kind:
            case "decision":
                tenant.add_decision(row.seq, orjson.loads(row.payload))
            case "job":
                tenant.add_job(job_of(row))
            case "usage":
                for operation, usage in usage_from_json(orjson.loads(row.payload)).items():
                    tenant.add_usage(operation, usage)
    for memory, vector in sorted(memories.values(), key=lambda m: (m[0].born_at_seq, m[0].ordinal)):
        tenant.set_memory(memory, vector)


def _fold_log(tenant: Tenant, rows: Sequence[Row], arena: Arena) -> None:
    turns = {row.seq: row for row in rows if row.kind == "turn"}
    controls = [control_of(row) for row in rows if row.kind == "control"]
    deletions = {c.body["turn_seq"]: c for c in controls if c.kind == "delete" and "turn_seq" in c.body}
    by_seq = {c.seq: c for c in controls if c.seq >= 0}
    for control in controls:
        if control.seq < 0:
            tenant.add_control(control)
    zero = np.zeros(arena.dim, dtype=np.float16)
    vectors = []
    for seq in range(1 + max([*turns, *by_seq, *deletions], default=-1)):
        if seq in by_seq:
            tenant.add_control(by_seq[seq])
        elif (row := turns.get(seq)) is not None:
            body = orjson.loads(row.payload)
            tenant.add_turn(row.payload, key_hash(body["key"]), body["session"], row.timestamp)
            vectors.append(zero if row.vector is None else row.vector)
        elif seq in deletions:
            body = deletions[seq].body
            tenant.add_turn(None, key_hash(body["key"]), body["session"], body["timestamp"])
            vectors.append(zero)
        else:
            raise JournalError(f"the log of tenant {tenant.name!r} misses record {seq}. Restore a backup.")
    if vectors:
        segments = np.full(len(vectors), tenant.turns_segment, dtype=np.int64)
        arena.extend(segments, np.stack(vectors), live=True)
    for deleted in deletions:
        tenant.redact_turn(deleted)


class Tenants:
    """All tenants of a shard: loaded from the journal on first touch."""

    def __init__(self, journal: Journal, arena: Arena) -> None:
        self._journal = journal
        self._arena = arena
        self._loaded: dict[str, Tenant] = {}
        self.erased: dict[str, Mapping[str, Any]] = {}
        # moves of a resharding that has not ended, by tenant key
        self.departed: dict[str, Move] = {}
        self.arrived: dict[str, Move] = {}
        for row in journal.read(kinds=["tombstone", "move"], vectors=False):
            if row.kind == "move":
                self.note_move(row.tenant_key, move_of(row))
            else:
                self.erased[row.tenant_key] = orjson.loads(row.payload)
        # every tenant with something in the store
        self._known: set[str] | None = None
        self._in_hand: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Every tenant that has something in the store, sorted."""
        return sorted(self._known_names())

    def __contains__(self, name: str) -> bool:
        return name in self._loaded or name in self._known_names()

    def loaded(self) -> list[Tenant]:
        """The tenants in memory, least recently used first."""
        return list(self._loaded.values())

    def get(self, name: str) -> Tenant:
        """The tenant, loaded or new."""
        return self.get_many([name])[0]

    def existing(self, name: str) -> Tenant:
        """The tenant, which must have something in the store. UnknownTenant, Moved, InTransit."""
        self.require(name)
        return self.get(name)

    def require(self, name: str) -> None:
        """UnknownTenant unless the tenant has something in the store; Moved, InTransit where it leaves."""
        self.require_here([name])
        if name not in self:
            raise UnknownTenant(
                f"no tenant {name!r} in {self._journal.place}. `undertow list --kind tenants` shows them."
            )

    def stored(self, name: str, *kinds: Kind) -> Iterator[Row]:
        """A tenant's rows of these kinds from the journal, without vectors and those of an erased life."""
        key = self._journal.info.tenant_key(name)
        rows = self._journal.read(tenant_keys=[key], kinds=kinds, vectors=False)
        return (row for row in rows if not self.buried(row))

    def next_seq(self, name: str) -> int:
        """Where a tenant's log goes on, from the journal alone."""
        return 1 + max((row.seq for row in self.stored(name, "turn", "control")), default=-1)

    def parked_jobs(self) -> dict[str, list[str]]:
        """The ids of all jobs that wait to be replayed, by tenant, from the journal alone."""
        last = {
            job.id: (row.tenant, job.state)
            for row in self._journal.read(kinds=["job"], vectors=False)
            if row.tenant in self._known_names() and not self.buried(row)
            for job in [job_of(row)]
        }
        parked: dict[str, list[str]] = {}
        for job_id, (name, state) in last.items():
            if state == "parked":
                parked.setdefault(name, []).append(job_id)
        return dict(sorted(parked.items()))

    def generation(self, key: str) -> int:
        """Which life of its name the tenant lives: 1, and more with each that was erased.

        A life takes one number for each generation of its memories.
        """
        return int(self.erased[key]["generation"]) + 1 if key in self.erased else 1

    def require_here(self, names: Iterable[str]) -> None:
        """Moved or InTransit when one of the tenants has left, or is about to."""
        for name in names if self.departed else ():
            if (move := self.departed.get(self._journal.info.tenant_key(name))) is not None:
                raise move.refusal(name)

    def get_many(self, names: Sequence[str]) -> list[Tenant]:
        """Load what is not loaded yet, with one read of the journal for all. ArenaFull.

        `make_room` leaves these tenants alone until the next call, or `let_go`.
        """
        self._in_hand = frozenset(names)
        missing = sorted({n for n in names if n not in self._loaded})
        known = self._known_names() if missing else set()
        stored = [n for n in missing if n in known]
        self._load(stored)
        for name in missing:
            if name not in self._loaded:
                self._loaded[name] = self._new(name)
                known.add(name)
        for name in dict.fromkeys(names):
            self._loaded[name] = self._loaded.pop(name)  # to the end: used last
        return [self._loaded[n] for n in names]

    def let_go(self) -> None:
        """Nobody uses the tenants of the last `get_many` any more, but who has work under way."""
        self._in_hand = frozenset()

    def evict(self, name: str) -> None:
        """Forget the live state; the journal still has it all."""
        self._loaded.pop(name).release()

    def make_room(self, enough: Callable[[], bool], may_go: Callable[[Tenant], bool]) -> bool:
        """Evict tenants, least recently used first, until there is `enough`; whether there is."""
        for tenant in self.loaded():
            if enough():
                return True
            if tenant.name not in self._in_hand and may_go(tenant):
                self.evict(tenant.name)
        return enough()

    def reserve(self, segments: NDArray[np.int64]) -> None:
        """Room for one more row in each of these segments, int64 [n], of tenants in hand. ArenaFull."""
        try:
            self._arena.reserve(segments)
        except MemoryError as error:
            raise self._full(f"{len(segments)} more turns", error, FEWER) from error

    def _full(self, what: str, error: MemoryError, cure: str) -> ArenaFull:
        """In words: the need, the size, and what to do about it."""
        size = self._arena.capacity_bytes
        held = "" if size is None else f" of {size} bytes"
        return ArenaFull(
            f"the arena{held} has no room for {what}, though every idle tenant was put out: {error}. "
            f"Give it a larger share of the card ({SHARES_SETTING}), or {cure}."
        )

    def bury(self, name: str, tombstone: Mapping[str, Any]) -> None:
        """The tenant disappears from every answer; its name may begin anew."""
        self._drop(name)
        self.erased[self._journal.info.tenant_key(name)] = tombstone

    def stored_keys(self) -> set[str]:
        """The key of every tenant that has something in the journal; a pass over two of its columns."""
        return set(self._beginnings("tenant_key")["tenant_key"].to_pylist())

    def names_of(self, keys: Sequence[str]) -> dict[str, str]:
        """The names of these tenants by key, from the journal; those that have nothing in it are left out."""
        rows = self._journal.read(tenant_keys=keys, kinds=["control"], vectors=False)
        return {row.tenant_key: row.tenant for row in rows if not self.buried(row)}

    def note_move(self, key: str, move: Move) -> None:
        """A move was committed: from here on it counts."""
        (self.arrived if move.state == "arrived" else self.departed)[key] = move

    def depart(self, name: str) -> None:
        """The tenant's log ends here: it disappears from every answer of this shard."""
        self._drop(name)

    def arrive(self, names: Mapping[str, str], tombstones: Mapping[str, Mapping[str, Any]]) -> None:
        """Tenants have come from another shard, by key, with the tombstones of their earlier lives."""
        self._known_names().update(names.values())
        self.erased.update(tombstones)

    def _drop(self, name: str) -> None:
        if name in self._loaded:
            self.evict(name)
        self._known_names().discard(name)

    def _new(self, name: str) -> Tenant:
        key = self._journal.info.tenant_key(name)
        tenant = Tenant(name, key, self._arena)
        tenant.life = self.generation(key)
        return tenant

    def _load(self, names: Sequence[str]) -> None:
        if not names:
            return
        by_key = {self._journal.info.tenant_key(n): n for n in names}
        rows: dict[str, list[Row]] = {n: [] for n in names}
        for row in self._journal.read(tenant_keys=list(by_key)):
            if row.kind != "tombstone" and not self.buried(row):
                rows[by_key[row.tenant_key]].append(row)
        loaded: dict[str, Tenant] = {}
        try:
            for name, of_tenant in rows.items():
                of_tenant.sort(key=lambda r: r.lsn)
                loaded[name] = self._new(name)
                fold(loaded[name], of_tenant, self._arena)
        except MemoryError as error:
            for tenant in loaded.values():
                tenant.release()
            what, cure = f"{len(names)} tenants from the journal", FEWER
            if len(names) == 1:
                what, cure = f"tenant {names[0]!r} from the journal", LATER
            raise self._full(what, error, cure) from error
        self._loaded |= loaded

    def buried(self, row: Row) -> bool:
        """Whether the row belongs to an erased life of its tenant."""
        stone = self.erased.get(row.tenant_key)
        return stone is not None and row.lsn < stone["lsn"]

    def alive(self, table: pa.Table) -> pa.Table:
        """The rows that are not buried, nor of tenants that leave; needs `tenant_key` and `lsn`."""
        if self.departed:
            left = pa.array(list(self.departed), pa.string())
            table = table.filter(pc.invert(pc.is_in(table["tenant_key"], left)))
        for key, stone in self.erased.items():
            if stone["purged"]:
                continue  # nothing of it is left
            buried = pc.and_(pc.equal(table["tenant_key"], key), pc.less(table["lsn"], stone["lsn"]))
            table = table.filter(pc.invert(buried))
        return table

    def _known_names(self) -> set[str]:
        if self._known is None:
            self._known = set(self._beginnings("tenant", "tenant_key")["tenant"].to_pylist())
        return self._known

    def _beginnings(self, *columns: str) -> pa.Table:
        """These columns, among them the key, of each tenant: one row, or a few.

        Each begins with a settings record, and keeps it when all its turns are deleted.
        """
        table = self._journal.columns([*columns, "lsn"], kinds=["control"])
        return self.alive(table).group_by(list(columns)).aggregate([])

    def behind(self) -> list[str]:
        """Tenants whose log is longer than what was decided last, from a few narrow columns."""
        columns = ["tenant", "tenant_key", "seq", "lsn", "kind"]
        table = self.alive(self._journal.columns(columns, kinds=["turn", "control", "decision"]))
        decided = pc.equal(table["kind"], "decision")
        log = table.filter(pc.invert(decided)).group_by("tenant").aggregate([("seq", "max")])
        logged = dict(zip(log["tenant"].to_pylist(), log["seq_max"].to_pylist(), strict=True))
        # the last one, which is not the highest where a log is being read again
        ends = table.filter(decided).group_by("tenant", use_threads=False).aggregate([("seq", "last")])
        done = dict(zip(ends["tenant"].to_pylist(), ends["seq_last"].to_pylist(), strict=True))
        return sorted(name for name, seq in logged.items() if seq > done.get(name, -1))
