"""Logs of the service: JSON lines on stderr, without content.

What a line may say: our own words, with numbers and names of shards and servers. What it may not: words of
exceptions, which may quote a turn; words of other people's libraries, but for their fixed texts; a tenant's
name, which its keyed hash stands for.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from undertow.engine.storage.location import StoreError
from undertow.serving.telemetry.exception_sites import places

OURS = "undertow"


class JSONLines(logging.Formatter):
    """One JSON object a record; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _words(record),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line |= {"error": type(error).__name__, "at": places(error)}
        return orjson.dumps(line | getattr(record, "fields", {}), default=str).decode()


def set_up(level: int = logging.INFO) -> None:
    """Send all logs of this process to stderr as JSON lines; of other libraries, warnings and worse."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(OURS).setLevel(level)


def _words(record: logging.LogRecord) -> str:
    if record.name.partition(".")[0] != OURS:
        # a library's first line is its own; what follows, and what is put in, may be anybody's
        return str(record.msg).partition("\n")[0] if isinstance(record.msg, str) else "(no text)"
    args = record.args if isinstance(record.args, tuple) else ()
    return str(record.msg) % tuple(map(_quotable, args)) if args else str(record.msg)


def _quotable(value: object) -> object:
    """Of exceptions only those of disks and stores are told in words: they name paths, never a turn."""
    if isinstance(value, OSError):
        return f"{type(value).__name__}: {value.strerror}"
    if isinstance(value, BaseException) and not isinstance(value, StoreError):
        return type(value).__name__
    return value
