"""MemoryOS for one tenant as a plain program: one record after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.prompts.builders import ShownMemory, ShownTurn, persona_prompt, topic_prompt

from .run import Oracle, OracleDecision, OracleMemory, exact_dot

THETA, MU, SEGMENTS = 0.6, 10_000_000, 200
LINES = {"profile": 20, "knowledge": 100, "agent": 100}


@dataclass(frozen=True)
class OraclePage:
    """A turn, or a fact of these turns that may tell of others too."""

    text: str
    time: str | None
    sources: tuple[int, ...]
    reach: frozenset[int]


class OracleMemoryOS(Oracle):
    """Takes the records of one tenant's log in order; `decisions`, `versions`, `prompts` tell what came."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm)
        self._settings = settings
        self.pages: dict[Any, OraclePage] = {}  # by seq, or by id of a fact
        self.of_facts = False
        self.times: dict[int, str | None] = {}
        self._short: list[int] = []
        self._room = settings.context_tokens - settings.reply_tokens
        # of the record at hand
        self._seq = 0
        self._made: list[OracleMemory] = []

    def take(self, seq: int, turn: Turn) -> None:
        """Of too many pages the oldest leaves short-term memory."""
        time = self.times[seq] = self._dated(turn).timestamp
        self.pages[seq] = OraclePage(turn.text, time, (seq,), frozenset((seq,)))
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

    def file(
        self, seq: int, before: list[OracleMemory], made: list[OracleMemory], most: int
    ) -> list[OracleMemory]:
        """What record `seq` has made, with the pages filed that are too many for short-term memory."""
        self.versions, self._made, self._seq = before, made, seq
        filed = {i for m in (*before, *made) if m.fact_kind == "segment" for i in m.links}
        short = [m.id for m in self._current("fact") if m.fact_kind == "page" and m.id not in filed]
        for page in short[: max(0, len(short) - most)]:
            self._file(page)
        return self._made

    def _current(self, kind: str) -> list[OracleMemory]:
        newest = {m.id: m for m in [*self.versions, *self._made] if m.kind == kind}
        return sorted((m for m in newest.values() if m.text), key=lambda m: (m.born_at_seq, m.ordinal))

    # ---- mid-term memory

    def _segments(self) -> list[OracleMemory]:
        if not self.of_facts:
            return self._current("episode")
        return [m for m in self._current("fact") if m.fact_kind == "segment"]

    def _file(self, page: Any) -> None:
        said = self._shown([page])
        about = self._ask(topic_prompt([], said))
        segment = self._segment(page, about.keywords)
        if segment is not None:
            about = self._ask(topic_prompt([ShownMemory(1, segment.timestamp, segment.text)], said))
        words = sorted(self._words(about.keywords))
        text = f"{about.summary}\nKeywords: {', '.join(words)}"
        kinds = ("fact", "segment") if self.of_facts else ("episode", None)
        filed = self._save(kinds[0], text, [page], [page], segment, kinds[1])
        if self._heat(filed, page) > self._settings.heat_threshold:
            self._learn(self._unread(filed))
        segments = self._segments()
        if len(segments) > SEGMENTS:
            self._end(min(segments, key=lambda m: self._heat(m, page)))

    def _segment(self, page: Any, keywords: list[str]) -> OracleMemory | None:
        vector, mine = self._embed(self.pages[page].text), self._words(keywords)
        best: tuple[float, float, OracleMemory] | None = None
        for segment in self._segments():
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

    def _heat(self, segment: OracleMemory, page: Any) -> float:
        now, last = self.pages[page].time, segment.timestamp
        seconds = 0.0 if not now or not last else (time_key(now) - time_key(last)).total_seconds()
        return len(self._unread(segment)) + math.exp(-max(seconds, 0.0) / MU)

    def _unread(self, segment: OracleMemory) -> list[Any]:
        """The pages of a segment that no line was written of, whatever became of it."""
        lines = [m for m in [*self.versions, *self._made] if m.kind == "fact" and m.fact_kind in LINES]
        read: set[Any] = {
            page for m in lines for page in (m.links if self.of_facts else (*m.sources, *m.shown))
        }
        return [page for page in (segment.links if self.of_facts else segment.sources) if page not in read]

    # ---- long-term memory

    def _learn(self, pages: list[Any]) -> None:
        part: list[Any] = []
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

    def _read(self, part: list[Any]) -> None:
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
            same = [m for m in self._current("fact") if m.text == line.text and m.fact_kind in LINES]
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
        said: list[Any],
        part: list[Any],
        old: OracleMemory | None,
        fact_kind: str | None,
    ) -> OracleMemory:
        born = [m for m in self._made if m.kind == kind and m.born_at_seq == self._seq]
        ordinal = len({m.id for m in born})
        identity = memory_id(self.tenant, 1, self._seq, kind, ordinal)
        new = OracleMemory(
            identity, kind, 1, text, (), self._seq, self._seq, ordinal, None, fact_kind=fact_kind
        )
        sources = {seq for page in said for seq in self.pages[page].sources}
        shown = {seq for page in part for seq in self.pages[page].reach}
        links = part if self.of_facts else []
        if old is not None:
            new = replace(old, version=old.version + 1, text=text, made_at_seq=self._seq)
            sources, shown, links = sources | {*old.sources}, shown | {*old.shown}, [*old.links, *links]
        every = tuple(sorted(sources))
        last = max(every, key=lambda s: (time_key(self.times[s]), s))
        new = replace(
            new, sources=every, shown=tuple(sorted(shown - sources)), links=tuple(dict.fromkeys(links))
        )
        self._made.append(replace(new, timestamp=self.times[last]))
        return self._made[-1]

    def _end(self, memory: OracleMemory) -> None:
        self._made.append(replace(memory, version=memory.version + 1, made_at_seq=self._seq, text=""))

    def _shown(self, pages: list[Any]) -> list[ShownTurn]:
        return [ShownTurn(n, self.pages[p].time, self.pages[p].text) for n, p in enumerate(pages, 1)]
