"""Shards of this very process behind a router, without Ray: how one process serves a plain store."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.cluster.root import SINGLE, SharedRoot, SingleStoreRoot
from undertow.engine.cluster.routing.errors import ShardGone
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.engine_thread import ShardClosed
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.storage.location import Location


class LocalShards:
    """The shards of a site that live in this process; safe from several threads. Close it to end them."""

    def __init__(self, site: SharedRoot, settings: Settings, parts: EngineParts | None = None) -> None:
        self.site = site
        self._settings = settings
        self._parts = parts or EngineParts()
        self._running: dict[str, Shard] = {}
        self._lock = threading.Lock()
        self._closed = False

    def shard(self, name: str) -> Shard:
        """The shard of this name, begun now if it does not run. ShardClosed: all are closed.

        One whose thread has ended, by an error that it should have outlived, is begun anew.
        """
        with self._lock:
            if self._closed:
                raise ShardClosed(name)
            shard = self._running.get(name)
            if shard is None or shard.join(0.0):
                shard = self._running[name] = Shard(self.site, name, self._settings, self._parts)
            return shard

    def calls(self, name: str) -> LocalCalls:
        """The shard as a router sees it."""
        return LocalCalls(self, name)

    def close(self) -> None:
        """Close every shard; what is under way there fails."""
        with self._lock:
            self._closed = True
        for shard in self._running.values():
            shard.close()


class LocalCalls:
    """See reach.ShardCalls."""

    def __init__(self, shards: LocalShards, name: str) -> None:
        self._shards, self._name = shards, name

    async def call(self, method: str, *args: Any) -> Any:
        """The shard's answer. ShardGone: its thread has ended, and the next call begins it anew."""
        shard = self._shards.shard(self._name)
        try:
            return await asyncio.wrap_future(shard.call(method, *args))
        except ShardClosed as closed:
            raise ShardGone(str(closed)) from None


class InProcess(Router):
    """Engine's calls over a plain store, by one shard in this process. Leaving it closes the store."""

    def __init__(
        self,
        store: Location | Path | str,
        settings: Settings,
        parts: EngineParts | None = None,
        *,
        cluster: ClusterSettings | None = None,
    ) -> None:
        """Opens the store, made if it is missing. `cluster`: the bounds between the router and the shard.

        StoreLocked: another process writes it, and goes on doing so; StoreError, JournalError: see Engine.
        """
        site = SingleStoreRoot(store)
        self._shards = LocalShards(site, settings, parts)
        try:
            self._shards.shard(SINGLE).ready().result()
            super().__init__(site, self._shards.calls, cluster)
        except BaseException:
            self._shards.close()
            raise

    def close(self) -> None:
        """Answer what was sent, then close the store. What is undecided stays in its log for the next run."""
        try:
            super().close()
        finally:
            self._shards.close()
