"""`kill -9` in the middle of an evaluation: the next run goes on, and ends with the same lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.server import spawn_server

from ...support.cli import run
from ...support.cluster.processes import Command
from ...support.eval import conversation, kept_lines, lines_of, question, talk, written
from ...support.llm_servers import server_stats

QUESTIONS = 12
TOPICS = ("the wooden boat and its varnish", "the marathon along the estuary", "the wedding in lisbon")
TIMES = {"retrieval_s", "llm_s"}
# few at a time, so that a kill finds some done and some not
SLOW = {"UNDERTOW_LLM_IN_FLIGHT": "2", "UNDERTOW_LLM_PATIENCE_S": "60"}


def command(path: Path, out: Path, url: str) -> list[str]:
    options = ["--theta-sim", "0.4", "--theta-count", "3", "--repeats", "2", "--json"]
    return ["eval", "locomo", "--data", str(path), "--llm", url, "--out", str(out), *options]


def killed(folder: Path, words: list[str], when: Callable[[], bool]) -> None:
    """Run until something has come about, and no further."""
    with Command(folder, *words, **SLOW) as running:
        running.wait_until(when)
        assert when(), "it was over before it was to be killed"


def finished(words: list[str]) -> dict[str, Any]:
    done = run(*words, env=SLOW)
    assert done.code == 0, done.err
    return {name: value for name, value in done.doc.items() if name != "latency_on_this_machine"}


def without_times(file: Path) -> list[dict[str, Any]]:
    """The lines without what a clock has said."""
    kept = kept_lines(file)
    return [{field: value for field, value in line.items() if field not in TIMES} for line in kept]


def count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.rarely
@pytest.mark.timeout(1200)  # starting processes took 5 minutes on two cores under a load of 9
def test_kills_change_nothing(tmp_path: Path) -> None:
    asked = [question(f"What of {TOPICS[n % 3]} on day {n}?", 4, f"D1:{n}") for n in range(QUESTIONS)]
    talked = talk((f"{TOPICS[n // 2 % 3]}, day {n}" for n in range(36)), "Ann", "Ben")
    path = written(tmp_path, conversation(conversation=talked, qa=asked))
    with spawn_server(latency_ms=25, refusal_rate=0.3, undecided_rate=0.6) as url:
        whole = finished(command(path, tmp_path / "whole", url))
        out = tmp_path / "killed"
        words = command(path, out, url)
        before = server_stats(url)["calls"].get("merge", 0)
        killed(tmp_path / "run", words, lambda: server_stats(url)["calls"].get("merge", 0) >= before + 3)
        killed(tmp_path / "run", words, lambda: count(out / "answers.jsonl") >= 5)
        answered = count(out / "answers.jsonl")
        with (out / "answers.jsonl").open("ab") as file:
            file.write(b'{"question_id":"made-up:11","run":1,"answer":"torn')
        killed(tmp_path / "run", words, lambda: count(out / "verdicts.jsonl") >= 5)
        assert 5 <= answered < 2 * QUESTIONS and not (out / "summary.json").exists()
        before = server_stats(url)["calls"]
        assert finished(words) == whole
        after = server_stats(url)["calls"]
    for name in ("answers.jsonl", "verdicts.jsonl"):
        assert without_times(out / name) == without_times(tmp_path / "whole" / name)
    assert len(lines_of(out / "answers.jsonl")) == 2 * QUESTIONS
    assert {line["verdict"] for line in lines_of(out / "verdicts.jsonl")} == {"right", "wrong", "unjudged"}
    assert after["merge"] == before["merge"], "the last run had nothing left to construct"
