"""Other memory systems: the lines they are asked by, and a peer as one of the systems that are measured."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import pytest

from undertow.bench.peers import throughput
from undertow.bench.peers.process import PeerError, PeerProcess, command_of
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.systems.base import Material, Means
from undertow.bench.quality.systems.peer import PeerSystem
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn, Usage

from ..support.eval import lines_of, means

# keeps what it is told in a file, and counts 10 tokens a call
RUNNER = """
    import json, sys
    from pathlib import Path

    kept = Path(sys.argv[1])
    print(json.dumps({"ready": "tiny " + sys.argv[2]}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        spent = {"calls": 1, "prompt_tokens": 10, "cached_prompt_tokens": 0, "completion_tokens": 2}
        spent["complaints"] = ["a reply that is no JSON"] if "garbled" in line else []
        told = {"id": asked["id"], "spent": spent}
        if asked["op"] == "add":
            text = asked["messages"][0]["content"]
            if "poison" in text and not (kept / "cured").exists():
                told["error"] = "ValueError: cannot digest this"
            elif "deadly" in text:
                print("about to end", file=sys.stderr, flush=True)
                sys.exit(3)
            else:
                with (kept / "memories").open("a") as file:
                    file.write(json.dumps([asked["tenant"], asked["date"], text]) + "\\n")
                told["result"] = None
        else:
            lines = (kept / "memories").read_text().splitlines()
            mine = [found for found in map(json.loads, lines) if found[0] == asked["tenant"]]
            told["result"] = [{"date": date, "text": text} for _, date, text in mine][: asked["count"]]
        print(json.dumps(told), flush=True)
"""


@pytest.fixture
def runner(tmp_path: Path) -> list[str]:
    path = tmp_path / "tiny_runner.py"
    path.write_text(dedent(RUNNER))
    return [sys.executable, str(path), str(tmp_path), "1.0"]


def turn(tenant: str, number: int, text: str) -> Turn:
    messages = (Message("user", text, "Ann"), Message("assistant", "I see.", "Bob"))
    return Turn(tenant, messages, f"{tenant}-{number}", "s1", f"2023-05-0{number + 1}T10:00:00")


def sample(tenant: str, *texts: str) -> Sample:
    turns = tuple(turn(tenant, n, text) for n, text in enumerate(texts))
    question = Question(f"{tenant}:0", "Where is the boat?", "single-hop", (), "in the harbour", None)
    return Sample(tenant, turns, tuple(() for _ in turns), (question,))


def peer_means(folder: Path, **changes: str) -> Means:
    given: dict[str, Any] = {"llm_url": "http://127.0.0.1:9/v1", "llm_model": "m", **changes}
    return means(folder, **given)


def system(folder: Path, runner: list[str]) -> closing[PeerSystem]:
    return closing(PeerSystem("tiny", peer_means(folder), command=runner))


def told(tmp_path: Path) -> list[str]:
    return [text for _, _, text in lines_of(tmp_path / "memories")]


def test_memories_are_the_facts_that_the_answer_is_given(tmp_path: Path, runner: list[str]) -> None:
    samples = [sample("ann", "the boat is in the harbour", "it is red"), sample("bea", "no boat here")]
    progress: list[tuple[str, int, int]] = []
    with system(tmp_path / "run", runner) as tiny:
        tiny.build(samples, lambda what, done, total: progress.append((what, done, total)))
        material = tiny.material(samples[0], samples[0].questions[0])
        assert [(m.number, m.date, m.text) for m in material.facts] == [
            (1, "1 May 2023, 10:00", "the boat is in the harbour"),
            (2, "2 May 2023, 10:00", "it is red"),
        ]
        assert material == Material(facts=material.facts)
        assert tiny.construction("ann") == {"add": Usage(2, 20, 0, 4)}
        assert tiny.construction("bea") == {"add": Usage(1, 10, 0, 2)}
    assert progress == [("turns added", n, 3) for n in (1, 2, 3)]


def test_what_was_added_is_not_added_again(tmp_path: Path, runner: list[str]) -> None:
    """A line that was cut off, by a kill, is: the turn counts once, and the record can be read ever after."""
    samples = [sample("ann", "one", "two"), sample("bea", "three")]
    record = tmp_path / "run" / "added.jsonl"
    with system(tmp_path / "run", runner) as tiny:
        tiny.build(samples[:1], lambda *_: None)
    record.write_bytes(record.read_bytes()[:-9])
    for _ in range(2):
        with system(tmp_path / "run", runner) as tiny:
            tiny.build(samples, lambda *_: None)
            assert tiny.construction("ann") == {"add": Usage(2, 20, 0, 4)}
            assert tiny.counts() == {"turns": 3, "complaints": 0}
    assert told(tmp_path) == ["one", "two", "two", "three"]


def test_a_turn_that_fails_ends_the_run_and_is_tried_again(tmp_path: Path, runner: list[str]) -> None:
    samples = [sample("ann", "one", "poison", "three")]
    with system(tmp_path / "run", runner) as tiny:
        with pytest.raises(PeerError, match=r"cannot digest this.*turn ann-1 of ann.*same command again"):
            tiny.build(samples, lambda *_: None)
        # the attempt has cost something all the same
        assert tiny.construction("ann") == {"add": Usage(2, 20, 0, 4)}
    (tmp_path / "cured").touch()
    with system(tmp_path / "run", runner) as tiny:
        tiny.build(samples, lambda *_: None)
        assert tiny.construction("ann") == {"add": Usage(4, 40, 0, 8)}
    assert told(tmp_path) == ["one", "poison", "three"]


def test_a_runner_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path, runner: list[str]) -> None:
    with (
        system(tmp_path / "run", runner) as tiny,
        pytest.raises(PeerError, match=r"tiny ended with 3(.|\n)*about to end"),
    ):
        tiny.build([sample("ann", "deadly")], lambda *_: None)


def test_a_runner_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such package')"]
    with pytest.raises(PeerError, match=r"ended with 1(.|\n)*no such package"):
        PeerProcess("tiny", command, tmp_path)


def test_errors_that_a_peer_only_logs_are_counted(tmp_path: Path, runner: list[str]) -> None:
    for _ in range(2):  # those of the first run are known to the second
        with system(tmp_path / "run", runner) as tiny:
            tiny.build([sample("ann", "garbled", "plain")], lambda *_: None)
            assert tiny.counts() == {"turns": 2, "complaints": 1}


def test_another_package_or_model_does_not_go_on_in_the_same_folder(
    tmp_path: Path, runner: list[str]
) -> None:
    folder = tmp_path / "run"
    with system(folder, runner) as tiny:
        tiny.build([sample("ann", "one")], lambda *_: None)
    with pytest.raises(PeerError, match=r"added\.jsonl was made with .*tiny 1\.0.*Name another folder"):
        PeerSystem("tiny", peer_means(folder), command=[*runner[:-1], "2.0"])
    for name, value in (("llm_model", "n"), ("encoder", "hash:128")):
        with pytest.raises(PeerError, match=rf"not with .*'{value}'.*Name another folder"):
            PeerSystem("tiny", peer_means(folder, **{name: value}), command=runner)


def test_replies_find_their_requests(tmp_path: Path, runner: list[str]) -> None:
    with PeerProcess("tiny", runner, tmp_path / "run") as peer:
        for number in range(5):
            peer.ask("add", tenant=f"t{number}", date=None, messages=[{"content": f"text {number}"}]).result()
        asked = [peer.ask("search", tenant=f"t{n}", query="?", count=1) for n in range(5)]
        assert [future.result().result[0]["text"] for future in asked] == [f"text {n}" for n in range(5)]


@pytest.mark.parametrize(
    ("python", "url", "why"),
    [
        (sys.executable, "http://a/v1,http://b/v1", "give one URL"),
        (sys.executable, None, "give one URL"),
        ("nowhere", "http://a/v1", "make setup-peers"),
    ],
)
def test_a_runner_that_cannot_be_started_names_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, url: str | None, why: str
) -> None:
    monkeypatch.setattr("undertow.bench.peers.process.PYTHON", tmp_path / python)
    with pytest.raises(PeerError, match=why):
        command_of("mem0", Settings(encoder="hash:384", llm_url=url), tmp_path)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Mock:
    compare = Mock()
    monkeypatch.setattr(throughput, "compare", compare)
    return compare


def test_what_was_measured_is_told_and_kept_in_a_folder_that_was_not_there(
    compare: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"searchable_turns_per_s": 9.0, "consolidated_turns_per_s": 8.0}
    ours = {**rates, "elapsed_s": 1.0, "cpu_s": 1.0, "llm_calls": 2}
    compare.return_value = {"trials": [], "mem0": {"turns_per_s": 1.0}, "undertow": ours}
    out = tmp_path / "not" / "there" / "x.json"
    monkeypatch.setattr(sys, "argv", ["throughput", "--out", str(out)])
    throughput.main()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text()) == compare.return_value


def test_a_peer_that_fails_ends_the_comparison_with_its_words(
    compare: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.side_effect = PeerError("mem0 ended with 1")
    monkeypatch.setattr(sys, "argv", ["throughput"])
    with pytest.raises(SystemExit, match="1"):
        throughput.main()
    assert capsys.readouterr().err == "mem0 ended with 1\n"
