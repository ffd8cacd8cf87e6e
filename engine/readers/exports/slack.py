"""Reads a Slack workspace export: the zip archive, or its folder.

Formats: "How to read Slack data exports", https://slack.com/help/articles/220556107; "message event",
https://docs.slack.dev/reference/events/message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from undertow.engine.base.model import BadInput, PackedTurn
from undertow.engine.readers.exports.source import SLACK_DAY, UNREADABLE, Opener, json_records, members
from undertow.engine.readers.exports.turns import Export, Said, dict_of, dicts_of, first_name, owner
from undertow.engine.readers.messages import name_of, text_of, time_of
from undertow.engine.readers.record import BadField, PackedRecord

# The kinds of message that somebody wrote; others tell of joins, topics, pins and the like.
_WRITTEN = (None, "bot_message", "me_message", "thread_broadcast", "file_share", "file_comment")
_LINK = re.compile(r"<([@#!]?)([^|<>]+)(?:\|([^<>]*))?>")


def slack(export: Export) -> Iterator[PackedRecord]:
    """The days of all channels in order, one record each. A bad message is left out alone.

    A session is a channel's day, or a thread's replies of all days. Every speaker is a user with a name.
    """
    with members(export.log) as files:
        names = _names(files)
        days = sorted((m[2], m[1], name) for name in files if (m := SLACK_DAY.fullmatch(name)))
        for position, (day, channel, name) in enumerate(days, 1):
            if position > export.after:
                yield _day(export, position, f"{channel} {day}", channel, files[name], names)


def _names(files: Mapping[str, Opener]) -> dict[str, str]:
    """The members' names by their ids."""
    names = {}
    for file in (name for name in files if name.rsplit("/", 1)[-1] in ("users.json", "org_users.json")):
        for _, raw in json_records(files[file], ()):
            if isinstance(raw, dict) and isinstance(raw.get("id"), str):
                names[raw["id"]] = _shown(raw) or raw["id"]
    return names


def _shown(user: Mapping[str, Any]) -> str | None:
    profile = user.get("profile")
    places = [profile, user] if isinstance(profile, dict) else [user]
    found = (place.get(field) for place in places for field in ("display_name", "real_name", "name"))
    return next((name for name in found if isinstance(name, str) and name.strip()), None)


def _day(
    export: Export, position: int, day: str, channel: str, opened: Opener, names: Mapping[str, str]
) -> PackedRecord:
    sessions: dict[str, list[Said]] = {}
    errors: list[BadInput] = []
    source, n = str(export.log), -1
    try:
        for n, (_, raw) in enumerate(json_records(opened, ())):
            try:
                said = _said(export, channel, dict_of(raw), names)
            except BadField as bad:
                errors.append(bad.within(f"{day}[{n}]").at(source, position))
                continue
            if said is not None:
                thread = raw.get("thread_ts", raw["ts"])
                session = day if thread == raw["ts"] else f"{channel} thread {thread:.32}"
                sessions.setdefault(session, []).append(said)
    except UNREADABLE as problem:
        reason = f"cannot be read after {n + 1} messages: {problem}"
        errors.append(BadInput(source, position, day, reason, "Export again; the other days are read."))

    def turns() -> Iterator[PackedTurn]:
        for session, said in sessions.items():
            yield from export.turns(owner(export, {}), session, said, {"channel": channel})

    record = export.record(position, turns)
    return PackedRecord(position, record.turns, (*errors, *record.errors))


def _said(export: Export, channel: str, raw: dict[str, Any], names: Mapping[str, str]) -> Said | None:
    if raw.get("type") != "message" or text_of(raw, "subtype") not in _WRITTEN:
        export.left_out["notices"] += 1
        return None
    ts = first_name(raw, "ts")
    try:
        at = time_of({"ts": float(ts)}, "ts")
    except ValueError:  # BadField is one
        raise BadField("ts", f"{ts!r:.80} is not a number of epoch seconds") from None
    if not isinstance(raw.get("thread_ts", ts), str):
        raise BadField("thread_ts", "must be text")
    lines = [_plain(text_of(raw, "text") or "", names)]
    for file in dicts_of(raw, "files"):
        lines.append(f"[file: {text_of(file, 'name') or 'unnamed'}]")
    text = "\n".join(filter(None, lines))
    if not text.strip():
        export.left_out["empty messages"] += 1
        return None
    edited = raw.get("edited")
    version = edited.get("ts") if isinstance(edited, dict) else None
    id = f"{channel}/{ts}/{version}" if version else f"{channel}/{ts}"
    return export.said(id, "user", text, at=at, name=_speaker(raw, names), field="text")


def _speaker(raw: dict[str, Any], names: Mapping[str, str]) -> str:
    user = name_of(raw, "user", may_be_empty=True)
    if not user:
        return first_name(raw, "username", "bot_id")
    profile = raw.get("user_profile")
    return names.get(user) or (_shown(profile) if isinstance(profile, dict) else None) or user


def _plain(text: str, names: Mapping[str, str]) -> str:
    """Slack's markup as people read it: mentions by name, links with their labels."""

    def shown(link: re.Match[str]) -> str:
        kind, target, label = link.groups()
        if kind == "":
            return f"{label} ({target})" if label and label != target else target
        if kind == "@":
            return "@" + (label or names.get(target, target))
        return ("#" if kind == "#" else "@") + (label or target).removeprefix("@")

    return _LINK.sub(shown, text).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
