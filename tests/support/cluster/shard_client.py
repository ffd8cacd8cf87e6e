"""What test_shard_client.py and test_shard_client_failures.py share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from undertow.engine.cluster.routing.batch import ShardBatch
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import pack, pack_turn, unpack

from ...support.cluster.fake_shard import FakeShard
from ...support.engine import turn_of

SETTINGS = ClusterSettings(window_turns=4, patience_s=5)


@dataclass
class Sent:
    """A shard client in use, and what came back for other shards."""

    shard_client: ShardClient
    returned: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)
    in_transit: set[str] = field(default_factory=set)
    # whether tenants are still away when their turns are sent anew
    stays_away: bool = False
    held: int = 0
    puts: int = 0
    # what reading the map, and sending batches anew, fails with
    no_map: Exception | None = None
    no_way: Exception | None = None


def in_use(shard: FakeShard, client: str, settings: ClusterSettings) -> Sent:
    def change(batch: ShardBatch, others: Any) -> None:
        sent.held += len(others) - 1

    async def read_map() -> None:
        await asyncio.sleep(0)
        if sent.no_map is not None:
            raise sent.no_map

    def anew(batches: Any, moved: dict[str, str], in_transit: AbstractSet[str]) -> None:
        if sent.no_way is not None:
            sent.held -= len(batches)
            raise sent.no_way
        sent.returned.append(([t.text for p in batches for t in unpack(p.table)], moved))
        sent.in_transit |= in_transit
        if not sent.stays_away:
            shard.away.clear()
        for batch in batches:
            sent.shard_client.put(batch)

    shard_client = ShardClient(
        "s0",
        shard,
        client,
        settings,
        map_version=lambda: 1,
        on_change=change,
        read_map=read_map,
        on_returned=anew,
    )
    sent = Sent(shard_client)
    return sent


def with_clients(
    shard: FakeShard,
    work: Callable[..., Coroutine[Any, Any, None]],
    *clients: str,
    settings: ClusterSettings = SETTINGS,
) -> None:
    """Run `work` with a ShardClient for each name."""

    async def run() -> None:
        every = [in_use(shard, client, settings) for client in clients]
        try:
            await asyncio.wait_for(work(*every), 20)
            for sent in every:
                assert sent.shard_client.waiting_turns == 0
                assert sent.held == 0
        finally:
            for sent in every:
                await sent.shard_client.stop()

    asyncio.run(run())


def with_client(
    shard: FakeShard, work: Callable[[Sent], Coroutine[Any, Any, None]], settings: ClusterSettings = SETTINGS
) -> None:
    with_clients(shard, work, "client", settings=settings)


def statuses_in(receipts: Any) -> list[str]:
    """Of a table, or of a list of outcomes."""
    if isinstance(receipts, pa.Table):
        receipts = zip(receipts.column("status").to_pylist(), strict=True)
    return [str(status) for status, *_ in receipts]


def put(sent: Sent, *texts: str, tenant: str = "ann") -> asyncio.Future[list[str]]:
    """Odd calls send a list, even ones a table."""
    turns = [turn_of(tenant, n, text) for n, text in enumerate(texts)]
    sent.puts += 1
    batch = ShardBatch.of([pack_turn(turn) for turn in turns] if sent.puts % 2 else pack(turns))
    sent.held += 1
    sent.shard_client.put(batch)

    async def statuses() -> list[str]:
        return statuses_in(await asyncio.wrap_future(batch.pending.future))

    return asyncio.ensure_future(statuses())
