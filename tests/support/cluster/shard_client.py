"""What test_shard_client.py and test_shard_client_failures.py share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from undertow.engine.cluster.routing.batch import PendingAdd, ShardBatch
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import pack, unpack

from ...support.cluster.fake_shard import FakeShard
from ...support.engine import turn_of

SETTINGS = ClusterSettings(window_turns=4, patience_s=5)


@dataclass
class Sent:
    """A lane in use: what was put, and what came back for other shards."""

    shard_client: ShardClient
    returned: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)
    in_transit: set[str] = field(default_factory=set)
    # whether tenants are still away when their turns are sent anew
    stays_away: bool = False
    held: int = 0
    # what reading the map, and sending parcels anew, fails with
    no_map: Exception | None = None
    no_way: Exception | None = None


def in_use(shard: FakeShard, client: str, settings: ClusterSettings) -> Sent:
    def change(parcel: ShardBatch, others: Any) -> None:
        sent.held += len(others) - 1

    async def read_map() -> None:
        await asyncio.sleep(0)
        if sent.no_map is not None:
            raise sent.no_map

    def anew(parcels: Any, moved: dict[str, str], in_transit: AbstractSet[str]) -> None:
        if sent.no_way is not None:
            sent.held -= len(parcels)
            raise sent.no_way
        sent.returned.append(([t.text for p in parcels for t in unpack(p.table)], moved))
        sent.in_transit |= in_transit
        if not sent.stays_away:
            shard.away.clear()
        for parcel in parcels:
            sent.shard_client.put(parcel)

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


def with_lanes(
    shard: FakeShard,
    work: Callable[..., Coroutine[Any, Any, None]],
    *clients: str,
    settings: ClusterSettings = SETTINGS,
) -> None:
    """Run `work` with a lane to the shard for each client."""

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


def with_lane(
    shard: FakeShard, work: Callable[[Sent], Coroutine[Any, Any, None]], settings: ClusterSettings = SETTINGS
) -> None:
    with_lanes(shard, work, "client", settings=settings)


def put(sent: Sent, *texts: str, tenant: str = "ann") -> asyncio.Future[list[str]]:
    table = pack([turn_of(tenant, n, text) for n, text in enumerate(texts)])
    delivery = PendingAdd(len(texts))
    sent.held += 1
    sent.shard_client.put(ShardBatch(delivery, np.arange(len(texts)), table))

    async def statuses() -> list[str]:
        receipts = await asyncio.wrap_future(delivery.future)
        found: list[str] = receipts.column("status").to_pylist()
        return found

    return asyncio.ensure_future(statuses())
