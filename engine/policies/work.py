"""Shared by the jobs of all policies: drafts made so far, nearest facts, prompts that fit the context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from undertow.engine.base.model import Decision, Memory, MemoryKind, memory_id, time_key
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.attribution import repeated, telling_words, turns_that_say
from undertow.engine.policies.base import (
    Complete,
    Draft,
    Effect,
    MemoryView,
    Nearest,
    PolicyResult,
    PromptBudget,
    PromptTooLong,
    Scored,
    Vector,
    cosine,
)
from undertow.prompts.builders import Prompt, ShownMemory, ShownTurn

T = TypeVar("T")
Steps = Generator[Effect, Any, None]
# A message: the seq of its turn, and the index of its line in the turn.
MessageRef = tuple[int, int]

# The errors that park a job: an unusable reply, or a prompt that is too long.
Failed = (BadReply, PromptTooLong)


class Work:
    """One job: the record that it decides, and the drafts that it has made, in order.

    `operation` names the last LLM call that `ask` has made.
    """

    operation = ""

    def __init__(self, seq: int, view: MemoryView, budget: PromptBudget) -> None:
        self.seq = seq
        self.view = view
        self.drafts: list[Draft] = []
        self._read: dict[int, str] = {}
        self._words: dict[int, frozenset[str]] = {}
        self._budget = budget

    def every(self, kind: MemoryKind) -> list[Memory]:
        """The newest version of each memory of a kind, deleted ones too, after this job's own drafts."""
        newest = {memory.id: memory for memory in (*self.view.ended(kind), *self.view.current(kind))}
        newest |= {d.memory.id: d.memory for d in self.drafts if d.memory.kind == kind}
        return list(newest.values())

    def current(self, kind: MemoryKind) -> list[Memory]:
        """The current memories of a kind after this job's own drafts."""
        newest = {memory.id: memory for memory in self.view.current(kind)}
        newest |= {d.memory.id: d.memory for d in self.drafts if d.memory.kind == kind}
        return [memory for memory in newest.values() if not memory.deleted]

    def known_facts(self, vector: Vector, k: int) -> Generator[Effect, Any, list[Memory]]:
        """The k nearest facts; see `known`."""
        found = yield from self.known("fact", vector, k)
        return [s.memory for s in found]

    def known(self, kind: MemoryKind, vector: Vector, k: int) -> Generator[Effect, Any, list[Scored]]:
        """The k nearest memories of a kind, with this job's own drafts and without those that it deleted."""
        mine = {d.memory.id: d for d in self.drafts if d.memory.kind == kind}
        stored: list[Scored] = yield Nearest(kind, vector, k + len(mine))
        found = [s for s in stored if s.memory.id not in mine]
        found += [Scored(d.memory, cosine(vector, d.vector)) for d in mine.values() if d.vector is not None]
        found.sort(key=lambda s: (-s.score, s.memory.born_at_seq, s.memory.ordinal))
        return found[:k]

    def near_facts(self, vectors: Iterable[Vector], k: int) -> Generator[Effect, Any, list[Memory]]:
        """The k facts nearest to each of the vectors, each once, in order of creation."""
        near: dict[str, Memory] = {}
        for vector in vectors:
            found = yield from self.known_facts(vector, k)
            near |= {fact.id: fact for fact in found}
        return sorted(near.values(), key=lambda fact: (fact.born_at_seq, fact.ordinal))

    def add_sources(self, fact: Memory, turns: Iterable[int], vector: Vector) -> Memory:
        """The same fact with these turns as more sources, so that it survives the others' deletion."""
        sources = tuple(sorted({*fact.source_seqs, *turns}))
        if sources == fact.source_seqs:
            return fact
        return self._again(fact, vector, sources, shown_seqs=only_shown(fact.shown_seqs, sources)).memory

    def revise(
        self,
        memory: Memory,
        text: str,
        vector: Vector,
        sources: tuple[int, ...],
        version: str,
        **more: Any,
    ) -> Draft:
        """Add a new version of a memory."""
        return self._again(memory, vector, sources, text=text, prompt_version=version, model=None, **more)

    def _again(self, memory: Memory, vector: Vector, sources: tuple[int, ...], **changes: Any) -> Draft:
        """Add the next version of a memory, which rests on these sources."""
        again = replace(
            memory,
            version=memory.version + 1,
            made_at_seq=self.seq,
            source_seqs=sources,
            timestamp=self.latest(sources),
            **changes,
        )
        self.drafts.append(Draft(again, vector))
        return self.drafts[-1]

    def new(
        self, kind: MemoryKind, text: str, vector: Vector, sources: tuple[int, ...], version: str, **more: Any
    ) -> Draft:
        """Add a new memory."""
        born_here = {d.memory.id for d in self.drafts if d.memory.born_at_seq == self.seq}
        kin = {d.memory.id for d in self.drafts if d.memory.kind == kind}
        ordinal = len(born_here & kin)
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
            timestamp=self.latest(sources),
            prompt_version=version,
            **more,
        )
        self.drafts.append(Draft(memory, vector))
        return self.drafts[-1]

    def parts(self, items: Sequence[T], prompt_of: Callable[[Sequence[T]], Prompt]) -> list[Sequence[T]]:
        """The items split into as few prompts as possible. PromptTooLong if one is too long."""
        if not items or self.fits(prompt_of(items)):
            return [items] if items else []
        parts: list[Sequence[T]] = []
        part: list[T] = []
        for item in items:
            if part and not self.fits(prompt_of([*part, item])):
                parts.append(part)
                part = []
            part.append(item)
            if len(part) == 1:
                self.checked(prompt_of(part))
        return [*parts, part]

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

    def fits(self, prompt: Prompt) -> bool:
        return self._budget.fits(prompt)

    def fitting(self, items: Sequence[T], prompt_of: Callable[[Sequence[T]], Prompt]) -> list[T]:
        """As PromptBudget.select_fitting."""
        return self._budget.select_fitting(items, prompt_of)

    def checked(self, prompt: Prompt) -> Prompt:
        """The prompt itself. PromptTooLong."""
        if not self.fits(prompt):
            raise PromptTooLong(f"the {prompt.operation} prompt needs about {prompt.size_tokens} tokens")
        return prompt

    def by_time(self, seqs: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(seqs, key=lambda s: (time_key(self.view.turn(s).timestamp), s)))

    def latest(self, seqs: Sequence[int]) -> str | None:
        return self.view.turn(self.by_time(seqs)[-1]).timestamp

    def saying(
        self,
        text: str,
        numbers: Sequence[int],
        shown: Sequence[int],
        before: Sequence[int] = (),
        older: Memory | None = None,
    ) -> tuple[int, ...]:
        """The turns that a fact rests on: of the `shown`, those that the reply names, if they say it.

        `before`: turns that the prompt told in other words, which a reply may repeat. `older`: the fact that
        this one replaces, and cannot be older than. `turns` has read all of them before the reply came: a
        deletion in the meantime changes nothing here.
        """
        words, told = telling_words(text), named(numbers, shown, otherwise=shown)
        says = turns_that_say(words, told, self._words_of(shown))
        if older is None:
            return repeated(words, self._words_of(says), self._words_of(before)) or says
        is_older = time_key(self.latest(says)) < time_key(older.timestamp)
        return tuple(sorted(told)) if is_older else says

    def _words_of(self, seqs: Collection[int]) -> dict[int, frozenset[str]]:
        """The telling words of turns that were read, found once a job."""
        for seq in seqs:
            if seq not in self._words:
                self._words[seq] = telling_words(self._read[seq])
        return {seq: self._words[seq] for seq in seqs}

    def turns(self, seqs: Sequence[int]) -> list[ShownTurn]:
        """The turns as a prompt shows them, numbered from 1."""
        views = [self.view.turn(s) for s in seqs]
        for view in views:
            self._read.setdefault(view.seq, view.text)
        return [ShownTurn(n, v.timestamp, v.text) for n, v in enumerate(views, 1)]


