"""The command line on a cluster: ingest with --ray, the reading commands on a root, `undertow cluster`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray")

from undertow.bench.mock_llm import spawn_server  # noqa: E402
from undertow.engine.cluster.shard_map import ShardMap, publish  # noqa: E402
from undertow.engine.place import Place  # noqa: E402

from .cli_harness import (  # noqa: E402
    ENV,
    PROGRAM,
    SUMMARY_KEYS,
    THETAS,
    contents,
    conversation,
    run,
    write_log,
)

pytestmark = pytest.mark.usefixtures("ray_address")

TURNS = 18
TENANTS = ("ada", "bo", "cy", "dee")
CLUSTER_ENV = {"UNDERTOW_CLUSTER_NUM_CPUS": "0.5", "UNDERTOW_CLUSTER_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def cluster_env() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CLUSTER_ENV.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawn_server(refusal_rate=0.2) as url:
        yield url


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three logs; `ada` and `bo` are in two of them."""
    folder = tmp_path_factory.mktemp("logs")
    said = {tenant: conversation(tenant, TURNS) for tenant in TENANTS}
    half = TURNS // 2
    write_log(folder / "a.jsonl", [*said["ada"][:half], *said["cy"]])
    write_log(
        folder / "b.jsonl",
        [x for pair in zip(said["bo"][:half], said["dee"][:half], strict=True) for x in pair],
    )
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
def built(
    tmp_path_factory: pytest.TempPathFactory,
    logs: Path,
    server: str,
    ray_address: str,
    one_process: tuple[Path, dict[str, Any]],
) -> Path:
    """A root of two shards, which run on; not to be changed."""
    root = tmp_path_factory.mktemp("cluster") / "root"
    publish(Place.of(root), evenly_split())
    done = run(
        "ingest",
        logs,
        "--store",
        root,
        "--ray",
        ray_address,
        "--shards",
        "2",
        "--llm",
        server,
        *THETAS,
        "--json",
    )
    assert done.code == 0, done.err
    assert list(done.doc) == [*SUMMARY_KEYS, "errors", "warnings", "parked_turns", "files"]
    timed = ("elapsed_s", "turns_per_s", "cached_prompt_tokens")
    expected = {k: v for k, v in one_process[1].items() if k not in timed}
    assert {k: done.doc[k] for k in expected} == expected
    assert (done.doc["parked_turns"], done.doc["files"]) == (0, [])
    return root


