"""A whole search is, to the last bit, what plain Python finds in the export of a tenant with a past."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn
from undertow.engine.base.queries import SearchQuery
from undertow.engine.base.timestamps import day_in_words
from undertow.engine.search.analyzer import Analyzer
from undertow.engine.search.ranking import blended
from undertow.engine.search.related_words import RELATED_SHARE, STEPS, table
from undertow.kernels.topk.combined_score import CANDIDATES, LENT_SHARE, WORDS_WEIGHT

from ...kernels.test_bm25 import by_columns
from ...support.engine import ENCODER, open_engine, turn_of
from ...support.oracles.gate import cosine
from .test_hybrid_search import plain_context
from .test_metadata_index import meets_all, some_metadata

WORDS = ("boat", "ship", "harbour", "plank", "clay", "yoga", "exercise", "bus", "kettle", "ann", "2026")
WHERES: list[dict[str, Any]] = [{}, {"topic": ["work", 1]}, {"n": {"$ne": "home"}}, {"topic": {"$gte": 0}}]
SPANS = ((None, None), ("2026-03-04", None), (None, "2026-03-05"), ("2026-03-03", "2026-03-06"))
KINDS = ("turn", "episode", "fact")
COUNTS = (1, 5, 300)

# of each hit: its id, score, cosine, and the share of its own words
Found = list[tuple[str, float, float, float]]


class Item(NamedTuple):
    """A turn, or the current version of a memory; `seqs`: of the turns it rests on."""

    id: str
    seqs: Collection[int]
    vector: NDArray[np.float16]
    terms: list[int]
    timestamp: str | None
    session: str = ""


class Plain:
    """A tenant's items by kind, in order of arrival, and a search of them without any index."""

    def __init__(self, engine: Engine) -> None:
        records = [record for record in engine._reports.export("ann", vectors=True) if "id" in record]
        vectors = {of["id"]: np.array(of["vector"], np.float16) for of in records}  # of the last version
        turns = [of for of in records if of["kind"] == "turn"]
        self.metadata = {of["seq"]: of.get("metadata", {}) for of in turns}
        self.items: dict[str, list[Item]] = {kind: [] for kind in KINDS}
        for t in turns:
            day = t.get("timestamp")
            terms = Analyzer().of(f"{t['text']}\n{day_in_words(day) if day else ''}")
            self.items["turn"].append(Item(t["id"], [t["seq"]], vectors[t["id"]], terms, day, t["session"]))
        for m in engine.get_all("ann"):
            terms = [*{*Analyzer().of(m.indexed)}]
            self.items[m.kind].append(Item(m.id, m.source_seqs, vectors[m.id], terms, m.timestamp))

    def search(self, asked: SearchQuery) -> dict[str, Found]:
        terms = [] if asked.dense else Analyzer().of(asked.text)
        vector = ENCODER.encode([asked.text])[0]
        turns = self.items["turn"]
        common = {t for t in terms if 2 * sum(t in turn.terms for turn in turns) > len(turns)}
        if common and (telling := Analyzer().without(asked.text, common)):
            vector = blended(vector, ENCODER.encode([telling])[0])
        known = {term: related_of(term) for term in terms}
        passing = {seq for seq, metadata in self.metadata.items() if meets_all(metadata, asked.where or {})}
        found = {}
        for kind, k in zip(KINDS, (asked.k_sub, asked.k_epi, asked.k_sem), strict=True):
            items = self.items[kind]
            own = by_columns({n: item.terms for n, item in enumerate(items)}, terms, len(items), known)
            shares, beside = own, [list[int]() for _ in items]
            if terms and kind == "turn":
                shares, beside = plain_context(own, [item.session for item in items])
            cosines = [cosine(vector, item.vector) for item in items]
            allowed = [n for n, of in enumerate(items) if within(of, asked) and passing & {*of.seqs}]
            scores = scored(cosines, shares, beside, allowed, max(k or 0, CANDIDATES))
            best = sorted(scores, key=lambda n: (-scores[n], n))[:k]
            found[kind] = [(items[n].id, scores[n], cosines[n], own[n]) for n in best]
        return found


