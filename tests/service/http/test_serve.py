"""`undertow serve` as a process: it ends without losing anything, and is killed without losing anything."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from undertow.bench.mock.server import spawn_server
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import Scope, TenantScope
from undertow.serving.http.server import bound

from ...support.cli import ENV, PROGRAM, conversation, run
from ...support.cluster.forked import started
from ...support.llm_servers import Counting, completion, odd_server, wait_until
from ...support.service.http import SOON_S, at, is_problem, said

THETAS = {"UNDERTOW_THETA_SIM": "0.5", "UNDERTOW_THETA_MERGE": "0.55", "UNDERTOW_THETA_COUNT": "3"}


class Process:
    """A service in a process of its own."""

    def __init__(self, store: Path, *options: str, env: dict[str, str] | None = None, **how: Any) -> None:
        """`how`: `files` and `afresh` of `started`."""
        self.store = store
        self._told = store.with_name(f"{store.name}-stderr.txt")
        command = ("serve", "--store", str(store), "--port", "0", *options)
        environment = {**os.environ, **ENV, **THETAS, **(env or {})}
        self.popen = started(command, environment, Path(os.devnull), self._told, **how)
        self.url = ""
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        told = "".join(self.said)
        assert self.popen.poll() is None, told
        if found := re.search(r"Ready on (http://\S+), ", told):
            self.url = found[1]
        return bool(self.url)

    @property
    def said(self) -> list[str]:
        """The lines of its standard error so far."""
        return self._told.read_text().splitlines(keepends=True)

    def key(self) -> str:
        """A new key, for everything."""
        made = KeyFile(self.store / "keys.json").create(TenantScope(all_tenants=True), tuple(Scope))
        return made.text

    def client(self, key: str | None = None) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {key or self.key()}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=SOON_S)

    def end(self, sig: signal.Signals) -> int:
        self.popen.send_signal(sig)
        return self.popen.wait(SOON_S)


@contextmanager
def process(store: Path, *options: str, env: dict[str, str] | None = None, **how: Any) -> Iterator[Process]:
    service = Process(store, *options, env=env, **how)
    try:
        yield service
    finally:
        service.popen.kill()
        service.popen.wait()


def held_llm() -> Counting:
    answer = completion("On Sunday.", usage={"prompt_tokens": 7, "completion_tokens": 3})
    return Counting(body=answer, wait_s=SOON_S)


def drain(service: Process, key: str, tenant: str, held: Counting) -> None:
    """SIGTERM while an answer is under way: it is finished, new requests are refused, the process exits."""
    client, other = service.client(key), service.client(key)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, at(tenant, "/answer"), json={"question": "When?"})
        try:
            wait_until(lambda: len(held) == 1)
            assert other.get("/health/ready").json()["status"] == "ok"
            service.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: other.get("/health/ready").status_code == 503)
            assert other.get("/health/ready").json() == {"status": "draining"}
            assert other.get("/health/live").status_code == 200
            refused = other.post(at(tenant, "/memories"), json={"messages": said("late")})
            is_problem(refused, 503, "draining")
            assert refused.headers["retry-after"] == "1"
        finally:
            held.go.set()
        answer = asked.result(SOON_S)
    assert service.popen.wait(SOON_S) == 0
    assert (answer.status_code, answer.json()["answer"]) == (200, "On Sunday.")
    assert not any("Traceback" in line for line in service.said)


def test_requests_under_way_are_finished_and_new_ones_refused(tmp_path: Path) -> None:
    held = held_llm()
    env = {"UNDERTOW_SERVICE_DRAIN_NOTICE_S": "0"}
    with odd_server(held) as llm, process(tmp_path, "--llm", llm, env=env) as service:
        key = service.key()
        client = service.client(key)
        assert client.get("/openapi.json").status_code == 200
        client.post(at("ann", "/memories"), json={"messages": said("the boat on sunday")})
        drain(service, key, "ann", held)


def test_acknowledged_work_survives_a_kill(tmp_path: Path) -> None:
    held = held_llm()
    items = [{"messages": line["messages"], "session_id": "s"} for line in conversation("ann", 9)]
    once, later = {"Idempotency-Key": "once"}, {"Prefer": "respond-async"}
    with odd_server(held) as llm, process(tmp_path, "--llm", llm) as service:
        key = service.key()
        client = service.client(key)
        added = client.post(at("ann", "/memories"), json={"items": items}).json()["items"]
        ids = [result["id"] for item in added for result in item["results"]]
        late = client.post(at("ann", "/memories"), json={"messages": said("and last")}, headers=once)
        body = client.get(at("ann", "/export")).content
        flush = client.post(at("ann", "/flush"), headers=later).headers["location"]
        wait_until(lambda: client.get(flush).json()["status"] == "running")
        taken = client.post(at("bob", "/import"), content=body, headers=later)
        assert taken.status_code == 202
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        held.go.set()
    with spawn_server() as llm, process(tmp_path, "--llm", llm) as service:
        client = service.client(key)
        assert all(client.get(at("ann", f"/memories/{one}")).status_code == 200 for one in ids)
        again = client.post(at("ann", "/memories"), json={"messages": said("and last")}, headers=once)
        assert again.json()["results"][0] == late.json()["results"][0] | {"event": "DUPLICATE"}
        wait_until(lambda: client.get(flush).json()["status"] == "done")
        assert client.get(flush).json()["result"] == {"decided": True}
        wait_until(lambda: client.get(taken.headers["location"]).json()["status"] == "done")
        assert client.get(at("bob", "/stats")).json()["turns"] == len(ids) + 1
        assert client.get(at("ann", "/stats")).json()["turns"] == len(ids) + 1
        assert service.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("options", "env", "code", "words"),
    [
        (("--insecure-no-auth", "--host", "0.0.0.0"), {}, 1, "loopback"),
        (("--shards", "2"), {}, 2, "--shards goes with --ray"),
        (("--insecure-no-auth", "--keys", "keys.json"), {}, 2, "exclude each other"),
        (("--encoder", "hash:x"), {}, 2, "hash:x"),
        ((), {"SERVICE_MAX_REQUESTS": "5"}, 2, "must be smaller than max_requests"),
        ((), {"SERVICE_MAX_REQUEST": "5"}, 2, "UNDERTOW_SERVICE_MAX_REQUEST is no setting"),
        ((), {"SERVICE_MAX_REQUEST": "5"}, 2, "UNDERTOW_SERVICE_MAX_REQUESTS"),
        (("--workers", "2"), {"CLUSTER_WINDOW_CALLS": "65"}, 2, "Lower UNDERTOW_CLUSTER_WINDOW_CALLS"),
    ],
)
def test_wrong_options_and_settings_are_refused(
    tmp_path: Path, options: tuple[str, ...], env: dict[str, str], code: int, words: str
) -> None:
    variables = {f"UNDERTOW_{name}": value for name, value in env.items()}
    ran = run("serve", "--store", tmp_path, *options, env=variables)
    assert ran.code == code
    assert words in ran.err
    assert "Traceback" not in ran.err


def test_without_an_llm_an_answer_says_so(tmp_path: Path) -> None:
    with process(tmp_path, "--llm", "off", afresh=True) as service:
        assert service.said[0].startswith("Starting: ")
        client = service.client(service.key())
        assert client.get("/health/ready").json() == {"status": "ok", "llm": "off"}
        client.post(at("ann", "/memories"), json={"messages": said("the boat is blue")})
        told = client.post(at("ann", "/answer"), json={"question": "which colour?"})
        assert "--llm URL" in is_problem(told, 503, "no-llm")["detail"]


def test_a_port_in_use_is_reported_before_the_store_is_created(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = run("serve", "--store", tmp_path / "store", "--insecure-no-auth", "--port", port)
    assert ran.code == 1
    assert f"cannot listen at port {port} of 127.0.0.1: Address already in use. Give another" in ran.err
    assert not (tmp_path / "store" / "store.json").exists()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_free_port_is_the_same_at_every_address(host: str) -> None:
    made = bound(host, 0)
    assert len({one.getsockname()[1] for one in made}) == 1
    for one in made:
        one.close()


def test_a_second_service_is_refused(tmp_path: Path) -> None:
    with process(tmp_path, "--insecure-no-auth", "--inspect") as first:
        assert httpx2.get(f"{first.url}/inspect", timeout=SOON_S).status_code == 200
        ran = run("serve", "--store", tmp_path, "--port", "0", "--insecure-no-auth")
        assert ran.code == 1
        assert "belongs to a service that is running" in ran.err


def test_idle_connections_leave_files_for_the_store_and_for_others(tmp_path: Path) -> None:
    """More connections than files: those above the bound are refused, and the log stays short."""
    with process(tmp_path, files=700) as service, service.client() as client, ExitStack() as stack:
        port = int(service.url.rpartition(":")[2])
        assert client.post(at("ann", "/memories"), json={"messages": said("the boat")}).status_code == 200
        begun = len(service.said)
        for _ in range(720):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SOON_S))
        added = client.post(at("bob", "/memories"), json={"messages": said("the garden")})
        assert (added.status_code, client.get("/v1/stats").json()["turns"]) == (200, 2)
        assert len(service.said) < begun + 100
    assert "at most 188 connections at once" in "".join(service.said)


def test_too_few_files_end_the_start(tmp_path: Path) -> None:
    options = ("serve", "--store", str(tmp_path), "--port", "0", "--insecure-no-auth")
    ended = subprocess.run(
        ["prlimit", "--nofile=400:400", *PROGRAM, *options],
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        timeout=SOON_S,
    )
    assert ended.returncode == 1
    assert "may open 400 files, and needs over 512. Raise it to 4,608 (ulimit -n" in ended.stderr
