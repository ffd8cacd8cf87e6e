"""Stores that earlier code wrote open, answer as that code did, and go on.

`data/store-COMMIT.tar.xz` holds a store made by that commit, one for each earlier version of the format:
several tenants under the policies of that day, with updated, deleted and erased memories, turns that wait for
an LLM, and (but in that of version 2) jobs without a usable reply. Beside it lie what that code answered
(`expected.json`, `drained.json`), its exports, and the programs that made them. `data/service-0883604.tar.xz`
has the key file and the state of the first service.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.store_info import FORMAT_VERSION, READABLE_VERSIONS, read_info

from ...support.cli import run
from ...support.faults.harness import Driver, assert_same_state, end_state
from ...support.service.http import at, serving

DATA = Path(__file__).parent / "data"
# the commit that wrote a store, by the version of its format
COMMITS = {1: "08486c1", 2: "5d585d5", 3: "304e8d3"}
THRESHOLDS = {"theta_sim": "0.5", "theta_count": "3"}
# what has changed since in what is told: grounds of decisions, and what exports are checked by
TOLD_OTHERWISE = {"thresholds", "links", "fingerprint", "records"}


@pytest.fixture(params=COMMITS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def folder(tmp_path: Path, version: int) -> Path:
    return unpacked(f"store-{COMMITS[version]}", tmp_path)


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name, value in {**THRESHOLDS, "device": "cpu"}.items():
        monkeypatch.setenv(f"UNDERTOW_{name.upper()}", value)
    if "version" in request.fixturenames and request.getfixturevalue("version") == 3:
        for name in ("SALIENCE_TURNS", "QUIET_SHARE"):  # by its defaults, which tests/conftest.py takes away
            monkeypatch.delenv(f"UNDERTOW_{name}", raising=False)


def rounded(value: Any) -> Any:
    """The same document with floats to nine digits: logarithms differ in the last bit between libraries."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: rounded(held) for key, held in value.items()}
    return [rounded(held) for held in value] if isinstance(value, list | tuple) else value


def as_then(now: Any, then: Any) -> Any:
    """Of a report, what was told then already."""
    if isinstance(now, dict) and isinstance(then, dict):
        return {key: as_then(held, then[key]) for key, held in now.items() if key in then}
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        return [as_then(*pair) for pair in zip(now, then, strict=True)]
    return now


def without(names: set[str], value: Any) -> Any:
    if isinstance(value, list):
        return [without(names, held) for held in value]
    if isinstance(value, dict):
        return {key: without(names, held) for key, held in value.items() if key not in names}
    return value


def assert_told(now: list[Any], then: list[Any], words: object, *otherwise: str) -> None:
    names = TOLD_OTHERWISE | {*otherwise}
    now, then = (without(names, rounded(told)) for told in (now, then))
    assert as_then(now, then) == then, words


