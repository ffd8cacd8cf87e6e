"""The journal on simulated files: a crash, a power failure, another writer or a reader at every effect.

The files of the log, the table and the thread of its flushes are replaced by ones that call the simulation
before and after each thing they do. So each run is repeated exactly by its seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.storage import fenced_log, lance_log, tail, wal
from undertow.engine.storage import journal as journal_module
from undertow.engine.storage.fenced_log import Durability
from undertow.engine.storage.journal import Journal, JournalError

from ....support.cluster.simulation.disk import Disk, Files, Table
from ....support.engine import bytes_hold
from ....support.storage.journal import DIM, row, texts

FOLDER = "wal/"


class Crash(BaseException):
    """The writer's process ends here."""


@dataclass
class Simulation(Disk):
    """What happens at each effect of a writer. `at`: the effect, from 0 on, at which `event` happens."""

    at: int = -1
    event: Callable[[], None] = lambda: None
    effects: list[str] = field(default_factory=list)
    quiet: bool = False

    def effect(self, name: str) -> None:
        if self.quiet:
            return
        self.effects.append(name)
        if len(self.effects) - 1 == self.at:
            self.quiet = True
            try:
                self.event()
            finally:
                self.quiet = False

    def crash(self) -> None:
        raise Crash


class LateThread:
    """A thread that does its work when somebody waits for it, or earlier, as the seed has it."""

    simulation: Simulation

    def __init__(self, *_: Any, **__: Any) -> None:
        self._work: Callable[[], None] | None = None

    def submit(self, work: Callable[[], None]) -> LateThread:
        self._work = work
        if self.simulation.rng.random() < 0.5:
            try:
                self.result()
            except Exception as error:  # noqa: BLE001 - told to whoever waits for the work
                self._work = partial(_raise, error)
        return self

    def done(self) -> bool:
        return self._work is None or self.simulation.rng.random() < 0.5

    def result(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()

    def shutdown(self) -> None:
        self.result()


def _raise(error: Exception) -> None:
    raise error


@dataclass
class World:
    """A store, and what its writers were told is stored."""

    store: Path
    durability: Durability
    simulation: Simulation
    acknowledged: list[str] = field(default_factory=list)
    # what a writer is about to store, or to delete, and has not been told about
    pending: list[str] = field(default_factory=list)
    deleting: set[str] = field(default_factory=set)
    count: int = 0

    def open(self, **options: Any) -> Journal:
        where = Files(str(self.store))
        return Journal.open(where, writable=True, durability=self.durability, **options)

    def append(self, journal: Journal, rows: int) -> None:
        said = [f"text{self.count + n:04d}" for n in range(rows)]
        self.count += rows
        self.pending = said
        journal.append([row(text, "ann" if n % 2 else "bob", seq=n) for n, text in enumerate(said)])
        self.acknowledged += said
        self.pending = []

    def delete(self, journal: Journal, tenant: str) -> None:
        """Delete and purge all rows of a tenant, as its erasure does."""
        self.deleting = {r.payload.decode() for r in journal.read(tenant_keys=[tenant])}
        journal.delete([tenant], before_lsn=journal.next_lsn)
        certain = journal.purge()
        self.acknowledged = [text for text in self.acknowledged if text not in self.deleting]
        assert not (certain and any(bytes_hold(self.store, text) for text in self.deleting))
        self.deleting = set()

    def script(self, journal: Journal) -> None:
        """Commits of all kinds, a flush in the background and one that is waited for, an erasure."""
        for rows in (1, 3, 2, 1, 9, 1, 2):
            self.append(journal, rows)
        self.delete(journal, "bob")
        for rows in (1, 4, 2):
            self.append(journal, rows)
        journal.settle()
        self.append(journal, 1)

    def check(self) -> None:
        """What is read is what was acknowledged, in order; what is pending may be there as a whole."""
        read = texts(Journal.open(self.store, writable=False))
        sure = [text for text in self.acknowledged if text not in self.deleting]
        found = [text for text in read if text not in self.deleting and text not in self.pending]
        assert found == sure
        late = [text for text in read if text in self.pending]
        assert late in ([], self.pending) and (not late or read[-len(late) :] == late)
        assert len(set(read)) == len(read)

    def settle(self) -> None:
        """After a crash: what is there is there for good."""
        read = texts(Journal.open(self.store, writable=False))
        self.acknowledged, self.pending, self.deleting = read, [], set()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 8)
    monkeypatch.setattr(tail, "ROWS_PER_FLUSH", 5)
    monkeypatch.setattr(tail, "ThreadPoolExecutor", LateThread)
    monkeypatch.setattr(fenced_log, "LanceLog", Table)

    def begun(durability: Durability, seed: int) -> World:
        simulation = Simulation(random.Random(seed))
        monkeypatch.setattr(os, "fsync", simulation.sync)
        for module in (lance_log, wal):
            monkeypatch.setattr(module, "fsync_path", simulation.sync_path)
        Files.disk = Table.disk = LateThread.simulation = simulation
        store = tmp_path / "store"
        shutil.rmtree(store, ignore_errors=True)
        Journal.create(store, DIM, {"model": "none"})
        return World(store, durability, simulation)

    return begun


