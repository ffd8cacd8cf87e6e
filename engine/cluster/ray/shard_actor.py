"""The actor in a shard's process.

This module imports next to nothing: a shard's modules are loaded when it begins, so that a killed shard is
back sooner (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from undertow.engine.base.process_tuning import settle_in, without_pandas

log = logging.getLogger(__name__)

# how long an actor that ends itself waits for its answers to be sent
LAST_WORDS_S = 1.0
# how often a shard reads the map, to see whether it was removed
LOOK_S = 60.0


class ShardActor:
    """Calls of `Shard` by name, awaited side by side."""

    def __init__(self, root: str, shard: str, settings: dict[str, Any], parts: bytes, life: str) -> None:
        """`parts`: a pickle of `EngineParts`, which must not be loaded before the rest."""
        with without_pandas():
            from undertow.engine.cluster.shard.shard import Shard
        from undertow.engine.base.config import Settings
        from undertow.engine.storage.location import Location

        loaded = pickle.loads(parts)
        settle_in()
        self._closing = False
        self._restarting = False
        self._shard = Shard(Location.of(root), shard, Settings(**settings), loaded, life=life)
        threading.Thread(target=self._watch, name=f"watch-{shard}", daemon=True).start()

    def _watch(self) -> None:
        """End the process if the shard's thread ends by an error: a new process takes over."""
        from undertow.engine.base.model import UndertowError
        from undertow.engine.cluster.shard_map import Removed

        while not self._shard.join(LOOK_S):
            try:
                self._shard.look().result()
            except Removed:
                self._end()
            except UndertowError as error:
                log.warning("shard %s cannot look at the map: %s", self._shard.id, error)
        if not self._closing:
            os._exit(1)

    def _end(self) -> None:
        """End for good: Ray must not restart this actor."""
        import ray

        self._closing = True
        self._shard.close()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        traceparent: str | None = None,
        *pieces: bytes,
    ) -> Any:
        """The shard's answer or error. `pieces`: of a table, the method's first argument.

        `traceparent`: see engine/base/trace.py.
        """
        import pyarrow as pa

        from undertow.engine.base.trace import use_traceparent
        from undertow.engine.cluster.routing.errors import ShardExited
        from undertow.engine.cluster.shard.supervisor import EngineUnusable
        from undertow.engine.cluster.shard_map import Removed
        from undertow.engine.cluster.wire import from_pieces, to_buffer
        from undertow.engine.storage.journal import Fenced

        if self._restarting:  # so that no turn that comes now is blamed for the end
            raise ShardExited(f"shard {self._shard.id} is being restarted")
        try:
            tables = [from_pieces(pieces)] if pieces else []
            with use_traceparent(traceparent):
                answered = self._shard.call(method, *tables, *args)
            answer = await asyncio.wrap_future(answered)
            return to_buffer(answer) if isinstance(answer, pa.Table) else answer
        except (Fenced, EngineUnusable):
            # only a new process can take the journal over again, or regain a device
            self._restarting = True
            asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)
            raise
        except Removed:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._end)
            raise

    async def close(self) -> None:
        """Close the engine; the actor answers nothing after it."""
        self._closing = True
        await asyncio.to_thread(self._shard.close)
