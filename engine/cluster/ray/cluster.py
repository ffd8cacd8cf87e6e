"""The cluster of a root on Ray: shards found or started, one router over them, shards added or removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.ray.actors import RayShard, Starter
from undertow.engine.cluster.resharding.coordinator import MoveProgress, ReshardReport, reshard, resume
from undertow.engine.cluster.root import agree_on_thresholds, make_root, with_policy
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.storage.location import Location


class Cluster(Router):
    """Engine's calls over all shards of a root. Use as a context manager; safe from several threads.

    Leaving it leaves the shards running; `stop` ends them.
    """

    def __init__(self, root: Location, settings: Settings, resources: ClusterSettings, parts: Any) -> None:
        """Of a root that has a map; `open` makes one, and says what is raised."""
        shards = shard_map.load(root).all_shards
        settings = with_policy(root, settings)
        agree_on_thresholds(root, settings)
        self._start = Starter(root, settings, resources, parts)
        self._start.check(shards)
        for shard in shards:  # side by side, while the first turns are read
            self._start(shard)
        super().__init__(root, lambda id: RayShard(self._start, id), resources, settings.max_message_bytes)

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
        (EngineParts) are those of shards that are started now; the thresholds are the root's.
        UndertowError where the root has other thresholds, or another number of shards; ResourcesLacking.
        """
        location = Location.of(root)
        if shards is not None:
            _begin(location, shards)
        return cls(location, settings, resources or ClusterSettings(), parts)

    def reshard(
        self, shards: Sequence[str], *, on_progress: Callable[[MoveProgress], None] = lambda _: None
    ) -> ReshardReport:
        """Move to these shards, and the tenants that must move; the actors of removed shards end."""
        self._start.check(shards)
        return self._ended(reshard(self.root.location, shards, self.ask_shard, on_progress=on_progress))

    def resume_resharding(
        self, *, on_progress: Callable[[MoveProgress], None] = lambda _: None
    ) -> ReshardReport:
        """Finish an interrupted resharding, if there is one."""
        return self._ended(resume(self.root.location, self.ask_shard, on_progress=on_progress))

    def _ended(self, done: ReshardReport) -> ReshardReport:
        removed = self._pool.shards - set(done.shard_map.all_shards)
        self._tasks.begin(self._notify(sorted(removed))).result()
        return done

    async def _notify(self, removed: Sequence[str]) -> None:
        """Have removed shards read the map. They end, and calls that wait there are routed again."""
        for shard in removed:
            with suppress(UndertowError):  # they also read it by themselves, from time to time
                await self._pool.calls(shard).call("look")

    def stop(self) -> None:
        """Close every shard's engine and end its actor. `open` starts them again, from their journals."""
        self._tasks.begin(self._end()).result()
        self.close()

    async def _end(self) -> None:
        shards = [self._pool.calls(shard) for shard in await self._pool.all_shards()]
        await asyncio.gather(*(shard.end() for shard in shards if isinstance(shard, RayShard)))


def _begin(root: Location, shards: int) -> None:
    """Make a root of so many shards, if there is none."""
    make_root(root, shards)
    found = shard_map.load(root)
    if len(found.shards) != shards:
        raise UndertowError(
            f"{root} has {len(found.shards)} shards ({', '.join(found.shards)}), not {shards}. Leave the "
            "number out, or change it with `undertow cluster move`."
        )
