"""The methods of mem0's client that work: each function serves one route, with what its client reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from undertow.engine.base.model import UnknownMemory
from undertow.engine.tenants.registry import UnknownTenant
from undertow.serving.http.problems import Problem, bad_field, problem_of
from undertow.serving.http.routes.mem0.call import Call, Rules, checked
from undertow.serving.http.routes.mem0.entities import (
    ENTITIES,
    NO_ENTITY,
    Selection,
    entity_of,
    opaque,
    parted,
    tenant_of,
)

# a list is walked from its start, as ours has cursors and no pages
MOST_LISTED = 10_000
PAGE_SIZE = 100
TOP_K = 10
# each hit is read for its metadata
MOST_HITS = 100
# so that its client asks for its project here, and is told
NO_ORG = "undertow"

NO_EXPIRY = "memories do not expire here. Delete them when their time has come."
NO_SCHEMA = "memories are made by the tenant's policy here, not by instructions of a request. Leave it out."
NO_CATEGORIES = "memories have no categories here. Filter by metadata."
NEWEST = (True,), "only the newest version of a memory is listed here. The method history has the others."
ANY = (True, False), "must be true or false."
ADD: Rules = {
    "infer": ((True,), "turns are kept word for word here, and memories made from them. Leave it out."),
    "expiration_date": ((), NO_EXPIRY),
    "custom_categories": ((), NO_CATEGORIES),
    "custom_instructions": ((), NO_SCHEMA),
    "agent_custom_instructions": ((), NO_SCHEMA),
    "structured_data_schema": ((), NO_SCHEMA),
}
LIST: Rules = {"categories": ((), NO_CATEGORIES), "show_expired": ANY, "latest_only": NEWEST}
SEARCH: Rules = {
    **LIST,
    "rerank": ((False,), "a search ranks by meaning and words here, and is not reranked. Leave it out."),
    "keyword_search": ((True,), "words count beside meaning here, by the store's settings. Leave it out."),
    "reference_date": ((), "a search has no reference date here. Say the date in the query."),
    "fields": ((), "every field is returned here. Leave it out."),
}
UPDATE: Rules = {
    "metadata": ((), "metadata cannot be changed here. Delete the memory, and add it with other metadata."),
    "timestamp": ((), "the time cannot be changed here. Delete the memory, and add it with another time."),
    "expiration_date": ((), NO_EXPIRY),
}
DELETE: Rules = {"delete_linked": ((), "a memory has no linked ones here. Delete each by its id.")}
DELETE_ALL: Rules = {"filters": ((), "is not read here. Pass user_id itself, or another entity.")}


async def ping(call: Call) -> Any:
    """What the client asks when it is made: whether its key is good."""
    return {"status": "ok", "org_id": NO_ORG, "project_id": NO_ORG, "user_email": None}


async def add(call: Call) -> Any:
    """Add messages, as turns of the tenant."""
    body = await call.body()
    checked(body, {"messages", "filters", "metadata", "timestamp", *ENTITIES}, ADD)
    selection = Selection.of(body.get("filters") or {})
    metadata = body.get("metadata") or {}
    if selection.metadata or not isinstance(metadata, dict):
        raise bad_field("metadata", "must be an object, and not a filter.")
    for name in ENTITIES:
        value = body.get(name, selection.entities.get(name))
        if value != selection.entities.get(name, value) or isinstance(value, list):
            raise bad_field(name, "names several. Add to one at a time.")
        selection.entities[name] = value
    tenant, metadata = Selection(selection.entities, metadata).resolved("user_id")
    added = {
        "messages": body.get("messages"),
        "metadata": metadata,
        "session_id": selection.entities["run_id"],
        "timestamp": body.get("timestamp"),
    }
    own = {name: value for name, value in added.items() if value is not None}
    told = await call.ask("POST", tenant, "/memories", own)
    return {
        "results": [
            {
                "id": one["id"] and opaque(tenant, one["id"]),
                "memory": one["memory"],
                "event": "ADD" if one["event"] == "ADD" else "NONE",
            }
            for one in told["results"]
        ]
    }


async def search(call: Call) -> Any:
    """The nearest memories; those that are turns with their metadata."""
    body = await call.body()
    checked(body, {"query", "filters", "metadata", "top_k", "threshold"}, SEARCH)
    tenant, where = _selected(body)
    default = min(TOP_K, call.service.settings.max_top_k)
    top_k = default if body.get("top_k") is None else body["top_k"]
    if isinstance(top_k, int) and top_k > MOST_HITS:
        raise bad_field("top_k", f"is {top_k}; ask for at most {MOST_HITS} here.")
    asked = {"query": body.get("query"), "filters": where, "top_k": top_k, "threshold": body.get("threshold")}
    try:
        found = await call.ask("POST", tenant, "/search", asked)
    except UnknownTenant:
        return {"results": []}
    results = []
    for hit in found["results"]:
        own = hit
        if hit["kind"] == "turn":
            try:
                own = await call.ask("GET", tenant, f"/memories/{hit['id']}")
            except UnknownMemory:
                continue  # deleted since
        results.append({**_shown(tenant, own), "score": hit["score"]})
    return {"results": results}


async def get_all(call: Call, sized: str = "page_size") -> Any:
    """A page of the memories, in creation order. `sized`: the parameter that says how many."""
    body = await call.body()
    checked(body, {"filters", "metadata", "start_date", "end_date"}, LIST)
    checked(call.query, {"page", sized}, {})
    tenant, where = _selected(body)
    most = call.service.settings.max_page
    page, size = _number(call, "page", 1), _number(call, sized, min(PAGE_SIZE, most))
    start, end = (page - 1) * size, page * size
    if size > most:
        raise bad_field(sized, f"is {size}; ask for at most {most:,}.")
    if end > MOST_LISTED:
        raise bad_field("page", f"ends beyond {MOST_LISTED:,} memories. The tenant's own route lists all.")
    filters = orjson.dumps(where).decode() if where else None
    query = {"filters": filters, "since": body.get("start_date"), "until": body.get("end_date")}
    results, count = [], 0
    async for memory in _walked(call, tenant, query):
        if start <= count < end:
            results.append(_shown(tenant, memory))
        count += 1
    return {
        "count": count if count <= MOST_LISTED else None,
        "next": _page(page + 1, size) if count > end else None,
        "previous": _page(page - 1, size) if page > 1 else None,
        "results": results,
    }


async def get(call: Call) -> Any:
    """One memory."""
    tenant, memory_id = parted(call.params["id"])
    return _shown(tenant, await call.ask("GET", tenant, f"/memories/{quote(memory_id, safe='')}"))


async def history(call: Call) -> Any:
    """Every version, oldest first."""
    tenant, memory_id = parted(call.params["id"])
    told = await call.ask("GET", tenant, f"/memories/{quote(memory_id, safe='')}/history")
    versions, before = [], None
    for n, version in enumerate(told["results"]):
        shown, deleted = _shown(tenant, version), bool(version.get("deleted"))
        words = None if deleted else shown["memory"]
        event = "DELETE" if deleted else "UPDATE" if n else "ADD"
        own = {"id": f"{shown['id']}.{n}", "memory_id": shown["id"], "event": event}
        versions.append({**shown, **own, "old_memory": before, "new_memory": words})
        before = words
    return versions


async def update(call: Call) -> Any:
    """Reword one memory."""
    return await _updated(call, call.params["id"], await call.body())


async def delete(call: Call) -> Any:
    """Delete one memory."""
    checked(call.query, set(), DELETE)
    return await _deleted(call, call.params["id"])


async def batch_update(call: Call) -> Any:
    """Reword several memories."""

    async def change(item: Mapping[str, Any], mark: str) -> Any:
        text = {name: value for name, value in item.items() if name != "memory_id"}
        return await _updated(call, item.get("memory_id"), text, mark)

    return await _each(call, change, "updated")


async def batch_delete(call: Call) -> Any:
    """Delete several memories."""

    async def remove(item: Mapping[str, Any], mark: str) -> Any:
        checked(item, {"memory_id"}, {})
        return await _deleted(call, item.get("memory_id"), mark)

    return await _each(call, remove, "deleted")


async def delete_all(call: Call) -> Any:
    """Delete all memories of one entity."""
    checked(call.query, set(ENTITIES), DELETE_ALL)
    given = [name for name in ENTITIES if name in call.query]
    if not given:
        raise bad_field("user_id", NO_ENTITY)
    if len(given) > 1:
        raise bad_field(given[1], "all memories of one entity are deleted here. Name one entity.")
    try:
        await call.ask("DELETE", tenant_of(given[0], call.query[given[0]]), "/memories")
    except (UnknownTenant, Problem) as none:  # a Problem under an Idempotency-Key
        if problem_of(none).slug != "unknown-tenant":
            raise
        return {"message": "There were no memories to delete."}
    return {"message": "Memories deleted successfully!"}


async def users(call: Call) -> Any:
    """The tenants that the key covers, as entities."""
    names: list[str] = []
    after = ""
    while True:
        told = await call.ask_at("GET", "/v1/tenants", query={"limit": 1000, "after": after})
        names += told["results"]
        if (after := told["next"]) is None:
            break
        if len(names) >= MOST_LISTED:
            raise Problem(422, "input", f"There are more than {MOST_LISTED:,}; GET /v1/tenants lists all.")
    results = [{"id": name, "type": kind, "name": own} for name in names for kind, own in [entity_of(name)]]
    return {"count": len(results), "next": None, "previous": None, "results": results}


async def delete_user(call: Call) -> Any:
    """Erase one entity, with a certificate."""
    kind = f"{call.params['type']}_id"
    if kind not in ENTITIES:
        raise Problem(404, "unknown-entity", "The types of entities are user, agent, app and run.")
    certificate = await call.ask("DELETE", tenant_of(kind, call.params["name"]))
    return {"message": "Entity deleted successfully!", "certificate": certificate}


def _selected(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The tenant and the metadata that a search or a list is for."""
    metadata = {} if body.get("metadata") is None else {"metadata": body["metadata"]}
    return Selection.of(body.get("filters") or {}, metadata).resolved()


