"""A-Mem's notes: construction, link generation and evolution (sections 3.1 to 3.3).

A note is stored as a fact of one message. Its text is the message word for word, its keywords, its tags and
its context; the whole text is embedded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Complete, Effect, Embed, MemoryView, PromptBudget, TurnView, Vector
from undertow.engine.policies.work import MessageRef, Steps, Work, messages_of, named, only_shown
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    annotate_prompt,
    connect_prompt,
    prompt_version,
)
from undertow.prompts.reply_schemas import AnnotateReply, ConnectReply

# k of equation 5: the authors' code shows five neighbours. The answer's ten are in the policy's tiers.
NEIGHBOURS = 5


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A stored note beside a new one. `reach`: the turns whose words `shown` may contain.

    `said`: its message word for word; None: a user's words or an import without a message, left as they are.
    """

    note: Memory
    said: str | None
    shown: str
    reach: frozenset[int]


class NoteJob(Work):
    """The steps of one job. `operation` names the last LLM call."""

    operation = "annotate"

    def __init__(self, seq: int, view: MemoryView, budget: PromptBudget) -> None:
        super().__init__(seq, view, budget)
        # As first read: a turn deleted meanwhile is forgotten by its own record.
        self._turns: dict[int, TurnView] = {}

    def write(self, message: MessageRef) -> Steps:
        """The note of one message, its links, and what its neighbours become. PromptTooLong."""
        text, version = yield from self._annotated(message)
        (vector,) = yield Embed((text,))
        near = yield from self._neighbours(text, message, vector)
        reply = ConnectReply(links=[], evolved=[])
        if near:
            self.operation = "connect"
            reply = yield Complete(self._connecting(text, message, near))
        links = tuple(n.note.id for n in named(reply.links, near, otherwise=()))
        sources = message[:1]
        self.new("fact", text, vector, sources, version, source_messages=(message,), links=links)
        yield from self._evolve(message, near, reply)

    def rewrite(self, note: Memory, gone: frozenset[str]) -> Steps:
        """Construct a note again from its message alone, without links to the notes that are `gone`."""
        text, version = yield from self._annotated(note.source_messages[0])
        (vector,) = yield Embed((text,))
        links = tuple(i for i in note.links if i not in gone)
        self.revise(note, text, vector, note.source_seqs, version, links=links, shown_seqs=())

    def said(self, note: Memory) -> str | None:
        """A note's message word for word; None: it names none that there is."""
        seq, line = note.source_messages[0] if note.source_messages else (-1, 0)
        if seq not in self._turns and not self.view.exists(seq):
            return None
        messages = self._turn(seq).messages
        return messages[line] if line < len(messages) else None

    def messages(self, turns: Sequence[int]) -> tuple[MessageRef, ...]:
        """The messages of these turns, which are read now."""
        found = messages_of(turns, self.view)
        for seq, _ in found:
            self._turn(seq)
        return found

    def _turn(self, seq: int) -> TurnView:
        if seq not in self._turns:
            self._turns[seq] = self.view.turn(seq)
        return self._turns[seq]

    def _annotated(self, message: MessageRef) -> Generator[Effect, Any, tuple[str, str]]:
        """The text of a message's note with K, G and X of equation 2, and the prompt's version."""
        seq, line = message
        turn = self._turn(seq)
        said = turn.messages[line]
        self.operation = "annotate"
        prompt = self.checked(annotate_prompt(ShownTurn(1, turn.timestamp, said)))
        reply: AnnotateReply = yield Complete(prompt)
        return note_text(said, reply), prompt.version

    def _neighbours(
        self, text: str, message: MessageRef, vector: Vector
    ) -> Generator[Effect, Any, list[Neighbour]]:
        """The nearest notes (equations 4 and 5), without those whose turns were deleted since.

        Notes that do not fit into the prompt beside the new one are left out.
        """
        found = yield from self.known("fact", vector, NEIGHBOURS)
        near = [self._neighbour(s.memory) for s in found if all(map(self.view.exists, s.memory.reach))]
        return self.fitting(near, lambda some: self._connecting(text, message, some))

    def _neighbour(self, note: Memory) -> Neighbour:
        """A note that evolved is shown as its message alone: its context may hold words of other turns.

        Shown whole, each note would in time rest on the whole log, and a deletion would reach all notes.
        """
        said = self.said(note) if note.prompt_version is not None else None
        if said is not None and note.shown_seqs:
            return Neighbour(note, said, said, frozenset(note.source_seqs))
        return Neighbour(note, said, note.text, note.reach)

    def _connecting(self, text: str, message: MessageRef, near: Sequence[Neighbour]) -> Prompt:
        new = ShownMemory(1, self.latest(message[:1]), text)
        shown = [ShownMemory(n, one.note.timestamp, one.shown) for n, one in enumerate(near, 1)]
        return connect_prompt(new, shown)

    def _evolve(self, message: MessageRef, near: Sequence[Neighbour], reply: ConnectReply) -> Steps:
        """New keywords, tags and contexts of neighbours (equation 7); of two for a note the first counts."""
        first = {change.note: change for change in reversed(reply.evolved)}
        texts = {
            one.note.id: note_text(one.said, first[number])
            for number, one in enumerate(near, 1)
            if number in first and one.said is not None
        }
        seen = frozenset(message[:1]).union(*(one.reach for one in near))
        changed = [one.note for one in near if texts.get(one.note.id, one.note.text) != one.note.text]
        if not changed:
            return
        vectors = yield Embed(tuple(texts[note.id] for note in changed))
        for note, vector in zip(changed, vectors, strict=True):
            # its history rests on what it evolved beside before
            beside = only_shown({*note.shown_seqs, *seen}, note.source_seqs)
            version = prompt_version("connect")
            self.revise(note, texts[note.id], vector, note.source_seqs, version, shown_seqs=beside)


def note_text(said: str, about: AnnotateReply) -> str:
    """A note as it is stored and embedded (equation 3): c, then K, G and X on a line each."""
    keywords, tags = (", ".join(map(_one_line, words)) for words in (about.keywords, about.tags))
    return "\n".join([said, f"Keywords: {keywords}", f"Tags: {tags}", f"Context: {_one_line(about.context)}"])


def _one_line(text: str) -> str:
    return " ".join(text.split())
