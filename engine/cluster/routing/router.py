"""The cluster as one engine: Engine's calls over all shards of a root.

One thread runs the routing; callers of any thread hand it their calls. What a shard does is waited for
without holding up calls to others.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from undertow.engine.base.model import AnswerMode, Memory, Turn, UndertowError, unknown_memory
from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.routing.aggregate import TOGETHER
from undertow.engine.cluster.routing.batch import PendingAdd, ShardBatch, split
from undertow.engine.cluster.routing.errors import Backoff, ShardCalls, ShardDown, ShardGone
from undertow.engine.cluster.routing.route_table import Route, RouteTable
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.tenant_calls import RouterTenantCalls
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.cluster.wire import check_turns, pack, unpack_receipts
from undertow.engine.step.admission import QueueFull, Receipt
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.tenants.migration_records import InTransit, Moved

if TYPE_CHECKING:  # who only sends turns to shards is to load no torch
    from undertow.engine.api.answer_calls import Answer
    from undertow.engine.api.erasure import Certificate
    from undertow.engine.api.memory_updates import Updated, Wording
    from undertow.engine.api.views.reports import Report
    from undertow.engine.search.ranking import SearchResult

T = TypeVar("T")

# calls whose repetition a shard must be told of
CHANGING = frozenset({"delete", "update", "flush", "erase", "import_"})

# calls about one memory, which give None where there is none
OF_MEMORY = frozenset({"get", "history", "update", "delete"})

# how long a shard may take to say how it is
STATUS_PATIENCE_S = 5.0

# how often a shard that owes an answer is asked for a sign that it is there
SIGN_S = 5.0


class Router(RouterTenantCalls):
    """Engine's calls, given a way to reach each shard. Use as a context manager; safe from several threads.

    Every call waits for a shard that is down, for as long as `patience_s`: then ShardDown.
    """

    def __init__(
        self,
        where: SharedRoot | Location,
        connect: Callable[[str], ShardCalls],
        settings: ClusterSettings | None = None,
    ) -> None:
        """`connect`: the calls of a shard, by its id. StoreError where a root has no map."""
        self.site = SharedRoot.of(where)
        self.settings = settings or ClusterSettings()
        self._connect = connect
        self._client = secrets.token_hex(8)
        self._routes = RouteTable(self.site.newest_map())
        self._shard_clients: dict[str, ShardClient] = {}
        self._asides: dict[str, ShardClient] = {}
        # what is begun after `close` would wait for a loop that has ended
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop routing, once what was sent has been answered. The shards go on."""
        if self._thread.is_alive():
            with self._closing:
                self._closed = True
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # ---- calls begun without waiting for them, from any thread

    def begin(self, method: str, tenant: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Ask a tenant's shard by the name of one of Shard's calls; what comes is that of the Router's.

        To cancel it lets the question go: what the shard has not begun by then it does not do.
        """
        return self._begin(self._ask_tenant(method, tenant, *args, **kwargs))

    def begin_all(self, method: str, *args: Any) -> Future[Any]:
        """Like `begin`, of all shards: what comes is that of the Router's call of this name."""
        if method == "status":
            return self._begin(self._status())
        return self._begin(self._ask_together(method, *args))

    def begin_at(self, shard: str, method: str, *args: Any) -> Future[Any]:
        """Like `begin`, of one shard: one call of Shard, repeated where it gets lost."""
        return self._begin(self._ask_shard(shard, method, *args))

    def begin_add(self, table: pa.Table) -> Future[pa.Table]:
        """As `submit_table`, but QueueFull too comes by the future. To cancel it takes nothing back."""
        check_turns(table)
        return self._begin(self._stored(table))

    async def _stored(self, table: pa.Table) -> pa.Table:
        delivered = await self._send(table, wait=False)
        return await asyncio.shield(asyncio.wrap_future(delivered))

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UndertowError("the router was closed. Open it again.")

    def tenant_key(self, tenant: str) -> str:
        """The keyed hash that journals, certificates and the audit log know a tenant by."""
        return self._routes.map.tenant_key(tenant)

    # ---- ingestion

    def owners(self, tenants: Sequence[str]) -> list[str]:
        """The shard that the turns of each tenant go to now, to group work by."""
        return self._routes.map.homes(tenants)

    def add_batch(self, turns: Sequence[Turn]) -> list[Receipt]:
        """Store turns; durable and searchable on return. One receipt a turn, in order.

        InputError: one cannot be sent, and none was. A turn that was stored by a call whose answer got
        lost has a receipt as a duplicate, without an id.
        """
        receipts = self.add_table(pack(turns))
        return unpack_receipts(receipts, [turn.tenant for turn in turns])

    def add_table(self, table: pa.Table) -> pa.Table:
        """Like `add_batch` for turns as wire.TURNS: wire.RECEIPTS, row for row.

        Waits while too many turns wait for one of the shards.
        """
        check_turns(table)
        return self._await(self._send(table, wait=True)).result()

    def submit_table(self, table: pa.Table) -> Future[pa.Table]:
        """Like `add_table`, without waiting for the receipts. QueueFull: too many turns wait for a shard.

        Turns of one tenant are stored in the order of these calls. Where one fails, those behind it at
        the same shard fail too.
        """
        check_turns(table)
        return self._await(self._send(table, wait=False))

    async def _send(self, table: pa.Table, *, wait: bool) -> Future[pa.Table]:
        delivery = PendingAdd(table.num_rows)
        whole = ShardBatch(delivery, np.arange(table.num_rows), table)
        if not table.num_rows:
            return delivery.future
        while True:
            parcels = split(whole, self._routes.ways_of, self.settings.call_turns)
            turns = Counter[Route]()
            for way, parcel in parcels:
                turns[way] += len(parcel)
            full = next((w for w, count in turns.items() if not self._shard_client(*w).has_room(count)), None)
            if full is None:
                self._put(parcels)
                return delivery.future
            if not wait:
                raise QueueFull(
                    f"{self.settings.lane_turns} turns wait for shard {full.shard}. Try again in a moment."
                )
            room = self._shard_client(*full).room
            room.clear()
            await room.wait()

    def _put(self, parcels: Sequence[tuple[Route, ShardBatch]]) -> None:
        for way, parcel in parcels:
            shard_client = self._shard_client(*way)
            self._routes.hold(parcel.tenants, way)
            shard_client.put(parcel)

    def _shard_client(self, shard: str, aside: bool = False) -> ShardClient:
        way, shard_clients = Route(shard, aside), self._asides if aside else self._shard_clients
        if (shard_client := shard_clients.get(shard)) is None or shard_client.ended:
            shard_client = shard_clients[shard] = ShardClient(
                shard,
                self._shard_client(shard).calls if aside else self._connect(shard),
                f"{self._client}-aside" if aside else self._client,
                self.settings,
                map_version=lambda: self._routes.map.version,
                on_change=lambda parcel, others: self._exchange(way, parcel, others),
                read_map=self._read_map,
                on_returned=lambda *returned: self._send_anew(way, *returned),
            )
        return shard_client

    def _exchange(self, way: Route, parcel: ShardBatch, others: Sequence[ShardBatch]) -> None:
        for other in others:
            self._routes.hold(other.tenants, way)
        self._routes.release(parcel.tenants)

    def _send_anew(
        self, way: Route, parcels: Sequence[ShardBatch], moved: dict[str, str], in_transit: AbstractSet[str]
    ) -> None:
        """Parcels that a shard has returned, or that wait behind such: by the newest map, in their order.

        Tenants that are leaving the shard wait aside until they have moved: the others go on meanwhile, and
        are not sorted again.
        """
        self._routes.moved(moved)
        for parcel in parcels:
            self._routes.release(parcel.tenants)

        def ways_of(tenants: Sequence[str]) -> list[Route]:
            waits = [tenant not in moved and (way.aside or tenant in in_transit) for tenant in tenants]
            ways = zip(waits, self._routes.ways_of(tenants), strict=True)
            return [Route(way.shard, aside=True) if wait else other for wait, other in ways]

        for parcel in parcels:
            self._put(split(parcel, ways_of, self.settings.call_turns))

    async def _read_map(self) -> None:
        """A shard has refused a tenant: there may be a newer map, and then its word is newer still.

        Tries again within the patience. StoreError: in vain.
        """
        pause = Backoff(self.settings.patience_s)
        while True:
            try:
                await self._everyone()
                return
            except StoreError:
                if not await pause():
                    raise

    # ---- calls about one tenant

    def search(
        self,
        tenant: str,
        query: str,
        *,
        k_sub: int | None = None,
        k_epi: int | None = None,
        k_sem: int | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> SearchResult:
        """As Engine.search."""
        tiers = {"k_sub": k_sub, "k_epi": k_epi, "k_sem": k_sem}
        how: dict[str, Any] = {**tiers, "since": since, "until": until, "where": where}
        found: SearchResult = self._await(self._ask_owner("search", tenant, query, **how))
        return found

    def answer(
        self, tenant: str, question: str, *, as_of: str | None = None, mode: AnswerMode | None = None
    ) -> Answer:
        """As Engine.answer."""
        answer: Answer = self._await(self._ask_owner("answer", tenant, question, as_of=as_of, mode=mode))
        return answer

    def get_all(self, tenant: str) -> list[Memory]:
        """As Engine.get_all."""
        memories: list[Memory] = self._await(self._ask_owner("get_all", tenant))
        return memories

    def flush(self, tenant: str) -> bool:
        """As Engine.flush."""
        decided: bool = self._await(self._ask_owner("flush", tenant))
        return decided

    def erase(self, tenant: str, *, now: bool = False) -> Certificate | None:
        """As Engine.erase; what shards have parked of the tenant goes at once."""
        certificate: Certificate | None = self._await(self._ask_owner("erase", tenant, now=now))
        return certificate

    async def _ask_owner(
        self, method: str, tenant: str, *args: Any, again: bool = False, **kwargs: Any
    ) -> Any:
        """Ask the shard that has the tenant, and again where the question got lost.

        `again`: it was asked before, by a process that ended before it heard the answer.
        """
        pause = Backoff(self.settings.patience_s)
        while True:
            shard = self._routes.home_of(tenant)
            marks = {"again": again} if method in CHANGING else {}
            try:
                return await self._ask(shard, method, tenant, *args, **kwargs, **marks)
            except Removed as removed:
                await self._read_map()
                error: UndertowError = removed
            except Moved as moved:
                await self._read_map()
                self._routes.moved({tenant: moved.to})
                error = moved
            except (InTransit, QueueFull) as waits:
                error = waits
            except ShardGone as gone:
                again, error = True, gone
            if not await pause():
                raise ShardDown(shard, pause.waited_s, error)

    # ---- calls about one memory

    def get(self, memory_id: str, *, tenant: str | None = None) -> Report:
        """As Engine.get. An id does not tell its tenant: unless that is given, every shard is asked."""
        memory: Report = self._ask_of_memory("get", memory_id, tenant=tenant)
        return memory

    def history(self, memory_id: str, *, tenant: str | None = None) -> list[Report]:
        """As Engine.history; who is asked, as in `get`."""
        versions: list[Report] = self._ask_of_memory("history", memory_id, tenant=tenant)
        return versions

    def update(self, memory_id: str, text: Wording, *, tenant: str | None = None) -> Updated:
        """As Engine.update; who is asked, as in `get`."""
        updated: Updated = self._ask_of_memory("update", memory_id, text, tenant=tenant)
        return updated

    def delete(self, memory_id: str, *, tenant: str | None = None) -> str:
        """As Engine.delete; who is asked, as in `get`."""
        kind: str = self._ask_of_memory("delete", memory_id, tenant=tenant)
        return kind

    def _ask_of_memory(self, method: str, memory_id: str, *args: Any, tenant: str | None) -> Any:
        if tenant is not None:
            return self._await(self._ask_tenant(method, tenant, memory_id, *args))
        if (answer := self._await(self._ask_holder(method, memory_id, *args))) is None:
            raise unknown_memory(memory_id, tenant)
        return answer

    async def _ask_tenant(self, method: str, tenant: str, *args: Any, **kwargs: Any) -> Any:
        answer = await self._ask_owner(method, tenant, *args, **kwargs)
        if answer is None and method in OF_MEMORY:
            raise unknown_memory(args[0], tenant)
        return answer

    async def _ask_holder(self, method: str, memory_id: str, *args: Any) -> Any:
        """The answer of the shard that has a memory; None: none has it. All are asked at once."""
        pause, again = Backoff(self.settings.patience_s), False
        while True:
            shards = await self._everyone()
            marks = {"again": again} if method in CHANGING else {}
            asked = (self._ask(shard, method, None, memory_id, *args, **marks) for shard in shards)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            given = [a for a in answers if a is not None and not isinstance(a, BaseException)]
            if given or not errors:
                return given[0] if given else None
            for error in errors:
                if not isinstance(error, Moved | InTransit | QueueFull | ShardGone | Removed):
                    raise error
                again = again or isinstance(error, ShardGone)
            if not await pause():
                raise UndertowError(
                    f"the shard of memory {memory_id} gave no answer to {method} for {pause.waited_s:.0f} s: "
                    f"{errors[0]} `undertow cluster status` shows how the shards are; try again."
                )

    # ---- calls to all shards

    def stats(self) -> dict[str, int]:
        """Counts over all tenants of all shards, by the names of Engine.stats.

        Each shard counts at a moment of its own: while tenants move, one on its way may be missing, or be
        counted twice.
        """
        figures: dict[str, int] = self._await(self._ask_together("stats"))
        return figures

    def replay_jobs(self) -> int:
        """As Engine.replay_jobs."""
        replayed: int = self._await(self._ask_together("replay_jobs"))
        return replayed

    def drain(self) -> bool:
        """Wait until everything is decided. False: something is blocked, or an LLM server is lost."""
        decided: bool = self._await(self._ask_together("drain"))
        return decided

    def status(self) -> dict[str, dict[str, Any]]:
        """What each shard says of itself, by shard; of one that cannot be reached, why. Plain data."""
        return self._await(self._status())

    async def _status(self) -> dict[str, dict[str, Any]]:
        shards = await self._everyone()
        states = await asyncio.gather(*(self._state_of(shard) for shard in shards))
        return dict(zip(shards, states, strict=True))

    async def _state_of(self, shard: str) -> dict[str, Any]:
        shard_client = self._shard_client(shard)
        aside = self._asides.get(shard)
        waiting_turns = shard_client.waiting_turns + (aside.waiting_turns if aside else 0)
        ours = {"sent_turns": waiting_turns, "deaths_seen": shard_client.deaths}
        try:
            asked = shard_client.calls.call("status")
            return {**await asyncio.wait_for(asked, STATUS_PATIENCE_S), **ours}
        except (UndertowError, TimeoutError) as error:
            return {"state": "unreachable", "failure": str(error) or "it does not answer", **ours}

    async def _ask_together(self, method: str, *args: Any) -> Any:
        return TOGETHER[method]((await self._ask_all(method, *args)).values(), *args)

    async def _ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """The answers of all shards, by shard, in their order; all are asked at once."""
        while True:
            shards = await self._everyone()
            asked = (self._ask_shard(shard, method, *args) for shard in shards)
            try:
                return dict(zip(shards, await asyncio.gather(*asked), strict=True))
            except Removed:  # meanwhile; its tenants are at others now
                continue

    def ask_shard(self, shard: str, method: str, *args: Any) -> Any:
        """One call of `Shard` by name, to one shard, repeated where it gets lost."""
        return self._await(self._ask_shard(shard, method, *args))

    async def _ask_shard(self, shard: str, method: str, *args: Any) -> Any:
        pause = Backoff(self.settings.patience_s)
        while True:
            try:
                return await self._ask(shard, method, *args)
            except (ShardGone, QueueFull) as error:
                if not await pause():
                    raise ShardDown(shard, pause.waited_s, error) from error

    async def _ask(self, shard: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call to one shard, however long it takes while its process is there at all. ShardDown."""
        calls = self._shard_client(shard).calls
        asked = asyncio.ensure_future(calls.call(method, *args, **kwargs))
        try:
            while not (await asyncio.wait([asked], timeout=SIGN_S))[0]:
                if not await self._is_there(calls, asked):
                    raise ShardDown(shard, self.settings.patience_s, "its process does not answer")
        finally:
            asked.cancel()
        return asked.result()

    async def _is_there(self, calls: ShardCalls, asked: asyncio.Future[Any]) -> bool:
        """Whether a shard gives a sign, or answers what it was asked, within the patience."""
        pause = Backoff(self.settings.patience_s)
        while pause.left_s > 0:
            sign = asyncio.ensure_future(calls.call("sign"))
            await asyncio.wait([asked, sign], timeout=pause.left_s, return_when=asyncio.FIRST_COMPLETED)
            heard = sign.done() and sign.exception() is None
            sign.cancel()
            if heard or asked.done():
                return True
            await pause()
        return False

    async def _everyone(self) -> tuple[str, ...]:
        self._routes.adopt(await asyncio.to_thread(self.site.newest_map))
        return self._routes.map.everyone

    # ---- the thread

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._begin(work).result()

    async def _stop(self) -> None:
        pause = Backoff(self.settings.patience_s)
        while not all(shard_client.idle for shard_client in self._every_lane) and await pause():
            pass
        await asyncio.gather(*(shard_client.stop() for shard_client in self._every_lane))
        late = asyncio.all_tasks() - {asyncio.current_task()}  # calls of other threads, which wait for these
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    @property
    def _every_lane(self) -> list[ShardClient]:
        return [*self._shard_clients.values(), *self._asides.values()]
