"""MemoryApi over all shards of a root.

One event loop runs the routing and serves callers on any thread: a loop of its own on a thread, or the loop
of a service, whose calls then change no thread. A slow shard does not delay calls to others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa

from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import Turn, UndertowError, unknown_memory
from undertow.engine.base.queries import (
    AnswerQuery,
    ApiCall,
    MemoryCall,
    R,
    Repeatable,
    StoreCall,
    TenantCall,
)
from undertow.engine.base.results import Receipt, TableReport
from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.routing.errors import Backoff, ShardCalls, ShardDown, ShardGone
from undertow.engine.cluster.routing.shard_pool import ShardPool
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.cluster.wire import FEW_ROWS, Status, check_turns, pack, pack_turn, unpack_receipts
from undertow.engine.llm.loop_tasks import LoopTasks
from undertow.engine.readers import StoreEncoder, turns_of_rows
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import DESCRIPTION, read_info
from undertow.engine.tenants.migration_records import InTransit, Moved

if TYPE_CHECKING:
    from undertow.engine.cluster.shard.api.answer_streams import AnswerTicket

T = TypeVar("T")
ShardStates = dict[str, dict[str, Any]]

# how long a shard may take to report its status
STATUS_PATIENCE_S = 5.0

# how often a shard that owes an answer is pinged
PING_S = 5.0


class Router(MemoryApi):
    """Carries calls to the shards. Use as a context manager; safe from several threads.

    Every call waits for a shard that is down for up to `patience_s`: then ShardDown.
    """

    def __init__(
        self,
        where: SharedRoot | Location,
        connect: Callable[[str], ShardCalls],
        settings: ClusterSettings | None = None,
        max_message_bytes: int = 1_000_000,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`connect`: a shard's calls, by its id. `max_message_bytes`: see Settings. StoreError: no map.

        `loop`: the running event loop that does the routing; its thread uses the methods `begin...` alone,
        and this is closed on another. None: a thread does the routing.
        """
        self._max_message_bytes = max_message_bytes
        self.root = SharedRoot.of(where)
        self.settings = settings or ClusterSettings()
        self._pool = ShardPool(self.root, connect, self.settings)
        self._tasks = LoopTasks(loop, "router")

    def close(self) -> None:
        """Stop routing, once pending calls have been answered. The shards go on."""
        self._tasks.close(self._stop())

    # ---- queries and commands

    def call(self, call: ApiCall[R]) -> R:
        """Carry out one call of MemoryApi."""
        return self.begin(call).result()

    def begin(self, call: ApiCall[R]) -> Future[R]:
        """Begin a call without waiting for it. A shard skips a cancelled call that it has not begun."""
        return self._tasks.begin(self._carry_out(call))

    def begin_stream(self, query: AnswerQuery) -> Future[AnswerTicket]:
        """Begin a streamed answer. `begin_at` asks its shard for the text: see Shard.answer_more."""
        return self._tasks.begin(self._ask_owner("answer_begin", query))

    def begin_at(self, shard: str, method: str, *args: Any) -> Future[Any]:
        """Begin one call of Shard, by name, repeated if it gets lost."""
        return self._tasks.begin(self._ask_shard(shard, method, *args))

    def ask_shard(self, shard: str, method: str, *args: Any) -> Any:
        """One call of Shard, by name, repeated if it gets lost."""
        return self.begin_at(shard, method, *args).result()

    async def _carry_out(self, call: ApiCall[R]) -> R:
        if isinstance(call, TenantCall):
            return cast(R, await self._ask_owner("ask", call))
        if isinstance(call, MemoryCall):
            asked = self._ask_every_shard(call) if call.tenant is None else self._ask_owner("ask", call)
            if (found := await asked) is None:
                raise unknown_memory(call.memory_id, call.tenant)
            return cast(R, found)
        assert isinstance(call, StoreCall)
        combined: R = call.combined(await self._ask_all(call))
        return combined

    async def _ask_owner(self, method: str, call: TenantCall[Any] | MemoryCall[Any]) -> Any:
        """Ask the shard that has the call's tenant; repeat a call that got lost."""
        pause = Backoff(self.settings.patience_s)
        assert call.tenant is not None
        while True:
            shard = self._pool.routes.home_of(call.tenant)
            try:
                return await self._ask(shard, method, call)
            except Removed as removed:
                await self._pool.read_map()
                error: UndertowError = removed
            except Moved as moved:
                await self._pool.read_map()
                self._pool.routes.moved({call.tenant: moved.to})
                error = moved
            except (InTransit, QueueFull) as refused:
                error = refused
            except ShardGone as gone:
                call, error = _as_repeat(call), gone
            if not await pause():
                raise ShardDown(shard, pause.waited_s, error)

    async def _ask_every_shard(self, call: MemoryCall[Any]) -> Any:
        """The answer of the shard that has the memory; None: none has it. An id does not tell its tenant."""
        pause = Backoff(self.settings.patience_s)
        while True:
            asked = (self._ask(shard, "ask", call) for shard in await self._pool.all_shards())
            answers = await asyncio.gather(*asked, return_exceptions=True)
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            given = [a for a in answers if a is not None and not isinstance(a, BaseException)]
            if given or not errors:
                return given[0] if given else None
            for error in errors:
                if not isinstance(error, Moved | InTransit | QueueFull | ShardGone | Removed):
                    raise error
                if isinstance(error, ShardGone):
                    call = _as_repeat(call)
            if not await pause():
                raise UndertowError(
                    f"the shard of memory {call.memory_id} gave no answer to {call.name} for "
                    f"{pause.waited_s:.0f} s: {errors[0]} `undertow cluster status` shows how the shards "
                    "are; try again."
                )

    async def _ask_all(self, call: StoreCall[R]) -> list[R]:
        """The answers of all shards, in their order; all are asked at once."""
        while True:
            asked = (self._ask_shard(shard, "ask", call) for shard in await self._pool.all_shards())
            try:
                return list(await asyncio.gather(*asked))
            except Removed:  # a shard was removed meanwhile; its tenants are at others now
                continue

    async def _ask_shard(self, shard: str, method: str, *args: Any) -> Any:
        pause = Backoff(self.settings.patience_s)
        while True:
            try:
                return await self._ask(shard, method, *args)
            except (ShardGone, QueueFull) as error:
                if not await pause():
                    raise ShardDown(shard, pause.waited_s, error) from error

    async def _ask(self, shard: str, method: str, *args: Any) -> Any:
        """One call to one shard, however long it takes while its process answers pings. ShardDown."""
        calls = self._pool.calls(shard)
        asked = asyncio.ensure_future(calls.call(method, *args))
        try:
            while not (await asyncio.wait([asked], timeout=PING_S))[0]:
                if not await self._is_alive(calls, asked):
                    raise ShardDown(shard, self.settings.patience_s, "its process does not answer")
        finally:
            asked.cancel()
        return asked.result()

    async def _is_alive(self, calls: ShardCalls, asked: asyncio.Future[Any]) -> bool:
        """Whether a shard answers a ping or the call itself within the patience."""
        pause = Backoff(self.settings.patience_s)
        while pause.left_s > 0:
            ping = asyncio.ensure_future(calls.call("ping"))
            await asyncio.wait([asked, ping], timeout=pause.left_s, return_when=asyncio.FIRST_COMPLETED)
            answered = ping.done() and ping.exception() is None
            ping.cancel()
            if answered or asked.done():
                return True
            await pause()
        return False

    # ---- ingestion

    def owners(self, tenants: Sequence[str]) -> list[str]:
        """The shard of each tenant at present, to group work by."""
        return self._pool.routes.map.homes(tenants)

    def add_batch(self, turns: Sequence[Turn]) -> list[Receipt]:
        """Store turns; durable and searchable on return. One receipt a turn, in order.

        InputError: one of them is invalid, and none was sent. If the answer to a call got lost, the receipts
        of its turns say duplicate, without an id.
        """
        receipts = self.feed_table(pack(turns)).result()
        return unpack_receipts(receipts, [turn.tenant for turn in turns])

    @property
    def store_encoder(self) -> StoreEncoder:
        """What vectors must be of that come with turns. Waits for a shard if none has a store. ShardDown."""
        shards = self._pool.routes.map.all_shards
        made = (shard for shard in shards if self.root.store(shard).exists(DESCRIPTION))
        if (shard := next(made, None)) is None:
            self.ask_shard(shard := shards[0], "ready")
        info = read_info(self.root.store(shard))
        return StoreEncoder(info.dim, info.encoder["digest"])

    def add_table(self, table: pa.Table | pa.RecordBatchReader, *, source: str | None = None) -> TableReport:
        """Like Engine.add_table. If the answer to a call got lost, its turns do not count as new.

        ShardDown: turns of this record batch and those before it may have been stored.
        """
        return self.add_turns(turns_of_rows(table, source, self._max_message_bytes, self.store_encoder))

    def add_turns(self, tables: Iterable[pa.Table]) -> TableReport:
        """As `add_table`, of tables of wire.TURNS."""
        counts = Counter[str]()
        for turns in tables:
            counts.update(self.feed_table(turns).result().column("status").to_pylist())
        parked = counts[Status.PARKED]
        return TableReport(counts.total() - parked, counts[Status.STORED], parked)

    def feed_table(self, table: pa.Table) -> Future[pa.Table]:
        """Begin to store turns as wire.TURNS, in the order of these calls: wire.RECEIPTS, row for row.

        Waits while too many turns wait for one of the shards.
        """
        check_turns(table)
        return self._tasks.begin(self._pool.send(table)).result()

    def submit_table(self, table: pa.Table) -> Future[pa.Table]:
        """Like `feed_table`, without waiting for room. QueueFull: too many turns wait for a shard.

        If one of these calls fails, those behind it at the same shard fail too.
        """
        check_turns(table)

        async def begun() -> Future[pa.Table]:
            return self._pool.offer(table)

        return self._tasks.begin(begun()).result()

    def begin_add(self, turns: Sequence[Turn]) -> Future[list[Receipt]]:
        """Begin to store turns. InputError; on the future QueueFull. Cancelling it undoes nothing."""
        tenants = [turn.tenant for turn in turns]
        packed = [pack_turn(turn) for turn in turns] if len(turns) <= FEW_ROWS else pack(turns)
        return self._tasks.run(lambda: self._pool.offer(packed, lambda r: unpack_receipts(r, tenants)))

    # ---- shards

    def tenant_key(self, tenant: str) -> str:
        """The keyed hash that stands for a tenant in journals, certificates and the audit log."""
        return self._pool.routes.map.tenant_key(tenant)

    def status(self) -> ShardStates:
        """Each shard's report, by shard; the reason if it cannot be reached. Plain data."""
        return self.begin_status().result()

    def begin_status(self) -> Future[ShardStates]:
        """Begin `status` without waiting for it."""
        return self._tasks.begin(self._status())

    async def _status(self) -> ShardStates:
        shards = await self._pool.all_shards()
        states = await asyncio.gather(*(self._status_of(shard) for shard in shards))
        return dict(zip(shards, states, strict=True))

    async def _status_of(self, shard: str) -> dict[str, Any]:
        ours = self._pool.status(shard)
        try:
            asked = self._pool.calls(shard).call("status")
            return {**await asyncio.wait_for(asked, STATUS_PATIENCE_S), **ours}
        except (UndertowError, TimeoutError) as error:
            return {"state": "unreachable", "failure": str(error) or "it does not answer", **ours}

    async def _stop(self) -> None:
        await self._pool.stop()
        await self._tasks.cancel()


def _as_repeat(call: T) -> T:
    """The same call, marked as one that may have been carried out already."""
    return replace(call, again=True) if isinstance(call, Repeatable) else call
