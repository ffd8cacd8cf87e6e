"""The audit log: erasures and administrators' acts as JSON lines, without anything that a tenant said.

An act has one line when it begins and one when it ends, with the same `act_id`. So an act without a known
end, as after a kill, is visible, and nothing is done that could not be recorded.

No field can hold content or a tenant's name: the store's keyed hash stands for a tenant and outlives its
erasure. Every field is of bounded length, and a line has at most `LINE_BYTES`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import PRIVATE_FILE, fsync_path, make_folder

log = logging.getLogger(__name__)

FILE_NAME = "audit.jsonl"
LINE_BYTES = 2_048
MOST_COUNTS = 16
REFUSALS_S = 60.0
LARGEST_COUNT = 2**53
WITHOUT_KEY = "no-auth"

WORD = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
FORMS = {
    "act_id": re.compile(r"[0-9a-f]{16}"),
    "act": WORD,
    "by": re.compile(rf"[0-9a-f]{{12}}|oidc-[0-9a-f]{{16}}|local:[0-9]{{1,10}}|{WITHOUT_KEY}"),
    "tenant_key": re.compile(r"[0-9a-f]{32}"),
    "key_id": re.compile(r"[0-9a-f]{12}"),
    "error": re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}"),
}


class AuditError(UndertowError):
    """The audit log cannot be written; the text names the cure."""


class AuditOutcome(StrEnum):
    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(slots=True)
class Entry:
    """An act. Its code adds what becomes known meanwhile, such as `counts`.

    `by`: a key's id, `oidc-HASH` of a token's subject, `local:UID` of a command's user, or WITHOUT_KEY.
    `act`: a word, such as erase.
    `tenant_key`: StoreInfo.tenant_key of the tenant concerned; `key_id`: the key concerned.
    """

    act: str
    by: str
    tenant_key: str | None = None
    key_id: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    act_id: str = field(default_factory=lambda: secrets.token_hex(8))


def local_user() -> str:
    """The user of this process, as an entry's `by`."""
    return f"local:{os.getuid()}"


class AuditLog:
    """Appends to one file, which may be moved away at any time and is then created again.

    Any number of threads and processes may write it. A line is on the disk when the call returns.
    """

    def __init__(self, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """`now` is in UTC."""
        self._path = path
        self._now = now

    @contextmanager
    def act(self, act: str, by: str, **known: Any) -> Iterator[Entry]:
        """Records that an act begins, then that it is done, or that it failed and with which exception.

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
        """Records an attempt at a forbidden act. AuditError, ValueError."""
        self.write(Entry(act, by, **known), AuditOutcome.REFUSED)

    def write(self, entry: Entry, outcome: AuditOutcome, *, error: str | None = None) -> None:
        """Writes one line. AuditError; ValueError for a field that could hold content."""
        at = self._now().isoformat(timespec="milliseconds")
        record = {"at": at, **asdict(entry), "outcome": outcome.value, "error": error}
        _check(record)
        line = orjson.dumps({name: value for name, value in record.items() if value}) + b"\n"
        try:
            _append(self._path, line)
        except OSError as trouble:
            raise AuditError(
                f"cannot write {self._path}: {trouble.strerror}. "
                "Check the path, its rights and the disk's space."
            ) from trouble

    def write_end(self, entry: Entry, outcome: AuditOutcome, *, error: str | None = None) -> None:
        """Writes the line of an act that has ended. If that fails, only the process's log reports it.

        The act is done, and its caller must get the result: a certificate, or a key that is shown once, must
        not be lost for this. In the audit log the act then has no end, as after a kill.
        """
        try:
            self.write(entry, outcome, error=error)
        except AuditError as trouble:
            told = (entry.act_id, entry.act, outcome.value, trouble.__cause__)
            log.error("the audit log does not say how act %s (%s) ended, which is %s: %s", *told)


class RefusalCounts:
    """Which refused acts the log gets: the first of a key and an act, then one in `REFUSALS_S`.

    Each line waits for the disk, and a key may be refused as often as it asks. Used on one thread.
    """

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        # when the last line was written, oldest first, and how many refusals have had none since
        self._last: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def take(self, act: str, by: str) -> dict[str, int] | None:
        """The counts of the line that this refusal gets; None: it is counted in a later one."""
        now_s = self._clock_s()
        at_s, unwritten = self._last.get((act, by), (now_s - REFUSALS_S, 0))
        if now_s - at_s < REFUSALS_S:
            self._last[act, by] = at_s, unwritten + 1
            return None
        self._last.pop((act, by), None)
        self._last[act, by] = now_s, 0
        return {"refused_before": unwritten} if unwritten else {}

    def overdue(self, *, ended: bool = False) -> Iterator[tuple[str, str, dict[str, int]]]:
        """The act, the key and the counts of each line for refusals that have waited long enough for one.

        Forgets acts whose refusals all have their line. `ended`: no refusal comes any more, so none waits.
        """
        now_s = self._clock_s()
        while self._last:
            (act, by), (at_s, unwritten) = next(iter(self._last.items()))
            if now_s - at_s < REFUSALS_S and not ended:
                return
            del self._last[act, by]
            if unwritten:
                if not ended:
                    self._last[act, by] = now_s, 0
                # the line stands for the last of them
                yield act, by, {"refused_before": unwritten - 1} if unwritten > 1 else {}


@contextmanager
def audited(folder: Path | None, act: str, **known: Any) -> Iterator[Entry]:
    """Records an act of this process's user in the folder's audit log; see `AuditLog.act`.

    `folder`: None for a store that is not a folder; nothing is recorded.
    """
    if folder is None:
        yield Entry(act, local_user(), **known)
        return
    with AuditLog(folder / FILE_NAME).act(act, local_user(), **known) as entry:
        yield entry


def _append(path: Path, line: bytes) -> None:
    """Adds a whole line or nothing. Opens the file each time: lines are rare, and it may have been moved."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if not size:
            fsync_path(path.parent)
        elif os.pread(descriptor, 1, size - 1) != b"\n":  # a writer was killed within a line
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            os.ftruncate(descriptor, size)
            raise OSError(0, "only a part of the line could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # unlocks it, too


def _check(record: Mapping[str, Any]) -> None:
    """ValueError for a field of another form; it names the field and does not quote it."""
    for name, form in FORMS.items():
        value = record[name]
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise ValueError(f"{name} is not of the form {form.pattern}: an audit log holds no free text")
    counts = record["counts"]
    sound = all(
        WORD.fullmatch(name) and type(n) is int and 0 <= n <= LARGEST_COUNT for name, n in counts.items()
    )
    if len(counts) > MOST_COUNTS or not sound:
        raise ValueError(f"counts are at most {MOST_COUNTS} words, each with a number from 0 to 2**53")
