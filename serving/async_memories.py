"""MemoryApi for an event loop: no thread is blocked while a call waits.

The HTTP service stands on it, over a shard in this process or shards on Ray alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, cast

from undertow.engine.base.config import Settings
from undertow.engine.base.memory_api import MemoryApi, Receipts
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.base.queries import AnswerQuery, ApiCall, ExportQuery, R
from undertow.engine.base.results import Answer, Report
from undertow.engine.cluster.routing.in_process import InProcess
from undertow.engine.cluster.routing.router import Router, ShardStates
from undertow.engine.cluster.shard.answer_streams import AnswerTicket, Said, UnknownTicket
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.wire import pack, unpack_receipts
from undertow.engine.llm.client import BrokenOff
from undertow.engine.storage.location import Location

P = ParamSpec("P")
T = TypeVar("T")

# records in each page that an export asks for
EXPORT_RECORDS = 1_000


Method: TypeAlias = Callable[Concatenate[Any, P], R]


def awaited(method: Method[P, R]) -> Method[P, Coroutine[Any, Any, R]]:
    """A method of MemoryApi for a class whose `call` is a coroutine: the same arguments, awaited.

    Each method of MemoryApi returns what `call` returns, so that nothing but its type changes.
    """
    return cast(Method[P, Coroutine[Any, Any, R]], method)


class AsyncMemories:
    """Calls of MemoryApi, awaited. Use as an asynchronous context manager, from one event loop.

    A call that is cancelled while it waits is left undone if its shard has not begun it. Turns that were
    added are stored all the same.
    """

    def __init__(self, router: Router, close: Callable[[], object] | None = None) -> None:
        """`close`: what `close` does, on a thread; left out, the router is closed."""
        self._router = router
        self._close = close or router.close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Answer what was sent, then close the store. Shards on a Ray that others started go on."""
        await asyncio.to_thread(self._close)

    async def call(self, call: ApiCall[R]) -> R:
        """Carry out one call of MemoryApi."""
        return await self._result(self._router.begin(call))

    search = awaited(MemoryApi.search)
    answer = awaited(MemoryApi.answer)
    get = awaited(MemoryApi.get)
    history = awaited(MemoryApi.history)
    list = awaited(MemoryApi.list)
    explain = awaited(MemoryApi.explain)
    turns_by_key = awaited(MemoryApi.turns_by_key)
    policy = awaited(MemoryApi.policy)
    set_policy = awaited(MemoryApi.set_policy)
    tenant_stats = awaited(MemoryApi.tenant_stats)
    usage = awaited(MemoryApi.usage)
    stats = awaited(MemoryApi.stats)
    tenant_names = awaited(MemoryApi.tenant_names)
    replay_jobs = awaited(MemoryApi.replay_jobs)
    purge = awaited(MemoryApi.purge)

    async def add(self, turns: Sequence[Turn]) -> Receipts:
        """Store turns; durable and searchable on return. One receipt a turn, in order.

        InputError: one of them is invalid, and none was stored. QueueFull: too many turns wait. The same call
        may be sent again, as each turn has its dedupe key.
        """
        receipts = await self._result(self._router.begin_add(pack(turns)))
        return unpack_receipts(receipts, [turn.tenant for turn in turns])

    async def answer_stream(self, query: AnswerQuery) -> AsyncGenerator[str | Answer]:
        """An answer in pieces as the LLM writes them, then the whole Answer.

        Closing the generator, or cancelling its task, cancels the LLM call. BrokenOff: no more pieces come,
        and those so far are no answer.
        """
        told = False
        while True:
            begun = self._router.begin_stream(query)
            try:
                async with aclosing(self._pieces(begun)) as pieces:
                    async for piece in pieces:
                        told = True
                        yield piece
                return
            except UnknownTicket as lost:
                if told:
                    raise BrokenOff(f"the answer broke off in the middle: {lost}") from None

    async def _pieces(self, begun: Future[AnswerTicket]) -> AsyncGenerator[str | Answer]:
        answer: Answer | None = None
        at = 0
        try:
            ticket = await asyncio.shield(self._result(begun))
            while answer is None:
                text, answer = await self._more(ticket, at)
                at += len(text)
                if text:
                    yield text
            yield answer
        finally:
            if answer is None:
                begun.add_done_callback(self._drop)

    async def _more(self, ticket: AnswerTicket, at: int) -> Said:
        said: Said = await self._result(self._router.begin_at(ticket.shard, "answer_more", ticket.id, at))
        return said

    def _drop(self, begun: Future[AnswerTicket]) -> None:
        """Cancel an answer that nobody waits for any more. Runs on the router's thread."""
        if begun.cancelled() or begun.exception() is not None:
            return
        ticket = begun.result()
        with suppress(UndertowError):  # closed: so is the answer
            self._router.begin_at(ticket.shard, "answer_drop", ticket.id)

    async def export(self, tenant: str, *, vectors: bool = False) -> AsyncGenerator[Report]:
        """Everything of a tenant that an import needs, record by record."""
        after: str | None = None
        while True:
            page = await self.call(ExportQuery(tenant, after, EXPORT_RECORDS, vectors))
            for record in page.items:
                yield record
            if (after := page.after) is None:
                return

    async def status(self) -> ShardStates:
        """Each shard's report of itself; see Router.status."""
        return await self._result(self._router.begin_status())

    def tenant_key(self, tenant: str) -> str:
        """The keyed hash that stands for the tenant in certificates and the audit log."""
        return self._router.tenant_key(tenant)

    @staticmethod
    async def _result(begun: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UndertowError("the memories were closed before they could answer.") from None


def open_memories(
    store: Location | Path | str,
    settings: Settings,
    *,
    ray: str | None = None,
    shards: int | None = None,
    parts: EngineParts | None = None,
) -> AsyncMemories:
    """Open a plain store in this process, made if it is missing; with `ray`, a cluster's root.

    `ray`: the address of a Ray, or "local" for one that starts and ends with these memories. `shards`: how
    many a new root begins with. `parts`: what makes encoder, LLM client and observers of shards.
    Blocks until the store is open. StoreLocked; UndertowError says what is amiss.
    """
    location = Location.of(store)
    stack = ExitStack()
    if ray is not None:
        from undertow.serving.cli.ray_session import open_cluster

        router: Router = stack.enter_context(
            open_cluster(location, settings, ray, shards=shards, parts=parts)
        )
    elif shards is not None:
        raise ValueError("shards are those of a cluster: give the address of its Ray too, or leave them out.")
    else:
        router = stack.enter_context(InProcess(location, settings, parts))
    return AsyncMemories(router, stack.close)
