"""A-Mem for one tenant as a plain program: one message after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import LLMClient
from undertow.prompts.builders import Prompt, ShownMemory, ShownTurn, annotate_prompt, connect_prompt

from .run import Oracle, OracleMemory

NEIGHBOURS = 5


class OracleAMem(Oracle):
    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm, settings)
        self._words: dict[str, str] = {}  # by id of a note: its message
        self.episodes: dict[str | None, tuple[int, ...]] = {}  # their turns, where the notes are of facts

    def take(self, seq: int, turn: Turn) -> None:
        """A note for each message; if one fails, none."""
        self._hear(seq, turn)
        self._decide_on(seq, (seq,), partial(self._note_each_message, seq))

    def _note_each_message(self, seq: int) -> None:
        for line, message in enumerate(self.turns[seq].messages):
            new = self._first("fact", "", (seq,), source_messages=((seq, line),))
            self.note(new, f"{message.speaker}: {message.content}")

    def note(self, new: OracleMemory, said: str) -> None:
        """Add the note `new` of a message, or of a fact."""
        time = new.timestamp
        text = self._text(said, self._ask(annotate_prompt(ShownTurn(1, time, said))))
        near = self._with_room(time, text, self._nearest(text, self.current("fact"), NEIGHBOURS))
        links: list[Any] = []
        changes: list[Any] = []
        if near:
            reply = self._ask(self._prompt(time, text, near))
            links, changes = reply.links, reply.evolved
        named = dict.fromkeys(links) if all(1 <= n <= len(near) for n in links) else {}
        self._words[new.id] = said
        ids = tuple(near[n - 1].id for n in named)
        self.made.append(replace(new, text=text, links=ids))
        seen = {*new.sources, *new.shown}
        for note in near:
            seen |= self._own(note)
        for number, note in enumerate(near, 1):
            mine = [change for change in changes if change.note == number][:1]
            for change in mine:
                changed = self._text(self._words[note.id], change)
                beside = [text, *(other.text for other in near if other.id != note.id)]
                if changed.split("\n")[-1] not in [each.split("\n")[-1] for each in beside]:
                    self._evolve(note, changed, seen)

    def _evolve(self, note: OracleMemory, text: str, seen: set[int]) -> None:
        if text != note.text:
            self._next(note, text, (), {*note.shown, *seen})

    def _own(self, note: OracleMemory) -> set[int]:
        """The turns of a note's message, or those of its fact's episode that it may tell of."""
        reach = {*note.sources, *note.shown}
        return reach & {
            *note.sources,
            *(() if note.source_messages else self.episodes.get(note.episode_id, reach)),
        }

    def _with_room(self, time: str | None, text: str, near: list[OracleMemory]) -> list[OracleMemory]:
        if self._fits(self._prompt(time, text, near)):
            return near
        kept: list[OracleMemory] = []
        for note in near:
            if self._fits(self._prompt(time, text, [*kept, note])):
                kept.append(note)
        return kept

    def _prompt(self, time: str | None, text: str, near: list[OracleMemory]) -> Prompt:
        """A note that changed in sight of other turns is shown as its message alone."""
        shown = [ShownMemory(n, note.timestamp, self._shown(note)) for n, note in enumerate(near, 1)]
        return connect_prompt(ShownMemory(1, time, text), shown)

    def _shown(self, note: OracleMemory) -> str:
        evolved = self._own(note) != {*note.sources, *note.shown}
        return self._words[note.id] if evolved else note.text

    @staticmethod
    def _text(said: str, about: Any) -> str:
        keywords, tags, context = (
            ", ".join(" ".join(word.split()) for word in words)
            for words in (about.keywords, about.tags, [about.context])
        )
        return f"{said}\nKeywords: {keywords}\nTags: {tags}\nContext: {context}"
