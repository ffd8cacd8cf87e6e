"""Which files to read, and what format each is in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import ijson

from undertow.engine.model import BadInput, InputError
from undertow.engine.readers.jsonl import DAMAGED, open_log
from undertow.engine.store import is_store

LogFormat = Literal["messages", "parquet", "locomo", "longmemeval"]
Format = Literal["auto"] | LogFormat

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet", ".json")

_PARQUET_MAGIC = b"PAR1"
_MARKS: dict[str, LogFormat] = {
    "conversation": "locomo",
    "haystack_sessions": "longmemeval",
    "messages": "messages",
}
_CURE = "Name the format: messages, parquet, locomo or longmemeval."


def iter_paths(paths: Sequence[Path]) -> Iterator[Path]:
    """`paths` sorted, each folder replaced by the log files under it, sorted; none twice.

    Undertow stores under a folder are passed over: what lies there are no logs.
    Raises InputError for a path that does not exist or a folder that holds no log.
    """
    seen: set[Path] = set()
    for path in sorted(paths):
        if path.is_dir():
            if is_store(path):
                raise _refuse(path, "is an Undertow store", "Name the folder of the logs.")
            found = sorted(_logs_under(path))
            if not found:
                raise _refuse(path, "holds no log", f"Known are {', '.join(SUFFIXES)}.")
        elif path.exists():
            found = [path]
        else:
            raise _refuse(path, "does not exist", "Check the path.")
        for file in found:
            if (key := file.resolve()) not in seen:
                seen.add(key)
                yield file


def _logs_under(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [name for name in folders if not is_store(here / name)]
        yield from (here / n for n in names if n.endswith(SUFFIXES) and (here / n).is_file())


def detect_format(path: Path) -> LogFormat:
    """The format of a file, by its suffix and first bytes, else by the first telling field name.

    Raises InputError where neither tells, and where the file cannot be read.
    """
    if path.name.endswith((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")):
        return "messages"
    try:
        with open_log(path) as log:
            if log.read(4) == _PARQUET_MAGIC:
                return "parquet"
            log.seek(0)
            for prefix, event, value in ijson.parse(log):
                if event == "map_key" and prefix in ("", "item") and value in _MARKS:
                    return _telling(path, prefix, value)
                if event == "end_map" and prefix in ("", "item"):
                    break
    except DAMAGED as problem:
        raise _refuse(path, f"cannot be read: {problem}", "Check its permissions.") from None
    except (ijson.JSONError, UnicodeDecodeError) as problem:
        raise _refuse(path, f"is not of a known format: {problem}", _CURE) from None
    raise _refuse(path, f"has none of the fields {', '.join(_MARKS)}", _CURE)


def _telling(path: Path, prefix: str, field: str) -> LogFormat:
    found = _MARKS[field]
    if found == "messages" and prefix == "item":
        raise _refuse(path, "is a JSON array of message lines", "Write one object a line (.jsonl).")
    return found


def _refuse(path: Path, reason: str, cure: str) -> InputError:
    return InputError(BadInput(str(path), None, None, reason, cure))
