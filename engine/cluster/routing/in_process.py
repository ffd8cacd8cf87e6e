"""One shard in this process behind a router, without Ray: how one process serves a plain store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.cluster.root import SINGLE, SingleStoreRoot
from undertow.engine.cluster.routing.errors import ShardGone
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.engine_thread import ShardClosed
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.storage.location import Location


class LocalShard:
    """The calls of a shard in this process; see ShardCalls. Close it to end the shard."""

    def __init__(self, start: Callable[[], Shard]) -> None:
        self._start = start
        self._shard = start()
        self._lock = threading.Lock()
        self._closed = False

    def ready(self) -> None:
        """Wait until the engine is open. Raises why it cannot be opened."""
        self._shard.ready().result()

    async def call(self, method: str, *args: Any) -> Any:
        """The shard's answer. ShardGone: its thread has ended, and the next call starts it anew."""
        shard = self._running()
        try:
            return await asyncio.wrap_future(shard.call(method, *args))
        except ShardClosed as closed:
            raise ShardGone(str(closed)) from None

    def _running(self) -> Shard:
        """The shard, started anew if its thread was ended by an error. ShardClosed."""
        with self._lock:
            if self._closed:
                raise ShardClosed(self._shard.id)
            if self._shard.join(0.0):
                self._shard = self._start()
            return self._shard

    def close(self) -> None:
        """Close the shard; its pending calls fail."""
        with self._lock:
            self._closed = True
        self._shard.close()


class InProcess(Router):
    """MemoryApi over a plain store, by one shard in this process. Leaving it closes the store."""

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
        root = SingleStoreRoot(store)
        self._local = LocalShard(lambda: Shard(root, SINGLE, settings, parts))
        try:
            self._local.ready()
            super().__init__(root, lambda _: self._local, cluster, settings.max_message_bytes)
        except BaseException:
            self._local.close()
            raise

    def close(self) -> None:
        """Answer pending calls, then close the store. Undecided turns stay in its log for the next run."""
        try:
            super().close()
        finally:
            self._local.close()
