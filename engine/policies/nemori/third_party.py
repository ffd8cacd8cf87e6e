"""Third-party managements of NEMORI's facts: A-Mem and MemoryOS (appendix A.3).

Each fact goes into the host as a message would. What the host would show for an answer is what an episode is
predicted from, and an answer is given what the host gives: narratives only where `k_epi` is set.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from undertow.engine.base.model import Memory
from undertow.engine.policies.a_mem.notes import Content, own_turns, rewrite, write
from undertow.engine.policies.a_mem.policy import AMem
from undertow.engine.policies.base import Draft, Effect, Embed, Tiers, Vector, forgotten
from undertow.engine.policies.memory_os.pages import FactPages
from undertow.engine.policies.memory_os.persona import QUEUES
from undertow.engine.policies.memory_os.segments import Segments
from undertow.engine.policies.nemori.management import Management, Origin, Statement, add_fact
from undertow.engine.policies.work import Steps, Work, only_shown

# MemoryOS, section 3.3: pages, segments, and lines of long-term memory beside the profile, by kind of fact.
_SHOWN = {"page": 10, "segment": 5, "line": 5}


class AMemNotes(Management):
    """A fact becomes a note: it is annotated, connected, and changes its neighbours."""

    tiers = AMem.tiers

    def evoke(self, job: Work, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """The nearest notes, and then those that they link to."""
        best = yield from job.known_facts(vector, self.tiers.k_sem)
        every = {note.id: note for note in job.current("fact")}
        linked = [every[i] for note in best for i in note.links if i in every]
        return list({note.id: note for note in (*best, *linked)}.values())

    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        for fact in facts:
            beside = only_shown(origin.turns, fact.said)
            more = {"episode_id": origin.episode_id}
            yield from write(job, Content(fact.text, job.latest(fact.said), fact.said, beside, more))

    def distilled_from(self, job: Work, fact: Memory) -> frozenset[int]:
        return own_turns(job, fact)

    def remake(self, job: Work, shaken: Sequence[Memory], lost: Sequence[Memory]) -> Steps:
        """Construct the notes again that evolved in sight of the turn."""
        for note in shaken:
            yield from rewrite(job, note, frozenset(one.id for one in lost))


@dataclass(frozen=True, slots=True)
class MemoryOSPages(Management):
    """A fact becomes a page: it waits in short-term memory, joins a segment, and is learned from."""

    short_term_pages: int
    heat_threshold: float

    # The sum of what MemoryOS shows of each kind, from all of them; the profile is always shown.
    tiers = Tiers(k_epi=0, k_sem=sum(_SHOWN.values()), consolidated=False, always="profile")

    def evoke(self, job: Work, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """Short-term memory and the profile whole, and the nearest pages, segments and other lines."""
        facts = {fact.id: fact for fact in job.current("fact")}
        found = yield from job.known_facts(vector, len(facts))
        waiting = [facts[page.key] for page in FactPages(job).waiting()]
        profile = [fact for fact in facts.values() if fact.fact_kind == "profile"]
        nearest = [
            fact
            for kind, most in _SHOWN.items()
            for fact in islice((f for f in found if f not in profile and _shown_as(f) == kind), most)
        ]
        return list({fact.id: fact for fact in (*waiting, *profile, *nearest)}.values())

    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        vectors = yield Embed(tuple(fact.text for fact in facts))
        for fact, vector in zip(facts, vectors, strict=True):
            add_fact(job, fact, vector, origin, fact_kind=FactPages.page_kind)
            yield from self._file(job)

    def distilled_from(self, job: Work, fact: Memory) -> frozenset[int]:
        """Segments and lines are made of pages. Facts of another management are distilled as pages are."""
        is_made_of_pages = fact.fact_kind in (FactPages.segment_kind, *QUEUES)
        return frozenset() if is_made_of_pages else fact.reach

    def remake(self, job: Work, shaken: Sequence[Memory], lost: Sequence[Memory]) -> Steps:
        """The other pages of shaken segments are filed again. Lines come back when these are hot again."""
        job.drafts += [Draft(forgotten(fact, job.seq), None) for fact in shaken]
        yield from self._file(job)

    def _file(self, job: Work) -> Steps:
        """File the oldest pages beyond short-term memory (section 3.2)."""
        pages = FactPages(job)
        waiting = pages.waiting()
        for page in waiting[: max(0, len(waiting) - self.short_term_pages)]:
            yield from Segments(pages, self.heat_threshold).file(page)


def _shown_as(fact: Memory) -> str:
    return fact.fact_kind if fact.fact_kind in _SHOWN else "line"