async def _updated(call: Call, memory_id: Any, body: Mapping[str, Any], mark: str = "") -> Any:
    tenant, own = parted(memory_id)
    checked(body, {"text"}, UPDATE)
    asked = {"text": body.get("text")}
    told = await call.ask("PUT", tenant, f"/memories/{quote(own, safe='')}", asked, mark=mark)
    changed = {"id": opaque(tenant, told["id"]), "memory": body.get("text"), "kind": told["kind"]}
    return {**changed, "event": "UPDATE", "message": "Memory updated successfully!"}


async def _deleted(call: Call, memory_id: Any, mark: str = "") -> Any:
    tenant, own = parted(memory_id)
    await call.ask("DELETE", tenant, f"/memories/{quote(own, safe='')}", mark=mark)
    return {"id": memory_id, "event": "DELETE", "message": "Memory deleted successfully!"}


async def _each(call: Call, act: Callable[[Mapping[str, Any], str], Awaitable[Any]], done: str) -> Any:
    """One after the other. The first one that fails ends it, and its problem says how many were done."""
    body = await call.body()
    checked(body, {"memories"}, {})
    items, most = body.get("memories"), call.service.settings.max_items
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise bad_field("memories", "must be a list of objects with a memory_id each.")
    if not 1 <= len(items) <= most:
        raise bad_field("memories", f"holds {len(items)}; give 1 to {most:,} at a time.")
    results: list[Any] = []
    for n, item in enumerate(items):
        try:
            results.append(await act(item, f":{n}"))
        except Exception as error:
            why = problem_of(error)
            detail = f"memories[{n}]: {why.detail} {n} of {len(items)} were {done} before it."
            raise Problem(
                why.status_code, why.slug, detail, errors=why.errors, headers=why.headers
            ) from error
    return {"message": f"Successfully {done} {len(results)} memories", "results": results}


