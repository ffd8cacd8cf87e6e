"""`undertow serve --workers` as a process: it serves, loses a worker, drains, and leaves nothing behind."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import httpx2
import psutil
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.cluster.root import make_root
from undertow.engine.cluster.shard_map import load
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.location import Location
from undertow.serving.cli.commands.serve import _check_shards

from ...support.cli import run
from ...support.cluster.in_process import settings
from ...support.llm_servers import odd_server, wait_until
from ...support.service.http import SOON_S, at, is_problem, said
from .test_serve import drain, held_llm, process


def two_homes(root: Path) -> dict[str, str]:
    """Six tenants and their shards, three in each of the two: a random map may put any six in one."""
    names = [f"acme/{n}" for n in range(200)]
    homes = load(Location.of(root)).homes(names)
    shards = sorted(set(homes))
    assert len(shards) == 2
    return {
        name: shard
        for wanted in shards
        for name, shard in [pair for pair in zip(names, homes, strict=True) if pair[1] == wanted][:3]
    }


def add(client: httpx2.Client, tenant: str) -> bool:
    """To be repeated, as a worker on a busy machine may not answer within the patience."""
    body, key = {"messages": said(f"the boat of {tenant}")}, {"Idempotency-Key": "once"}
    added = client.post(at(tenant, "/memories"), json=body, headers=key)
    assert added.status_code in (200, 503), added.text
    return added.status_code == 200


def memories(client: httpx2.Client, tenant: str) -> list[str]:
    found = client.post(at(tenant, "/search"), json={"query": "boat", "top_k": 3})
    assert found.status_code == 200, found.text
    return [hit["memory"] for hit in found.json()["results"]]


def test_a_second_service_on_the_root_ends_and_takes_nothing_over(tmp_path: Path) -> None:
    with process(tmp_path, "--workers", "2", "--llm", "off") as service:
        client = service.client(service.key())
        wait_until(partial(add, client, "ann"))
        done = run("serve", "--store", tmp_path, "--workers", "2", "--llm", "off", "--port", "0")
        assert (done.code, "belongs to a service that is running" in done.err) == (1, True)
        assert all(add(client, f"bob{n}") for n in range(4)), "both shards take adds"


def test_it_serves_loses_a_worker_and_drains(tmp_path: Path) -> None:
    held = held_llm()
    env = {"UNDERTOW_SERVICE_DRAIN_NOTICE_S": "0", "UNDERTOW_CLUSTER_PATIENCE_S": "0.3"}
    with (
        odd_server(held) as llm,
        process(tmp_path, "--workers", "2", "--llm", llm, env=env) as service,
    ):
        key = service.key()
        client = service.client(key)
        homes = two_homes(tmp_path)
        for tenant in homes:
            wait_until(partial(add, client, tenant))
        assert all(
            memories(client, tenant) == [f"user: the boat of {tenant}\nassistant: noted"] for tenant in homes
        )
        workers = psutil.Process(service.popen.pid).children()
        shards = client.get("/v1/status").json()
        assert {one["pid"] for one in shards.values()} == {worker.pid for worker in workers}
        metrics = client.get("/metrics").text
        assert all(f'undertow_shard_up{{shard="{shard}"}} 1.0' in metrics for shard in shards)

        struck, lost = next(iter(homes.items()))
        other = next(tenant for tenant, shard in homes.items() if shard != lost)
        psutil.Process(shards[lost]["pid"]).kill()
        is_problem(client.post(at(struck, "/search"), json={"query": "boat"}), 503, "shard")
        assert memories(client, other)  # it would be a 503 after 0.3 s if it waited for the lost worker
        assert client.get("/health/ready").status_code == 200
        wait_until(lambda: client.get("/v1/status").json()[lost]["state"] == "serving")
        assert memories(client, struck) == [f"user: the boat of {struck}\nassistant: noted"]

        workers = psutil.Process(service.popen.pid).children()
        for worker in workers:  # as Ctrl-C reaches them in a terminal
            worker.send_signal(signal.SIGINT)
        drain(service, key, other, held)
        assert not psutil.wait_procs(workers, timeout=SOON_S)[1]
        assert [line for line in service.said if not line.startswith(("{", "Starting", "Ready"))] == []


def test_one_worker_serves_all_shards_of_a_root(tmp_path: Path) -> None:
    make_root(Location.of(tmp_path), 2)
    with process(tmp_path, "--workers", "1", "--llm", "off") as service:
        shards = service.client(service.key()).get("/v1/status").json().values()
        assert len(shards) == 2 and len({shard["pid"] for shard in shards}) == 1


def test_what_cannot_be_served_by_workers_is_told_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "plain", settings(), HashingEncoder(384)):
        pass
    make_root(Location.of(tmp_path / "root"), 2)
    for options, words in (
        (("--store", tmp_path / "plain", "--workers", "2"), "Name another folder"),
        (("--store", tmp_path / "root"), "or --workers N"),
        (("--store", tmp_path / "root", "--workers", "2", "--ray", "auto"), "exclude each other"),
        (("--store", tmp_path / "new", "--workers", "2", "--shards", "2"), "--shards goes with --ray"),
        (("--store", tmp_path / "new", "--workers", "0"), "--workers"),
    ):
        ran = run("serve", *options)
        assert (ran.code, words in ran.err) == (2, True), ran.err
    assert _check_shards(Location.of(tmp_path / "root"), None, None, 3) == 3
    assert _check_shards(Location.of(tmp_path / "plain"), None, None, 1) == 0, "in this process, as ever"
    told = " ".join(capsys.readouterr().err.split())
    assert "has 2 shards, so 2 workers serve them" in told and "--ray local --shards 3" in told
