"""Repair of a store whose write-ahead log is damaged: the rows that cannot be read are given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from undertow.engine.policies.base import Thresholds
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.location import Location
from undertow.engine.storage.row_codec import Control, control_of, control_row, turn_id
from undertow.engine.storage.wal import Damage
from undertow.engine.tenants.catalog import TenantCatalog


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What was given up. `lost`: by tenant the seqs of its missing records, which now count as deleted turns.

    Records after the last one that is left are not in it: nothing shows that they existed.
    """

    damages: Sequence[Damage]
    lost: Mapping[str, Sequence[int]]


def repair(store: Location, thresholds: Thresholds) -> RepairReport:
    """Open a store without the damaged rows of its log, and close the gaps that they leave.

    A log without a record cannot be replayed, so each missing one is marked as a deleted turn; sent again,
    the turn is new. `thresholds` are for a tenant whose own were lost. StoreError.
    """
    with closing(Journal.open(store, writable=True, repair=True)) as journal:
        catalog = TenantCatalog(journal)
        seqs: dict[tuple[str, str], set[int]] = defaultdict(set)
        for row in _log_rows(journal, catalog):
            seqs[row.tenant, row.tenant_key] |= _accounted(row)
        lost: dict[str, Sequence[int]] = {}
        marks: list[Row] = []
        for (name, key), known in sorted(seqs.items()):
            if -1 not in known:
                marks.append(control_row(name, key, Control("settings", -1, thresholds.body)))
            if missing := sorted(set(range(max(known) + 1)) - known):
                lost[name] = missing
                marks += _deletions(name, key, catalog.incarnation_of(key), missing, max(known) + 1)
        journal.append(marks)
        return RepairReport(journal.given_up, lost)


def _log_rows(journal: Journal, catalog: TenantCatalog) -> Iterator[Row]:
    """The records of the logs of all tenants that are here."""
    rows = journal.read(kinds=["turn", "control"], vectors=False)
    return (row for row in rows if not catalog.is_erased(row) and row.tenant_key not in catalog.departed)


def _accounted(row: Row) -> set[int]:
    """The seqs that a row accounts for: its own, and that of a turn that it deletes; -1 for settings."""
    if row.kind == "turn":
        return {row.seq}
    control = control_of(row)
    # a policy has seq -1 too, and stands for no thresholds
    own = {control.seq} if control.seq >= 0 or control.kind == "settings" else set()
    return own | ({control.body["turn_seq"]} if "turn_seq" in control.body else set())


def _deletions(name: str, key: str, incarnation: int, missing: Sequence[int], next_seq: int) -> list[Row]:
    """Records that delete the missing turns."""
    rows = []
    for seq, lost in enumerate(missing, next_seq):
        id = turn_id(name, incarnation, lost)
        body = {"turn_seq": lost, "id": id, "key": f"lost {id}", "session": "", "timestamp": None}
        rows.append(control_row(name, key, Control("delete", seq, body)))
    return rows