async def _walked(call: Call, tenant: str, query: Mapping[str, Any]) -> AsyncIterator[Any]:
    """A tenant's memories in order, up to one more than MOST_LISTED."""
    limit, after, left = min(1000, call.service.settings.max_page), None, MOST_LISTED + 1
    while left:
        try:
            told = await call.ask("GET", tenant, "/memories", limit=min(limit, left), after=after, **query)
        except UnknownTenant:
            return
        for memory in told["results"]:
            yield memory
        after = told["next"]
        left = left - len(told["results"]) if after is not None else 0


def _shown(tenant: str, memory: Mapping[str, Any]) -> dict[str, Any]:
    """A memory of ours as one of mem0's."""
    metadata = dict(memory.get("metadata") or {})
    kind, name = entity_of(tenant)
    others = {other: metadata.pop(other, None) for other in ENTITIES[1:] if other != f"{kind}_id"}
    return {
        "id": opaque(tenant, memory["id"]),
        "memory": memory["memory"],
        "user_id": None,
        **others,
        f"{kind}_id": name,
        "metadata": metadata or None,
        "categories": None,
        "created_at": memory["timestamp"],
        "updated_at": memory["timestamp"],
        "kind": memory["kind"],
    }


def _number(call: Call, name: str, default: int) -> int:
    text = call.query.get(name, str(default))
    if not text.isdecimal() or not 1 <= len(text) <= 6 or not int(text):
        raise bad_field(name, "must be a whole number from 1.")
    return int(text)


def _page(page: int, size: int) -> str:
    return f"/v3/memories/?{urlencode({'page': page, 'page_size': size})}"
