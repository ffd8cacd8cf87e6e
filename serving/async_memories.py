"""The memories of one store or cluster for an event loop: no thread is blocked while a call waits.

What the HTTP and MCP faces stand on. The same over a shard in this process and over shards on Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from undertow.engine.api.answer_calls import Answer
from undertow.engine.api.erasure import Certificate
from undertow.engine.api.memory_updates import Updated, Wording
from undertow.engine.api.transfer.import_ import ImportReport
from undertow.engine.api.views.format import Page
from undertow.engine.api.views.reports import Report
from undertow.engine.base.config import Settings
from undertow.engine.base.model import AnswerMode, Turn, UndertowError
from undertow.engine.cluster.routing.in_process import InProcess
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.shard.answer_streams import AnswerTicket, Said, UnknownTicket
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.wire import pack, unpack_receipts
from undertow.engine.llm.client import BrokenOff
from undertow.engine.search.ranking import SearchResult
from undertow.engine.step.admission import Receipt
from undertow.engine.storage.location import Location

T = TypeVar("T")
# in a class with a method `list`, that name is no type
Receipts = list[Receipt]
Reports = list[Report]
Names = list[str]
Usages = dict[str, dict[str, int]]

# records that an export asks a shard for at a time
EXPORT_RECORDS = 1_000


class AsyncMemories:
    """Engine's calls, awaited. Use as an asynchronous context manager, from one event loop.

    Errors are the engine's own: UndertowError and its kinds; ValueError for an argument that cannot be.
    A call that is cancelled while it waits is let go: what the shard has not begun by then is not done. An
    add is stored, whoever waits for it.
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
        """Answer what was sent, then let the store go. Shards on a Ray that others started go on."""
        await asyncio.to_thread(self._close)

    # ---- what a tenant remembers

    async def add(self, turns: Sequence[Turn]) -> Receipts:
        """Store turns; durable and searchable on return. One receipt a turn, in order.

        InputError: one cannot be stored, and none was. QueueFull: too many wait; the same call may be sent
        again, as each turn has its dedupe key.
        """
        receipts = await self._heard(self._router.begin_add(pack(turns)))
        return unpack_receipts(receipts, [turn.tenant for turn in turns])

    async def search(
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
        how = {**tiers, "since": since, "until": until, "where": where}
        found: SearchResult = await self._ask("search", tenant, query, **how)
        return found

    async def answer(
        self, tenant: str, question: str, *, as_of: str | None = None, mode: AnswerMode | None = None
    ) -> Answer:
        """As Engine.answer."""
        answer: Answer = await self._ask("answer", tenant, question, as_of=as_of, mode=mode)
        return answer

    async def answer_stream(
        self, tenant: str, question: str, *, as_of: str | None = None, mode: AnswerMode | None = None
    ) -> AsyncGenerator[str | Answer]:
        """Like `answer`, in pieces as the LLM writes them; then the Answer, whose text they are together.

        Closing the generator, or cancelling its task, gives the LLM call up. BrokenOff: no more comes, and
        the pieces are no answer.
        """
        told = False
        while True:
            begun = self._router.begin("answer_begin", tenant, question, as_of=as_of, mode=mode)
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
            ticket = await asyncio.shield(self._heard(begun))
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
        said: Said = await self._heard(self._router.begin_at(ticket.shard, "answer_more", ticket.id, at))
        return said

    def _drop(self, begun: Future[AnswerTicket]) -> None:
        """Nobody waits for this answer any more. On the router's thread."""
        if begun.cancelled() or begun.exception() is not None:
            return
        ticket = begun.result()
        with suppress(UndertowError):  # closed: so is the answer
            self._router.begin_at(ticket.shard, "answer_drop", ticket.id)

    async def get(self, tenant: str, memory_id: str) -> Report:
        """As Engine.get."""
        memory: Report = await self._ask("get", tenant, memory_id)
        return memory

    async def history(self, tenant: str, memory_id: str) -> Reports:
        """As Engine.history."""
        versions: Reports = await self._ask("history", tenant, memory_id)
        return versions

    async def turns_by_key(self, tenant: str, keys: Sequence[str]) -> dict[str, Report]:
        """As Engine.turns_by_key."""
        found: dict[str, Report] = await self._ask("turns_by_key", tenant, keys)
        return found

    # where `again` is set, this is a repeat: that it was done already is no error

    async def update(self, tenant: str, memory_id: str, text: Wording, *, again: bool = False) -> Updated:
        """As Engine.update."""
        updated: Updated = await self._ask("update", tenant, memory_id, text, again=again)
        return updated

    async def delete(self, tenant: str, memory_id: str, *, again: bool = False) -> str:
        """As Engine.delete."""
        kind: str = await self._ask("delete", tenant, memory_id, again=again)
        return kind

    async def flush(self, tenant: str, *, again: bool = False) -> bool:
        """As Engine.flush."""
        decided: bool = await self._ask("flush", tenant, again=again)
        return decided

    async def erase(self, tenant: str, *, now: bool, again: bool = False) -> Certificate | None:
        """As Engine.erase; the tenant's parked turns go at once."""
        certificate: Certificate | None = await self._ask("erase", tenant, now=now, again=again)
        return certificate

    async def list(
        self,
        tenant: str,
        *,
        kinds: Collection[str] | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, Any] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """As Engine.list."""
        how = {"kinds": kinds, "since": since, "until": until, "where": where}
        page: Page = await self._ask("list", tenant, **how, limit=limit, after=after)
        return page

    async def export(self, tenant: str, *, vectors: bool = False) -> AsyncGenerator[Report]:
        """All that `import_` needs, record by record: the pages of Engine.export_page."""
        after: str | None = None
        while True:
            how = {"after": after, "limit": EXPORT_RECORDS, "vectors": vectors}
            page: Page = await self._ask("export_page", tenant, **how)
            for record in page.items:
                yield record
            if (after := page.after) is None:
                return

    async def import_(self, tenant: str, records: Sequence[Report], *, again: bool = False) -> ImportReport:
        """As Engine.import_."""
        imported: ImportReport = await self._ask("import_", tenant, records, again=again)
        return imported

    async def policy(self, tenant: str) -> Report:
        """As Engine.policy."""
        told: Report = await self._ask("policy", tenant)
        return told

    async def set_policy(self, tenant: str, policy: str, *, drop_edits: bool = False) -> Report:
        """As Engine.set_policy."""
        told: Report = await self._ask("set_policy", tenant, policy, drop_edits=drop_edits)
        return told

    async def explain(self, tenant: str, *, limit: int | None = 1_000, after_seq: int = -1) -> Reports:
        """As Engine.explain."""
        records: Reports = await self._ask("explain", tenant, limit=limit, after_seq=after_seq)
        return records

    async def tenant_stats(self, tenant: str) -> dict[str, int]:
        """As Engine.tenant_stats."""
        figures: dict[str, int] = await self._ask("tenant_stats", tenant)
        return figures

    async def usage(self, tenant: str | None = None) -> Usages:
        """As Engine.usage."""
        spent: Usages = await (self._ask_all("usage") if tenant is None else self._ask("usage", tenant))
        return spent

    def tenant_key(self, tenant: str) -> str:
        """The keyed hash that stands for the tenant where its name must not: certificates, the audit log."""
        return self._router.tenant_key(tenant)

    # ---- all tenants

    async def stats(self) -> dict[str, int]:
        """As Router.stats."""
        figures: dict[str, int] = await self._ask_all("stats")
        return figures

    async def status(self) -> dict[str, dict[str, Any]]:
        """As Router.status."""
        states: dict[str, dict[str, Any]] = await self._ask_all("status")
        return states

    async def replay_jobs(self) -> int:
        """As Engine.replay_jobs."""
        replayed: int = await self._ask_all("replay_jobs")
        return replayed

    async def purge(self) -> dict[str, Certificate]:
        """As Engine.purge, at every shard."""
        certificates: dict[str, Certificate] = await self._ask_all("purge")
        return certificates

    async def tenants(self, prefix: str = "", *, limit: int = 1_000, after: str = "") -> Names:
        """As Router.tenants."""
        names: Names = await self._ask_all("tenants", prefix, limit, after)
        return names

    # ---- how they are asked

    async def _ask(self, method: str, tenant: str, *args: Any, **kwargs: Any) -> Any:
        return await self._heard(self._router.begin(method, tenant, *args, **kwargs))

    async def _ask_all(self, method: str, *args: Any) -> Any:
        return await self._heard(self._router.begin_all(method, *args))

    @staticmethod
    async def _heard(begun: Future[T]) -> T:
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
