"""RecMem: consolidate when a topic recurs (paper, sections 3.2 to 3.4).

`decide` is the algorithm for one turn u_i. Its steps carry the paper's equation numbers. docs/decisions/0007
lists our choices where the paper is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from undertow.engine.base.config import Ablation
from undertow.engine.base.model import Decision, Memory
from undertow.engine.policies.base import (
    Complete,
    Decide,
    Draft,
    Effect,
    Embed,
    GateReading,
    MemoryView,
    PairThetas,
    Policy,
    PolicyResult,
    PromptBudget,
    ReadGate,
    Vector,
    deletion,
    nothing_to_decide,
)
from undertow.engine.policies.salience import Salience, day_of
from undertow.engine.policies.work import Failed, Steps, Work, as_shown, listed, named, only_shown, parked
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    direct_prompt,
    episode_facts_prompt,
    episode_prompt,
    merge_facts_prompt,
    merge_prompt,
    refine_prompt,
    salient_prompt,
)
from undertow.prompts.reply_schemas import (
    EpisodeDraft,
    EpisodeFactsReply,
    EpisodesReply,
    FactDraft,
    FactsReply,
    MergeFactsReply,
    MergeReply,
    SalientReply,
)

# stored facts shown with a cluster, and with one turn; newest turns of an episode that a merge may repeat
KNOWN_FACTS, KNOWN_FACTS_OF_TURN, RETOLD_TURNS = 10, 5, 32

FactsPrompt = Callable[[Sequence[ShownTurn], Sequence[ShownMemory]], Prompt]
# a fact, and the id of its episode
Told = tuple[str | None, FactDraft]


class RecMem(Policy):
    """The paper's policy. Stateless: its only input is the MemoryView and the results of effects."""

    name = "recmem"

    def __init__(
        self,
        budget: PromptBudget,
        ablation: Ablation | None = None,
        salience: Salience | None = None,
        *,
        is_fused: bool = False,
    ) -> None:
        """`ablation` (section 4.3): "direct-extraction" stores no episodes, "without-facts" no facts.

        `salience`: what is read besides recurring topics, and what does not count; None: the paper's gate.
        `is_fused`: an episode or a merge and its facts come in one reply; else in two, as in the paper.
        """
        super().__init__(budget)
        self._ablation = ablation
        self._salience = salience
        self._is_fused = is_fused

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """Decide by recurrence, then read what else says much; at times find the thresholds anew."""
        outcome = yield from self._decide(seq, memory)
        if not memory.thetas_are_due(seq):
            return outcome
        shares = memory.thresholds.shares
        thetas = yield PairThetas(seq, tuple(shares.values()))
        return replace(outcome, thetas=dict(zip(shares, thetas, strict=True)) if thetas else {})

    def _decide(self, seq: int, memory: MemoryView) -> Decide:
        reading = yield ReadGate(seq)
        work = self._job(seq, memory)
        outcome = yield from self._by_recurrence(seq, reading, work)
        if self._salience is None:
            return outcome
        if outcome.decision is Decision.PARKED:  # its drafts are of no use
            work = self._job(seq, memory)
        salient = self._salience.to_read(seq, memory, outcome.settled)
        return (yield from self._read(work, salient, outcome))

    def _by_recurrence(self, seq: int, reading: GateReading, work: _Consolidation) -> Decide:
        """Merge (equation 6), or gate (equation 5), consolidate (7) and refine (8, 9)."""
        theta = work.view.thresholds
        cluster: tuple[int, ...] = (seq,)
        operation, asked = "merge", False
        try:
            # Equation 6: does the turn continue the nearest episode?
            episode, score = reading.episode, reading.episode_score
            near = score is not None and score >= theta.theta_merge
            if episode is not None and near and self._speaks(seq, work.view):
                asked = True
                if (yield from work.merge(seq, episode)):
                    return PolicyResult(
                        Decision.MERGED, reading, asked, cluster, settled=cluster, drafts=tuple(work.drafts)
                    )
            # Equation 5, the gate: the new turn counts itself.
            cluster = self._counted(seq, reading, work.view)
            if len(cluster) < theta.theta_count:
                return PolicyResult(Decision.WAITS, reading, asked)
            operation = "episode"
            # Equation 7, then 8 and 9. In the paper the turns stay live if nothing is made. They would fire
            # again with the next turn, so here the topic has to recur anew.
            yield from work.consolidate(cluster)
            settled = cluster if work.drafts or self._salience is not None else ()
            return PolicyResult(
                Decision.FIRED, reading, asked, cluster, settled=settled, drafts=tuple(work.drafts)
            )
        except Failed as error:
            return parked(error, operation, cluster, reading=reading, merge_asked=asked)

    def _counted(self, seq: int, reading: GateReading, memory: MemoryView) -> tuple[int, ...]:
        """The turn and its relevant set, in order; without those that say little if the gate would fire."""
        cluster = tuple(sorted((*reading.relevant, seq)))
        if len(cluster) < memory.thresholds.theta_count or self._salience is None:
            return cluster
        return self._salience.speaking(cluster, memory) if self._speaks(seq, memory) else ()

    def _speaks(self, seq: int, memory: MemoryView) -> bool:
        return self._salience is None or bool(self._salience.speaking((seq,), memory))

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        """Read what says much among the turns that no complete window has."""
        waits = PolicyResult(Decision.WAITS)
        if self._salience is None:
            return (yield from nothing_to_decide())
        work = self._job(seq, memory)
        return (yield from self._read(work, self._salience.left_over(seq, memory), waits))

    def _read(self, work: _Consolidation, turns: Sequence[int], outcome: PolicyResult) -> Decide:
        """Add the facts of salient turns to an outcome. They stay live: their topics may yet recur."""
        if not turns:
            return outcome
        told = replace(outcome, salient=tuple(turns), salient_day=day_of(turns[-1], work.view))
        try:
            yield from work.extract(turns, salient_prompt)
        except Failed as error:
            if outcome.decision is not Decision.WAITS:  # what became of recurrence is kept
                return replace(told, reason=outcome.reason or str(error))
            reason, cluster = str(error), tuple(turns)
            return replace(
                told, decision=Decision.PARKED, cluster=cluster, reason=reason, operation="salient"
            )
        return replace(told, drafts=tuple(work.drafts))

    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Run a parked merge or consolidation again."""
        work = self._job(seq, memory)
        try:
            if job.operation == "merge":
                return (yield from self._merge_again(turns[0], work))
            if job.operation == "salient":
                yield from work.extract(turns, salient_prompt)
                return PolicyResult(Decision.WAITS, cluster=turns, drafts=tuple(work.drafts))
            yield from work.consolidate(turns)
            revived = () if work.drafts else turns
            return PolicyResult(Decision.FIRED, cluster=turns, revived=revived, drafts=tuple(work.drafts))
        except Failed as error:
            return parked(error, job.operation, turns)

    def _merge_again(self, turn_seq: int, work: _Consolidation) -> Decide:
        """Retry a parked merge with the episode that is nearest now. Without a merge the turn waits."""
        reading = yield ReadGate(turn_seq)
        asked = reading.episode is not None and reading.episode_score >= work.view.thresholds.theta_merge
        if asked and (yield from work.merge(turn_seq, reading.episode)):
            return PolicyResult(Decision.MERGED, reading, asked, (turn_seq,), drafts=tuple(work.drafts))
        return PolicyResult(Decision.WAITS, reading, asked, (turn_seq,), revived=(turn_seq,))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remake what was derived from a deleted turn from its other turns; delete it if none is left."""
        work = self._job(seq, memory)
        shaken = [e for e in memory.current("episode") if turn_seq in e.reach]
        loose = [f for f in memory.current("fact") if turn_seq in f.reach]
        reached = {e.id for e in (*shaken, *memory.ended("episode")) if turn_seq in e.reach}
        touched = reached | {f.episode_id for f in loose if f.episode_id is not None}
        facts = [f for f in memory.current("fact") if f in loose or f.episode_id in touched]
        # The history of memories that users deleted still has the words: another deletion redacts it.
        ended = [e for e in memory.ended("episode") if e.id in reached]
        ended += [f for f in memory.ended("fact") if turn_seq in f.reach or f.episode_id in reached]
        work.drafts += [Draft(deletion(m, seq), None) for m in (*facts, *ended)]
        rest: set[int] = set()
        try:
            for episode in [e for e in memory.current("episode") if e.id in touched]:
                resting = [m for m in facts if m.episode_id == episode.id] + [episode]
                others = {s for m in resting for s in _read_for(m) if s != turn_seq and memory.exists(s)}
                rest |= others
                yield from work.remake(episode, turn_seq, tuple(others))
            for read in dict.fromkeys(f.reach for f in loose if f.episode_id is None):
                left = tuple(s for s in sorted(read) if s != turn_seq and memory.exists(s))
                rest.update(left)
                if left:
                    yield from work.extract(left)
        except Failed as error:
            # What was derived from the deleted turn must go even if it cannot be remade yet.
            gone = tuple(Draft(deletion(m, seq), None) for m in (*facts, *shaken, *ended))
            left = tuple(sorted(rest))
            return PolicyResult(
                Decision.PARKED, cluster=left, drafts=gone, reason=str(error), operation="episode"
            )
        return PolicyResult(Decision.FIRED, drafts=tuple(work.drafts))

    def _job(self, seq: int, memory: MemoryView) -> _Consolidation:
        is_fused = self._is_fused and self._ablation is None
        return _Consolidation(seq, memory, self._budget, self._ablation, is_fused=is_fused)


