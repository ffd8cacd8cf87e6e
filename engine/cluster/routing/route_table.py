"""Where a tenant's turns go: by the shard map, by what shards have said, and by what is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from undertow.engine.cluster.shard_map import ShardMap

# tenants whose shard is remembered; beyond that they are worked out again
REMEMBERED = 1 << 18


class Route(NamedTuple):
    """One of the two lanes to a shard. `aside`: of tenants that are leaving it, whose turns have to wait."""

    shard: str
    aside: bool = False


class RouteTable:
    """A tenant with turns on a way to a shard is bound to it until they are stored or have come back.

    So neither a new map nor the end of a wait ever lets a later turn overtake an earlier one.
    """

    def __init__(self, shard_map: ShardMap) -> None:
        self.map = shard_map
        self._homes: dict[str, Route] = {}
        # what former owners have said of tenants that have moved, under this map
        self._moved: dict[str, str] = {}
        # the way of each tenant that has turns on it, and in how many parcels
        self._held: dict[str, tuple[Route, int]] = {}

    def ways_of(self, tenants: Sequence[str]) -> list[Route]:
        """Where to send the next turns of each tenant."""
        free = [tenant for tenant in tenants if tenant not in self._held]
        ways = dict(zip(free, self._ways_home(free), strict=True))
        return [ways.get(tenant) or self._held[tenant][0] for tenant in tenants]

    def home_of(self, tenant: str) -> str:
        """The shard to ask about the tenant."""
        return self._ways_home([tenant])[0].shard

    def _ways_home(self, tenants: Sequence[str]) -> list[Route]:
        unknown = [tenant for tenant in tenants if tenant not in self._homes]
        if unknown:
            if len(self._homes) + len(unknown) > REMEMBERED:
                self._homes.clear()
                unknown = list(tenants)
            self._homes.update(zip(unknown, map(Route, self.map.homes(unknown)), strict=True))
        ways = [self._homes[tenant] for tenant in tenants]
        if not self._moved:
            return ways
        moved = map(self._moved.get, tenants)
        return [way if shard is None else Route(shard) for way, shard in zip(ways, moved, strict=True)]

    def hold(self, tenants: Iterable[str], way: Route) -> None:
        """One more parcel on this way holds turns of these tenants."""
        for tenant in tenants:
            held, parcels = self._held.get(tenant, (way, 0))
            self._held[tenant] = held, parcels + 1

    def release(self, tenants: Iterable[str]) -> None:
        """A parcel with turns of these tenants is no longer on its way."""
        for tenant in tenants:
            way, parcels = self._held[tenant]
            if parcels == 1:
                del self._held[tenant]
            else:
                self._held[tenant] = way, parcels - 1

    def moved(self, where: Mapping[str, str]) -> None:
        """Shards have said that these tenants are elsewhere. What names a shard that is no more is old."""
        everyone = self.map.everyone
        self._moved |= {tenant: shard for tenant, shard in where.items() if shard in everyone}

    def adopt(self, shard_map: ShardMap) -> None:
        """A newer map: what was learnt under the one before counts no more."""
        if shard_map.version > self.map.version:
            self.map = shard_map
            self._homes.clear()
            self._moved.clear()
