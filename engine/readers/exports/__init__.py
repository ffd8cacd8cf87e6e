"""Exports of other memory systems, account exports and chat logs, as turns: one reader a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from undertow.engine.base.model import ExportFormat, PackedTurn
from undertow.engine.readers.exports.chatgpt import chatgpt
from undertow.engine.readers.exports.claude import claude
from undertow.engine.readers.exports.langgraph import langgraph
from undertow.engine.readers.exports.mem0 import mem0
from undertow.engine.readers.exports.slack import slack
from undertow.engine.readers.exports.source import json_members, json_records, members
from undertow.engine.readers.exports.turns import Export, by_time
from undertow.engine.readers.exports.whatsapp import whatsapp
from undertow.engine.readers.exports.zep import zep
from undertow.engine.readers.record import PackedRecord
from undertow.engine.readers.source import Log

__all__ = ["EXPORTS", "WITHOUT_TENANT", "export_records"]

_Parse = Callable[[Export, Any], Iterator[PackedTurn]]


def _each(parse: _Parse, *containers: str) -> Callable[[Export], Iterator[PackedRecord]]:
    """Reads JSON whose records are parsed one by one; `containers`: names of an object's list of them."""

    def read(export: Export) -> Iterator[PackedRecord]:
        position = 0
        with members(export.log) as files:
            for opened in json_members(files):
                for _, raw in json_records(opened, containers):
                    position += 1
                    yield export.record(position, partial(parse, export, raw))

    return read


EXPORTS: dict[ExportFormat, Callable[[Export], Iterator[PackedRecord]]] = {
    "chatgpt": _each(chatgpt),
    "claude": _each(claude),
    "whatsapp": whatsapp,
    "slack": slack,
    "mem0": _each(mem0, "results"),
    "zep": zep,
    "langgraph": _each(langgraph, "items"),
}
WITHOUT_TENANT = ("chatgpt", "claude", "whatsapp", "slack")
# They are read in the order of their files; the others in order of time.
_IN_ORDER = ("whatsapp", "slack")


def export_records(
    log: Log, format: ExportFormat, *, after: int, max_message_bytes: int
) -> Iterator[PackedRecord]:
    """The records of an export, then a warning with the counts of what was left out."""
    export = Export(log, format, after, max_message_bytes)
    records = export.guarded(EXPORTS[format](export))
    position = after
    for record in records if format in _IN_ORDER else by_time(records, after):
        position = max(position, record.position)
        yield record
    left_out = ", ".join(f"{count:,} {what}" for what, count in export.left_out.items() if count)
    if left_out:
        yield PackedRecord(position, warnings=(f"{log}: left out: {left_out}",))
