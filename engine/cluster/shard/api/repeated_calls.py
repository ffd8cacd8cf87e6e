"""Recognises calls that were carried out before their answer got lost, by what is logged."""

from __future__ import annotations

from collections.abc import Iterator

from undertow.engine.api.engine import Engine
from undertow.engine.base.queries import DeleteCommand, UpdateCommand
from undertow.engine.base.results import Updated
from undertow.engine.storage.row_codec import Control, control_of


def ends_in_flush(engine: Engine, tenant: str) -> bool:
    """Whether the last record of the tenant's log is a flush. UnknownTenant."""
    engine.tenants.require(tenant)
    last = max(engine.tenants.stored(tenant, "turn", "control"), key=lambda row: row.seq, default=None)
    return last is not None and last.kind == "control" and control_of(last).kind == "flush"


def edited(engine: Engine, command: UpdateCommand | DeleteCommand) -> Updated | str | None:
    """The result of the command, if it is logged here."""
    return _updated(engine, command) if isinstance(command, UpdateCommand) else _deleted(engine, command)


def _deleted(engine: Engine, command: DeleteCommand) -> str | None:
    """The kind of the memory."""
    for control in _controls(engine, command.tenant):
        ids = control.body.get("id"), control.body.get("memory_id")
        if control.kind == "delete" and command.memory_id in ids:
            return str(control.body.get("kind", "turn"))
    return None


def _updated(engine: Engine, command: UpdateCommand) -> Updated | None:
    """An update of an episode or fact is logged if its last change is to this text."""
    last: Control | None = None
    for control in _controls(engine, command.tenant):
        if control.body.get("id") == command.memory_id and "replaced_by" in control.body:
            return Updated(control.body["replaced_by"], "turn")
        if control.body.get("memory_id") == command.memory_id:
            last = control
    text = command.text
    if last is None or not isinstance(text, str) or last.body.get("text") != text.strip():
        return None
    return Updated(command.memory_id, last.body["kind"])


def _controls(engine: Engine, tenant: str | None) -> Iterator[Control]:
    """The control records of one tenant's log, or of all."""
    keys = None if tenant is None else [engine.journal.info.tenant_key(tenant)]
    for row in engine.journal.read(tenant_keys=keys, kinds=["control"], vectors=False):
        yield control_of(row)
