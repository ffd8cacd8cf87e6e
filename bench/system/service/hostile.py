"""A tenant that sends every legal request at its limit, as often as it may, beside the others."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from urllib.parse import urlencode, urlsplit

from undertow.bench.system.service.open_loop import Caller, Outcome, run_loop
from undertow.bench.system.service.parts import Figures, Filled, Mix
from undertow.bench.system.service.world import Request, Texts, request
from undertow.engine.base.limits import MAX_FILTER_KEYS, MAX_FILTER_VALUES, MAX_MESSAGES, MAX_QUERY_CHARS

TENANT = "hostile"
# as many as one tenant may have under way
AT_ONCE = 32
MESSAGES_A_TURN = 2


def hostile_part(filled: Filled, mix: Mix, durability: str, seconds: float, rate: float) -> Figures:
    """The others' latencies without the tenant, with it, and without it again; and their ratio."""
    spawned = get_context("spawn")
    # a process of its own, as the others' client would wait for what it does with the answers
    with filled.loaded(mix, durability) as load, ProcessPoolExecutor(1, spawned) as attacker:
        attacker.submit(attacks, load.service.url, load.service.key).result()  # it has loaded what it needs
        load.at_rate(rate, min(seconds, 5.0))  # to warm up
        before, quiet = load.at_rate(rate, seconds)
        sent = attacker.submit(_sent, load.service.url, load.service.key, seconds)
        beside, attacked = load.at_rate(rate, seconds)
        statuses = sent.result()
        _, after = load.at_rate(rate, seconds)
    ratios = {
        name: round(beside.p95_ms(adds=adds) / before.p95_ms(adds=adds), 2)
        for name, adds in (("search", False), ("add", True))
        if set(before.statuses) == set(beside.statuses) == {200}
    }
    return {
        "rate_per_s": rate,
        "others_alone": quiet,
        "others_beside_it": attacked,
        "others_alone_again": after,
        "p95_beside_over_alone": ratios,
        "it_sent": {"statuses": statuses},
    }


def _sent(url: str, key: str, seconds: float) -> dict[str, int]:
    """Send requests for so long, as many at once as may be; the statuses of the answers."""
    outcome = Outcome(0.0, seconds)
    run_loop(_attack(url, list(attacks(url, key).values()), outcome))
    return {str(status): count for status, count in sorted(outcome.statuses.items())}


async def _attack(url: str, requests: list[bytes], outcome: Outcome) -> None:
    caller, following = Caller(url), cycle(requests)
    until_s = time.monotonic() + outcome.seconds

    async def send() -> None:
        while time.monotonic() < until_s:
            await caller.run([Request(False, TENANT, next(following))], [0.0], outcome)

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    caller.close()


def attacks(url: str, key: str) -> dict[str, bytes]:
    """One request of each kind: a large add, long queries, all filters, reads of everything."""
    host, texts = urlsplit(url).netloc, Texts(7)
    long_query = " ".join(texts.queries(400))[:MAX_QUERY_CHARS]
    filters = {f"key{n}": [f"value{m}" for m in range(MAX_FILTER_VALUES)] for n in range(MAX_FILTER_KEYS)}
    in_path = urlencode([(f"filter.{name}", values[0]) for name, values in filters.items()])
    base = f"/v1/tenants/{TENANT}"

    def add() -> bytes:
        said = texts.messages(MAX_MESSAGES // MESSAGES_A_TURN)
        metadata = {f"key{n}": f"value{n}" for n in range(MAX_FILTER_KEYS)}
        messages = [{"role": role, "content": text[:200]} for text in said for role in ("user", "assistant")]
        return request(host, key, "POST", f"{base}/memories", {"messages": messages, "metadata": metadata})

    def search(**more: object) -> bytes:
        return request(host, key, "POST", f"{base}/search", {"query": long_query, "top_k": 1_000, **more})

    # an add without a key is new each time
    return {
        "add": add(),
        "search": search(),
        "search with filters": search(filters=filters, since="2020-01-01", until="2030-01-01"),
        "list with filters": request(host, key, "GET", f"{base}/memories?limit=1000&{in_path}"),
        "list": request(host, key, "GET", f"{base}/memories?limit=1000"),
        "export": request(host, key, "GET", f"{base}/export"),
        "explain": request(host, key, "GET", f"{base}/explain"),
        "usage": request(host, key, "GET", f"{base}/usage"),
        "flush": request(host, key, "POST", f"{base}/flush", {}),
        "stats of no tenant": request(host, key, "GET", "/v1/tenants/hostile-unknown/stats"),
    }
