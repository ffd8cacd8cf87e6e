"""The cluster as one engine: Engine's calls over all shards of a root.

One thread runs the routing; callers of any thread hand it their calls. What a shard does is waited for
without holding up calls to others.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from undertow.engine.admission import QueueFull, Receipt
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.delivery import Delivery, Parcel, split
from undertow.engine.cluster.lane import Lane, Pause, ShardCalls, ShardDown, ShardGone
from undertow.engine.cluster.resources import ClusterSettings
from undertow.engine.cluster.routes import Routes
from undertow.engine.cluster.wire import check_turns, pack, unpack_receipts
from undertow.engine.departures import InTransit, Moved
from undertow.engine.model import Memory, Turn, UndertowError
from undertow.engine.place import Place, StoreError

if TYPE_CHECKING:  # who only sends turns to shards is to load no torch
    from undertow.engine.engine import Answer
    from undertow.engine.erasure import Certificate
    from undertow.engine.retrieval import Found

T = TypeVar("T")

# calls whose repetition a shard must be told of
CHANGING = frozenset({"delete", "flush", "erase"})

# how long a shard may take to say how it is
STATUS_PATIENCE_S = 5.0


class Router:
    """Engine's calls, given a way to reach each shard. Use as a context manager; safe from several threads.

    Every call waits for a shard that is down, for as long as `patience_s`: then ShardDown.
    """

    def __init__(
        self, root: Place, connect: Callable[[str], ShardCalls], settings: ClusterSettings | None = None
    ) -> None:
        """`connect`: the calls of a shard, by its id. StoreError where the root has no map."""
        self.root = root
        self.settings = settings or ClusterSettings()
        self._connect = connect
        self._client = secrets.token_hex(8)
        self._routes = Routes(shard_map.load(root))
        self._lanes: dict[str, Lane] = {}
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
            self._await(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

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
        delivery = Delivery(table.num_rows)
        whole = Parcel(delivery, np.arange(table.num_rows), table)
        if not table.num_rows:
            return delivery.future
        while True:
            self._routes.know(whole.tenants)
            parcels = split(whole, self._routes.shard_of, self.settings.call_turns)
            turns = Counter[str]()
            for shard, parcel in parcels:
                turns[shard] += len(parcel)
            full = next((s for s, count in turns.items() if not self._lane(s).has_room(count)), None)
            if full is None:
                self._put(parcels)
                return delivery.future
            if not wait:
                raise QueueFull(
                    f"{self.settings.lane_turns} turns wait for shard {full}. Try again in a moment."
                )
            self._lanes[full].room.clear()
            await self._lanes[full].room.wait()

    def _put(self, parcels: Sequence[tuple[str, Parcel]]) -> None:
        for shard, parcel in parcels:
            lane = self._lane(shard)
            self._routes.hold(parcel.tenants, shard)
            lane.put(parcel)

    def _lane(self, shard: str) -> Lane:
        if (lane := self._lanes.get(shard)) is None or lane.ended:
            lane = self._lanes[shard] = Lane(
                shard,
                self._connect(shard),
                self._client,
                self.settings,
                map_version=lambda: self._routes.map.version,
                on_change=lambda parcel, others: self._exchange(shard, parcel, others),
                read_map=self._read_map,
                on_returned=self._send_anew,
            )
        return lane

    def _exchange(self, shard: str, parcel: Parcel, others: Sequence[Parcel]) -> None:
        for other in others:
            self._routes.hold(other.tenants, shard)
        self._routes.release(parcel.tenants)

    def _send_anew(self, parcels: Sequence[Parcel], moved: dict[str, str]) -> None:
        """Parcels that a shard has returned, or that wait behind such: by the newest map, in their order."""
        self._routes.moved(moved)
        for parcel in parcels:
            self._routes.release(parcel.tenants)
        for parcel in parcels:
            self._put(split(parcel, self._routes.shard_of, self.settings.call_turns))

    async def _read_map(self) -> None:
        """A shard has refused a tenant: there may be a newer map, and then its word is newer still.

        Tries again within the patience. StoreError: in vain.
        """
        pause = Pause(self.settings.patience_s)
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
    ) -> Found:
        """As Engine.search."""
        how = {"k_sub": k_sub, "k_epi": k_epi, "k_sem": k_sem, "since": since, "until": until}
        found: Found = self._await(self._ask_owner("search", tenant, query, **how))
        return found

    def answer(self, tenant: str, question: str, *, as_of: str | None = None) -> Answer:
        """As Engine.answer."""
        answer: Answer = self._await(self._ask_owner("answer", tenant, question, as_of=as_of))
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

    async def _ask_owner(self, method: str, tenant: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the shard that has the tenant, and again where the question got lost."""
        pause, again = Pause(self.settings.patience_s), False
        while True:
            shard = self._routes.home_of(tenant)
            marks = {"again": again} if method in CHANGING else {}
            try:
                return await self._lane(shard).calls.call(method, tenant, *args, **kwargs, **marks)
            except Moved as moved:
                await self._read_map()
                self._routes.moved({tenant: moved.to})
                error: UndertowError = moved
            except (InTransit, QueueFull) as waits:
                error = waits
            except ShardGone as gone:
                again, error = True, gone
            if not await pause():
                raise ShardDown(f"shard {shard} cannot be used: {error}")

    def delete(self, memory_id: str) -> str:
        """As Engine.delete. The id does not tell the tenant, so every shard is asked for it."""
        return self._await(self._delete(memory_id))

    async def _delete(self, memory_id: str) -> str:
        holders = [s for s, held in (await self._ask_all("holds", memory_id)).items() if held]
        if not holders:
            raise UndertowError(f"no memory has the id {memory_id}. `undertow list` shows the ids.")
        pause, again = Pause(self.settings.patience_s), False
        while True:
            for shard in holders:
                try:
                    kind: str = await self._lane(shard).calls.call("delete", memory_id, again=again)
                    return kind
                except (Moved, InTransit, QueueFull) as waits:  # another one has it, or will soon
                    error: UndertowError = waits
                except ShardGone as gone:
                    again, error = True, gone
            if not await pause():
                raise ShardDown(f"memory {memory_id} cannot be deleted now: {error}")
            holders = [s for s, held in (await self._ask_all("holds", memory_id)).items() if held] or holders

    # ---- calls to all shards

    def stats(self) -> dict[str, int]:
        """Counts over all tenants of all shards, by the names of Engine.stats."""
        total: Counter[str] = Counter()
        for figures in self._await(self._ask_all("stats")).values():
            total.update(figures)
        return dict(total)

    def drain(self) -> bool:
        """Wait until everything is decided. False: something is blocked, or an LLM server is lost."""
        return all(self._await(self._ask_all("drain")).values())

    def status(self) -> dict[str, dict[str, Any]]:
        """What each shard says of itself, by shard; of one that cannot be reached, why. Plain data."""
        return self._await(self._status())

    async def _status(self) -> dict[str, dict[str, Any]]:
        shards = await self._everyone()
        states = await asyncio.gather(*(self._state_of(shard) for shard in shards))
        return dict(zip(shards, states, strict=True))

    async def _state_of(self, shard: str) -> dict[str, Any]:
        lane = self._lane(shard)
        ours = {"sent_turns": lane.waiting_turns, "deaths_seen": lane.deaths}
        try:
            asked = lane.calls.call("status")
            return {**await asyncio.wait_for(asked, STATUS_PATIENCE_S), **ours}
        except (UndertowError, TimeoutError) as error:
            return {"state": "unreachable", "failure": str(error) or "it does not answer", **ours}

    async def _ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """The answers of all shards, by shard, in their order; all are asked at once."""
        shards = await self._everyone()
        answers = await asyncio.gather(*(self._ask_shard(shard, method, *args) for shard in shards))
        return dict(zip(shards, answers, strict=True))

    def ask_shard(self, shard: str, method: str, *args: Any) -> Any:
        """One call of `Shard` by name, to one shard, repeated where it gets lost."""
        return self._await(self._ask_shard(shard, method, *args))

    async def _ask_shard(self, shard: str, method: str, *args: Any) -> Any:
        pause = Pause(self.settings.patience_s)
        while True:
            try:
                return await self._lane(shard).calls.call(method, *args)
            except (ShardGone, QueueFull) as error:
                if not await pause():
                    raise ShardDown(f"shard {shard} cannot be used: {error}") from error

    async def _everyone(self) -> tuple[str, ...]:
        self._routes.adopt(await asyncio.to_thread(shard_map.load, self.root))
        return self._routes.map.everyone

    # ---- the thread

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _stop(self) -> None:
        pause = Pause(self.settings.patience_s)
        while not all(lane.idle for lane in self._lanes.values()) and await pause():
            pass
        await asyncio.gather(*(lane.stop() for lane in self._lanes.values()))
