"""What the command line makes of a cluster's answers, with stand-ins for Ray and the shards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Message, Turn
from undertow.engine.cluster.shard_map import ShardMap, load, publish
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.location import Location
from undertow.serving.cli import output, ray_session
from undertow.serving.cli.commands import cluster as clustering

from ..support.cli import run
from ..support.cluster.in_process import settings

SERVING = {
    "state": "serving",
    "failure": None,
    "pid": 4_194_304,
    "uptime_s": 1_234_567.8,
    "waiting_turns": 123_456,
    "undecided_turns": 1_234_567,
    "llm_in_flight": 256,
    "llm_error": None,
    "blocked": {"a budget is spent": 3},
    "faulty_tenants": {"ann": "RuntimeError: no vector"},
    "parked": [{"tenant": "ann"}] * 12_345,
}


class Answer:
    """An actor's answer, and the actor that gives it: a state, an error, or nothing at all."""

    def __init__(self, told: dict[str, Any] | Exception | None) -> None:
        self.told = told
        self.call = self

    def remote(self, method: str) -> Answer:
        assert method == "status"
        return self


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publish(Location.of(tmp_path / "root"), ShardMap.new(["s0001", "s0002", "s0003", "s0004"]))
    return tmp_path / "root"


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Shards to fill in, by name; a call that waits for one alone fails."""
    found: dict[str, Answer] = {}

    @contextmanager
    def joined(*_: object) -> Iterator[None]:
        yield

    def wait(
        asked: Sequence[Answer], *, num_returns: int, timeout: float
    ) -> tuple[list[Answer], list[Answer]]:
        assert (len(asked), num_returns, timeout) == (len(found), len(found), clustering.STATUS_TIMEOUT_S)
        return [a for a in asked if a.told is not None], [a for a in asked if a.told is None]

    def get(answer: Answer) -> dict[str, Any]:
        if isinstance(answer.told, Exception):
            raise answer.told
        assert answer.told is not None, "this would wait"
        return answer.told

    for module in (clustering, ray_session):
        monkeypatch.setattr(module, "on_ray", joined)
        monkeypatch.setattr(module, "actors", lambda _: found)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return found


def fill(shards: dict[str, Answer]) -> None:
    """One that serves, one that is dead, one that does not answer; the fourth does not run."""
    dead = ray.exceptions.RayError("killed\nand so on")
    shards.update(s0001=Answer(SERVING), s0002=Answer(dead), s0003=Answer(None))


def test_shards_are_asked_side_by_side(root: Path, shards: dict[str, Answer]) -> None:
    fill(shards)
    told = run("cluster", "status", "--store", root, "--ray", "auto", "--json").doc["shards"]
    states = [told[shard]["state"] for shard in sorted(told)]
    assert states == ["serving", "unreachable", "unreachable", "not running"]
    assert told["s0001"] == SERVING
    assert "killed" in told["s0002"]["failure"] and "\n" not in told["s0002"]["failure"]
    assert "has not answered within 5 s" in told["s0003"]["failure"]


@pytest.mark.parametrize("width", [80, 100])
def test_status_fits_the_terminal(
    root: Path, shards: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    fill(shards)
    monkeypatch.setattr(output, "PIPED_WIDTH", width)
    shown = run("cluster", "status", "--store", root, "--ray", "auto").out
    table = [line for line in shown.splitlines() if line[:1] in "┏┃┡│└"]
    assert all(len(line) <= width for line in table) and "…" not in shown
    (row,) = (line for line in table if "s0001" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == ["s0001", "serving", "1,234,568", "123,456", "1,234,567", "256", "12,345"]
    assert "s0001: blocked: 3 tenants: a budget is spent" in shown
    assert "s0001: faulty: tenant 'ann': RuntimeError: no vector" in shown
    assert "s0003: failure: it has not answered" in shown


def test_a_root_is_embedded_again_shard_by_shard_once_none_runs(
    root: Path, shards: dict[str, Answer]
) -> None:
    for tenant in ("ann", "bo"):
        store = root / "shards" / load(Location.of(root)).owner(tenant)
        with Engine(store, settings(), HashingEncoder(384)) as engine:
            engine.add_batch([Turn(tenant, (Message("user", f"{n} boats"),), f"{n}") for n in range(3)])
    command = ("reindex", "--store", root, "--encoder", "hash:128", "--json")
    told = run(*command)
    assert (told.code, "drain --stop" in told.err) == (2, True)
    shards["s0002"] = Answer(SERVING)
    running = run(*command, "--ray", "auto")
    assert (running.code, "1 shards" in running.err) == (2, True)
    shards.clear()
    for embedded in (6, 0):
        done = run(*command, "--ray", "auto")
        assert (done.code, done.doc["embedded"]) == (0, embedded)
    hits = run("search", "boats", "--tenant", "bo", "--store", root, "--encoder", "hash:128", "--json")
    assert len(hits.lines) == 3


def test_ray_is_told_to_be_silent_about_what_is_restarted_and_about_nothing_else() -> None:
    """Of what its listener prints on the driver; an error that it tells of stays."""
    code = (
        "import os, ray\n"
        "from ray._private.worker import print_to_stdstream\n"
        "for line in ('A worker died or was killed while executing a task by an unexpected system error.',\n"
        "             '1 worker(s) were killed due to the node running low on memory.'):\n"
        "    print_to_stdstream({'lines': [line], 'pid': 'raylet', 'is_err': False}, ignore_prefix=False)\n"
    )
    env = {**os.environ, "RAY_DEDUP_LOGS_SKIP_REGEX": ray_session.RESTARTED}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "low on memory" in done.stdout and "A worker died" not in done.stdout
