"""MemoryOS's mid-term memory: pages grouped into segments by topic, each with a heat (sections 3.1 and 3.2).

A page is a turn, and a segment is an episode: the summary of its pages, and their keywords in the last line.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from undertow.engine.base.model import Memory, time_key
from undertow.engine.policies.base import (
    Complete,
    Draft,
    Effect,
    Embed,
    MemoryView,
    PromptBudget,
    Vector,
    deletion,
    forgotten,
)
from undertow.engine.policies.memory_os.persona import learn, learned
from undertow.engine.policies.work import Steps, Work, as_shown
from undertow.prompts.builders import ShownMemory, prompt_version, topic_prompt
from undertow.prompts.reply_schemas import TOPIC_TEXT_CHARS, TopicReply

# Section 4.1: theta, mu in seconds, and the capacity of mid-term memory. alpha = beta = gamma = 1.
SIMILARITY, RECENCY_S, MOST_SEGMENTS = 0.6, 1e7, 200

_KEYWORDS = "Keywords: "


class SegmentJob(Work):
    """The steps of one job. `hot`: tau of section 3.2, the heat above which a segment is learned from."""

    def __init__(self, seq: int, view: MemoryView, budget: PromptBudget, hot: float) -> None:
        super().__init__(seq, view, budget)
        self._hot = hot

    def file(self, page: int) -> Steps:
        """Move a page into the segment that it belongs to, or into one of its own. PromptTooLong.

        A segment that becomes hot is learned from, and of too many segments the coldest ends.
        """
        said = self.view.turn(page).text
        about: TopicReply = yield Complete(self.checked(topic_prompt((), self.turns((page,)))))
        (vector,) = yield Embed((said,))
        segment = yield from self._segment_of(vector, about.keywords)
        pages: tuple[int, ...] = (page,)
        if segment is not None:
            prompt = topic_prompt([as_shown(1, segment)], self.turns(pages))
            about = yield Complete(self.checked(prompt))
            pages = tuple(sorted({*segment.source_seqs, page}))
        filed = yield from self._written(segment, about, pages)
        if self.heat(filed, page) > self._hot:
            yield from learn(self, self._unlearned(filed))
        self._evict(page)

    def remake(self, segment: Memory) -> Steps:
        """Summarise a segment again without its deleted pages."""
        pages = tuple(s for s in segment.source_seqs if self.view.exists(s))
        if not pages:
            self.drafts.append(Draft(forgotten(segment, self.seq), None))
            return
        longest = ShownMemory(1, None, "x" * TOPIC_TEXT_CHARS)
        so_far: list[ShownMemory] = []
        for part in self.parts(pages, lambda seqs: topic_prompt([longest], self.turns(seqs))):
            about: TopicReply = yield Complete(self.checked(topic_prompt(so_far, self.turns(part))))
            so_far = [ShownMemory(1, self.latest(part), _text_of(about))]
        yield from self._written(segment, about, pages)

    def heat(self, segment: Memory, page: int) -> float:
        """beta L_interaction + gamma R_recency when `page` is filed; N_visit is 0: see docs/policies.

        L_interaction is the number of pages that long-term memory has not learned from.
        """
        now, last = self.view.turn(page).timestamp, segment.timestamp
        age_s = 0.0
        if now is not None and last is not None:
            age_s = max(0.0, (time_key(now) - time_key(last)).total_seconds())
        return len(self._unlearned(segment)) + math.exp(-age_s / RECENCY_S)

    def _unlearned(self, segment: Memory) -> list[int]:
        done = learned(self)
        return [s for s in segment.source_seqs if s not in done and self.view.exists(s)]

    def _segment_of(self, vector: Vector, keywords: Sequence[str]) -> Generator[Effect, Any, Memory | None]:
        """The segment with the highest F = cos(e_s, e_p) + Jaccard(K_s, K_p), if that exceeds theta.

        Of equal ones the nearest, then the oldest.
        """
        found = yield from self.known("episode", vector, MOST_SEGMENTS)
        scores = [(s.score + jaccard(_keywords_of(s.memory), _cleaned(keywords)), s.memory) for s in found]
        kept = [(score, m) for score, m in scores if all(map(self.view.exists, m.source_seqs))]
        score, best = max(kept, key=lambda pair: pair[0], default=(0.0, None))
        return best if score > SIMILARITY else None

    def _written(
        self, segment: Memory | None, about: TopicReply, pages: tuple[int, ...]
    ) -> Generator[Effect, Any, Memory]:
        text, version = _text_of(about), prompt_version("topic")
        (vector,) = yield Embed((text,))
        if segment is None:
            return self.new("episode", text, vector, pages, version).memory
        return self.revise(segment, text, vector, pages, version).memory

    def _evict(self, page: int) -> None:
        """End the coldest segment, of equal ones the oldest, where there are more than fit."""
        segments = self.current("episode")
        if len(segments) > MOST_SEGMENTS:
            coldest = min(segments, key=lambda segment: self.heat(segment, page))
            self.drafts.append(Draft(deletion(coldest, self.seq), None))


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """The share of common words; 0 without any."""
    return len(a & b) / len(a | b) if a and b else 0.0


def _keywords_of(segment: Memory) -> frozenset[str]:
    """K of a segment; none where a user has reworded it."""
    _, found, words = segment.text.rpartition(f"\n{_KEYWORDS}")
    return _cleaned(words.split(", ")) if found else frozenset()


def _cleaned(keywords: Sequence[str]) -> frozenset[str]:
    cleaned = (" ".join(word.replace(",", " ").split()).casefold() for word in keywords)
    return frozenset(filter(None, cleaned))


def _text_of(about: TopicReply) -> str:
    return f"{about.summary}\n{_KEYWORDS}{', '.join(sorted(_cleaned(about.keywords)))}"
