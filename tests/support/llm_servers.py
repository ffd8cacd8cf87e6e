"""Servers that misbehave on purpose, prompts to ask them, and what a good server would say."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

Handler = Callable[[dict[str, Any], int], tuple[int, Any]]
"""(request body, number of the request) -> (status, JSON body, or text sent as it is)."""


@contextmanager
def odd_server(handle: Handler, models: Sequence[str] = ("a", "b"), port: int = 0) -> Iterator[str]:
    """A server in a thread that answers POSTs as `handle` says and offers `models`."""
    numbers = iter(range(10**9))
    lock = threading.Lock()

    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = next(numbers)
            self.send(*handle(body, number))

        def send(self, status: int, body: Any) -> None:
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "text/html" if isinstance(body, str) else "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Odd)
    server.handle_error = lambda request, address: None  # type: ignore[assignment]  # clients that left
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
    with urllib.request.urlopen(url.removesuffix("/v1") + "/stats", timeout=10) as response:
        return json.load(response)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90  # a loaded machine starts processes slowly
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
