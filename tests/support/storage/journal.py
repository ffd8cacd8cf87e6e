"""What test_journal.py and test_journal_files.py share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from undertow.engine.storage.journal import Journal, Kind, Row

DIM = 8


def row(journal: Journal, tenant: str, seq: int, text: str = "words", kind: Kind = "turn") -> Row:
    vector = np.full(DIM, seq % 7, dtype=np.float16) if kind == "turn" else None
    payload = json.dumps({"text": text}).encode()
    key = journal.info.tenant_key(tenant)
    return Row(kind, tenant, key, seq, payload, f"{tenant}-{seq}", "2026-03-01", vector)


def contents(journal: Journal, **filters: Any) -> list[tuple[int, str, str, int, bytes, bytes | None]]:
    return [
        (r.lsn, r.kind, r.tenant, r.seq, r.payload, None if r.vector is None else r.vector.tobytes())
        for r in journal.read(**filters)
    ]


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
