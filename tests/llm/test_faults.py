"""An LLM server that fails in every way: no turn is lost, no bad reply is stored, work goes on later."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from starlette.responses import JSONResponse, Response

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.server import MockServer, spawn_server
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PolicyName
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import ServerRefused
from undertow.serving.vllm.local_server import free_port

from ..support.engine import turn_of
from ..support.faults.harness import (
    KINDS,
    RATES,
    THETA,
    WINDOWS,
    State,
    assert_prefix_stored,
    assert_same_state,
    end_state,
    memories_of,
    reports,
    turns_of,
    write_log,
)
from ..support.faults.spoilt_llm import POISON, SpoiltReplies, SpoiltServer, served
from ..support.soak.rare import COMPARED
from ..support.soak.runs import report

LOCOMO = Path(__file__).parents[3] / "shared" / "data" / "locomo_dev.json"
TENANTS = ("ann", "bob", "cleo")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", TENANTS, 24, session_turns=2)


@pytest.fixture(params=get_args(PolicyName))
def policy(request: pytest.FixtureRequest) -> PolicyName:
    name: PolicyName = request.param
    return name


@contextmanager
def opened(store: Path, url: str | None, **values: Any) -> Iterator[Engine]:
    settings = Settings(device="cpu", llm_url=url, **{**THETA, **WINDOWS, **values})
    with Engine(store, settings, HashingEncoder(384), llm=make_llm(settings)) as engine:
        engine.resume()
        yield engine


def add_all(engine: Engine, log: Path) -> None:
    of_tenants = turns_of(log).values()
    engine.add_batch([turn for together in zip(*of_tenants, strict=True) for turn in together])


def healthy(**options: Any) -> AbstractContextManager[str]:
    """A server that never fails, in a thread: quicker to start than a process."""
    return served(MockServer(MockReplies(**RATES), **options))


@pytest.fixture(scope="module")
def expected(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[PolicyName], State]:
    """The end state under a policy with a server that never fails."""

    @cache
    def of(policy: PolicyName) -> State:
        store = tmp_path_factory.mktemp("expected")
        with healthy() as url, opened(store, url, policy=policy) as engine:
            add_all(engine, log)
            assert engine.drain()
        state = end_state(store)
        assert KINDS[policy] <= state.kinds()
        assert state.jobs == []
        return state

    return of


# ---- bad replies


def settled_seqs(store: Path) -> dict[str, list[int]]:
    with reports(store) as of:
        return {
            name: [r["seq"] for r in of.export(name) if r["kind"] == "decision"]
            for name in of.tenants.names()
        }


@pytest.mark.rarely(policy=(*COMPARED, "nemori"))
@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("recmem", {"merge", "episode"}),
        ("eager", {"extract"}),
        ("nemori", {"partition", "narrate"}),
        ("himem", {"segment"}),
        ("a-mem", {"annotate"}),
        ("memory-os", {"topic"}),
    ],
)
def test_three_in_ten_replies_bad_and_three_in_ten_requests_failing(
    policy: PolicyName, parts: set[str], log: Path, tmp_path: Path
) -> None:
    bad = SpoiltReplies(3, 0.3, 0.15, poison_rate=0.3)
    server = SpoiltServer(bad, error_rate=0.3)
    figures = feed_spoilt(server, bad, log, tmp_path, policy)
    assert {"500", "503", "429", "dropped"} <= server.faults.keys()
    assert len(bad.ways) >= 7, "most ways of failing must occur"
    with reports(tmp_path) as of:
        assert parts <= {job["operation"] for job in of.jobs()}
    replay_healthily(tmp_path, bad.given, figures["dead_letters"], policy)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_three_in_ten_faults_over_the_locomo_conversations(tmp_path: Path) -> None:
    if not LOCOMO.exists():
        pytest.skip("the LoCoMo development conversations may not be copied into the project")
    bad = SpoiltReplies(5, 0.3, 0.15, poison_rate=0.3)
    server = SpoiltServer(bad, error_rate=0.3)
    figures = feed_spoilt(server, bad, LOCOMO, tmp_path, "recmem")
    replay_healthily(tmp_path, bad.given, figures["dead_letters"], "recmem")
    shown = ("turns", "episodes", "facts", "merges", "dead_letters", "llm_calls")
    report(
        **{name: figures[name] for name in shown},
        server_faults=server.faults.total(),
        bad_replies=dict(bad.ways),
    )


def feed_spoilt(
    server: SpoiltServer, bad: SpoiltReplies, log: Path, store: Path, policy: PolicyName
) -> dict[str, Any]:
    """Feed a log with such a server: all is stored and settled, nothing of a bad reply. The figures."""
    turns = turns_of(log)
    with served(server) as url, opened(store, url, policy=policy, window_messages=4) as engine:
        run = Ingest(engine)
        run.feed([log])
        assert run.settle()
        figures = engine.stats()
        assert all(len(engine.search(name, "boat and tide").turns) == 10 for name in turns)
    assert_prefix_stored(store, turns, {name: len(line) for name, line in turns.items()})
    assert figures["undecided_turns"] == figures["pending_jobs"] == 0
    assert {name: list(range(len(line))) for name, line in turns.items()} == settled_seqs(store)

    texts = memories_of(store)
    assert texts and all(POISON not in text for text in texts)
    assert told(texts, policy) <= bad.given

    with reports(store) as of:
        parked = of.jobs()
    assert len(parked) == figures["dead_letters"] > 0
    assert {job["state"] for job in parked} == {"parked"}
    assert all(job["reason"] and job["cluster_seqs"] for job in parked)
    return figures


def told(texts: Sequence[str], policy: PolicyName) -> set[str]:
    """What memories say in the LLM's words: HiMem's episodes are a topic, a summary and their turns."""
    if policy == "a-mem":
        return {text.rpartition("\nContext: ")[2] for text in texts}
    if policy == "memory-os":
        return {text.rpartition("\nKeywords: ")[0] or text for text in texts}
    parts = [text.split("\n") for text in texts]
    if policy != "himem":
        return set(texts)
    topics = {lines[0].rpartition(" (")[0] for lines in parts if len(lines) > 1}
    return topics | {lines[0] for lines in parts if len(lines) == 1} | {p[1] for p in parts if len(p) > 1}


def replay_healthily(store: Path, given_before: set[str], parked: int, policy: PolicyName) -> None:
    """With a server that works the parked jobs run, at the log's tail, and lose their parked state."""
    good = SpoiltReplies(3)
    with served(SpoiltServer(good)) as url, opened(store, url, policy=policy) as engine:
        names = engine.tenants.names()
        first_new = {name: engine.tenants.existing(name).next_seq for name in names}
        known = {m.id for name in names for m in engine.get_all(name)}
        assert engine.replay_jobs() == parked
        assert engine.drain()
        assert engine.stats()["dead_letters"] == 0
        made = [(name, m) for name in names for m in engine.get_all(name) if m.id not in known]
    assert made
    assert all(m.born_at_seq >= first_new[name] for name, m in made)
    assert all(POISON not in text for text in memories_of(store))
    assert told(memories_of(store), policy) <= given_before | good.given
    assert end_state(store).jobs == []


