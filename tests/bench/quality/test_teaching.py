"""`undertow eval --teach`: questions that HiMem's notes do not cover revise them, once, whatever happens."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.quality.side_by_side import read
from undertow.bench.quality.systems.engine import EngineSystem

from ...support.cli import Ran, run
from ...support.eval import conversation, kept_lines, means, only, written
from ...support.llm_servers import completion, odd_server

QUESTIONS = [
    "Which course did Ann sign up for, the pottery course?",
    "What do canoes, chess and the lighthouse have in common?",
    "Nothing was noted for this one?",
    "Where is the zeppelin?",
]


class Model:
    """Finds that a note has an answer only where its question has written one, and that episodes have it.

    It answers rightly where it is shown a note of this question. `refuses`: the question whose operation of
    that name gets a 401; None: none.
    """

    def __init__(self, *, learns: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self.supplements: list[str] = []
        self.refuses: tuple[str, str] | None = None
        self._learns = learns

    def __call__(self, body: Any, number: int) -> tuple[int, Any]:
        shown = body["messages"][1]["content"]
        schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema")
        found = re.search(r'[Qq]uestion: "(.*?)"', shown)
        question = found[1] if found else ""
        operation = self._operation(body["messages"], schema)
        self.calls[operation] += 1
        if self.refuses == (operation, question):
            return 401, {"error": {"message": "no"}}
        has_note = f"taught: {question}" in shown
        match operation:
            case "judge":
                reply = "yes" if "learned" in shown else "no"
            case "answer":
                reply = "learned" if has_note else "unknown"
            case "sufficiency":
                enough = has_note or not self._learns or shown.startswith("Episodes:")
                reply = json.dumps({"lines": [1], "sufficient": enough})
            case "supplement":
                self.supplements.append(question)
                note = {"episodes": [1], "text": f"taught: {question}", "kind": "fact"}
                reply = json.dumps({"notes": [note]})
            case "revise":
                reply = json.dumps({"decisions": []})
            case _:
                reply = MockReplies().reply(body["messages"], schema)
        return 200, completion(reply)

    def _operation(self, messages: Any, schema: Any) -> str:
        if schema is None:
            return "judge" if "yes or no" in messages[0]["content"] else "answer"
        fields = schema["properties"]
        if "sufficient" in fields:
            return "sufficiency"
        if "decisions" in fields:
            return "revise"
        return "supplement" if "did not hold the answer" in messages[0]["content"] else "construction"


def taught(folder: Path, model: Model, *options: str, name: str = "out", **env: str) -> Ran:
    path = written(folder, conversation())
    with odd_server(model) as url:
        fixed = ("eval", "locomo", "--data", path, "--llm", url, "--out", folder / name, "--json")
        return run(*fixed, "--policy", "himem", *options, env=env)


def test_the_questions_are_asked_again_from_the_notes_that_they_have_revised(tmp_path: Path) -> None:
    model = Model()
    told = taught(tmp_path, model, "--teach").doc
    assert model.supplements == QUESTIONS, "in the order of the file"
    after = told["taught"]
    assert (told["judge"]["mean"], after["judge"]["mean"]) == (0.0, 1.0)
    assert after["judge_difference"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "verdict": "better"}
    assert after["f1_difference"]["verdict"] == "not distinguishable"
    teaching = after["teaching"]
    assert (teaching["questions"], teaching["missed"], teaching["errors"]) == (4, 4, 0)
    assert teaching["notes_after"] == teaching["notes_before"] + 4
    assert (teaching["notes_before"], teaching["notes_after"]) == (
        told["built"]["facts"],
        after["built"]["facts"],
    )
    assert {op: used["calls"] for op, used in teaching["by_operation"].items()} == {
        **{"sufficiency": 8, "answer": 4, "supplement": 4, "revise": 4}
    }
    assert (told["is_taught"], after["is_taught"]) == (False, True)
    lines = [kept_lines(tmp_path / "out" / of / "answers.jsonl") for of in (".", "taught")]
    assert [[line["answer"] for line in of] for of in lines] == [["unknown"] * 4, ["learned"] * 4]
    side_by_side = read([tmp_path / "out", tmp_path / "out" / "taught"])
    assert side_by_side["taught"]["judge_difference"] == after["judge_difference"]
    calls = model.calls.copy()
    assert taught(tmp_path, model, "--teach").doc == told
    assert model.calls == calls, "nothing is asked again, and nothing taught"


def test_what_the_notes_cover_teaches_nothing(tmp_path: Path) -> None:
    told = taught(tmp_path, Model(learns=False), "--teach").doc["taught"]
    assert told["teaching"]["missed"] == 0
    assert told["teaching"]["notes_after"] == told["teaching"]["notes_before"] > 0
    assert told["judge_difference"] == {
        "mean": 0.0,
        "low": 0.0,
        "high": 0.0,
        "verdict": "not distinguishable",
    }


def test_a_finished_run_can_be_taught_and_its_own_memories_stay(tmp_path: Path) -> None:
    """Note memory alone (table 4) learns from the episodes that its answers do not show."""
    model, notes = Model(), ("--ablation", "without-episodic")
    plain = taught(tmp_path, model, *notes).doc
    built = model.calls["construction"]
    told = taught(tmp_path, model, *notes, "--teach").doc
    after = told.pop("taught")
    assert told == plain
    assert model.supplements == QUESTIONS
    assert after["judge"]["mean"] == 1.0
    assert {
        len(line["material"]["episodes"]) for line in kept_lines(tmp_path / "out/taught/answers.jsonl")
    } == {0}
    for of, right in (("out", 0.0), ("out/taught", 1.0)):
        again = ("--memories-of", str(tmp_path / of))
        assert taught(tmp_path, model, *again, name=f"{of} again").doc["judge"]["mean"] == right
    assert model.calls["construction"] == built, "no other memories were made"


@pytest.mark.parametrize("operation", ["sufficiency", "supplement", "answer"])
def test_a_teaching_pass_that_was_stopped_teaches_nothing_twice(tmp_path: Path, operation: str) -> None:
    whole = taught(tmp_path, Model(), "--teach", name="whole").doc
    model = Model()
    assert taught(tmp_path, model).code == 0
    model.refuses = operation, QUESTIONS[2]
    assert taught(tmp_path, model, "--teach").code == 4
    assert model.supplements == QUESTIONS[:2]
    assert len(kept_lines(tmp_path / "out/taught/taught.jsonl")) == 2
    model.refuses = None
    told = taught(tmp_path, model, "--teach").doc
    assert model.supplements == QUESTIONS
    assert told["taught"]["teaching"]["missed"] == 4
    for figure in ("judge", "f1", "judge_difference", "built"):
        assert told["taught"][figure] == whole["taught"][figure]


def test_what_the_log_has_of_a_question_is_not_asked_again(tmp_path: Path) -> None:
    """A kill after the commit and before the line."""
    model = Model()
    whole = taught(tmp_path, model, "--teach").doc
    taught_lines = tmp_path / "out" / "taught" / "taught.jsonl"
    lines = taught_lines.read_bytes().splitlines(keepends=True)
    taught_lines.write_bytes(b"".join(lines[:2]))
    assert taught(tmp_path, model, "--teach").doc == whole
    assert model.supplements == QUESTIONS
    assert [line["missed"] for line in kept_lines(taught_lines)] == [True] * 4


def test_a_conversation_that_is_over_is_flushed_once(tmp_path: Path) -> None:
    """What a question teaches comes after the flush."""
    sample = only(written(tmp_path, conversation()))
    for _ in range(2):
        own = means(tmp_path / "store", policy="himem", device="cpu")
        system = EngineSystem("himem", replace(own, llm=MockLLM()))
        system.build([sample], lambda *_: None)
        log = system._engine.tenants.existing(sample.tenant)
        assert [control.kind for control in log.controls_from(0)].count("flush") == 1
        system._engine._log(sample.tenant, "used", [{"fact_ids": []}])
        system._engine.drain()
        system.close()


@pytest.mark.parametrize(
    ("options", "env", "why"),
    [
        (("--policy", "nemori"), {}, "--teach works only with --policy himem"),
        (("--policy", "himem"), {"UNDERTOW_HIMEM_SELF_EVOLUTION": "0"}, "with self-evolution"),
        (("--evidence-only",), {}, "--teach has no meaning"),
    ],
)
def test_wrong_usage(tmp_path: Path, options: tuple[str, ...], env: dict[str, str], why: str) -> None:
    llm = () if "--evidence-only" in options else ("--llm", "http://127.0.0.1:9")
    if env:
        env["UNDERTOW_POLICY"] = "himem"
    path = written(tmp_path, conversation())
    refused = run("eval", "locomo", "--data", path, "--teach", *llm, *options, env=env)
    assert refused.code == 2 and why in refused.err


def test_the_table_tells_both(tmp_path: Path) -> None:
    with odd_server(Model()) as url:
        path = written(tmp_path, conversation())
        options = ("--llm", url, "--out", tmp_path / "out", "--policy", "himem", "--teach")
        told = run("eval", "locomo", "--data", path, *options)
    assert "From the notes that the questions have revised" in told.out
    assert "judge against the notes before: +1.000 [+1.000, +1.000] better" in told.err
    assert "Of 4 questions the notes missed 4" in told.err
