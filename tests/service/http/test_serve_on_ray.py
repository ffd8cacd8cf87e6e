"""`undertow serve --ray` as a process in front of shards on Ray: it drains, and nothing is lost with it."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2

from ...support.cli import run
from ...support.llm_servers import odd_server
from ...support.service.http import at, said
from .test_serve import drain, held_llm, process

SMALL = {"UNDERTOW_CLUSTER_NUM_CPUS": "0.5", "UNDERTOW_CLUSTER_THREADS": "1"}
BOAT = "the boat needs new planks before summer"


def has_boat(client: httpx2.Client) -> bool:
    found = client.post(at("acme/ann", "/search"), json={"query": BOAT, "top_k": 1}).json()["results"]
    return [hit["memory"] for hit in found] == [f"user: {BOAT}\nassistant: noted"]


def stop_shards(root: Path, ray_address: str) -> None:
    """Those of a Ray that others have started go on when a service ends."""
    stopped = run("cluster", "drain", "--store", root, "--ray", ray_address, "--stop", "--json")
    assert stopped.code == 0, stopped.err


def test_it_drains_and_finds_everything_again(tmp_path: Path, ray_address: str) -> None:
    held = held_llm()
    on_ray = ("--ray", ray_address)
    env = {**SMALL, "UNDERTOW_SERVICE_DRAIN_NOTICE_S": "0"}
    with (
        odd_server(held) as llm,
        process(tmp_path, *on_ray, "--shards", "1", "--llm", llm, env=env) as service,
    ):
        key = service.key()
        client = service.client(key)
        client.post(at("acme/ann", "/memories"), json={"messages": said(BOAT)})
        assert has_boat(client)
        drain(service, key, "acme/ann", held)
    stop_shards(tmp_path, ray_address)

    with process(tmp_path, *on_ray, "--llm", "off", env=SMALL) as service:
        client = service.client(key)
        assert has_boat(client)
        assert client.get(at("acme/ann", "/stats")).json()["turns"] == 1
        assert service.end(signal.SIGTERM) == 0
    stop_shards(tmp_path, ray_address)
