"""Reads messages of Zep's threads, and episodes of Zep and Graphiti.

Formats: "Get messages of a thread",
https://help.getzep.com/sdk-reference/thread/get-messages-of-a-thread.md; "Get Graph Episodes",
https://help.getzep.com/sdk-reference/graph/episode/get-graph-episodes.md; "Get Group Episodes",
https://help.getzep.com/v2/sdk-reference/graph/episode/get-group-episodes.md; "Episodes",
https://www.mintlify.com/getzep/graphiti/api/episodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

from undertow.engine.base.model import time_key
from undertow.engine.readers.exports.source import UNREADABLE, json_members, json_records, members
from undertow.engine.readers.exports.turns import (
    Export,
    Said,
    dict_of,
    first_name,
    first_time,
    owner,
    unreadable,
)
from undertow.engine.readers.messages import name_of, text_of
from undertow.engine.readers.record import BadField, PackedRecord

# Messages of one session that are paired together.
_MOST_MESSAGES = 1_024


class _Item(NamedTuple):
    """A message or an episode, and its place; or why it is refused."""

    place: int
    session: tuple[str, str]
    said: Said | None = None
    refused: BadField | None = None


def zep(export: Export) -> Iterator[PackedRecord]:
    """The sessions that follow each other in the file, each paired in order of time."""
    with members(export.log) as files:
        for _, group in groupby(_items(export, files), key=lambda item: item.session):
            while items := list(islice(group, _MOST_MESSAGES)):
                errors = tuple(i.refused.at(str(export.log), i.place) for i in items if i.refused)
                said = [item.said for item in items if item.said]
                said.sort(key=lambda each: time_key(each.message.timestamp))
                record = export.record(items[-1].place, partial(export.turns, *items[0].session, said, {}))
                yield PackedRecord(record.position, record.turns, errors + record.errors)


def _items(export: Export, files: Any) -> Iterator[_Item]:
    place = 0
    try:
        for opened in json_members(files):
            for beside, raw in json_records(opened, ("messages", "episodes")):
                place += 1
                try:
                    yield _item(export, place, {**beside, **dict_of(raw)})
                except BadField as bad:
                    yield _Item(place, ("", ""), refused=bad)
    except UNREADABLE as problem:
        yield _Item(place, ("", ""), refused=unreadable(problem, place))


def _item(export: Export, place: int, raw: dict[str, Any]) -> _Item:
    tenant = owner(export, raw, "user_id", "group_id", "graph_id")
    session = name_of(raw, "thread_id", may_be_empty=True) or name_of(raw, "session_id", may_be_empty=True)
    # Version 2 has the role in role_type, and the speaker's name in role.
    role, kind = name_of(raw, "role", may_be_empty=True), name_of(raw, "role_type", may_be_empty=True)
    name = role if kind and role != kind else None
    if role is not None or kind is not None:
        name = name_of(raw, "name", may_be_empty=True) or name
    spoken = kind or role or "user"
    at = first_time(raw, "valid_at", "reference_time", "created_at")
    text = text_of(raw, "content") or ""
    role = "user" if spoken == "norole" else spoken
    said = export.said(first_name(raw, "uuid"), role, text, at=at, name=name or None)
    return _Item(place, (tenant, session or ""), said)
