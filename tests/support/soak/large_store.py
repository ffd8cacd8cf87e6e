"""The proof `large-store`: one store through ingest, upgrade, reindex, export, import and erasure, by units.

    python -m tests.support.soak.large_store FOLDER UNIT

Each unit is a process of its own, so that its peak of memory is its own; one that was cut off may run again.
LARGE_TURNS, LARGE_TENANT_TURNS, LARGE_PARTS: turns in all, of a tenant, and the parts that ingest, export and
import are done in. The encoder hashes, and no LLM is asked: every turn is decided, and none recurs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from undertow.bench.machine import peak_rss_bytes
from undertow.engine.api.engine import Engine
from undertow.engine.api.transfer.reindex import reindex
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn
from undertow.engine.base.queries import ImportCommand
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import FORMAT_VERSION, read_info, write_info

from .runs import report

TURNS = int(os.environ.get("LARGE_TURNS", "10000000"))
TENANT_TURNS = int(os.environ.get("LARGE_TENANT_TURNS", "1000"))
PARTS = int(os.environ.get("LARGE_PARTS", "100"))
BEFORE, AFTER = HashingEncoder(64), HashingEncoder(128)
FORMER = FORMAT_VERSION - 1
NEVER: dict[str, Any] = {"theta_sim": 1.0, "theta_merge": 1.0, "theta_count": 1_000}
SETTINGS = Settings(device="cpu", salience_turns=0, quiet_share=0, **NEVER)
ERASED_OF = 10  # one tenant of so many is erased
STAGES = ("ingest", "upgrade", "reindex", "export", "import", "erase")
WHOLE = ("upgrade", "reindex", "erase")  # the others are done in parts


def units() -> list[tuple[str, int]]:
    """Stage and part of each unit."""
    return [(stage, part) for stage in STAGES for part in range(1 if stage in WHOLE else PARTS)]


def command(folder: Path, n: int) -> list[str]:
    return [sys.executable, "-m", "tests.support.soak.large_store", str(folder), str(n)]


def tenants(part: int | None = None) -> list[str]:
    """Names, of all or of one part of as many."""
    names = [f"tenant-{n:06d}" for n in range(TURNS // TENANT_TURNS)]
    return names if part is None else names[part * len(names) // PARTS : (part + 1) * len(names) // PARTS]


def said(tenant: str, n: int) -> str:
    """Words of its own for each turn, with the tenant's."""
    return f"{tenant} saw ship number{n} of harbour{n % 97} on day{n % 31} and noted word{n * 7919 % 10007}."


def turns_of(tenant: str) -> list[Turn]:
    answer = Message("assistant", "I have noted it.")
    at = [f"2026-03-01T{n // 60 % 24:02d}:{n % 60:02d}:00" for n in range(TENANT_TURNS)]
    return [
        Turn(tenant, (Message("user", said(tenant, n)), answer), f"{tenant}:{n}", "s", at[n])
        for n in range(TENANT_TURNS)
    ]


def ingest(folder: Path, part: int) -> int:
    with Engine(folder / "store", SETTINGS, BEFORE) as engine:
        for tenant in tenants(part):
            engine.add_batch(turns_of(tenant))
        assert engine.drain()
    return len(tenants(part)) * TENANT_TURNS


def upgrade(folder: Path, _part: int) -> int:
    """The store as the former format left it: it differs by its number alone, once the log is settled."""
    location = Location.of(folder / "store")
    write_info(location, replace(read_info(location), format_version=FORMER))
    with Engine(folder / "store", SETTINGS, BEFORE) as engine:
        check(engine, tenants())
    assert read_info(location).format_version == FORMAT_VERSION
    return TURNS


def embed(folder: Path, _part: int) -> int:
    reindex(folder / "store", AFTER)
    with Engine(folder / "store", SETTINGS, AFTER) as engine:
        check(engine, tenants())
    return TURNS


def export(folder: Path, part: int) -> int:
    (folder / "exports").mkdir(exist_ok=True)
    draft = folder / "exports" / f"{part}.draft"
    journal = Journal.open(folder / "store", writable=False)
    with draft.open("w") as file:
        reports = Reports(journal)
        for tenant in tenants(part):
            file.writelines(json.dumps(record) + "\n" for record in reports.export(tenant))
    journal.close()
    draft.rename(folder / "exports" / f"{part}.jsonl")
    return len(tenants(part)) * TENANT_TURNS


def import_(folder: Path, part: int) -> int:
    """Into another store; what an import that was cut off has stored is not stored again."""
    exported = folder / "exports" / f"{part}.jsonl"
    with exported.open() as file, Engine(folder / "other", SETTINGS, AFTER) as engine:
        for tenant, group in groupby(map(json.loads, file), itemgetter("tenant")):
            records = list(group)
            engine.call(ImportCommand(tenant, again=True, records=records))
        check(engine, tenants(part))
    return len(tenants(part)) * TENANT_TURNS


def erase(folder: Path, _part: int) -> int:
    """Some tenants of the other store, and then no byte of theirs is there."""
    gone = tenants()[::ERASED_OF]
    with Engine(folder / "other", SETTINGS, AFTER) as engine:
        for tenant in gone:
            engine.erase(tenant)
        engine.purge()
        kept = [name for name in tenants() if name not in set(gone)]
        check(engine, kept)
        assert engine.stats()["turns"] == len(kept) * TENANT_TURNS
    for name, left in ((gone[0], False), (gone[-1], False), (kept[0], True)):  # as text, of those who stay
        found = subprocess.run(["grep", "-rqF", name, str(folder / "other")])
        assert found.returncode == int(not left), f"{name}: grep ended with {found.returncode}"
    return len(gone) * TENANT_TURNS


DO = dict(zip(STAGES, (ingest, upgrade, embed, export, import_, erase), strict=True))


def check(engine: Engine, names: list[str]) -> None:
    """A sample: all turns of some tenants are there and decided, and one is found by its words."""
    for tenant in dict.fromkeys((names[0], names[len(names) // 2], names[-1])):
        assert engine.tenant_stats(tenant)["turns"] == TENANT_TURNS, tenant
        assert not engine.tenant_stats(tenant)["undecided_turns"], tenant
        n = TENANT_TURNS // 2
        hits = engine.search(tenant, said(tenant, n)).ranked(3)
        assert any(said(tenant, n) in hit.memory for hit in hits), tenant


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    folder, n = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    stage, part = units()[n]
    began_s = time.monotonic()
    turns = DO[stage](folder, part)
    spent_ms = round(1_000 * (time.monotonic() - began_s))
    figures = {"turns": turns, "ms": spent_ms, "rss_mib_max": peak_rss_bytes() >> 20}
    report(**{stage: {**figures, "disk_mib_max": disk_bytes(folder) >> 20}})


if __name__ == "__main__":
    main()
