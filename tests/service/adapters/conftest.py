"""What the adapters are tested over: memories in this process, and a service on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.cluster.in_process import InProcess
from undertow.serving.client import Client

from ...support.cluster.in_process import PARTS, settings
from ...support.service.client import QUICK
from ...support.service.http import Running, serving

Served: TypeAlias = MemoryApi | Client


@pytest.fixture(scope="module", params=["in-process", "http"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An empty store."""
    folder = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        if request.param == "in-process":
            yield stack.enter_context(InProcess(folder, settings(), PARTS))
        else:
            running: Running = stack.enter_context(serving(folder))
            yield stack.enter_context(Client(running.url, running.key(), retries=QUICK))
