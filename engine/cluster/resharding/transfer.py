"""The rows of moving tenants, read from the journal of the shard that they leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import orjson

from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.lance_log import LANCE_ERRORS
from undertow.engine.tenants.migration_records import Move, MoveError, NotYet, move_of

# the rows of a tenant's log and memories
CONTENTS = tuple(kind for kind in get_args(Kind) if kind not in ("move", "tombstone", "epoch"))


class TenantTransfer:
    """The rows and tombstones of sealed tenants in the journal of their source."""

    def __init__(self, journal: Journal, keys: Sequence[str], to: str, version: int) -> None:
        """NotYet; MoveError: the journal has not sealed one of them for this move."""
        self._journal = journal
        self._keys = keys
        self._stones: dict[str, Mapping[str, Any]] = {}
        sealed: set[str] = set()
        with reading(journal):
            for row in journal.read(tenant_keys=keys, kinds=["tombstone", "move"], vectors=False):
                if row.kind == "tombstone":
                    self._stones[row.tenant_key] = orjson.loads(row.payload)
                elif move_of(row) == Move("sealed", to, version):
                    sealed.add(row.tenant_key)
        if missing := len(set(keys) - sealed):
            raise MoveError(f"{journal.location} has not sealed {missing} tenants for this move.")
        self.names: dict[str, str] = {}
        self.row_count = 0
        # by key: the last record of the log, and of those that are decided
        self._logged: dict[str, int] = {}
        self._decided: dict[str, int] = {}

    def tombstones(self, lsn: int) -> dict[str, dict[str, Any]]:
        """The tombstones of earlier lives, by key, for a journal at `lsn`. Erased rows stay behind.

        Their certificates are issued at the target, once no rows are left at the source.
        """
        return {
            key: {**stone, "lsn": lsn, "rows_elsewhere": stone["rows"]} for key, stone in self._stones.items()
        }

    def rows(self) -> Iterator[Row]:
        """The rows of the tenants' present lives, each tenant's in the order of its log. NotYet."""
        with reading(self._journal):
            yield from self._rows()

    def _rows(self) -> Iterator[Row]:
        last: dict[str, int] = {}
        for row in self._journal.read(tenant_keys=self._keys, kinds=CONTENTS):
            key = row.tenant_key
            if key in self._stones and row.lsn < self._stones[key]["lsn"]:
                continue
            if row.lsn <= last.get(key, -1):
                raise MoveError(f"{self._journal.location} is out of order at row {row.lsn}.")
            last[key] = row.lsn
            self.names[key] = row.tenant
            self.row_count += 1
            if row.kind in ("turn", "control"):
                self._logged[key] = max(row.seq, self._logged.get(key, -1))
            elif row.kind == "decision":
                self._decided[key] = row.seq  # lower than before where the log is read again
            yield row

    def behind(self) -> list[str]:
        """Names of the tenants with undecided records; once `rows` is read."""
        return sorted(
            self.names[key] for key, seq in self._logged.items() if seq > self._decided.get(key, -1)
        )


@contextmanager
def reading(journal: Journal) -> Iterator[None]:
    """NotYet for errors of reading another shard's journal."""
    try:
        yield
    except LANCE_ERRORS as error:
        raise NotYet(
            f"{journal.location} cannot be read: {error}. It may have been purged meanwhile; try again."
        ) from error
