"""`undertow eval --evidence-only`: what the figures mean, and which files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from undertow.bench.mock.server import spawn_server
from undertow.bench.quality import Benchmark
from undertow.bench.quality.datasets import load
from undertow.bench.quality.evidence import fact_dates
from undertow.bench.quality.evidence.recall import Score, auroc, score, summary
from undertow.bench.quality.run.summary import UNCLEAR, difference
from undertow.bench.quality.systems.registry import SYSTEMS
from undertow.bench.quality.systems.telling import Telling
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.base.model import InputError, UndertowError
from undertow.engine.encoders.hashing import HashingEncoder

from ...support.cli import Ran, run
from ...support.cluster.in_process import FailingEncoder
from ...support.eval import conversation, haystack, lines_of, means, only, question, said, talk, written


def evaluated(path: Path, out: Path, *options: str, benchmark: str = "locomo") -> Ran:
    return run("eval", benchmark, "--data", path, "--evidence-only", "--out", out, "--json", *options)


def figures(at_5: float, at_10: float, at_20: float, reciprocal_rank: float) -> Score:
    recalls = {"evidence_recall_at_5": at_5, "evidence_recall_at_10": at_10, "evidence_recall_at_20": at_20}
    return recalls | {"reciprocal_rank": reciprocal_rank}


def test_recall_is_the_share_of_the_evidence_in_the_best_turns() -> None:
    found = [("a", "b"), ("c",), (), ("d",), ("e",), ("f",), *[()] * 13, ("g",)]
    assert score(["b", "f", "g", "nowhere"], found) == figures(0.25, 0.5, 0.75, 1.0)
    assert score(["c"], found)["reciprocal_rank"] == 0.5
    assert score(["nowhere"], found) == figures(0, 0, 0, 0)
    assert score(["a", "b"], found) == figures(1, 1, 1, 1), "one turn can hold two pieces"


def test_the_summary_averages_over_questions_not_over_evidence() -> None:
    of_a = [("a", figures(1.0, 1.0, 1.0, 1.0)), ("a", figures(0.0, 0.5, 1.0, 0.2))]
    told = summary([*of_a, ("b", figures(0.0, 0.0, 0.5, 0.0))])
    assert told["questions"] == 3
    assert (told["evidence_recall_at_5"], told["evidence_recall_at_20"]) == (0.3333, 0.8333)
    assert told["mrr"] == 0.4
    by_category: Any = told["by_category"]
    assert by_category["a"]["evidence_recall_at_10"] == 0.75
    assert summary([])["mrr"] is None


def test_locomo_questions_and_what_each_turn_holds(tmp_path: Path) -> None:
    sample = only(written(tmp_path, conversation()))
    assert sample.holds == (("D1:1", "D1:2"), ("D1:3", "D1:4"), ("D1:5",), ("D2:1",))
    asked = sample.questions
    assert asked[1].evidence == ("D1:2", "D1:4", "D2:1"), "split at ; and , and each id once"
    assert [q.is_scored for q in asked] == [True, True, False, False, True]
    categories = ["single-hop", "multi-hop", "adversarial", "temporal", "open-domain"]
    assert [q.category for q in asked] == categories


def test_gold_answers_and_dates(tmp_path: Path) -> None:
    asked = [{**question("When?", 2), "answer": 2022}, {**question("Who?", 5), "answer": None}]
    locomo = only(written(tmp_path, conversation(qa=asked)))
    assert [(q.answer, q.asked_on, q.is_answered) for q in locomo.questions] == [
        ("2022", None, True),
        ("", None, False),
    ]
    path = written(tmp_path, haystack(answer=3), haystack("q2_abs"), haystack("q3", question_date=None))
    asked_of = [sample.questions[0] for sample in load(path, "longmemeval", 1000)]
    assert [(q.answer, q.asked_on) for q in asked_of] == [
        ("3", "2023-05-30T23:40:00"),
        ("In the estuary", "2023-05-30T23:40:00"),
        ("In the estuary", None),
    ]
    assert [(q.category, q.is_answered, q.is_scored) for q in asked_of[:2]] == [
        ("single-session-user", True, True),
        ("abstention", True, False),
    ]
    with pytest.raises(InputError, match="question_date"):
        list(load(written(tmp_path, haystack(question_date="some day")), "longmemeval", 1000))


def test_auroc_is_the_share_of_pairs_in_order_with_ties_half() -> None:
    assert auroc([0.9, 0.5, 0.5], [0.5, 0.1]) == round((2 + 1.5 + 1.5) / 6, 4)
    assert auroc([0.0], [1.0]) == 0.0 and auroc([], [1.0]) is None


def test_a_run_on_a_made_up_conversation(tmp_path: Path) -> None:
    path = written(tmp_path, conversation())
    told = evaluated(path, tmp_path / "out").doc
    assert (told["questions"], told["left_out"], told["turns"]) == (3, 2, 4)
    # four turns in all, so everything that exists is found; D9:9 is nowhere
    assert told["evidence_recall_at_5"] == told["evidence_recall_at_20"] == 0.6667
    assert told["by_category"]["open-domain"]["evidence_recall_at_20"] == 0.0
    assert (
        told["without_answer"]["questions"] == 1 and 0 <= told["without_answer"]["auroc_of_best_score"] <= 1
    )
    lines = lines_of(tmp_path / "out" / "evidence.jsonl")
    assert [line["id"] for line in lines] == ["made-up:0", "made-up:1", "made-up:4"]
    assert lines[0]["retrieved"][0]["holds"] == ["D1:1", "D1:2"]
    assert "pottery" in lines[0]["retrieved"][0]["memory"]
    assert any("[image: a red lighthouse]" in hit["memory"] for hit in lines[1]["retrieved"])
    summary_file = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary_file == {k: v for k, v in told.items() if k != "elapsed_s"}


def test_runs_are_alike_and_kept_vectors_change_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, conversation(), conversation(sample_id="other"))
    kept = ("--vectors", str(tmp_path / "vectors" / "hash.npz"))
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder, options in zip(folders, ((), kept, kept), strict=True):
        assert evaluated(path, folder, *options).code == 0
    first, *others = [(f / "evidence.jsonl").read_bytes() for f in folders]
    assert others == [first, first]
    wrong = evaluated(path, folders[0], *kept, "--encoder", "hash:64")
    assert wrong.code == 1 and "another encoder's" in wrong.err


def test_kept_vectors_ask_the_encoder_once(tmp_path: Path) -> None:
    encoder = FailingEncoder([], dim=64)  # it does not, and tells what it was asked
    file = tmp_path / "kept.npz"
    kept = KeptVectors(encoder, file)
    expected = HashingEncoder(64).encode(["a", "b", "a"])
    assert np.array_equal(kept.encode(["a", "b", "a"]), expected)
    kept.save()
    again = KeptVectors(encoder, file)
    assert np.array_equal(again.encode(["a", "b", "a"]), expected)
    assert again.encode([]).shape == (0, 64)
    assert encoder.asked == [["a", "b"]]
    file.write_text("something else")
    with pytest.raises(UndertowError, match="no file of kept vectors"):
        KeptVectors(encoder, file)


def test_turns_of_equal_score_come_in_their_order(tmp_path: Path) -> None:
    """Sessions of one message, all alike on one day: nothing but their order tells them apart."""
    talk: dict[str, Any] = {}
    for n in range(1, 13):
        talk[f"session_{n}"] = [{**said(1, "Ann", "the same words"), "dia_id": f"D{n}:1"}]
        talk[f"session_{n}_date_time"] = "1:56 pm on 8 May, 2023"
    asked = [question("the same words", 4, "D5:1"), question("the same words", 4, "D12:1")]
    told = evaluated(written(tmp_path, conversation(conversation=talk, qa=asked)), tmp_path / "out").doc
    assert [told[f"evidence_recall_at_{k}"] for k in (5, 10, 20)] == [0.5, 0.5, 1.0]
    assert told["mrr"] == round((1 / 5 + 1 / 12) / 2, 4)


def test_some_samples_alone(tmp_path: Path) -> None:
    path = written(tmp_path, conversation(), conversation(sample_id="other"))
    told = evaluated(path, tmp_path / "out", "--sample", "other").doc
    assert (told["samples"], told["questions"]) == (1, 3)
    refused = evaluated(path, tmp_path / "out", "--sample", "nobody")
    assert refused.code == 2 and "made-up, other" in refused.err


def test_longmemeval_counts_answer_sessions_and_leaves_abstention_out(tmp_path: Path) -> None:
    path = written(tmp_path, haystack(), haystack("q2_abs"))
    told = evaluated(path, tmp_path / "out", benchmark="longmemeval").doc
    assert (told["questions"], told["left_out"]) == (1, 1)
    assert (told["evidence_recall_at_5"], told["mrr"]) == (1.0, 1.0)
    # the same question of the same messages
    assert told["without_answer"] == {"questions": 1, "auroc_of_best_score": 0.5}
    assert list(told["by_category"]) == ["single-session-user"]
    sample = next(load(path, "longmemeval", 1000))
    assert sample.holds == (("s1",), ("s2",), ("s2",))


def test_the_other_benchmarks_file_is_refused_by_name(tmp_path: Path) -> None:
    refused = evaluated(written(tmp_path, haystack()), tmp_path / "out")
    assert refused.code == 3
    assert "is of the format longmemeval, not locomo" in refused.err
    assert "undertow eval longmemeval" in refused.err


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"qa": None}, "qa"),
        ({"qa": [question("?", 9, "D1:1")]}, "qa[0].category"),
        ({"qa": [{"category": 4, "evidence": []}]}, "qa[0].question"),
        ({"qa": [{**question("?", 4), "evidence": "D1:1"}]}, "qa[0].evidence"),
        ({"qa": ["?"]}, "qa[0].category"),
        ({"qa": [{**question("?", 4), "answer": None}]}, "qa[0].answer"),
        ({"qa": [{**question("?", 4), "answer": True}]}, "qa[0].answer"),
        ({"conversation": {"session_1": [{"text": "no speaker"}]}}, "speaker"),
    ],
)
def test_a_wrong_file_is_refused_with_place_field_and_cure(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    path = written(tmp_path, conversation(sample_id="good"), conversation(**changes))
    with pytest.raises(InputError) as refused:
        list(load(path, "locomo", 1000))
    assert f"{path}:2: field" in str(refused.value)
    assert field in str(refused.value)
    assert refused.value.problem.cure


@pytest.mark.parametrize(
    ("benchmark", "samples", "field"),
    [
        ("locomo", [conversation(), conversation(sample_id="other"), conversation(qa=[])], "sample_id"),
        ("longmemeval", [haystack("q1"), haystack("q2"), haystack("q1", answer=3)], "question_id"),
    ],
)
def test_an_id_that_stands_twice_is_refused(
    tmp_path: Path, benchmark: Benchmark, samples: list[dict[str, Any]], field: str
) -> None:
    """Both would go into one tenant, and its questions be asked twice."""
    path = written(tmp_path, *samples)
    with pytest.raises(InputError) as refused:
        list(load(path, benchmark, 1000))
    told = str(refused.value)
    assert f"{path}:3: field '{field}'" in told and "stands twice, the first time in sample 1" in told
    assert "an id of its own" in refused.value.problem.cure


def test_no_file_and_a_cut_off_file(tmp_path: Path) -> None:
    assert evaluated(tmp_path / "none.json", tmp_path / "out").code == 3
    path = written(tmp_path, conversation())
    path.write_text(path.read_text()[:-20])
    cut = evaluated(path, tmp_path / "out")
    assert cut.code == 3 and "cannot be read" in cut.err


def observed(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"session_1_observation": {"Ann": [list(pair) for pair in pairs]}}


def test_evidence_in_a_budget_of_tokens_beside_turns_alone(tmp_path: Path) -> None:
    """The message with the answer is too long for the budget; what people observed of it is not."""
    talked = talk([*["Nice to hear that."] * 8, "Well, " * 200 + "I moved to Lisbon.", "Good."], "Ann", "Ben")
    asked = [{**question("Where did Ann move, to which town?", 4, "D1:9"), "answer": "Lisbon"}]
    facts = observed(("Ann moved to Lisbon.", "D1:9"))
    path = written(tmp_path, conversation(conversation=talked, qa=asked, observation=facts))
    options = ("--tokens", "120,2000", "--policy", "eager", "--gold-memories")
    told = evaluated(path, tmp_path / "out", *options).doc
    by_row = {(row["system"], row["budget"]): row for row in told["systems"]}
    shares = {row: of["evidence"]["all"] for row, of in by_row.items()}
    assert shares == {
        ("turns-only", 120): 0.0,
        ("turns-only", 2000): 1.0,
        ("naive-rag-hybrid", 120): 0.0,
        ("naive-rag-hybrid", 2000): 1.0,
        ("eager", 120): 1.0,
        ("eager", 2000): 1.0,
    }
    assert by_row["eager", 120]["in_turns"] == 0.0
    assert by_row["eager", 120]["difference"]["all"]["verdict"] == UNCLEAR, "one question tells nothing"
    assert told["built"]["eager"]["facts"] == 1
    lines = lines_of(tmp_path / "out" / "evidence-in-budget.jsonl")
    assert len(lines) == 6 and lines[0]["prompt_tokens"] < lines[1]["prompt_tokens"]


@pytest.mark.parametrize(("policy", "kind"), [("a-mem", "facts"), ("memory-os", "episodes")])
def test_the_systems_of_other_papers_are_measured_the_same_way(
    policy: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_SHORT_TERM_PAGES", "1")
    talked = talk(["I moved to Lisbon.", "Good.", "My cat is old.", "Oh."], "Ann", "Ben")
    asked = [{**question("Where did Ann move?", 4, "D1:1"), "answer": "Lisbon"}]
    facts = observed(("Ann moved to Lisbon.", "D1:1"))
    path = written(tmp_path, conversation(conversation=talked, qa=asked, observation=facts))
    options = ("--tokens", "200", "--policy", policy, "--gold-memories")
    told = evaluated(path, tmp_path / "out", *options).doc
    shares = {row["system"]: row["evidence"]["all"] for row in told["systems"]}
    assert shares[policy] == 1.0 and told["built"][policy][kind] > 0


def test_a_memory_tells_of_evidence_by_its_words(tmp_path: Path) -> None:
    sample = only(written(tmp_path, conversation()))
    telling, asked = Telling(sample), sample.questions[0]
    named = replace(asked, answer="the pottery course")
    assert telling.tells("Ann takes a pottery course", "D1:1", named)
    assert not telling.tells("Ann signed up for a course", "D1:1", named), "of what is asked a word lacks"
    dated = replace(asked, answer="8 May 2023")
    assert telling.tells("Ann signed up on 8 May 2023", "D1:1", dated), "a date is worked out"
    assert not telling.tells("Ann has a kiln", "D1:1", dated)
    assert not telling.tells("Ann takes a pottery course", "nowhere", named)


def test_differences_are_told_with_their_interval() -> None:
    assert difference([0.5, 0.4, 0.6, 0.5, 0.5])["verdict"] == "better"
    assert difference([-0.5, -0.4, -0.6, -0.5, -0.5])["verdict"] == "worse"
    wide = difference([1.0, -1.0, 1.0, -1.0, 0.5])
    assert wide["low"] < 0 < wide["high"] and wide["verdict"] == UNCLEAR
    assert difference([0.2, 0.4] * 50) == difference([0.2, 0.4] * 50), "drawn alike each time"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gold-memories",), "--gold-memories to --tokens"),
        (("--tokens", "many"), "600,1200,2400"),
        (("--tokens", "0"), "600,1200,2400"),
        (("--tokens", "600", "--llm", "http://x"), "--llm has no meaning with --evidence-only"),
    ],
)
def test_wrong_uses_of_a_budget_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    refused = evaluated(written(tmp_path, conversation()), tmp_path / "out", *options)
    assert refused.code == 2 and message in refused.err


def test_turns_alone_need_a_budget(tmp_path: Path) -> None:
    with pytest.raises(UndertowError, match="UNDERTOW_ANSWER_TOKENS"):
        SYSTEMS["turns-only"](means(tmp_path))


def test_the_date_of_a_fact_is_checked_against_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions, two months apart; a reply that names the other session's turn is set right."""
    later = talk(["The kitchen oven is broken.", "Call the fitter, Lena."], "Ann", "Ben")["session_1"]
    both = talk(["I booked a flight to Rome.", "Nice, take the red suitcase."], "Ann", "Ben")
    both |= {"session_2_date_time": "1:00 pm on 30 December, 2024"}
    both["session_2"] = [{**m, "dia_id": m["dia_id"].replace("D1", "D2")} for m in later]
    facts = observed(
        ("Ann flies to Rome; the flight is booked.", "D1:1"), ("Ann's kitchen oven is broken.", "D2:1")
    )
    path = written(tmp_path, conversation(conversation=both, qa=[], observation=facts))
    monkeypatch.setattr(fact_dates, "SHOWN", 4)
    for others in get_args(fact_dates.Others):
        told = fact_dates.shares(list(load(path, "locomo", 1 << 20)), others)
        assert {of["facts"] for of in told.values()} == {2}
        assert {of["as checked"] for of in told.values()} == {1.0}
        assert told["one of two turns"]["as named"] == 0.5
        assert told["all turns"]["as named"] == 0.5


def test_evidence_in_a_budget_of_the_memories_of_a_run_over_some_samples(tmp_path: Path) -> None:
    texts = (f"the wooden boat and its varnish, day {n}" for n in range(1, 15))
    path = written(tmp_path, conversation(conversation=talk(texts)), conversation(sample_id="other"))
    fixed = ("eval", "locomo", "--data", path, "--json", "--theta-sim", "0.4", "--theta-count", "3")
    some, out = ("--sample", "made-up"), tmp_path / "out"
    with spawn_server() as url:
        assert run(*fixed, *some, "--out", out, "--llm", url, "--judge-llm", "off").code == 0
    model = json.loads((out / "run.json").read_text())["llm_model"]
    of = ("--memories-of", out, "--llm-model", model, "--evidence-only", "--tokens", "200")
    told = run(*fixed, *some, *of, "--out", tmp_path / "evidence").doc
    assert [system["system"] for system in told["systems"]] == ["turns-only", "naive-rag-hybrid", "recmem"]
    refused = run(*fixed, *of, "--out", tmp_path / "evidence")
    assert refused.code == 1 and "only ['made-up'], now None" in refused.err
