"""The memories of a tenant over HTTP: added, found, changed and deleted in a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from .http_harness import Running, at, is_problem, said, serving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("store")) as service:
        yield service


@pytest.fixture(scope="module")
def client(running: Running) -> httpx2.Client:
    return running.client()


def added(client: httpx2.Client, tenant: str, text: str, **more: object) -> dict[str, object]:
    response = client.post(at(tenant, "/memories"), json={"messages": said(text), **more})
    assert response.status_code == 200, response.text
    (result,) = response.json()["results"]
    return dict(result)


def test_what_is_added_is_found(client: httpx2.Client) -> None:
    first = added(client, "ann", "the boat needs new planks")
    second = added(client, "ann", "my knee hurts")
    assert (first["event"], first["seq"], second["seq"]) == ("ADD", 0, 1)
    assert first["memory"] == "user: the boat needs new planks\nassistant: noted"
    found = client.post(at("ann", "/search"), json={"query": "planks of the boat", "top_k": 1}).json()
    assert [(hit["id"], hit["kind"], hit["source_seqs"]) for hit in found["results"]] == [
        (first["id"], "turn", [0])
    ]
    assert found["recall"] == 1.0
