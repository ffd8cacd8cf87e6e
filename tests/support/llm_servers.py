"""Servers that misbehave on purpose, prompts to ask them, and what a good server would say."""

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.base.config import Settings
from undertow.engine.llm.client import Completion, OpenAILLM
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    answer_prompt,
    episode_prompt,
    merge_prompt,
    refine_prompt,
)

from .service.scripted_server import Piece, Reply, Seen, served

SOON_S = 60

Handler = Callable[[dict[str, Any], int], tuple[int, Any] | Reply]
"""(request body, number of the request) -> (status, JSON body, or text sent as it is), or a whole reply."""


@contextmanager
def odd_server(handle: Handler, models: Sequence[str] = ("a", "b"), port: int = 0) -> Iterator[str]:
    """A server that answers POSTs as `handle` says and offers `models`."""
    numbers = itertools.count()
    offer = {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}

    def answer(seen: Seen) -> Reply:
        told = (200, offer) if seen.method == "GET" else handle(json.loads(seen.body), next(numbers))
        if isinstance(told, Reply):
            return told
        status, body = told
        if isinstance(body, str):
            return Reply(status, body.encode(), {"content-type": "text/html"})
        return Reply.of(body, status)

    with served(answer, port=port) as server:
        yield f"{server.url}/v1"


def completion(
    content: str | None, finish_reason: str = "stop", usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "finish_reason": finish_reason, "message": message}]
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "a",
        "choices": choices,
        "usage": usage,
    }


GOOD = completion('{"same_story": false, "narrative": ""}')


class Counting:
    """A handler that counts, keeps the models asked for, and answers once `go` is set."""

    def __init__(self, status: int = 200, body: Any = GOOD, *, wait_s: float = 30.0) -> None:
        self.go = threading.Event()
        self._wait_s = wait_s
        self.asked: list[str] = []
        self._answer = (status, body)

    def __call__(self, body: dict[str, Any], number: int) -> tuple[int, Any]:
        self.asked.append(body["model"])
        self.go.wait(self._wait_s)
        return self._answer

    def __len__(self) -> int:
        return len(self.asked)


def at_once(status: int = 200, body: Any = GOOD) -> Counting:
    handler = Counting(status, body)
    handler.go.set()
    return handler


@contextmanager
def servers(*handlers: Handler, models: tuple[str, ...] = ("a", "b")) -> Iterator[str]:
    """One server a handler; yields the text for `llm_url`."""
    with ExitStack() as stack:
        yield ",".join(stack.enter_context(odd_server(handler, models)) for handler in handlers)


def client(url: str, **settings: Any) -> OpenAILLM:
    return OpenAILLM(Settings(llm_url=url, **settings))


def merge(n: int = 0) -> Prompt:
    return merge_prompt(
        ShownMemory(1, None, "Ann sails."), ShownTurn(1, "2023-05-08", f"Ann: sail number {n}")
    )


def prompts(n: int) -> list[Prompt]:
    turns = [ShownTurn(i, "2023-05-08", f"Ann: lesson {n} of {i}") for i in (1, 2, 3)]
    memory = ShownMemory(1, None, "Ann learns.")
    asked = answer_prompt(f"What of {n}?", [memory], [], [], None)
    return [episode_prompt(turns), merge(n), refine_prompt(memory, turns, [memory]), asked]


def results(futures: list[Future[Completion]]) -> list[Completion]:
    return [future.result(60) for future in futures]


def expected(asked: list[Prompt], replies: MockReplies) -> list[Completion]:
    with MockLLM(replies) as mock:
        return results([mock.submit(prompt, tenant="t") for prompt in asked])


def server_stats(url: str) -> Any:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/stats", timeout=SOON_S) as response:
        return json.load(response)


def wait_until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s  # a loaded machine starts processes slowly
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- streamed replies

Act = str | None | threading.Event | Mapping[str, Any]
"""A piece of text; None: the connection breaks; an event to wait for; an event of the stream as it is."""


def streamed(act: Act) -> Piece:
    if act is None or isinstance(act, threading.Event):
        return act
    if isinstance(act, str):
        act = {"model": "a", "choices": [{"index": 0, "delta": {"content": act}}]}
    return b"data: " + json.dumps(act).encode() + b"\n\n"


def end(reason: str = "stop") -> dict[str, Any]:
    return {"model": "a", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


USED = {"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": 7}}


@contextmanager
def scripted(*scripts: Sequence[Act]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL, and the bodies that it is sent. The last script answers also all requests behind it."""
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any], number: int) -> tuple[int, Any] | Reply:
        asked.append(body)
        script = scripts[min(number, len(scripts) - 1)]
        if script and isinstance(script[0], dict) and "whole" in script[0]:
            return 200, script[0]["whole"]
        return Reply(
            200, [streamed(act) for act in script], {"content-type": "text/event-stream; charset=utf-8"}
        )

    with odd_server(answer, ["a"]) as url:
        yield url, asked
