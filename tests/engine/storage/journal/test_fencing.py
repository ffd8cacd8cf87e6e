"""Fencing: whatever a former writer does, what was acknowledged stays and nothing late counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.engine.storage import lance_log
from undertow.engine.storage.fenced_log import mark_table
from undertow.engine.storage.fencing import FenceMark, Fences
from undertow.engine.storage.journal import Fenced, Journal, JournalError, Row
from undertow.engine.storage.journal_rows import to_table
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import StoreLocked

from ....support.storage.journal import raw_texts, row, stored, taken_over, texts

# ---- a model: every interleaving of what writers do to a log that anyone may append to


ModelRow = tuple[int, int, str]
"""lsn, epoch, text"""


@dataclass
class Log:
    """What Lance guarantees: commits are atomic and in one order; a late one goes on top of the others.

    Beside it, what a file system guarantees of the write-ahead log: whoever reads `entries` or `claim` sees
    what was written before.
    """

    rows: list[FenceMark | ModelRow] = field(default_factory=list)
    versions: list[int] = field(default_factory=lambda: [0])
    entries: list[ModelRow] = field(default_factory=list)
    claim: str = ""

    def commit(self, *items: FenceMark | ModelRow) -> int:
        self.rows += items
        self.versions.append(len(self.rows))
        return len(self.versions) - 1

    @property
    def newest(self) -> int:
        return len(self.versions) - 1

    def fences(self, version: int) -> Fences:
        return Fences(m for m in self.rows[: self.versions[version]] if isinstance(m, FenceMark))

    def counting(self, version: int) -> list[ModelRow]:
        """The rows in Lance that count at a version, in the order of their commits."""
        fences = self.fences(version)
        rows = [r for r in self.rows[: self.versions[version]] if not isinstance(r, FenceMark)]
        epochs = np.array([r[1] for r in rows], np.int64)
        stale = fences.stale(epochs, np.array([r[0] for r in rows], np.int64))
        return [r for r, dead in zip(rows, stale, strict=True) if not dead]

    def left(self, entries: list[ModelRow], version: int) -> list[ModelRow]:
        """The entries that are not in Lance at a version, of the writer in force."""
        fences = self.fences(version)
        end = max([fences.first_lsn, *(r[0] + 1 for r in self.counting(version))])
        return [e for e in entries if e[1] == fences.in_force and e[0] >= end]

    def shown(self) -> list[ModelRow]:
        """What a reader sees."""
        return self.counting(self.newest) + self.left(self.entries, self.newest)


@dataclass
class Outcome:
    acknowledged: set[str] = field(default_factory=set)
    # what a writer took as its state when it opened, and all that it has written since
    state: list[str] | None = None


class Writer:
    """The protocol of Journal; its generators pause wherever another writer may come between."""

    def __init__(self, log: Log, name: str, outcome: Outcome) -> None:
        self.log = log
        self.name = name
        self.outcome = outcome
        self.fenced = False
        self.waiting: list[ModelRow] = []

    def run(self, commits: str) -> Iterator[None]:
        """`commits`: for each row a letter: into the log (l), the same and then a flush (f), or Lance (d)."""
        yield from self.open()
        for n, how in enumerate(commits):
            if self.fenced:
                return
            yield
            row = (self.lsn, self.epoch, f"{self.name}{n}")
            self.lsn += 1
            yield from self.past_log(row) if how == "d" else self.into_log(row)
            if self.fenced:
                return
            self.outcome.acknowledged.add(row[2])
            assert self.outcome.state is not None
            self.outcome.state.append(row[2])
            if how == "f":
                yield
                yield from self.flush()

    def open(self) -> Iterator[None]:
        log = self.log
        while True:
            base = log.newest
            yield
            self.epoch = log.fences(base).claimed + 1
            version = log.commit(FenceMark(self.epoch, self.name))
            yield
            if not log.fences(version).contested(self.epoch, self.name):
                break
        log.claim = self.name
        yield
        entries = list(log.entries)
        yield
        self.seen = log.newest
        yield
        fences = log.fences(self.seen)
        self.fenced = fences.claimed > self.epoch
        if self.fenced:
            return
        counting, left = log.counting(self.seen), log.left(entries, self.seen)
        first = max([fences.first_lsn, *(r[0] + 1 for r in counting)])
        begin = FenceMark(self.epoch, self.name, first, fences.in_force)
        version = log.commit(*((lsn, self.epoch, text) for lsn, _, text in left), begin)
        yield
        self.follow(version)
        if self.fenced:
            return
        self.outcome.state = [r[2] for r in counting + left]
        self.lsn = first + len(left)
        yield
        log.entries = [e for e in log.entries if e[1] >= self.epoch]

    def follow(self, version: int) -> None:
        self.fenced |= version > self.seen + 1 and self.log.fences(version).claimed > self.epoch
        self.seen = version

    def past_log(self, row: ModelRow) -> Iterator[None]:
        yield from self.flush()
        if not self.fenced:
            version = self.log.commit(row)
            yield
            self.follow(version)

    def into_log(self, row: ModelRow) -> Iterator[None]:
        self.log.entries.append(row)
        self.waiting.append(row)
        yield
        while self.log.claim != self.name and not self.fenced:
            yield from self.flush()
            if self.fenced:
                return
            yield
            self.log.claim = self.name
            yield
            self.seen = self.log.newest
            self.fenced = self.log.fences(self.seen).claimed > self.epoch
            yield

    def flush(self) -> Iterator[None]:
        if not self.waiting:
            return
        version = self.log.commit(*self.waiting)
        yield
        self.follow(version)
        if not self.fenced:
            moved, self.waiting = self.waiting, []
            self.log.entries = [e for e in self.log.entries if e not in moved]
            yield


def check(log: Log, outcomes: list[Outcome]) -> None:
    lsns = [r[0] for r in log.shown()]
    assert lsns == sorted(set(lsns)), "lsns are unique and in the order of the commits"
    shown = [r[2] for r in log.shown()]
    for outcome in outcomes:
        assert outcome.acknowledged <= set(shown), "an acknowledged row is lost"
        if outcome.state is not None:
            # what a writer has built upon stays; what it did not see may only follow
            assert shown[: len(outcome.state)] == outcome.state, "the log is not what a writer took it for"
    before: list[tuple[int, int, str]] = []
    for version in range(log.newest + 1):
        fences = log.fences(version)
        if fences.claimed == fences.in_force:
            seen = log.counting(version)
            assert seen[: len(before)] == before, "what a settled reader has seen is gone"
            before = seen


def run(schedule: list[int], commits: Sequence[str]) -> None:
    log = Log()
    outcomes = [Outcome() for _ in commits]
    writers = [Writer(log, "abc"[n], outcomes[n]).run(how) for n, how in enumerate(commits)]
    for n in schedule:
        next(writers[n], None)
    check(log, outcomes)


def interleavings(counts: tuple[int, ...]) -> Iterator[list[int]]:
    """Every order of `counts[n]` steps of each writer n."""
    if not any(counts):
        yield []
    for n, left in enumerate(counts):
        if left:
            for rest in interleavings((*counts[:n], left - 1, *counts[n + 1 :])):
                yield [n, *rest]


@pytest.mark.parametrize("commits", ["ld", "lf"])
def test_a_second_writer_opens_beside_the_first_in_every_interleaving(commits: str) -> None:
    """The first has opened by then: in nine steps. The second commits once."""
    count = 0
    for schedule in interleavings((5, 9)):
        run([0] * 9 + schedule + [1] * 9, [commits, "l"])
        count += 1
    assert count == 2_002


def test_two_open_while_a_third_writes_in_every_interleaving() -> None:
    count = 0
    for schedule in interleavings((2, 4, 4)):
        run([0] * 9 + schedule + [1] * 9 + [2] * 9, ["lfd", "ll", "ll"])
        count += 1
    assert count == 3_150


def test_a_writer_whose_claim_was_overwritten_renews_it_while_another_opens_in_every_interleaving() -> None:
    """Writer 0 pauses before it writes its claim; writer 1 opens, then finds that claim, not its own."""
    count = 0
    for schedule in interleavings((0, 6, 8)):
        run([0] * 2 + [1] * 8 + [0] + schedule + [1] * 9 + [2] * 9, ["l", "lll", "l"])
        count += 1
    assert count == 3_003


@given(
    st.lists(st.integers(0, 2), max_size=90),
    st.lists(st.text("ldf", max_size=4), min_size=3, max_size=3),
)
@settings(max_examples=1500, deadline=None)
def test_three_writers_in_any_interleaving(schedule: list[int], commits: list[str]) -> None:
    run(schedule, commits)


# ---- real journals


def test_a_former_writer_is_stopped_and_its_late_rows_count_for_nothing(place: Location) -> None:
    old = Journal.open(place, writable=True)
    old.append([row("first"), row("second")])
    new = taken_over(place)
    assert (new.epoch, new.next_lsn, texts(new)) == (2, 2, ["first", "second"])
    with pytest.raises(Fenced, match=r"taken over .*epoch 2 after 1.*Nothing of this step"):
        old.append([row("late")])
    with pytest.raises(Fenced, match="earlier write failed"):
        old.append([row("later still")])
    new.append([row("third")])
    reader = Journal.open(place, writable=False)
    for journal in (reader, Journal.open(place, writable=False, settled=True)):
        assert texts(journal) == ["first", "second", "third"]
        assert [r.lsn for r in journal.read()] == [0, 1, 2]
        assert journal.columns(["lsn"])["lsn"].to_pylist() == [0, 1, 2]
        assert (journal.row_count, journal.count(["ann"]), journal.next_lsn) == (3, 3, 3)
    assert "late" in raw_texts(place), "Lance has taken it"
    new.purge()
    assert "late" not in raw_texts(place) and stored(place) == ["first", "second", "third"]
    old.close()
    again = taken_over(place)
    again.append([row("fourth")])
    assert stored(place) == ["first", "second", "third", "fourth"], "its begin is still known"


ACTS: dict[str, Callable[[Journal], Any]] = {
    "append": lambda journal: journal.append([row("late")]),
    "stream": lambda journal: journal.append_stream(iter([row("late")])),
    "delete": lambda journal: journal.delete(["nobody", "ann"], before_lsn=1),
    "delete rows": lambda journal: journal.delete_rows([0]),
    "compact": lambda journal: journal.compact(),
    "purge": lambda journal: journal.purge(),
}


@pytest.mark.parametrize("act", ACTS)
def test_whatever_a_former_writer_does_it_is_told_and_takes_nothing_of_the_next_one(
    store: Path, act: str
) -> None:
    old = Journal.open(store, writable=True)
    old.append([row("first"), row("second")])
    new = taken_over(store)
    new.append([row("third")])
    with pytest.raises(Fenced):
        ACTS[act](old)
    new.append([row("fourth")])
    assert stored(store) == ["first", "second", "third", "fourth"]


def test_rows_that_land_before_the_begin_count_though_nobody_was_told(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between claim and reading: the new writer has seen them. Between reading and begin: it has not."""
    old = Journal.open(store, writable=True)
    old.append([row("first")])
    old.settle()
    other = LanceLog(Location.of(store) / "journal.lance")

    def late(text: str, lsn: int) -> None:
        other.append(to_table([Row("turn", "ann", "ann", 0, text.encode(), lsn=lsn, epoch=old.epoch)]))

    reload, look = LanceLog.reload, Journal._look

    def between_claim_and_reading(self: LanceLog) -> None:
        late("seen", 1)
        reload(self)

    def between_reading_and_begin(self: Journal) -> int:
        next_lsn = look(self)
        monkeypatch.setattr(Journal, "_look", look)
        late("unseen", 2)
        return next_lsn

    monkeypatch.setattr(LanceLog, "reload", between_claim_and_reading)
    monkeypatch.setattr(Journal, "_look", between_reading_and_begin)
    new = taken_over(store)
    monkeypatch.setattr(LanceLog, "reload", reload)
    assert new.next_lsn == 2
    new.append([row("own")])
    assert texts(new) == stored(store) == ["first", "seen", "own"]
    assert raw_texts(store).count("unseen") == 1


