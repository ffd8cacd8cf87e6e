"""NEMORI's own managements of facts (section 3.3.3, appendices A.1 and A.2)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Draft, Effect, Embed, Vector, deletion
from undertow.engine.policies.nemori.management import Management, Origin, Statement, add_fact
from undertow.engine.policies.work import Steps, Work, as_shown, listed, only_shown
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    consolidate_all_prompt,
    consolidate_prompt,
    summarise_prompt,
)
from undertow.prompts.reply_schemas import (
    CandidateDecision,
    ConsolidateAllReply,
    ConsolidateReply,
    SummaryReply,
)

# K_s and K_m of section 4.1
EVOKED_FACTS = 10
SIMILAR_FACTS = 5


@dataclass(frozen=True, slots=True)
class Append(Management):
    """Appendix A.2: facts are added without comparison."""

    theta_evoke: float

    def evoke(self, job: Work, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """The known facts about the episode with this vector, nearest first."""
        found = yield from job.known("fact", vector, EVOKED_FACTS)
        return [s.memory for s in found if s.score > self.theta_evoke]

    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        """Store facts with distinct texts."""
        vectors = yield Embed(tuple(fact.text for fact in facts))
        for fact, vector in zip(facts, vectors, strict=True):
            add_fact(job, fact, vector, origin)


@dataclass(frozen=True, slots=True)
class Native(Append):
    """Section 3.3.3: each fact is compared with the most similar ones: new, merge, or conflict."""

    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        vectors = yield Embed(tuple(fact.text for fact in facts))
        for fact, vector in zip(facts, vectors, strict=True):
            yield from self._consolidate(job, fact, vector, origin)

    def _consolidate(self, job: Work, fact: Statement, vector: Vector, origin: Origin) -> Steps:
        found = yield from job.known_facts(vector, SIMILAR_FACTS)
        new = ShownMemory(1, job.latest(fact.said), fact.text)
        prompt, similar = job.select_fitting(found, lambda known: consolidate_prompt(new, known))
        if not similar:
            add_fact(job, fact, vector, origin)
            return
        reply: ConsolidateReply = yield from job.ask(prompt)
        targets = [similar[n - 1] for n in dict.fromkeys(reply.targets) if 1 <= n <= len(similar)]
        if reply.action == "merge" and targets:
            yield from _merge(
                job, targets, replace(fact, text=reply.text or fact.text), origin, prompt.version
            )
        elif reply.action == "conflict":
            _replace(job, targets, fact, vector, origin)
        else:
            add_fact(job, fact, vector, origin)


@dataclass(frozen=True, slots=True)
class Compared:
    """A new fact, its vector, and the stored facts that it is compared with."""

    fact: Statement
    vector: Vector
    near: Sequence[Memory]


@dataclass(frozen=True, slots=True)
class Batched(Append):
    """As `Native`, with one call for all facts that have a stored one near them; the others are new."""

    theta_compare: float

    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        vectors = yield Embed(tuple(fact.text for fact in facts))
        every: list[Compared] = []
        for fact, vector in zip(facts, vectors, strict=True):
            found = yield from job.known("fact", vector, SIMILAR_FACTS)
            alone = Compared(fact, vector, [s.memory for s in found if s.score >= self.theta_compare])
            every.append(replace(alone, near=_fitting(job, alone)))
        changes = yield from _changes(job, every)
        changed: set[str] = set()
        for n, one in enumerate(every):
            change = changes.get(n)
            targets = [m for m in change.targets if m.id not in changed] if change else []
            changed.update(target.id for target in targets)
            if change is None or not targets:
                add_fact(job, one.fact, one.vector, origin)
            elif change.decision.action == "merge":
                told = replace(one.fact, text=change.decision.text or one.fact.text)
                yield from _merge(job, targets, told, origin, change.version)
            else:
                _replace(job, targets, one.fact, one.vector, origin)


@dataclass(frozen=True, slots=True)
class Change:
    """What was decided of a new fact: the stored facts that it changes, and the prompt's version."""

    decision: CandidateDecision
    targets: Sequence[Memory]
    version: str