def messages_of(turns: Iterable[int], view: MemoryView) -> tuple[MessageRef, ...]:
    """All messages of these turns, in order, without those of deleted ones."""
    kept = [seq for seq in turns if view.exists(seq)]
    return tuple((seq, line) for seq in kept for line in range(len(view.turn(seq).messages)))


def only_shown(shown: Iterable[int], sources: Iterable[int]) -> tuple[int, ...]:
    """The turns that were shown but are no sources, ascending: see Memory.shown_seqs."""
    return tuple(sorted(set(shown) - set(sources)))


def named(numbers: Sequence[int], shown: Sequence[T], *, otherwise: Sequence[T]) -> list[T]:
    """The shown items that a reply names, each once; `otherwise` if it names none or an invalid number."""
    if not numbers or any(not 1 <= n <= len(shown) for n in numbers):
        return list(otherwise)
    return [shown[n - 1] for n in dict.fromkeys(numbers)]


def as_shown(number: int, memory: Memory) -> ShownMemory:
    return ShownMemory(number, memory.timestamp, memory.text)


def listed(memories: Iterable[Memory]) -> list[ShownMemory]:
    """Numbered from 1."""
    return [as_shown(n, memory) for n, memory in enumerate(memories, 1)]


def parked(error: Exception, operation: str, cluster: tuple[int, ...], **more: Any) -> PolicyResult:
    """The result of a failed job: its turns leave the gates until it is replayed."""
    return PolicyResult(
        Decision.PARKED, cluster=cluster, settled=cluster, reason=str(error), operation=operation, **more
    )
