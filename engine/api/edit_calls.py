"""Engine's calls by which users change what is remembered: other words for a memory, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from undertow.engine.api.memory_updates import Updated, Wording, memory_text, replacement
from undertow.engine.api.policy_change import check_editable
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.config import Settings
from undertow.engine.base.model import MemoryKind
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.row_codec import ControlKind, memory_of
from undertow.engine.tenants.generations import is_change
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry
from undertow.engine.tenants.tenant import Tenant


class EditCalls(ABC):
    """What Engine is made of beside its steps; see there."""

    settings: Settings
    journal: Journal
    tenants: TenantRegistry
    scheduler: Scheduler
    _reports: Reports

    @abstractmethod
    def _check_sound(self) -> None: ...

    @abstractmethod
    def _stored(self, memory_id: str, tenant: str | None) -> Row: ...

    @abstractmethod
    def _tenant(self, name: str) -> Tenant: ...

    @abstractmethod
    def _log(self, name: str, kind: ControlKind, bodies: Sequence[Mapping[str, Any]]) -> Tenant | None: ...

    def update(self, memory_id: str, text: Wording, *, tenant: str | None = None) -> Updated:
        """Put other words in the place of a memory, if given only of one of this tenant's.

        An episode or fact has a new version once the cursor reaches the record; until then it is out of
        search. Its sources stay, and its history. A turn is deleted, and another one with its session, time
        and metadata added at the log's end, in one commit: durable and searchable on return. `text` becomes
        its one message; give messages, as to `add`, for an exchange. InputError; ArenaFull for a turn;
        PolicyConflict for an episode or fact, see `set_policy`.
        """
        self._check_sound()
        row = self._reports.row(memory_id, self._stored(memory_id, tenant).tenant_key)
        if row.kind == "turn":
            return self._replace_turn(row, text)
        self._check_editable(row)
        kind: MemoryKind = "episode" if row.kind == "episode" else "fact"
        words = memory_text(kind, text)
        self._log(row.tenant, "update", [{"memory_id": memory_id, "kind": kind, "text": words}])
        return Updated(memory_id, kind)

    def _replace_turn(self, row: Row, text: Wording) -> Updated:
        turn = replacement(row, text, self.settings.max_message_bytes)
        tenant = self._tenant(row.tenant)
        receipt = self.scheduler.replace(tenant, _deletion(row), turn)
        tenant.redact_turn(row.seq)
        self.journal.delete_rows([row.lsn])
        assert receipt.id is not None, "no turn had its key, which is made of the old turn's id"
        return Updated(receipt.id, "turn")

    def delete(self, memory_id: str, *, tenant: str | None = None) -> str:
        """Delete a turn, an episode or a fact by id, if given only one of this tenant; returns its kind.

        A turn's text and vector are gone from every answer at once; what rests on it is remade
        when the cursor reaches the record. An episode or fact goes alone, out of search at once; its
        history stays. PolicyConflict for one of these, see `set_policy`.
        """
        self._check_sound()
        row = self._stored(memory_id, tenant)
        if row.kind == "turn":
            self._delete_turn(row)
        else:
            self._check_editable(row)
            self._log(row.tenant, "delete", [{"memory_id": memory_id, "kind": row.kind}])
        return row.kind

    def _check_editable(self, row: Row) -> None:
        """PolicyConflict for an episode or fact that a change of policy replaces, or has replaced."""
        try:
            tenant = self._tenant(row.tenant)
        except ArenaFull:
            if any(is_change(control) for control in self.tenants.stored(row.tenant, "control")):
                raise
            return
        check_editable(tenant, memory_of(row))

    def _delete_turn(self, row: Row) -> None:
        tenant = self._log(row.tenant, "delete", [_deletion(row)])
        if tenant is not None:
            tenant.redact_turn(row.seq)
        self.journal.delete_rows([row.lsn])


def _deletion(row: Row) -> dict[str, Any]:
    """What the log still needs of a deleted turn: its dedupe key, and the time that later ones inherit."""
    turn = orjson.loads(row.payload)
    kept = {"key": turn["key"], "session": turn["session"], "timestamp": row.timestamp}
    return {"turn_seq": row.seq, "id": row.id, **kept}
