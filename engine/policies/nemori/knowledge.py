"""NEMORI's management of facts, which is exchangeable (section 3.3, appendix A).

`evoke` returns the known facts from which an episode is predicted; `consolidate` stores what the prediction
missed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from undertow.engine.base.config import ManagementName
from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Complete, Draft, Effect, Embed, Vector, deletion
from undertow.engine.policies.work import Steps, Work, as_shown, only_shown
from undertow.prompts.builders import Prompt, ShownMemory, consolidate_prompt, summarise_prompt
from undertow.prompts.reply_schemas import ConsolidateReply, SummaryReply

# K_s and K_m of section 4.1
EVOKED_FACTS = 10
SIMILAR_FACTS = 5


class AskingJob(Work):
    """A job of NEMORI that makes LLM calls. `operation` names the last one."""

    operation = "partition"

    def ask(self, prompt: Prompt) -> Generator[Effect, Any, Any]:
        """Make an LLM call; returns the validated reply. PromptTooLong, BadReply."""
        self.operation = prompt.operation
        return (yield Complete(self.checked(prompt)))

    def select_fitting(
        self, memories: Sequence[Memory], prompt_of: Callable[[Sequence[ShownMemory]], Prompt]
    ) -> tuple[Prompt, Sequence[Memory]]:
        """The prompt with the memories that fit into the context (see `fitting`), and these memories."""

        def prompt_with(some: Sequence[Memory]) -> Prompt:
            return prompt_of([as_shown(n, memory) for n, memory in enumerate(some, 1)])

        kept = self.fitting(memories, prompt_with)
        return prompt_with(kept), kept


@dataclass(frozen=True, slots=True)
class Statement:
    """A fact before it is stored, and the turns that say it, ascending.

    Of two facts in conflict the later said one wins, so only these turns are its sources. Other shown turns
    are kept only_shown: a continued episode is read as a whole, with all that was said long before.
    """

    text: str
    said: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of facts: the shown turns, their episode, and the prompt's version."""

    turns: tuple[int, ...]
    episode_id: str | None
    version: str


@dataclass(frozen=True, slots=True)
class Append:
    """Appendix A.2: facts are added without comparison."""

    theta_evoke: float

    def evoke(self, job: AskingJob, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """The known facts about the episode with this vector, nearest first."""
        found = yield from job.known("fact", vector, EVOKED_FACTS)
        return [s.memory for s in found if s.score > self.theta_evoke]

    def consolidate(self, job: AskingJob, facts: Sequence[Statement], origin: Origin) -> Steps:
        """Store facts with distinct texts."""
        vectors = yield Embed(tuple(fact.text for fact in facts))
        for fact, vector in zip(facts, vectors, strict=True):
            _add(job, fact, vector, origin)


@dataclass(frozen=True, slots=True)
class Native(Append):
    """Section 3.3.3: each fact is compared with the most similar ones: new, merge, or conflict."""

    def consolidate(self, job: AskingJob, facts: Sequence[Statement], origin: Origin) -> Steps:
        vectors = yield Embed(tuple(fact.text for fact in facts))
        for fact, vector in zip(facts, vectors, strict=True):
            yield from self._consolidate(job, fact, vector, origin)

    def _consolidate(self, job: AskingJob, fact: Statement, vector: Vector, origin: Origin) -> Steps:
        found = yield from job.known_facts(vector, SIMILAR_FACTS)
        new = ShownMemory(1, job.latest(fact.said), fact.text)
        prompt, similar = job.select_fitting(found, lambda known: consolidate_prompt(new, known))
        if not similar:
            _add(job, fact, vector, origin)
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
            _add(job, fact, vector, origin)


@dataclass(frozen=True, slots=True)
class Summary:
    """Appendix A.1: one summary, stored as a single fact that is rewritten each time."""

    def evoke(self, job: AskingJob, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        return job.current("fact")[:1]
        yield

    def consolidate(self, job: AskingJob, facts: Sequence[Statement], origin: Origin) -> Steps:
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


Management = Append | Native | Summary


def management_of(name: ManagementName, theta_evoke: float) -> Management:
    """The management of this name."""
    match name:
        case "native":
            return Native(theta_evoke)
        case "append":
            return Append(theta_evoke)
        case "summary":
            return Summary()


def _add(
    job: AskingJob, fact: Statement, vector: Vector, origin: Origin, replaced: tuple[str, ...] = ()
) -> None:
    job.new(
        "fact",
        fact.text,
        vector,
        fact.said,
        origin.version,
        episode_id=origin.episode_id,
        supersedes=replaced,
        shown_seqs=only_shown(origin.turns, fact.said),
    )


def _merge(
    job: AskingJob, targets: Sequence[Memory], merged: Statement, origin: Origin, version: str
) -> Steps:
    """Merge the targets into a new version of the first with one text; the others are deleted."""
    kept, *others = targets
    (vector,) = yield Embed((merged.text,))
    sources = tuple(sorted({*merged.said, *(seq for fact in targets for seq in fact.source_seqs)}))
    beside = only_shown({*origin.turns, *(seq for fact in targets for seq in fact.shown_seqs)}, sources)
    replaced = tuple(dict.fromkeys((*kept.supersedes, *(fact.id for fact in others))))
    job.drafts += [Draft(deletion(fact, job.seq), None) for fact in others]
    job.revise(kept, merged.text, vector, sources, version, supersedes=replaced, shown_seqs=beside)


def _replace(
    job: AskingJob, targets: Sequence[Memory], fact: Statement, vector: Vector, origin: Origin
) -> None:
    """Replace the facts that this one contradicts. They leave the search and keep their history.

    A target that was said later stays; then this fact is outdated and not stored: only its episode has it.
    """
    untrue = [target for target in targets if max(target.source_seqs) <= max(fact.said)]
    job.drafts += [Draft(deletion(target, job.seq), None) for target in untrue]
    if len(untrue) == len(targets):
        _add(job, fact, vector, origin, tuple(target.id for target in untrue))
