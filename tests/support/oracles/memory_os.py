"""MemoryOS for one tenant as a plain program: one record after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.prompts.builders import ShownMemory, ShownTurn, persona_prompt, topic_prompt

from .run import Oracle, OracleDecision, OracleMemory, exact_dot

THETA, MU, SEGMENTS = 0.6, 10_000_000, 200
LINES = {"profile": 20, "knowledge": 100, "agent": 100}


class OracleMemoryOS(Oracle):
    """Takes the records of one tenant's log in order; `decisions`, `versions`, `prompts` tell what came."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm)
        self._settings = settings
        self._turns: dict[int, Turn] = {}
        self._short: list[int] = []
        self._room = settings.context_tokens - settings.reply_tokens
        # of the record at hand
        self._seq = 0
        self._made: list[OracleMemory] = []

    def take(self, seq: int, turn: Turn) -> None:
        """Of too many pages the oldest leaves short-term memory."""
        self._turns[seq] = self._dated(turn)
        self._short.append(seq)
        if len(self._short) <= self._settings.short_term_pages:
            self._wait(seq)
            return
        page = self._short.pop(0)
        self._seq, self._made = seq, []
        what = "fired"
        try:
            self._file(page)
            self.versions += self._made
        except BadReply:
            what = "parked"
        self._made = []
        self.decisions.append(OracleDecision(seq, what, False, None, None, (page,), (page,)))

    def _current(self, kind: str) -> list[OracleMemory]:
        newest = {m.id: m for m in [*self.versions, *self._made] if m.kind == kind}
        return sorted((m for m in newest.values() if m.text), key=lambda m: (m.born_at_seq, m.ordinal))

    # ---- mid-term memory

    def _file(self, page: int) -> None:
        said = self._shown([page])
        about = self._ask(topic_prompt([], said))
        segment = self._segment(page, about.keywords)
        pages = [page]
        if segment is not None:
            about = self._ask(topic_prompt([ShownMemory(1, segment.timestamp, segment.text)], said))
            pages = sorted({*segment.sources, page})
        words = sorted(self._words(about.keywords))
        text = f"{about.summary}\nKeywords: {', '.join(words)}"
        filed = self._save("episode", text, pages, [], segment, None)
        if self._heat(filed, page) > self._settings.heat_threshold:
            self._learn(self._unread(filed))
        segments = self._current("episode")
        if len(segments) > SEGMENTS:
            self._end(min(segments, key=lambda m: self._heat(m, page)))

    def _segment(self, page: int, keywords: list[str]) -> OracleMemory | None:
        vector, mine = self._embed(self._turns[page].text), self._words(keywords)
        best: tuple[float, float, OracleMemory] | None = None
        for segment in self._current("episode"):
            lines = segment.text.split("\nKeywords: ")
            theirs = self._words(lines[-1].split(", "))
            shared = len(mine & theirs) / len(mine | theirs) if mine and theirs else 0.0
            cosine = exact_dot(vector, self._embed(segment.text))
            if best is None or (cosine + shared, cosine) > best[:2]:
                best = (cosine + shared, cosine, segment)
        return best[2] if best is not None and best[0] > THETA else None

    @staticmethod
    def _words(keywords: list[str]) -> set[str]:
        return {" ".join(word.replace(",", " ").split()).casefold() for word in keywords} - {""}

    def _heat(self, segment: OracleMemory, page: int) -> float:
        now, last = self._turns[page].timestamp, segment.timestamp
        seconds = 0.0 if not now or not last else (time_key(now) - time_key(last)).total_seconds()
        return len(self._unread(segment)) + math.exp(-max(seconds, 0.0) / MU)

    def _unread(self, segment: OracleMemory) -> list[int]:
        """The pages of a segment that no line was written of, whatever became of it."""
        lines = [m for m in [*self.versions, *self._made] if m.kind == "fact"]
        read = {seq for line in lines for seq in (*line.sources, *line.shown)}
        return [seq for seq in segment.sources if seq not in read]

    # ---- long-term memory

    def _learn(self, pages: list[int]) -> None:
        part: list[int] = []
        profile = self._profile()
        for page in pages:
            if part and persona_prompt(self._shown([*part, page]), profile).size_tokens > self._room:
                self._read(part)
                part = []
            part.append(page)
        self._read(part)
        for kind, most in LINES.items():
            lines = [m for m in self._current("fact") if m.fact_kind == kind]
            for line in lines[: max(0, len(lines) - most)]:
                self._end(line)

    def _profile(self) -> list[ShownMemory]:
        lines = [m for m in self._current("fact") if m.fact_kind == "profile"]
        return [ShownMemory(n, line.timestamp, line.text) for n, line in enumerate(lines, 1)]

    def _read(self, part: list[int]) -> None:
        lines = [m for m in self._current("fact") if m.fact_kind == "profile"]
        free: list[Any] = [None, *lines]
        reply = self._ask(persona_prompt(self._shown(part), self._profile()))
        heard: list[str] = []
        for line in reply.lines:
            if line.text in heard:
                continue
            heard.append(line.text)
            right = line.turns and all(1 <= n <= len(part) for n in line.turns)
            said = [part[n - 1] for n in line.turns] if right else part
            same = [m for m in self._current("fact") if m.text == line.text]
            old = same[-1] if same else None
            if old is None and line.kind == "profile" and 0 < (line.replaces or 0) < len(free):
                old = free[line.replaces]
            free = [None if old is not None and m is not None and m.id == old.id else m for m in free]
            self._save("fact", line.text, said, part, old, line.kind)

    # ---- versions

    def _save(
        self,
        kind: str,
        text: str,
        sources: list[int],
        part: list[int],
        old: OracleMemory | None,
        fact_kind: str | None,
    ) -> OracleMemory:
        born = [m for m in self._made if m.kind == kind and m.born_at_seq == self._seq]
        ordinal = len({m.id for m in born})
        identity = memory_id(self.tenant, 1, self._seq, kind, ordinal)
        new = OracleMemory(
            identity, kind, 1, text, (), self._seq, self._seq, ordinal, None, fact_kind=fact_kind
        )
        shown = set(part)
        if old is not None:
            new = replace(old, version=old.version + 1, text=text, made_at_seq=self._seq)
            sources, shown = [*sources, *old.sources], {*shown, *old.shown}
        every = tuple(sorted(set(sources)))
        last = max(every, key=lambda s: (time_key(self._turns[s].timestamp), s))
        new = replace(new, sources=every, shown=tuple(sorted(shown - {*every})))
        self._made.append(replace(new, timestamp=self._turns[last].timestamp))
        return self._made[-1]

    def _end(self, memory: OracleMemory) -> None:
        self._made.append(replace(memory, version=memory.version + 1, made_at_seq=self._seq, text=""))

    def _shown(self, seqs: list[int]) -> list[ShownTurn]:
        return [ShownTurn(n, self._turns[s].timestamp, self._turns[s].text) for n, s in enumerate(seqs, 1)]
