"""The cluster of a root on Ray: shards found or started, one router over them, shards added or removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Certificate
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.ray.actors import RayShard, Starter
from undertow.engine.cluster.resharding.coordinator import MoveProgress, ReshardReport, reshard, resume
from undertow.engine.cluster.resharding.participant import DepartingTenant
from undertow.engine.cluster.root_thresholds import agree
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard_map import MapConflict, ShardMap
from undertow.engine.storage.location import Location


class Cluster(Router):
    """Engine's calls over all shards of a root. Use as a context manager; safe from several threads.

    Leaving it leaves the shards running; `stop` ends them.
    """

    def __init__(self, root: Location, settings: Settings, resources: ClusterSettings, parts: Any) -> None:
        """Of a root that has a map; `open` makes one, and says what is raised."""
        everyone = shard_map.load(root).everyone
        agree(root, settings)
        self._start = Starter(root, settings, resources, parts)
        self._start.check(everyone)
        super().__init__(root, lambda shard: RayShard(self._start, shard), resources)

    @classmethod
    def open(
        cls,
        root: Location | str,
        settings: Settings,
        *,
        shards: int | None = None,
        resources: ClusterSettings | None = None,
        parts: Any = None,
    ) -> Self:
        """Find the shards of a root, and start those that do not run. Ray must be initialised (`connect`).

        `shards`: how many a new root begins with; None: it must exist. `settings`, `resources` and `parts`
        (housing.Parts) are those of shards that are started now; the thresholds are the root's.
        UndertowError where the root has other thresholds, or another number of shards; ResourcesLacking.
        """
        location = Location.of(root)
        if shards is not None:
            _begin(location, shards)
        return cls(location, settings, resources or ClusterSettings(), parts)

    def reshard(
        self, shards: Sequence[str], *, on_progress: Callable[[MoveProgress], None] = lambda _: None
    ) -> ReshardReport:
        """Go over to these shards, moving the tenants that must; the others' actors end."""
        self._start.check(shards)
        return self._ended(reshard(self.site.location, shards, self._remote, on_progress=on_progress))

    def resume_resharding(
        self, *, on_progress: Callable[[MoveProgress], None] = lambda _: None
    ) -> ReshardReport:
        """End a resharding that was cut off, if there is one."""
        return self._ended(resume(self.site.location, self._remote, on_progress=on_progress))

    def _ended(self, done: ReshardReport) -> ReshardReport:
        gone = self._pool.shards - set(done.shard_map.everyone)
        self._begin(self._tell(sorted(gone))).result()
        return done

    async def _tell(self, gone: Sequence[str]) -> None:
        """Have shards that were removed see it. They end, and whoever waits there finds its way anew."""
        for shard in gone:
            with suppress(UndertowError):  # they see it by themselves some time
                await self._pool.calls(shard).call("look")

    def stop(self) -> None:
        """Close every shard's engine and end its actor. `open` starts them again, from their journals."""
        self._begin(self._end()).result()
        self.close()

    async def _end(self) -> None:
        shards = [self._pool.calls(shard) for shard in await self._pool.everyone()]
        await asyncio.gather(*(shard.end() for shard in shards if isinstance(shard, RayShard)))

    def _remote(self, shard: str) -> RemoteShard:
        return RemoteShard(self, shard)


class RemoteShard:
    """A shard's part in a resharding, over the cluster: see resharding.ShardCalls."""

    def __init__(self, cluster: Cluster, shard: str) -> None:
        self._cluster = cluster
        self._shard = shard

    def adopt(self, shard_map: ShardMap) -> None:
        self._call("adopt", shard_map)

    def leaving(self) -> list[DepartingTenant]:
        leavers: list[DepartingTenant] = self._call("leaving")
        return leavers

    def seal(self, version: int, keys: Sequence[str]) -> None:
        self._call("seal", version, keys)

    def pull(self, version: int, source: str, keys: Sequence[str]) -> int:
        return int(self._call("pull", version, source, keys))

    def release(self, version: int, keys: Sequence[str]) -> None:
        self._call("release", version, keys)

    def clear(self, version: int) -> Mapping[str, Certificate]:
        certificates: dict[str, Certificate] = self._call("clear", version)
        return certificates

    def _call(self, method: str, *args: Any) -> Any:
        return self._cluster.ask_shard(self._shard, method, *args)


def _begin(root: Location, shards: int) -> None:
    """Make a root of so many shards, if there is none."""
    if shards < 1:
        raise ValueError(f"a cluster has one shard or more, not {shards}")
    if not shard_map.exists(root):
        names = [f"s{number:04d}" for number in range(1, shards + 1)]
        with suppress(MapConflict):  # another driver was quicker
            shard_map.publish(root, ShardMap.new(names))
    found = shard_map.load(root)
    if len(found.shards) != shards:
        raise UndertowError(
            f"{root} has {len(found.shards)} shards ({', '.join(found.shards)}), not {shards}. Leave the "
            "number out, or change it with `undertow cluster move`."
        )
