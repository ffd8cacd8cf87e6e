"""The implementations of MemoryApi for the contract suite; the HTTP clients stand behind an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.policy_change import PolicyConflict
from undertow.engine.api.transfer.import_ import TenantExists
from undertow.engine.base import queries as q
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import BadInput, InputError, Turn, UnknownMemory, Usage
from undertow.engine.base.results import (
    Answer,
    Certificate,
    Explanation,
    Hit,
    HitKind,
    ImportReport,
    Page,
    Receipt,
    Report,
    ScoreParts,
    SearchResult,
    Updated,
)
from undertow.engine.cluster.in_process import InProcess
from undertow.engine.cluster.processes.cluster import ProcessCluster
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.location import Location
from undertow.engine.tenants.registry import UnknownTenant
from undertow.serving.client import Client, Retries
from undertow.serving.client.errors import ServiceError
from undertow.serving.client.results import Hit as ClientHit
from undertow.serving.client.results import Model

from ..cluster.in_process import settings
from ..service.client import Driven, driven
from ..service.http import serving

IMPLEMENTATIONS = ("engine", "in-process", "workers", "ray", "http", "http-async")


@contextmanager
def implementation(kind: str, folder: Path, llm_url: str) -> Iterator[MemoryApi]:
    """One implementation over a new store in `folder`, open for as long as the block."""
    of_server = settings(llm_url=llm_url)
    match kind:
        case "engine":
            with Engine(folder, of_server, HashingEncoder(384), llm=make_llm(of_server)) as engine:
                yield engine
        case "in-process":
            with InProcess(folder, of_server) as router:
                yield router
        case "workers":
            with ProcessCluster(Location.of(folder), of_server, 2) as workers:
                yield workers
        case "ray":
            from undertow.engine.cluster.ray.cluster import Cluster

            small = ClusterSettings(num_cpus=0.5, threads=1, patience_s=90)
            with Cluster.open(Location.of(folder), of_server, shards=2, resources=small) as cluster:
                yield cluster
                cluster.stop()
        case _:
            client_kind = "async" if kind == "http-async" else "sync"
            engine_of = {"llm_url": llm_url}
            with (
                serving(folder, parts=EngineParts(), engine=engine_of, max_tenant_jobs=9) as running,
                driven(client_kind, running.url, running.key(), retries=Retries()) as client,
            ):
                yield HttpApi(client)


ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "unknown-tenant": UnknownTenant,
    "unknown-memory": UnknownMemory,
    "input": lambda detail: InputError(BadInput("request", None, "", detail, "")),
    "tenant-exists": lambda _: TenantExists("http"),
    "policy-conflict": PolicyConflict,
}


class HttpApi(MemoryApi):
    """A client of the service as a MemoryApi. What the service does not offer is composed of what it does."""

    def __init__(self, client: Driven) -> None:
        self._client = client

    def call(self, call: q.ApiCall[q.R]) -> q.R:
        try:
            result: q.R = HANDLERS[type(call)](self._client, call)
            return result
        except ServiceError as error:
            slug = error.kind.rpartition(":")[2]
            if slug in ERRORS:
                raise ERRORS[slug](str(error)) from error
            raise

    def add_batch(self, turns: Sequence[Turn]) -> list[Receipt]:
        """One item a turn, in runs of one tenant."""
        receipts: list[Receipt] = []
        for turn in turns:
            item = {
                "messages": [
                    {"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {})
                    for m in turn.messages
                ],
                "session_id": turn.session_id,
                "timestamp": turn.timestamp,
                "metadata": dict(turn.metadata),
                "idempotency_key": turn.dedupe_key,
            }
            (added,) = self._client.add_many(turn.tenant, [{k: v for k, v in item.items() if v}])
            if added.results is None:
                raise ERRORS["input"](added.detail or "")
            receipts += [Receipt(turn.tenant, r.id, r.seq, r.event == "DUPLICATE") for r in added.results]
        return receipts


def _hit(found: ClientHit) -> Hit:
    return Hit(found.id, found.kind, found.memory, found.score, found.timestamp, found.source_seqs)


def _search(client: Client, query: q.SearchQuery) -> SearchResult:
    def tier(kind: HitKind, k: int | None) -> tuple[Hit, ...]:
        if k == 0:
            return ()
        found = client.search(
            query.tenant,
            query.text,
            kinds=[kind],
            top_k=k,
            filters=query.where,
            since=query.since,
            until=query.until,
        )
        return tuple(_hit(hit) for hit in found.results)

    tiers = tier("episode", query.k_epi), tier("fact", query.k_sem), tier("turn", query.k_sub)
    return SearchResult(*tiers, explanation=_explanation(client, query) if query.explain else None)


def _explanation(client: Client, query: q.SearchQuery) -> Explanation:
    """Of a search with as many hits of each kind."""
    assert query.k_sub == query.k_epi == query.k_sem
    found = client.search(
        query.tenant,
        query.text,
        filters=query.where,
        since=query.since,
        until=query.until,
        explain=True,
    )
    how = found.explanation
    assert how is not None
    scores = {of: ScoreParts(**parts.model_dump()) for of, parts in how.scores.items()}
    left_out = tuple((_hit(hit), hit.reason) for hit in how.left_out)
    return Explanation(how.search, how.telling_words, how.turns, how.passing, scores, left_out)


def _answer(client: Client, query: q.AnswerQuery) -> Answer:
    said = client.answer(query.tenant, query.question, as_of=query.as_of, mode=query.mode)

    def tier(kind: HitKind) -> tuple[Hit, ...]:
        return tuple(_hit(hit) for hit in said.memories if hit.kind == kind)

    return Answer(said.answer, SearchResult(tier("episode"), tier("fact"), tier("turn")), Usage(**said.usage))


def _report(memory: Model, tenant: str) -> Report:
    """A memory of the client as the engine reports it."""
    names = {"memory": "text", "session_id": "session"}
    shown = {names.get(name, name): value for name, value in memory.model_dump(mode="json").items()}
    return {**shown, "tenant": tenant}


def _page(client: Client, query: q.ListQuery) -> Page:
    kinds: Any = query.kinds
    found = client.get_page(
        query.tenant,
        kinds=kinds,
        filters=query.where,
        since=query.since,
        until=query.until,
        limit=query.limit,
        after=query.after,
    )
    return Page(tuple(_report(memory, query.tenant) for memory in found.results), found.next)


def _of(call: q.MemoryCall[Any]) -> str:
    """The tenant of a memory; over HTTP it is always named."""
    assert call.tenant is not None
    return call.tenant


def _certificate(client: Client, command: q.EraseCommand) -> Certificate | None:
    if not command.now:
        client.delete_all(command.tenant)
        return None
    return Certificate(**client.erase(command.tenant).model_dump())


def _purge(client: Client) -> dict[str, Certificate]:
    issued = [Certificate(**certificate.model_dump()) for certificate in client.purge()]
    return {certificate.tenant_key: certificate for certificate in issued}


def _import(client: Client, command: q.ImportCommand) -> ImportReport:
    return ImportReport(**client.import_(command.tenant, command.records))


def _set_policy(client: Client, c: q.SetPolicyCommand) -> Report:
    changed = client.set_policy(c.tenant, c.policy, drop_edits=c.drop_edits)
    return {"tenant": c.tenant, **changed.model_dump()}


def _updated(client: Client, c: q.UpdateCommand) -> Updated:
    words: Any = c.text
    changed = client.update(_of(c), c.memory_id, words)
    return Updated(changed.id, changed.kind)


HANDLERS: Mapping[type[Any], Callable[[Any, Any], Any]] = {
    q.SearchQuery: _search,
    q.AnswerQuery: _answer,
    q.GetQuery: lambda client, c: _report(client.get(_of(c), c.memory_id), _of(c)),
    q.HistoryQuery: lambda client, c: [_report(m, _of(c)) for m in client.history(_of(c), c.memory_id)],
    q.ListQuery: _page,
    q.ExportQuery: lambda client, c: Page(tuple(client.export(c.tenant, vectors=c.vectors)), None),
    q.ExplainQuery: lambda client, c: [r for r in client.explain(c.tenant) if r["seq"] > c.after_seq][
        : c.limit
    ],
    q.PolicyQuery: lambda client, c: {"tenant": c.tenant, **client.policy(c.tenant).model_dump()},
    q.SetPolicyCommand: _set_policy,
    q.TenantStatsQuery: lambda client, c: client.stats(c.tenant),
    q.TenantUsageQuery: lambda client, c: client.usage(c.tenant),
    q.StatsQuery: lambda client, _: client.stats(),
    q.UsageQuery: lambda client, _: client.usage(),
    q.TenantsQuery: lambda client, c: [n for n in client.tenants(prefix=c.prefix) if n > c.after][: c.limit],
    q.UpdateCommand: _updated,
    q.DeleteCommand: lambda client, c: client.delete(_of(c), c.memory_id).kind,
    q.FlushCommand: lambda client, c: client.flush(c.tenant),
    q.EraseCommand: _certificate,
    q.ImportCommand: _import,
    q.ReplayJobsCommand: lambda client, _: client.replay_jobs(),
    q.PurgeCommand: lambda client, _: _purge(client),
}
