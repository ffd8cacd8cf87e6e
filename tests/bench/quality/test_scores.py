"""F1, BLEU-1 and the summary, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from undertow.bench.quality.judge.f1_bleu import bleu_1, f1, stems
from undertow.bench.quality.run.summary import construction_cost, evidence_shown, latency, query_cost, scores
from undertow.engine.base.model import Usage


def test_words_are_stems_without_articles_and_punctuation() -> None:
    assert stems("The dogs, and an Owl: RUNNING!") == ["dog", "owl", "run"]
    assert stems("1,500 don't") == ["1500", "dont"], "punctuation goes without leaving a gap"


@pytest.mark.parametrize(
    ("answer", "gold", "category", "expected"),
    [
        # 3 of 4 words and 3 of 3: 2 * 3 / 7
        ("She ran to Lisbon", "ran to Lisbon", "single-hop", 6 / 7),
        # a word counts as often as it stands on both sides: 1 shared, 3 and 1 words
        ("tea tea tea", "tea", "temporal", 0.5),
        ("the", "a tea", "single-hop", 0.0),
        ("", "tea", "single-hop", 0.0),
        # parts: "tea" finds "tea" (1.0); "sailing boats" finds "sail" (1 shared of 2 and 1: 2/3)
        ("sail, green tea, tea", "tea, sailing boats", "multi-hop", (1.0 + 2 / 3) / 2),
        # in other categories a comma is only punctuation: 2 shared of 4 and 3
        ("sail, green tea, tea", "tea, sailing boats", "single-hop", 4 / 7),
        # of an open-domain gold answer, what stands before the semicolon
        ("Likely no", "Likely no; she wants to be a counselor", "open-domain", 1.0),
        ("Likely no", "Likely no; she wants", "temporal", 2 * 2 / 6),
    ],
)
def test_f1_is_that_of_locomos_evaluation(answer: str, gold: str, category: str, expected: float) -> None:
    assert f1(answer, gold, category) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("in the estuary", "in the estuary", 1.0),
        # 2 of 4 words; longer than the gold answer: no penalty
        ("moored in an estuary", "the Estuary, in", 2 / 4),
        # all of 2 words, of 4 wanted: the penalty is exp(1 - 4 / 2)
        ("Green tea", "green tea or coffee", math.exp(-1)),
        ("coffee", "tea", 0.0),
        ("", "tea", 0.0),
    ],
)
def test_bleu_1_is_the_precision_of_words_with_a_penalty_for_brevity(
    answer: str, gold: str, expected: float
) -> None:
    assert bleu_1(answer, gold, "single-hop") == pytest.approx(expected)


def answered(question: str, run: int, category: str, value: float, **more: Any) -> dict[str, Any]:
    line = {"question_id": question, "run": run, "category": category, "answer": "x", "is_scored": False}
    evidence: dict[str, list[str]] = {"evidence": [], "in_turns": [], "behind_memories": []}
    return line | {"f1": value, "bleu_1": value / 2, **evidence, **more}


def judged(question: str, run: int, category: str, verdict: str) -> dict[str, Any]:
    return {"question_id": question, "run": run, "category": category, "verdict": verdict}


def test_means_and_spread_are_over_runs() -> None:
    lines = [("a", 1, "temporal", 1.0), ("b", 1, "single-hop", 0.5)]
    lines += [("a", 2, "temporal", 0.0), ("b", 2, "single-hop", 0.5)]
    said = ("right", "unjudged", "wrong", "right")
    answers = [answered(*line) for line in lines]
    verdicts = [judged(*line[:3], verdict) for line, verdict in zip(lines, said, strict=True)]
    told = scores(answers, verdicts, 2)
    # runs 0.75 and 0.25; questions 0.5 and 0.5
    assert told["f1"] == {"mean": 0.5, "spread": round(math.sqrt(0.125), 4), "standard_error": 0.0}
    assert told["bleu_1"]["mean"] == 0.25
    # run 1: one judged, right; run 2: one of two
    # the questions' means are 0.5 and 1: their deviation is sqrt(0.125), and there are two
    spread = round(math.sqrt(0.125), 4)
    assert told["judge"] == {"mean": 0.75, "spread": spread, "standard_error": 0.25}
    assert (told["questions"], told["errors"], told["unjudged"]) == (2, 0, 1)
    single = told["by_category"]["single-hop"]
    assert single["judge"]["mean"] == 1.0, "unjudged is neither right nor wrong"
    assert single["judge"]["spread"] is single["judge"]["standard_error"] is None
    assert (single["questions"], single["unjudged"]) == (1, 1)


def test_a_system_that_fails_does_not_score_higher() -> None:
    failed = [
        {"question_id": str(n), "run": 1, "category": "temporal", "error": "it was empty"} for n in range(9)
    ]
    told = scores([answered("a", 1, "temporal", 1.0), *failed], [judged("a", 1, "temporal", "right")], 1)
    assert (told["questions"], told["errors"]) == (10, 9)
    assert told["f1"]["mean"] == told["judge"]["mean"] == 0.1 and told["bleu_1"]["mean"] == 0.05
    # one of ten: the deviation is sqrt(0.9 * 0.1 * 10 / 9) = sqrt(0.1)
    assert told["judge"]["standard_error"] == 0.1
    assert scores(failed, [], 1)["judge"]["mean"] == 0.0
    assert scores(failed, None, 1)["judge"]["mean"] is None, "there is no judge"


def test_construction_is_told_a_conversation_and_by_operation() -> None:
    spent = {
        "one": {"episode": Usage(2, 100, 40, 20), "merge": Usage(1, 10, 0, 2)},
        "two": {"episode": Usage(1, 50, 0, 10)},
    }
    told = construction_cost(spent)
    tokens = {"prompt_tokens": 80.0, "cached_prompt_tokens": 20.0, "completion_tokens": 16.0}
    assert told["per_conversation"] == {"calls": 2.0, "tokens": 96.0, **tokens}
    assert told["by_operation"]["merge"]["tokens"] == 6.0
    assert told["by_conversation"]["two"] == {"episode": asdict(Usage(1, 50, 0, 10))}
    nothing = construction_cost({"one": {}})
    assert nothing["per_conversation"]["tokens"] == 0 and nothing["by_conversation"] == {}


def test_evidence_in_turns_and_behind_memories_is_told_apart() -> None:
    lines = [
        answered("a", 1, "x", 0, evidence=["1", "2"], is_scored=True, in_turns=["2", "9"]),
        answered("b", 1, "x", 0, evidence=["1"], is_scored=True, in_turns=["1"], behind_memories=["8", "9"]),
        # it was never said: what was shown of its sessions is no evidence
        answered("c", 1, "abstention", 0, evidence=["1"], behind_memories=["1"]),
    ]
    assert evidence_shown(lines) == {"in_turns": 0.75, "behind_memories": 0.0}
    assert evidence_shown(lines[:1]) == {"in_turns": 0.5, "behind_memories": None}, "no memory was shown"
    assert evidence_shown(lines[2:]) == evidence_shown([]) == {"in_turns": None, "behind_memories": None}


def test_tokens_and_latency_of_a_question() -> None:
    used = {"calls": 1, "prompt_tokens": 30, "cached_prompt_tokens": 10, "completion_tokens": 2}
    lines = [
        answered(str(n), 1, "x", 0, tokens=used | {"prompt_tokens": tokens}, llm_s=seconds)
        for n, (tokens, seconds) in enumerate(((30, 1.0), (10, 3.0), (30, 2.0)))
    ]
    assert query_cost(lines)["prompt_tokens_per_question"] == 23.3
    assert query_cost(lines)["calls_per_question"] == 1
    taken = latency([{**line, "retrieval_s": 0.5} for line in lines])
    assert (taken["llm_s_p50"], taken["llm_s_p95"], taken["retrieval_s_p95"]) == (2.0, 2.9, 0.5)
