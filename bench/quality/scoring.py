"""Evidence recall and reciprocal rank, for one question and over many."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# at which numbers of turns recall is told; a search finds as many as the last
DEPTHS = (5, 10, 20)


@dataclass(frozen=True, slots=True)
class Score:
    """One question's: the share of its evidence in the best turns, by depth, and 1 / rank of the first."""

    category: str
    recall: tuple[float, ...]
    reciprocal_rank: float


def score(category: str, evidence: Sequence[str], found: Sequence[Collection[str]]) -> Score:
    """`found`: what the turns hold, best first. Evidence that no turn holds counts as missed."""
    ranks = [_rank(piece, found) for piece in evidence]
    recall = tuple(recall_at(k, evidence, found) for k in DEPTHS)
    first = min((r for r in ranks if r is not None), default=None)
    return Score(category, recall, 0.0 if first is None else 1 / first)


def recall_at(k: int, evidence: Sequence[str], found: Sequence[Collection[str]]) -> float:
    """The share of the evidence, of which there is some, among the first k found."""
    return sum(_rank(piece, found[:k]) is not None for piece in evidence) / len(evidence)


def _rank(piece: str, found: Sequence[Collection[str]]) -> int | None:
    return next((rank for rank, held in enumerate(found, 1) if piece in held), None)


def summary(scores: Iterable[Score]) -> dict[str, object]:
    """The means over all questions, and `by_category`."""
    every = list(scores)
    categories = sorted({s.category for s in every})
    return {
        **means(every),
        "by_category": {name: means([s for s in every if s.category == name]) for name in categories},
    }


def means(scores: Sequence[Score]) -> dict[str, float | int | None]:
    """`questions` and the mean of each figure; None where there is no question."""
    figures: dict[str, float | int | None] = {"questions": len(scores)}
    for n, depth in enumerate(DEPTHS):
        figures[f"evidence_recall_at_{depth}"] = _mean([s.recall[n] for s in scores])
    return figures | {"mrr": _mean([s.reciprocal_rank for s in scores])}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