def evenly_split() -> ShardMap:
    """A map of two shards with a hash key that gives each of them half of the tenants."""
    maps = (ShardMap(1, ("s0001", "s0002"), hash_key=f"{n:064x}") for n in count())
    return next(m for m in maps if m.owners(TENANTS).count("s0001") == len(TENANTS) // 2)


def everything(store: Path) -> dict[str, Any]:
    return {tenant: contents(store, tenant) for tenant in TENANTS}


def test_memories_on_shards_are_those_of_one_process(
    built: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    store, _ = one_process
    assert everything(built) == everything(store)
    shards = list((built / "shards").iterdir())
    assert len(shards) == 2
    held = [run("list", "--kind", "tenants", "--store", shard, "--json").lines for shard in shards]
    assert [len(tenants) for tenants in held] == [2, 2]


def test_reading_commands_take_a_root_for_a_store(
    built: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    store, _ = one_process
    episode = run("list", "--store", store, "--tenant", "bo", "--kind", "episodes", "--json").lines[0]["id"]
    for args in (
        ("list", "--kind", "tenants"),
        ("search", "boat planks varnish", "--tenant", "ada", "-k", "5"),
        ("history", episode),
        ("jobs",),
    ):
        on_shards = run(*args, "--store", built, "--json")
        assert (on_shards.code, on_shards.lines) == (0, run(*args, "--store", store, "--json").lines), args
    for args in (("stats",), ("stats", "--tenant", "dee")):
        figures = [run(*args, "--store", where, "--json").doc for where in (built, store)]
        for some in figures:
            some.pop("cached_prompt_tokens")
            for used in some["usage"].values():
                used.pop("cached_prompt_tokens")
        assert figures[0] == figures[1]
    exported = [
        sorted(map(json.dumps, run("export", "--tenant", "cy", "--store", where).lines))
        for where in (built, store)
    ]
    assert exported[0] == exported[1]
    assert run("list", "--kind", "turns", "--tenant", "nobody", "--store", built).code == 1
    assert run("history", "0" * 32, "--store", built).code == 1


def test_ask_on_a_root_reads_and_writes_nothing(built: Path, server: str) -> None:
    asked = run("ask", "what about the boat?", "--tenant", "ada", "--store", built, "--llm", server, "--json")
    assert (asked.code, bool(asked.doc["answer"])) == (0, True)
    assert "cost of this call is not recorded" in asked.err


def test_the_same_logs_again_change_nothing(built: Path, logs: Path, server: str, ray_address: str) -> None:
    before = everything(built)
    for more in ((), ("--resume",)):
        done = run(
            "ingest", logs, "--store", built, "--ray", ray_address, "--llm", server, *THETAS, "--json", *more
        )
        assert (done.code, done.doc["turns"], done.doc["turns_per_s"]) == (0, len(TENANTS) * TURNS, 0)
    assert everything(built) == before


def test_files_with_problems_are_told_one_by_one(tmp_path: Path, logs: Path) -> None:
    bad = write_log(tmp_path / "bad.jsonl", ["{broken", *conversation("eve", 2), "[]"])
    done = run(
        "ingest",
        bad,
        logs / "a.jsonl",
        "--store",
        tmp_path / "root",
        "--ray",
        "local",
        "--shards",
        "1",
        "--llm",
        "off",
        "--json",
    )
    assert (done.code, done.doc["errors"], done.doc["turns"]) == (3, 2, 2 + TURNS + TURNS // 2)
    (told,) = done.doc["files"]
    assert (told["file"], told["turns"], told["errors"], told["warnings"]) == (str(bad), 2, 2, 0)
    assert told["first"][0].startswith(f"{bad}:1: is not JSON")
    assert f"{bad}:4: a line must be a JSON object" in done.err


def test_a_killed_driver_s_job_is_completed_by_the_same_command(
    tmp_path: Path, logs: Path, server: str, ray_address: str, one_process: tuple[Path, dict[str, Any]]
) -> None:
    """Its shards outlive a driver; the next one finds them."""
    root = tmp_path / "root"
    command = ["ingest", str(logs), "--store", str(root), "--ray", ray_address, "--shards", "2"]
    command += ["--llm", server, *THETAS, "--resume", "--json"]
    chance = random.Random(5)
    for _ in range(2):
        running = _start(command)
        try:
            _wait_until((root / "shards").exists)
            time.sleep(chance.uniform(0, 3))
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()
    done = run(*command)
    assert done.code == 0, done.err
    assert (done.doc["turns"], done.doc["undecided_turns"]) == (len(TENANTS) * TURNS, 0)
    assert everything(root) == everything(one_process[0])
    _end(root, ray_address, server)


def test_killed_shards_and_workers_cost_a_running_job_nothing(
    tmp_path: Path, logs: Path, server: str, ray_address: str, one_process: tuple[Path, dict[str, Any]]
) -> None:
    root = tmp_path / "root"
    command = ["ingest", str(logs), "--store", str(root), "--ray", ray_address, "--shards", "2"]
    running = _start([*command, "--llm", server, *THETAS, "--json"])
    chance = random.Random(11)
    killed: Counter[str] = Counter()
    try:
        _wait_until((root / "shards").exists)
        for kind in ("shard", "worker", "worker", "shard"):
            time.sleep(chance.uniform(0, 2))
            killed[kind] += _kill(root, kind, chance)
        out, err = running.communicate(timeout=240)
    finally:
        running.kill()
    assert running.returncode == 0, err
    assert killed["shard"], killed
    assert json.loads(out)["turns"] == len(TENANTS) * TURNS
    assert everything(root) == everything(one_process[0])
    _end(root, ray_address, server)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *command],
        env={**os.environ, **ENV, **CLUSTER_ENV},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _kill(root: Path, kind: str, chance: random.Random) -> int:
    """SIGKILL for one of this root's shards, or of the workers that read and feed; how many were there."""
    if kind == "shard":
        state = run("cluster", "status", "--store", root, "--ray", "auto", "--json").doc
        found = [s["pid"] for s in state["shards"].values() if "pid" in s]
    else:
        ours = psutil.Process().children(recursive=True)
        found = [p.pid for p in ours if p.name().startswith("ray::") and "ShardActor" not in p.name()]
    if found:
        os.kill(chance.choice(found), signal.SIGKILL)
    return bool(found)


def _end(root: Path, ray_address: str, server: str) -> None:
    """Everything is decided; end the shards."""
    where = ("--store", root, "--ray", ray_address)
    stopped = run("cluster", "drain", *where, "--stop", "--llm", server, "--json")
    assert (stopped.code, stopped.doc["settled"]) == (0, True)


def _wait_until(holds: Callable[[], bool], timeout_s: float = 240.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, "nothing happened in time"
        time.sleep(0.05)


def test_shards_are_added_and_removed(
    tmp_path: Path, logs: Path, server: str, ray_address: str, one_process: tuple[Path, dict[str, Any]]
) -> None:
    root, where = tmp_path / "root", ("--ray", ray_address)
    run("ingest", logs, "--store", root, *where, "--shards", "1", "--llm", server, *THETAS)
    state = run("cluster", "status", "--store", root, *where, "--json").doc
    assert {shard: s["state"] for shard, s in state["shards"].items()} == {"s0001": "serving"}
    more = run("cluster", "move", "--store", root, *where, "--shards", "3", "--llm", server, "--json")
    assert more.code == 0, more.err
    assert more.doc["shards"] == ["s0001", "s0002", "s0003"]
    assert more.doc["moved_tenants"] == len(_tenants_of(root, "s0002") + _tenants_of(root, "s0003"))
    assert everything(root) == everything(one_process[0])
    less = run("cluster", "move", "--store", root, *where, "--shards", "2", "--llm", server, "--json")
    assert (less.code, less.doc["shards"]) == (0, ["s0001", "s0002"])
    assert everything(root) == everything(one_process[0])
    nothing = run("cluster", "move", "--store", root, *where, "--llm", server, "--json")
    assert (nothing.code, nothing.doc) == (0, {**less.doc, "moved_tenants": 0, "moved_rows": 0})
    _erase_and_delete(root, where, server)
    assert run("cluster", "drain", "--store", root, *where, "--stop", "--llm", server).code == 0
    after = run("cluster", "status", "--store", root, *where, "--json").doc
    assert {s["state"] for s in after["shards"].values()} == {"not running"}


def _erase_and_delete(root: Path, where: tuple[str, str], server: str) -> None:
    erased = run("erase", "--tenant", "cy", "--store", root, *where, "--now", "--yes", "--json")
    assert (erased.code, erased.doc["purged"], erased.doc["turns_removed"]) == (0, True, TURNS), erased.err
    assert run("list", "--kind", "turns", "--tenant", "cy", "--store", root).code == 1
    turn = run("list", "--kind", "turns", "--tenant", "dee", "--store", root, "--json").lines[0]
    deleted = run("delete", turn["id"], "--store", root, *where, "--llm", server, "--json")
    assert (deleted.code, deleted.doc["kind"], deleted.doc["settled"]) == (0, "turn", True), deleted.err
    left = run("list", "--kind", "turns", "--tenant", "dee", "--store", root, "--json").lines
    assert [t["id"] for t in left].count(turn["id"]) == 0 and len(left) == TURNS - 1


def _tenants_of(root: Path, shard: str) -> list[str]:
    listed = run("list", "--kind", "tenants", "--store", root / "shards" / shard, "--json").lines
    return [record["tenant"] for record in listed]


def test_status_from_storage_alone(built: Path) -> None:
    state = run("cluster", "status", "--store", built, "--json").doc
    assert (state["map_version"], state["moving_from"], list(state["shards"])) == (
        1,
        None,
        ["s0001", "s0002"],
    )
    assert sum(s["turns"] for s in state["shards"].values()) == len(TENANTS) * TURNS
    assert "s0002" in run("cluster", "status", "--store", built).out


def test_wrong_usage_is_exit_2(
    tmp_path: Path, logs: Path, built: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    for args in (
        ("ingest", logs, "--store", built, "--llm", "off"),
        ("ingest", logs, "--store", tmp_path / "s", "--shards", "2"),
        ("ingest", logs, "--store", tmp_path / "s", "--ray", "local"),
        ("ingest", logs, "--store", one_process[0], "--ray", "local", "--shards", "2"),
        ("ingest", logs, "--store", built, "--ray", "local", "--trace", tmp_path / "t.json"),
        ("delete", "0" * 32, "--store", built),
        ("erase", "--tenant", "ada", "--store", built, "--yes"),
        ("jobs", "--replay", "--store", built, "--llm", "http://127.0.0.1:9/v1"),
        ("reindex", "--encoder", "hash:128", "--store", built),
    ):
        done = run(*args)
        assert (done.code, done.out) == (2, ""), args
        assert done.err.strip()
    assert not (tmp_path / "s").exists()
    other = run("ingest", logs, "--store", built, "--ray", "local", "--shards", "3", "--llm", "off")
    assert (other.code, "has 2 shards" in other.err) == (1, True)
