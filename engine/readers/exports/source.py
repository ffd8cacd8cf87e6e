"""What an export is read from: a file, a zip archive or a folder, and the JSON records in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile, ZipFile

import ijson

from undertow.engine.base.model import ExportFormat
from undertow.engine.readers.source import DAMAGED, Log

UNREADABLE = (*DAMAGED, ijson.JSONError, UnicodeDecodeError, BadZipFile, NotImplementedError)
ZIP = ".zip"
Opener = Callable[[], BinaryIO]

_CONVERSATIONS = re.compile(r"(.*/)?conversations(-[0-9]+)?\.json")
# A Slack export has a folder for each channel, with a file for each day.
SLACK_DAY = re.compile(r"(?:.*/)?([^/]+)/([0-9]{4}-[0-9]{2}-[0-9]{2})\.json")
_SCALARS = ("string", "number", "boolean")


@contextmanager
def members(log: Log) -> Iterator[dict[str, Opener]]:
    """The files of an export by name, in order: those of an archive or a folder, or the log itself.

    Opening and reading raise the errors in UNREADABLE. Nothing is unpacked to disk.
    """
    if log.is_folder:
        found = sorted(path for path in Path(log.uri).rglob("*") if path.is_file())
        yield {p.relative_to(log.uri).as_posix(): cast(Opener, partial(p.open, "rb")) for p in found}
    elif log.name.endswith(ZIP):
        with log.open() as file, ZipFile(file) as archive:
            infos = [i for i in archive.infolist() if not (i.is_dir() or i.filename.startswith("__MACOSX/"))]
            if any(info.flag_bits & 1 for info in infos):
                raise BadZipFile("it is encrypted")
            infos.sort(key=lambda info: info.filename)
            yield {info.filename: cast(Opener, partial(archive.open, info)) for info in infos}
    else:
        yield {log.name: log.unpacked}


def json_members(files: dict[str, Opener]) -> list[Opener]:
    """The files with the records: those called conversations, else every JSON file; one alone as it is."""
    if len(files) == 1:
        return list(files.values())
    chats = [files[name] for name in files if _CONVERSATIONS.fullmatch(name)]
    return chats or [files[name] for name in files if name.endswith(".json")]


def slack_or_whatsapp(files: dict[str, Opener]) -> ExportFormat | None:
    """The format, if the names of an archive's files tell it."""
    if any(map(_CONVERSATIONS.fullmatch, files)):
        return None
    if any(map(SLACK_DAY.fullmatch, files)):
        return "slack"
    return "whatsapp" if any(name.endswith(".txt") for name in files) else None


def json_records(opened: Opener, containers: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], Any]]:
    """The records of a JSON file one by one, each with the plain fields beside their list.

    They are the elements of an array, or of an object's list of one of these names; else the file's objects,
    one a line.
    """
    with opened() as file:
        prefix, beside = _shape(file, containers)
    with opened() as file:
        # of several objects with lists, only the first one's fields are known: those that follow are an error
        for raw in ijson.items(file, prefix, use_float=True, multiple_values=not prefix):
            yield beside, raw


def _shape(file: BinaryIO, containers: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    prefix, beside = "", {}
    for place, event, value in ijson.parse(file, use_float=True, multiple_values=True):
        if not place and event == "start_array":
            return "item", {}
        if not place and event == "end_map":
            break
        if not place and event == "map_key" and value in containers:
            prefix = f"{value}.item"
        elif event in _SCALARS and "." not in place:
            beside[place] = value
    return prefix, beside if prefix else {}