def scored(
    cosines: list[float], shares: list[float], beside: list[list[int]], allowed: list[int], depth: int
) -> dict[int, float]:
    """The scores of the nearest, and of those that have most of the query's words; ties by arrival."""
    near = sorted(allowed, key=lambda n: (-cosines[n], n))[:depth]
    said = sorted((n for n in allowed if shares[n]), key=lambda n: (-shares[n], n))[:depth]
    scores = {}
    for n in {*near, *said}:
        nearer = max([cosines[other] for other in beside[n]], default=-1.0) - cosines[n]
        score = cosines[n] + LENT_SHARE * max(nearer, 0.0)
        scores[n] = 1.0 - (1.0 - score) * math.exp(-WORDS_WEIGHT * shares[n]) if shares[n] else score
    return scores


def within(item: Item, asked: SearchQuery) -> bool:
    if asked.since is None and asked.until is None:
        return True
    day = (item.timestamp or "")[:10]
    return bool(day) and (asked.since or "") <= day <= (asked.until or "9")


def related_of(term: int) -> list[tuple[int, float]]:
    kept, near, steps = table()
    return [
        (int(kept[other]), step * (RELATED_SHARE / STEPS))
        for row in np.flatnonzero(kept == term).tolist()
        for other, step in zip(near[row].tolist(), steps[row].tolist(), strict=True)
        if step
    ]


def some_turns(draw: random.Random, count: int) -> list[Turn]:
    """Few words, so that scores are often equal; some undated, in three sessions."""
    days = [None, *(f"2026-03-{day:02d}T10:00:00" for day in range(1, 8))]
    first = draw.randrange(10**9)
    return [
        replace(
            turn_of("ann", n, words(draw, 5), timestamp=draw.choice(days)),
            session_id=draw.choice("abc"),
            metadata=metadata,
        )
        for n, metadata in enumerate(some_metadata(count, first), first)
    ]


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices((*WORDS, "the"), k=draw.randint(1, most)))


def change(engine: Engine, draw: random.Random, now: Plain) -> None:
    """What a tenant's owner can do, or what the engine does beside it."""
    turns, memories = now.items["turn"], [*now.items["episode"], *now.items["fact"]]
    match draw.randrange(5):
        case 0:
            for turn in draw.sample(turns, 5):
                engine.delete(turn.id)
        case 1:
            engine.update(draw.choice(turns).id, words(draw, 3))
        case 2 if len(memories) > 1:
            gone, changed = draw.sample(memories, 2)
            engine.delete(gone.id)
            engine.update(changed.id, words(draw, 3))
        case 3:
            assert engine.drain()
            engine.purge()
            engine.tenants.evict("ann")
        case _:
            engine.add_batch(some_turns(draw, draw.randint(1, 60)))


@pytest.mark.parametrize("seed", range(4))
def test_a_search_is_that_of_plain_python_to_the_last_bit(tmp_path: Path, seed: int) -> None:
    draw, told, llm = random.Random(seed), Counter[str](), MockLLM(MockReplies(seed))
    with open_engine(tmp_path, llm, theta_sim=0.6, theta_merge=0.95, theta_count=2) as engine:
        engine.add_batch(some_turns(draw, 120))
        for n in range(16):
            if n % 2:
                assert engine.drain()
            now = Plain(engine)
            for _ in range(3):
                # other tests say which memories may be found while some are remade
                k_epi, k_sem = (draw.choice(COUNTS) if engine.idle else 0 for _ in range(2))
                asked = SearchQuery("ann", words(draw, 4), draw.choice(COUNTS), k_epi, k_sem)
                since, until = draw.choice(SPANS)
                asked = replace(asked, since=since, until=until, where=draw.choice(WHERES), explain=True)
                asked = replace(asked, dense=draw.random() < 0.2)
                found = engine.call(asked)
                assert found.explanation is not None
                parts = found.explanation.scores
                hits = {"turn": found.turns, "episode": found.episodes, "fact": found.facts}
                for kind, expected in now.search(asked).items():
                    assert expected == [
                        (hit.id, hit.score, parts[hit.id].cosine, parts[hit.id].words) for hit in hits[kind]
                    ]
                    told[kind] += len(expected)
            change(engine, draw, now)
    assert min(told[kind] for kind in KINDS) > 50
