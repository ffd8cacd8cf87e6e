"""Turns from an export's records: names, texts, times, keys and the branch of a conversation."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple

from undertow.engine.base.model import ExportFormat, Message, PackedTurn, Turn, key_digest, time_key
from undertow.engine.readers.exports.source import UNREADABLE
from undertow.engine.readers.messages import check_metadata, check_text, name_of, time_of
from undertow.engine.readers.pairing import own_time, pair_chat
from undertow.engine.readers.record import BadField, PackedRecord
from undertow.engine.readers.source import Log
from undertow.engine.storage.row_codec import pack_turn

# Turns of an export up to this size are sorted in memory, others in a temporary file.
_SPOOL_BYTES = 32 << 20
_SCHEMA = "Compare with docs/importing.md, or name another --format."


class Said(NamedTuple):
    """A message, with what identifies it in every export of its source."""

    id: str
    message: Message


@dataclass
class Export:
    """One export that is read. `left_out`: what became no turn, by kind, for one warning at the end."""

    log: Log
    format: ExportFormat
    after: int
    max_message_bytes: int
    left_out: Counter[str] = field(default_factory=Counter)

    def said(
        self,
        id: str,
        role: str,
        text: str,
        *,
        at: str | None,
        name: str | None = None,
        field: str = "content",
    ) -> Said:
        """A message. BadField: its text cannot be stored."""
        check_text(text, field, self.max_message_bytes)
        return Said(id, Message(role, text, name, at))

    def turns(
        self, tenant: str, session: str, said: Sequence[Said], metadata: Mapping[str, Any]
    ) -> Iterator[PackedTurn]:
        """The messages of a session, paired. Their keys come from their ids, not from the file. BadField."""
        told = {name: value for name, value in metadata.items() if value not in (None, "", [], {})}
        told["imported_from"] = self.format
        check_metadata(told)
        ids = iter([each.id for each in said])
        for pair in pair_chat([each.message for each in said]):
            key = key_digest("\x1f".join([self.format, *islice(ids, len(pair))]))
            yield pack_turn(Turn(tenant, pair, key, session, own_time(pair), told))

    def record(self, position: int, turns: Callable[[], Iterable[PackedTurn]]) -> PackedRecord:
        """The record with these turns, or with the field that is bad."""
        try:
            return PackedRecord(position, tuple(turns()))
        except BadField as bad:
            return PackedRecord(position, errors=(bad.at(str(self.log), position),))

    def guarded(self, records: Iterable[PackedRecord]) -> Iterator[PackedRecord]:
        """The records as far as the export can be read, then why it cannot."""
        position = 0
        try:
            for record in records:
                position = record.position
                yield record
        except UNREADABLE as problem:
            yield PackedRecord(position, errors=(unreadable(problem, position).at(str(self.log), None),))


def unreadable(problem: Exception, position: int) -> BadField:
    """Why nothing is read after a record."""
    cure = "Get the export again; what stands before was taken, and is not taken twice."
    return BadField(None, f"cannot be read after record {position}: {problem}", cure)


def by_time(records: Iterable[PackedRecord], after: int) -> Iterator[PackedRecord]:
    """The records in order of their first turns' times, numbered anew, those after a position.

    Exports often begin with the newest conversation, but memories are to be made in the order of events.
    """
    with SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        places = []
        for n, record in enumerate(records):
            places.append((time_key(record.turns[0].timestamp if record.turns else None), n, spool.tell()))
            pickle.dump(record, spool)
        for position, (_, _, offset) in enumerate(sorted(places), 1):
            if position > after:
                spool.seek(offset)
                yield replace(pickle.load(spool), position=position)


def branch(nodes: Mapping[str, Any], leaf: object, parent: str) -> list[tuple[str, dict[str, Any]]]:
    """The nodes from the root of a tree to a leaf, with their ids; `parent`: the field that leads upwards."""
    path: dict[str, dict[str, Any]] = {}
    while isinstance(leaf, str) and leaf not in path and isinstance(node := nodes.get(leaf), dict):
        path[leaf] = node
        leaf = node.get(parent)
    return list(path.items())[::-1]


def dict_of(raw: object, field: str | None = None) -> dict[str, Any]:
    """The value if it is an object. BadField."""
    if not isinstance(raw, dict):
        raise BadField(field, "is missing or not an object", _SCHEMA)
    return raw


def dicts_of(raw: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """The objects of a list; none if it is absent. BadField."""
    found = raw.get(field)
    if not isinstance(found, list | None):
        raise BadField(field, "must be a list", _SCHEMA)
    return [dict_of(each, f"{field}[{n}]") for n, each in enumerate(found or ())]


def first_name(raw: Mapping[str, Any], *fields: str, cure: str = _SCHEMA) -> str:
    """The first of these fields that is there and not empty. BadField."""
    for name in fields:
        if raw.get(name) != "" and (found := name_of(raw, name)):
            return found
    raise BadField(fields[0], "is missing", cure)


def first_time(raw: Mapping[str, Any], *fields: str) -> str | None:
    """The first of these fields that has a time. BadField."""
    return next((found for name in fields if (found := time_of(raw, name)) is not None), None)


def owner(export: Export, raw: Mapping[str, Any], *fields: str) -> str:
    """The tenant that was asked for, else the one that a record names. BadField."""
    cure = "Name the owner of all records with --tenant."
    return export.log.tenant or first_name(raw, *fields, cure=cure)
