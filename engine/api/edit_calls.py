"""The engine's commands on single memories: update and delete. MemoryApi documents them."""

from __future__ import annotations

from typing import Any

import orjson

from undertow.engine.api.memory_updates import memory_text, replacement
from undertow.engine.api.policy_change import check_editable
from undertow.engine.api.search_calls import SearchCalls
from undertow.engine.base.model import MemoryKind
from undertow.engine.base.queries import DeleteCommand, UpdateCommand
from undertow.engine.base.results import Updated, Wording
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import memory_of
from undertow.engine.tenants.generations import is_change
from undertow.engine.tenants.registry import ArenaFull


class EditCalls(SearchCalls):
    """A part of Engine."""

    def _update(self, command: UpdateCommand) -> Updated:
        self._check_sound()
        memory_id = command.memory_id
        row = self._reports.row(memory_id, self._stored(memory_id, command.tenant).tenant_key)
        if row.kind == "turn":
            return self._replace_turn(row, command.text)
        self._check_editable(row)
        kind: MemoryKind = "episode" if row.kind == "episode" else "fact"
        words = memory_text(kind, command.text)
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

    def _delete(self, command: DeleteCommand) -> str:
        self._check_sound()
        row = self._stored(command.memory_id, command.tenant)
        if row.kind == "turn":
            self._delete_turn(row)
        else:
            self._check_editable(row)
            self._log(row.tenant, "delete", [{"memory_id": command.memory_id, "kind": row.kind}])
        return row.kind

    def _check_editable(self, row: Row) -> None:
        """PolicyConflict for an episode or fact that a change of policy replaces or has replaced."""
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
    """What the log keeps of a deleted turn: its dedupe key, and the time that later turns inherit."""
    turn = orjson.loads(row.payload)
    kept = {"key": turn["key"], "session": turn["session"], "timestamp": row.timestamp}
    return {"turn_seq": row.seq, "id": row.id, **kept}
