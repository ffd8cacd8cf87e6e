"""NEMORI: windows of messages become episodes, and what was not predicted of them becomes facts.

After Ma et al., "What Deserves Memory", algorithm 1: a window is partitioned; each group is narrated and
integrated into the episode that it continues; the episode is predicted from known facts; and what the
prediction missed is distilled. docs/decisions/0018 lists our choices where the paper is silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from undertow.engine.base.config import Ablation, EpisodeText
from undertow.engine.base.model import Decision
from undertow.engine.policies.base import (
    Decide,
    MemoryView,
    Policy,
    PolicyResult,
    PromptBudget,
    Tiers,
    endings,
)
from undertow.engine.policies.nemori.job import WindowJob
from undertow.engine.policies.nemori.management import Management
from undertow.engine.policies.nemori.partition import window
from undertow.engine.policies.work import Failed, messages_of
from undertow.engine.storage.row_codec import LlmJob


@dataclass(frozen=True, slots=True)
class Nemori(Policy):
    """The paper's policy. Stateless: its only input is the MemoryView and the results of effects.

    `window_messages` is w. `ablation` (section 4.4): "direct-extraction" is NEMORI-s, "without-facts" makes
    no facts, "fixed-chunks" takes a window as one group. `by_cue`: what an episode may continue is shown by
    its cue alone, in place of its narrative. `index`: what an episode is embedded by (table 6).
    """

    budget: PromptBudget
    window_messages: int
    management: Management
    ablation: Ablation | None = None
    by_cue: bool = False
    index: EpisodeText = "narrative"

    name = "nemori"

    @property
    def tiers(self) -> Tiers:
        """What an answer is given: by a third-party management, what that gives (appendix A.3)."""
        return self.management.tiers

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """Algorithm 1, once the open turns have at least w messages (section 3.2.1)."""
        turns = window((*memory.open_turns(), seq), self.window_messages, memory)
        return (yield from self._take(seq, turns, memory))

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        """Algorithm 1 on the open turns, however few."""
        return (yield from self._take(seq, tuple(memory.open_turns()), memory))

    def _take(self, seq: int, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Process a window, if there is one; its turns are settled, or parked after a failure."""
        if not turns:
            return PolicyResult(Decision.WAITS)
        work = self._job(seq, memory)
        try:
            yield from work.take(messages_of(turns, memory))
        except Failed as error:
            return work.parked(error, turns)
        return work.outcome(turns, settled=turns)

    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Distil the turns that episodes contain again, and process the rest as a window.

        After a parked deletion, the turns may belong to an episode that a user deleted: only their facts are
        made again.
        """
        work = self._job(seq, memory)
        try:
            for episode in memory.current("episode"):
                yield from work.distil_again(episode, turns)
            dropped = work.deleted_messages()
            rest = work.messages_without_episode(turns)
            yield from work.distil_direct([ref for ref in rest if ref in dropped])
            yield from work.take([ref for ref in rest if ref not in dropped])
        except Failed as error:
            return work.parked(error, turns)
        return work.outcome(turns)

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remake what was derived from a deleted turn from its other turns; delete it if none is left.

        What a merge or a conflict because of the turn removed is not restored; the history of those facts
        has it.
        """
        work = self._job(seq, memory)
        shaken = [e for e in memory.current("episode") if turn_seq in e.source_seqs]
        loose = [f for f in memory.current("fact") if turn_seq in f.reach]
        distilled = {f.id: self.management.distilled_from(work, f) for f in loose}
        gone = [f for f in loose if turn_seq in distilled[f.id]]
        kept = [f for f in loose if turn_seq not in distilled[f.id]]
        ended = [m for m in (*memory.ended("episode"), *memory.ended("fact")) if turn_seq in m.reach]
        work.drafts += endings(gone, ended, seq)
        lost = _others([distilled[f.id] for f in gone], turn_seq, memory)
        try:
            yield from self.management.remake(work, kept, gone)
            for episode in memory.current("episode"):
                if turn_seq in episode.source_seqs:
                    yield from work.remake_episode(episode, lost)
                else:
                    yield from work.distil_again(episode, lost)
            yield from work.distil_direct(work.messages_without_episode(lost))
        except Failed as error:
            # What was derived from the deleted turn must go even if it cannot be remade yet.
            reached = [*distilled.values(), *(e.reach for e in shaken)]
            rest = _others(reached, turn_seq, memory)
            return work.parked(error, rest, endings((*loose, *shaken), ended, seq))
        return work.outcome(())

    def _job(self, seq: int, memory: MemoryView) -> WindowJob:
        parts = (self.management, self.ablation, self.index)
        return WindowJob(seq, memory, self.budget, *parts, by_cue=self.by_cue)


def _others(reached: Iterable[frozenset[int]], turn_seq: int, view: MemoryView) -> tuple[int, ...]:
    """The turns in any of these sets that exist, without a deleted one."""
    return tuple(sorted(s for s in frozenset().union(*reached) if s != turn_seq and view.exists(s)))
