"""NEMORI: windows of messages become episodes, and what those tell unexpectedly becomes facts.

After Ma et al., "What Deserves Memory", algorithm 1: a window is partitioned, each group is narrated and
joined to the episode that it continues, a prediction is made from what is known, and what that missed is
distilled. What the paper leaves open is in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.engine.base.config import Ablation
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
    nothing_to_decide,
)
from undertow.engine.policies.nemori.job import NemoriJob
from undertow.engine.policies.nemori.knowledge import Management
from undertow.engine.policies.nemori.partition import messages_of, window
from undertow.engine.policies.work import Failed
from undertow.engine.storage.row_codec import LlmJob


@dataclass(frozen=True, slots=True)
class Nemori:
    """The paper's policy. Stateless: all it knows comes through the MemoryView and the effects.

    `window_messages` is w. `ablation`: "direct-extraction" is NEMORI-s, "without-facts" makes no facts,
    "fixed-chunks" takes a window as one group (section 4.4).
    """

    budget: PromptBudget
    window_messages: int
    management: Management
    ablation: Ablation | None = None

    name = "nemori"
    # section 4.1: k, m and r. Turns that no episode holds yet are in none of those
    tiers = Tiers(k_epi=10, k_sem=20, raw_of_best=2, consolidated=False)
    learns = Learns()

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        turns = window((*memory.open_turns(), seq), self.window_messages, memory)
        if turns is None:
            return PolicyResult(Decision.WAITS)
        return (yield from self._take(seq, turns, memory))

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        turns = tuple(memory.open_turns())
        if not turns:
            return PolicyResult(Decision.WAITS)
        return (yield from self._take(seq, turns, memory))

    def reconsolidate(
        self, seq: int, question: str, episode_ids: Sequence[str], memory: MemoryView
    ) -> Decide:
        return nothing_to_decide()  # no question teaches it anything

    def _take(self, seq: int, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        work = self._job(seq, memory)
        try:
            yield from work.take(messages_of(turns, memory))
        except Failed as error:
            return work.parked(error, turns)
        return work.outcome(turns, settled=turns)

    def replay(self, seq: int, job: LlmJob, memory: MemoryView) -> Decide:
        """What episodes hold of these turns is distilled again, the rest is a window of its own.

        Where a deletion was parked, its turns may be of an episode that a user has deleted: that stays away,
        and only facts come back.
        """
        turns = tuple(s for s in job.cluster if memory.exists(s))
        if not turns:
            return PolicyResult(Decision.WAITS, reason="all its turns were deleted")
        work = self._job(seq, memory)
        try:
            for episode in memory.current("episode"):
                yield from work.relearn(episode, turns)
            dropped = work.dropped()
            yield from work.distil_direct([ref for ref in work.unheld(turns) if ref in dropped])
            yield from work.take([ref for ref in work.unheld(turns) if ref not in dropped])
        except Failed as error:
            return work.parked(error, turns)
        return work.outcome(turns)

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remake what rests on a deleted turn from its other turns, or remove it where none is left.

        What a merge or a conflict on the turn's account has taken away does not come back: the history of
        those facts tells of it.
        """
        work = self._job(seq, memory)
        shaken = [e for e in memory.current("episode") if turn_seq in e.source_seqs]
        loose = [f for f in memory.current("fact") if turn_seq in f.reach]
        # of those deleted before, the history still has the words: a version of this record ends it
        ended = [m for m in (*memory.ended("episode"), *memory.ended("fact")) if turn_seq in m.reach]
        work.drafts += [Draft(forgotten(f, seq), None) for f in loose]
        work.drafts += [Draft(deletion(m, seq), None) for m in ended]
        lost = _others(loose, turn_seq, memory)
        try:
            for episode in memory.current("episode"):
                if turn_seq in episode.source_seqs:
                    yield from work.retell(episode, lost)
                else:
                    yield from work.relearn(episode, lost)
            yield from work.distil_direct(work.unheld(lost))
        except Failed as error:
            # What rested on the deleted turn must go even where nothing takes its place yet.
            gone = [forgotten(m, seq) for m in (*loose, *shaken)] + [deletion(m, seq) for m in ended]
            rest = tuple(sorted({*lost, *_others(shaken, turn_seq, memory)}))
            return work.parked(error, rest, tuple(Draft(m, None) for m in gone))
        return work.outcome(())

    def _job(self, seq: int, memory: MemoryView) -> NemoriJob:
        return NemoriJob(seq, memory, self.budget, self.management, self.ablation)


def _others(memories: Sequence[Memory], turn_seq: int, view: MemoryView) -> tuple[int, ...]:
    """The turns whose words these may hold beside those of a deleted one."""
    turns = {s for m in memories for s in m.reach if s != turn_seq and view.exists(s)}
    return tuple(sorted(turns))
