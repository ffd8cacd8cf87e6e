"""The service's benchmark: its world, its two loops against a scripted server, and what it proves."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from undertow.bench.machine import LOCOMO
from undertow.bench.mock.server import spawn_server
from undertow.bench.system.service import closed_loop
from undertow.bench.system.service.__main__ import name_of, parser
from undertow.bench.system.service.compare import COMPARED, ratios
from undertow.bench.system.service.hostile import TENANT, about, attacks, erasures, filled_tenant
from undertow.bench.system.service.mem0 import llm_part
from undertow.bench.system.service.open_loop import Answer, Caller, Outcome, arrivals, run_loop
from undertow.bench.system.service.parts import Filled, Mix, _missing, holds, recovery
from undertow.bench.system.service.served import Checkout, counted
from undertow.bench.system.service.world import Conversations, Request, World
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn, UndertowError
from undertow.engine.encoders.hashing import HashingEncoder

from ..support.cli import turn_line, write_log
from ..support.service.http import serving
from ..support.service.scripted_server import Reply, Seen, served

WORLD = World(turns=20, tenants=3)


def answer(due_s: float, latency_s: float, status: int = 200, *, adds: bool = False) -> Answer:
    return Answer(adds, "tenant-0", due_s, due_s, due_s + latency_s, status, b'{"results": [{"id": "t1"}]}')


def test_no_topic_of_a_tenant_recurs() -> None:
    texts = [f"{asked} {answered}" for _, asked, answered in World(turns=2_000, tenants=1).exchanges()]
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 20 and max(lengths) <= 80
    vectors = HashingEncoder(384).encode(texts).astype(np.float32)
    cosines = vectors @ vectors.T
    assert np.median(cosines) > 0.1, "words are shared, as in natural texts"
    assert ((cosines >= 0.6).sum(axis=1) - 1 < 4).all()  # the lower of the two profiles' thresholds


def test_a_world_is_the_same_each_time_and_can_be_ingested(tmp_path: Path) -> None:
    WORLD.write_log(tmp_path / "a.jsonl")
    told = Checkout().fill(tmp_path / "a.jsonl", tmp_path / "store")
    assert (told["tenants"], told["turns"], told["undecided_turns"]) == (3, 60, 0)
    WORLD.write_log(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    # and what a crash takes from it or doubles is counted
    store, (name, *said) = tmp_path / "store", next(iter(WORLD.exchanges()))
    assert _missing(store, WORLD, {}) == (0, 0) and _missing(store, WORLD, {name: {"no such id"}}) == (1, 0)
    twice = Turn(name, tuple(map(Message, ("user", "assistant"), said)), dedupe_key="sent again")
    with Engine(store, Settings(device="cpu", theta_count=1_000), HashingEncoder(384)) as engine:
        engine.add_batch([twice])
        assert _missing(store, WORLD, {}) == (0, 1)
        engine.delete(engine.list(name, limit=5).items[-1]["id"], tenant=name)
    assert _missing(store, WORLD, {}) == (1, 1)


def test_a_world_whose_topics_recur_is_refused(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [turn_line("ann", n, "the same words") for n in range(9)])
    with pytest.raises(UndertowError, match="--theta-count"):
        Checkout().fill(log, tmp_path / "store")


@pytest.mark.skipif(not LOCOMO.exists(), reason=f"{LOCOMO} is not there")
def test_with_an_llm_topics_recur_and_all_is_decided(tmp_path: Path) -> None:
    with spawn_server() as llm:
        filled = Filled.make(Checkout(llm=llm), Conversations(turns=120, tenants=2), tmp_path / "filled")
        told = llm_part(filled, Mix(1, 0), "commit", seconds=2.0, rate=30.0, llm=llm)["until_decided"]
    assert filled.figures["consolidations"] and told["llm_calls"]
    assert told["stored_turns"] == told["decisions"] > 0 == told["undecided_turns"]


def test_requests_have_their_share_of_adds_and_texts_of_their_own() -> None:
    made = WORLD.requests("http://host:1", "ut_k", 400, add_share=Mix.of("1:9").add_share, seed=3)
    assert 20 <= sum(request.adds for request in made) <= 60
    assert len({request.sent.split(b"\r\n\r\n")[1] for request in made}) == 400
    assert made == WORLD.requests("http://host:1", "ut_k", 400, add_share=0.1, seed=3)
    head, body = made[0].sent.decode().split("\r\n\r\n")
    assert f"/v1/tenants/{made[0].tenant}/" in head and "Bearer ut_k" in head
    assert json.loads(body).keys() == ({"messages"} if made[0].adds else {"query", "top_k"})


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    with served(lambda seen: Reply.of({"results": [{"id": seen.path}]}), protocol="HTTP/1.1") as server:
        requests = WORLD.requests(server.url, "k", 40, add_share=0.5, seed=0)

        async def load() -> Outcome:
            caller, due_s = Caller(server.url), [-0.5, *arrivals(400.0, 1.0, 1)[:39]]
            outcome = await caller.run(requests, due_s, Outcome(4.0, 10.0))
            caller.close()
            return outcome

        outcome = run_loop(load())
    assert len(server.seen) == 40 and outcome.statuses == {200: 40}
    assert max(a.latency_s for a in outcome.answers) >= 0.5
    assert sum(map(len, outcome.acknowledged().values())) == len({r.tenant for r in requests if r.adds})
    assert outcome.figures()["answered_per_s"] == 4.0


def test_refusals_and_broken_connections_are_counted_by_status() -> None:
    def reply(seen: Seen) -> Reply:
        return Reply(cut=-1) if "search" in seen.path else Reply.of({}, 429)

    with served(reply, protocol="HTTP/1.1") as server:
        requests = WORLD.requests(server.url, "k", 20, add_share=0.5, seed=0)

        async def load() -> Outcome:
            return await Caller(server.url).run(requests, [0.0] * 20, Outcome(20.0, 1.0))

        outcome = run_loop(load())
    adds = sum(request.adds for request in requests)
    assert outcome.statuses == {429: adds, 0: 20 - adds}
    assert outcome.acknowledged() == {} and outcome.p95_ms(adds=True) == float("inf")


@pytest.mark.skipif(shutil.which("wrk") is None, reason=closed_loop.MISSING)
def test_a_closed_loop_sends_each_request_once() -> None:
    statuses = iter([200, 200, 429])
    with served(lambda _: Reply.of({}, next(statuses, 200)), protocol="HTTP/1.1") as server:
        requests = WORLD.requests(server.url, "k", closed_loop.MOST_PER_S, add_share=0.5, seed=0)
        told = closed_loop.drive(server.url, requests, 1.0, connections=2)
        bodies = [seen.body for seen in server.seen]
        with pytest.raises(UndertowError, match="only 3 differ"):
            closed_loop.drive(server.url, requests[:3], 1.0)
    assert told["not_200"] == 1 and told["requests"] >= 3
    assert len(set(bodies)) == len(bodies) >= told["requests"]


def test_without_wrk_the_bench_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UndertowError, match="apt-get install wrk"):
        closed_loop.drive("http://127.0.0.1:1", [], 1.0)


def test_the_goals_are_of_searches_and_of_adds() -> None:
    fast = [answer(0.0, 0.009), answer(0.0, 0.014, adds=True)]
    assert holds(Outcome(2.0, 1.0, fast))
    for slow in (answer(0.0, 0.011), answer(0.0, 0.016, adds=True), answer(0.0, 0.001, 429)):
        assert not holds(Outcome(2.0, 1.0, [*fast, slow]))


def test_recovery_is_the_first_window_that_holds_the_goal() -> None:
    quick = [answer(n / 10, 0.002) for n in range(100)]
    assert recovery(quick, 10.0) == {"recovered_after_s": 0.0, "missed_windows_later": 0}
    slow = [answer(at_s, 0.5) for at_s in (0.2, 0.7, 8.2) for _ in range(9)]
    assert recovery([*quick, *slow], 10.0) == {"recovered_after_s": 1.0, "missed_windows_later": 1}
    never = [answer(n / 10, 0.5) for n in range(100)]
    assert recovery(never, 10.0) == {"recovered_after_s": None, "missed_windows_later": 0}


def test_a_part_of_an_outcome_has_its_own_time() -> None:
    after = Outcome(0.0, 4.0, [answer(1.0, 1.5), answer(2.5, 0.1)]).part(7.0, 2.0, 2.0)
    assert [(a.due_s, round(a.done_s, 3)) for a in after.answers] == [(0.5, 0.6)]


def test_counters_are_summed_over_shards_and_kinds() -> None:
    metrics = """# HELP undertow_turns_total Turns.
