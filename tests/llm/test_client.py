"""OpenAILLM against real HTTP on loopback: the mock server, and servers that misbehave on purpose."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.server import spawn_server
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Usage
from undertow.engine.llm.client import BadReply, OpenAILLM, ServerRefused, read_reply
from undertow.prompts.builders import answer_prompt
from undertow.prompts.reply_schemas import MergeReply

from ..support.llm_servers import (
    GOOD,
    client,
    completion,
    expected,
    merge,
    odd_server,
    prompts,
    results,
    scripted,
    server_stats,
    wait_until,
)


@pytest.fixture(scope="module")
def mock_url() -> Iterator[str]:
    with spawn_server() as url:
        yield url


def test_replies_usage_and_model(mock_url: str) -> None:
    asked = [prompt for n in range(5) for prompt in prompts(n)]
    with client(mock_url) as llm:
        done = results([llm.submit(prompt, tenant="t") for prompt in asked])
        assert llm.unreachable_s is None
        assert llm.in_flight == 0
    wanted = expected(asked, MockReplies())
    assert [c.reply for c in done] == [c.reply for c in wanted]
    assert [c.usage for c in done] == [c.usage for c in wanted]
    assert all(c.usage.cached_prompt_tokens > 0 for c in done)
    assert {c.model for c in done} == {"mock-llm"}
    assert all(c.latency_s > 0 for c in done)


def test_what_is_sent() -> None:
    bodies: list[dict[str, Any]] = []

    def handle(body: dict[str, Any], number: int) -> tuple[int, Any]:
        bodies.append(body)
        return 200, GOOD if "response_format" in body else completion("An answer.")

    with odd_server(handle) as url, client(url, reply_tokens=99) as llm:
        llm.submit(merge(), tenant="t").result(30)
        answered = llm.submit(answer_prompt("Who?", [], [], [], None), tenant="t").result(30)
    first, second = bodies
    assert first["messages"] == merge().messages
    assert first["model"] == "a"  # the first that the server offers
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (0, 0, 99)
    form = first["response_format"]["json_schema"]
    assert form == {"name": "merge", "schema": MergeReply.wire_schema(), "strict": True}
    assert "response_format" not in second
    assert answered.reply == "An answer."


def test_a_bad_reply_is_repaired_once_and_both_calls_are_metered() -> None:
    asked = [prompt for n in range(3) for prompt in prompts(n)]
    with spawn_server(malformed_rate=1.0) as url, client(url) as llm:
        done = results([llm.submit(prompt, tenant="t") for prompt in asked])
    assert [c.reply for c in done] == [c.reply for c in expected(asked, MockReplies())]
    assert [c.usage for c in done] == [c.usage for c in expected(asked, MockReplies(malformed_rate=1.0))]
    assert all(c.usage.calls == 2 for c in done)


def test_a_second_bad_reply_is_an_error_not_an_empty_reply() -> None:
    prompt_tokens = 0
    with spawn_server(malformed_rate=1.0, malformed_sticky=True) as url, client(url) as llm:
        for future in [llm.submit(prompt, tenant="t") for prompt in prompts(0)]:
            error = future.exception(30)
            assert isinstance(error, BadReply)
            assert error.usage.calls == 2
            assert error.reason
            prompt_tokens += error.usage.prompt_tokens
        assert llm.unreachable_s is None
        stats = server_stats(url)
    assert sum(stats["calls"].values()) == 8
    assert stats["prompt_tokens"] == prompt_tokens > 0


@pytest.mark.parametrize(
    ("content", "finish_reason", "reason"),
    [
        ('{"same_story": tr', "length", "cut off"),
        ('{"same_story": true, "narrative": ""}', "stop", "narrative is empty"),
        ('{"same_story": true}', "stop", "narrative: Field required"),
        ('{"same_story": false, "narrative": "", "x": 1}', "stop", "x: Extra inputs"),
        ("Sure! {}", "stop", "Invalid JSON"),
        ("", "stop", "empty"),
        (None, "stop", "empty"),
        ('{"same_story": false, "narrative": ""}', "content_filter", "filter"),
    ],
)
def test_every_kind_of_bad_reply(content: str | None, finish_reason: str, reason: str) -> None:
    used = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    whole = completion(content, finish_reason, used)
    with scripted([{"whole": whole}]) as (url, bodies), client(url) as llm:
        error = llm.submit(merge(), tenant="t").exception(30)
    assert isinstance(error, BadReply)
    assert reason in error.reason
    assert error.usage == Usage(calls=2, prompt_tokens=20, completion_tokens=6)
    assert reason in bodies[1]["messages"][-1]["content"]
    assert len(bodies) == 2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_rejected_prompt_is_a_bad_reply(status: int) -> None:
    with odd_server(lambda body, n: (status, {"error": {"message": "too long"}})) as url, client(url) as llm:
        error = llm.submit(merge(), tenant="t").exception(30)
        assert isinstance(error, BadReply)
        assert "too long" in error.reason
        assert error.usage == Usage()
        assert llm.unreachable_s is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"error": {"message": "no such key"}}),
        (403, {"error": {"message": "not yours"}}),
        (404, {"error": {"message": "no such model"}}),
        (400, {"error": {"message": "no schemas here", "param": "response_format.type"}}),
        (200, "<html>a login page</html>"),
        (200, {"detail": "some other service"}),
    ],
)
def test_wrong_settings_are_told_apart_from_bad_replies(status: int, body: Any) -> None:
    with odd_server(lambda asked, n: (status, body)) as url, client(url) as llm:
        error = llm.submit(merge(), tenant="t").exception(30)
        assert isinstance(error, ServerRefused)
        assert "UNDERTOW_LLM_" in str(error)
        assert url in str(error)


def test_faults_are_retried_until_the_reply_comes() -> None:
    asked = [merge(n) for n in range(60)]
    seen: list[str] = []
    with (
        spawn_server(error_rate=0.4) as url,
        OpenAILLM(
            Settings(llm_url=url), on_call=lambda t, op, s, e, usage, outcome: seen.append(outcome)
        ) as llm,
    ):
        done = results([llm.submit(prompt, tenant="t") for prompt in asked])
        stats = server_stats(url)
    assert [(c.reply, c.usage) for c in done] == [(c.reply, c.usage) for c in expected(asked, MockReplies())]
    assert set(stats["faults"]) == {"500", "503", "429", "dropped"}
    assert seen.count("ok") == len(asked)
    assert seen.count("retry") == sum(stats["faults"].values())


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_each_transient_status_is_retried(status: int) -> None:
    def handle(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return (200, GOOD) if number else (status, {"error": {"message": "later"}})

    with odd_server(handle) as url, client(url) as llm:
        assert llm.submit(merge(), tenant="t").result(30).usage.calls == 1


def test_a_slow_server_times_out_and_is_asked_again() -> None:
    def handle(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 0:
            time.sleep(0.5)
        return 200, GOOD

    with odd_server(handle) as url, client(url, llm_timeout_s=0.2) as llm:
        llm.submit(merge(), tenant="t").result(30)
        assert "timed out" in (llm.last_error or "").lower()


def test_a_server_that_is_gone_is_asked_until_the_caller_cancels() -> None:
    with spawn_server() as url:
        pass
    attempts: list[str] = []
    llm = OpenAILLM(
        Settings(llm_url=url, llm_in_flight=4),
        on_call=lambda t, op, s, e, usage, outcome: attempts.append(outcome),
    )
    futures = [llm.submit(merge(n), tenant="t") for n in range(30)]
    wait_until(lambda: len(attempts) >= 13)  # past the point where an outage is declared
    assert llm.unreachable_s is not None
    assert url in (llm.last_error or "")
    assert not any(future.done() for future in futures)
    llm.cancel(futures[0])
    with pytest.raises(CancelledError):
        futures[0].result(5)
    llm.close()
    assert all(future.cancelled() for future in futures)
    assert set(attempts) <= {"retry", "cancelled"}


def test_cancelling_frees_the_slot() -> None:
    arrived, stuck = threading.Event(), threading.Event()

    def handle(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 0:
            arrived.set()
            stuck.wait(30)
        return 200, GOOD

    with odd_server(handle) as url, client(url, llm_in_flight=1) as llm:
        first, waiting, last = (llm.submit(merge(n), tenant="t") for n in range(3))
        assert arrived.wait(30)
        llm.cancel(waiting)
        llm.cancel(first)
        last.result(30)
        assert first.cancelled() and waiting.cancelled()
        stuck.set()


def test_missing_usage_is_said_once_and_not_made_up(caplog: pytest.LogCaptureFixture) -> None:
    with odd_server(lambda body, n: (200, GOOD)) as url, client(url) as llm:
        done = results([llm.submit(merge(n), tenant="t") for n in range(3)])
    assert [c.usage for c in done] == [Usage(calls=1)] * 3
    assert caplog.text.count("reports no token usage") == 1


def test_a_reply_that_utf8_cannot_carry_is_made_storable() -> None:
    content = '{"same_story": true, "narrative": "a\ud800b"}'
    with odd_server(lambda body, n: (200, completion(content))) as url, client(url) as llm:
        reply = llm.submit(merge(), tenant="t").result(30).reply
    assert reply == MergeReply(same_story=True, narrative="a?b")


def test_health_in_words(mock_url: str) -> None:
    with client(mock_url) as llm:
        assert llm.healthy() == (True, f"{mock_url} serves mock-llm")
    with client(mock_url.removesuffix("/v1"), llm_model="other") as llm:
        ok, text = llm.healthy()
        assert not ok and "has no model other, it has mock-llm" in text
    with client(mock_url + "/nowhere") as llm:
        assert "404" in llm.healthy().text
    with spawn_server(api_key="yes") as url, client(url, llm_api_key="no") as llm:
        ok, text = llm.healthy()
        assert not ok and "401" in text and "UNDERTOW_LLM_API_KEY" in text
    with client(url) as llm:
        ok, text = llm.healthy()
        assert not ok and "cannot be reached" in text


@pytest.mark.parametrize("url", [None, "", "localhost:8000", "ftp://host/v1", "http://"])
def test_a_url_that_is_none(url: str | None) -> None:
    with pytest.raises(ValueError, match="llm_url"):
        OpenAILLM(Settings(llm_url=url))


def test_closed_means_closed(mock_url: str) -> None:
    llm = client(mock_url)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.submit(merge(), tenant="t")


def test_read_reply_takes_a_plain_answer() -> None:
    assert read_reply(answer_prompt("Who?", [], [], [], None), " Ann. \n") == "Ann."
