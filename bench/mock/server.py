"""A mock LLM behind an OpenAI-compatible server, for tests and benchmarks.

    python -m undertow.bench.mock.server --port 0 --refusal-rate 0.3

It gives the replies of `mock.replies`, and prints one JSON line, {"url", "pid"}, once it listens.
It is never a default.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from undertow.bench.mock.llm import MODEL
from undertow.bench.mock.peer_replies import json_reply, tool_calls
from undertow.bench.mock.replies import Messages, MockReplies, share, usage_of, words_of
from undertow.engine.base.model import Usage

__all__ = ["MockServer", "spawn_server"]

_MOST_FAULTS = 5  # of one request in a row: the client's backoff grows, and runs should end


class _Dropped(Response):
    """A response that promises a body and breaks off: uvicorn then closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


@dataclass(slots=True)
class MockServer:
    """The HTTP face. Faults come by hash of (seed, request, attempt), so a retried request ends well.

    `context_tokens` (0: no limit) and `api_key` refuse as a real server does, with 400 and 401. A streamed
    reply comes word by word, `piece_s` apart; one whose client has gone is given up, and counts as a fault.
    """

    replies: MockReplies
    latency_s: float = 0.0
    jitter_s: float = 0.0
    error_rate: float = 0.0
    context_tokens: int = 0
    api_key: str | None = None
    piece_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    in_flight: int = 0
    max_in_flight: int = 0
    _attempts: dict[bytes, int] = field(default_factory=dict)

    def app(self) -> Starlette:
        reads = {"/v1/models": self._models, "/health": self._health, "/stats": self._stats}
        chat = Route("/v1/chat/completions", self._chat, methods=["POST"])
        return Starlette(routes=[chat, *(Route(path, act) for path, act in reads.items())])

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        if not self._allowed(request):
            return _error(401, "wrong API key")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "mock"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _stats(self, request: Request) -> Response:
        names = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
        usage = {name: getattr(self.usage, name) for name in names}
        now = {"in_flight": self.in_flight, "max_in_flight": self.max_in_flight}
        return JSONResponse({"calls": self.calls, "faults": self.faults, **usage, **now})

    async def _chat(self, request: Request) -> Response:
        body = await request.body()
        with self._counted():
            if not self._allowed(request):
                return _error(401, "wrong API key")
            return self._fault(body) or await self._completion(body)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    def _allowed(self, request: Request) -> bool:
        return self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}"

    def _fault(self, body: bytes) -> Response | None:
        if self.error_rate == 0.0:
            return None
        digest = hashlib.blake2b(body, digest_size=16).digest()
        attempt = self._attempts.get(digest, 0)
        key = b"%d\x1f%d\x1f" % (self.replies.seed, attempt) + digest
        if attempt >= _MOST_FAULTS or share(key, "fault") >= self.error_rate:
            self._attempts.pop(digest, None)
            return None
        self._attempts[digest] = attempt + 1
        kind = ("500", "503", "429", "dropped")[int(4 * share(key, "kind of fault"))]
        self.faults[kind] += 1
        if kind == "dropped":
            return _Dropped()
        return _error(int(kind), "injected fault", {"retry-after": "0"} if kind == "429" else None)

    async def _completion(self, body: bytes) -> Response:
        try:
            asked = orjson.loads(body)
            model, messages = asked["model"], asked["messages"]
            operation, message = self._reply(asked, messages)
        except (ValueError, KeyError, TypeError, AttributeError) as invalid:
            return _error(400, f"not a chat completion request: {invalid!r}")
        if model != MODEL:
            return _error(404, f"The model `{model}` does not exist.")
        calls = message.get("tool_calls")
        content = orjson.dumps(calls).decode() if calls else message["content"]
        used = usage_of(messages, content)
        if self.context_tokens and used.prompt_tokens + (asked.get("max_tokens") or 0) > self.context_tokens:
            return _error(
                400, f"the prompt has {used.prompt_tokens} tokens, the context {self.context_tokens}"
            )
        if self.latency_s or self.jitter_s:
            await asyncio.sleep(self.latency_s + self.jitter_s * share(body, "jitter"))
        self.calls[operation] += 1
        self.usage += used
        if asked.get("stream"):
            told = self._pieces(
                content, used if (asked.get("stream_options") or {}).get("include_usage") else None
            )
            return StreamingResponse(told, media_type="text/event-stream")
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        return JSONResponse({**_HEAD, "choices": [choice], "usage": _wire_usage(used)})

    def _reply(self, asked: Mapping[str, Any], messages: Messages) -> tuple[str, dict[str, Any]]:
        """What it is counted as, and the assistant's message."""
        wanted, seed = asked.get("response_format") or {}, self.replies.seed
        message: dict[str, Any] = {"role": "assistant"}
        # our own prompts have neither tools nor a JSON object without a schema; other systems' do
        if asked.get("tools"):
            calls = tool_calls(seed, messages, asked["tools"])
            if asked.get("tool_choice", "auto") in ("auto", "none"):
                # as the small local model does: no server reads that as a call
                prose = orjson.dumps(calls[0]["function"]).decode()
                return "tools", message | {"content": f"```json\n{prose}\n```"}
            return "tools", message | {"content": None, "tool_calls": calls}
        if wanted.get("type") == "json_object":
            return "json_object", message | {"content": json_reply(seed, messages)}
        form = wanted.get("json_schema")
        content = self.replies.reply(messages, form and form["schema"])
        return form["name"] if form else "answer", message | {"content": content}

    async def _pieces(self, content: str, used: Usage | None) -> AsyncIterator[bytes]:
        """The events of a streamed reply, as OpenAI and vLLM send them."""
        with self._counted():
            try:
                yield _event(choices=[_part({"role": "assistant", "content": ""})])
                for word in words_of(content):
                    await asyncio.sleep(self.piece_s)
                    yield _event(choices=[_part({"content": word})])
            except asyncio.CancelledError:
                self.faults["client left"] += 1
                raise
            yield _event(choices=[_part({}, "stop")])
            if used is not None:
                yield _event(choices=[], usage=_wire_usage(used))
            yield b"data: [DONE]\n\n"


