"""The real mem0ai and langmem in .venv-peers, against the mock LLM server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from undertow.bench.machine import ROOT
from undertow.bench.mock.server import spawn_server
from undertow.bench.peers.process import PYTHON, PeerError, PeerProcess, added, command_of
from undertow.bench.peers.throughput import drive
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.systems.peer import PeerSystem
from undertow.bench.system.service.mem0 import Mem0Service, llm_part
from undertow.bench.system.service.parts import Filled, Mix
from undertow.bench.system.service.world import World
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn

from ..support.eval import means
from ..support.llm_servers import completion, odd_server, server_stats

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-peers: make setup-peers")

PEERS = ("mem0", "langmem")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with spawn_server() as url:
        yield url


def turns_of(tenant: str, *topics: str) -> tuple[Turn, ...]:
    answer = Message("assistant", "Tell me.", "Bob")
    said = ((Message("user", f"{topic} is what I dream of", "Ann"), answer) for topic in topics)
    return tuple(
        Turn(tenant, messages, f"{tenant}-{n}", "s1", f"2023-05-0{n + 1}T10:00:00")
        for n, messages in enumerate(said)
    )


def settings_at(url: str) -> Settings:
    return Settings(encoder="hash:384", llm_url=url)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_remembers_over_restarts_and_its_tokens_are_counted(
    name: str, url: str, tmp_path: Path
) -> None:
    """Built in two runs, of which the second finds what the first has made. Tenants do not mix."""
    question = Question("q", "Who dreams of sailing or of a bicycle?", "single-hop", (), "Ann", None)
    turns = turns_of("ann.b", "sailing to Norway", "a red bicycle")
    ann = Sample("ann.b", turns, ((), ()), (question,))
    bea = Sample("bea", turns_of("bea", "pottery"), ((),), (question,))
    before = server_stats(url)
    with closing(PeerSystem(name, means(tmp_path, llm_url=url))) as first:
        first.build([Sample("ann.b", turns[:1], ((),), (question,))], lambda *_: None)
    with closing(PeerSystem(name, means(tmp_path, llm_url=url))) as second:
        second.build([ann, bea], lambda *_: None)
        facts = second.material(ann, question).facts
        assert any("sailing" in fact.text and fact.date == "1 May 2023, 10:00" for fact in facts)
        assert any("bicycle" in fact.text and fact.date == "2 May 2023, 10:00" for fact in facts)
        assert not any("pottery" in fact.text for fact in facts)
        spent = second.construction("ann.b")["add"] + second.construction("bea")["add"]
        assert second.counts() == {"turns": 3, "complaints": 0}
    after = server_stats(url)
    assert spent.calls == 3
    assert spent.prompt_tokens == after["prompt_tokens"] - before["prompt_tokens"]
    assert spent.completion_tokens == after["completion_tokens"] - before["completion_tokens"]


@pytest.mark.parametrize("name", PEERS)
def test_a_server_that_fails_is_an_error_and_no_empty_memory(name: str, tmp_path: Path) -> None:
    with (
        spawn_server(context_tokens=10) as url,
        PeerProcess(name, command_of(name, settings_at(url), tmp_path), tmp_path) as peer,
    ):
        [turn] = turns_of("ann", "sailing")
        with pytest.raises(PeerError, match="400"):
            peer.ask("add", **added(turn)).result()


@pytest.mark.parametrize("name", PEERS)
def test_tenants_on_several_threads_lose_nothing(name: str, url: str, tmp_path: Path) -> None:
    log = [turn for n in range(12) for turn in turns_of(f"t{n}", "sailing", "pottery", "chess")]
    with PeerProcess(name, command_of(name, settings_at(url), tmp_path, threads=8), tmp_path) as peer:
        waits_s, replies = drive(peer, log, 8)
        assert len(waits_s) == len(log)
        assert [complaint for reply in replies for complaint in reply.spent.complaints] == []
        for n in range(12):
            found = peer.ask("search", tenant=f"t{n}", query="dream", count=60).result().result
            texts = " ".join(memory["text"] for memory in found)
            assert all(topic in texts for topic in ("sailing", "pottery", "chess"))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_brings_the_servers_key(name: str, tmp_path: Path) -> None:
    [turn] = turns_of("ann", "sailing")
    sample = Sample("ann", (turn,), ((),), ())
    with spawn_server(api_key="right") as url:
        keyed = means(tmp_path, llm_url=url, llm_api_key="right", llm_model="mock-llm")
        with closing(PeerSystem(name, keyed)) as made:
            made.build([sample], lambda *_: None)
            assert made.construction("ann")["add"].calls == 1


def test_mem0_is_told_when_something_was_said(tmp_path: Path) -> None:
    """Its own prompt says that all was said today, and asks to date "yesterday" by that."""
    prompts = []

    def reply(body: dict[str, Any], _: int) -> tuple[int, dict[str, Any]]:
        prompts.append(body["messages"][-1]["content"])
        return 200, completion('{"memory": []}')

    with (
        odd_server(reply) as url,
        PeerProcess("mem0", command_of("mem0", settings_at(url), tmp_path), tmp_path) as peer,
    ):
        peer.ask("add", **added(turns_of("ann", "sailing")[0])).result()
    [prompt] = prompts
    assert "These messages were said at 2023-05-01T10:00:00. That is their Observation Date" in prompt


@pytest.mark.parametrize("ended", ["length", "stop"])
def test_a_reply_that_langmem_passes_over_is_counted(ended: str, tmp_path: Path) -> None:
    """Cut off within a tool call, or prose: the package stores nothing and says nothing."""

    def reply(body: dict[str, Any], _: int) -> tuple[int, dict[str, Any]]:
        told = completion("Let me think." if ended == "stop" else "", finish_reason=ended)
        if ended == "length":
            half = {"name": "Memory", "arguments": '{"content": "Ann dreams of sai'}
            call = {"id": "c", "type": "function", "function": half}
            told["choices"][0]["message"]["tool_calls"] = [call]
        return 200, told

    with (
        odd_server(reply) as url,
        PeerProcess("langmem", command_of("langmem", settings_at(url), tmp_path), tmp_path) as peer,
    ):
        spent = peer.ask("add", **added(turns_of("ann", "sailing")[0])).result().spent
    assert any(f"it ended by {ended!r}" in complaint for complaint in spent.complaints)


def test_a_runner_outlives_its_asker_by_seconds_only(tmp_path: Path) -> None:
    """Even where its LLM call would take ten minutes more."""
    [turn] = turns_of("ann", "sailing")
    with spawn_server(latency_ms=600_000) as url:
        command = command_of("mem0", settings_at(url), tmp_path)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        runner = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            assert runner.stdin is not None and runner.stdout is not None
            assert "ready" in runner.stdout.readline()
            runner.stdin.write(json.dumps({"id": 1, "op": "add", **added(turn)}) + "\n")
            runner.stdin.close()
            assert runner.wait(timeout=120) == 1
            assert runner.stdout.read() == ""
        finally:
            runner.kill()
            runner.wait()


def test_mem0_behind_its_wrapper_takes_the_requests_of_the_service_benchmark(
    url: str, tmp_path: Path
) -> None:
    """Each add calls the LLM once. An error that mem0 logs and passes over is no success."""
    world = World(turns=2, tenants=2)
    filled = Filled.make(Mem0Service(url), world, tmp_path / "filled")
    with filled.loaded(Mix(1, 1), "commit") as load:
        outcome, figures = load.at_rate(10.0, 2.0)
    assert set(outcome.statuses) == {200}
    assert all(len(ids) for ids in outcome.acknowledged().values())
    assert figures["service_cpu_ms_per_request"] > 0
    told = llm_part(filled, Mix(1, 0), "commit", seconds=2.0, rate=10.0, llm=url)
    assert told["open_loop"]["statuses"] == {"200": told["until_decided"]["llm_calls"]}
    with odd_server(lambda *_: (200, completion("no JSON"))) as odd, pytest.raises(HTTPError, match="500"):
        Filled.make(Mem0Service(odd), world, tmp_path / "odd")
