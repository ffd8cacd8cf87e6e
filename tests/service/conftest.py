"""One running service for each test module, and a client of it that may do anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from undertow.serving.http.routes import add_batches
from undertow.serving.http.state_db import StateDb

from ..support.service.http import Running, serving


@pytest.fixture(autouse=True)
def one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """When turns without a time arrive: the mock LLM's replies depend on every word of a prompt."""
    monkeypatch.setattr(add_batches, "utc_now", lambda: "2026-11-27T08:00:00+00:00")


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service over an empty store. A module's BOUNDS are its settings."""
    with serving(tmp_path_factory.mktemp("store"), **getattr(request.module, "BOUNDS", {})) as service:
        yield service


@pytest.fixture(scope="module")
def client(running: Running) -> httpx2.Client:
    return running.client()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of a client, as `driven` takes it."""
    return str(request.param)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDb]:
    with closing(StateDb(tmp_path)) as opened:
        yield opened