_HEAD = {"id": "chatcmpl-mock", "object": "chat.completion", "created": 0, "model": MODEL}


def _event(**contents: Any) -> bytes:
    return b"data: " + orjson.dumps({**_HEAD, "object": "chat.completion.chunk", **contents}) + b"\n\n"


def _part(delta: Mapping[str, str], finish_reason: str | None = None) -> Mapping[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _wire_usage(used: Usage) -> Mapping[str, Any]:
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_prompt_tokens},
    }


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = {"error": {"message": message, "type": "mock", "param": None, "code": status}}
    return JSONResponse(body, status, headers)


@contextmanager
def spawn_server(**options: float | str | bool) -> Iterator[str]:
    """A server in a process of its own, ended with the block; yields its URL.

    `options` are those of the command line: `spawn_server(error_rate=0.3, malformed_sticky=True)`.
    """
    command = [sys.executable, "-m", "undertow.bench.mock.server"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            command += [flag] if value is True else [flag, str(value)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise RuntimeError(f"the mock LLM server ended at once: {' '.join(command)}")
        yield json.loads(ready)["url"]
    finally:
        process.kill()
        process.wait()


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"{rate} is no share: give a number from 0 to 1")
    return rate


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.mock.server")
    parser.add_argument("--port", type=int, default=0, help="0: a free one; it is printed")
    parser.add_argument("--seed", type=int, default=0, help="decides which replies and requests are affected")
    parser.add_argument("--context-tokens", type=int, default=0, help="longer requests get 400; 0: no limit")
    parser.add_argument("--api-key", help="requests without it get 401; by default all may ask")
    parser.add_argument("--malformed-sticky", action="store_true", help="repairs break the schema, too")
    for name, words in {
        "latency-ms": "before each reply",
        "jitter-ms": "at most so much more, by hash of the request",
        "piece-ms": "between two words of a streamed reply",
    }.items():
        parser.add_argument(f"--{name}", type=float, default=0.0, help=words)
    for name, words in {
        "refusal-rate": "replies that say no: a merge is refused",
        "error-rate": "requests that get 500, 503, 429 or a broken connection; retries end well",
        "empty-rate": "replies whose lists are empty: no facts",
        "malformed-rate": "replies that break their schema; their repairs do not",
        "undecided-rate": "replies of a judge that are neither yes nor no",
    }.items():
        parser.add_argument(f"--{name}", type=_rate, default=0.0, help=f"share of {words}")
    return parser


def main() -> None:
    """Serve the mock LLM on 127.0.0.1 until terminated."""
    of = options().parse_args()
    replies = MockReplies(
        of.seed, of.refusal_rate, of.empty_rate, of.malformed_rate, of.malformed_sticky, of.undecided_rate
    )
    latencies_s = (of.latency_ms / 1e3, of.jitter_ms / 1e3)
    server = MockServer(
        replies, *latencies_s, of.error_rate, of.context_tokens, of.api_key, of.piece_ms / 1e3
    )
    listener = socket.create_server(("127.0.0.1", of.port), backlog=2048)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)  # connections wait in the backlog
    app = server.app()
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", backlog=2048)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
