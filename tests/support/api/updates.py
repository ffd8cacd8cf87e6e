"""What test_update.py and test_update_faults.py share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Memory, MemoryKind

from ..engine import turn_of
from ..faults.harness import reports

GARDEN = "a garden of roses"


GARDENS = [turn_of("ann", n, f"{GARDEN} and tulips number{n}") for n in range(6)]


NEW = "The user moved to Lisbon in May."


# two turns fire, the next ones may merge
PAIRS: dict[str, Any] = {"theta_sim": 0.6, "theta_merge": 0.7, "theta_count": 2}


def one(engine: Engine, kind: MemoryKind, tenant: str = "ann") -> Memory:
    return engine.tenants.get(tenant).current(kind)[0]


def current(engine: Engine, memory: Memory) -> Memory:
    return next(m for m in engine.get_all(memory.tenant) if m.id == memory.id)


def reports_of(store: Path, tenant: str = "ann") -> list[dict[str, Any]]:
    with reports(store) as of:
        return list(of.export(tenant))
