"""Where a tenant's turns go: by the shard map, by what shards have said, and by what is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from undertow.engine.cluster.shard_map import ShardMap

# tenants whose shard is remembered; beyond that they are worked out again
REMEMBERED = 1 << 18


@dataclass(slots=True)
class _Held:
    shard: str
    parcels: int = 0


class Routes:
    """A tenant with turns on their way to a shard is bound to it until they are stored or have come back.

    So a new map never lets a later turn overtake an earlier one.
    """

    def __init__(self, shard_map: ShardMap) -> None:
        self.map = shard_map
        self._homes: dict[str, str] = {}
        # what former owners have said of tenants that have moved, under this map
        self._moved: dict[str, str] = {}
        self._held: dict[str, _Held] = {}

    def shard_of(self, tenant: str) -> str:
        """The shard to send the tenant's next turns to."""
        if (held := self._held.get(tenant)) is not None:
            return held.shard
        return self.home_of(tenant)

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

    def hold(self, tenants: Iterable[str], shard: str) -> None:
        """One more parcel for the shard holds turns of these tenants."""
        for tenant in tenants:
            if (held := self._held.get(tenant)) is None:
                held = self._held[tenant] = _Held(shard)
            held.parcels += 1

    def release(self, tenants: Iterable[str]) -> None:
        """A parcel with turns of these tenants is no longer on its way."""
        for tenant in tenants:
            held = self._held[tenant]
            held.parcels -= 1
            if not held.parcels:
                del self._held[tenant]

    def moved(self, where: Mapping[str, str]) -> None:
        """Shards have said that these tenants are elsewhere."""
        self._moved |= where

    def adopt(self, shard_map: ShardMap) -> None:
        """A newer map: what was learnt under the one before counts no more."""
        if shard_map.version > self.map.version:
            self.map = shard_map
            self._homes.clear()
            self._moved.clear()
