"""A model of fencing: every interleaving of what writers do to a log that anyone may append to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.engine.storage.fencing import FenceMark, Fences

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
    _fences: dict[int, Fences] = field(default_factory=dict)

    def commit(self, *items: FenceMark | ModelRow) -> int:
        self.rows += items
        self.versions.append(len(self.rows))
        return len(self.versions) - 1

    @property
    def newest(self) -> int:
        return len(self.versions) - 1

    def fences(self, version: int) -> Fences:
        if version not in self._fences:
            marks = [m for m in self.rows[: self.versions[version]] if isinstance(m, FenceMark)]
            self._fences[version] = Fences(marks)
        return self._fences[version]

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


def test_two_writers_in_every_interleaving() -> None:
    """Both open at once, up to where each has begun."""
    count = 0
    for schedule in interleavings((8, 8)):
        if schedule[0] == 0:  # the writers are alike
            run(schedule + [0] * 9 + [1] * 9, ["ld", "ld"])
            count += 1
    assert count == 6_435


@pytest.mark.parametrize("commits", ["ld", "lf"])
def test_a_second_writer_opens_beside_the_first_in_every_interleaving(commits: str) -> None:
    """The first has opened by then: in nine steps. The second commits once."""
    count = 0
    for schedule in interleavings((6, 9)):
        run([0] * 9 + schedule + [1] * 9, [commits, "l"])
        count += 1
    assert count == 5_005


def test_two_open_while_a_third_writes_in_every_interleaving() -> None:
    count = 0
    for schedule in interleavings((2, 5, 4)):
        run([0] * 9 + schedule + [1] * 9 + [2] * 9, ["lfd", "ll", "ll"])
        count += 1
    assert count == 6_930


def test_a_writer_whose_claim_was_overwritten_renews_it_while_another_opens_in_every_interleaving() -> None:
    """Writer 0 pauses before it writes its claim; writer 1 opens, then finds that claim, not its own."""
    count = 0
    for schedule in interleavings((0, 6, 8)):
        run([0] * 2 + [1] * 8 + [0] + schedule + [1] * 9 + [2] * 9, ["l", "lll", "l"])
        count += 1
    assert count == 3_003


@given(st.lists(st.integers(0, 2), max_size=90), st.lists(st.text("ldf", max_size=4), min_size=3, max_size=3))
@settings(max_examples=1500, deadline=None)
def test_three_writers_in_any_interleaving(schedule: list[int], commits: list[str]) -> None:
    run(schedule, commits)
