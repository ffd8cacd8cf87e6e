"""Rows and readers that the tests of fencing share."""

from __future__ import annotations

from pathlib import Path

from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.journal_rows import to_rows, to_table
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location


def row(text: str, tenant: str = "ann") -> Row:
    return Row("turn", tenant, tenant, 0, text.encode(), text)


def texts(journal: Journal) -> list[str]:
    return [r.payload.decode() for r in journal.read()]


def stored(store: Path | Location) -> list[str]:
    return texts(Journal.open(store, writable=False))


def taken_over(store: Path) -> Journal:
    return Journal.open(store, writable=True, takeover=True)


def raw_texts(store: Path) -> list[str]:
    table = LanceLog(Location.of(store) / "journal.lance")
    return [
        r.payload.decode() for b in table.scanner(to_table([]).schema.names).to_batches() for r in to_rows(b)
    ]
