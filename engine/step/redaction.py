"""Redaction: a deleted turn's words also leave the rows that were written from it before the deletion."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.model import Memory
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.row_codec import control_row, memory_of, outdated_updates
from undertow.engine.tenants.tenant import Tenant


class Redaction:
    """Owns the list of rows that commits make obsolete, and deletes them.

    Where a commit is quick, an event loop may run the step, and must not wait for a deletion. So a step
    deletes only if rows were due before it began, as the loop sees in `is_due`; then it deletes all.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # By id of a memory that was remade without a deleted turn: its first version without the words.
        self._first_clean_versions: dict[str, int] = {}
        # Keys of tenants whose updates of such memories were redacted.
        self._redacted_keys: set[str] = set()
        # whether the commit of this step deletes nothing
        self._waits = False

    @property
    def is_due(self) -> bool:
        """Whether there are rows to be deleted after a commit."""
        return bool(self._first_clean_versions)

    def begin_step(self) -> None:
        self._waits = self._journal.commits_quickly and not self.is_due

    def redact(self, tenant: Tenant, seq: int, remade: Sequence[Memory]) -> list[Row]:
        """Redact what was written of these memories before record `seq`, which deletes a turn.

        Later updates by users stay: the turn was gone by then. Returns the redacted updates for the commit.
        """
        versions = {memory.id: memory.version for memory in remade}
        self._first_clean_versions.update(versions)
        rows = []
        for control in tenant.redact_updates(seq, versions.keys()):
            rows.append(control_row(tenant.name, tenant.key, control))
            self._redacted_keys.add(tenant.key)
        return rows

    def delete_obsolete_rows(self) -> None:
        """After a commit: delete the versions and updates that new rows replace; not beside a reader."""
        waits, self._waits = self._waits or self._journal.is_read_beside, False
        if waits or not self.is_due:
            return
        clean, self._first_clean_versions = self._first_clean_versions, {}
        versions = self._journal.read(ids=list(clean), kinds=["episode", "fact"], vectors=False)
        older = [row.lsn for row in versions if row.id and memory_of(row).version < clean[row.id]]
        self._journal.delete_rows([*older, *self._obsolete_updates()])

    def _obsolete_updates(self) -> list[int]:
        """The lsns of the updates whose redacted copies were committed."""
        keys, self._redacted_keys = self._redacted_keys, set()
        if not keys:
            return []
        rows = self._journal.read(tenant_keys=sorted(keys), kinds=["control"], vectors=False)
        return outdated_updates(rows)
