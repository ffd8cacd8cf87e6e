"""`undertow serve --ray` as a process in front of shards on Ray: it drains, and nothing is lost with it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx2

from ...support.cli import run
from ...support.llm_servers import odd_server, wait_until
from ...support.service.http import SOON_S, at, is_problem, said
from .test_serve import HeldLLM, process

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
    held, answers = HeldLLM(), []
    on_ray = ("--ray", ray_address)
    env = {**SMALL, "UNDERTOW_SERVICE_DRAIN_NOTICE_S": "0"}
    with (
        odd_server(held) as llm,
        process(tmp_path, *on_ray, "--shards", "1", "--llm", llm, env=env) as service,
    ):
        key = service.key()
        client, other = service.client(key), service.client(key)
        client.post(at("acme/ann", "/memories"), json={"messages": said(BOAT)})
        assert has_boat(client)

        def ask() -> None:
            answers.append(client.post(at("acme/ann", "/answer"), json={"question": "When?"}))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            wait_until(lambda: held.asked == 1)
            service.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: other.get("/health/ready").status_code == 503)
            refused = other.post(at("acme/ann", "/memories"), json={"messages": said("late")})
            is_problem(refused, 503, "draining")
        finally:
            held.go.set()
        asking.join(SOON_S)
        assert service.popen.wait(SOON_S) == 0
    assert [answer.json()["answer"] for answer in answers] == ["On Sunday."]
    assert not any("Traceback" in line for line in service.said)
    stop_shards(tmp_path, ray_address)

    with process(tmp_path, *on_ray, "--llm", "off", env=SMALL) as service:
        client = service.client(key)
        assert has_boat(client)
        assert client.get(at("acme/ann", "/stats")).json()["turns"] == 1
        assert service.end(signal.SIGTERM) == 0
    stop_shards(tmp_path, ray_address)
