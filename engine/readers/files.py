"""Finds log files and detects their format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import ijson
import orjson

from undertow.engine.base.model import BadInput, InputError, LogFormat
from undertow.engine.readers.exports.source import (
    UNREADABLE,
    ZIP,
    Opener,
    json_members,
    members,
    slack_or_whatsapp,
)
from undertow.engine.readers.exports.whatsapp import is_whatsapp
from undertow.engine.readers.source import DAMAGED, Log, objects_below
from undertow.engine.storage.location import S3
from undertow.engine.storage.store_info import is_store

# A file of this name is read as JSON lines.
JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
SUFFIXES = (*JSON_LINES, ".parquet", ".json", ZIP, "_chat.txt")

# A listing with one of these contains a store or a cluster's root.
_OURS_ON_S3 = ("/store.json", "/map/00000001.json")
_PARQUET_MAGIC = b"PAR1"
_MARKS: dict[str, LogFormat] = {
    "conversation": "locomo",
    "haystack_sessions": "longmemeval",
    "messages": "messages",
    "mapping": "chatgpt",
    "chat_messages": "claude",
    "memory": "mem0",
    "episodes": "zep",
    "source_description": "zep",
    "namespace": "langgraph",
}
# Where the first object stands that is to have one of these fields.
_PLACES = ("", "item", "results.item", "items.item")
# An item of LangGraph is shorter.
_LINE_BYTES = 1 << 20
_CURE = "Name the format with --format."
_SLACK_FILES = ("channels.json", "users.json")


def find_logs(places: Sequence[Path | str]) -> Iterator[Log]:
    """The logs at these paths and s3:// addresses and below them, sorted, each once.

    Paths are compared part by part, so that a folder copied to a bucket gives the same order. Stores and
    roots of clusters below a folder are skipped; the folder of a Slack export is one log. InputError if a
    place does not exist, cannot be listed, or has no log.
    """
    seen: set[str] = set()
    for place in sorted(places, key=_parts):
        on_s3 = isinstance(place, str) and place.startswith(S3)
        for log in _logs_on_s3(str(place)) if on_s3 else _logs_at(Path(place)):
            if log.uri not in seen:
                seen.add(log.uri)
                yield log


def _parts(place: Path | str) -> tuple[str, ...]:
    return tuple(str(place).split("/")) if isinstance(place, str) and "://" in place else Path(place).parts


def _logs_at(path: Path) -> list[Log]:
    if not path.is_dir():
        if not path.exists():
            raise _refuse(path, "does not exist", "Check the path.")
        return [Log.of(path)]
    if _is_slack(path):
        return [Log.of(path)]
    if _is_ours(path):
        raise _refuse(path, "is an Undertow store", "Name the folder of the logs.")
    found = [Log.of(file) for file in sorted(_logs_under(path))]
    if not found:
        raise _refuse(path, "holds no log", f"Known are {', '.join(SUFFIXES)}.")
    return found


def _logs_under(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        if _is_slack(here):
            folders.clear()
            yield here
            continue
        folders[:] = [name for name in folders if not _is_ours(here / name)]
        yield from (here / n for n in names if _may_be_log(n) and (here / n).is_file())


def _may_be_log(name: str) -> bool:
    """By its name. Android's chats have WhatsApp in theirs, in every language."""
    return name.endswith(SUFFIXES) or (
        name.endswith(".txt") and "whatsapp" in name.rpartition("/")[2].lower()
    )


def _is_slack(folder: Path) -> bool:
    """Whether the folder is an unpacked export of Slack, which is one log."""
    return all((folder / name).is_file() for name in _SLACK_FILES)


def _is_ours(folder: Path) -> bool:
    """Whether the folder is a store, or the root of a cluster."""
    return is_store(folder) or ((folder / "map").is_dir() and (folder / "shards").is_dir())


def _logs_on_s3(address: str) -> list[Log]:
    try:
        listed = dict(objects_below(address))
    except OSError as problem:
        raise _refuse(address, f"cannot be listed: {problem}", "Check the address.") from None
    if not listed:
        raise _refuse(address, "does not exist", "Check the address.")
    if list(listed) == [address]:
        return [Log(address, address, listed[address])]
    ours = _ours_among(listed)
    found = [
        Log(uri, uri, size_bytes)
        for uri, size_bytes in sorted(listed.items(), key=lambda item: _parts(item[0]))
        if _may_be_log(uri) and not any(uri.startswith(folder) for folder in ours)
    ]
    if not found:
        raise _refuse(address, "holds no log", f"Known are {', '.join(SUFFIXES)}.")
    return found


def _ours_among(addresses: Iterable[str]) -> set[str]:
    """The stores and cluster roots among these objects, each with a trailing slash."""
    return {a.removesuffix(mark) + "/" for mark in _OURS_ON_S3 for a in addresses if a.endswith(mark)}


def detect_format(path: Log | Path) -> LogFormat:
    """The format of a file, by its suffix and first bytes, else by its first known field name.

    InputError if the format is unknown, or the file cannot be read.
    """
    log = Log.of(path)
    if log.name.endswith(JSON_LINES):
        return _of_lines(log)
    try:
        with members(log) as files:
            if found := slack_or_whatsapp(files):
                if found == "whatsapp" and not is_whatsapp(files):
                    raise _refuse(log, "has no line of a WhatsApp chat", _CURE)
                return found
            for opened in json_members(files)[:1]:
                return _format_of(log, opened)
    except DAMAGED as problem:
        raise _refuse(log, f"cannot be read: {problem}", "Check its permissions.") from None
    except UNREADABLE as problem:
        raise _refuse(log, f"is not of a known format: {problem}", _CURE) from None
    raise _refuse(log, "holds no file of a known export", _CURE)


def _of_lines(log: Log) -> LogFormat:
    """By the first line. What is wrong with a line is told when it is read."""
    try:
        with log.unpacked() as file:
            first = orjson.loads(file.readline(_LINE_BYTES))
    except (orjson.JSONDecodeError, *DAMAGED):
        return "messages"
    is_item = isinstance(first, dict) and {"namespace", "key", "value"} <= first.keys()
    return "langgraph" if is_item else "messages"


def _format_of(log: Log, opened: Opener) -> LogFormat:
    with opened() as file:
        if file.read(4) == _PARQUET_MAGIC:
            return "parquet"
    with opened() as file:
        for prefix, event, value in ijson.parse(file):
            if event == "map_key" and prefix in _PLACES and value in _MARKS:
                return _telling(log, prefix, value)
            if event == "end_map" and prefix in _PLACES:
                break
    raise _refuse(log, f"has none of the fields {', '.join(_MARKS)}", _CURE)


def _telling(log: Log, prefix: str, field: str) -> LogFormat:
    found = _MARKS[field]
    if found == "messages" and prefix == "item":
        raise _refuse(log, "is a JSON array of message lines", "Write one object a line (.jsonl).")
    return found


def _refuse(place: object, reason: str, cure: str) -> InputError:
    return InputError(BadInput(str(place), None, None, reason, cure))
