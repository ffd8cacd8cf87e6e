"""Answers over HTTP: whole and in pieces, within the token budget of their key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from undertow.engine.base.model import Usage
from undertow.engine.base.queries import AnswerQuery
from undertow.engine.base.results import Answer, SearchResult
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.llm.replies import BadReply, BrokenOff
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import KeyLimits

from ...support.llm_servers import completion, odd_server, wait_until
from ...support.service.http import Running, at, intercepted, is_problem, said, serving
from ...support.service.wire import Wire

COST = Usage(1, 700, 0, 50)
ASK = {"question": "What of the boat?"}


@pytest.fixture(scope="module", autouse=True)
def ann(client: httpx2.Client) -> None:
    """A tenant with one turn."""
    client.post(at("ann", "/memories"), json={"messages": said("the boat needs planks")})


def events(response: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """The server-sent events of a response."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        event, data = block.split("\n")
        found.append((event.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_piece_has_a_status(running: Running, stream: bool) -> None:
    client = running.client()
    is_problem(client.post(at("nobody", "/answer"), json={**ASK, "stream": stream}), 404, "unknown-tenant")
    poor = running.client(limits=KeyLimits(tokens_per_day=10))
    refused = poor.post(at("ann", "/answer"), json={**ASK, "stream": stream})
    is_problem(refused, 429, "token-budget")
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    for mode in ("best_effort", "worst"):
        odd = client.post(at("ann", "/answer"), json={**ASK, "stream": stream, "mode": mode})
        assert "mode" in is_problem(odd, 422, "input")["detail"]
    frugal = running.client(limits=KeyLimits(tokens_per_day=2 * running.service.answer_tokens("hybrid")))
    dear = {**ASK, "stream": stream, "mode": "best_effort"}
    is_problem(frugal.post(at("ann", "/answer"), json=dear), 429, "token-budget")
    assert frugal.post(at("ann", "/answer"), json={**dear, "mode": "hybrid"}).status_code == 200


class Scripted:
    """Memories whose answers cost COST, and go as a test says: what cannot be had from a sound LLM."""

    def __init__(self) -> None:
        self.begun = self.closed = 0
        self.error: Exception | None = None
        self.waits = False

    def around(self, memories: AsyncMemories) -> AsyncMemories:
        memories.answer_stream = self.answer_stream  # type: ignore[method-assign]
        return intercepted(memories, AnswerQuery, lambda *_: self.answer())

    async def answer(self) -> Answer:
        self.begun += 1
        if self.error is not None:
            raise self.error
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.closed += 1
        return Answer("On Sunday.", SearchResult((), (), ()), COST)

    async def answer_stream(self, query: AnswerQuery) -> AsyncGenerator[str | Answer]:
        try:
            yield "On "
            if self.waits:
                await asyncio.Event().wait()
            yield await self.answer()
        finally:
            self.closed += 1


def left(running: Running, key: str) -> int | None:
    """The tokens that a key has left today."""
    kept = KeyFile(running.folder / "keys.json").require(key.split("_")[1])
    return asyncio.run(running.service.budgets.left(kept.principal))


def test_the_budget_is_charged_what_an_answer_took(tmp_path: Path) -> None:
    scripted = Scripted()
    with serving(tmp_path, wrap=scripted.around) as running:
        key = running.key(limits=KeyLimits(tokens_per_day=50_000))
        client = running.client_of(key)
        assert client.post(at("ann", "/answer"), json=ASK).json()["usage"]["prompt_tokens"] == 700
        assert left(running, key) == 50_000 - 750
        streamed = client.post(at("ann", "/answer"), json={**ASK, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [event for event, _ in events(streamed)] == ["delta", "done"]
        assert left(running, key) == 50_000 - 1_500
        scripted.error = BadReply("nonsense", Usage(2, 300, 0, 100))
        is_problem(client.post(at("ann", "/answer"), json=ASK), 503, "llm-reply")
        assert left(running, key) == 50_000 - 1_900
        broken = events(client.post(at("ann", "/answer"), json={**ASK, "stream": True}))
        assert [event for event, _ in broken] == ["delta", "error"]
        assert broken[-1][1]["type"] == "urn:undertow:error:llm-reply"
        assert left(running, key) == 50_000 - 2_300
        scripted.error = BrokenOff("the server has gone", Usage(1, 200, 0, 11))
        broken = events(client.post(at("ann", "/answer"), json={**ASK, "stream": True}))
        assert broken[-1][1]["type"] == "urn:undertow:error:llm-broke-off"
        assert left(running, key) == 50_000 - 2_511


def test_an_unusable_reply_is_metered_and_charged(tmp_path: Path) -> None:
    """A reply that is empty, and so is its repair."""
    empty = completion("", usage={"prompt_tokens": 70, "completion_tokens": 3})
    with (
        odd_server(lambda body, number: (200, empty)) as url,
        serving(tmp_path, parts=EngineParts(), engine={"llm_url": url}) as running,
    ):
        key = running.key(limits=KeyLimits(tokens_per_day=50_000))
        client = running.client_of(key)
        client.post(at("ann", "/memories"), json={"messages": said("the boat needs planks")})
        is_problem(client.post(at("ann", "/answer"), json=ASK), 503, "llm-reply")
        spent = client.get(at("ann", "/usage")).json()["answer"]
        assert (spent["calls"], spent["prompt_tokens"], spent["completion_tokens"]) == (2, 140, 6)
        assert left(running, key) == 50_000 - 146


def test_a_failed_answer_is_charged_its_earlier_calls_too(tmp_path: Path) -> None:
    """In best effort a judgement succeeds, and then the answer is empty, and so is its repair."""
    used = {"prompt_tokens": 70, "completion_tokens": 3}

    def replied(body: dict[str, Any], _: int) -> tuple[int, Any]:
        return 200, completion(
            '{"lines": [1], "sufficient": true}' if "response_format" in body else "", usage=used
        )

    with (
        odd_server(replied) as url,
        serving(tmp_path, parts=EngineParts(), engine={"llm_url": url, "policy": "himem"}) as running,
    ):
        key = running.key(limits=KeyLimits(tokens_per_day=500_000))
        client = running.client_of(key)
        client.post(at("ann", "/memories"), json={"messages": said("the boat needs planks")})
        asked = client.post(at("ann", "/answer"), json={**ASK, "mode": "best_effort"})
        is_problem(asked, 503, "llm-reply")
        assert left(running, key) == 500_000 - 3 * 73


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_call_and_is_charged_the_most(tmp_path: Path, stream: bool) -> None:
    scripted = Scripted()
    scripted.waits = True
    with serving(tmp_path, wrap=scripted.around) as running:
        key = running.key(limits=KeyLimits(tokens_per_day=50_000))
        body = orjson.dumps({**ASK, "stream": stream})
        with Wire(running) as asking:
            length = f"Content-Length: {len(body)}"
            asking.head(key, "Content-Type: application/json", length, path=at("ann", "/answer"))
            asking.socket.sendall(body)
            if stream:
                with asking.socket.makefile("rb") as lines:
                    assert any(line.startswith(b"event: delta") for line in lines)
            else:
                wait_until(lambda: scripted.begun == 1)
        wait_until(lambda: scripted.closed == 1 and running.service.load.under_way == 0)
        assert left(running, key) == 50_000 - running.service.answer_tokens(None)
