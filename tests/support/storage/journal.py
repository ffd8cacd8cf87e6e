"""Rows for the tests of the journal, journals that are opened, and what they and their stores hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.journal_rows import to_rows, to_table
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location

DIM = 8


def row(text: str = "words", tenant: str = "ann", seq: int = 0, kind: Kind = "turn") -> Row:
    """A row with its text as its id and payload. The tenant's name stands for its key."""
    vector = np.full(DIM, seq % 7, dtype=np.float16) if kind == "turn" else None
    return Row(kind, tenant, tenant, seq, text.encode(), text, "2026-03-01", vector)


def contents(journal: Journal, **filters: Any) -> list[tuple[int, str, str, int, bytes, bytes | None]]:
    return [
        (r.lsn, r.kind, r.tenant, r.seq, r.payload, None if r.vector is None else r.vector.tobytes())
        for r in journal.read(**filters)
    ]


def texts(journal: Journal) -> list[str]:
    return [r.payload.decode() for r in journal.read()]


def stored(store: Path | Location) -> list[str]:
    return texts(Journal.open(store, writable=False))


def taken_over(store: Path | Location) -> Journal:
    """In a bucket the last to open takes over unasked."""
    return Journal.open(store, writable=True, takeover=Location.of(store).folder is not None)


def raw_texts(store: Path | Location) -> list[str]:
    table = LanceLog(Location.of(store) / "journal.lance")
    return [
        r.payload.decode() for b in table.scanner(to_table([]).schema.names).to_batches() for r in to_rows(b)
    ]
