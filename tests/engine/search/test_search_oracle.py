"""A whole search is, to the last bit, what plain Python finds in the export of a tenant with a past.

Words become terms, and vectors are blended, as in the search: other tests are about that.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
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
WHERES: list[Any] = [*[None] * 3, {"topic": ["work", 1]}, {"n": {"$ne": "home"}, "topic": {"$gte": 0}}]
SPANS = [*[(None, None)] * 3, ("2026-03-04", None), (None, "2026-03-05"), ("2026-03-03", "2026-03-06")]
WORDS_ROWS = 280  # so many turns and memories are there in the middle of the test
KINDS = ("turn", "episode", "fact")
COUNTS = (1, 5, 110)
# of each hit: its id, the turns it rests on, score, cosine, and the share of its own words
Found = list[tuple[str, tuple[int, ...], float, float, float]]


class Item(NamedTuple):
    """A turn, or the current version of a memory; `seqs`: of the turns it rests on."""

    id: str
    seqs: tuple[int, ...]
    vector: NDArray[np.float16]
    terms: list[int]
    timestamp: str | None
    session: str = ""


class Plain:
    """A tenant's items by kind, in order of arrival, and a search of them without any index."""

    def __init__(self, engine: Engine) -> None:
        records = list(engine._reports.export("ann", vectors=True))
        # of a memory's last version
        vectors = {of["id"]: np.array(of["vector"], np.float16) for of in records if "vector" in of}
        turns = [of for of in records if of["kind"] == "turn"]
        self.metadata = {of["seq"]: of.get("metadata", {}) for of in turns}
        self.consolidated = set[int]()
        for of in records:
            self.consolidated |= {*of.get("settled", ())}
            self.consolidated -= {*of.get("revived", ())}
        self.items: dict[str, list[Item]] = {kind: [] for kind in KINDS}
        for t in turns:
            day = t.get("timestamp")
            terms = Analyzer().of(f"{t['text']}\n{day_in_words(day) if day else ''}")
            self.items["turn"].append(Item(t["id"], (t["seq"],), vectors[t["id"]], terms, day, t["session"]))
        for m in engine.get_all("ann"):
            terms = [*{*Analyzer().of(m.indexed)}]
            self.items[m.kind].append(Item(m.id, m.source_seqs, vectors[m.id], terms, m.timestamp))

    def search(
        self, asked: SearchQuery, hybrid: bool, every_turn: bool
    ) -> tuple[dict[str, Found], str | None]:
        """The hits of each tier, and the words that weigh more."""
        terms, telling = Analyzer().of(asked.text) if hybrid else [], None
        vector = ENCODER.encode([asked.text])[0]
        turns = self.items["turn"]
        common = {t for t in terms if 2 * sum(t in turn.terms for turn in turns) > len(turns)}
        if common and (telling := Analyzer().without(asked.text, common) or None):
            vector = blended(vector, ENCODER.encode([telling])[0])
        known = {term: related_of(term) for term in terms}
        passing = {seq for seq, metadata in self.metadata.items() if meets_all(metadata, asked.where or {})}
        found = {}
        for kind, k in zip(KINDS, (asked.k_sub, asked.k_epi, asked.k_sem), strict=True):
            items = self.items[kind]
            own = by_columns({n: item.terms for n, item in enumerate(items)}, terms, len(items), known)
            shares, beside = own, [[-1, -1] for _ in items]
            if terms and kind == "turn":
                shares, beside = plain_context(own, [item.session for item in items])
            cosines = [cosine(vector, item.vector) for item in items]
            gone = self.consolidated if kind == "turn" and not every_turn else set[int]()
            allowed = [n for n, of in enumerate(items) if within(of, asked) and (passing - gone) & {*of.seqs}]
            scores = scored(cosines, shares, beside, allowed, max(k or 0, CANDIDATES))
            best = sorted(scores, key=lambda n: (-scores[n], n))[:k]
            found[kind] = [(items[n].id, items[n].seqs, scores[n], cosines[n], own[n]) for n in best]
        return found, telling


def scored(
    cosines: list[float], shares: list[float], beside: list[list[int]], allowed: list[int], depth: int
) -> dict[int, float]:
    """The scores of the nearest, and of those that have most of the query's words; ties by arrival."""
    near = sorted(allowed, key=lambda n: (-cosines[n], n))[:depth]
    said = sorted((n for n in allowed if shares[n]), key=lambda n: (-shares[n], n))[:depth]
    scores = {}
    for n in {*near, *said}:
        nearer = max([cosines[other] for other in beside[n] if other >= 0], default=-1.0) - cosines[n]
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
    """All turns have `see`, and `the` is no term."""
    return " ".join(draw.choices((*WORDS, "see", "the"), k=draw.randint(1, most)))


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


def query(draw: random.Random, *, turns_alone: bool) -> SearchQuery:
    k_sub, k_epi, k_sem = draw.choices(COUNTS, k=3)
    memories = (0, 0) if turns_alone else (k_epi, k_sem)
    since, until = draw.choice(SPANS)
    asked = SearchQuery("ann", words(draw, 4), k_sub, *memories, since, until, draw.choice(WHERES))
    return replace(asked, explain=True, dense=draw.random() < 0.2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [{}, {"retain_consolidated": False}, {"words_rows": WORDS_ROWS}],
    ids=["every turn", "without consolidated turns", "words of a small tenant"],
)
def test_a_search_is_that_of_plain_python_to_the_last_bit(
    tmp_path: Path, settings: Mapping[str, Any], seed: int
) -> None:
    draw, told, llm = random.Random(seed), Counter[str](), MockLLM(MockReplies(seed))
    with open_engine(tmp_path, llm, theta_sim=0.6, theta_merge=0.95, theta_count=2, **settings) as engine:
        engine.add_batch(some_turns(draw, 120))
        for n in range(16):
            if n % 2:
                assert engine.drain()
            now = Plain(engine)
            for _ in range(4):
                # test_explain.py has which memories may be found while some are remade
                asked = query(draw, turns_alone=not engine.idle)
                found = engine.call(asked)
                how = found.explanation
                assert how is not None
                hybrid = how.search == "hybrid"
                if "words_rows" in settings and not asked.dense:  # memories that were deleted count too
                    assert not hybrid or sum(map(len, now.items.values())) <= WORDS_ROWS
                else:
                    assert hybrid == (not asked.dense)
                expected, telling = now.search(asked, hybrid, settings.get("retain_consolidated", True))
                for kind, hits in zip(KINDS, (found.turns, found.episodes, found.facts), strict=True):
                    parts = [how.scores[hit.id] for hit in hits]
                    assert expected[kind] == [
                        (hit.id, hit.source_seqs, hit.score, of.cosine, of.words)
                        for hit, of in zip(hits, parts, strict=True)
                    ]
                    told[kind] += len(hits) > 0
                assert how.telling_words == telling
                told.update({how.search: 1, "telling": telling is not None, "filtered": bool(how.passing)})
            change(engine, draw, now)
    assert min(told[kind] for kind in (*KINDS, "hybrid", "dense", "telling", "filtered")) > 5, told
