"""MemoryOS: short-term pages, mid-term segments, long-term persona (Kang et al. 2025, arXiv 2506.06326).

Short-term memory is the tail of the log: the newest turns, of which there is no memory yet. The page that
leaves it is filed into a segment (segments.py), and a hot segment is learned from (persona.py).
docs/policies/memory-os.md lists our choices.
"""

from __future__ import annotations

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
from undertow.engine.policies.memory_os.pages import TurnPages
from undertow.engine.policies.memory_os.persona import learn, learned
from undertow.engine.policies.memory_os.segments import Segments
from undertow.engine.policies.work import Failed, Work, parked
from undertow.engine.storage.row_codec import LlmJob


class MemoryOS(Policy):
    """Stateless: its only input is the MemoryView and the results of effects."""

    name = "memory-os"

    def __init__(self, budget: PromptBudget, short_term_pages: int, heat_threshold: float) -> None:
        """`short_term_pages`: the capacity of short-term memory. `heat_threshold`: tau."""
        super().__init__(budget)
        self._short_term_pages = short_term_pages
        self._heat_threshold = heat_threshold

    @property
    def tiers(self) -> Tiers:
        """Section 3.3: short-term memory whole, five segments, ten pages, the profile and five more lines."""
        return Tiers(k_sub=10, k_epi=5, k_sem=5, recent=self._short_term_pages, always="profile")

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """File the page that leaves short-term memory (section 3.2)."""
        queue = (*memory.open_turns(), seq)
        pages = queue[: max(0, len(queue) - self._short_term_pages)]
        if not pages:
            return PolicyResult(Decision.WAITS)
        job = TurnPages(Work(seq, memory, self._budget))
        segments = Segments(job, self._heat_threshold)
        try:
            for page in job.existing(pages):
                yield from segments.file(page)
        except Failed as error:
            return parked(error, "topic", pages)
        return PolicyResult(Decision.FIRED, cluster=pages, settled=pages, drafts=tuple(job.work.drafts))

    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """File the pages that no segment has, nor had before it ended; after a parked deletion also learn."""
        pages = TurnPages(Work(seq, memory, self._budget))
        segments = Segments(pages, self._heat_threshold)
        every = (*memory.current("episode"), *memory.ended("episode"))
        filed = {page for segment in every for page in segment.source_seqs}
        try:
            for page in pages.existing(turns):
                if page.key not in filed:
                    yield from segments.file(page)
            if job.operation == "persona":
                done = learned(pages)
                yield from learn(pages, pages.existing(page for page in turns if page not in done))
        except Failed as error:
            return parked(error, job.operation, turns)
        return PolicyResult(Decision.FIRED, cluster=turns, drafts=tuple(pages.work.drafts))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Summarise the turn's segment again, and learn again from the pages that were read with it."""
        work = Work(seq, memory, self._budget)
        pages = TurnPages(work)
        segments = [e for e in memory.current("episode") if turn_seq in e.reach]
        lines = [f for f in memory.current("fact") if turn_seq in f.reach]
        ended = [m for m in (*memory.ended("episode"), *memory.ended("fact")) if turn_seq in m.reach]
        work.drafts += endings(lines, ended, seq)
        lost = sorted({s for line in lines for s in line.reach if memory.exists(s)} - {turn_seq})
        try:
            for segment in segments:
                yield from Segments(pages, self._heat_threshold).remake(segment)
            yield from learn(pages, pages.existing(lost))
        except Failed as error:
            # They must go even if they cannot be made again yet.
            filed = {s for segment in segments for s in segment.source_seqs if memory.exists(s)}
            rest = tuple(sorted({*lost, *filed} - {turn_seq}))
            drafts = endings((*lines, *segments), ended, seq)
            return parked(error, "persona" if lost else "topic", rest, drafts=drafts)
        return PolicyResult(Decision.FIRED, drafts=tuple(work.drafts))
