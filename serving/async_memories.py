"""MemoryApi for an event loop: no thread is blocked while a call waits.

The HTTP service uses it, over one engine in this process, or over shards in worker processes or on Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, aclosing, suppress
from pathlib import Path
from typing import Self, TypeVar, cast

from undertow.engine.base.config import Settings
from undertow.engine.base.memory_api import Receipts
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.base.queries import AnswerQuery, ApiCall, ExportQuery, R
from undertow.engine.base.results import Answer, Report
from undertow.engine.cluster.in_process import InProcess
from undertow.engine.cluster.routing.router import Router, ShardStates
from undertow.engine.cluster.shard.api.answer_streams import AnswerTicket, Said, UnknownTicket
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.llm.client import BrokenOff
from undertow.engine.llm.loop_tasks import in_loop
from undertow.engine.storage.location import Location

T = TypeVar("T")

# so many turns are packed in a millisecond or two
FEW_TURNS = 32
# records in each page of an export
EXPORT_RECORDS = 1_000


class AsyncMemories:
    """Calls of MemoryApi, awaited. Use as an asynchronous context manager, from one event loop.

    A call that is cancelled while it waits is not carried out if its shard has not begun it. Turns that were
    added are stored all the same.
    """

    def __init__(self, router: Router | InProcess, close: Callable[[], object] | None = None) -> None:
        """`close`: how to close the router, called on a thread; default: `router.close`."""
        self._router = router
        self._close = close or router.close

    @classmethod
    def enter(cls, router: AbstractContextManager[Router | InProcess]) -> Self:
        """Enter a router's context; `close` exits it. Blocks."""
        stack = ExitStack()
        return cls(stack.enter_context(router), stack.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Answer the calls under way, then close. Shards on a Ray that others started keep running."""
        await asyncio.to_thread(self._close)

    async def call(self, call: ApiCall[R]) -> R:
        """Carry out one call of MemoryApi."""
        return await self._result(self._router.begin(call))

    async def add(self, turns: Sequence[Turn]) -> Receipts:
        """Store turns; durable and searchable on return. One receipt a turn, in order.

        InputError: one of them is invalid, and none was stored. QueueFull: too many turns wait. The same call
        may be sent again, as each turn has its dedupe key. Calls that are under way together have no order.
        """
        if len(turns) <= FEW_TURNS:
            return await self._result(self._router.begin_add(turns))
        # packing many takes long: beside the loop
        return await self._result(await asyncio.to_thread(self._router.begin_add, turns))

    async def answer_stream(self, query: AnswerQuery) -> AsyncGenerator[str | Answer]:
        """An answer in pieces as the LLM writes them, then the whole Answer.

        Closing the generator, or cancelling its task, cancels the LLM call. BrokenOff: the shard was lost;
        the pieces so far are not an answer.
        """
        yielded = False
        while True:
            begun = self._router.begin_stream(query)
            try:
                async with aclosing(self._pieces(begun)) as pieces:
                    async for piece in pieces:
                        yielded = True
                        yield piece
                return
            except UnknownTicket as lost:
                if yielded:
                    raise BrokenOff(f"the answer broke off in the middle: {lost}") from None

    async def _pieces(self, begun: Future[AnswerTicket]) -> AsyncGenerator[str | Answer]:
        answer: Answer | None = None
        at = 0
        try:
            ticket = await asyncio.shield(self._result(begun))
            while answer is None:
                more = self._router.begin_at(ticket.shard, "answer_more", ticket.id, at)
                text, answer = cast(Said, await self._result(more))
                at += len(text)
                if text:
                    yield text
            yield answer
        finally:
            if answer is None:
                begun.add_done_callback(self._drop)

    def _drop(self, begun: Future[AnswerTicket]) -> None:
        """Cancel an abandoned answer. Runs on the router's thread."""
        if begun.cancelled() or begun.exception() is not None:
            return
        ticket = begun.result()
        with suppress(UndertowError):  # a closed router has cancelled the answer already
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
        """The status report of each shard; see Router.status."""
        return await self._result(self._router.begin_status())

    def tenant_key(self, tenant: str) -> str:
        """The keyed hash that stands for the tenant in certificates and the audit log."""
        return self._router.tenant_key(tenant)

    @staticmethod
    async def _result(begun: Future[T]) -> T:
        try:
            return begun.result() if begun.done() else await in_loop(begun)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UndertowError("the memories were closed before they could answer.") from None
        finally:
            del begun  # it has the error, whose traceback has this frame


def open_memories(
    store: Location | Path | str,
    settings: Settings,
    *,
    parts: EngineParts | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> AsyncMemories:
    """Open a store in this process; creates a missing one. Blocks until the store is open.

    `parts`: factories of the encoder, LLM client and observers. `loop`: the running event loop that does the
    work of the store, see LoopDriver; call this on another thread then. StoreLocked; UndertowError says what
    is wrong.
    """
    return AsyncMemories(InProcess(Location.of(store), settings, parts, loop=loop))