# ---- trouble on the way


@pytest.mark.rarely(policy=(*COMPARED, "nemori"))
def test_requests_that_fail_change_nothing(
    policy: PolicyName, log: Path, expected: Callable[[PolicyName], State], tmp_path: Path
) -> None:
    with healthy(error_rate=0.3) as url, opened(tmp_path, url, policy=policy) as engine:
        add_all(engine, log)
        assert engine.drain()
    assert_same_state(end_state(tmp_path), expected(policy))


def assert_all_searchable_and_pending(engine: Engine, log: Path) -> None:
    figures, turns = engine.stats(), turns_of(log)
    assert figures["turns"] == sum(len(line) for line in turns.values())
    assert figures["pending_jobs"] == len(TENANTS)
    assert figures["dead_letters"] == figures["episodes"] == figures["llm_calls"] == 0
    for name, line in turns.items():
        hits = engine.search(name, line[-1].text, k_sub=1).turns
        assert hits[0].score == pytest.approx(1.0, abs=1e-3), "the last turn of the log is found"


@pytest.fixture
def gone() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}/v1"


@pytest.fixture
def hanging() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.rarely(policy=("eager", "nemori"))
@pytest.mark.parametrize(
    ("trouble", "policy"),
    [("gone", "recmem"), ("hanging", "eager"), ("gone", "nemori"), ("hanging", "himem")],
)
def test_no_server_for_a_whole_run(
    trouble: str,
    policy: PolicyName,
    log: Path,
    expected: Callable[[PolicyName], State],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = request.getfixturevalue(trouble)
    with opened(
        tmp_path, url, policy=policy, llm_timeout_s=0.2, llm_patience_s=0.6, search="dense"
    ) as engine:
        began_s = time.monotonic()
        add_all(engine, log)
        assert not engine.drain()
        assert time.monotonic() - began_s > 0.5, "it waits as long as it was told to"
        assert engine.server_lost
        assert url.removesuffix("/v1") in (engine.llm_error or "")
        assert_all_searchable_and_pending(engine, log)
    assert all(job["state"] == "pending" for job in end_state(tmp_path).jobs)
    with opened(tmp_path, None, policy=policy, search="dense") as engine:
        assert not engine.drain()
        assert_all_searchable_and_pending(engine, log)
    with healthy() as url, opened(tmp_path, url, policy=policy) as engine:
        assert engine.drain()
    assert_same_state(end_state(tmp_path), expected(policy))


class HesitantServer(MockServer):
    """Answers the first request with an error, asks for a pause, and then takes its time."""

    def _fault(self, body: bytes) -> Response | None:
        if self.faults["503"]:
            return None
        self.faults["503"] += 1
        return Response("busy", 503, {"retry-after": "0.5"})


def test_a_slow_reply_after_an_error_is_not_a_lost_server(tmp_path: Path) -> None:
    server = HesitantServer(MockReplies(), latency_s=0.5)
    with served(server) as url, opened(tmp_path, url, llm_patience_s=0.2) as engine:
        engine.add_batch([turn_of("ann", n, f"I sail my boat on the lake, day {n}") for n in range(4)])
        assert engine.drain(), "both the pause and the reply took longer than the patience"
        assert server.faults["503"] == 1
        assert engine.stats()["llm_calls"] > 0 and not engine.server_lost


def test_a_server_that_comes_late_and_one_that_dies(
    log: Path, expected: Callable[[PolicyName], State], tmp_path: Path
) -> None:
    port = free_port()
    with opened(tmp_path, f"http://127.0.0.1:{port}/v1", llm_patience_s=60) as engine:
        add_all(engine, log)
        for _ in range(5):
            engine.step(0.05)
        assert engine.stats()["llm_calls"] == 0 and not engine.server_lost
        with spawn_server(port=port, **RATES):
            while engine.stats()["llm_calls"] < 40:
                engine.step(0.05)
        for _ in range(5):
            engine.step(0.05)
        assert engine.lag.undecided_turns > 0
        with spawn_server(port=port, **RATES):
            assert engine.drain(), "the same run goes on as soon as the server is back"
    assert_same_state(end_state(tmp_path), expected("recmem"))


@pytest.mark.rarely(policy=COMPARED)
def test_a_server_lost_in_the_middle_of_a_job(
    policy: PolicyName, log: Path, expected: Callable[[PolicyName], State], tmp_path: Path
) -> None:
    with healthy() as url, opened(tmp_path, url, policy=policy) as engine:
        add_all(engine, log)
        while engine.stats()["llm_calls"] < 20:
            engine.step(0.05)
        assert engine.lag.running_jobs > 0
    with opened(tmp_path, None, policy=policy, search="dense") as engine:
        assert not engine.drain()
        assert len(engine.scheduler.blocked) > 0
    with healthy() as url, opened(tmp_path, url, policy=policy) as engine:
        assert engine.drain()
    assert_same_state(end_state(tmp_path), expected(policy))


# ---- a server that turns us away


_KEY: tuple[Any, ...] = ({"api_key": "right"}, {"llm_api_key": "wrong"}, "UNDERTOW_LLM_API_KEY")
_MODEL: tuple[Any, ...] = ({}, {"llm_model": "no-such-model"}, "no-such-model")


@pytest.mark.parametrize(
    ("policy", "options", "values", "named"),
    [("recmem", *_KEY), ("eager", *_MODEL), ("nemori", *_KEY), ("himem", *_MODEL)],
)
def test_a_refusal_surfaces_and_parks_nothing(
    policy: PolicyName,
    options: dict[str, str],
    values: dict[str, str],
    named: str,
    log: Path,
    expected: Callable[[PolicyName], State],
    tmp_path: Path,
) -> None:
    with healthy(**options) as url:
        with opened(tmp_path, url, policy=policy, search="dense", **values) as engine:
            add_all(engine, log)
            assert not engine.drain()
            assert isinstance(engine.scheduler.llm_calls.refused, ServerRefused)
            assert named in str(engine.scheduler.llm_calls.refused)
            assert_all_searchable_and_pending(engine, log)
            with pytest.raises(ServerRefused, match=named):
                engine.answer("ann", "Who sails?")
        right: dict[str, Any] = {"llm_api_key": options["api_key"]} if options else {}
        with opened(tmp_path, url, policy=policy, **right) as engine:
            assert engine.drain()
    assert_same_state(end_state(tmp_path), expected(policy))


class SpecialisedServer(MockServer):
    """Knows the model, and rejects every prompt."""

    async def _completion(self, body: bytes) -> Response:
        return JSONResponse({"error": {"message": "only embeddings are served"}}, 400)


def test_a_server_that_rejects_every_prompt_does_not_park_every_job(log: Path, tmp_path: Path) -> None:
    with served(SpecialisedServer(MockReplies())) as url, opened(tmp_path, url) as engine:
        add_all(engine, log)
        assert not engine.drain()
        assert "only embeddings" in str(engine.scheduler.llm_calls.refused)
        assert engine.stats()["dead_letters"] <= 2
    with healthy() as url, opened(tmp_path, url) as engine:
        assert engine.replay_jobs() <= 2
        assert engine.drain()
        figures = engine.stats()
        assert figures["dead_letters"] == figures["pending_jobs"] == 0 < figures["facts"]


# a context that some prompts of the policy need more of, and others less
CONTEXTS: dict[PolicyName, int] = {
    "recmem": 1_700,
    "eager": 1_570,
    "nemori": 1_700,
    "himem": 1_550,
    "a-mem": 1_620,
    "memory-os": 1_600,
}


@pytest.mark.parametrize(("policy", "context_tokens"), CONTEXTS.items())
def test_refused_prompts_are_parked_one_by_one(
    policy: PolicyName, context_tokens: int, log: Path, tmp_path: Path
) -> None:
    """A server with a smaller context than we believe rejects prompts, not us: the others go on."""
    with (
        healthy(context_tokens=context_tokens) as url,
        # of HiMem's fused prompts none is longer than another in this log
        opened(tmp_path, url, policy=policy, reply_tokens=1_024, calls="paper") as engine,
    ):
        add_all(engine, log)
        assert engine.drain()
        figures = engine.stats()
    assert figures["dead_letters"] > 0 and figures["facts"] > 0
    assert figures["pending_jobs"] == figures["undecided_turns"] == 0
    with reports(tmp_path) as of:
        assert all("rejects the prompt" in job["reason"] for job in of.jobs())
