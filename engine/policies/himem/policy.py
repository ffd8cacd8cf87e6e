"""HiMem: a session becomes immutable episodes, and notes of lasting facts (paper, section 2).

The dialogue window is a session. The first turn of another session closes it, or a flush, or the turn that
would make it exceed half of a prompt's room. Turns of an open window wait; they are searchable. `episodes.py`
writes episodes, `notes.py` has the three stages of notes, and `reconsolidation.py` revises notes after a
question that they did not cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from undertow.engine.base.model import Decision, Memory
from undertow.engine.policies.base import (
    Decide,
    Learns,
    MemoryView,
    Policy,
    PolicyResult,
    PromptBudget,
    Tiers,
    endings,
)
from undertow.engine.policies.himem.episodes import has_room, write_episodes
from undertow.engine.policies.himem.notes import NoteCalls, forget_least_used, restore_notes, write_notes
from undertow.engine.policies.himem.reconsolidation import revise_notes
from undertow.engine.policies.work import Failed, Steps, Work, parked
from undertow.engine.storage.row_codec import LlmJob


class HiMem(Policy):
    """The paper's policy. Stateless: its only input is the MemoryView and the results of effects."""

    name = "himem"
    # Section 3: ten of each. Episodes contain their turns verbatim, so these are not shown again.
    tiers = Tiers(k_epi=10, k_sem=10, consolidated=False)

    def __init__(
        self,
        budget: PromptBudget,
        *,
        align_notes: bool = True,
        align_episodes: bool = False,
        max_notes: int | None = None,
        self_evolution: bool = True,
        is_fused: bool = False,
    ) -> None:
        """`align_*`: where knowledge is aligned (section 2.2.3; table 3 tries all four).

        `max_notes`: the least used notes above this number are deleted (section 2.5); None: no bound.
        `self_evolution`: questions that the notes did not cover revise them (section 2.4).
        `is_fused`: the three stages of aligned notes come in one reply.
        """
        self.learns = Learns(used=max_notes is not None, missed=self_evolution)
        super().__init__(budget)
        self._note_calls: NoteCalls = 2 if not align_notes else 1 if is_fused else 3
        self._align_episodes = align_episodes
        self._max_notes = max_notes

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """Close the dialogue window if the turn does not belong to it (section 2.2.1)."""
        window = memory.open_turns()
        if window and self._goes_on(window, seq, memory):
            return PolicyResult(Decision.WAITS)
        return (yield from self._close(window, seq, memory))

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        """Close the open window."""
        return (yield from self._close(memory.open_turns(), seq, memory))

    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Process a parked window, or the rest of one, again.

        Turns that an episode contains, or one that a user deleted, get only notes.
        """
        every = [*memory.current("episode"), *memory.ended("episode")]
        held = {s for episode in every for s in episode.source_seqs}
        work = Work(seq, memory, self._budget)
        try:
            yield from self._remember(work, [s for s in turns if s not in held])
            yield from self._note(work, [s for s in turns if s in held])
        except Failed as error:
            return parked(error, "segment", turns)
        return self._done(work, PolicyResult(Decision.FIRED, cluster=turns))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Delete everything made from the deleted turn's window, and remake it from the other turns.

        One pass segmented the window, and its notes were written with all of it in the prompt, so the turn's
        words may be in any of them. A note with sources in other windows too is written again from their
        turns; the notes of those windows stay.
        """
        every = [*memory.current("episode"), *memory.ended("episode")]
        windows = {e.born_at_seq for e in every if turn_seq in e.source_seqs}
        reach = {turn_seq, *(s for e in every if e.born_at_seq in windows for s in e.source_seqs)}
        shaken = [e for e in memory.current("episode") if e.born_at_seq in windows]
        notes = [n for n in memory.current("fact") if reach & n.reach]
        ended = [m for m in (*memory.ended("episode"), *memory.ended("fact")) if reach & m.reach]
        gone = endings((*shaken, *notes), ended, seq)
        rest = sorted({s for e in shaken for s in e.source_seqs if memory.exists(s)} - {turn_seq})
        others = sorted({s for n in notes for s in n.source_seqs if memory.exists(s)} - reach)
        work = Work(seq, memory, self._budget)
        work.drafts += gone
        try:
            yield from self._remember(work, rest)
            yield from self._note(work, others, notes)
        except Failed as error:
            # They must go even if they cannot be remade yet.
            return parked(error, "segment", (*rest, *others), drafts=gone)
        return self._done(work, PolicyResult(Decision.FIRED))

    def reconsolidate(
        self, seq: int, question: str, episode_ids: Sequence[str], memory: MemoryView
    ) -> Decide:
        """Revise the notes (section 2.4) after a question that only these episodes covered.

        A failure loses nothing, so it is not parked: the next such question tries again.
        """
        current = {e.id: e for e in memory.current("episode")}
        episodes = [current[i] for i in dict.fromkeys(episode_ids) if i in current]
        # An episode with a turn deleted since will be remade by a later record.
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
        """Whether the turn belongs to the open window, and fits into it."""
        if memory.turn(window[-1]).session != memory.turn(seq).session:
            return False
        return has_room(Work(seq, memory, self._budget).turns([*window, seq]), self._budget)

    def _close(self, window: Sequence[int], seq: int, memory: MemoryView) -> Decide:
        """Process a window, if there is one; its turns are settled, or parked after a failure."""
        cluster = tuple(window)
        if not cluster:
            return PolicyResult(Decision.WAITS)
        work = Work(seq, memory, self._budget)
        try:
            yield from self._remember(work, window)
        except Failed as error:
            return parked(error, "segment", cluster)
        return self._done(work, PolicyResult(Decision.FIRED, cluster=cluster, settled=cluster))

    def _note(self, work: Work, turns: Sequence[int], lost: Sequence[Memory] = ()) -> Steps:
        """Restore lost notes of turns with episodes, one window at a time, as deletions work by windows."""
        episodes = [*work.view.ended("episode"), *work.view.current("episode")]
        born = {s: e.born_at_seq for e in episodes for s in e.source_seqs}
        windows: dict[int | None, list[int]] = {}
        for turn_seq in turns:
            windows.setdefault(born.get(turn_seq), []).append(turn_seq)
        for window in windows.values():
            of_window = [note for note in lost if set(window).intersection(note.source_seqs)]
            yield from restore_notes(work, window, of_window, self._note_calls)

    def _remember(self, work: Work, window: Sequence[int]) -> Steps:
        """Write the episodes of a window (section 2.2.1), then its notes (section 2.2.2)."""
        yield from write_episodes(work, window, align=self._align_episodes)
        yield from write_notes(work, window, self._note_calls)

    def _done(self, work: Work, outcome: PolicyResult) -> PolicyResult:
        """The result with all drafts, after deleting the least used notes above the bound (section 2.5)."""
        forgotten = 0 if self._max_notes is None else forget_least_used(work, self._max_notes)
        reason = f"{forgotten} notes forgotten, which answers used least" if forgotten else None
        return replace(outcome, drafts=tuple(work.drafts), reason=reason)
