"""Waits of the shard client, shortened."""

from __future__ import annotations

import pytest

from undertow.engine.cluster.routing import errors, shard_client


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "PROBATION_S", 0.02)
    monkeypatch.setattr(shard_client, "COURTESY_S", 0.001)
    monkeypatch.setattr(shard_client, "REFUSAL_PATIENCE_S", 0.02)
    monkeypatch.setattr(errors, "SHORTEST_PAUSE_S", 0.001)
