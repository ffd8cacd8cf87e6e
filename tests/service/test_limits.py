"""The limits of engine/base/limits.py hold in every interface, and each refusal names the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.limits import MAX_FILTER_KEYS, MAX_FILTER_VALUES, MAX_MESSAGES, MAX_QUERY_CHARS
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.serving.client import Client, ServiceError

from ..support.cli import run
from ..support.engine import turn_of
from ..support.service.http import Running, at, said
from ..support.service.mcp import connected, refused

TOO_MANY = said("hm") * (MAX_MESSAGES + 1)
# what a search and an add may not have, and the limit that the refusal names
SEARCHES: dict[str, tuple[str, Mapping[str, Any], int]] = {
    "query": ("x" * (MAX_QUERY_CHARS + 1), {}, MAX_QUERY_CHARS),
    "keys": ("boat", {f"key{n}": n for n in range(MAX_FILTER_KEYS + 1)}, MAX_FILTER_KEYS),
    "values": ("boat", {"n": list(range(MAX_FILTER_VALUES + 1))}, MAX_FILTER_VALUES),
}


@pytest.fixture(scope="module", autouse=True)
def ann(client: httpx2.Client) -> None:
    client.post(at("ann", "/memories"), json={"messages": said("the boat"), "metadata": {"n": 5}})


def over_http(running: Running, path: str, body: Mapping[str, Any]) -> str:
    response = running.client().post(path, json={**body})
    assert response.status_code in (400, 422), response.text
    return response.text


def over_mcp(running: Running, tool: str, **arguments: Any) -> str:
    async def asked() -> str:
        async with connected(f"{running.url}/mcp", running.key()) as client:
            return await refused(client, tool, tenant="ann", **arguments)

    return asyncio.run(asked())


def by_client(running: Running, call: Callable[[Client], object]) -> str:
    with Client(running.url, running.key()) as client, pytest.raises(ServiceError) as refusal:
        call(client)
    return str(refusal.value)


def in_process(folder: Path, query: str, filters: Mapping[str, Any]) -> str:
    with Engine(folder / "store", Settings(), HashingEncoder(384)) as engine:
        engine.add_batch([turn_of("ann", 1, "the boat")])
        with pytest.raises(ValueError) as refusal:
            engine.search("ann", query, where=filters)
    return str(refusal.value)


def by_program(store: str, query: str, filters: Mapping[str, Any]) -> str:
    values = (
        (key, one) for key, some in filters.items() for one in (some if isinstance(some, list) else [some])
    )
    where = (word for key, value in values for word in ("--where", f"{key}={value}"))
    done = run("search", query, "--tenant", "ann", "--store", store, *where)
    assert done.code == 2 and not done.out
    return done.err


@pytest.mark.parametrize("over", SEARCHES)
@pytest.mark.parametrize("face", ["HTTP", "mem0", "MCP", "client", "library", "program", "program over HTTP"])
def test_a_search_over_a_limit_is_refused(running: Running, tmp_path: Path, face: str, over: str) -> None:
    query, filters, limit = SEARCHES[over]
    body = {"query": query, "filters": filters}
    faces: dict[str, Callable[[], str]] = {
        "HTTP": lambda: over_http(running, at("ann", "/search"), body),
        "mem0": lambda: over_http(running, "/search", {**body, "user_id": "ann"}),
        "MCP": lambda: over_mcp(running, "search_memories", **body),
        "client": lambda: by_client(running, lambda its: its.search("ann", query, filters=filters)),
        "library": lambda: in_process(tmp_path, query, filters),
        "program": lambda: by_program(str(tmp_path), query, filters),
        "program over HTTP": lambda: by_program(running.url, query, filters),
    }
    words = faces[face]()
    assert f"{limit}" in words or f"{limit:,}" in words


@pytest.mark.parametrize("face", ["HTTP", "mem0", "client"])
def test_an_add_over_the_limit_is_refused(running: Running, face: str) -> None:
    """MCP's tool takes one text. The library's caller has its queue to itself."""
    too_many = {"messages": TOO_MANY}
    faces: dict[str, Callable[[], str]] = {
        "HTTP": lambda: over_http(running, at("ann", "/memories"), too_many),
        "mem0": lambda: over_http(running, "/memories", {**too_many, "user_id": "ann"}),
        "client": lambda: by_client(running, lambda its: its.add("ann", TOO_MANY)),
    }
    words = faces[face]()
    assert f"{MAX_MESSAGES}" in words or f"{MAX_MESSAGES:,}" in words
