"""RecMem: consolidate when a topic recurs (paper, sections 3.2 to 3.4).

`decide` is the algorithm for one turn u_i. The steps carry the paper's equation numbers; where the
paper is silent, the choices are those listed in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from undertow.engine.llm import BadReply
from undertow.engine.model import Decision, Memory, MemoryKind, memory_id, time_key
from undertow.engine.policies.base import (
    Complete,
    Decide,
    Draft,
    Effect,
    Embed,
    Gate,
    MemoryView,
    Nearest,
    Outcome,
    PromptBudget,
    PromptTooLong,
    Scored,
    Vector,
    cosine,
    deletion,
)
from undertow.engine.records import Job
from undertow.prompts import Prompt, ShownMemory, ShownTurn, episode_prompt, merge_prompt, refine_prompt
from undertow.prompts.replies import EpisodesReply, FactDraft, FactsReply, MergeReply

KNOWN_FACTS = 10

Steps = Generator[Effect, Any, None]


class RecMem:
    """The paper's policy. Stateless: all it knows comes through the MemoryView and the effects."""

    name = "recmem"

    def __init__(self, budget: PromptBudget) -> None:
        self._budget = budget

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        reading = yield Gate(seq)
        theta = memory.thresholds
        work = _Work(seq, memory, self._budget)
        cluster: tuple[int, ...] = (seq,)
        operation, asked = "merge", False
        try:
            # Merge first (eq 6): does the turn continue the nearest episode?
            if reading.episode is not None and reading.episode_score >= theta.theta_merge:
                asked = True
                if (yield from work.merge(seq, reading.episode)):
                    return Outcome(
                        Decision.MERGED, reading, asked, cluster, settled=cluster, drafts=tuple(work.drafts)
                    )
            # Gate (eq 5): the new turn counts itself.
            if len(reading.relevant) + 1 < theta.theta_count:
                return Outcome(Decision.WAITS, reading, asked)
            operation, cluster = "episode", tuple(sorted((*reading.relevant, seq)))
            # Consolidate (eq 7), then refine (eq 8, 9). Nothing made: the turns stay live.
            yield from work.consolidate(cluster)
            settled = cluster if work.drafts else ()
            return Outcome(
                Decision.FIRED, reading, asked, cluster, settled=settled, drafts=tuple(work.drafts)
            )
        except (BadReply, PromptTooLong) as error:
            return _parked(error, operation, cluster, Outcome(Decision.PARKED, reading, asked))

    def replay(self, seq: int, job: Job, memory: MemoryView) -> Decide:
        cluster = tuple(s for s in job.cluster if memory.exists(s))
        work = _Work(seq, memory, self._budget)
        try:
            if not cluster:
                return Outcome(Decision.WAITS, reason="all its turns were deleted")
            if job.operation == "merge":
                return (yield from self._merge_again(cluster[0], work))
            yield from work.consolidate(cluster)
            revived = () if work.drafts else cluster
            return Outcome(Decision.FIRED, cluster=cluster, revived=revived, drafts=tuple(work.drafts))
        except (BadReply, PromptTooLong) as error:
            return _parked(error, job.operation, cluster, Outcome(Decision.PARKED))

    def _merge_again(self, turn_seq: int, work: _Work) -> Decide:
        """A parked merge: ask for the episode that is nearest by now; "no" lets the turn wait."""
        reading = yield Gate(turn_seq)
        asked = reading.episode is not None and reading.episode_score >= work.view.thresholds.theta_merge
        if asked and (yield from work.merge(turn_seq, reading.episode)):
            return Outcome(Decision.MERGED, reading, asked, (turn_seq,), drafts=tuple(work.drafts))
        return Outcome(Decision.WAITS, reading, asked, (turn_seq,), revived=(turn_seq,))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remake what rests on a deleted turn from its other turns, or remove it where none is left."""
        work = _Work(seq, memory, self._budget)
        shaken = [e for e in memory.current("episode") if turn_seq in e.source_seqs]
        loose = [f for f in memory.current("fact") if turn_seq in f.source_seqs]
        touched = {e.id for e in shaken} | {f.episode_id for f in loose}
        facts = [f for f in memory.current("fact") if f in loose or f.episode_id in touched]
        work.drafts += [Draft(deletion(f, seq), None) for f in facts]
        rest: set[int] = set()
        try:
            for episode in [e for e in memory.current("episode") if e.id in touched]:
                resting = [m for m in facts if m.episode_id == episode.id] + [episode]
                others = {s for m in resting for s in m.source_seqs if s != turn_seq and memory.exists(s)}
                rest |= others
                yield from work.remake(episode, turn_seq, tuple(others))
        except (BadReply, PromptTooLong) as error:
            # What rested on the deleted turn must go even where nothing takes its place yet.
            gone = tuple(Draft(deletion(m, seq), None) for m in (*facts, *shaken))
            parked = Outcome(Decision.PARKED, drafts=gone, reason=str(error), operation="episode")
            return replace(parked, cluster=tuple(sorted(rest)))
        return Outcome(Decision.FIRED, drafts=tuple(work.drafts))


class _Work:
    """One job's steps and what it has made so far, in order."""

    def __init__(self, seq: int, view: MemoryView, budget: PromptBudget) -> None:
        self.seq = seq
        self.view = view
        self.drafts: list[Draft] = []
        self._budget = budget

    def merge(self, turn_seq: int, episode: Memory) -> Generator[Effect, Any, bool]:
        """Equation 6: E* <- LLM_merge(E*, u_i). False when the LLM says that they are two stories."""
        prompt = self._checked(merge_prompt(_shown(1, episode), self._turns((turn_seq,))[0]))
        reply: MergeReply = yield Complete(prompt)
        if not reply.same_story:
            return False
        sources = tuple(sorted({*episode.source_seqs, turn_seq}))
        yield from self._revise(episode, reply.narrative, sources, prompt.version)
        yield from self._refine(self.drafts[-1], (turn_seq,))
        return True

    def consolidate(self, cluster: Sequence[int]) -> Steps:
        """Equation 7, then semantic refinement once for each new episode, in reply order."""
        shown = self._by_time(cluster)
        made: list[tuple[Draft, tuple[int, ...]]] = []
        for part in self._parts(shown, lambda seqs: episode_prompt(self._turns(seqs))):
            prompt = episode_prompt(self._turns(part))
            reply: EpisodesReply = yield Complete(prompt)
            if not reply.episodes:
                continue
            vectors = yield Embed(tuple(e.text for e in reply.episodes))
            for written, vector in zip(reply.episodes, vectors, strict=True):
                sources = _named(written.turns, part)
                draft = self._new("episode", written.text, vector, sources, prompt.version)
                made.append((draft, tuple(part)))
        for draft, part_seqs in made:
            yield from self._refine(draft, part_seqs)

    def remake(self, episode: Memory, deleted: int, turns: tuple[int, ...]) -> Steps:
        """An episode without one of its turns, and its facts anew from `turns`.

        It is removed when it has no other turn; left as it is when it did not rest on this one.
        """
        if deleted not in episode.source_seqs:
            (vector,) = yield Embed((episode.text,))
            yield from self._refine(Draft(episode, vector), self._by_time(turns))
            return
        rest = tuple(s for s in episode.source_seqs if s in turns)
        texts: list[str] = []
        version = ""
        for part in self._parts(self._by_time(rest), lambda seqs: episode_prompt(self._turns(seqs))):
            prompt = episode_prompt(self._turns(part))
            reply: EpisodesReply = yield Complete(prompt)
            texts += [e.text for e in reply.episodes]
            version = prompt.version
        if not texts:
            self.drafts.append(Draft(deletion(episode, self.seq), None))
            return
        yield from self._revise(episode, " ".join(texts), rest, version)
        yield from self._refine(self.drafts[-1], self._by_time(turns))

    def _refine(self, episode: Draft, turns: Sequence[int]) -> Steps:
        """Equations 8 and 9: the details that the episode left out become facts."""
        assert episode.vector is not None, "only living episodes are refined"
        shown = _shown(1, episode.memory)
        known = yield from self._known_facts(episode.vector)

        def prompt_of(seqs: Sequence[int]) -> Prompt:
            facts = [_shown(n, f) for n, f in enumerate(known, 1)]
            return refine_prompt(shown, self._turns(seqs), facts)

        for part in self._parts(turns, prompt_of):
            known = yield from self._known_facts(episode.vector)
            prompt = self._checked(prompt_of(part))
            reply: FactsReply = yield Complete(prompt)
            fresh = _unsaid(reply, known)
            if not fresh:
                continue
            vectors = yield Embed(tuple(f.text for f in fresh))
            for written, vector in zip(fresh, vectors, strict=True):
                number = written.replaces
                older = known[number - 1].id if number is not None and 1 <= number <= len(known) else None
                self._new(
                    "fact",
                    written.text,
                    vector,
                    tuple(sorted(part)),
                    prompt.version,
                    episode_id=episode.memory.id,
                    fact_kind=written.kind,
                    supersedes=(older,) if older else (),
                )

    def _known_facts(self, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """The nearest facts, those that this job has made included and those it deleted left out."""
        mine = {d.memory.id: d for d in self.drafts if d.memory.kind == "fact"}
        stored: list[Scored] = yield Nearest("fact", vector, KNOWN_FACTS + len(mine))
        found = [s for s in stored if s.memory.id not in mine]
        found += [Scored(d.memory, cosine(vector, d.vector)) for d in mine.values() if d.vector is not None]
        found.sort(key=lambda s: (-s.score, s.memory.born_at_seq, s.memory.ordinal))
        return [s.memory for s in found[:KNOWN_FACTS]]

    def _revise(self, episode: Memory, text: str, sources: tuple[int, ...], version: str) -> Steps:
        (vector,) = yield Embed((text,))
        revised = replace(
            episode,
            text=text,
            version=episode.version + 1,
            made_at_seq=self.seq,
            source_seqs=sources,
            timestamp=self._latest(sources),
            prompt_version=version,
            model=None,
        )
        self.drafts.append(Draft(revised, vector))

    def _new(
        self, kind: MemoryKind, text: str, vector: Vector, sources: tuple[int, ...], version: str, **more: Any
    ) -> Draft:
        ordinal = sum(d.memory.kind == kind and d.memory.born_at_seq == self.seq for d in self.drafts)
        memory = Memory(
            id=memory_id(self.view.tenant, self.view.generation, self.seq, kind, ordinal),
            kind=kind,
            tenant=self.view.tenant,
            text=text,
            version=1,
            born_at_seq=self.seq,
            made_at_seq=self.seq,
            ordinal=ordinal,
            source_seqs=sources,
            timestamp=self._latest(sources),
            prompt_version=version,
            **more,
        )
        self.drafts.append(Draft(memory, vector))
        return self.drafts[-1]

    def _parts(
        self, seqs: Sequence[int], prompt_of: Callable[[Sequence[int]], Prompt]
    ) -> list[Sequence[int]]:
        """The turns in as few prompts as hold them, oldest first. PromptTooLong if one turn is too long."""
        if not seqs or self._budget.fits(prompt_of(seqs)):
            return [seqs] if seqs else []
        parts: list[Sequence[int]] = []
        part: list[int] = []
        for seq in seqs:
            if part and not self._budget.fits(prompt_of([*part, seq])):
                parts.append(part)
                part = []
            part.append(seq)
            if len(part) == 1:
                self._checked(prompt_of(part))
        return [*parts, part]

    def _checked(self, prompt: Prompt) -> Prompt:
        if not self._budget.fits(prompt):
            raise PromptTooLong(f"the {prompt.operation} prompt needs about {prompt.size_tokens} tokens")
        return prompt

    def _by_time(self, seqs: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(seqs, key=lambda s: (time_key(self.view.turn(s).timestamp), s)))

    def _latest(self, seqs: Sequence[int]) -> str | None:
        return self.view.turn(self._by_time(seqs)[-1]).timestamp

    def _turns(self, seqs: Sequence[int]) -> list[ShownTurn]:
        views = [self.view.turn(s) for s in seqs]
        return [ShownTurn(n, v.timestamp, v.text) for n, v in enumerate(views, 1)]


def _shown(number: int, memory: Memory) -> ShownMemory:
    return ShownMemory(number, memory.timestamp, memory.text)


def _unsaid(reply: FactsReply, known: Sequence[Memory]) -> list[FactDraft]:
    """The facts of a reply, without those that repeat a shown fact or an earlier one word for word."""
    first = {f.text: f for f in reversed(reply.facts)}
    said = {f.text for f in known}
    return [f for f in reply.facts if first[f.text] is f and f.text not in said]


def _named(numbers: Sequence[int], shown: Sequence[int]) -> tuple[int, ...]:
    """The shown turns that an episode names; all of them when it names none or one that is not there."""
    if not numbers or any(not 1 <= n <= len(shown) for n in numbers):
        return tuple(sorted(shown))
    return tuple(sorted({shown[n - 1] for n in numbers}))


def _parked(
    error: BadReply | PromptTooLong, operation: str, cluster: tuple[int, ...], outcome: Outcome
) -> Outcome:
    return replace(outcome, operation=operation, cluster=cluster, settled=cluster, reason=str(error))
