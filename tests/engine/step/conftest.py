"""What the tests of an engine on a small pool watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from undertow.engine.step.admission import Admission
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry
from undertow.engine.tenants.turn_columns import TurnColumns

CallsOf = Callable[..., list[Any]]


class Watched:
    """What an engine's admission and settling did: counted, its steps and evictions listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls_of: CallsOf) -> None:
        self.attempts = self.failures = 0
        self.steps = calls_of(Scheduler, "begin_step", lambda *_, **__: None)
        self.put_out: list[str] = calls_of(Scheduler, "_evict", lambda _, tenant: tenant.name)
        admit = Admission.admit

        def watched_admit(admission: Admission, turns: TurnColumns) -> object:
            self.attempts += 1
            try:
                return admit(admission, turns)
            except ArenaFull:
                self.failures += 1
                raise

        monkeypatch.setattr(Admission, "admit", watched_admit)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, calls_of: CallsOf) -> Watched:
    return Watched(monkeypatch, calls_of)


@pytest.fixture
def evicted(calls_of: CallsOf) -> list[str]:
    """The tenants that are evicted from now on, in order."""
    return calls_of(TenantRegistry, "evict", lambda _, name: name)
