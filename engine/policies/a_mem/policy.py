"""A-Mem: each message becomes a note that is linked to similar ones and changes them (A-MEM, section 3).

After Xu et al. 2025 (arXiv 2502.12110): two LLM calls a message, `annotate` for the note (3.1) and `connect`
for its links (3.2) and the evolution of its neighbours (3.3). docs/policies/a-mem.md lists our choices.
"""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.model import Decision
from undertow.engine.policies.a_mem.notes import Content, own_turns, rewrite, write
from undertow.engine.policies.base import (
    Decide,
    MemoryView,
    Policy,
    PolicyResult,
    Tiers,
    endings,
)
from undertow.engine.policies.work import Failed, Work, messages_of, parked
from undertow.engine.storage.row_codec import LlmJob


class AMem(Policy):
    """Stateless: its only input is the MemoryView and the results of effects."""

    name = "a-mem"
    # Section 4: k = 10, and the notes that they are linked to (3.4). Notes contain their messages.
    tiers = Tiers(k_epi=0, k_sem=10, consolidated=False, linked=True)

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """A note for each message of the turn, in order."""
        job = Work(seq, memory, self._budget)
        try:
            for message in _contents((seq,), memory):
                yield from write(job, message)
        except Failed as error:
            return parked(error, job.operation, (seq,))
        return PolicyResult(Decision.FIRED, cluster=(seq,), settled=(seq,), drafts=tuple(job.drafts))

    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Notes of the messages that have none, and never had one that a user deleted."""
        work = Work(seq, memory, self._budget)
        noted = {note.source_messages for note in (*memory.current("fact"), *memory.ended("fact"))}
        try:
            for message in _contents(turns, memory):
                if message.more["source_messages"] not in noted:
                    yield from write(work, message)
        except Failed as error:
            return parked(error, work.operation, turns)
        return PolicyResult(Decision.FIRED, cluster=turns, drafts=tuple(work.drafts))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Delete the notes of a turn; construct those again that evolved in its sight.

        What links and contexts owed to the deleted notes does not come back otherwise.
        """
        job = Work(seq, memory, self._budget)
        shaken = [note for note in memory.current("fact") if turn_seq in note.reach]
        ended = [note for note in memory.ended("fact") if turn_seq in note.reach]
        gone = endings(shaken, ended, seq)
        kept = [note for note in shaken if turn_seq not in own_turns(job, note)]
        lost = [note for note in shaken if note not in kept]
        job.drafts += endings(lost, ended, seq)
        try:
            for note in kept:
                yield from rewrite(job, note, frozenset(one.id for one in lost))
        except Failed as error:
            # They must go even if they cannot be constructed again yet.
            rest = tuple(sorted({s for note in kept for s in note.source_seqs}))
            return parked(error, job.operation, rest, drafts=gone)
        return PolicyResult(Decision.FIRED, drafts=tuple(job.drafts))


def _contents(turns: Sequence[int], view: MemoryView) -> list[Content]:
    """The messages of these turns, as first read: a turn deleted later is forgotten by its own record."""
    found = []
    for seq, line in messages_of(turns, view):
        turn = view.turn(seq)
        more = {"source_messages": ((seq, line),)}
        found.append(Content(turn.messages[line], turn.timestamp, (seq,), more=more))
    return found