class _Consolidation(Work):
    """The steps of one job."""

    def __init__(
        self,
        seq: int,
        view: MemoryView,
        budget: PromptBudget,
        ablation: Ablation | None,
        *,
        is_fused: bool,
    ) -> None:
        super().__init__(seq, view, budget)
        self._ablation = ablation
        self._is_fused = is_fused

    def merge(self, turn_seq: int, episode: Memory) -> Generator[Effect, Any, bool]:
        """Equation 6: E* <- LLM_merge(E*, u_i), then refinement. False: the LLM finds two stories."""
        if self._is_fused:
            return (yield from self._merge_with_facts(turn_seq, episode))
        prompt = self.checked(merge_prompt(as_shown(1, episode), self.turns((turn_seq,))[0]))
        reply: MergeReply = yield Complete(prompt)
        if reply.same_story:
            yield from self._merged(episode, turn_seq, reply.narrative, prompt.version)
            yield from self._refine(self.drafts[-1], (turn_seq,))
        return reply.same_story

    def _merge_with_facts(self, turn_seq: int, episode: Memory) -> Generator[Effect, Any, bool]:
        """The merge and the turn's facts in one reply; the stored facts shown are those near the episode."""
        (turn,), shown = self.turns((turn_seq,)), as_shown(1, episode)
        before = [seq for seq in episode.source_seqs[-RETOLD_TURNS:] if self.view.exists(seq)]
        self.turns(before)
        (vector,) = yield Embed((episode.text,))
        near = yield from self.known_facts(vector, KNOWN_FACTS_OF_TURN)
        known = self.fitting(near, lambda facts: merge_facts_prompt(shown, listed(facts), turn))
        prompt = self.checked(merge_facts_prompt(shown, listed(known), turn))
        reply: MergeFactsReply = yield Complete(prompt)
        if reply.same_story:
            yield from self._merged(episode, turn_seq, reply.narrative, prompt.version)
            told = [(episode.id, fact) for fact in reply.facts]
            yield from self._keep(told, known, (turn_seq,), prompt.version, before=before)
        return reply.same_story

    def _merged(self, episode: Memory, turn_seq: int, narrative: str, version: str) -> Steps:
        sources = tuple(sorted({*episode.source_seqs, turn_seq}))
        yield from self._rewrite(episode, narrative, sources, version)

    def consolidate(self, cluster: Sequence[int]) -> Steps:
        """Equation 7, then semantic refinement (8, 9) of each new episode, in reply order."""
        shown = self.by_time(cluster)
        if self._ablation == "direct-extraction":
            yield from self.extract(cluster)
        elif self._is_fused:
            yield from self._tell_with_facts(shown)
        else:
            yield from self._tell_and_refine(shown)

    def _tell_with_facts(self, turns: Sequence[int]) -> Steps:
        """Episodes, each with its facts, in one reply."""
        vector = yield from self._mean(turns)

        def prompt_of(seqs: Sequence[int], known: Sequence[Memory]) -> Prompt:
            return episode_facts_prompt(self.turns(seqs), listed(known))

        near = yield from self.known_facts(vector, KNOWN_FACTS)
        for part in self.parts(turns, lambda seqs: prompt_of(seqs, near)):
            known = yield from self.known_facts(vector, KNOWN_FACTS)
            prompt = self.checked(prompt_of(part, known))
            reply: EpisodeFactsReply = yield Complete(prompt)
            made = yield from self._episodes(reply.episodes, part, prompt.version)
            each = zip(made, reply.episodes, strict=True)
            told = [(draft.memory.id, fact) for draft, episode in each for fact in episode.facts]
            yield from self._keep(told, known, part, prompt.version)

    def _tell_and_refine(self, shown: Sequence[int]) -> Steps:
        """Episodes, and then the facts of each, in replies of their own."""
        made: list[tuple[Draft, tuple[int, ...]]] = []
        for part in self.parts(shown, lambda seqs: episode_prompt(self.turns(seqs))):
            prompt = episode_prompt(self.turns(part))
            reply: EpisodesReply = yield Complete(prompt)
            drafts = yield from self._episodes(reply.episodes, part, prompt.version)
            made += [(draft, tuple(part)) for draft in drafts]
        for draft, part_seqs in made:
            yield from self._refine(draft, part_seqs)

    def _episodes(
        self, written: Sequence[EpisodeDraft], part: Sequence[int], version: str
    ) -> Generator[Effect, Any, list[Draft]]:
        """New episodes of a reply to the turns of `part`."""
        if not written:
            return []
        vectors = yield Embed(tuple(episode.text for episode in written))
        made = []
        for episode, vector in zip(written, vectors, strict=True):
            sources = tuple(sorted(named(episode.turns, part, otherwise=part)))
            beside = only_shown(part, sources)
            made.append(self.new("episode", episode.text, vector, sources, version, shown_seqs=beside))
        return made

    def remake(self, episode: Memory, deleted: int, turns: tuple[int, ...]) -> Steps:
        """Rewrite an episode without a deleted turn, and extract its facts again from `turns`.

        An episode without other turns is deleted; one that did not use the deleted turn stays as it is.
        """
        if deleted not in episode.reach:
            (vector,) = yield Embed((episode.text,))
            yield from self._refine(Draft(episode, vector), self.by_time(turns))
            return
        rest = tuple(s for s in episode.source_seqs if s in turns)
        texts: list[str] = []
        version = ""
        for part in self.parts(self.by_time(rest), lambda seqs: episode_prompt(self.turns(seqs))):
            prompt = episode_prompt(self.turns(part))
            reply: EpisodesReply = yield Complete(prompt)
            texts += [e.text for e in reply.episodes]
            version = prompt.version
        if not texts:
            self.drafts.append(Draft(deletion(episode, self.seq), None))
            return
        yield from self._rewrite(replace(episode, shown_seqs=()), " ".join(texts), rest, version)
        yield from self._refine(self.drafts[-1], self.by_time(turns))

    def extract(self, turns: Sequence[int], prompt_of: FactsPrompt = direct_prompt) -> Steps:
        """Direct extraction (section 4.3): facts of the raw turns, without an episode as reference.

        Without an episode, the stored facts shown are those nearest to the text of all turns.
        """
        shown = self.by_time(turns)
        vector = yield from self._mean(shown)
        yield from self._extract_facts(
            shown, vector, lambda seqs, known: prompt_of(self.turns(seqs), known), episode_id=None
        )

    def _mean(self, turns: Sequence[int]) -> Generator[Effect, Any, Vector]:
        """The vector of the text of all turns."""
        vectors: Sequence[Vector] = yield Embed(("\n".join(turn.text for turn in self.turns(turns)),))
        return vectors[0]

    def _refine(self, episode: Draft, turns: Sequence[int]) -> Steps:
        """Equations 8 and 9: details that the episode left out become facts."""
        if self._ablation == "without-facts":
            return
        assert episode.vector is not None, "only living episodes are refined"
        shown = as_shown(1, episode.memory)
        yield from self._extract_facts(
            turns,
            episode.vector,
            lambda seqs, known: refine_prompt(shown, self.turns(seqs), known),
            episode_id=episode.memory.id,
        )

    def _extract_facts(
        self,
        turns: Sequence[int],
        vector: Vector,
        prompt_of: Callable[[Sequence[int], Sequence[ShownMemory]], Prompt],
        *,
        episode_id: str | None,
    ) -> Steps:
        """Ask for facts of turns, in as many parts as needed, with the stored facts nearest to `vector`."""
        known = yield from self.known_facts(vector, KNOWN_FACTS)

        def part_prompt(seqs: Sequence[int]) -> Prompt:
            return prompt_of(seqs, listed(known))

        for part in self.parts(turns, part_prompt):
            known = yield from self.known_facts(vector, KNOWN_FACTS)
            prompt = self.checked(part_prompt(part))
            reply: FactsReply | SalientReply = yield Complete(prompt)
            yield from self._keep([(episode_id, f) for f in reply.facts], known, part, prompt.version)

    def _keep(
        self,
        told: Sequence[Told],
        known: Sequence[Memory],
        part: Sequence[int],
        version: str,
        before: Sequence[int] = (),
    ) -> Steps:
        """Store facts of `part`, told beside the `known` ones and an episode of the turns `before`."""
        fresh = _unsaid(told, known)
        if not fresh:
            return
        vectors = yield Embed(tuple(fact.text for _, fact in fresh))
        for (episode_id, written), vector in zip(fresh, vectors, strict=True):
            number = written.replaces
            older = known[number - 1] if number is not None and 1 <= number <= len(known) else None
            sources = self.saying(written.text, written.turns, part, before, older)
            self.new(
                "fact",
                written.text,
                vector,
                sources,
                version,
                shown_seqs=only_shown(part, sources),
                episode_id=episode_id,
                fact_kind=written.kind,
                supersedes=(older.id,) if older else (),
            )

    def _rewrite(self, episode: Memory, text: str, sources: tuple[int, ...], version: str) -> Steps:
        (vector,) = yield Embed((text,))
        self.revise(episode, text, vector, sources, version)


def _read_for(memory: Memory) -> frozenset[int]:
    """The turns to read again for a memory: a fact's whole part of a cluster, an episode's sources."""
    return memory.reach if memory.kind == "fact" else frozenset(memory.source_seqs)


def _unsaid(told: Sequence[Told], known: Sequence[Memory]) -> list[Told]:
    """The facts of a reply without verbatim repeats of a shown or an earlier fact."""
    first = {fact.text: (episode_id, fact) for episode_id, fact in reversed(told)}
    said = {memory.text for memory in known}
    return [(of, fact) for of, fact in told if first[fact.text][1] is fact and fact.text not in said]