def shared_hits(*answers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The hits that all answers have, without scores: since then they rank otherwise."""
    found = [{hit["id"]: {**hit, "score": 0} for hit in hits} for hits in answers]
    common = set.intersection(*(set(hits) for hits in found))
    assert len({len(hits) for hits in found}) == 1 and len(common) >= 0.7 * len(found[0])
    return [[hits[id] for id in sorted(common)] for hits in found]


def answers(store: Path, words: str) -> list[dict[str, Any]]:
    """What a command tells, as JSON lines. A search's query is all words after its name."""
    command, *tenant = words.split(" --tenant ")
    name, *rest = command.split(" ", 1)
    args = rest if name == "search" else " ".join(rest).split()
    more = {"search": ("--encoder", "hash:64", "--json"), "export": ()}.get(name, ("--json",))
    done = run(name, *args, *(("--tenant", *tenant) if tenant else ()), *more, "--store", store)
    assert done.code == 0, (words, done.err)
    return done.lines


def test_every_reading_command_answers_as_before(folder: Path, version: int) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    assert len(expected) > 35
    for words, then in expected.items():
        now = answers(folder / "store", words)
        if words.startswith("search"):
            now, then = shared_hits(now, then)
        if words.startswith("export") and version == 1:  # its exports had neither a beginning nor an end
            now = [line for line in now if line["kind"] in {record["kind"] for record in then}]
        assert_told(now, then, words, "relevant", "relevant_scores", "reason", "usage")
    assert read_info(folder / "store").format_version == version, "a reader changes nothing"


def test_what_waited_is_decided_as_before(folder: Path, version: int) -> None:
    """The facts may have another wording: since version 2 their prompt asks which turns say them."""
    expected = json.loads((folder / "drained.json").read_text())
    with Engine(folder / "store", Settings(), HashingEncoder(64), llm=MockLLM(MockReplies())) as engine:
        engine.resume()
        assert engine.drain()
        episodes = [[m.id, m.kind, m.text] for m in engine.get_all("eve") if m.kind == "episode"]
        assert episodes == [memory for memory in expected["memories"] if memory[1] == "episode"]
        explained = [json.loads(json.dumps(dict(record), default=list)) for record in engine.explain("eve")]
        assert_told(explained, expected["explain"], "explain", "fact_ids", "facts", "usage", "memories")
        facts = {memory[0] for memory in expected["memories"] if memory[1] == "fact"}
        for query, hits in expected["hits"].items():
            found = [hit.id for hit in engine.search("eve", query).ranked() if hit.kind != "fact"]
            told = [hit for hit, _ in hits if hit not in facts]
            assert told and len(set(told) & set(found)) >= 0.7 * len(told)
    assert read_info(folder / "store").format_version == FORMAT_VERSION


def test_after_the_upgrade_all_goes_on(folder: Path, version: int) -> None:
    """Reindex, filters, export, import of an export of that day and of this one, erasure."""
    store, encoder = folder / "store", ("--encoder", "hash:128")
    then = answers(store, "list --kind turns --tenant ann")
    tenants = {line["tenant"] for line in answers(store, "list --kind tenants")}
    assert run("reindex", *encoder, "--store", store).code == 0
    info = read_info(store)
    assert (info.format_version, info.dim) == (FORMAT_VERSION, 128)
    assert answers(store, "list --kind turns --tenant ann") == then
    with Engine(store, Settings(), HashingEncoder(128)) as engine:
        moods = {hit.id for hit in engine.search("ann", "a bowl", where={"mood": "good"}).turns}
        exported = answers(store, "export --tenant ann")
        engine.import_("ann again", exported)
        of_then = json.loads((folder / "expected.json").read_text())["export --tenant ann"]
        if version > 1:
            engine.import_("ann of then", of_then)
        engine.erase("bob", now=True)
    assert moods and moods <= {line["id"] for line in then if line.get("metadata", {}).get("mood") == "good"}
    texts = [line["text"] for line in then]
    for name in ("ann again", *(["ann of then"] if version > 1 else [])):
        assert [line["text"] for line in answers(store, f"list --kind turns --tenant {name}")] == texts
    now = {line["tenant"] for line in answers(store, "list --kind tenants")}
    assert now == tenants - {"bob"} | {"ann again"} | ({"ann of then"} if version > 1 else set())


# of a method, whether right after it; a writer reloads between its claim and its begin
KILLS = (("_upgrade", True), ("reload", False), ("_follow", False), ("_begin", True))


@pytest.mark.rarely(version=(1, 2))
def test_an_upgrade_that_is_killed_goes_on(
    folder: Path, version: int, driver: Driver, tmp_path: Path
) -> None:
    """After the description is replaced, between a writer's claim and its begin, and after both."""
    values = {**THRESHOLDS, "encoder": "hash:64", "llm_url": None}
    task = {"task": "add_each", "settings": values, "texts": ["The kiln is warm.", "The river is high."]}
    whole = tmp_path / "whole"
    shutil.copytree(folder / "store", whole)
    before = end_state(whole)
    assert driver.run(store=whole, **task).status == 0
    expected = end_state(whole)
    for method, after in KILLS:
        store = tmp_path / f"killed-{method}-{after}"
        shutil.copytree(folder / "store", store)
        outcome = driver.run(store=store, kill={"method": method, "n": 1, "after": after}, **task)
        assert outcome.status < 0 and not outcome.last("receipts")
        assert_same_state(end_state(store), before)
        assert driver.run(store=store, **task).status == 0
        assert_same_state(end_state(store), expected)
        assert read_info(store).format_version == FORMAT_VERSION


def test_the_export_of_version_1_names_the_cure(tmp_path: Path) -> None:
    unpacked(f"store-{COMMITS[1]}", tmp_path)
    more = ("--tenant", "x", "--store", tmp_path / "store", "--encoder", "hash:64")
    done = run("import", tmp_path / "export-ann.jsonl", *more)
    assert done.code and "the beginning is missing" in done.err


def test_a_newer_store_is_refused_and_not_touched(tmp_path: Path) -> None:
    unpacked(f"store-{COMMITS[3]}", tmp_path)
    path, newer = tmp_path / "store" / "store.json", FORMAT_VERSION + 1
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": newer}))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for words in (["stats"], ["erase", "--tenant", "ann", "--yes"], ["reindex", "--encoder", "hash:32"]):
        done = run(*words, "--store", tmp_path / "store")
        assert done.code and f"version {newer}" in done.err, (words, done.err)
        assert f"{READABLE_VERSIONS[0]} to {FORMAT_VERSION}" in " ".join(done.err.split()), done.err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_first_service_s_keys_and_jobs_are_those_of_this_one(tmp_path: Path) -> None:
    unpacked("service-0883604", tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    store = tmp_path / "store"
    (tmp_path / "keys.json").rename(store / "keys.json")
    assert run("reindex", "--encoder", "hash:384", "--store", store).code == 0
    with serving(store, keep_s=3e9) as service:  # the jobs ended on 2026-11-27
        client = service.client_of(told["key"])
        for tenant, jobs in told["jobs"].items():
            found = client.get(at(tenant, "/jobs")).json()["results"]
            assert as_then(found, jobs) == jobs
        assert client.get(at("ann", "/memories"), params={"kind": "turn"}).json()["results"]
        assert service.client_of(told["revoked"]).get(at("eve", "/stats")).status_code == 401
        assert service.client_of(told["eve"]["key"]).get(at("ann", "/stats")).status_code == 403
