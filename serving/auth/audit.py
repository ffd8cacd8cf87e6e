"""The audit log: erasures and what administrators do, as JSON lines, without anything that a tenant said.

One line when an act begins and one when it ends, with the same `act_id`. So an act of which the end is not
known, as after a kill, can be seen; and nothing is done that could not be written down.

No field can hold content or a tenant's name: a tenant stands there by the store's keyed hash, which outlives
its erasure. Every field is of a bounded length, and so is the line: at most `LINE_BYTES`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import fsync_path, make_folder

log = logging.getLogger(__name__)

FILE_NAME = "audit.jsonl"
LINE_BYTES = 2_048
MODE = 0o600
MOST_COUNTS = 16
LARGEST_COUNT = 2**53
WITHOUT_KEY = "no-auth"

WORD = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
ACTOR = re.compile(rf"[0-9a-f]{{12}}|local:[0-9]{{1,10}}|{WITHOUT_KEY}")
ACT_ID = re.compile(r"[0-9a-f]{16}")
TENANT_KEY = re.compile(r"[0-9a-f]{32}")
KEY_ID = re.compile(r"[0-9a-f]{12}")
ERROR = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")


class AuditError(UndertowError):
    """The audit log cannot be written; the text names the cure."""


class AuditOutcome(StrEnum):
    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(slots=True)
class Entry:
    """What is known of an act. Whoever does it fills in what comes to light meanwhile.

    `by`: a key's id, `local:UID` of a command's user, or WITHOUT_KEY. `act`: a word, such as erase.
    `tenant_key`: StoreInfo.tenant_key of the tenant that it is about; `key_id`: the key that it is about.
    """

    act: str
    by: str
    tenant_key: str | None = None
    key_id: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    act_id: str = field(default_factory=lambda: secrets.token_hex(8))


def local_user() -> str:
    """Who runs this process, as an entry's `by`."""
    return f"local:{os.getuid()}"


class AuditLog:
    """Appends to one file, which may be moved away at any time and is then begun anew.

    Thread-safe, and several processes may write it. A line is on the disk when the call returns.
    """

    def __init__(self, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Opens nothing yet. `now` is in UTC."""
        self._path = path
        self._now = now
        self._descriptor: int | None = None
        self._writing = threading.Lock()

    @contextmanager
    def act(self, act: str, by: str, **known: Any) -> Iterator[Entry]:
        """Around an act: says that it begins, then that it is done, or that it failed and by which exception.

        `known`: further fields of Entry. AuditError before the act, which then must not happen. ValueError
        for a field that could hold content.
        """
        entry = Entry(act, by, **known)
        self.write(entry, AuditOutcome.BEGUN)
        try:
            yield entry
        except BaseException as error:
            self.write_end(entry, AuditOutcome.FAILED, error=type(error).__name__)
            raise
        self.write_end(entry, AuditOutcome.DONE)

    def refused(self, act: str, by: str, **known: Any) -> None:
        """Somebody asked for an act that he may not do. AuditError, ValueError."""
        self.write(Entry(act, by, **known), AuditOutcome.REFUSED)

    def write(self, entry: Entry, outcome: AuditOutcome, *, error: str | None = None) -> None:
        """One line. AuditError; ValueError for a field that could hold content."""
        record = {
            "at": self._now().isoformat(timespec="milliseconds"),
            "act_id": entry.act_id,
            "act": entry.act,
            "by": entry.by,
            "outcome": outcome.value,
            "tenant_key": entry.tenant_key,
            "key_id": entry.key_id,
            "counts": entry.counts or None,
            "error": error,
        }
        _check(record)
        line = orjson.dumps({name: value for name, value in record.items() if value is not None}) + b"\n"
        with self._writing:
            try:
                self._append(line)
            except OSError as trouble:
                raise AuditError(
                    f"cannot write {self._path}: {trouble.strerror}. "
                    "Check the path, its rights and the disk's space."
                ) from trouble

    def write_end(self, entry: Entry, outcome: AuditOutcome, *, error: str | None = None) -> None:
        """The line of an act that has ended. Where it cannot be written, the process's own log says so.

        What was done is done, and who asked for it is to be told that: a certificate, or a key that is shown
        once, must not be lost for this. In the audit log the act then has no end, as after a kill.
        """
        try:
            self.write(entry, outcome, error=error)
        except AuditError as trouble:
            told = (entry.act_id, entry.act, outcome.value, trouble.__cause__)
            log.error("the audit log does not say how act %s (%s) ended, which is %s: %s", *told)

    def close(self) -> None:
        with self._writing:
            self._let_go()

    def _append(self, line: bytes) -> None:
        descriptor = self._current()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # somebody was killed in a line
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, size)
                raise OSError(0, "only a part of the line could be written")
            os.fsync(descriptor)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _current(self) -> int:
        """The descriptor of the file that has the log's name now."""
        if self._descriptor is not None and not self._moved(self._descriptor):
            return self._descriptor
        self._let_go()
        make_folder(self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, MODE)
        fsync_path(self._path.parent)
        return self._descriptor

    def _moved(self, descriptor: int) -> bool:
        try:
            return not os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return True

    def _let_go(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _check(record: Mapping[str, Any]) -> None:
    """ValueError for a field of another form; it names the field, not what stands in it."""
    forms = {
        "act_id": ACT_ID,
        "act": WORD,
        "by": ACTOR,
        "tenant_key": TENANT_KEY,
        "key_id": KEY_ID,
        "error": ERROR,
    }
    for name, form in forms.items():
        value = record[name]
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise ValueError(f"{name} is not of the form {form.pattern}: an audit log holds no free text")
    counts = record["counts"] or {}
    sound = all(
        WORD.fullmatch(name) and type(n) is int and 0 <= n <= LARGEST_COUNT for name, n in counts.items()
    )
    if len(counts) > MOST_COUNTS or not sound:
        raise ValueError(f"counts are at most {MOST_COUNTS} words, each with a number from 0 to 2**53")
