"""Whether a memory tells of a piece of evidence, by its words: no LLM judges it."""

from __future__ import annotations

from functools import lru_cache

from undertow.bench.quality.datasets import Question, Sample
from undertow.engine.search.analyzer import Analyzer

# Of LoCoMo's own observations nine in ten have a sixth of the content words of the message that they are of,
# and half have a third.
LEAST_SHARE = 0.25


class Telling:
    """Of one sample: the words of each message with evidence, compared with those of memories."""

    def __init__(self, sample: Sample) -> None:
        self._terms = lru_cache(maxsize=None)(lambda text: frozenset(Analyzer().of(text)))
        self._said: dict[str, str] = {}
        for _, message, pieces in sample.messages():
            for piece in pieces:
                self._said[piece] = f"{self._said.get(piece, '')}\n{message.content}"

    def tells(self, memory: str, piece: str, question: Question) -> bool:
        """Whether the memory has the words of the gold answer that stand in the evidence.

        Where none of them does, as with dates that are worked out: a quarter of the evidence's content words.
        """
        said, told = self._terms(self._said.get(piece, "")), self._terms(memory)
        if wanted := said & self._terms(question.answer):
            return wanted <= told
        return bool(said) and len(said & told) >= LEAST_SHARE * len(said)
