"""Where a tenant's turns go: by the shard map, by what shards have answered, and by turns under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from undertow.engine.cluster.shard_map import ShardMap

# tenants whose shard is cached
REMEMBERED = 1 << 18


class Route(NamedTuple):
    """One of the two clients of a shard. `deferred`: for tenants in transit, whose turns have to wait."""

    shard: str
    deferred: bool = False


class RouteTable:
    """A tenant with turns on a route stays bound to it until they are stored or have come back.

    So neither a new map nor the end of a transit ever lets a later turn overtake an earlier one.
    """

    def __init__(self, shard_map: ShardMap) -> None:
        self.map = shard_map
        self._homes: dict[str, Route] = {}
        # what former owners have answered about moved tenants, under this map
        self._moved: dict[str, str] = {}
        # the route of each tenant that has turns under way, and in how many batches
        self._held: dict[str, tuple[Route, int]] = {}

    def routes_of(self, tenants: Sequence[str]) -> list[Route]:
        """Where to send the next turns of each tenant."""
        free = [tenant for tenant in tenants if tenant not in self._held]
        routes = dict(zip(free, self._home_routes(free), strict=True))
        return [routes.get(tenant) or self._held[tenant][0] for tenant in tenants]

    def home_of(self, tenant: str) -> str:
        """The shard to ask about the tenant."""
        return self._home_routes([tenant])[0].shard

    def _home_routes(self, tenants: Sequence[str]) -> list[Route]:
        unknown = [tenant for tenant in tenants if tenant not in self._homes]
        if unknown:
            if len(self._homes) + len(unknown) > REMEMBERED:
                self._homes.clear()
                unknown = list(tenants)
            self._homes.update(zip(unknown, map(Route, self.map.homes(unknown)), strict=True))
        moved = self._moved
        return [Route(moved[name]) if name in moved else self._homes[name] for name in tenants]

    def hold(self, tenants: Iterable[str], route: Route) -> None:
        """One more batch on this route holds turns of these tenants."""
        for tenant in tenants:
            held, batches = self._held.get(tenant, (route, 0))
            self._held[tenant] = held, batches + 1

    def release(self, tenants: Iterable[str]) -> None:
        """A batch with turns of these tenants is no longer under way."""
        for tenant in tenants:
            route, batches = self._held[tenant]
            if batches == 1:
                del self._held[tenant]
            else:
                self._held[tenant] = route, batches - 1

    def moved(self, where: Mapping[str, str]) -> None:
        """Shards have answered that these tenants are elsewhere. An answer with a removed shard is stale."""
        shards = self.map.all_shards
        self._moved |= {tenant: shard for tenant, shard in where.items() if shard in shards}

    def adopt(self, shard_map: ShardMap) -> None:
        """Take a newer map, and drop what was learnt under the former one."""
        if shard_map.version > self.map.version:
            self.map = shard_map
            self._homes.clear()
            self._moved.clear()