def killed(journal: Journal) -> None:
    """As a kill leaves the store: nothing more is written, and the lock is free."""
    if journal._lock is not None:
        journal._lock.close()


def effects_of(world: World) -> list[str]:
    """The effects of the script. The world is used up."""
    journal = world.open()
    world.simulation.effects.clear()
    world.script(journal)
    world.check()
    return world.simulation.effects


@pytest.mark.rarely(part=(1, 2), durability=("commit",))
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("durability", ["commit", "fsync"])
def test_a_crash_at_every_effect_loses_and_doubles_nothing(
    begin: Callable[..., World], durability: Durability, part: int
) -> None:
    """With `fsync` the power fails too."""
    effects = effects_of(begin(durability, 0))
    assert len(effects) > 50
    for at in range(part, len(effects), 3):
        world = begin(durability, 0)
        simulation, journal = world.simulation, world.open()
        simulation.effects.clear()
        simulation.at, simulation.event = at, simulation.crash
        try:
            world.script(journal)
        except Crash:
            killed(journal)
        if durability == "fsync":
            simulation.rng = random.Random(at)
            simulation.fail_power(world.store)
        world.check()
        world.settle()
        simulation.at = -1
        later = world.open()
        world.check()
        world.append(later, 2)
        world.check()
        later.close()
        world.check()


@pytest.mark.rarely(part=(1, 2))
@pytest.mark.parametrize("part", range(3))
def test_a_writer_that_is_overtaken_at_any_effect_acknowledges_nothing_that_is_lost(
    begin: Callable[..., World], part: int
) -> None:
    """While it stands at an effect, all is read, and another one opens the store and stores a row.

    At every second effect, and within each commit, the other one also purges.
    """
    effects = effects_of(begin("commit", 0))
    runs = [(at, purges) for at, name in enumerate(effects) for purges in _variants(at, name)][part::3]
    stopped = 0
    for at, purges in runs:
        world = begin("commit", 0)
        other = World(world.store, "commit", world.simulation, count=5_000)
        simulation, journal = world.simulation, world.open()
        others: list[Journal] = []

        simulation.effects.clear()
        simulation.at, simulation.event = at, partial(overtake, world, other, others, purges)
        try:
            world.script(journal)
        except JournalError:
            stopped += 1
        killed(journal)
        other.append(others[0], 2)
        read = texts(Journal.open(world.store, writable=False))
        sure = {*other.acknowledged, *world.acknowledged} - world.deleting
        assert sure <= set(read) and len(read) == len(set(read))
        assert set(read) <= sure | {*world.pending} | world.deleting
        others[0].close()
    assert stopped > len(runs) / 2


def overtake(world: World, other: World, others: list[Journal], purges: bool) -> None:
    world.check()
    others.append(other.open(takeover=True))
    other.append(others[0], 1)
    if purges:
        others[0].purge()


def _variants(at: int, effect: str) -> Sequence[bool]:
    return (False, True) if effect == "within a commit" else (at % 2 == 0,)
