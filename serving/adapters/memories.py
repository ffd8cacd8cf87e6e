"""The calls that adapters make, once for memories in this process and once for a service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from undertow.engine.base.limits import MAX_QUERY_CHARS
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import UndertowError, UnknownMemory
from undertow.engine.base.results import Hit, HitKind, Report
from undertow.serving.client import Client
from undertow.serving.client.errors import BadRequest, NotFound, ServiceError

Messages = Sequence[Mapping[str, Any]]
Where = Mapping[str, Any]

KINDS: tuple[HitKind, ...] = ("turn", "episode", "fact")
# of a page of a list, or of names
PAGE = 1_000
# of a message over HTTP, see Settings.max_message_bytes
MAX_MESSAGE_BYTES = 1_000_000
ONE_THREAD = "an Engine serves one thread. Open its store with undertow.engine.cluster.in_process.InProcess."


def tenant_name(prefix: str, *parts: str) -> str:
    """The prefix and the parts, percent-encoded, with slashes between: each list of parts has its own name.

    ValueError: half a surrogate pair.
    """
    return "/".join([prefix, *(quote(part, safe="") for part in parts)])


class Memories:
    """What adapters need. Blocking, and safe from several threads; a tenant without memories has none.

    All errors are kinds of UndertowError, except ValueError for an argument that no call can take.
    """

    def __init__(self, served: MemoryApi | Client) -> None:
        """Over a router or InProcess, or over a service. UndertowError: an Engine."""
        if not isinstance(served, Client) and not hasattr(served, "begin"):
            raise UndertowError(ONE_THREAD)
        self._served = served

    def add(
        self,
        tenant: str,
        messages: Messages,
        *,
        session_id: str = "",
        timestamp: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        """Add messages; durable and searchable on return. Under the key of an earlier call adds nothing."""
        common: dict[str, Any] = {"session_id": session_id, "timestamp": timestamp, "metadata": metadata}
        if isinstance(self._served, Client):
            try:
                self._served.add(tenant, messages, **common, idempotency_key=key)
            except BadRequest as error:
                if not error.kind.endswith(":idempotency-key-reused"):
                    raise
            return
        from undertow.engine.api.message_turns import turns_of, utc_now

        common |= {"max_message_bytes": MAX_MESSAGE_BYTES, "arrived": utc_now()}
        for receipt in self._served.add_batch(turns_of(tenant, messages, **common, call=key)):
            if receipt.parked is not None:
                raise UndertowError(f"the engine failed at a turn and has set it aside: {receipt.parked}")

    def search(
        self, tenant: str, query: str, k: int, *, kinds: Sequence[HitKind] = KINDS, where: Where | None = None
    ) -> list[Hit]:
        """The `k` nearest, best first. Of a longer query its first MAX_QUERY_CHARS count."""
        query, (k_sub, k_epi, k_sem) = query[:MAX_QUERY_CHARS], (k if kind in kinds else 0 for kind in KINDS)
        with absence():
            if isinstance(self._served, Client):
                found = self._served.search(tenant, query, top_k=k, kinds=kinds, filters=where)
                fields = ("id", "kind", "memory", "score", "timestamp", "source_seqs")
                return [Hit(*(getattr(hit, name) for name in fields)) for hit in found.results]
            asked = self._served.search(tenant, query, k_sub=k_sub, k_epi=k_epi, k_sem=k_sem, where=where)
            return asked.ranked(k)
        return []

    def turns(self, tenant: str, where: Where) -> Iterator[Report]:
        """All turns that pass the filter, in order of arrival."""
        after: str | None = ""
        while after is not None:
            page: Sequence[Report] = ()
            with absence():
                page, after = self._page(tenant, where, after or None)
            if not page:
                return
            yield from page

    def _page(self, tenant: str, where: Where, after: str | None) -> tuple[Sequence[Report], str | None]:
        if isinstance(self._served, Client):
            shown = self._served.get_page(tenant, kinds=["turn"], filters=where, limit=PAGE, after=after)
            return [memory.model_dump() for memory in shown.results], shown.next
        page = self._served.list(tenant, kinds=["turn"], where=where, limit=PAGE, after=after)
        return page.items, page.after

    def get(self, tenant: str, memory_id: str) -> Report:
        """A memory as `turns` shows it. UnknownMemory, NotFound."""
        if isinstance(self._served, Client):
            return self._served.get(tenant, memory_id).model_dump()
        return self._served.get(memory_id, tenant=tenant)

    def delete(self, tenant: str, memory_id: str) -> None:
        """Delete one memory. UnknownMemory, NotFound."""
        if isinstance(self._served, Client):
            self._served.delete(tenant, memory_id)
        else:
            self._served.delete(memory_id, tenant=tenant)

    def tenants(self, prefix: str) -> Iterator[str]:
        """The names that begin so, sorted."""
        if isinstance(self._served, Client):
            yield from self._served.tenants(prefix=prefix)
            return
        names = self._served.tenant_names(prefix, limit=PAGE)
        while names:
            yield from names
            names = self._served.tenant_names(prefix, limit=PAGE, after=names[-1])


@contextmanager
def absence() -> Iterator[None]:
    """Passes over the errors that the tenant has no memories yet, or that the memory is gone."""
    try:
        yield
    except NotFound as error:
        if not error.kind.endswith((":unknown-tenant", ":unknown-memory")):
            raise
    except ServiceError:
        raise
    except UndertowError as error:  # of an engine in this process, so its packages are there
        from undertow.engine.tenants.registry import UnknownTenant

        if not isinstance(error, UnknownTenant | UnknownMemory):
            raise
