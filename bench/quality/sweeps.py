"""Sweeps of a policy's settings over LoCoMo without an LLM: what each value costs, and what search finds.

One setting at a time, the others at their defaults, as in the appendices of the papers. The mock LLM answers
at once and agrees to every merge, in memories of words that it was shown: how much is merged, and so what is
called for, is no model's; its tokens are its own count of words. Recall in turns depends on no LLM; that in
the turns that episodes and facts rest on is of the mock's memories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from undertow.bench.mock.llm import MockLLM
from undertow.bench.quality.ablations import varied
from undertow.bench.quality.datasets import Sample
from undertow.bench.quality.evidence.recall import recall_at
from undertow.bench.quality.systems.base import each_once
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PolicyName
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.policies.base import Thresholds
from undertow.engine.policies.registry import tiers_of

K = (1, 2, 3, 5, 7, 10, 15, 20, 30)

Point = dict[str, Any]
Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Swept:
    """What is swept of a policy: settings that shape its memories, each with its values, and counts.

    `counts`: those of the tiers that its answers show, each swept over `K`.
    """

    construction: Values
    counts: tuple[str, ...]


# HiMem, A-Mem and the eager policy have no window and no threshold among their settings.
SWEPT: Mapping[PolicyName, Swept] = {
    "recmem": Swept(
        {
            "theta_sim": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
            "theta_merge": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
            "theta_count": (2, 3, 4, 5, 6, 7, 8),
        },
        ("k_sub", "k_epi", "k_sem"),
    ),
    "eager": Swept({}, ("k_sub", "k_sem")),
    "nemori": Swept(
        {
            "window_messages": (5, 10, 15, 20, 25, 30, 40),
            "theta_evoke": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
            "theta_compare": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
        },
        ("k_epi", "k_sem"),
    ),
    "himem": Swept({}, ("k_epi", "k_sem")),
    "a-mem": Swept({}, ("k_sem",)),
    "memory-os": Swept(
        {"short_term_pages": (1, 3, 5, 7, 10, 15, 20), "heat_threshold": (1, 2, 3, 4, 5, 6, 8, 10)},
        ("k_sub", "k_epi", "k_sem"),
    ),
}
FOUND: Mapping[str, Callable[[SearchResult], Sequence[Hit]]] = {
    "k_sub": lambda found: found.turns,
    "k_epi": lambda found: found.episodes,
    "k_sem": lambda found: found.facts,
}


@dataclass(frozen=True, slots=True)
class Sweeps:
    """By setting one point a value, in order: of construction, and of search."""

    construction: Mapping[str, list[Point]]
    search: Mapping[str, list[Point]]


def runs(swept: Swept) -> int:
    """How often `sweep` builds the memories of all samples."""
    return sum(map(len, swept.construction.values())) + 1


def sweep(
    samples: Sequence[Sample],
    settings: Settings,
    vectors: KeptVectors,
    on_run: Callable[[], None] = lambda: None,
) -> Sweeps:
    """The sweeps of the settings' policy; `on_run` is told of each of its `runs`."""
    swept = SWEPT[settings.policy]

    def constructed(name: str, value: float) -> Point:
        point = {name: value, **construction(samples, varied(settings, **{name: value}), vectors)}
        on_run()
        return point

    found = evidence(samples, settings, vectors)
    on_run()
    return Sweeps(
        {name: [constructed(name, value) for value in values] for name, values in swept.construction.items()},
        found,
    )


def in_force(settings: Settings) -> dict[str, Any]:
    """The values of what is swept, and of what else the figures depend on, where they are not varied."""
    swept = SWEPT[settings.policy]
    thresholds = asdict(Thresholds.of(settings))
    values = settings.model_dump() | {"calls": settings.call_form} | thresholds | asdict(tiers_of(settings))
    shares = [name for name in ("sim_share", "merge_share") if "theta_sim" in swept.construction]
    return {name: values[name] for name in ("search", "calls", *swept.construction, *shares, *swept.counts)}


@contextmanager
def _built(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> Iterator[Engine]:
    """An engine with the memories of all samples, whose conversations are over. Its store is deleted."""
    with (
        TemporaryDirectory(prefix="undertow-sweep-") as store,
        Engine(Path(store), settings, vectors, llm=MockLLM()) as engine,
    ):
        for sample in samples:
            engine.add_batch(sample.turns)
            engine.log_flush(sample.tenant)
        engine.drain()
        yield engine


def construction(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> Point:
    """What making the memories of all samples takes, and how many turns they are made of."""
    with _built(samples, settings, vectors) as engine:
        told = engine.stats()
        usage = store_usage(engine.tenants)
    return {
        "turns": told["turns"],
        "consolidated_share": round(1 - told["waiting_turns"] / told["turns"], 4),
        **{name: told[name] for name in ("consolidations", "merges", "episodes", "facts")},
        "calls": {operation: used["calls"] for operation, used in usage.items()},
        "prompt_tokens": {operation: used["prompt_tokens"] for operation, used in usage.items()},
    }


def evidence(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> dict[str, list[Point]]:
    """By count, one point a k: the mean share of a question's evidence in the turns that the k best rest on.

    `turns_behind`: how many turns those are in the mean. The more, the less a memory need tell of each.
    """
    counts = SWEPT[settings.policy].counts
    shares: dict[tuple[str, int], list[float]] = {(name, k): [] for name in counts for k in K}
    turns: dict[tuple[str, int], list[int]] = {(name, k): [] for name in counts for k in K}
    k_sub, k_epi, k_sem = (max(K) if name in counts else 0 for name in FOUND)
    with _built(samples, settings, vectors) as engine:
        for sample in samples:
            keys = [turn.dedupe_key for turn in sample.turns]
            stored = engine.turns_by_key(sample.tenant, keys)
            holds = {stored[key]["seq"]: held for key, held in zip(keys, sample.holds, strict=True)}
            scored = [question for question in sample.questions if question.is_scored]
            vectors.encode_queries([question.text for question in scored])  # in batches
            for question in scored:
                found = engine.search(sample.tenant, question.text, k_sub=k_sub, k_epi=k_epi, k_sem=k_sem)
                for name in counts:
                    behind = [hit.source_seqs for hit in FOUND[name](found)]
                    held = [each_once([holds[seq] for seq in seqs]) for seqs in behind]
                    for k in K:
                        shares[name, k].append(recall_at(k, question.evidence, held))
                        turns[name, k].append(len({seq for seqs in behind[:k] for seq in seqs}))
    return {
        name: [
            {
                name: k,
                "questions": len(shares[name, k]),
                "evidence_recall": _mean(shares[name, k]),
                "turns_behind": _mean(turns[name, k]),
            }
            for k in K
        ]
        for name in counts
    }


def _mean(figures: Sequence[float]) -> float | None:
    return round(fmean(figures), 4) if figures else None
