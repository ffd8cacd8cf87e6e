"""HiMem: a session becomes immutable episodes, and notes of what stays true (paper, section 2).

The dialogue window is a session: it is closed by the first turn of another one, by a flush, or by the turn
that would make it take more than half of what a prompt has room for. Turns of an open window wait; they are
searchable. Episodes are in `himem_episodes`, the three stages of notes in `himem_notes`, what a question that
found no notes brings about in `himem_revision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from undertow.engine.base.model import Decision, Memory
from undertow.engine.policies.base import (
    Decide,
    Draft,
    Learns,
    MemoryView,
    PolicyResult,
    PromptBudget,
    Tiers,
    deletion,
    forgotten,
)
from undertow.engine.policies.himem.episodes import has_room, write_episodes
from undertow.engine.policies.himem.notes import forget_least_used, restore_notes, write_notes
from undertow.engine.policies.himem.reconsolidation import revise_notes
from undertow.engine.policies.work import Failed, Steps, Work, parked
from undertow.engine.storage.row_codec import LlmJob


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where knowledge alignment is applied (section 2.2.3; table 3 tries all four)."""

    notes: bool = True
    episodes: bool = False


class HiMem:
    """Stateless, as all policies: what it knows comes through the MemoryView and the effects."""

    name = "himem"
    # section 3: ten of each. Its episodes hold their turns word for word, so these are not shown once more
    tiers = Tiers(k_epi=10, k_sem=10, consolidated=False)

    def __init__(
        self,
        budget: PromptBudget,
        alignment: Alignment,
        max_notes: int | None = None,
        *,
        self_evolution: bool = True,
    ) -> None:
        """`max_notes`: of more than these, the ones least used are forgotten (section 2.5); None: none.

        `self_evolution`: questions that the notes did not cover change them (section 2.4).
        """
        self.learns = Learns(used=max_notes is not None, missed=self_evolution)
        self._budget = budget
        self._alignment = alignment
        self._max_notes = max_notes

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        window = memory.open_turns()
        if not window or self._goes_on(window, seq, memory):
            return PolicyResult(Decision.WAITS)
        return (yield from self._close(window, seq, memory))

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        window = memory.open_turns()
        if not window:
            return PolicyResult(Decision.WAITS)
        return (yield from self._close(window, seq, memory))

    def replay(self, seq: int, job: LlmJob, memory: MemoryView) -> Decide:
        """What a parked window, or the rest of one, could not be made into.

        Of turns that an episode holds already, or one that a user has deleted, only the notes.
        """
        turns = [s for s in job.cluster if memory.exists(s)]
        if not turns:
            return PolicyResult(Decision.WAITS, reason="all its turns were deleted")
        every = [*memory.current("episode"), *memory.ended("episode")]
        held = {s for episode in every for s in episode.source_seqs}
        work = Work(seq, memory, self._budget)
        try:
            yield from self._remember(work, [s for s in turns if s not in held])
            yield from self._note(work, [s for s in turns if s in held])
        except Failed as error:
            return parked(error, "segment", tuple(turns), PolicyResult(Decision.PARKED))
        return self._done(work, PolicyResult(Decision.FIRED, cluster=tuple(turns)))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remove all that was made of the deleted turn's window, and make it anew of its other turns.

        One pass cut the window and its notes were written in sight of all of it, so the turn's words may be
        in any of that. A note that rests on other windows too is written anew of their turns; their own notes
        stand.
        """
        every = [*memory.current("episode"), *memory.ended("episode")]
        windows = {e.born_at_seq for e in every if turn_seq in e.source_seqs}
        reach = {turn_seq, *(s for e in every if e.born_at_seq in windows for s in e.source_seqs)}
        shaken = [e for e in memory.current("episode") if e.born_at_seq in windows]
        notes = [n for n in memory.current("fact") if reach & n.reach]
        # of those deleted before, the history still has the words: a version of this record ends it
        ended = [m for m in (*memory.ended("episode"), *memory.ended("fact")) if reach & m.reach]
        dead = [forgotten(m, seq) for m in (*shaken, *notes)] + [deletion(m, seq) for m in ended]
        gone = tuple(Draft(m, None) for m in dead)
        rest = sorted({s for e in shaken for s in e.source_seqs if memory.exists(s)} - {turn_seq})
        others = sorted({s for n in notes for s in n.source_seqs if memory.exists(s)} - reach)
        work = Work(seq, memory, self._budget)
        work.drafts += gone
        try:
            yield from self._remember(work, rest)
            yield from self._note(work, others, notes)
        except Failed as error:
            # They must go even where nothing takes their place yet.
            outcome = PolicyResult(Decision.PARKED, drafts=gone)
            return parked(error, "segment", (*rest, *others), outcome)
        return self._done(work, PolicyResult(Decision.FIRED))

    def reconsolidate(
        self, seq: int, question: str, episode_ids: Sequence[str], memory: MemoryView
    ) -> Decide:
        """Section 2.4, after a question that the notes did not cover, and these episodes did.

        Nothing is lost where it fails, so that is not parked: the next such question does it again.
        """
        current = {e.id: e for e in memory.current("episode")}
        episodes = [current[i] for i in dict.fromkeys(episode_ids) if i in current]
        # one whose turn was deleted since is made anew by a record that is still to come
        episodes = [e for e in episodes if all(memory.exists(s) for s in e.reach)]
        if not episodes:
            return PolicyResult(Decision.WAITS, reason="the episodes that supported it are gone")
        work = Work(seq, memory, self._budget)
        try:
            yield from revise_notes(work, question, episodes)
        except Failed as error:
            return PolicyResult(Decision.WAITS, reason=str(error), operation="supplement")
        return self._done(work, PolicyResult(Decision.FIRED))

    def _goes_on(self, window: Sequence[int], seq: int, memory: MemoryView) -> bool:
        """Whether the turn belongs to the open window, and the window has room for it."""
        if memory.turn(window[-1]).session != memory.turn(seq).session:
            return False
        return has_room(Work(seq, memory, self._budget).turns([*window, seq]), self._budget)

    def _close(self, window: Sequence[int], seq: int, memory: MemoryView) -> Decide:
        cluster = tuple(window)
        work = Work(seq, memory, self._budget)
        try:
            yield from self._remember(work, window)
        except Failed as error:
            return parked(error, "segment", cluster, PolicyResult(Decision.PARKED))
        return self._done(work, PolicyResult(Decision.FIRED, cluster=cluster, settled=cluster))

    def _note(self, work: Work, turns: Sequence[int], lost: Sequence[Memory] = ()) -> Steps:
        """Lost notes of turns that have their episodes: a window at a time, as deletions go by windows."""
        episodes = [*work.view.ended("episode"), *work.view.current("episode")]
        born = {s: e.born_at_seq for e in episodes for s in e.source_seqs}
        windows: dict[int | None, list[int]] = {}
        for turn_seq in turns:
            windows.setdefault(born.get(turn_seq), []).append(turn_seq)
        for window in windows.values():
            of_window = [note for note in lost if set(window).intersection(note.source_seqs)]
            yield from restore_notes(work, window, of_window, align=self._alignment.notes)

    def _remember(self, work: Work, window: Sequence[int]) -> Steps:
        """Episodes of a window, and then its notes."""
        yield from write_episodes(work, window, align=self._alignment.episodes)
        yield from write_notes(work, window, align=self._alignment.notes)

    def _done(self, work: Work, outcome: PolicyResult) -> PolicyResult:
        """With all that the job has made; and with what is forgotten, so that the notes stay bounded."""
        forgotten = 0 if self._max_notes is None else forget_least_used(work, self._max_notes)
        reason = f"{forgotten} notes forgotten, which answers used least" if forgotten else None
        return replace(outcome, drafts=tuple(work.drafts), reason=reason)
