"""A router's connections to shards, and the turns on their way to them, by the newest shard map."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.routing.batch import PendingAdd, ShardBatch, split
from undertow.engine.cluster.routing.errors import Backoff, ShardCalls
from undertow.engine.cluster.routing.route_table import Route, RouteTable
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import StoreError


class ShardPool:
    """One client a shard, made when it is first needed. Used on the router's event loop alone.

    Turns of tenants that are leaving a shard wait in a second client of it (`aside`), so that the others go
    on meanwhile.
    """

    def __init__(
        self, site: SharedRoot, connect: Callable[[str], ShardCalls], settings: ClusterSettings
    ) -> None:
        """`connect`: the calls of a shard, by its id. StoreError if a root has no map."""
        self.routes = RouteTable(site.newest_map())
        self._site = site
        self._connect = connect
        self._settings = settings
        self._name = secrets.token_hex(8)
        self._clients: dict[str, ShardClient] = {}
        self._asides: dict[str, ShardClient] = {}

    @property
    def shards(self) -> set[str]:
        """The shards that were used."""
        return set(self._clients)

    @property
    def _all_clients(self) -> list[ShardClient]:
        return [*self._clients.values(), *self._asides.values()]

    def calls(self, shard: str) -> ShardCalls:
        """The calls of a shard."""
        return self._client(shard).calls

    def status(self, shard: str) -> dict[str, int]:
        """The turns on their way to a shard, and how often its process died meanwhile."""
        client, aside = self._client(shard), self._asides.get(shard)
        waiting_turns = client.waiting_turns + (aside.waiting_turns if aside else 0)
        return {"sent_turns": waiting_turns, "deaths_seen": client.deaths}

    async def everyone(self) -> tuple[str, ...]:
        """All shards of the newest map. StoreError."""
        self.routes.adopt(await asyncio.to_thread(self._site.newest_map))
        return self.routes.map.everyone

    async def read_map(self) -> None:
        """Read the newest map after a shard refused a tenant. Tries again within the patience. StoreError."""
        pause = Backoff(self._settings.patience_s)
        while True:
            try:
                await self.everyone()
                return
            except StoreError:
                if not await pause():
                    raise

    async def stop(self) -> None:
        """Let the shards answer what was sent, within the patience; then close all clients."""
        pause = Backoff(self._settings.patience_s)
        while not all(client.idle for client in self._all_clients) and await pause():
            pass
        await asyncio.gather(*(client.stop() for client in self._all_clients))

    # ---- turns

    async def send(self, table: pa.Table, *, wait: bool) -> Future[pa.Table]:
        """Send turns (wire.TURNS) to their shards: their receipts (wire.RECEIPTS), row for row.

        While too many turns wait for one of the shards: waits, or raises QueueFull without `wait`.
        """
        delivery = PendingAdd(table.num_rows)
        whole = ShardBatch(delivery, np.arange(table.num_rows), table)
        if not table.num_rows:
            return delivery.future
        while True:
            batches = split(whole, self.routes.ways_of, self._settings.call_turns)
            turns = Counter[Route]()
            for route, batch in batches:
                turns[route] += len(batch)
            full = next((r for r, count in turns.items() if not self._client(*r).has_room(count)), None)
            if full is None:
                self._put(batches)
                return delivery.future
            if not wait:
                raise QueueFull(
                    f"{self._settings.lane_turns} turns wait for shard {full.shard}. Try again in a moment."
                )
            room = self._client(*full).room
            room.clear()
            await room.wait()

    def _put(self, batches: Sequence[tuple[Route, ShardBatch]]) -> None:
        for route, batch in batches:
            client = self._client(*route)
            self.routes.hold(batch.tenants, route)
            client.put(batch)

    def _client(self, shard: str, aside: bool = False) -> ShardClient:
        route, clients = Route(shard, aside), self._asides if aside else self._clients
        if (client := clients.get(shard)) is None or client.ended:
            client = clients[shard] = ShardClient(
                shard,
                self._client(shard).calls if aside else self._connect(shard),
                f"{self._name}-aside" if aside else self._name,
                self._settings,
                map_version=lambda: self.routes.map.version,
                on_change=lambda batch, others: self._exchange(route, batch, others),
                read_map=self.read_map,
                on_returned=lambda *returned: self._send_anew(route, *returned),
            )
        return client

    def _exchange(self, route: Route, batch: ShardBatch, others: Sequence[ShardBatch]) -> None:
        for other in others:
            self.routes.hold(other.tenants, route)
        self.routes.release(batch.tenants)

    def _send_anew(
        self, route: Route, batches: Sequence[ShardBatch], moved: dict[str, str], in_transit: AbstractSet[str]
    ) -> None:
        """Route again, in order, what a shard has returned and all that waits behind it."""
        self.routes.moved(moved)
        for batch in batches:
            self.routes.release(batch.tenants)

        def ways_of(tenants: Sequence[str]) -> list[Route]:
            waits = [tenant not in moved and (route.aside or tenant in in_transit) for tenant in tenants]
            routes = zip(waits, self.routes.ways_of(tenants), strict=True)
            return [Route(route.shard, aside=True) if wait else other for wait, other in routes]

        for batch in batches:
            self._put(split(batch, ways_of, self._settings.call_turns))
