"""Every call of the service as a method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, Self

import httpx2

from undertow.serving.client import requests as calls
from undertow.serving.client import results as answers
from undertow.serving.client._async.transport import AsyncTransport
from undertow.serving.client.errors import ServerError, failure_in
from undertow.serving.client.requests import (
    Messages,
    Time,
    asking,
    changing,
    given,
    in_iso,
    of_tenant,
    reading,
)
from undertow.serving.client.results import (
    Added,
    AddedItem,
    Answer,
    Certificate,
    Changed,
    Found,
    Job,
    Listed,
    Memory,
    ModelT,
    Page,
    Policy,
    Results,
)
from undertow.serving.client.retries import Retries

# between two polls of a job
_POLL_S = 0.2


class AsyncClient:
    """The memories of a service's tenants. Any number of concurrent calls; close it, or use it in a `with`.

    The tenant comes first everywhere, as in `Engine`. Calls raise subclasses of ServiceError, and ValueError
    for a name or a value that cannot be sent. `filters` select by metadata: each key has one value or one of
    several. `since` and `until` are inclusive; a date alone is the whole day.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_s: float = 60.0,
        retries: Retries | None = None,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        """`timeout_s`: for each step of one try, such as connecting or waiting for the next bytes.

        `http`: for proxies, certificates and other transports; the client leaves it open. ValueError.
        """
        self._transport = AsyncTransport(
            url, key, timeout_s=timeout_s, retries=retries or Retries(), http=http
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    # --- adding ---

    async def add(
        self,
        tenant: str,
        messages: Messages,
        *,
        session_id: str | None = None,
        timestamp: Time | None = None,
        metadata: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[Added, ...]:
        """Add a conversation, one result a turn: durable and searchable when this returns.

        The same `idempotency_key` again adds nothing; without one, each call of this method adds.
        """
        item = calls.item(messages, session_id=session_id, timestamp=timestamp, metadata=metadata)
        call = changing("POST", of_tenant(tenant, "memories"), item, idempotency_key=idempotency_key)
        return (await self._read(Listed[Added], call)).results

    async def add_many(self, tenant: str, items: Iterable[Mapping[str, Any]]) -> tuple[AddedItem, ...]:
        """Add several items with the arguments of `add`: `{"messages", "session_id"?, ...}`.

        One result per item, in order. A refused one says why; the others are stored.
        """
        return (await self._read(answers.AddedItems, calls.adding_many(tenant, items))).items

    # --- finding ---

    async def search(
        self,
        tenant: str,
        query: str,
        *,
        top_k: int | None = None,
        kinds: Sequence[answers.Kind] | None = None,
        filters: Mapping[str, Any] | None = None,
        since: Time | None = None,
        until: Time | None = None,
        threshold: float | None = None,
        explain: bool = False,
    ) -> Found:
        """The memories nearest to a query, with scores of at least `threshold`.

        `top_k`: None for the number of each kind in the service's settings. `filters`: for each metadata key
        a value, a list of accepted ones, or an object of operators, such as {"$gte": 3, "$lt": 9}; see
        `MemoryApi.search`. `explain`: with the parts of each score, and what was left out and why.
        """
        body = given(
            query=query,
            top_k=top_k,
            kinds=None if kinds is None else list(kinds),
            filters=filters,
            since=in_iso(since),
            until=in_iso(until),
            threshold=threshold,
            explain=explain or None,
        )
        return await self._read(Found, asking(of_tenant(tenant, "search"), body))

    async def answer(
        self,
        tenant: str,
        question: str,
        *,
        as_of: Time | None = None,
        mode: answers.AnswerMode | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """An LLM's answer from the memories. `as_of`: the day of the question; `mode`: None as set."""
        body = given(question=question, as_of=in_iso(as_of), mode=mode)
        return await self._read(Answer, asking(of_tenant(tenant, "answer"), body, timeout_s=timeout_s))

    async def answer_stream(
        self,
        tenant: str,
        question: str,
        *,
        as_of: Time | None = None,
        mode: answers.AnswerMode | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[str | Answer]:
        """The answer's text in pieces as the LLM writes it, and the whole Answer at the end."""
        body = given(question=question, as_of=in_iso(as_of), mode=mode, stream=True)
        call = asking(of_tenant(tenant, "answer"), body, timeout_s=timeout_s)
        async with self._transport.open(call) as response:
            async for event in httpx2.EventSource(response):
                if event.event == "delta":
                    yield str(answers.document(event.data).get("text", ""))
                elif event.event == "error":
                    raise failure_in(answers.document(event.data))
                elif event.event == "done":
                    yield Answer.read(event.data)
                    return
        raise ServerError("the answer broke off. Ask again.")

    # --- single memories ---

    async def get(self, tenant: str, memory_id: str) -> Memory:
        return await self._read(Memory, reading(of_tenant(tenant, "memories", memory_id)))

    async def get_page(
        self,
        tenant: str,
        *,
        kinds: Sequence[answers.Kind] | None = None,
        filters: Mapping[str, Any] | None = None,
        since: Time | None = None,
        until: Time | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """At most `limit` memories in creation order, behind the cursor `after` of another page.

        `filters`: as those of `search`.
        """
        query: dict[str, Any] = {"kind": kinds, "since": in_iso(since), "until": in_iso(until)}
        query |= {"filters": dict(filters) if filters else None, "limit": limit, "after": after}
        call = reading(of_tenant(tenant, "memories"), **query)
        return await self._read(Page, call)

    async def get_all(
        self,
        tenant: str,
        *,
        kinds: Sequence[answers.Kind] | None = None,
        filters: Mapping[str, Any] | None = None,
        since: Time | None = None,
        until: Time | None = None,
    ) -> AsyncIterator[Memory]:
        """All present memories in creation order, read page by page."""
        page = Page(results=(), next="")
        while page.next is not None:
            page = await self.get_page(
                tenant, kinds=kinds, filters=filters, since=since, until=until, after=page.next or None
            )
            for memory in page.results:
                yield memory

    async def history(self, tenant: str, memory_id: str) -> tuple[Memory, ...]:
        """All versions of a memory, oldest first."""
        call = reading(of_tenant(tenant, "memories", memory_id, "history"))
        return (await self._read(Listed[Memory], call)).results

    async def update(
        self, tenant: str, memory_id: str, words: Messages, *, idempotency_key: str | None = None
    ) -> Changed:
        """Reword a memory; for a turn `words` may be the messages of one exchange."""
        path = of_tenant(tenant, "memories", memory_id)
        body = {"text": words} if isinstance(words, str) else {"messages": list(words)}
        return await self._read(Changed, changing("PUT", path, body, idempotency_key=idempotency_key))

    async def delete(self, tenant: str, memory_id: str, *, idempotency_key: str | None = None) -> Changed:
        """Delete one memory."""
        path = of_tenant(tenant, "memories", memory_id)
        return await self._read(Changed, changing("DELETE", path, idempotency_key=idempotency_key))

    async def delete_all(self, tenant: str, *, idempotency_key: str | None = None) -> None:
        """Delete all memories of a tenant, history included; their bytes go with the next purge."""
        path = of_tenant(tenant, "memories")
        await self._transport.send(changing("DELETE", path, idempotency_key=idempotency_key))

    # --- whole tenants ---

    async def flush(self, tenant: str, *, timeout_s: float | None = None) -> bool:
        """Wait until every turn is decided. False: some wait for an LLM that does not answer."""
        call = changing("POST", of_tenant(tenant, "flush"), timeout_s=timeout_s)
        return (await self._read(answers.Decided, call)).decided

    async def flush_job(self, tenant: str) -> Job:
        """`flush` as a job of the service."""
        return await self._begin(changing("POST", of_tenant(tenant, "flush")))

    async def export(self, tenant: str, *, vectors: bool = False) -> AsyncIterator[dict[str, Any]]:
        """All records of a tenant, every version, as they come in; the last is of kind `end`.

        ServerError after the records received so far: the export broke off.
        """
        call = reading(of_tenant(tenant, "export"), vectors=True if vectors else None)
        kind = None
        async with self._transport.open(call) as response:
            async for line in response.aiter_lines():
                record = answers.document(line)
                kind = record.get("kind")
                yield record
        if kind != "end":
            raise ServerError("the export broke off before its record `end`. Ask for it again.")

    async def import_(
        self, tenant: str, records: Iterable[Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Import an export into an empty tenant; returns the number of records stored of each kind."""
        return await self._document(calls.importing(tenant, records, timeout_s))

    async def import_job(self, tenant: str, records: Iterable[Mapping[str, Any]]) -> Job:
        """`import_` as a job of the service."""
        return await self._begin(calls.importing(tenant, records, None))

    async def policy(self, tenant: str) -> Policy:
        """A tenant's policy, and the progress of a change."""
        return await self._read(Policy, reading(of_tenant(tenant, "policy")))

    async def set_policy(
        self, tenant: str, policy: str, *, drop_edits: bool = False, idempotency_key: str | None = None
    ) -> Policy:
        """Change a tenant's policy: its turns are processed again, then the new memories replace the old.

        Conflict: memories were reworded or deleted by hand, and `drop_edits` does not allow losing that.
        """
        body = {"policy": policy, "drop_edits": drop_edits}
        path = of_tenant(tenant, "policy")
        return await self._read(Policy, changing("PUT", path, body, idempotency_key=idempotency_key))

    async def erase(self, tenant: str, *, timeout_s: float | None = None) -> Certificate:
        """Erase a tenant and purge its bytes; the certificate says what that does not reach."""
        return await self._read(Certificate, changing("DELETE", of_tenant(tenant), timeout_s=timeout_s))

    async def erase_job(self, tenant: str) -> Job:
        """`erase` as a job of the service, for a key that covers the tenant by a prefix or as all.

        BadRequest for a key that names the tenant: it could not read the job afterwards.
        """
        return await self._begin(changing("DELETE", of_tenant(tenant)))

    async def jobs(self, tenant: str) -> tuple[Job, ...]:
        return (await self._read(Listed[Job], reading(of_tenant(tenant, "jobs")))).results

    async def job(self, tenant: str, job_id: str, *, wait_s: float = 0.0) -> Job:
        """A job as it is now; with `wait_s`, once it is finished or that time is over."""
        ends_at = monotonic() + wait_s
        while True:
            job = await self._read(Job, reading(of_tenant(tenant, "jobs", job_id)))
            if job.finished or monotonic() + _POLL_S > ends_at:
                return job
            await asyncio.sleep(_POLL_S)

    async def explain(self, tenant: str) -> AsyncIterator[dict[str, Any]]:
        """The decision on each turn and its grounds, read page by page."""
        after_seq: int | None = -1
        while after_seq is not None:
            call = reading(of_tenant(tenant, "explain"), after_seq=after_seq)
            page = await self._read(answers.Records, call)
            for record in page.results:
                yield record
            after_seq = page.next_after_seq

    async def stats(self, tenant: str | None = None) -> dict[str, Any]:
        """Counts of a tenant, or of the whole service."""
        return await self._document(reading(_path(tenant, "stats")))

    async def usage(self, tenant: str | None = None) -> dict[str, Any]:
        """LLM calls and tokens by operation, of a tenant or of the whole service."""
        return await self._document(reading(_path(tenant, "usage")))

    async def events(
        self, tenant: str, *, after: str | None = None, follow: bool = True, include_text: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """What happens to a tenant's memories, in order, from the beginning or behind the event id `after`.

        It waits for more if `follow`, until the service ends the stream, after some minutes at the latest: go
        on with the last event's id.
        """
        query = {"follow": None if follow else False, "include_text": include_text or None}
        call = reading(of_tenant(tenant, "events"), **query)
        if after is not None:
            call = replace(call, headers=(("last-event-id", after),))
        async with self._transport.open(call) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield answers.document(line.removeprefix("data: "))

    # --- the service ---

    async def tenants(self, *, prefix: str | None = None) -> AsyncIterator[str]:
        """The names of all tenants that the key covers, read page by page."""
        page = Results[str](results=(), next="")
        while page.next is not None:
            call = reading("/v1/tenants", prefix=prefix, after=page.next or None)
            page = await self._read(Results[str], call)
            for name in page.results:
                yield name

    async def status(self) -> dict[str, Any]:
        return await self._document(reading("/v1/status"))

    async def purge(self, *, timeout_s: float | None = None) -> tuple[Certificate, ...]:
        """Remove the bytes of all that was deleted or erased; returns the certificates of erased tenants."""
        call = changing("POST", "/v1/purge", timeout_s=timeout_s)
        return (await self._read(answers.Certificates, call)).certificates

    async def replay_jobs(self) -> int:
        """Retry the parked LLM jobs; returns their number."""
        return (await self._read(answers.Replayed, changing("POST", "/v1/replay"))).replayed

    async def _read(self, model: type[ModelT], call: calls.Call) -> ModelT:
        return model.read((await self._transport.send(call)).content)

    async def _begin(self, call: calls.Call) -> Job:
        return await self._read(Job, call.in_background())

    async def _document(self, call: calls.Call) -> dict[str, Any]:
        return answers.document((await self._transport.send(call)).content)


def _path(tenant: str | None, part: str) -> str:
    return f"/v1/{part}" if tenant is None else of_tenant(tenant, part)
