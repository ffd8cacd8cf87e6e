"""Replies that hold what people wrote down of a conversation: LoCoMo's own observations, each of one message.

They stand in for a perfect reader, so that a gate, a policy and the packing of answers can be measured
without an LLM. Which episodes there are, and what is merged, is guessed as for an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from undertow.bench.quality.datasets import Sample
from undertow.engine.encoders.token_count import TokenCount, by_bytes
from undertow.engine.estimate.assumptions import EXPECTED
from undertow.engine.estimate.guessed_replies import GuessedReplies, Shown
from undertow.engine.estimate.stand_ins import GuessingLLM
from undertow.prompts.reply_schemas import (
    CANDIDATES,
    CONTEXT_CHARS,
    EPISODE_CHARS,
    FACT_CHARS,
    PERSONA_LINES,
    REFINED_FACTS,
    STATED_NOTES,
    SUMMARY_CHARS,
)

SALIENT_FACTS = 16
EPISODE_TEXT_CHARS = 3_000

Fields = dict[str, Any]


def gold_llm(samples: Sequence[Sample]) -> GuessingLLM:
    """An LLM that reads these conversations perfectly; it counts tokens as bytes / 4, as of a warm cache."""
    gold = {line: facts for sample in samples for line, facts in sample.observed().items()}
    return GuessingLLM(GoldReplies(gold), TokenCount("bytes / 4", by_bytes), warm=True)


class GoldReplies(GuessedReplies):
    """Of each message that a prompt shows the observations of it, and nothing of others."""

    def __init__(self, gold: Mapping[str, Sequence[str]]) -> None:
        """`gold`: by a message's line, what was observed of it."""
        super().__init__(EXPECTED)
        self._gold = gold

    def _of(self, text: str) -> list[str]:
        found = [fact[:FACT_CHARS] for line in text.split("\n") for fact in self._gold.get(line, ())]
        return list(dict.fromkeys(found))

    def _numbered(self, texts: Sequence[str], most: int) -> list[tuple[int, str]]:
        """The observations of all texts, each with the number of the first text that it is of."""
        found: dict[str, int] = {}
        for number, text in enumerate(texts, 1):
            for fact in self._of(text):
                found.setdefault(fact, number)
        return [(number, fact) for fact, number in found.items()][:most]

    def _episode(self, shown: Shown) -> Fields:
        """One episode of all observations, which rests on the turns that have some."""
        found = self._numbered(shown["Turns"], len(shown["Turns"]) * CANDIDATES)
        if not found:
            return {"episodes": []}
        text = " ".join(fact for _, fact in found)[:EPISODE_TEXT_CHARS]
        return {"episodes": [{"text": text, "turns": sorted({number for number, _ in found})}]}

    def _merge(self, shown: Shown) -> Fields:
        """Granted where there is something to add."""
        (old,), (turn,) = shown["Stored episode"], shown["New turn"]
        added = " ".join(fact for fact in self._of(turn) if fact not in old)
        if not added or len(old) + len(added) >= EPISODE_CHARS:
            return {"same_story": False, "narrative": ""}
        return {"same_story": True, "narrative": f"{old} {added}"}

    def _refine(self, shown: Shown) -> Fields:
        return self._unsaid(shown, REFINED_FACTS)

    def _unsaid(self, shown: Shown, most: int) -> Fields:
        known = set(shown.get("Stored facts", ()))
        found = self._numbered(shown["Turns"], most + len(known))
        fresh = [(number, fact) for number, fact in found if fact not in known][:most]
        like = {"kind": "user_event", "replaces": None}
        return {"facts": [{"text": fact, "turns": [number], **like} for number, fact in fresh]}

    _direct = _refine

    def _salient(self, shown: Shown) -> Fields:
        return self._unsaid(shown, SALIENT_FACTS)

    def _extract(self, shown: Shown) -> Fields:
        return {"facts": [{"text": fact} for _, fact in self._numbered(shown["New turn"], CANDIDATES)]}

    def _reconcile(self, shown: Shown) -> Fields:
        """All are added."""
        return {"decisions": []}

    def _annotate(self, shown: Shown) -> Fields:
        """What was observed is the context."""
        told = " ".join(fact for message in shown["Message"] for fact in self._of(message))
        return {"keywords": [], "tags": [], "context": told[:CONTEXT_CHARS] or "nothing lasting"}

    def _connect(self, shown: Shown) -> Fields:
        """All notes stay as they are."""
        return {"links": [], "evolved": []}

    def _topic(self, shown: Shown) -> Fields:
        """The observations, after those that are stored."""
        known = [text.rpartition("\nKeywords: ")[0] for text in shown.get("Stored summary", ())]
        told = " ".join([*known, *(fact for turn in shown["Turns"] for fact in self._of(turn))])
        return {**super()._topic(shown), "summary": told[:SUMMARY_CHARS].strip() or "small talk"}

    def _persona(self, shown: Shown) -> Fields:
        found = self._numbered(shown["Turns"], PERSONA_LINES) or [(1, "They talk.")]
        like = {"kind": "knowledge", "replaces": None}
        return {"lines": [{"text": fact[:300], "turns": [number], **like} for number, fact in found]}

    def _distil(self, shown: Shown) -> Fields:
        found = self._numbered(shown["Messages"], CANDIDATES)
        return {"facts": [{"messages": [number], "text": fact} for number, fact in found]}

    _distil_direct = _distil

    def _notes(self, shown: Shown) -> Fields:
        found = self._numbered(shown["Turns"], STATED_NOTES)
        return {"notes": [{"text": fact, "kind": "fact", "turns": [number]} for number, fact in found]}

    def _traits(self, shown: Shown) -> Fields:
        return {"notes": []}

    def _align(self, shown: Shown) -> Fields:
        return {"changes": []}
