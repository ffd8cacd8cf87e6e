"""Whether records are an export that a tenant could have written: order, places in the log, references.

What is checked is what the engine relies upon when it folds the rows: a log without gaps, decisions in its
order, memories before the decision that made them, and no name of what is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn

from undertow.engine.api.transfer.import_schema import (
    EDITED,
    Content,
    ControlRecord,
    DecisionRecord,
    JobRecord,
    MemoryRecord,
    PolicyChangeRecord,
    Replay,
    SettingsChange,
    Shape,
    TurnDeletion,
    TurnRecord,
    Update,
    body_of,
)
from undertow.engine.base.model import Memory, MemoryKind
from undertow.engine.readers.record import BadField

# what tells a memory from all others of its tenant: generation, kind, record of the log that it was born at,
# ordinal
Birth = tuple[int, MemoryKind, int, int]


class ImportValidator:
    """The records of one export, taken in their order; every call raises BadField."""

    def __init__(self) -> None:
        self.births: dict[str, Birth] = {}
        # by id: seqs of turns, deleted ones included; generations and seqs of jobs
        self.turn_seqs: dict[str, int] = {}
        self.job_places: dict[str, tuple[int, int]] = {}
        # of deleted turns, by seq: the record that deleted it
        self.deletions: dict[int, int] = {}
        self.turns: set[int] = set()
        self.decided = 0
        # that of the decisions, and the change of policy for which the log is being read again
        self._generation = 1
        self._reread_to: int | None = None
        self._changes: list[int] = []
        self._controls: dict[int, Shape] = {}
        self._stated: list[tuple[int, SettingsChange]] = []
        self._settled = False
        self._last_turn = self._last_control = -1
        self._last_decision = ""
        self._made: set[str] = set()
        self._ids: dict[tuple[str, object], str] = {}
        self._seqs_by_key: dict[str, int] = {}

    @property
    def log_len(self) -> int:
        """How many records the log has."""
        return 1 + max((*self.turns, *self._controls, *self.deletions), default=-1)

    def take(self, content: Content) -> None:
        """The next record."""
        if not self._settled and not isinstance(content, ControlRecord):
            _refuse("kind", f"is {content.kind}, where the settings must stand that the tenant began with")
        match content:
            case TurnRecord():
                self._take_turn(content)
            case MemoryRecord():
                self._take_memory(content)
            case DecisionRecord():
                self._take_decision(content)
            case ControlRecord():
                self._take_control(content, body_of(content))
            case JobRecord():
                self._take_job(content)

    def finish(self) -> None:
        """After the last one."""
        seqs = self.turns | self.deletions.keys()
        if both := sorted(seqs & self._controls.keys()):
            _refuse(None, f"record {both[0]} of the log is a turn and something else as well")
        missing = sorted(set(range(self.log_len)) - seqs - self._controls.keys())
        if missing or not self._settled:
            _refuse(None, f"record {missing[0] if missing else -1} of the log is missing")
        if self.decided > self.log_len:
            _refuse(None, f"record {self.log_len} of the log is decided, and is missing")
        if self._made:
            _refuse(None, f"the decision of record {self.decided} is missing, though it made memories")

    # ---- kinds

    def _take_turn(self, turn: TurnRecord) -> None:
        self._place("seq", turn.seq, self._last_turn)
        if turn.made_at_seq != turn.seq:
            _refuse("made_at_seq", f"is {turn.made_at_seq}, not {turn.seq}")
        self._know_turn("id", turn.id, turn.seq)
        self._know_key("dedupe_key", turn.dedupe_key, turn.seq)
        self._last_turn = turn.seq
        self.turns.add(turn.seq)

    def _take_control(self, control: ControlRecord, body: Shape) -> None:
        seq = control.seq
        if isinstance(body, PolicyChangeRecord) and seq == -1 and self._settled and self.log_len == 0:
            return
        if (seq == -1) == self._settled or (seq == -1 and not isinstance(body, SettingsChange)):
            _refuse("seq", f"is {seq}; the first settings have -1 and stand first, and a first policy has it")
        self._settled = True
        if isinstance(body, SettingsChange):
            self._stated.append((seq, body))
        if seq == -1:
            return
        if isinstance(body, Update) and body.text is None and seq <= max(self._last_control, self.decided):
            self._take_copy(seq, body)  # it took the place of one whose words were to go
            return
        self._place("seq", seq, self._last_control)
        self._last_control = seq
        self._controls[seq] = body
        if isinstance(body, TurnDeletion):
            self._take_deletion(seq, body)
        elif isinstance(body, PolicyChangeRecord):
            self._changes.append(seq)
        elif isinstance(body, Replay) and body.job_id not in self.job_places:
            _refuse("body.job_id", "names no job that stands before it")

    def _take_copy(self, seq: int, body: Update) -> None:
        known = self._controls.get(seq, body)
        if not isinstance(known, Update) or known.memory_id != body.memory_id:
            _refuse("seq", f"is {seq}, where something else stands")
        self._controls[seq] = body

    def _take_deletion(self, seq: int, body: TurnDeletion) -> None:
        if body.turn_seq >= seq or body.turn_seq in self.deletions:
            _refuse("body.turn_seq", "is no earlier turn, or was deleted before")
        self._know_turn("body.id", body.id, body.turn_seq)
        self._know_key("body.key", body.key, body.turn_seq)
        if body.replaced_by is not None:
            self._know_turn("body.replaced_by", body.replaced_by, seq + 1)
        self.deletions[body.turn_seq] = seq

    def _take_memory(self, memory: MemoryRecord) -> None:
        if memory.made_at_seq != self.decided:
            _refuse("made_at_seq", f"is {memory.made_at_seq}; the next decision is that of {self.decided}")
        if memory.born_at_seq > memory.made_at_seq:
            _refuse("born_at_seq", f"is {memory.born_at_seq}, later than made_at_seq")
        is_older = memory.generation < self._generation
        if memory.generation > self._generation or (memory.version == 1 and is_older):
            _refuse("generation", f"is {memory.generation}; that of the decisions is {self._generation}")
        birth: Birth = (memory.generation, memory.kind, memory.born_at_seq, memory.ordinal)
        self._know("id", "memory", memory.id, birth)
        self.births[memory.id] = birth
        self._made.add(memory.id)

    def _take_reread(self, decision: DecisionRecord) -> None:
        """The log is read again from here: for the next change of policy, or for a later one."""
        target = self._reread_to
        fits = decision.reread == self.decided if target is None else (decision.reread or 0) > target
        if decision.seq != -1 or decision.reread not in self._changes or not fits:
            _refuse("reread", f"is {decision.reread}, where no change of policy begins")
        self._reread_to, self.decided = decision.reread, 0
        self._generation = 2 + self._changes.index(decision.reread)

    def _take_decision(self, decision: DecisionRecord) -> None:
        if decision.reread is not None or decision.seq < 0:
            self._take_reread(decision)
            return
        if decision.seq in self._changes and self._reread_to is None:
            _refuse("seq", f"is {decision.seq}, where the log begins to be read again")
        if decision.seq != self.decided:
            _refuse("seq", f"is {decision.seq}; the next decision is that of {self.decided}")
        if lost := self._made - {*decision.episode_ids, *decision.fact_ids}:
            _refuse("episode_ids", f"and fact_ids do not name {min(lost)}, which was made")
        stated = next(body for seq, body in reversed(self._stated) if seq < decision.seq)
        shares = {"theta_sim": stated.sim_share, "theta_merge": stated.merge_share}
        if fixed := [name for name in decision.thetas if shares[name] is None]:
            _refuse("thetas", f"has {fixed[0]}, which the settings in force have fixed")
        self._made.clear()
        self._last_decision = decision.decision
        if decision.seq == self._reread_to:
            self._reread_to = None
        self.decided += 1

    def _take_job(self, job: JobRecord) -> None:
        if job.state == "replayed":
            if self.job_places.get(job.id, (0, -1))[1] != job.seq:
                _refuse("id", "is that of no job that stands before it")
        elif job.seq != self.decided - 1 or self._last_decision != "parked":
            _refuse("seq", f"is {job.seq}; a parked job follows the decision that parked it")
        else:
            self.job_places[job.id] = (self._generation, job.seq)
            self._know("id", "job", job.id, self.job_places[job.id])

    # ---- helpers

    def _place(self, field: str, seq: int, last: int) -> None:
        """A new record of the log may stand here."""
        if seq <= last or seq < self.decided or seq in self._controls or seq in self.turns:
            _refuse(field, f"is {seq}, which is out of order")

    def _know_turn(self, field: str, turn_id: str, seq: int) -> None:
        self._know(field, "turn", turn_id, seq)
        self.turn_seqs[turn_id] = seq

    def _know_key(self, field: str, key: str, seq: int) -> None:
        if self._seqs_by_key.setdefault(key, seq) != seq:
            _refuse(field, "is that of another turn as well")

    def _know(self, field: str, what: str, identity: str, place: object) -> None:
        """An id has one place and a place has one id."""
        there = self._ids.setdefault((what, place), identity)
        here = self._ids.setdefault((f"place of {what}", identity), str(place))
        if there != identity or here != str(place):
            _refuse(field, f"is {identity:.80}, which does not go with its place in the log")

    def check_seqs(self, field: str, seqs: Iterable[int], at: int) -> None:
        """These are turns, deleted ones included, no later than record `at`."""
        for seq in seqs:
            if seq > at or not (seq in self.turns or seq in self.deletions):
                _refuse(field, f"names {seq}, which is no turn up to record {at}")


class Versions:
    """The versions of memories, oldest first; what was withheld is not among them.

    Each memory's count up from 1, or from one that was remade when a turn was deleted, as that takes those
    before it along; a deleted version is the last.
    """

    def __init__(self, remade: Collection[int]) -> None:
        """`remade`: the records that deleted turns."""
        self._remade = remade
        self._latest: dict[str, Memory] = {}

    def take(self, memory: Memory) -> None:
        """The next one. BadField."""
        before = self._latest.get(memory.id)
        if before is None:
            fits = memory.made_at_seq in self._remade or (
                memory.version == 1 and memory.made_at_seq == memory.born_at_seq and not memory.deleted
            )
        else:
            fits = memory.version == before.version + 1 and not before.deleted
        if not fits:
            _refuse("version", f"is {memory.version}, which follows no version before it")
        self._latest[memory.id] = memory


def _refuse(field: str | None, reason: str) -> NoReturn:
    raise BadField(field, reason, EDITED)
