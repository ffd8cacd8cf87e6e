"""The command line on a cluster: ingest with --ray, the reading commands on a root, `undertow cluster`."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray")

from undertow.engine.cluster.shard_map import ShardMap, load, publish
from undertow.engine.storage.location import Location

from ..support.cli import SUMMARY_KEYS, THETAS, Ran, contents, conversation, listed, run, tenants, write_log
from ..support.cluster.processes import CLUSTER_ENV, Command, ray_processes, strike

pytestmark = pytest.mark.usefixtures("ray_address")

TURNS = 18
TENANTS = ("ada", "bo", "cy", "dee")


@pytest.fixture(scope="module", autouse=True)
def cluster_env() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CLUSTER_ENV.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three logs; `ada` and `bo` are in two of them."""
    folder = tmp_path_factory.mktemp("logs")
    said = {tenant: conversation(tenant, TURNS) for tenant in TENANTS}
    half = TURNS // 2
    write_log(folder / "a.jsonl", [*said["ada"][:half], *said["cy"]])
    pairs = zip(said["bo"][:half], said["dee"][:half], strict=True)
    write_log(folder / "b.jsonl", [line for pair in pairs for line in pair])
    write_log(folder / "c.jsonl", [*said["dee"][half:], *said["ada"][half:], *said["bo"][half:]])
    return folder


@pytest.fixture(scope="module")
def one_process(
    tmp_path_factory: pytest.TempPathFactory, logs: Path, server: str
) -> tuple[Path, dict[str, Any]]:
    store = tmp_path_factory.mktemp("plain") / "store"
    done = run("ingest", logs, "--store", store, "--llm", server, *THETAS, "--json")
    assert done.code == 0, done.err
    assert done.doc["merges"] and done.doc["facts"]
    return store, done.doc


@pytest.fixture(scope="module")
def expected(one_process: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """What one process makes of the logs, whole."""
    return everything(one_process[0])


@dataclass(frozen=True)
class Job:
    """A bulk ingest that was killed at and went on, and its last command. Its root's shards run on."""

    root: Path
    killed: Counter[str]
    last: Command


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, logs: Path, server: str, ray_address: str) -> Job:
    """Into two shards. Its driver is killed, then of the same command a worker, a shard and a worker."""
    folder = tmp_path_factory.mktemp("cluster")
    root = folder / "root"
    publish(Location.of(root), evenly_split())
    command = ["ingest", str(logs), "--store", str(root), "--ray", ray_address, "--shards", "2"]
    command += ["--llm", server, *THETAS, "--json"]
    killed: Counter[str] = Counter()
    with Command(folder / "first", *command) as first:
        first.wait_until((root / "jobs").exists)
        killed["driver"] += first.running
    chance = random.Random(11)
    with Command(folder / "second", *command) as second:
        second.wait_until(_workers)
        for kind in ("worker", "shard", "worker"):
            killed[kind] += strike(_workers() if kind == "worker" else _shards(root), chance)
        second.process.wait(timeout=240)
    return Job(root, killed, second)


@pytest.fixture(scope="module")
def built(job: Job) -> Path:
    """A root of two shards, which run on; not to be changed."""
    job.last.result()
    return job.root


