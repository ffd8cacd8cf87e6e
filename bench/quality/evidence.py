"""Evidence recall without an LLM: every sample into a real engine, every question through its search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.scoring import DEPTHS, Score, score
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.base.results import Hit


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
    engine: Engine,
    vectors: KeptVectors,
    samples: Iterable[Sample],
    on_question: Callable[[], None] = lambda: None,
) -> Iterator[Retrieved]:
    """Each scored question of each sample. The engine has nothing of them yet, and encodes by `vectors`."""
    for sample in samples:
        # a question at a time would leave the encoder's batches nearly empty
        vectors.encode([question.text for question in sample.questions if question.is_scored])
        receipts = engine.add_batch(sample.turns)
        place = {receipt.id: n for n, receipt in enumerate(receipts)}
        for question in sample.questions:
            if not question.is_scored:
                continue
            found = engine.search(sample.tenant, question.text, k_sub=max(DEPTHS), k_epi=0, k_sem=0)
            held = tuple(sample.holds[place[hit.id]] for hit in found.turns)
            yield Retrieved(question, found.turns, held)
            on_question()
