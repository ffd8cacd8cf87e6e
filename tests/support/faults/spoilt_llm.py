"""A mock LLM server whose replies are spoilt in every way, and which remembers what it said in good ones."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from starlette.responses import JSONResponse, Response

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.replies import Messages, share
from undertow.bench.mock.server import MockServer

POISON = "wormwood"  # in every text of every bad reply
TEXTS = ("text", "narrative", "prediction", "topic", "summary", "context")
LISTS = ("episodes", "facts", "decisions", "notes", "changes", "evolved", "lines")
CUT, WITHHELD = f"{POISON} cut", f"{POISON} withheld"


def _poisoned(value: Any, word: str = POISON) -> Any:
    """The same reply with the word in each of its texts."""
    if isinstance(value, list):
        return [_poisoned(item, word) for item in value]
    if isinstance(value, dict):
        return {k: _text(v, word) if k in TEXTS else _poisoned(v, word) for k, v in value.items()}
    return value


def _text(text: str, word: str) -> str:
    return f"{word} {text}"


def _one_item_broken(reply: dict[str, Any]) -> dict[str, Any]:
    """The first items are fine: taking what can be read would be taking from a bad reply."""
    name = next(iter(reply))
    if isinstance(reply[name], list):
        return {name: [*reply[name], {"text": ""}]}
    return {"same_story": True, "narrative": " "}


def _too_much(reply: dict[str, Any]) -> dict[str, Any]:
    name = next(iter(reply))
    if isinstance(reply[name], list):
        return {name: (reply[name] or [{"text": POISON}]) * 101}
    return {"same_story": True, "narrative": f"{POISON} " * 1000}


WAYS: dict[str, Callable[[dict[str, Any]], str]] = {
    "truncated": lambda reply: json.dumps(reply)[:-4],
    "one field more": lambda reply: json.dumps({**reply, "note": POISON}),
    "fenced": lambda reply: f"```json\n{json.dumps(reply)}\n```",
    "one item broken": lambda reply: json.dumps(_one_item_broken(reply)),
    "too much": lambda reply: json.dumps(_too_much(reply)),
    "an apology": lambda reply: f"I am sorry, I cannot help with {POISON}.",
    "empty": lambda reply: "",
    "a list": lambda reply: json.dumps([reply]),
    "cut at the limit": lambda reply: json.dumps(_poisoned(reply, CUT)),
    "withheld": lambda reply: json.dumps(_poisoned(reply, WITHHELD)),
}


@dataclass(frozen=True)
class SpoiltReplies(MockReplies):
    """The mock's replies; a share of them spoilt in every way, half of those beyond repair."""

    poison_rate: float = 0.0
    given: set[str] = field(default_factory=set)
    ways: Counter[str] = field(default_factory=Counter)

    def reply(self, messages: Messages, schema: Any) -> str:
        content = super().reply(messages, schema)
        first = orjson.dumps([self.seed, [dict(m) for m in messages if m["role"] != "assistant"][:2], schema])
        repairing = any(m["role"] == "assistant" for m in messages)
        curable = share(first, "curable") < 0.5
        if share(first, "poison") < self.poison_rate and not (repairing and curable):
            way = list(WAYS)[int(len(WAYS) * share(first, "way"))]
            self.ways[way] += 1
            return WAYS[way](_poisoned(json.loads(content)))
        self.given.update(_texts_in(json.loads(content)))
        return content


def _texts_in(reply: dict[str, Any]) -> Iterator[str]:
    if reply.get("same_story"):
        yield reply["narrative"].strip()
    if "cue" in reply:
        yield f"{' '.join(reply['cue'].split())}\n{reply['narrative'].strip()}"
    if reply.get("action") == "merge":
        yield reply["text"].strip()
    yield from (reply[name].strip() for name in ("summary", "context") if name in reply)
    for item in [item for kind in LISTS for item in reply.get(kind, [])]:
        yield from (item[name].strip() for name in ("text", "topic", "summary", "context") if name in item)
        yield from _texts_in(item)  # an episode has its facts


class SpoiltServer(MockServer):
    """Says so where a reply was cut or withheld, as a real server does."""

    async def _completion(self, body: bytes) -> Response:
        response = await super()._completion(body)
        for word, reason in ((CUT, "length"), (WITHHELD, "content_filter")):
            if word.encode() in bytes(response.body):
                answer = orjson.loads(response.body)
                answer["choices"][0]["finish_reason"] = reason
                return JSONResponse(answer)
        return response


@contextmanager
def served(server: MockServer) -> Iterator[str]:
    """The server over HTTP, in a thread, so that the test can look at what it has said."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(server.app(), log_level="critical", access_log=False, lifespan="off")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        http.should_exit = True
        thread.join(timeout=30)
