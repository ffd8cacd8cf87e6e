"""Several LLM servers behind one client: balance, limits, deaths, refusals; over real HTTP on loopback."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.server import MockServer, spawn_server
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.circuit_breaker import CircuitBreaker
from undertow.engine.llm.client import BadReply, ServerRefused
from undertow.engine.llm.loop_tasks import hand_on
from undertow.engine.llm.replies import Trouble
from undertow.serving.vllm.local_server import free_port

from ..support.faults.harness import RATES, THETA, assert_same_state, end_state, turns_of, write_log
from ..support.faults.spoilt_llm import served
from ..support.llm_servers import (
    Counting,
    at_once,
    client,
    completion,
    expected,
    merge,
    odd_server,
    prompts,
    results,
    server_stats,
    servers,
    wait_until,
)

# ---- balance


def test_the_server_with_the_fewest_requests_under_way_is_next() -> None:
    handlers = [Counting() for _ in range(3)]
    with servers(*handlers) as urls, client(urls, llm_model="a") as llm:
        futures = []
        for n in range(12):
            futures.append(llm.submit(merge(n), tenant="t"))
            wait_until(lambda: sum(map(len, handlers)) == len(futures))
            counts = [len(handler) for handler in handlers]
            assert max(counts) - min(counts) <= 1
        idle = handlers[1]
        idle.go.set()
        wait_until(lambda: sum(future.done() for future in futures) == 4)
        more = [llm.submit(merge(100 + n), tenant="t") for n in range(4)]
        results(more)
        assert [len(handler) for handler in handlers] == [4, 8, 4], "the one that became free took all"
        for handler in handlers:
            handler.go.set()
        results(futures)


def test_each_server_has_the_limit_for_itself() -> None:
    handlers = [Counting(), Counting()]
    with servers(*handlers) as urls, client(urls, llm_model="a", llm_in_flight=3) as llm:
        futures = [llm.submit(merge(n), tenant="t") for n in range(20)]
        wait_until(lambda: sum(map(len, handlers)) == 6)
        llm.healthy()  # all 20 have been handed over by now
        assert llm.in_flight == 6
        assert [len(handler) for handler in handlers] == [3, 3]
        for handler in handlers:
            handler.go.set()
        results(futures)
        assert llm.in_flight == 0


def test_a_slow_server_does_not_hold_the_others_up() -> None:
    with spawn_server(latency_ms=3000) as slow, spawn_server() as fast:
        with client(f"{slow},{fast}", llm_in_flight=4) as llm:
            results([llm.submit(merge(n), tenant="t") for n in range(150)])
        calls = [sum(server_stats(url)["calls"].values()) for url in (slow, fast)]
        peaks = [server_stats(url)["max_in_flight"] for url in (slow, fast)]
    assert sum(calls) == 150
    assert calls[1] > 3 * calls[0]
    assert max(peaks) <= 4


def test_any_number_of_servers_gives_the_same_replies() -> None:
    asked = [prompt for n in range(12) for prompt in prompts(n)]
    wanted = expected(asked, MockReplies())
    with ExitStack() as stack:
        urls = [stack.enter_context(spawn_server(error_rate=rate)) for rate in (0.0, 0.3, 0.6)]
        for count in (1, 2, 3):
            with client(",".join(urls[:count])) as llm:
                done = results([llm.submit(prompt, tenant="t") for prompt in asked])
            assert [(c.reply, c.usage) for c in done] == [(c.reply, c.usage) for c in wanted]


def test_a_prompt_that_all_servers_fail_at_does_not_circle_without_a_pause() -> None:
    with client("http://a:1,http://b:1,http://c:1") as llm:
        waits = [llm._retries._wait_s(attempt, Trouble("x", retry_after_s=2.0)) for attempt in range(6)]
    assert waits[0:2] == waits[3:5] == [0.0, 0.0]
    assert waits[2] == waits[5] == 2.0
    with client("http://a:1") as llm:
        assert all(llm._retries._wait_s(attempt, Trouble("x")) > 0 for attempt in range(4))


# ---- deaths


def test_a_dead_server_is_taken_out_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "undertow.engine.llm.load_balancer")
    port = free_port()
    mortal_url = f"http://127.0.0.1:{port}/v1"
    with spawn_server() as steady, client(f"{mortal_url},{steady}", llm_in_flight=8) as llm:
        with spawn_server(port=port):
            results([llm.submit(merge(n), tenant="t") for n in range(40)])
            assert server_stats(mortal_url)["calls"]["merge"] > 0
        results([llm.submit(merge(100 + n), tenant="t") for n in range(200)])
        assert llm.unreachable_s is None, "one of them answers"
        assert f"{mortal_url} gets no requests for now" in caplog.text
        attempts = caplog.text.count(mortal_url)
        results([llm.submit(merge(500 + n), tenant="t") for n in range(50)])
        assert caplog.text.count(mortal_url) == attempts, "an outage is told once"
        with spawn_server(port=port):
            wait_until(
                lambda: results([llm.submit(merge(900), tenant="t")]) != [] and "is back" in caplog.text
            )
            results([llm.submit(merge(1000 + n), tenant="t") for n in range(60)])
            assert server_stats(mortal_url)["calls"]["merge"] > 10
    assert f"{mortal_url} is back" in caplog.text


def test_unreachable_only_when_all_are_silent() -> None:
    ports = free_port(), free_port()
    with client(",".join(f"http://127.0.0.1:{port}/v1" for port in ports), llm_in_flight=2) as llm:
        with spawn_server(port=ports[0]):
            results([llm.submit(merge(n), tenant="t") for n in range(30)])
            assert llm.unreachable_s is None
        futures = [llm.submit(merge(100 + n), tenant="t") for n in range(10)]
        wait_until(lambda: (llm.unreachable_s or 0) > 0.5)
        assert not any(future.done() for future in futures)
        with spawn_server(port=ports[1]):
            results(futures)
            assert llm.unreachable_s is None


@pytest.mark.usefixtures("impatient")
def test_requests_are_called_back_from_a_server_that_vanished() -> None:
    """It takes connections and says nothing: without the watch its requests would wait for the timeout."""
    good = at_once()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as hole, odd_server(good) as url:
        vanished = f"http://127.0.0.1:{hole.getsockname()[1]}/v1"
        with client(f"{vanished},{url}", llm_model="a", llm_in_flight=4, llm_timeout_s=600.0) as llm:
            results([llm.submit(merge(n), tenant="t") for n in range(30)])
            assert len(good) == 30
            assert "stopped responding" in (llm.last_error or "")
            assert llm.unreachable_s is None


@pytest.mark.usefixtures("impatient")
def test_a_slow_server_that_answers_a_knock_keeps_its_requests() -> None:
    slow, fast = Counting(), at_once()
    with servers(slow, fast) as urls, client(urls, llm_model="a") as llm:
        futures = [llm.submit(merge(n), tenant="t") for n in range(8)]
        wait_until(lambda: len(slow) >= 1 and sum(future.done() for future in futures) == 8 - len(slow))
        kept = len(slow)
        time.sleep(1.0)  # ten times as long as it takes to be asked whether it is there
        assert (len(slow), llm.in_flight) == (kept, kept)
        slow.go.set()
        results(futures)
        assert len(slow) + len(fast) == 8


def test_cancelling_and_closing_with_a_dead_server(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Counting()
    with odd_server(stuck) as url:
        llm = client(f"{url},http://127.0.0.1:{free_port()}/v1", llm_model="a", llm_in_flight=2)
        futures = [llm.submit(merge(n), tenant="t") for n in range(40)]
        wait_until(lambda: len(stuck) == 2)
        llm.cancel(futures[0])
        wait_until(lambda: futures[0].cancelled())
        llm.close()
        assert all(future.cancelled() for future in futures)
        stuck.go.set()
    assert "never retrieved" not in caplog.text


def test_the_error_of_work_that_nobody_waits_for_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise OSError("the tenant's name")

    async def hand_on_late() -> None:
        await asyncio.wait([task := asyncio.ensure_future(fail())])
        gone: Future[None] = Future()
        gone.cancel()
        hand_on(task, gone)

    asyncio.run(hand_on_late())
    assert not caplog.text


# ---- refusals and models


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_one_that_refuses_is_named_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, wrong = at_once(), at_once(404, {"error": {"message": "no such model"}})
    with odd_server(good) as url, odd_server(wrong) as wrong_url:
        with client(f"{wrong_url},{url}", llm_model="a", llm_in_flight=4) as llm:
            results([llm.submit(merge(n), tenant="t") for n in range(40)])
            assert (len(good), llm.unreachable_s) == (40, None)
        assert 1 <= len(wrong) <= 4, "those that were under way when it was noticed"
        told = [text for text in warnings_of(caplog) if "no such model" in text]
        assert len(told) == 1 and wrong_url in told[0] and "UNDERTOW_LLM_MODEL" in told[0]


def test_when_all_refuse_each_request_asks_again_and_fails() -> None:
    refusals = [at_once(401, {"error": {"message": "no such key"}}) for _ in range(2)]
    with servers(*refusals) as urls, client(urls, llm_model="a") as llm:
        for n in range(3):
            before = sum(map(len, refusals))
            assert isinstance(llm.submit(merge(n), tenant="t").exception(30), ServerRefused)
            assert sum(map(len, refusals)) > before
        assert llm.unreachable_s is None


def test_a_refusal_beside_an_outage_waits_for_the_outage() -> None:
    """Turned away by one, the request is still good for the other, which is only away."""
    port = free_port()
    refusing = at_once(403, {"error": {"message": "not yours"}})
    with servers(refusing) as url, client(f"{url},http://127.0.0.1:{port}/v1", llm_model="a") as llm:
        future = llm.submit(merge(), tenant="t")
        wait_until(lambda: (llm.unreachable_s or 0) > 0.3)
        assert not future.done()
        with odd_server(at_once(), port=port):
            assert future.result(30).usage.calls == 1


def test_a_rejected_prompt_is_not_taken_elsewhere() -> None:
    rejecting = [at_once(400, {"error": {"message": "too long"}}) for _ in range(2)]
    with servers(*rejecting) as urls, client(urls, llm_model="a") as llm:
        assert isinstance(llm.submit(merge(), tenant="t").exception(30), BadReply)
    assert sum(map(len, rejecting)) == 1


def test_without_a_setting_all_must_offer_the_model_that_the_first_offers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = Counting(), Counting()
    with odd_server(one, ["small", "tiny"]) as url, odd_server(other, ["large"]) as other_url:
        with client(f"{url},{other_url}") as llm:
            futures = [llm.submit(merge(n), tenant="t") for n in range(6)]
            wait_until(lambda: len(one) + len(other) == 6)
            one.go.set()
            other.go.set()
            results(futures)
            ok, text = llm.healthy()
        asked = Counter(one.asked + other.asked)
        assert asked in (Counter(small=6), Counter(large=6)), "never both"
        told = [text for text in warnings_of(caplog) if "must serve one model" in text]
        assert len(told) == 1 and url in told[0] and other_url in told[0]
    assert not ok and f"{url} serves small" in text
    assert f"{other_url} has no model small, it has large" in text


def test_health_names_each_server() -> None:
    with servers(at_once(), at_once()) as urls:
        one, other = urls.split(",")
        with client(urls, llm_model="a") as llm:
            assert llm.healthy() == (True, f"{one} serves a; {other} serves a")
        gone = f"http://127.0.0.1:{free_port()}/v1"
        with client(f"{one},{gone}", llm_model="a") as llm:
            ok, text = llm.healthy()
            assert not ok and f"{one} serves a" in text and f"{gone} cannot be reached" in text


def test_the_most_urgent_goes_first_wherever_a_place_is_free() -> None:
    order: list[str] = []
    let_go = threading.Semaphore(0)

    def handle(body: dict[str, Any], number: int) -> tuple[int, Any]:
        form = body.get("response_format")
        order.append(form["json_schema"]["name"] if form else "answer")
        let_go.acquire(timeout=30)
        return 200, completion(json.dumps({"same_story": False, "narrative": ""}))

    with servers(handle, handle) as urls, client(urls, llm_model="a", llm_in_flight=1) as llm:
        held = [llm.submit(merge(n), tenant="t") for n in range(2)]
        wait_until(lambda: len(order) == 2)
        of_one = prompts(1)
        futures = [llm.submit(prompt, tenant="t") for prompt in (of_one[0], of_one[0], of_one[3], of_one[3])]
        llm.healthy()
        for asked in range(3, 7):  # one at a time: what is asked first also arrives first
            let_go.release()
            wait_until(partial(lambda count: len(order) == count, asked))
        let_go.release(100)  # repairs of bad replies too
        results(held + futures[2:])
        assert all(isinstance(future.exception(30), BadReply) for future in futures[:2])
    assert order[:4] == ["merge", "merge", "answer", "answer"]
    assert set(order[4:]) == {"episode"}


# ---- an engine over several


def test_an_engine_that_loses_one_of_two_servers_remembers_the_same(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", ("ann", "bob", "cleo"), 16)
    of_tenants = turns_of(log).values()
    turns = [turn for together in zip(*of_tenants, strict=True) for turn in together]

    def remembered(store: Path, urls: str, kill_after: int | None, kill: ExitStack) -> None:
        settings = Settings(device="cpu", **THETA, llm_url=urls)
        with Engine(store, settings, HashingEncoder(384), llm=make_llm(settings)) as engine:
            engine.add_batch(turns)
            while kill_after is not None and engine.stats()["llm_calls"] < kill_after:
                engine.step(0.05)
            kill.close()
            assert engine.drain()

    with served(MockServer(MockReplies(**RATES))) as url:
        remembered(tmp_path / "one", url, None, ExitStack())
    with served(MockServer(MockReplies(**RATES))) as steady, ExitStack() as mortal:
        url = mortal.enter_context(spawn_server(**RATES))
        remembered(tmp_path / "two", f"{url},{steady}", 15, mortal)
    assert_same_state(end_state(tmp_path / "two"), end_state(tmp_path / "one"))


# ---- the circuit breaker of one server


def test_an_outage_ends_by_a_knock_and_one_request_on_trial() -> None:
    slots = CircuitBreaker(limit=4, timeout_s=300.0)
    for _ in range(12):
        assert slots.free == 4 and not slots.is_open
        slots.began()
        slots.failed()
        slots.active -= 1
    assert slots.is_open and slots.free == 0
    slots.probed(answered=False)
    assert slots.free == 0
    slots.probed(answered=True)
    assert slots.free == 1, "one request tries it"
    slots.began()
    assert slots.free == 0
    slots.failed()
    slots.active -= 1
    assert slots.free == 0, "the trial failed: it is knocked at again"
    slots.probed(answered=True)
    slots.answered()
    slots.probed(answered=True)  # a knock that was on its way when the request was answered
    assert (slots.free, slots.is_open, slots.half_open, slots.silent_s) == (4, False, False, None)


def test_pauses_grow_up_to_a_quarter_of_a_minute() -> None:
    slots = CircuitBreaker(limit=1, timeout_s=300.0)
    slots.lost()
    assert slots.is_open
    first_s = slots.pause_s
    for _ in range(20):
        slots.probed(answered=False)
    assert first_s < 0.1 < 7 < slots.pause_s <= 15


def test_a_failure_beside_a_slow_reply_proves_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    slots = CircuitBreaker(limit=2, timeout_s=10.0)
    slots.began()
    slots.began()
    slots.failed()
    now = 105.0
    slots.failed()
    assert slots.silent_s == 0.0, "the other request may be about to be answered"
    now = 111.0
    slots.failed()
    assert slots.silent_s == 11.0, "it has timed out by now"
    slots.refused(ServerRefused("no"))
    assert slots.silent_s is None and slots.is_open, "a refusal is an answer"
