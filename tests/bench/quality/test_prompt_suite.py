"""The prompt suite: what it counts as told, dated, replaced and repeated, and a run from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.quality.real_model.prompt_suite import (
    cases,
    details,
    measure,
    scored,
    settings_for,
    summary,
)
from undertow.engine.base.model import Memory

CASE = next(case for case in cases() if case["name"] == "marathon")


def fact(text: str, day: str, n: int = 0, supersedes: tuple[str, ...] = ()) -> Memory:
    given: dict[str, Any] = {"tenant": CASE["name"], "made_at_seq": 5, "born_at_seq": 5, "ordinal": n}
    given |= {"version": 1, "source_seqs": (0,), "supersedes": supersedes}
    return Memory(id=f"f{n}", kind="fact", text=text, timestamp=f"{day}T18:00:00", **given)


def test_each_planted_detail_is_said_in_its_turn_or_before() -> None:
    assert len(cases()) == 20
    for case in cases():
        for detail in details(case):
            said = " ".join(text for turn in case["turns"][: detail.turn + 1] for text in turn)
            assert all(re.search(word, said, re.IGNORECASE) for word in detail.words), (case["name"], detail)
            assert detail.replaces is None or detail.replaces < len(case["planted"])


def test_no_single_other_turn_says_a_planted_detail() -> None:
    for case in cases():
        for detail in details(case):
            other = [" ".join(turn[1:]) for n, turn in enumerate(case["turns"]) if n != detail.turn]
            saying = [t for t in other if all(re.search(w, t, re.IGNORECASE) for w in detail.words)]
            assert not saying, (case["name"], detail)


def test_a_fact_of_several_turns_has_the_date_of_the_last() -> None:
    both = "Ines signed up for the Porto marathon; coach Bruno wants her to swim."
    assert scored(CASE, [fact(both, "2026-04-11")])["facts_dated"] == [True]
    assert scored(CASE, [fact(both, "2026-03-02")])["facts_dated"] == [False]


def test_what_a_perfect_reader_would_store_has_full_marks() -> None:
    told = [
        fact("Ines signed up for the Porto marathon.", "2026-03-02"),
        fact("Ines ran 18 kilometres on 19 March 2026.", "2026-03-20", 1),
        fact("Coach Bruno wants Ines to swim on Tuesdays.", "2026-04-11", 2),
        fact("Ines runs the half marathon instead.", "2026-05-09", 3, supersedes=("f0",)),
        fact("Ines has new Asics in size 39.", "2026-05-30", 4),
    ]
    outcome = scored(CASE, told)
    assert outcome["found"] == [True] * 5
    assert outcome["worked_out"] == outcome["replaced"] == [True]
    assert all(outcome["facts_dated"]) and outcome["repeats"] == 0


def test_what_is_missing_misdated_contradicted_or_repeated_is_told() -> None:
    outcome = scored(
        CASE,
        [
            fact("Ines signed up for the Porto marathon.", "2026-05-30"),
            fact("Ines ran 18 kilometres yesterday.", "2026-03-20", 1),
            fact("Ines runs the half marathon instead.", "2026-05-09", 3),
            fact("Ines runs the half marathon, instead", "2026-05-09", 4),
        ],
    )
    assert outcome["found"] == [True, True, False, True, False]
    assert outcome["worked_out"] == outcome["replaced"] == [False]
    assert outcome["facts_dated"] == [False, True, True, True]
    assert outcome["repeats"] == 1
    told = summary([{**outcome, "usage": {}}])
    assert told["found"] == {"share": 0.6, "of": 5} and told["facts_dated"]["share"] == 0.75


def test_a_run_consolidates_every_log_and_tells_its_cost(tmp_path: Path) -> None:
    settings = settings_for(None, "mock")
    told = measure(settings, tmp_path / "out.json", MockLLM(MockReplies()))
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["summary"] == told and told["cases"] == 20 and told["parked"] == 0
    assert all(outcome["episodes"] or outcome["facts"] for outcome in kept["outcomes"])
    calls = {operation: used["calls"] for operation, used in told["usage"].items()}
    assert calls["episode"] == 20 and calls["merge"] >= 1
    assert told["found"]["share"] == pytest.approx(
        sum(map(sum, (outcome["found"] for outcome in kept["outcomes"]))) / 104, abs=1e-3
    )
