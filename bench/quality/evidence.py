"""Evidence recall without an LLM: every sample into a real engine, every question through its search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.scoring import DEPTHS, Score, score
from undertow.engine.engine import Engine
from undertow.engine.model import UndertowError
from undertow.engine.retrieval import Hit


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a search gave for one question, best first, with what each turn holds."""

    question: Question
    hits: tuple[Hit, ...]
    held: tuple[tuple[str, ...], ...]

    @property
    def score(self) -> Score:
        return score(self.question.category, self.question.evidence, self.held)

    def line(self) -> dict[str, Any]:
        """All that is needed to audit the score, as plain data."""
        asked, found = self.question, self.score
        return {
            "id": asked.id,
            "category": asked.category,
            "question": asked.text,
            "evidence": asked.evidence,
            **{f"evidence_recall_at_{k}": r for k, r in zip(DEPTHS, found.recall, strict=True)},
            "reciprocal_rank": found.reciprocal_rank,
            "retrieved": [
                {"holds": held, "score": hit.score, "timestamp": hit.timestamp, "memory": hit.memory}
                for hit, held in zip(self.hits, self.held, strict=True)
            ],
        }


def retrieve(
    engine: Engine, samples: Iterable[Sample], on_question: Callable[[], None] = lambda: None
) -> Iterator[Retrieved]:
    """Each scored question of each sample. What the engine's store has of a sample is not stored again."""
    for sample in samples:
        engine.add_batch(sample.turns)
        place = _places(engine, sample)
        for question in sample.questions:
            if not question.is_scored:
                continue
            found = engine.search(sample.tenant, question.text, k_sub=max(DEPTHS), k_epi=0, k_sem=0)
            if any(hit.id not in place for hit in found.turns):
                raise UndertowError(f"the store has other turns of {sample.tenant!r}. Give one of its own.")
            held = tuple(sample.holds[place[hit.id]] for hit in found.turns)
            yield Retrieved(question, found.turns, held)
            on_question()


def _places(engine: Engine, sample: Sample) -> dict[str, int]:
    """Which of the sample's turns each stored turn is, by its id."""
    stored = engine.turns_by_key(sample.tenant, [turn.dedupe_key for turn in sample.turns])
    return {stored[turn.dedupe_key]["id"]: n for n, turn in enumerate(sample.turns)}
