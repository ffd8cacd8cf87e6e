"""A store written by earlier code opens, and gives the answers that the earlier code gave.

`data/store-5d585d5.tar.xz` holds a store made by commit 5d585d5: five tenants under four policies, with
updated, deleted and erased memories, and turns that wait for an LLM. Beside it lie what that code answered
(`expected.json`, `drained.json`) and the programs that made all three.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.store_info import FORMAT_VERSION, read_info

from ...support.cli import run

DATA = Path(__file__).parent / "data"
# the commit that wrote a store, by the version of its format
COMMITS = {1: "08486c1", 2: "5d585d5", 3: "304e8d3"}


@pytest.fixture(params=COMMITS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def folder(tmp_path: Path, version: int) -> Path:
    with tarfile.open(DATA / f"store-{COMMITS[version]}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"THETA_SIM": "0.5", "THETA_COUNT": "3", "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"UNDERTOW_{name}", value)


def rounded(value: Any) -> Any:
    """The same document with floats to nine digits: logarithms differ in the last bit between libraries."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: rounded(held) for key, held in value.items()}
    return [rounded(held) for held in value] if isinstance(value, list | tuple) else value


def of_then(value: Any) -> Any:
    """Reports without what they have told since: thresholds and their grounds, and links."""
    if isinstance(value, dict):
        grounds = ("relevant", "relevant_scores", "reason", "usage") if "decision" in value else ()
        later = ("thresholds", "memories", "links", *grounds)
        return {key: of_then(held) for key, held in value.items() if key not in later}
    return [of_then(held) for held in value] if isinstance(value, list) else value


def without_facts(value: Any) -> Any:
    """Explanations without what facts hold, and without the tokens that they cost."""
    if isinstance(value, list):
        return [without_facts(held) for held in value]
    if isinstance(value, dict):
        left_out = {"fact_ids", "facts", "usage"}
        return {key: without_facts(held) for key, held in value.items() if key not in left_out}
    return value


def test_every_reading_command_answers_as_before(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    assert len(expected) > 35
    for words, lines in expected.items():
        command = words.split(" --tenant ")
        name, *rest = command[0].split(" ", 1)
        # a search's query is the words after its name; the other commands' flags are theirs
        args = rest if name == "search" else " ".join(rest).split()
        tenant = ["--tenant", command[1]] if len(command) > 1 else []
        encoder = ["--encoder", "hash:64"] if name == "search" else []
        as_json = [] if name == "export" else ["--json"]
        done = run(name, *args, *tenant, *encoder, "--store", folder / "store", *as_json)
        assert done.code == 0, (words, done.err)
        told = [json.loads(line) for line in done.out.splitlines() if line]
        if name == "search":  # which ranks otherwise since
            now, then = ({hit["id"]: {**hit, "score": 0} for hit in hits} for hits in (told, lines))
            common = now.keys() & then.keys()
            assert len(now) == len(then) and len(common) >= 0.8 * len(then), words
            told, lines = ([hits[id] for id in sorted(common)] for hits in (now, then))
        assert rounded(of_then(told)) == rounded(of_then(lines)), words


def test_what_waited_is_decided_as_before(folder: Path, version: int) -> None:
    """The first writer raises the version of the format; readers do not.

    The facts have another wording: since then their prompt asks which turns say them.
    """
    expected = json.loads((folder / "drained.json").read_text())
    assert read_info(folder / "store").format_version == version
    with Engine(folder / "store", Settings(), HashingEncoder(64), llm=MockLLM(MockReplies())) as engine:
        engine.resume()
        assert engine.drain()
        episodes = [m for m in engine.get_all("eve") if m.kind == "episode"]
        assert [[m.id, m.kind, m.text] for m in episodes] == [
            memory for memory in expected["memories"] if memory[1] == "episode"
        ]
        explained = [dict(record) for record in engine.explain("eve")]
        assert without_facts(rounded(of_then(explained))) == without_facts(rounded(expected["explain"]))
        facts = {memory[0] for memory in expected["memories"] if memory[1] == "fact"}
        for query, hits in expected["hits"].items():
            found = [hit.id for hit in engine.search("eve", query).ranked() if hit.kind != "fact"]
            told = [hit for hit, _ in hits if hit not in facts]
            assert told and set(told) <= set(found)
    assert read_info(folder / "store").format_version == FORMAT_VERSION
