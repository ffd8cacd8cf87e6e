"""Evidence recall without an LLM: how much of each question's evidence the engine's search finds.

It also measures whether the best score tells the questions that the conversation answers from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.json_lines import write_json
from undertow.bench.quality.run.summary import SUMMARY
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.base.results import Hit

# recall is reported at these numbers of turns; a search returns as many turns as the last
DEPTHS = (5, 10, 20)
EVIDENCE = "evidence.jsonl"


Score = dict[str, float]
_RECALL, _RANK = "evidence_recall_at_{}", "reciprocal_rank"


def score(evidence: Sequence[str], found: Sequence[Collection[str]]) -> Score:
    """Recall at each of `DEPTHS`, and 1 / rank of the first turn with evidence (0: none).

    `found`: the evidence ids in each turn, best turn first. Evidence in no turn counts as missed.
    """
    ranks = (rank for rank, held in enumerate(found, 1) if set(evidence) & set(held))
    recalls = {_RECALL.format(k): recall_at(k, evidence, found) for k in DEPTHS}
    return {**recalls, _RANK: 1 / next(ranks, math.inf)}


def recall_at(k: int, evidence: Sequence[str], found: Sequence[Collection[str]]) -> float:
    """The share of the evidence, which is not empty, in the first k turns."""
    return sum(any(piece in held for held in found[:k]) for piece in evidence) / len(evidence)


def summary(scores: Sequence[tuple[str, Score]]) -> dict[str, object]:
    """The means over all questions, and `by_category`. `scores`: of each question its category and score."""
    by_category: dict[str, list[Score]] = {}
    for category, one in sorted(scores, key=itemgetter(0)):
        by_category.setdefault(category, []).append(one)
    every = [one for _, one in scores]
    return {**_means(every), "by_category": {name: _means(of) for name, of in by_category.items()}}


def auroc(answered: Sequence[float], unanswered: Sequence[float]) -> float | None:
    """The chance that a question with an answer has the higher score, ties half; None if a side is empty."""
    above = np.subtract.outer(answered, unanswered)
    return round(float(((above > 0) + 0.5 * (above == 0)).mean()), 4) if above.size else None


def _means(scores: Sequence[Score]) -> dict[str, float | int | None]:
    """`questions` and the mean of each figure; None without questions."""
    figures = {name: name for name in map(_RECALL.format, DEPTHS)} | {"mrr": _RANK}
    means = {
        name: round(fmean(score[figure] for score in scores), 4) if scores else None
        for name, figure in figures.items()
    }
    return {"questions": len(scores), **means}


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The turns found for one question, best first, and the evidence ids in each."""

    question: Question
    hits: tuple[Hit, ...]
    held: tuple[tuple[str, ...], ...]

    @property
    def score(self) -> Score:
        return score(self.question.evidence, self.held)

    def line(self) -> dict[str, Any]:
        """All data needed to audit the score, ready for JSON."""
        asked = self.question
        return {
            "id": asked.id,
            "category": asked.category,
            "question": asked.text,
            "evidence": asked.evidence,
            **self.score,
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
    """Search for each scored question and each without an answer, and rerank if the engine is set to.

    The engine is empty at first and encodes with `vectors`.
    """
    k = max(DEPTHS)
    depth = k if engine.settings.rerank == "off" else max(k, engine.settings.rerank_candidates)
    for sample in samples:
        asked = [question for question in sample.questions if question.is_searched]
        vectors.encode_queries([question.text for question in asked])  # one by one would make small batches
        place = {receipt.id: n for n, receipt in enumerate(engine.add_batch(sample.turns))}
        for question in asked:
            found = engine.search(sample.tenant, question.text, k_sub=depth, k_epi=0, k_sem=0)
            hits = engine.reranked(question.text, found).turns[:k]
            yield Retrieved(question, hits, tuple(sample.holds[place[hit.id]] for hit in hits))
            on_question()


def write_evidence(retrieved: Iterable[Retrieved], folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Write one line a scored question and the summary, which begins with `about`; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # an earlier run's summary must not stand beside new lines
    scores = []
    best_with_answer, best_without = [], []
    with (folder / EVIDENCE).open("wb") as lines:
        for one in retrieved:
            best = one.hits[0].score if one.hits else -1.0
            if one.question.has_no_answer:
                best_without.append(best)
            else:
                best_with_answer.append(best)
                lines.write(orjson.dumps(one.line(), option=orjson.OPT_APPEND_NEWLINE))
                scores.append((one.question.category, one.score))
    told = {**about, **summary(scores)}
    area = auroc(best_with_answer, best_without)
    told["without_answer"] = {"questions": len(best_without), "auroc_of_best_score": area}
    write_json(folder / SUMMARY, told)
    return told
