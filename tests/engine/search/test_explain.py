"""An explanation adds up to the scores, and names what was left out for the reason that left it out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn
from undertow.engine.base.results import MAX_LEFT_OUT, Explanation, Hit, ScoreParts, SearchResult
from undertow.engine.search.analyzer import Analyzer
from undertow.engine.search.related_words import related
from undertow.engine.search.score_parts import PartsOfScores

from ...support.engine import NEVER, open_engine, turn_of

WORDS = ("boat", "harbour", "plank", "varnish", "summer", "carpenter", "kiln", "clay", "glaze", "yoga")
QUERY = "the carpenter's boat, and some exercise in the harbour"
ASKED = {"carpenter", "boat", "harbour"}
EVERY = 1_000


def world(seed: int, count: int = 60) -> list[Turn]:
    draw = random.Random(seed)
    return [
        replace(
            turn_of("ann", n, " ".join(draw.choices(WORDS, k=3)), timestamp=f"2026-03-{1 + n % 9:02d}"),
            session_id=f"s{draw.randrange(3)}",
            metadata={"topic": draw.choice(("work", "home"))},
        )
        for n in range(count)
    ]


def score_of(parts: ScoreParts) -> float:
    near = parts.cosine if parts.neighbour_cosine is None else parts.neighbour_cosine
    cosine = parts.cosine + 0.3 * max(near - parts.cosine, 0.0)
    return 1 - (1 - cosine) * math.exp(-3 * (parts.words + parts.neighbour_words + parts.stretch_words))


def searched(engine: Engine, **asked: Any) -> tuple[SearchResult, Explanation]:
    """A search with its explanation, which changes nothing of the rest."""
    found = engine.search("ann", QUERY, **asked, explain=True)
    assert found.explanation is not None
    plain = engine.search("ann", QUERY, **asked)
    assert plain.explanation is None
    assert plain.ranked() == found.ranked()
    return found, found.explanation


def hits_of(found: SearchResult, how: Explanation) -> list[Hit]:
    hits = [*found.ranked(), *(hit for hit, _ in how.left_out)]
    assert how.scores.keys() == {hit.id for hit in hits}
    return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings", [{}, {"search": "dense"}, {"words_rows": 10}], ids=["words", "dense", "large"]
)
def test_the_parts_add_up_to_each_score(tmp_path: Path, seed: int, settings: dict[str, Any]) -> None:
    with open_engine(tmp_path / "store", MockLLM(MockReplies()), theta_sim=0.3, **settings) as engine:
        receipts = engine.add_batch(world(seed))
        assert engine.drain()
        for gone in random.Random(seed).sample(receipts, 5):
            assert gone.id is not None
            engine.delete(gone.id)
        assert engine.drain()
        found, how = searched(engine, k_sub=10, k_epi=3, k_sem=3)
        assert found.episodes and found.facts
        assert how.turns == 55
        assert how.search == ("dense" if settings else "hybrid")
        for hit in hits_of(found, how):
            parts = how.scores[hit.id]
            assert score_of(parts) == pytest.approx(hit.score, abs=1e-12)
            assert settings == {} or parts == ScoreParts(hit.score)
            assert (parts.neighbour_cosine is None) == (bool(settings) or hit.kind != "turn")
            assert bool(parts.words) == bool(parts.matched)
            if hit.kind == "turn" and not settings:
                own = {word for word in parts.matched if "~" not in word}
                assert own == ASKED.intersection(hit.memory.split())


@pytest.mark.parametrize("seed", range(3))
def test_what_was_left_out_is_the_best_of_the_rest(tmp_path: Path, seed: int) -> None:
    with open_engine(tmp_path / "store", **NEVER) as engine:
        turns = world(seed)
        engine.add_batch(turns)
        every = engine.search("ann", QUERY, k_sub=EVERY).turns
        asked = {"k_sub": 4, "where": {"topic": "work"}, "since": "2026-03-03"}
        found, how = searched(engine, **asked)
    rest = [hit for hit in every if hit not in found.turns][:MAX_LEFT_OUT]
    assert [hit for hit, _ in how.left_out] == rest
    for hit, reason in how.left_out:
        turn = turns[hit.source_seqs[0]]
        late, work = (turn.timestamp or "") >= "2026-03-03", turn.metadata == {"topic": "work"}
        assert reason == ("time" if not late else "count" if work else "filters")
    assert {reason for _, reason in how.left_out} > {"time"}
    assert how.passing == {
        "time": sum((turn.timestamp or "") >= "2026-03-03" for turn in turns),
        "filters": sum(turn.metadata == {"topic": "work"} for turn in turns),
    }


def test_deleted_turns_pass_no_filter(tmp_path: Path) -> None:
    with open_engine(tmp_path / "store", **NEVER) as engine:
        gone, *_ = engine.add_batch([replace(turn, metadata={"topic": "work"}) for turn in world(1, 9)])
        asked = {"k_sub": 4, "where": {"topic": "work"}, "since": "2026-03-01"}
        assert searched(engine, **asked)[1].passing == {"time": 9, "filters": 9}
        assert gone.id is not None
        engine.delete(gone.id)
        how = searched(engine, **asked)[1]
    assert (how.turns, how.passing) == (8, {"time": 8, "filters": 8})


def test_a_report_of_some_hits_says_why_the_others_are_not_there(tmp_path: Path) -> None:
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch(world(1, 20))
        found, _ = searched(engine, k_sub=8)
    first = found.ranked(2)
    report = found.explained(first, found.ranked()[4].score)
    assert report is not None
    reasons = [item["reason"] for item in report["left_out"]]
    assert reasons == ["top_k"] * 3 + ["threshold"] * (MAX_LEFT_OUT - 3)
    plain = found.explained(first)
    assert plain is not None
    assert [item["reason"] for item in plain["left_out"]] == ["top_k"] * 6 + ["count"] * (MAX_LEFT_OUT - 6)
    assert len(reasons) == MAX_LEFT_OUT
    assert report["scores"].keys() == {hit.id for hit in first} | {item["id"] for item in report["left_out"]}
    assert SearchResult((), (), ()).explained([]) is None


def test_nothing_is_told_of_what_no_search_may_find(tmp_path: Path) -> None:
    """A deleted turn, and the memories that rest on it until they are remade."""
    with open_engine(tmp_path / "store", MockLLM(MockReplies()), theta_sim=0.3) as engine:
        receipts = engine.add_batch([turn_of("ann", n, f"the boat and the secret{n}") for n in range(8)])
        assert engine.drain()
        few: dict[str, Any] = {"k_sub": 1, "k_epi": 1, "k_sem": 1}
        before = engine.search("ann", "secret3", **few, explain=True)
        assert "secret3" in str(before.explanation)
        assert receipts[3].id is not None
        engine.delete(receipts[3].id)
        hidden = engine.search("ann", "secret3", **few, explain=True)
        assert "secret3" not in str(hidden)
        turns = engine.search("ann", "boat", k_sub=1, k_epi=0, k_sem=0, explain=True).explanation
        assert turns is not None
        assert {hit.kind for hit, _ in turns.left_out} == {"turn"}, "no other kind was asked for"
        assert engine.drain()
        remade = engine.search("ann", "secret3", k_sub=5, explain=True)
    assert "secret3" not in str(remade.explanation)


def test_words_that_weigh_more_are_named(tmp_path: Path) -> None:
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch([turn_of("ann", n, f"ann spoke of the {word}") for n, word in enumerate(WORDS)])
        how = engine.search("ann", "what did ann do in the harbour", explain=True).explanation
    assert how is not None
    assert how.telling_words == "harbour"


def test_the_words_that_match_are_those_of_the_definition() -> None:
    no: Any = None
    drawn, told = random.Random(3), 0
    words = [*WORDS, "exercise", "gym", "dog", "cat", "pet", "school", "teacher", "ship", "sea", "the"]
    for _ in range(300):
        query, text = (" ".join(drawn.choices(words, k=drawn.randint(1, 12))) for _ in range(2))
        asked, held = Analyzer().by_term(query), Analyzer().by_term(text)
        near, closeness = related(np.fromiter(asked, np.uint32))
        expected = []
        for (term, word), others, counts in zip(asked.items(), near.tolist(), closeness, strict=True):
            instead = [held[o] for o, c in zip(others, counts, strict=True) if c > 0 and o in held]
            expected += [word] if term in held else [f"{word} ~ {instead[0]}"] if instead else []
        assert PartsOfScores(no, no, no, no, no, query)._matched(text) == tuple(expected)
        told += sum("~" in word for word in expected)
    assert told > 100
