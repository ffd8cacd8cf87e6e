"""Latencies while the service works in the background: keyword indexes, purges, compaction."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import lance

from undertow.bench.system.service.open_loop import Caller, Outcome, run_loop
from undertow.bench.system.service.parts import Figures, Filled, Load, Mix
from undertow.bench.system.service.world import Request, World, request

PURGES = 5
# By then the journal has had a whole compaction, if the rate is 200 adds and searches a second.
LONG_STRETCHES = 16


def background_part(filled: Filled, mix: Mix, durability: str, seconds: float, rate: float) -> Figures:
    """Half of the tenants are under load. Of the others each is searched for the first time, or erased."""
    half = replace(filled, world=replace(filled.world, tenants=filled.world.tenants // 2))
    with half.loaded(mix, durability) as load:
        load.at_rate(rate, min(seconds, 5.0))  # to warm up
        searches = first_searches(filled.world, load)[half.world.tenants :]
        erasures = [erasure(load, name) for name in filled.world.names[-PURGES:]]
        return {
            "rate_per_s": rate,
            "alone": load.at_rate(rate, seconds)[1],
            "first_searches": beside(load, rate, seconds, searches[:-PURGES]),
            "purges": beside(load, rate, seconds, erasures),
            "alone_again": load.at_rate(rate, seconds)[1],
            "long": load.at_rate(rate, LONG_STRETCHES * seconds)[1],
            "decided": load.decided(),
            "journal": operations(load.service.store),
        }


def first_searches(world: World, load: Load) -> list[Request]:
    return world.one_search_each(load.service.url, load.service.key)


def erasure(load: Load, tenant: str) -> Request:
    host = urlsplit(load.service.url).netloc
    return Request(False, tenant, request(host, load.service.key, "DELETE", f"/v1/tenants/{tenant}"))


def beside(load: Load, rate: float, seconds: float, requests: Sequence[Request]) -> Figures:
    """A stretch, with these requests spread over it."""
    due_s = [n * seconds / len(requests) for n in range(len(requests))]

    async def both() -> tuple[Figures, Outcome]:
        caller, outcome = Caller(load.service.url), Outcome(len(requests) / seconds, seconds)
        sending = asyncio.create_task(caller.run(requests, due_s, outcome))
        _, figures = await load.at_rate_async(rate, seconds)
        await sending
        caller.close()
        return figures, outcome

    figures, sent = run_loop(both())
    return {**figures, "beside_it": sent.figures()}


def operations(store: Path) -> Figures:
    """What Lance has done to the journal, by kind of commit: `Rewrite` merges fragments."""
    journal = lance.dataset(str(next(store.glob("*.lance"))))
    made = [journal.read_transaction(version["version"]) for version in journal.versions()]
    kinds = Counter(type(one.operation).__name__ for one in made if one is not None)
    return {"commits": dict(kinds), "rows": journal.count_rows(), "fragments": len(journal.get_fragments())}
