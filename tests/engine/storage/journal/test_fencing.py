"""Fencing: whatever a former writer does, what was acknowledged stays and nothing late counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from undertow.engine.storage import lance_log
from undertow.engine.storage.fenced_log import mark_table
from undertow.engine.storage.fencing import FenceMark, Fences
from undertow.engine.storage.journal import Fenced, Journal, JournalError, Row
from undertow.engine.storage.journal_rows import to_table
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import StoreError, StoreLocked, WriterLock

from ....support.storage.journal import DIM, raw_texts, row, stored, taken_over, texts


def test_a_former_writer_is_stopped_and_its_late_rows_count_for_nothing(place: Location) -> None:
    old = Journal.open(place, writable=True)
    old.append([row("first"), row("second")])
    new = taken_over(place)
    assert (new.epoch, new.next_lsn, texts(new)) == (2, 2, ["first", "second"])
    with pytest.raises(Fenced, match=r"taken over .*epoch 2 after 1.*Nothing of this step"):
        old.append([row("late")])
    with pytest.raises(Fenced, match="earlier write failed"):
        old.append([row("later still")])
    with pytest.raises(Fenced, match="taken over"):
        list(old.read())  # its successor may have moved what is not there
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


def test_a_former_writer_that_reads_what_was_purged_is_told_of_the_new_one(tmp_path: Path) -> None:
    Journal.create(tmp_path, DIM, {"model": "none"})
    old = Journal.open(tmp_path, writable=True, takeover=True)
    old.append([row("first"), row("second", "bob")])
    old.settle()
    new = taken_over(tmp_path)
    new.delete(["bob"], before_lsn=2)
    new.purge()
    with pytest.raises(Fenced, match="taken over"):
        texts(old)


@pytest.mark.parametrize("between", ["a purge", "a takeover and its purge"])
def test_a_claim_in_a_version_that_was_purged_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """The writer is paused after Lance has chosen the version's number: it makes an old version."""
    Journal.create(tmp_path, DIM, {"model": "none"})
    old = Journal.open(tmp_path, writable=True, takeover=True)
    old.append([row("first")])
    versions = tmp_path / "journal.lance" / "_versions"
    append, look, others = LanceLog.append, Journal._look, [old]

    def paused(log: LanceLog, marks: pa.Table) -> None:
        monkeypatch.setattr(LanceLog, "append", append)
        append(log, marks)
        claim = min(versions.glob("*.manifest"))  # they count down
        held = claim.read_bytes()
        claim.unlink()
        if between != "a purge":
            others.append(taken_over(tmp_path))
        others[-1].purge()
        assert not claim.exists()
        claim.write_bytes(held)
        monkeypatch.setattr(Journal, "_look", before_the_begin)

    def before_the_begin(journal: Journal) -> int:
        monkeypatch.setattr(Journal, "_look", look)
        next_lsn = look(journal)
        with pytest.raises(Fenced):
            others[-1].append([row("late")])
        return next_lsn

    monkeypatch.setattr(LanceLog, "append", paused)
    new = taken_over(tmp_path)
    assert new.epoch == others[-1].epoch + 1
    new.append([row("second")])
    assert stored(tmp_path) == ["first", "second"]


def test_two_writers_of_one_epoch_are_an_error() -> None:
    with pytest.raises(StoreError, match="two writers have begun epoch 1"):
        Fences([FenceMark(1, "a", 0), FenceMark(1, "b", 0, former=1)])


def test_a_lock_is_freed_on_another_thread_than_took_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        lock = pool.submit(WriterLock, tmp_path).result()
    lock.close()
    WriterLock(tmp_path).close()


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
