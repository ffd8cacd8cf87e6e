"""Where a tenant's turns go: by the shard map, by what shards have said, and by what is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from undertow.engine.cluster.shard_map import ShardMap

# tenants whose shard is remembered; beyond that they are worked out again
REMEMBERED = 1 << 18


class Way(NamedTuple):
    """One of the two lanes to a shard. `aside`: of tenants that are leaving it, whose turns have to wait."""

    shard: str
    aside: bool = False


@dataclass(slots=True)
class _Held:
    way: Way
    parcels: int = 0


class Routes:
    """A tenant with turns on a way to a shard is bound to it until they are stored or have come back.

    So neither a new map nor the end of a wait ever lets a later turn overtake an earlier one.
    """

    def __init__(self, shard_map: ShardMap) -> None:
        self.map = shard_map
        self._homes: dict[str, str] = {}
        # what former owners have said of tenants that have moved, under this map
        self._moved: dict[str, str] = {}
        self._held: dict[str, _Held] = {}

    def way_of(self, tenant: str) -> Way:
        """Where to send the tenant's next turns."""
        if (held := self._held.get(tenant)) is not None:
            return held.way
        return Way(self.home_of(tenant))

    def home_of(self, tenant: str) -> str:
        """The shard to ask about the tenant."""
        if (shard := self._moved.get(tenant) or self._homes.get(tenant)) is not None:
            return shard
        if len(self._homes) >= REMEMBERED:
            self._homes.clear()
        shard = self._homes[tenant] = self.map.home(tenant)
        return shard

    def know(self, tenants: Sequence[str]) -> None:
        """Work out where these live, in one go."""
        unknown = [name for name in tenants if name not in self._homes]
        if len(self._homes) + len(unknown) > REMEMBERED:
            self._homes.clear()
        self._homes.update(zip(unknown, self.map.homes(unknown), strict=True))

    def hold(self, tenants: Iterable[str], way: Way) -> None:
        """One more parcel on this way holds turns of these tenants."""
        for tenant in tenants:
            if (held := self._held.get(tenant)) is None:
                held = self._held[tenant] = _Held(way)
            held.parcels += 1

    def release(self, tenants: Iterable[str]) -> None:
        """A parcel with turns of these tenants is no longer on its way."""
        for tenant in tenants:
            held = self._held[tenant]
            held.parcels -= 1
            if not held.parcels:
                del self._held[tenant]

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
