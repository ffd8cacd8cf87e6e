"""Where the shards of a cluster keep what is theirs: in its root, or in a plain store that is all of it.

ROOT/map/, thresholds.json      who owns what, and the thresholds of all shards
ROOT/shards/SHARD/              each shard's store
STORE/                          a plain store, as `undertow ingest` makes it without --ray: one shard
ROOT or STORE/parked/SHARD/     turns that were set aside
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from pathlib import Path

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster import root_thresholds as thresholds
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.shard_map import STORES, ShardMap
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.storage.store_info import DESCRIPTION, read_info

# the one shard of a plain store
SINGLE = "single"


class SharedRoot(ABC):
    """What a router and its shards share."""

    # a shard takes its journal over from a writer that may still be alive; else that one's lock refuses it
    takeover: bool

    def __init__(self, location: Location) -> None:
        self.location = location

    @staticmethod
    def of(where: SharedRoot | Location) -> SharedRoot:
        """A place alone is a cluster's root."""
        return where if isinstance(where, SharedRoot) else ClusterRoot(where)

    @property
    @abstractmethod
    def stores(self) -> Location:
        """The folder of the shards' stores."""

    @abstractmethod
    def store(self, shard: str) -> Location:
        """A shard's store."""

    @abstractmethod
    def newest_map(self) -> ShardMap:
        """The map in force. StoreError: there is none."""

    @abstractmethod
    def settings(self, given: Settings) -> Settings:
        """The settings with what is one and the same for all shards. StoreError."""

    @abstractmethod
    def check_moves(self) -> None:
        """UndertowError where no tenant ever moves."""


class ClusterRoot(SharedRoot):
    """A cluster's root. Its shards may be in other processes, and be restarted while theirs still live."""

    takeover = True

    @property
    def stores(self) -> Location:
        return self.location / STORES

    def store(self, shard: str) -> Location:
        return self.stores / shard

    def newest_map(self) -> ShardMap:
        return shard_map.load(self.location)

    def settings(self, given: Settings) -> Settings:
        return thresholds.in_force(self.location, given)

    def check_moves(self) -> None:
        pass


class SingleStoreRoot(SharedRoot):
    """A store without a root: a cluster of one shard, whose map is for good."""

    takeover = False

    def __init__(self, where: Location | Path | str) -> None:
        """Also of a store that has yet to be made. StoreError: something else lies there."""
        location = Location.of(where)
        if shard_map.exists(location):
            raise StoreError(f"{location} is a cluster's root, whose shards run on Ray. Give --ray ADDRESS.")
        super().__init__(location)
        # the engine makes a missing store with the key of the map
        made = location.exists(DESCRIPTION)
        hash_key = read_info(location).hash_key if made else secrets.token_hex(32)
        self._map = ShardMap(1, (SINGLE,), hash_key=hash_key)

    @property
    def stores(self) -> Location:
        return self.location

    def store(self, shard: str) -> Location:
        return self.location

    def newest_map(self) -> ShardMap:
        return self._map

    def settings(self, given: Settings) -> Settings:
        return given

    def check_moves(self) -> None:
        raise UndertowError(
            f"{self.location} is a plain store, of one shard for good. To spread its tenants over shards, "
            "export them and import them into a cluster."
        )
