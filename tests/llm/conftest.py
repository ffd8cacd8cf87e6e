"""Fixtures for tests of LLM clients."""

import pytest

from undertow.engine.llm import load_balancer as llm_servers
from undertow.engine.llm import server as llm_server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_servers, "QUIET_S", 0.1)
    monkeypatch.setattr(llm_server, "_PROBE_TIMEOUT_S", 0.2)
