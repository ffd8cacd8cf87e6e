"""MemoryOS's mid-term memory: pages grouped into segments by topic, each with a heat (sections 3.1 and 3.2).

A segment is the summary of its pages, and their keywords in the last line (pages.py: where it is stored).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, Generic

from undertow.engine.base.model import Memory, time_key
from undertow.engine.policies.base import Draft, Effect, Embed, Vector, deletion, forgotten
from undertow.engine.policies.memory_os.pages import Key, Page, Pages, as_turns
from undertow.engine.policies.memory_os.persona import learn, learned
from undertow.engine.policies.work import Steps, as_shown
from undertow.prompts.builders import ShownMemory, prompt_version, topic_prompt
from undertow.prompts.reply_schemas import TOPIC_TEXT_CHARS, TopicReply

# Section 4.1: theta, mu in seconds, and the capacity of mid-term memory. alpha = beta = gamma = 1.
SIMILARITY, RECENCY_S, MOST_SEGMENTS = 0.6, 1e7, 200

_KEYWORDS = "Keywords: "


class Segments(Generic[Key]):
    """Mid-term memory in one job. `hot`: tau of section 3.2, above which a segment is learned from."""

    def __init__(self, pages: Pages[Key], hot: float) -> None:
        self._pages: Pages[Key] = pages
        self._work = pages.work
        self._hot = hot

    def file(self, page: Page[Key]) -> Steps:
        """Move a page into the segment that it belongs to, or into one of its own. PromptTooLong.

        A segment that becomes hot is learned from, and of too many segments the coldest ends.
        """
        said = as_turns([page])
        about: TopicReply = yield from self._work.ask(topic_prompt((), said))
        (vector,) = yield Embed((page.text,))
        segment = yield from self._segment_of(vector, about.keywords)
        if segment is not None:
            about = yield from self._work.ask(topic_prompt([as_shown(1, segment)], said))
        filed = yield from self._written(segment, about, [page], still=segment)
        done = learned(self._pages)
        if self.heat(filed, page, done) > self._hot:
            yield from learn(self._pages, self._unlearned(filed, done))
        self._evict(page)

    def remake(self, segment: Memory) -> Steps:
        """Summarise a segment again without its deleted pages."""
        pages = self._pages.existing(self._pages.keys(segment))
        if not pages:
            self._work.drafts.append(Draft(forgotten(segment, self._work.seq), None))
            return
        longest = ShownMemory(1, None, "x" * TOPIC_TEXT_CHARS)
        so_far: list[ShownMemory] = []
        for part in self._work.parts(pages, lambda some: topic_prompt([longest], as_turns(some))):
            about: TopicReply = yield from self._work.ask(topic_prompt(so_far, as_turns(part)))
            latest = self._work.latest([seq for page in part for seq in page.sources])
            so_far = [ShownMemory(1, latest, _text_of(about))]
        yield from self._written(segment, about, pages, still=None)

    def heat(self, segment: Memory, page: Page[Key], done: frozenset[Key]) -> float:
        """beta L_interaction + gamma R_recency when `page` is filed; N_visit is 0: see docs/policies.

        L_interaction is the number of pages that long-term memory has not learned from; `done`: the others.
        """
        now, last = page.timestamp, segment.timestamp
        age_s = 0.0
        if now is not None and last is not None:
            age_s = max(0.0, (time_key(now) - time_key(last)).total_seconds())
        return len(self._unlearned(segment, done)) + math.exp(-age_s / RECENCY_S)

    def _unlearned(self, segment: Memory, done: frozenset[Key]) -> list[Page[Key]]:
        return self._pages.existing(key for key in self._pages.keys(segment) if key not in done)

    def _segment_of(self, vector: Vector, keywords: Sequence[str]) -> Generator[Effect, Any, Memory | None]:
        """The segment with the highest F = cos(e_s, e_p) + Jaccard(K_s, K_p), if that exceeds theta.

        Of equal ones the nearest, then the oldest.
        """
        segments = {segment.id for segment in self._pages.segments()}
        kind = self._pages.kind
        found = yield from self._work.known(kind, vector, len(self._work.current(kind)))
        scores = [(s.score + jaccard(_keywords_of(s.memory), _cleaned(keywords)), s.memory) for s in found]
        kept = [
            (score, m)
            for score, m in scores
            if m.id in segments and all(map(self._work.view.exists, m.reach))
        ]
        score, best = max(kept, key=lambda pair: pair[0], default=(0.0, None))
        return best if score > SIMILARITY else None

    def _written(
        self, segment: Memory | None, about: TopicReply, pages: Sequence[Page[Key]], *, still: Memory | None
    ) -> Generator[Effect, Any, Memory]:
        """The segment's next version, or a new one, of these pages and of what it `still` tells."""
        text, version = _text_of(about), prompt_version("topic")
        (vector,) = yield Embed((text,))
        sources, more = self._pages.made_of(pages, pages, still)
        if segment is not None:
            return self._work.revise(segment, text, vector, sources, version, **more).memory
        more |= {"fact_kind": self._pages.segment_kind}
        return self._work.new(self._pages.kind, text, vector, sources, version, **more).memory

    def _evict(self, page: Page[Key]) -> None:
        """End the coldest segment, of equal ones the oldest, where there are more than fit."""
        segments = self._pages.segments()
        if len(segments) > MOST_SEGMENTS:
            done = learned(self._pages)
            coldest = min(segments, key=lambda segment: self.heat(segment, page, done))
            self._work.drafts.append(Draft(deletion(coldest, self._work.seq), None))


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
