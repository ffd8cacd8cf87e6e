"""An export: all that is kept of a tenant, as plain records that engine/api/transfer/import_.py takes back.

The first record is the head (`format`), the last one the end: how many records stand between them, and a
fingerprint by which an export that was cut off or edited is told from a whole one. The fingerprint does not
depend on the order of records, as that of commits differs between runs that decide the same; nor on vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from undertow.engine.api.report_format import Withheld, bad_cursor, row_report, versions_of
from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Report
from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.row_codec import job_of

FORMAT = 1
EXPORTED: tuple[Kind, ...] = ("turn", "episode", "fact", "decision", "control", "job")
MAX_PAGE_RECORDS = 10_000
MAX_PAGE_BYTES = 8 << 20
# of a vector's number in JSON, about
BYTES_PER_NUMBER = 10
FINGERPRINT_BYTES = 16


class ExportBroken(UndertowError):
    """Between two pages of its export the tenant has moved to another shard, or was erased."""


def head(tenant: str) -> Report:
    """The first record."""
    return {"kind": "export", "format": FORMAT, "tenant": tenant}


@dataclass(slots=True)
class ExportTrailer:
    """What the end of an export says of the records before it."""

    count: int = 0
    fingerprint: int = 0

    def add(self, record: Mapping[str, Any]) -> int:
        """Count a record; about how many bytes it takes. TypeError for what is no JSON."""
        words = {name: value for name, value in record.items() if name != "vector"}
        text = orjson.dumps(words, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.blake2b(text, digest_size=FINGERPRINT_BYTES).digest()
        self.count += 1
        self.fingerprint = (self.fingerprint + int.from_bytes(digest)) % (1 << 8 * FINGERPRINT_BYTES)
        return len(text) + BYTES_PER_NUMBER * len(record.get("vector") or ())

    def end(self, tenant: str) -> Report:
        """The last record."""
        return {"kind": "end", "tenant": tenant, "records": self.count, "fingerprint": self.hex}

    @property
    def hex(self) -> str:
        return f"{self.fingerprint:0{2 * FINGERPRINT_BYTES}x}"


@dataclass(frozen=True, slots=True)
class ExportCursor:
    """Where a page of an export ended. `stay` tells the tenant's life, and its time in this journal."""

    stay: str
    lsn: int = -1
    seal: ExportTrailer = field(default_factory=ExportTrailer)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From its text. InputError."""
        try:
            stay, lsn, count, fingerprint = text.split(".")
            return cls(stay, int(lsn), ExportTrailer(int(count), int(fingerprint, 16)))
        except ValueError:
            raise bad_cursor("export", text) from None

    def __str__(self) -> str:
        return f"{self.stay}.{self.lsn}.{self.seal.count}.{self.seal.hex}"


def stay_of(journal: Journal, known: Sequence[Row]) -> str:
    """`known`: the tenant's rows, the first of its log among them, which is never deleted."""
    text = f"{journal.location}\x1f{known[0].lsn}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def exported(rows: Iterable[Row], known: Sequence[Row], *, vectors: bool) -> Iterator[tuple[int, Report]]:
    """The records of `rows`, each with its row's lsn.

    `known`, oldest first: the tenant's control records and every version of its memories.
    """
    withheld = Withheld(known)
    memories = versions_of([row for row in known if row.kind != "control" and row not in withheld])
    replaced = {(m.id, m.version): m.superseded_at_seq for m in memories}
    for row in rows:
        if row in withheld or (row.kind == "job" and job_of(row).state == "pending"):
            continue  # a pending job is asked again from the log, wherever that is
        report = row_report(row)
        if row.kind == "turn":
            report["dedupe_key"] = orjson.loads(row.payload)["key"]  # which only an import needs
        if row.kind in ("episode", "fact"):
            report["superseded_at_seq"] = replaced.get((row.id or "", report["version"]))
        if vectors and row.kind in ("turn", "episode", "fact"):
            report["vector"] = None if row.vector is None else row.vector.tolist()
        yield row.lsn, report