def evenly_split(shards: int = 2) -> ShardMap:
    """A map of so many shards, with a hash key by which each of two shards has half of the tenants."""
    names = ("s0001", "s0002")
    maps = (ShardMap(1, names, hash_key=f"{n:064x}") for n in count())
    found = next(m for m in maps if m.owners(TENANTS).count("s0001") == len(TENANTS) // 2)
    return replace(found, shards=names[:shards])


def everything(store: Path, names: Sequence[str] = TENANTS) -> dict[str, Any]:
    return {name: contents(store, name) for name in names}


def test_a_job_whose_driver_shards_and_workers_are_killed_is_completed_by_the_same_command(
    job: Job, built: Path, one_process: tuple[Path, dict[str, Any]], expected: dict[str, Any]
) -> None:
    """Shards outlive a driver; the next one finds them. More rounds of it: soak/test_cluster_kills.py."""
    assert job.killed["driver"] and job.killed["worker"] and job.killed["shard"], job.killed
    done = job.last.result()
    assert list(done) == [*SUMMARY_KEYS, "errors", "warnings", "parked_turns", "files", "run"]
    timed = ("elapsed_s", "turns_per_s", "cached_prompt_tokens", "run")
    figures = {k: v for k, v in one_process[1].items() if k not in timed}
    assert {k: done[k] for k in figures} == figures
    turns = len(TENANTS) * TURNS
    assert done["run"]["read_turns"] == done["run"]["new_turns"] + done["run"]["known_turns"] == turns
    assert (done["parked_turns"], done["files"]) == (0, [])
    assert "A worker died" not in job.last.err
    assert everything(built) == expected


def test_tenants_are_spread_over_the_shards(built: Path) -> None:
    assert [len(tenants(shard)) for shard in (built / "shards").iterdir()] == [2, 2]


def test_reading_commands_take_a_root_for_a_store(
    built: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    store, _ = one_process
    episode = listed(store, "episodes", "bo")[0]["id"]
    for args in (
        ("list", "--kind", "tenants"),
        ("search", "boat planks varnish", "--tenant", "ada", "-k", "5"),
        ("history", episode),
        ("jobs",),
    ):
        on_shards = run(*args, "--store", built, "--json")
        assert (on_shards.code, on_shards.lines) == (0, run(*args, "--store", store, "--json").lines), args
    for tenant in ((), ("--tenant", "dee")):
        figures = [run("stats", *tenant, "--store", where, "--json").doc for where in (built, store)]
        for used in (part for some in figures for part in (some, *some["usage"].values())):
            used.pop("cached_prompt_tokens")
        assert figures[0] == figures[1]
    exports = [run("export", "--tenant", "cy", "--store", where).lines for where in (built, store)]
    assert sorted(map(json.dumps, exports[0])) == sorted(map(json.dumps, exports[1]))
    assert run("list", "--kind", "turns", "--tenant", "nobody", "--store", built).code == 1
    assert run("history", "0" * 32, "--store", built).code == 1


def test_ask_on_a_root_reads_and_writes_nothing(built: Path, server: str) -> None:
    asked = run("ask", "what about the boat?", "--tenant", "ada", "--store", built, "--llm", server, "--json")
    assert (asked.code, bool(asked.doc["answer"])) == (0, True)
    assert "cost of this call is not recorded" in asked.err


def test_the_same_logs_again_change_nothing(
    built: Path, logs: Path, server: str, ray_address: str, expected: dict[str, Any]
) -> None:
    where = ("--store", built, "--ray", ray_address)
    for more in ((), ("--resume",)):
        done = run("ingest", logs, *where, "--llm", server, *THETAS, "--json", *more)
        assert (done.code, done.doc["turns"], done.doc["turns_per_s"]) == (0, len(TENANTS) * TURNS, 0)
    assert everything(built) == expected


def _shards(root: Path) -> list[psutil.Process]:
    """This root's: others run beside them."""
    state = run("cluster", "status", "--store", root, "--ray", "auto", "--json").doc
    return [psutil.Process(shard["pid"]) for shard in state["shards"].values() if "pid" in shard]


def _workers() -> list[psutil.Process]:
    return ray_processes(os.getpid(), "worker")


def test_shards_are_added_and_removed(
    tmp_path: Path, logs: Path, server: str, ray_address: str, expected: dict[str, Any]
) -> None:
    """And what else is done to one root: files with problems, deleting, erasing, embedding anew."""
    root = Root(tmp_path / "root", ray_address, server)
    publish(Location.of(root.path), evenly_split(1))
    _ingest_with_problems(tmp_path / "bad.jsonl", logs, root)
    assert root.states() == {"s0001": "serving"}
    more = root.run("cluster", "move", "--shards", "2")
    assert more.code == 0, more.err
    assert more.doc["shards"] == ["s0001", "s0002"]
    assert more.doc["moved_tenants"] == len(tenants(root.path / "shards" / "s0002")) >= 2
    assert everything(root.path) == expected
    _erase_and_delete(root)
    _change_policy(root)
    _flush(root)
    less = root.run("cluster", "move", "--shards", "1")
    assert (less.code, less.doc["shards"]) == (0, ["s0001"])
    nothing = root.run("cluster", "move")
    assert (nothing.code, nothing.doc) == (0, {**less.doc, "moved_tenants": 0, "moved_rows": 0})
    reindex = ("reindex", *root.where, "--encoder", "hash:128")
    running = run(*reindex)
    assert (running.code, "drain --stop" in running.err) == (2, True)
    replayed = root.run("jobs", "--replay")
    assert (replayed.code, replayed.lines, "0 parked jobs" in replayed.err) == (0, [], True)
    stopped = root.run("cluster", "drain", "--stop")
    assert (stopped.code, stopped.doc["settled"]) == (0, True)
    assert set(root.states().values()) == {"not running"}
    assert run(*reindex).code == 0
    rest = ("ada", "bo")
    assert everything(root.path, rest) == {tenant: expected[tenant] for tenant in rest}


class Root:
    """A cluster's root, and commands on its running shards."""

    def __init__(self, path: Path, ray_address: str, server: str) -> None:
        self.path = path
        self.where = ("--store", path, "--ray", ray_address)
        self._llm = ("--llm", server, "--json")

    def run(self, *command: str | Path) -> Ran:
        return run(*command, *self.where, *self._llm)

    def states(self) -> dict[str, str]:
        shards = run("cluster", "status", *self.where, "--json").doc["shards"]
        return {shard: state["state"] for shard, state in shards.items()}


def _ingest_with_problems(bad: Path, logs: Path, root: Root) -> None:
    """The logs, and one whose problems are reported one by one."""
    write_log(bad, ["{broken", *conversation("eve", 2), "[]"])
    done = root.run("ingest", bad, logs, "--shards", "1", *THETAS)
    assert (done.code, done.doc["errors"], done.doc["turns"]) == (3, 2, 2 + len(TENANTS) * TURNS)
    (told,) = done.doc["files"]
    assert (told["file"], told["turns"], told["errors"], told["warnings"]) == (str(bad), 2, 2, 0)
    assert told["first"][0].startswith(f"{bad}:1: is not JSON")
    assert f"{bad}:4: a line must be a JSON object" in done.err


def _erase_and_delete(root: Root) -> None:
    run("keys", "create", "--store", root.path, "--tenant", "cy", "--tenant", "dee", "--scope", "read")
    erased = run("erase", "--tenant", "cy", *root.where, "--now", "--yes", "--json")
    assert (erased.code, erased.doc["purged"], erased.doc["turns_removed"]) == (0, True, TURNS), erased.err
    assert [key["tenants"] for key in run("keys", "list", "--store", root.path, "--json").lines] == [["dee"]]
    audited = [json.loads(line) for line in (root.path / "audit.jsonl").read_text().splitlines()][2:]
    assert [(line["act"], line["outcome"]) for line in audited] == [("erase", "begun"), ("erase", "done")]
    assert {line["tenant_key"] for line in audited} == {load(Location.of(root.path)).tenant_key("cy")}
    assert run("list", "--kind", "turns", "--tenant", "cy", "--store", root.path).code == 1
    fact = listed(root.path, "facts", "dee")[0]
    updated = root.run("update", fact["id"], "Dee sold the boat.")
    assert (updated.code, updated.doc["id"], updated.doc["settled"]) == (0, fact["id"], True), updated.err
    assert run("get", fact["id"], "--store", root.path, "--json").doc["text"] == "Dee sold the boat."
    turn = listed(root.path, "turns", "dee")[0]
    refused = root.run("delete", turn["id"], "--tenant", "ada")
    assert (refused.code, "no memory of 'ada'" in refused.err) == (1, True)
    deleted = root.run("delete", turn["id"])
    assert (deleted.code, deleted.doc["kind"], deleted.doc["settled"]) == (0, "turn", True), deleted.err
    left = [t["id"] for t in listed(root.path, "turns", "dee")]
    assert turn["id"] not in left and len(left) == TURNS - 1


def _change_policy(root: Root) -> None:
    """Once the tenant has reworded a fact by hand, which blocks the change."""
    fact = listed(root.path, "facts", "dee")[-1]
    assert root.run("update", fact["id"], "Dee sails again.").code == 0
    read = ("policy", "--tenant", "dee", "--store", root.path, "--json")
    former = run(*read).doc
    assert (former["policy"], former["generation"]) == ("recmem", 1)
    refused = root.run("policy", "eager", "--tenant", "dee")
    assert (refused.code, refused.out, "reworded or deleted" in refused.err) == (1, "", True), refused.err
    assert run(*read).doc == former
    changed = root.run("policy", "eager", "--tenant", "dee", "--drop-edits")
    assert changed.code == 0, changed.err
    assert changed.doc == {"tenant": "dee", "policy": "eager", "generation": 2, "change": None}
    assert run(*read).doc == changed.doc, "it is stored with the shard that has the tenant"
    assert {fact["generation"] for fact in listed(root.path, "facts", "dee")} == {2}


def _flush(root: Root) -> None:
    """A tenant whose two turns fill no window, beside tenants whose policies wait for nothing."""
    changed = root.run("policy", "nemori", "--tenant", "eve")
    assert (changed.code, changed.doc["policy"]) == (0, "nemori"), changed.err
    assert listed(root.path, "episodes", "eve") == []
    refused = run("flush", "--store", root.path)
    assert (refused.code, refused.out, "--ray" in refused.err) == (2, "", True)
    # `cy` was erased, `eve` is there
    for command, flushes in ((("flush", "--tenant", "eve"), 1), (("flush",), len(TENANTS))):
        flushed = root.run(*command)
        assert flushed.code == 0, flushed.err
        assert flushed.doc == {"tenants": flushes, "settled": True}
        assert {seq for told in listed(root.path, "episodes", "eve") for seq in told["source_seqs"]} == {0, 1}


def test_status_from_storage_alone(built: Path) -> None:
    state = run("cluster", "status", "--store", built, "--json").doc
    assert (state["map_version"], state["moving_from"]) == (1, None)
    assert list(state["shards"]) == ["s0001", "s0002"]
    assert sum(s["turns"] for s in state["shards"].values()) == len(TENANTS) * TURNS
    assert "s0002" in run("cluster", "status", "--store", built).out


def test_wrong_usage_is_exit_2(
    tmp_path: Path, logs: Path, built: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    there, new = ("--store", built), ("--store", tmp_path / "s")
    for args in (
        ("ingest", logs, *there, "--llm", "off"),
        ("ingest", logs, *new, "--shards", "2"),
        ("ingest", logs, *new, "--ray", "local"),
        ("ingest", logs, "--store", one_process[0], "--ray", "local", "--shards", "2"),
        ("ingest", logs, *there, "--ray", "local", "--trace", tmp_path / "t.json"),
        ("delete", "0" * 32, *there),
        ("update", "0" * 32, "x", *there),
        ("erase", "--tenant", "ada", *there, "--yes"),
        ("jobs", "--replay", *there, "--llm", "http://127.0.0.1:9/v1"),
        ("jobs", "--ray", "local", *there),
        ("reindex", "--encoder", "hash:128", *there),
    ):
        done = run(*args)
        assert (done.code, done.out) == (2, ""), args
        assert done.err.strip()
    assert not (tmp_path / "s").exists()
    other = run("ingest", logs, "--store", built, "--ray", "local", "--shards", "3", "--llm", "off")
    assert (other.code, "has 2 shards" in other.err) == (1, True)