def test_a_begin_that_lands_late_changes_nothing(store: Path) -> None:
    """Of three writers the second is overtaken by the third between its reading and its begin."""
    first = Journal.open(store, writable=True)
    first.append([row("a")])
    first.settle()
    table = LanceLog(Location.of(store) / "journal.lance")

    table.append(mark_table([FenceMark(2, "overtaken")]))
    table.append(to_table([Row("turn", "ann", "ann", 0, b"b", lsn=1, epoch=1)]))
    third = taken_over(store)
    assert (third.epoch, texts(third)) == (3, ["a", "b"])
    table.append(mark_table([FenceMark(2, "overtaken", 1, 1)]))
    third.append([row("c")])
    assert stored(store) == texts(taken_over(store)) == ["a", "b", "c"]


def test_a_settled_reader_waits_for_a_takeover_to_end(store: Path) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row("first")])
    table = LanceLog(Location.of(store) / "journal.lance")
    table.append(mark_table([FenceMark(2, "w")]))
    assert stored(store) == ["first"]
    with pytest.raises(JournalError, match="taking over"):
        Journal.open(store, writable=False, settled=True)
    taken_over(store)
    assert texts(Journal.open(store, writable=False, settled=True)) == ["first"]


HOLDER = """
import sys
from undertow.engine.storage.journal import Journal, Fenced, Row
journal = Journal.open(sys.argv[1], writable=True)
n = 0
for line in sys.stdin:
    try:
        journal.append([Row("turn", "ann", "ann", n, line.strip().encode())])
        print("stored", flush=True)
    except Fenced:
        print("fenced", flush=True)
    n += 1
"""


