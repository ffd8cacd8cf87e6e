"""A plain store's memories in this process: one shard, without a router and without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import Turn, UndertowError, unknown_memory
from undertow.engine.base.queries import AnswerQuery, ApiCall, MemoryCall, R, StoreCall
from undertow.engine.base.results import Receipt
from undertow.engine.cluster.root import SINGLE, SingleStoreRoot
from undertow.engine.cluster.shard.api.answer_streams import AnswerTicket
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.llm.loop_tasks import refused, then
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location
from undertow.engine.storage.row_codec import pack_turn

ShardStates = dict[str, dict[str, Any]]

# how long closing waits for turns that are being stored, and a blocking add between looks for room
CLOSING_S, ROOM_S = 10.0, 0.005


class InProcess(MemoryApi):
    """MemoryApi over a plain store. Leaving it closes the store. Safe to call from several threads.

    A shard that an unexpected error has ended is begun anew at the next call.
    """

    def __init__(
        self,
        store: Location | Path | str,
        settings: Settings,
        parts: EngineParts | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Opens the store, made if it is missing; blocks until it is open.

        `loop`: the running event loop that does the shard's work, see LoopDriver; then construct and close
        this on another thread. None: a thread does the work.
        StoreLocked: another process writes the store, and goes on doing so; StoreError, JournalError: see
        Engine.
        """
        self._root = SingleStoreRoot(store)
        self._start: Callable[[], Shard] = partial(Shard, self._root, SINGLE, settings, parts, loop=loop)
        self._lock = threading.Lock()
        self._closed = False
        self._shard = self._start()
        try:
            self._shard.ready().result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Finish the adds under way, then close the store. Undecided turns stay in its log."""
        until_s = time.monotonic() + CLOSING_S
        while self._shard.waiting_turns and not self._closed and time.monotonic() < until_s:
            time.sleep(ROOM_S)
        with self._lock:
            self._closed = True
        self._shard.close()

    # ---- calls

    def call(self, call: ApiCall[R]) -> R:
        """Carry out one call of MemoryApi."""
        return self.begin(call).result()

    def add_batch(self, turns: Sequence[Turn]) -> list[Receipt]:
        """Store turns; durable and searchable on return. One receipt a turn, in order. InputError."""
        while True:
            try:
                return self.begin_add(turns).result()
            except QueueFull:
                time.sleep(ROOM_S)

    def begin(self, call: ApiCall[R]) -> Future[R]:
        """Begin a call. Cancelled before the shard has begun it, it is skipped, unless it is a purge."""
        asked = self._begin("ask", call)
        if not isinstance(call, MemoryCall | StoreCall):
            return asked
        return then(asked, partial(_result_of, call))

    def begin_add(self, turns: Sequence[Turn]) -> Future[list[Receipt]]:
        """Begin to store turns. InputError; on the future QueueFull. Cancelling it undoes nothing."""
        return self._begin("add_here", [pack_turn(turn) for turn in turns])

    def begin_stream(self, query: AnswerQuery) -> Future[AnswerTicket]:
        """Begin a streamed answer. `begin_at` asks for the text: see Shard.answer_more."""
        return self._begin("answer_begin", query)

    def begin_at(self, _: str, method: str, *args: Any) -> Future[Any]:
        """Begin one call of Shard, by name."""
        return self._begin(method, *args)

    def begin_status(self) -> Future[ShardStates]:
        """Begin to ask for the shard's report, by shard. Plain data."""
        return then(self._begin("status"), lambda state: {SINGLE: state})

    def status(self) -> ShardStates:
        """The shard's report, by shard. Plain data."""
        return self.begin_status().result()

    def tenant_key(self, tenant: str) -> str:
        """The keyed hash that stands for a tenant in journals, certificates and the audit log."""
        return self._root.newest_map().tenant_key(tenant)

    # ---- the shard

    def _begin(self, method: str, *args: Any) -> Future[Any]:
        try:
            return self._running().call(method, *args)
        except UndertowError as error:
            return refused(error)

    def _running(self) -> Shard:
        """The shard, begun anew if its own was ended by an error."""
        with self._lock:
            if self._closed:
                raise UndertowError("the memories were closed. Open the store again.")
            if self._shard.join(0.0):
                self._shard = self._start()
            return self._shard


def _result_of(call: ApiCall[R], found: Any) -> R:
    """UnknownMemory."""
    if isinstance(call, MemoryCall) and found is None:
        raise unknown_memory(call.memory_id, call.tenant)
    if isinstance(call, StoreCall):
        combined: R = call.combined([found])
        return combined
    result: R = found
    return result