undertow_turns_total{outcome="stored",shard="0"} 7.0
undertow_turns_total{outcome="duplicate",shard="0"} 2.0
undertow_decisions_total{decision="kept",shard="0"} 4.0
undertow_decisions_total{decision="fired",shard="0"} 3.0
undertow_undecided_turns{shard="0"} 1.0
undertow_blocked_tenants{shard="0"} 0.0
"""
    states = {"undecided_turns": 1, "blocked_tenants": 0}
    assert counted(metrics) == {"stored_turns": 7, "decisions": 7, "consolidations": 3, **states}


def test_ratios_are_of_pairs_of_runs() -> None:
    def run(rate: float) -> dict[str, object]:
        return {"closed_loop": {"answered_per_s": rate, "latency_ms": {"p50": 0.0}}, "open_loop": {}}

    found = ratios([run(20.0), run(30.0)], [run(10.0), run(10.0)])
    assert found == dict.fromkeys(COMPARED) | {"closed_loop.answered_per_s": 2.5}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "service-1000"),
        (["kill", "--turns", "20"], "service-20-kill"),
        (["--against", "old"], "service-against-1000"),
        (["--mem0"], "service-mem0"),
        (["--workers", "2"], "service-workers-1000-16"),
    ],
)
def test_figures_of_different_runs_have_files_of_their_own(words: list[str], name: str) -> None:
    assert name_of(parser().parse_args(words)) == name


def test_a_hostile_tenant_sends_what_is_legal_to_every_route(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        target = filled_tenant(running.url, running.key())
        kinds = (
            attacks(target) | about(target, target.ids[0], target.ids[1], "other words") | erasures(target)
        )
        routes = running.client().get("/openapi.json").json()["paths"]
        outcome = Outcome(0.0, 1.0)

        async def send() -> None:
            caller = Caller(running.url)
            for sent in kinds.values():
                await caller.run([Request(False, TENANT, sent)], [0.0], outcome)
            caller.close()

        asyncio.run(send())
    statuses = {name: answer.status for name, answer in zip(kinds, outcome.answers, strict=True)}
    refused = {name: status for name, status in statuses.items() if status != 200}
    assert refused == {"import": 409, "stats of no tenant": 404}
    asked = [sent.decode().split(" ", 2)[:2] for sent in kinds.values()]
    left = {
        (method.upper(), path.removeprefix("/v1/tenants/{tenant}"))
        for path, methods in routes.items()
        for method in methods
        if path.startswith("/v1/tenants/{tenant}")
        and not any(
            method.upper() == verb and re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), at.partition("?")[0])
            for verb, at in asked
        )
    }
    # the former calls an LLM for each turn, the latter is as cheap as that of all
    assert left == {("PUT", "/policy"), ("GET", "/jobs/{job_id}")}
