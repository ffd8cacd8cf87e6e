"""Logs of the service: JSON lines on stderr, without content.

A line contains our own texts, numbers, and names of shards and servers. It never contains an exception's
message, which may quote a turn; a library's text with arguments; or a tenant's name, only its keyed hash.
"""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

import orjson

from undertow.engine.storage.location import StoreError

OURS = "undertow"
PLACES = 8


def places(error: BaseException) -> list[str]:
    """The code locations that an exception passed, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]


def log_failure(log: logging.Logger, error: BaseException, where: str = "") -> None:
    """Log an internal failure by its type and code locations. `where`: what failed, if they do not say."""
    log.error("%s%s at %s", type(error).__name__, where and f" in {where}", " < ".join(places(error)))


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
    """Send the logs of this process to stderr as JSON lines; from other libraries, warnings and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(OURS).setLevel(level)


def _words(record: logging.LogRecord) -> str:
    if record.name.partition(".")[0] != OURS:
        # only the first line of a library's own template is safe to log
        return str(record.msg).partition("\n")[0] if isinstance(record.msg, str) else "(no text)"
    args = record.args if isinstance(record.args, tuple) else ()
    return str(record.msg) % tuple(map(_quotable, args)) if args else str(record.msg)


def _quotable(value: object) -> object:
    """Only messages of disk and store errors are logged: they name paths, never a turn."""
    if isinstance(value, OSError):
        return f"{type(value).__name__}: {value.strerror}"
    if isinstance(value, BaseException) and not isinstance(value, StoreError):
        return type(value).__name__
    return value
