"""What the tests of an engine on a small pool watch."""

from __future__ import annotations

import pytest

from undertow.engine.base.pacing import Pacing
from undertow.engine.step.admission import Admission
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.tenants.registry import ArenaFull
from undertow.engine.tenants.tenant import Tenant
from undertow.engine.tenants.turn_columns import TurnColumns


class Watched:
    """What an engine's admission and settling did, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempts = self.failures = self.steps = 0
        self.put_out: list[str] = []
        admit, step, put_out = Admission.admit, Scheduler.begin_step, Scheduler._evict

        def watched_admit(admission: Admission, turns: TurnColumns) -> object:
            self.attempts += 1
            try:
                return admit(admission, turns)
            except ArenaFull:
                self.failures += 1
                raise

        def watched_step(
            scheduler: Scheduler, wait_s: float, *, storing: bool, pacing: Pacing | None
        ) -> None:
            self.steps += 1
            step(scheduler, wait_s, storing=storing, pacing=pacing)

        def watched_put_out(scheduler: Scheduler, tenant: Tenant) -> None:
            self.put_out.append(tenant.name)
            put_out(scheduler, tenant)

        monkeypatch.setattr(Admission, "admit", watched_admit)
        monkeypatch.setattr(Scheduler, "begin_step", watched_step)
        monkeypatch.setattr(Scheduler, "_evict", watched_put_out)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)
