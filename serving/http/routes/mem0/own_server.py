"""The routes of mem0's own server, put as those of its platform, which methods.py serves.

Source of their form: server/main.py of mem0ai/mem0, and its documentation of the REST API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undertow.serving.http.problems import bad_field
from undertow.serving.http.routes.mem0 import methods
from undertow.serving.http.routes.mem0.call import Call, checked
from undertow.serving.http.routes.mem0.entities import ENTITIES, NO_ENTITY

JOINED = ("AND", "OR", "NOT")


async def search(call: Call) -> Any:
    """As the platform's: there entities stand among the filters, and metadata in an object of its own."""
    body = await call.body()
    filters = body.pop("filters", None) or {}
    if not isinstance(filters, Mapping):
        raise bad_field("filters", "must be an object.")
    entities = {name: body.pop(name) for name in ENTITIES if body.get(name) is not None}
    for name, value in entities.items():
        if filters.get(name, value) != value:
            raise bad_field(name, "is given twice, with different values. Give it once.")
    if not any(name in filters or name in entities for name in (*ENTITIES, "AND")):
        raise bad_field("user_id", NO_ENTITY)
    _rename(body, "limit", "top_k")
    call.replace({**body, "filters": {**_platform_form(filters), **entities}})
    return await methods.search(call)


def _platform_form(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Filters with their metadata in an object of its own; so also the parts of an AND, but not deeper."""
    own = _with_metadata(filters)
    if isinstance(parts := own.get("AND"), list):
        own["AND"] = [_with_metadata(part) if isinstance(part, Mapping) else part for part in parts]
    return own


def _with_metadata(filters: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in filters.items() if name in (*ENTITIES, *JOINED)}
    metadata = {name: value for name, value in filters.items() if name not in own}
    return {**own, "metadata": metadata} if metadata else own


def _rename(given: dict[str, Any], former: str, name: str) -> None:
    """Another name of a field. Problem 422: both are given."""
    if former in given:
        if name in given:
            raise bad_field(former, f"is another name of {name} here. Give one of both.")
        given[name] = given.pop(former)


async def get_all(call: Call) -> Any:
    """The first memories of the entities in the query string."""
    checked(call.query, {*ENTITIES, "limit", "top_k"}, {})
    if not any(name in call.query for name in ENTITIES):
        raise bad_field("user_id", NO_ENTITY)
    _rename(call.query, "limit", "top_k")
    call.replace({"filters": {name: call.query[name] for name in ENTITIES if name in call.query}})
    call.query = {name: value for name, value in call.query.items() if name == "top_k"}
    return {"results": (await methods.get_all(call, "top_k"))["results"]}


async def update(call: Call) -> Any:
    """Its documents name the new words `text`, and its earlier ones `data`."""
    _rename(await call.body(), "data", "text")
    return await methods.update(call)