def _changes(job: Work, every: Sequence[Compared]) -> Generator[Effect, Any, dict[int, Change]]:
    """The decisions on the facts that have a stored one near them, by place; in as few calls as fit."""
    changes: dict[int, Change] = {}
    asked = [n for n, one in enumerate(every) if one.near]
    for part in job.parts(asked, lambda numbers: _comparison(job, [every[n] for n in numbers])[0]):
        prompt, shown = _comparison(job, [every[n] for n in part])
        reply: ConsolidateAllReply = yield from job.ask(prompt)
        for decision in reply.decisions:
            targets = [shown[n - 1] for n in dict.fromkeys(decision.targets) if 1 <= n <= len(shown)]
            if 1 <= decision.candidate <= len(part):
                changes.setdefault(part[decision.candidate - 1], Change(decision, targets, prompt.version))
    return changes


def _comparison(job: Work, compared: Sequence[Compared]) -> tuple[Prompt, list[Memory]]:
    """The prompt that compares new facts, and the stored facts that it shows, in order of creation."""
    near = {fact.id: fact for one in compared for fact in one.near}
    stored = sorted(near.values(), key=lambda fact: (fact.born_at_seq, fact.ordinal))
    new = [ShownMemory(n, job.latest(one.fact.said), one.fact.text) for n, one in enumerate(compared, 1)]
    return consolidate_all_prompt(new, listed(stored)), stored


def _fitting(job: Work, one: Compared) -> Sequence[Memory]:
    """The stored facts that fit into a prompt with this new fact alone."""
    return job.fitting(one.near, lambda some: _comparison(job, [replace(one, near=some)])[0])


@dataclass(frozen=True, slots=True)
class Summary(Management):
    """Appendix A.1: one summary, stored as a single fact that is rewritten each time."""

    def evoke(self, job: Work, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        return job.current("fact")[:1]
        yield

    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        stored = job.current("fact")[:1]
        lines = [ShownMemory(n, job.latest(fact.said), fact.text) for n, fact in enumerate(facts, 1)]
        prompt = summarise_prompt(lines, [as_shown(1, memory) for memory in stored])
        reply: SummaryReply = yield from job.ask(prompt)
        (vector,) = yield Embed((reply.summary,))
        told = {seq for memory in stored for seq in memory.source_seqs}
        sources = tuple(sorted(told.union(*(fact.said for fact in facts))))
        seen = {seq for memory in stored for seq in memory.shown_seqs}
        beside = only_shown(seen.union(origin.turns), sources)
        if stored:
            job.revise(stored[0], reply.summary, vector, sources, prompt.version, shown_seqs=beside)
        else:
            job.new("fact", reply.summary, vector, sources, prompt.version, shown_seqs=beside)


def _merge(job: Work, targets: Sequence[Memory], merged: Statement, origin: Origin, version: str) -> Steps:
    """Merge the targets into a new version of the first with one text; the others are deleted."""
    kept, *others = targets
    (vector,) = yield Embed((merged.text,))
    sources = tuple(sorted({*merged.said, *(seq for fact in targets for seq in fact.source_seqs)}))
    beside = only_shown({*origin.turns, *(seq for fact in targets for seq in fact.shown_seqs)}, sources)
    replaced = tuple(dict.fromkeys((*kept.supersedes, *(fact.id for fact in others))))
    job.drafts += [Draft(deletion(fact, job.seq), None) for fact in others]
    job.revise(kept, merged.text, vector, sources, version, supersedes=replaced, shown_seqs=beside)


def _replace(job: Work, targets: Sequence[Memory], fact: Statement, vector: Vector, origin: Origin) -> None:
    """Replace the facts that this one contradicts. They leave the search and keep their history.

    A target that was said later stays; then this fact is outdated and not stored: only its episode has it.
    """
    untrue = [target for target in targets if max(target.source_seqs) <= max(fact.said)]
    job.drafts += [Draft(deletion(target, job.seq), None) for target in untrue]
    if len(untrue) == len(targets):
        add_fact(job, fact, vector, origin, supersedes=tuple(target.id for target in untrue))
