"""What NEMORI's facts are kept by: its `management`, a plug with two ends (section 3.3, appendix A).

`evoke` gives what is known of an episode, from which a prediction of it is made; `consolidate` takes what the
prediction missed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from undertow.engine.config import ManagementName
from undertow.engine.model import Memory
from undertow.engine.policies.base import Complete, Draft, Effect, Embed, Vector, deletion
from undertow.engine.policies.work import Steps, Work, as_shown
from undertow.prompts import Prompt, ShownMemory, consolidate_prompt, summarise_prompt
from undertow.prompts.replies import ConsolidateReply, SummaryReply

# K_s and K_m of section 4.1
EVOKED_FACTS = 10
SIMILAR_FACTS = 5


class NemoriWork(Work):
    """A job of NEMORI. `operation`: the LLM call that it made last."""

    operation = "partition"

    def ask(self, prompt: Prompt) -> Generator[Effect, Any, Any]:
        """The reply to a prompt. PromptTooLong, BadReply."""
        self.operation = prompt.operation
        return (yield Complete(self.checked(prompt)))

    def that_fit(
        self, memories: Sequence[Memory], prompt_of: Callable[[Sequence[ShownMemory]], Prompt]
    ) -> tuple[Prompt, Sequence[Memory]]:
        """The prompt with those of these that the model's context has room for, see `fitting`; and they."""

        def prompt_with(some: Sequence[Memory]) -> Prompt:
            return prompt_of([as_shown(n, memory) for n, memory in enumerate(some, 1)])

        kept = self.fitting(memories, prompt_with)
        return prompt_with(kept), kept


@dataclass(frozen=True, slots=True)
class Origin:
    """Where facts come from: the turns whose messages were read, their episode, and the prompt's version."""

    turns: tuple[int, ...]
    episode_id: str | None
    version: str


class Management(Protocol):
    """Evoke and Consolidate of section 3.3."""

    def evoke(self, job: NemoriWork, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """What is known of the episode with this vector, nearest first."""
        ...

    def consolidate(self, job: NemoriWork, texts: Sequence[str], origin: Origin) -> Steps:
        """Take in facts, each text once."""
        ...


@dataclass(frozen=True, slots=True)
class Append:
    """Appendix A.2: facts are added as they come, and nothing is done about them."""

    theta_evoke: float

    def evoke(self, job: NemoriWork, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        found = yield from job.known("fact", vector, EVOKED_FACTS)
        return [s.memory for s in found if s.score > self.theta_evoke]

    def consolidate(self, job: NemoriWork, texts: Sequence[str], origin: Origin) -> Steps:
        vectors = yield Embed(tuple(texts))
        for text, vector in zip(texts, vectors, strict=True):
            _add(job, text, vector, origin)


@dataclass(frozen=True, slots=True)
class Native(Append):
    """Section 3.3.3: each fact is compared with those most like it, and is new, a merge or a conflict."""

    def consolidate(self, job: NemoriWork, texts: Sequence[str], origin: Origin) -> Steps:
        vectors = yield Embed(tuple(texts))
        for text, vector in zip(texts, vectors, strict=True):
            yield from self._consolidate(job, text, vector, origin)

    def _consolidate(self, job: NemoriWork, text: str, vector: Vector, origin: Origin) -> Steps:
        found = yield from job.known_facts(vector, SIMILAR_FACTS)
        fact = ShownMemory(1, job.latest(origin.turns), text)
        prompt, similar = job.that_fit(found, lambda known: consolidate_prompt(fact, known))
        if not similar:
            _add(job, text, vector, origin)
            return
        reply: ConsolidateReply = yield from job.ask(prompt)
        targets = [similar[n - 1] for n in dict.fromkeys(reply.targets) if 1 <= n <= len(similar)]
        if reply.action == "merge" and targets:
            yield from _merge(job, targets, reply.text or text, origin.turns, prompt.version)
        elif reply.action == "conflict":
            _replace(job, [t for t in targets if _not_newer(t, origin)], text, vector, origin)
        else:
            _add(job, text, vector, origin)


@dataclass(frozen=True, slots=True)
class Summary:
    """Appendix A.1: one summary, kept as one fact that is told anew each time."""

    def evoke(self, job: NemoriWork, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        return _summary(job)
        yield

    def consolidate(self, job: NemoriWork, texts: Sequence[str], origin: Origin) -> Steps:
        stored = _summary(job)
        date = job.latest(origin.turns)
        facts = [ShownMemory(n, date, text) for n, text in enumerate(texts, 1)]
        prompt = summarise_prompt(facts, [as_shown(1, memory) for memory in stored])
        reply: SummaryReply = yield from job.ask(prompt)
        (vector,) = yield Embed((reply.summary,))
        if not stored:
            job.new("fact", reply.summary, vector, origin.turns, prompt.version)
            return
        sources = tuple(sorted({*stored[0].source_seqs, *origin.turns}))
        job.revise(stored[0], reply.summary, vector, sources, prompt.version)


def management_of(name: ManagementName, theta_evoke: float) -> Management:
    """The plug of this name."""
    match name:
        case "native":
            return Native(theta_evoke)
        case "append":
            return Append(theta_evoke)
        case "summary":
            return Summary()


def _summary(job: NemoriWork) -> list[Memory]:
    """The one summary, as this job has it; [] where there is none yet."""
    made = (d.memory for d in job.drafts if d.memory.kind == "fact")
    newest = {memory.id: memory for memory in (*job.view.current("fact"), *made)}
    return [memory for memory in newest.values() if not memory.deleted][:1]


def _add(job: NemoriWork, text: str, vector: Vector, origin: Origin, replaced: tuple[str, ...] = ()) -> None:
    job.new(
        "fact",
        text,
        vector,
        origin.turns,
        origin.version,
        episode_id=origin.episode_id,
        supersedes=replaced,
    )


def _merge(
    job: NemoriWork, targets: Sequence[Memory], text: str, turns: Sequence[int], version: str
) -> Steps:
    """One canonical text in the place of the targets: a version of the first; the others give way."""
    kept, *others = targets
    (vector,) = yield Embed((text,))
    sources = tuple(sorted({*turns, *(seq for fact in targets for seq in fact.source_seqs)}))
    replaced = tuple(dict.fromkeys((*kept.supersedes, *(fact.id for fact in others))))
    job.drafts += [Draft(deletion(fact, job.seq), None) for fact in others]
    job.revise(kept, text, vector, sources, version, supersedes=replaced)


def _replace(job: NemoriWork, untrue: Sequence[Memory], text: str, vector: Vector, origin: Origin) -> None:
    """The new fact in the place of those that it makes untrue: they keep their history, out of search."""
    job.drafts += [Draft(deletion(fact, job.seq), None) for fact in untrue]
    _add(job, text, vector, origin, tuple(fact.id for fact in untrue))


def _not_newer(fact: Memory, origin: Origin) -> bool:
    """What is read late, again after a deletion say, makes nothing untrue that later turns have told."""
    return max(fact.source_seqs) <= max(origin.turns)
