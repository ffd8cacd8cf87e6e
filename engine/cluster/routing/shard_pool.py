"""A router's clients of the shards, and the turns on their way to them, by the newest shard map."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import TypeVar

from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.routing.batch import Receipts, ShardBatch, Turns, split
from undertow.engine.cluster.routing.errors import Backoff, ShardCalls
from undertow.engine.cluster.routing.route_table import Route, RouteTable
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import receipts_table
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import StoreError

T = TypeVar("T")


class ShardPool:
    """One client a route, made when first needed. Used on the router's event loop alone.

    Turns of tenants that are leaving a shard wait in its second client (a deferred route), so that other
    tenants are not held up.
    """

    def __init__(
        self, root: SharedRoot, connect: Callable[[str], ShardCalls], settings: ClusterSettings
    ) -> None:
        """`connect`: the calls of a shard, by its id. StoreError if a root has no map."""
        self.routes = RouteTable(root.newest_map())
        self._root = root
        self._connect = connect
        self._settings = settings
        self._name = secrets.token_hex(8)
        self._clients: dict[Route, ShardClient] = {}

    @property
    def shards(self) -> set[str]:
        """The shards that were used."""
        return {route.shard for route in self._clients}

    def calls(self, shard: str) -> ShardCalls:
        """The calls of a shard."""
        return self._client(Route(shard)).calls

    def status(self, shard: str) -> dict[str, int]:
        """The turns on their way to a shard, and how often its process died meanwhile."""
        client, deferred = self._client(Route(shard)), self._clients.get(Route(shard, deferred=True))
        waiting_turns = client.waiting_turns + (deferred.waiting_turns if deferred else 0)
        return {"sent_turns": waiting_turns, "deaths_seen": client.deaths}

    async def all_shards(self) -> tuple[str, ...]:
        """All shards of the newest map. StoreError."""
        self.routes.adopt(await asyncio.to_thread(self._root.newest_map))
        return self.routes.map.all_shards

    async def read_map(self) -> None:
        """Read the newest map after a shard refused a tenant. Retries within the patience. StoreError."""
        pause = Backoff(self._settings.patience_s)
        while True:
            try:
                await self.all_shards()
                return
            except StoreError:
                if not await pause():
                    raise

    async def stop(self) -> None:
        """Wait within the patience until all sent turns are answered; then close all clients."""
        pause = Backoff(self._settings.patience_s)
        while any(client.waiting_turns for client in self._clients.values()) and await pause():
            pass
        await asyncio.gather(*(client.stop() for client in self._clients.values()))

    # ---- turns

    def offer(self, turns: Turns, result_of: Callable[[Receipts], T] = receipts_table) -> Future[T]:
        """Send turns to their shards: what `result_of` makes of their receipts, row for row.

        QueueFull: too many wait for a shard.
        """
        whole = ShardBatch.of(turns, result_of)
        if (full := self._put_all(whole)) is not None:
            raise QueueFull(
                f"{self._settings.lane_turns} turns wait for shard {full.shard}. Try again in a moment."
            )
        return whole.pending.future

    async def send(self, turns: Turns) -> Future[Receipts]:
        """As `offer`, once there is room."""
        whole = ShardBatch.of(turns)
        while (full := self._put_all(whole)) is not None:
            room = self._client(full).room
            room.clear()
            await room.wait()
        return whole.pending.future

    def _put_all(self, whole: ShardBatch) -> Route | None:
        """Send a call's turns. Returns a route that has no room for them; None: they were sent."""
        if not len(whole):
            return None
        batches = split(whole, self.routes.routes_of, self._settings.call_turns)
        counts = Counter[Route]()
        for route, batch in batches:
            counts[route] += len(batch)
        full = next((r for r, count in counts.items() if not self._client(r).has_room(count)), None)
        if full is None:
            self._put(batches)
        return full

    def _put(self, batches: Sequence[tuple[Route, ShardBatch]]) -> None:
        for route, batch in batches:
            client = self._client(route)
            self.routes.hold(batch.tenants, route)
            client.put(batch)

    def _client(self, route: Route) -> ShardClient:
        if (client := self._clients.get(route)) is None or client.ended:
            client = self._clients[route] = ShardClient(
                route.shard,
                self.calls(route.shard) if route.deferred else self._connect(route.shard),
                f"{self._name}-deferred" if route.deferred else self._name,
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
        """Route again, in order, the turns that a shard has returned and all that wait behind them."""
        self.routes.moved(moved)
        for batch in batches:
            self.routes.release(batch.tenants)
        # a removed shard has no tenants left, even if it ended before it could say where they went
        exists = route.shard in self.routes.map.all_shards

        def routes_of(tenants: Sequence[str]) -> list[Route]:
            waits = [
                exists and tenant not in moved and (route.deferred or tenant in in_transit)
                for tenant in tenants
            ]
            routes = zip(waits, self.routes.routes_of(tenants), strict=True)
            return [Route(route.shard, deferred=True) if wait else other for wait, other in routes]

        for batch in batches:
            self._put(split(batch, routes_of, self._settings.call_turns))
