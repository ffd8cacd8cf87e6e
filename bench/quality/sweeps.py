"""Sweeps of RecMem's settings over LoCoMo without an LLM: what each value would cost, and what search finds.

One setting at a time, the others at their defaults, as in the paper's appendix C. The mock LLM answers at
once and agrees to every merge, in episodes of words that it was shown: how much is merged, and so what is
called for, is no model's; its tokens are its own count of words. Recall in turns depends on no LLM; that in
the turns that episodes rest on is of the mock's episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from undertow.bench.mock.llm import MockLLM
from undertow.bench.quality.ablations import varied
from undertow.bench.quality.datasets import Sample
from undertow.bench.quality.evidence.recall import recall_at, retrieve
from undertow.bench.quality.systems.base import each_once
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.config import Settings

THETA_SIM = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
THETA_COUNT = (2, 3, 4, 5, 6, 7, 8)
K_SUB = (1, 2, 3, 5, 7, 10, 15, 20, 30)
K_EPI = (1, 2, 3, 5, 7, 10, 15, 20)

RUNS = len(THETA_SIM) + len(THETA_COUNT) + 2

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """One point a value of each setting, in order."""

    theta_sim: list[Point]
    theta_count: list[Point]
    k_sub: list[Point]
    k_epi: list[Point]


def sweep(
    samples: Sequence[Sample],
    settings: Settings,
    vectors: KeptVectors,
    on_run: Callable[[], None] = lambda: None,
) -> Sweeps:
    """All four sweeps; `on_run` is told of each of `RUNS` runs. Thresholds left out come as usual."""

    def constructed(**changed: float) -> Point:
        point = {**changed, **construction(samples, varied(settings, **changed), vectors)}
        on_run()
        return point

    sims = [constructed(theta_sim=value) for value in THETA_SIM]
    counts = [constructed(theta_count=value) for value in THETA_COUNT]
    found = evidence(samples, settings, vectors)
    on_run()
    rested = evidence_behind(samples, settings, vectors)
    on_run()
    return Sweeps(sims, counts, found, rested)


@contextmanager
def _engine(settings: Settings, vectors: KeptVectors, llm: MockLLM | None = None) -> Iterator[Engine]:
    """One with an empty store, which is deleted at the end."""
    with (
        TemporaryDirectory(prefix="undertow-sweep-") as store,
        Engine(Path(store), settings, vectors, llm=llm) as engine,
    ):
        yield engine


def construction(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> Point:
    """What making the memories of all samples takes, and how many turns they are made of."""
    with _engine(settings, vectors, MockLLM()) as engine:
        for sample in samples:
            engine.add_batch(sample.turns)
        engine.drain()
        told = engine.stats()
        usage = store_usage(engine.tenants)
    return {
        "turns": told["turns"],
        "consolidated_share": round(1 - told["waiting_turns"] / told["turns"], 4),
        **{name: told[name] for name in ("consolidations", "merges", "episodes", "facts")},
        "calls": {operation: used["calls"] for operation, used in usage.items()},
        "prompt_tokens": {operation: used["prompt_tokens"] for operation, used in usage.items()},
    }


def evidence(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> list[Point]:
    """The mean share of a question's evidence among the k_sub best turns, by k_sub."""
    shares: dict[int, list[float]] = {k: [] for k in K_SUB}
    with _engine(settings, vectors) as engine:
        for found in retrieve(engine, vectors, samples, max(K_SUB)):
            for k in K_SUB:
                shares[k].append(recall_at(k, found.question.evidence, found.held))
    return [{"k_sub": k, **_means(evidence_recall=shares[k])} for k in K_SUB]


def evidence_behind(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> list[Point]:
    """The mean share of a question's evidence in the turns that the k_epi best episodes rest on, by k_epi.

    `turns_behind`: how many turns those are in the mean. The more, the less an episode need tell of each.
    """
    shares: dict[int, list[float]] = {k: [] for k in K_EPI}
    turns: dict[int, list[float]] = {k: [] for k in K_EPI}
    with _engine(settings, vectors, MockLLM()) as engine:
        for sample in samples:
            receipts = engine.add_batch(sample.turns)
            engine.drain()
            holds = dict(zip([receipt.seq for receipt in receipts], sample.holds, strict=True))
            scored = [question for question in sample.questions if question.is_scored]
            vectors.encode_queries([question.text for question in scored])
            for question in scored:
                found = engine.search(sample.tenant, question.text, k_sub=0, k_epi=max(K_EPI), k_sem=0)
                behind = [episode.source_seqs for episode in found.episodes]
                held = [each_once([holds[seq] for seq in seqs]) for seqs in behind]
                for k in K_EPI:
                    shares[k].append(recall_at(k, question.evidence, held))
                    turns[k].append(len({seq for seqs in behind[:k] for seq in seqs}))
    return [{"k_epi": k, **_means(evidence_recall=shares[k], turns_behind=turns[k])} for k in K_EPI]


def _means(**figures: Sequence[float]) -> Point:
    """`questions`, and the mean of each figure over them; None where there is none."""
    means = {name: round(fmean(of), 4) if of else None for name, of in figures.items()}
    return {"questions": max(map(len, figures.values())), **means}
