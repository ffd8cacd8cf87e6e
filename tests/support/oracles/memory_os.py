"""MemoryOS for one tenant as a plain program: one record after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import LLMClient
from undertow.prompts.builders import ShownTurn, persona_prompt, topic_prompt

from .run import Oracle, OracleMemory, exact_dot, listed

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
    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm, settings)
        self.pages: dict[Any, OraclePage] = {}  # by seq, or by id of a fact
        self.of_facts = False
        self._short: list[int] = []

    def take(self, seq: int, turn: Turn) -> None:
        """Of too many pages the oldest leaves short-term memory."""
        self._hear(seq, turn)
        time = self.turns[seq].timestamp
        self.pages[seq] = OraclePage(turn.text, time, (seq,), frozenset((seq,)))
        self._short.append(seq)
        if len(self._short) <= self.settings.short_term_pages:
            self._wait(seq)
            return
        page = self._short.pop(0)
        self._decide_on(seq, (page,), partial(self._file, page))

    def file(
        self, seq: int, before: list[OracleMemory], made: list[OracleMemory], most: int
    ) -> list[OracleMemory]:
        """What record `seq` has made, with the pages filed that are too many for short-term memory."""
        self.versions, self.made, self.seq = before, made, seq
        filed = {i for m in (*before, *made) if m.fact_kind == "segment" for i in m.links}
        short = [m.id for m in self.current("fact") if m.fact_kind == "page" and m.id not in filed]
        for page in short[: max(0, len(short) - most)]:
            self._file(page)
        return self.made

    # ---- mid-term memory

    def _segments(self) -> list[OracleMemory]:
        if not self.of_facts:
            return self.current("episode")
        return [m for m in self.current("fact") if m.fact_kind == "segment"]

    def _file(self, page: Any) -> None:
        said = self._shown([page])
        about = self._ask(topic_prompt([], said))
        segment = self._segment(page, about.keywords)
        if segment is not None:
            about = self._ask(topic_prompt(listed([segment]), said))
        words = sorted(self._words(about.keywords))
        text = f"{about.summary}\nKeywords: {', '.join(words)}"
        kinds = ("fact", "segment") if self.of_facts else ("episode", None)
        filed = self._save(kinds[0], text, [page], [page], segment, kinds[1])
        if self._heat(filed, page) > self.settings.heat_threshold:
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
        lines = [m for m in [*self.versions, *self.made] if m.kind == "fact" and m.fact_kind in LINES]
        read: set[Any] = {
            page for m in lines for page in (m.links if self.of_facts else (*m.sources, *m.shown))
        }
        return [page for page in (segment.links if self.of_facts else segment.sources) if page not in read]

    # ---- long-term memory

    def _learn(self, pages: list[Any]) -> None:
        part: list[Any] = []
        profile = listed(self._profile())
        for page in pages:
            if part and not self._fits(persona_prompt(self._shown([*part, page]), profile)):
                self._read(part)
                part = []
            part.append(page)
        self._read(part)
        for kind, most in LINES.items():
            lines = [m for m in self.current("fact") if m.fact_kind == kind]
            for line in lines[: max(0, len(lines) - most)]:
                self._end(line)

    def _profile(self) -> list[OracleMemory]:
        return [m for m in self.current("fact") if m.fact_kind == "profile"]

    def _read(self, part: list[Any]) -> None:
        free: list[Any] = [None, *self._profile()]
        reply = self._ask(persona_prompt(self._shown(part), listed(self._profile())))
        heard: list[str] = []
        for line in reply.lines:
            if line.text in heard:
                continue
            heard.append(line.text)
            right = line.turns and all(1 <= n <= len(part) for n in line.turns)
            said = [part[n - 1] for n in line.turns] if right else part
            same = [m for m in self.current("fact") if m.text == line.text and m.fact_kind in LINES]
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
        sources = {seq for page in said for seq in self.pages[page].sources}
        shown = {seq for page in part for seq in self.pages[page].reach}
        links = [*(old.links if old is not None else ()), *(part if self.of_facts else ())]
        more: dict[str, Any] = {"links": tuple(dict.fromkeys(links))}
        if old is None:
            return self._born(kind, text, sources, shown, fact_kind=fact_kind, **more)
        return self._next(old, text, sources, {*shown, *old.shown}, **more)

    def _shown(self, pages: list[Any]) -> list[ShownTurn]:
        return [ShownTurn(n, self.pages[p].time, self.pages[p].text) for n, p in enumerate(pages, 1)]