def test_a_process_that_was_stopped_and_goes_on_is_fenced(store: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        holder.stdin.write("first\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "stored\n"
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(StoreLocked, match=f"process {holder.pid}"):
            Journal.open(store, writable=True)
        new = taken_over(store)
        new.append([row("second")])
        assert new.purge() is False, "the lock is the other's: a cut-off append of it may have files"
        os.kill(holder.pid, signal.SIGCONT)
        holder.stdin.write("late\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "fenced\n"
    finally:
        holder.kill()
        holder.wait()
    assert stored(store) == ["first", "second"]
    new.compact()
    with pytest.raises(StoreLocked):  # by then it has taken the lock that its former left behind
        Journal.open(store, writable=True)
    assert new.purge() is False, "the next writer would take over without the lock"
    new.close()


OPENER = """
import sys
from undertow.engine.storage.journal import Journal, Fenced, Row
for n in range(3):
    try:
        journal = Journal.open(sys.argv[1], writable=True, takeover=True)
        for m in range(4):
            text = f"{sys.argv[2]}-{n}-{m}"
            journal.append([Row("turn", "ann", "ann", 0, text.encode())])
            print(text, flush=True)
    except Fenced:
        pass
"""


def test_processes_that_keep_taking_over_lose_nothing_acknowledged(store: Path) -> None:
    command = [sys.executable, "-c", OPENER, str(store)]
    openers = [subprocess.Popen([*command, n], stdout=subprocess.PIPE, text=True) for n in "ab"]
    told = [opener.communicate(timeout=120)[0].split() for opener in openers]
    assert [opener.returncode for opener in openers] == [0, 0]
    shown = stored(store)
    assert len(set(shown)) == len(shown)
    assert set().union(*told) <= set(shown)
    for mine in told:
        assert [text for text in shown if text in mine] == mine
    lsns = [r.lsn for r in Journal.open(store, writable=False).read()]
    assert lsns == sorted(set(lsns))


def test_files_of_an_append_under_way_survive_a_purge_without_the_lock(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal.open(store, writable=True).close()
    stray = store / "journal.lance" / "data" / "stray.lance"
    holder = Journal.open(store, writable=True)
    new = taken_over(store)
    new.append([row("first")])
    stray.write_bytes(b"a cut-off append")
    assert new.purge() is False and stray.exists()
    moment = stray.stat().st_mtime - 2 * lance_log.READER_GRACE.total_seconds()
    os.utime(stray, (moment, moment))
    assert new.purge() is False and not stray.exists()
    assert stored(store) == ["first"]
    stray.write_bytes(b"a cut-off append")
    holder.close()
    new.compact()
    assert new.purge() is False and stray.exists(), "with the lock too: the next one takes over without it"
    new.close()
    assert Journal.open(store, writable=True).purge() is True and not stray.exists()
