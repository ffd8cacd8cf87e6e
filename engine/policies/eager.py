"""Eager extraction: the LLM reads every turn when it arrives. The baseline that RecMem is compared with.

After Mem0 (Chhikara et al. 2025, section 2.1). Extraction: facts come from the newest exchange, with the
recent messages as context. Update: each candidate is compared with the most similar stored facts, and the LLM
chooses ADD, UPDATE, DELETE or NOOP. Two calls a turn, or one if nothing was extracted. docs/decisions/0043
lists the differences from Mem0 and their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from undertow.engine.base.model import Decision, Memory
from undertow.engine.policies.base import (
    Complete,
    Decide,
    Draft,
    Embed,
    MemoryView,
    Policy,
    PolicyResult,
    Vector,
    deletion,
)
from undertow.engine.policies.work import Failed, Steps, Work, as_shown, parked
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.builders import Prompt, ShownMemory, extract_prompt, prompt_version, reconcile_prompt
from undertow.prompts.reply_schemas import ExtractReply, FactDecision, ReconcileReply

# The paper's m = 10 recent messages, as exchanges of two.
RECENT_TURNS = 5
# The paper's s = 10 most similar memories for each candidate.
SIMILAR_FACTS = 10


class Eager(Policy):
    """Stateless: its only input is the MemoryView and the results of effects."""

    name = "eager"

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """Extraction and update (section 2.1) of the turn, at once."""
        work = _Extraction(seq, memory, self._budget)
        try:
            yield from work.read(seq)
        except Failed as error:
            return parked(error, "extract", (seq,))
        settled = (seq,) if work.drafts else ()
        return PolicyResult(Decision.FIRED, cluster=(seq,), settled=settled, drafts=tuple(work.drafts))

    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Read the turns of a parked job again."""
        work = _Extraction(seq, memory, self._budget)
        try:
            for turn_seq in turns:
                yield from work.read(turn_seq)
        except Failed as error:
            return parked(error, "extract", turns)
        revived = () if work.drafts else turns
        return PolicyResult(Decision.FIRED, cluster=turns, revived=revived, drafts=tuple(work.drafts))

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Delete the facts derived from a turn, and extract again from their other turns.

        That includes the facts of turns that were read with it as context: they may contain its words. It
        excludes facts whose update only saw one of its facts: provenance tracks turns, not influence. What an
        UPDATE or DELETE because of the turn removed is not restored; the history of those facts has it.
        """
        work = _Extraction(seq, memory, self._budget)
        # Turns deleted since may have stood between. So some of these turns never had it as context.
        reach = {turn_seq, *_nearest_turns(range(turn_seq + 1, seq), memory)}
        shaken = [f for f in memory.current("fact") if reach.intersection(f.source_seqs)]
        # The history of facts deleted before still has the words: another deletion redacts it.
        ended = [f for f in memory.ended("fact") if reach.intersection(f.source_seqs)]
        gone = tuple(Draft(deletion(f, seq), None) for f in (*shaken, *ended))
        others = {s for f in shaken for s in f.source_seqs if s != turn_seq and memory.exists(s)}
        rest = tuple(sorted(others))
        work.drafts += gone
        try:
            for other in rest:
                yield from work.read(other)
        except Failed as error:
            # They must go even if they cannot be extracted again yet.
            return parked(error, "extract", rest, drafts=gone)
        return PolicyResult(Decision.FIRED, drafts=tuple(work.drafts))


_ADD = FactDecision(candidate=1, action="add", fact=None, text="")


class _Extraction(Work):
    """The steps of one job."""

    def read(self, turn_seq: int) -> Steps:
        """Extract the facts of one turn, and reconcile them with the stored ones (section 2.1)."""
        reply: ExtractReply = yield Complete(self._extract_prompt(turn_seq))
        texts = tuple(dict.fromkeys(fact.text for fact in reply.facts))
        if texts:
            vectors = yield Embed(texts)
            yield from self._reconcile(turn_seq, dict(zip(texts, vectors, strict=True)))

    def _extract_prompt(self, turn_seq: int) -> Prompt:
        """The prompt with as many recent turns as fit into the model's context. PromptTooLong."""
        seqs = [*reversed(_nearest_turns(range(turn_seq - 1, -1, -1), self.view)), turn_seq]
        while True:
            *recent, newest = self.turns(seqs)
            prompt = extract_prompt(recent, newest)
            if not recent or self.fits(prompt):
                return self.checked(prompt)
            seqs = seqs[1:]

    def _reconcile(self, turn_seq: int, candidates: Mapping[str, Vector]) -> Steps:
        """One decision for each candidate, a text with its vector. In halves if the prompt is too long."""
        known = yield from self.near_facts(candidates.values(), SIMILAR_FACTS)
        known = [
            self.add_sources(fact, (turn_seq,), candidates[fact.text]) if fact.text in candidates else fact
            for fact in known
        ]
        said = {fact.text for fact in known}
        fresh = [text for text in candidates if text not in said]
        if not (fresh and known):
            yield from self._apply(turn_seq, fresh, known, {})
            return
        date = self.view.turn(turn_seq).timestamp
        prompt = reconcile_prompt(
            [ShownMemory(n, date, text) for n, text in enumerate(fresh, 1)],
            [as_shown(n, fact) for n, fact in enumerate(known, 1)],
        )
        if len(fresh) > 1 and not self.fits(prompt):
            half = len(fresh) // 2
            for some in (fresh[:half], fresh[half:]):
                yield from self._reconcile(turn_seq, {text: candidates[text] for text in some})
            return
        reply: ReconcileReply = yield Complete(self.checked(prompt))
        first = {d.candidate: d for d in reversed(reply.decisions)}
        yield from self._apply(turn_seq, fresh, known, first)

    def _apply(
        self,
        turn_seq: int,
        candidates: Sequence[str],
        known: Sequence[Memory],
        decisions: Mapping[int, FactDecision],
    ) -> Steps:
        """Carry out ADD, UPDATE, DELETE and NOOP, in the candidates' order.

        A candidate is added if it has no decision, or if its decision names no shown fact or one that an
        earlier decision has changed: a wrong number loses nothing that was said. A turn that is read late
        (replayed, or after a deletion) does not change what a later turn has said. A NOOP that names no shown
        fact has no effect.
        """
        open_facts = dict(enumerate(known, 1))
        older = {n for n, fact in open_facts.items() if max(fact.source_seqs) <= turn_seq}
        repeated: list[int] = []
        writes: list[tuple[Memory | None, str]] = []
        for nth, candidate in enumerate(candidates, 1):
            decision = decisions.get(nth, _ADD)
            number = decision.fact or 0
            if decision.action == "none":
                repeated.append(number)
                continue
            changes = decision.action != "add" and number in older
            fact = open_facts.pop(number, None) if changes else None
            if fact is None:
                writes.append((None, candidate))
            elif decision.action == "delete":
                self.drafts.append(Draft(deletion(fact, self.seq), None))
            else:
                writes.append((fact, decision.text or candidate))
        again = [open_facts[n] for n in dict.fromkeys(repeated) if n in open_facts]
        texts = (*(text for _, text in writes), *(fact.text for fact in again))
        if not texts:
            return
        vectors = yield Embed(texts)
        for fact, vector in zip(again, vectors[len(writes) :], strict=True):
            self.add_sources(fact, (turn_seq,), vector)
        for (fact, text), vector in zip(writes, vectors[: len(writes)], strict=True):
            if fact is None:
                self.new("fact", text, vector, (turn_seq,), prompt_version("extract"))
            else:
                sources = tuple(sorted({*fact.source_seqs, turn_seq}))
                self.revise(fact, text, vector, sources, prompt_version("reconcile"))


def _nearest_turns(seqs: Iterable[int], view: MemoryView) -> list[int]:
    """The first RECENT_TURNS of these seqs that are turns and were not deleted."""
    return list(islice(filter(view.exists, seqs), RECENT_TURNS))
