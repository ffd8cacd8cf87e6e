"""The routes of mem0's own server, put as those of its platform, which methods.py serves.

Source of their form: server/main.py of mem0ai/mem0, and its documentation of the REST API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undertow.serving.http.problems import bad_field
from undertow.serving.http.routes.mem0 import methods
from undertow.serving.http.routes.mem0.call import Call, checked
from undertow.serving.http.routes.mem0.entities import ENTITIES

JOINED = ("AND", "OR", "NOT")


async def search(call: Call) -> Any:
    """As the platform's: there entities stand among the filters, and metadata in an object of its own."""
    body = await call.body()
    filters = body.pop("filters", None) or {}
    if not isinstance(filters, Mapping):
        raise bad_field("filters", "must be an object.")
    metadata = {name: value for name, value in filters.items() if name not in (*ENTITIES, *JOINED)}
    given = {name: filters[name] for name in filters if name not in metadata}
    entities = {name: body.pop(name) for name in ENTITIES if body.get(name) is not None}
    for name in entities:
        if given.setdefault(name, entities[name]) != entities[name]:
            raise bad_field(name, "is given twice, with different values. Give it once.")
    if "limit" in body:
        body.setdefault("top_k", body.pop("limit"))
    call.replace({**body, "filters": {**given, **({"metadata": metadata} if metadata else {})}})
    return await methods.search(call)


async def get_all(call: Call) -> Any:
    """The first memories of the entities in the query string."""
    checked(call.query, {*ENTITIES, "limit", "top_k"}, {})
    entities = {name: call.query[name] for name in ENTITIES if name in call.query}
    limit = call.query.get("top_k", call.query.get("limit", str(methods.PAGE_SIZE)))
    call.replace({"filters": entities})
    call.query = {"page_size": limit}
    return {"results": (await methods.get_all(call))["results"]}


async def update(call: Call) -> Any:
    """Its documents name the new words `text`, and its earlier ones `data`."""
    body = await call.body()
    call.replace({"text" if name == "data" else name: value for name, value in body.items()})
    return await methods.update(call)
