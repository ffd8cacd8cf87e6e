"""A tenant that sends every legal request at its limit, as often as it may, beside the others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, cycle
from multiprocessing import get_context
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit
from urllib.request import Request as Asked
from urllib.request import urlopen

from undertow.bench.system.service.open_loop import Caller, Outcome, run_loop
from undertow.bench.system.service.parts import Figures, Filled, Mix
from undertow.bench.system.service.world import Request, Texts, request
from undertow.engine.base.limits import MAX_FILTER_KEYS, MAX_FILTER_VALUES, MAX_MESSAGES, MAX_QUERY_CHARS

TENANT = "hostile"
# as many as one tenant may have under way
AT_ONCE = 32
MESSAGES_A_TURN = 2
# what it has stored before
ADDS_BEFORE = 2
BASE = f"/v1/tenants/{TENANT}"
METADATA = {f"key{n}": f"value{n}" for n in range(MAX_FILTER_KEYS)}
FILTERS = {f"key{n}": [f"value{m}" for m in range(MAX_FILTER_VALUES)] for n in range(MAX_FILTER_KEYS)}


class Target(NamedTuple):
    """The service, a key, and what the tenant has there: ids of turns, and its export."""

    url: str
    key: str
    ids: list[str]
    export: bytes


def hostile_part(filled: Filled, mix: Mix, durability: str, seconds: float, rate: float) -> Figures:
    """The others' latencies without the tenant's requests, beside them, and beside its erasures too.

    The ratios are over the mean of the stretches before and after: some machines change their speed.
    """
    spawned = get_context("spawn")
    # a process of its own, as the others' client would wait for what it does with the answers
    with filled.loaded(mix, durability) as load, ProcessPoolExecutor(1, spawned) as attacker:
        target = attacker.submit(filled_tenant, load.service.url, load.service.key).result()
        load.at_rate(rate, min(seconds, 5.0))  # to warm up
        before, quiet = load.at_rate(rate, seconds)
        figures: Figures = {"rate_per_s": rate, "others_alone": quiet}
        for name, erases in (("it", False), ("its_erasures_too", True)):
            sent = attacker.submit(_sent, target, seconds, erases)
            beside, attacked = load.at_rate(rate, seconds)
            statuses = sent.result()
            after, quiet = load.at_rate(rate, seconds)
            ratios = {
                kind: round(
                    2 * beside.p95_ms(adds=adds) / sum(o.p95_ms(adds=adds) for o in (before, after)), 2
                )
                for kind, adds in (("search", False), ("add", True))
                if set(before.statuses) == set(beside.statuses) == set(after.statuses) == {200}
            }
            told = {"p95_over_alone": ratios, "others": attacked, "statuses": statuses}
            figures |= {f"beside_{name}": told, f"alone_after_{name}": quiet}
            before = after
    return figures


def filled_tenant(url: str, key: str) -> Target:
    """Store the tenant's turns, and wait until they are decided."""

    def asked(path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with urlopen(Asked(url + BASE + path, data, headers)) as answer:
            return bytes(answer.read())

    for _ in range(ADDS_BEFORE):
        asked("/memories", {"messages": _messages(), "metadata": METADATA})
    while json.loads(asked("/stats"))["undecided_turns"]:
        time.sleep(0.1)
    ids = [memory["id"] for memory in json.loads(asked("/memories?limit=1000"))["results"]]
    return Target(url, key, ids, asked("/export"))


def _messages() -> list[dict[str, str]]:
    """As many as an add may have."""
    said = Texts(7).messages(MAX_MESSAGES // MESSAGES_A_TURN)
    return [{"role": role, "content": text[:200]} for text in said for role in ("user", "assistant")]


def _sent(target: Target, seconds: float, erases: bool) -> dict[str, int]:
    """Send requests for so long, as many at once as may be; the statuses of the answers."""
    outcome = Outcome(0.0, seconds)
    run_loop(_attack(target.url, rounds(target, erases=erases), outcome))
    return {str(status): count for status, count in sorted(outcome.statuses.items())}


def rounds(target: Target, *, erases: bool) -> Iterator[bytes]:
    """One request of each kind after the other, again and again."""
    fixed, ids = attacks(target), cycle(target.ids)
    for n in count():
        yield from fixed.values()
        yield from about(target, next(ids), next(ids), f"reworded {n} " * 50).values()
        if erases:
            yield from erasures(target).values()


async def _attack(url: str, following: Iterator[bytes], outcome: Outcome) -> None:
    caller = Caller(url)
    until_s = time.monotonic() + outcome.seconds

    async def send() -> None:
        while time.monotonic() < until_s:
            await caller.run([Request(False, TENANT, next(following))], [0.0], outcome)

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    caller.close()


def attacks(target: Target) -> dict[str, bytes]:
    """One request of each kind that is about no single memory, with what costs most."""
    sent = partial(_sent_to, target)
    query = " ".join(Texts(7).queries(400))[:MAX_QUERY_CHARS]
    in_path = urlencode([(f"filter.{name}", values[0]) for name, values in FILTERS.items()])
    search = {"query": query, "top_k": 1_000}
    times = {"since": "2020-01-01", "until": "2030-01-01"}
    call = {"name": "search_memories", "arguments": {"query": query, "top_k": 100}}
    mcp = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    host = urlsplit(target.url).netloc
    # an add without a key is new each time
    return {
        "add": sent("POST", "/memories", {"messages": _messages(), "metadata": METADATA}),
        "search": sent("POST", "/search", search),
        "search with filters": sent("POST", "/search", {**search, "filters": FILTERS, **times}),
        "search with reasons": sent("POST", "/search", {**search, "explain": True}),
        "list with filters": sent("GET", f"/memories?limit=1000&{in_path}"),
        "list": sent("GET", "/memories?limit=1000"),
        "export": sent("GET", "/export"),
        "export with vectors": sent("GET", "/export?vectors=true"),
        "events": sent("GET", "/events?follow=false&include_text=true"),
        "explain": sent("GET", "/explain"),
        "usage": sent("GET", "/usage"),
        "stats": sent("GET", "/stats"),
        "policy": sent("GET", "/policy"),
        "flush": sent("POST", "/flush", {}),
        "jobs": sent("GET", "/jobs"),
        "over MCP": _accepts_events(request(host, target.key, "POST", f"/mcp/{TENANT}", mcp)),
        # refused: there may be no LLM, the tenant has memories, and the last one is not there
        "answer": sent("POST", "/answer", {"question": query}),
        "import": sent("POST", "/import", target.export),
        "stats of no tenant": sent("GET", "-unknown/stats"),
    }


def about(target: Target, memory_id: str, second_id: str, text: str) -> dict[str, bytes]:
    """Each request about one memory. The last two work once: a turn that is reworded gets another id."""
    path, messages = f"/memories/{memory_id}", [{"role": "user", "content": text}]
    return {
        "get": _sent_to(target, "GET", path),
        "history": _sent_to(target, "GET", f"{path}/history"),
        "update": _sent_to(target, "PUT", path, {"messages": messages}),
        "delete": _sent_to(target, "DELETE", f"/memories/{second_id}"),
    }


def erasures(target: Target) -> dict[str, bytes]:
    """Each, and an import of what it has erased."""
    imported = _sent_to(target, "POST", "/import", target.export)
    names = {"delete all": "/memories", "erase": ""}
    return {
        f"{name}{then}": sent
        for name, path in names.items()
        for then, sent in (("", _sent_to(target, "DELETE", path)), (" and import", imported))
    }


def _sent_to(target: Target, method: str, path: str, body: object = None) -> bytes:
    return request(urlsplit(target.url).netloc, target.key, method, BASE + path, body)


def _accepts_events(sent: bytes) -> bytes:
    return sent.replace(b"\r\n\r\n", b"\r\nAccept: application/json, text/event-stream\r\n\r\n", 1)
