"""Where the shards of a cluster store their data: in its root, or in a plain store with a single shard.

ROOT/map/                       the shard maps
ROOT/thresholds.json            the thresholds of all shards, made with the root
ROOT/shards/SHARD/              each shard's store
STORE/                          a plain store, as `undertow ingest` makes it without --ray: one shard
ROOT or STORE/parked/SHARD/     quarantined turns

The thresholds lie in the root so that a shard decides by them whichever command started it.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

import orjson

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.shard_map import STORES, MapConflict, ShardMap
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.storage.store_info import DESCRIPTION, is_store, read_info

# the one shard of a plain store
SINGLE = "single"
THRESHOLDS = "thresholds.json"
# settings that determine the thresholds
NAMING = {"profile", "theta_share", "theta_sim", "theta_merge", "theta_count"}


class SharedRoot:
    """What a router and its shards share: a cluster's root.

    Its shards may run in other processes, and be restarted while their former processes still live.
    """

    # a shard takes its journal over from a writer that may still be alive; else that writer's lock refuses it
    takeover = True

    def __init__(self, location: Location) -> None:
        self.location = location

    @staticmethod
    def of(where: SharedRoot | Location) -> SharedRoot:
        """A location alone is a cluster's root."""
        return where if isinstance(where, SharedRoot) else SharedRoot(where)

    @property
    def stores(self) -> Location:
        """The folder of the shards' stores."""
        return self.location / STORES

    def store(self, shard: str) -> Location:
        """A shard's store."""
        return self.stores / shard

    def newest_map(self) -> ShardMap:
        """The map in force. StoreError: there is none."""
        return shard_map.load(self.location)

    def settings(self, given: Settings) -> Settings:
        """The settings with the thresholds of all shards. StoreError."""
        return with_thresholds(self.location, given)

    def check_moves(self) -> None:
        """UndertowError where no tenant ever moves."""


class SingleStoreRoot(SharedRoot):
    """A store without a root: a cluster of one shard, whose map never changes."""

    takeover = False

    def __init__(self, where: Location | Path | str) -> None:
        """The store may be missing yet. StoreError: a cluster's root lies there."""
        location = Location.of(where)
        if shard_map.exists(location):
            raise StoreError(
                f"{location} is a cluster's root, of one store a shard. Give --workers N or --ray ADDRESS."
            )
        super().__init__(location)
        # the engine makes a missing store with the key of the map
        made = location.exists(DESCRIPTION)
        hash_key = read_info(location).hash_key if made else secrets.token_hex(32)
        self._map = ShardMap(1, (SINGLE,), hash_key=hash_key)

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


def make_root(root: Location, shards: int) -> None:
    """Make a root of so many shards, if there is none. ValueError: none are asked for."""
    if shards < 1:
        raise ValueError(f"a cluster has one shard or more, not {shards}")
    if not shard_map.exists(root):
        names = [f"s{number:04d}" for number in range(1, shards + 1)]
        with suppress(MapConflict):  # another process was quicker
            shard_map.publish(root, ShardMap.new(names))


# ---- what all shards have in common


def with_policy(root: Location, settings: Settings) -> Settings:
    """The settings, under the policy of the root's shards unless they name one. StoreError."""
    stores = [] if "policy" in settings.model_fields_set else shard_map.load(root).all_shards
    found = next(
        (read_info(s).policy for s in (root / STORES / name for name in stores) if is_store(s)), None
    )
    return settings if found is None else settings.under(found)


def agree_on_thresholds(root: Location, settings: Settings) -> None:
    """Store the settings' thresholds if the root has none. UndertowError: it has others than they name.

    Settings that name none of them agree with any.
    """
    root.create(THRESHOLDS, orjson.dumps(_thresholds(settings), option=orjson.OPT_INDENT_2))
    stored = with_thresholds(root, settings)
    if settings.model_fields_set & NAMING and _thresholds(stored) != _thresholds(settings):
        raise UndertowError(
            f"the tenants of {root} are decided by {_shown(stored)}, "
            f"and the settings say {_shown(settings)}. "
            "Leave profile and thresholds out (the options, UNDERTOW_PROFILE and UNDERTOW_THETA_*); or, to "
            "change them for all later turns, end the shards (`undertow cluster drain --stop`) and change "
            f"{root / THRESHOLDS}."
        )


def with_thresholds(root: Location, settings: Settings) -> Settings:
    """The settings with the root's thresholds, if it has any. StoreError: the file is damaged."""
    data = root.read(THRESHOLDS)
    if data is None:
        return settings
    try:
        found = orjson.loads(data)
        found = {"theta_share": 0.0, **found}  # roots of earlier versions state no share
        if found.keys() != _thresholds(settings).keys():
            raise ValueError(f"it must hold {', '.join(_thresholds(settings))}")
        return Settings(**{**settings.model_dump(), **found})
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{root / THRESHOLDS} holds no thresholds ({error}). Restore it from a backup."
        ) from error


def _thresholds(settings: Settings) -> dict[str, float | None]:
    """The settings that state the thresholds: a theta that follows from a share is null."""
    return {
        "theta_sim": settings.similarity_threshold if settings.sim_share is None else None,
        "theta_merge": settings.merge_threshold if settings.merge_share is None else None,
        "theta_count": settings.recurrence_count,
        "theta_share": settings.sim_share or 0.0,
    }


def _shown(settings: Settings) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in _thresholds(settings).items() if value)
