"""The write-ahead log: what it holds is read by all, survives, is erased, and is never served damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pyarrow as pa
import pytest

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import tail, wal
from undertow.engine.storage.fenced_log import DamagedLog
from undertow.engine.storage.journal import Fenced, Journal, JournalError, Row
from undertow.engine.storage.journal_rows import to_table
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.wal import WriteAheadLog

from ....support.engine import bytes_hold
from ....support.storage.journal import raw_texts, row, stored, taken_over, texts

ENTRIES = 6
SOON_S = 30


def segments(store: Path | Location) -> list[str]:
    return [name for name in Location.of(store).children("wal") if name.endswith(".log")]


def killed(journal: Journal) -> None:
    """As a kill leaves the store: nothing more is written, and the lock is free."""
    assert journal._lock is not None
    journal._lock.close()


def written(store: Path) -> tuple[Path, list[str]]:
    """A store with six commits in its log, of two rows each, whose writer was killed."""
    journal = Journal.open(store, writable=True)
    said = []
    for n in range(ENTRIES):
        said += [f"{n} one", f"{n} two"]
        journal.append([row(f"{n} one", seq=2 * n), row(f"{n} two", "bob", seq=n)])
    killed(journal)
    (name,) = segments(store)
    return store / "wal" / name, said


# ---- what the log holds is there for all


def test_commits_are_in_the_log_and_read_by_every_reader(place: Location) -> None:
    journal = Journal.open(place, writable=True)
    journal.append([row("first"), row("second", "bob")])
    journal.append([row("third", seq=1)])
    assert segments(place) and "first" not in raw_texts(place)
    reader = Journal.open(place, writable=False)
    assert texts(reader) == ["first", "second", "third"]
    assert [r.payload for r in reader.read(tenant_keys=["ann"], after_lsn=0)] == [b"third"]
    assert reader.columns(["tenant", "lsn"]).to_pydict() == {
        "tenant": ["ann", "bob", "ann"],
        "lsn": [0, 1, 2],
    }
    assert (reader.row_count, reader.count(["ann"]), reader.next_lsn) == (3, 2, 3)
    assert "first" not in raw_texts(place), "readers move nothing"
    assert texts(journal) == ["first", "second", "third"] == raw_texts(place)[-3:]
    assert not segments(place)
    journal.append([row("fourth", seq=2)])
    journal.close()
    assert not segments(place) and stored(place) == ["first", "second", "third", "fourth"]


def test_the_next_writer_goes_on_where_the_log_ends(place: Location) -> None:
    for n in range(3):
        journal = taken_over(place)
        assert journal.next_lsn == 2 * n
        journal.append([row(f"a{n}")])
        journal.append([row(f"b{n}")])
    said = [f"{x}{n}" for n in range(3) for x in "ab"]
    assert stored(place) == said
    assert [r.lsn for r in Journal.open(place, writable=False).read()] == list(range(6))
    assert texts(taken_over(place)) == said and not segments(place)


def test_a_flush_moves_rows_in_the_background_and_keeps_their_order(
    place: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "ROWS_PER_FLUSH", 8)
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 6)
    journal = Journal.open(place, writable=True)
    said: list[str] = []
    for n in range(60):
        texts_of_step = [f"{n}:{i}" for i in range(1 + n % 7)]
        said += texts_of_step
        journal.append([row(text) for text in texts_of_step])
        if n % 20 == 10:
            assert stored(place) == said
    assert stored(place) == texts(journal) == said
    assert [r.lsn for r in journal.read()] == list(range(len(said))) and not segments(place)
    journal.close()


def test_a_flush_is_due_at_many_bytes_too(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all commits that wait in the log, and in memory, and no more once they are moved."""
    monkeypatch.setattr(tail, "BYTES_PER_FLUSH", 30_000)  # those of three commits
    journal = Journal.open(place, writable=True)
    assert journal._tail is not None
    said = [f"{n}" * 6_000 for n in range(9)]
    for n, text in enumerate(said):
        journal.append([row(text)])
        if flush := journal._tail._flush:
            flush.result(60)
        assert bool(segments(place)) is (n % 3 != 2), f"commit {n}"
    assert texts(journal) == said
    journal.close()


def test_rows_that_no_flush_can_move_are_of_bounded_size(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "BYTES_PER_FLUSH", 30_000)
    journal = Journal.open(store, writable=True)
    monkeypatch.setattr(LanceLog, "append", Mock(side_effect=OSError("No space left on device")))
    said: list[str] = []
    with pytest.raises(JournalError, match=r"No space left"):
        while len(said) < 100:
            journal.append([row("x" * 6_000)])
            said.append("x" * 6_000)
    assert 2 * tail.MOST_FLUSHES < len(said) < 5 * tail.MOST_FLUSHES
    assert stored(store) == said


def test_a_flush_that_fails_is_done_again_and_loses_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tail, "ROWS_PER_FLUSH", 2)
    journal = Journal.open(store, writable=True)
    with monkeypatch.context() as patched:
        patched.setattr(LanceLog, "append", Mock(side_effect=OSError("No space left on device")))
        for n in range(5):
            journal.append([row(f"{n}")])
        with pytest.raises(JournalError, match=r"No space left.*Free space"):
            texts(journal)
        assert "waits to be moved" in caplog.text
        assert stored(store) == [f"{n}" for n in range(5)]
    journal.append([row("5")])
    assert texts(journal) == [f"{n}" for n in range(6)] and not segments(store)


def test_segments_that_a_flush_could_not_remove_are_removed_before_a_purge_beside_appends(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row("a")])
    with monkeypatch.context() as patched:
        patched.setattr(WriteAheadLog, "remove", Mock(side_effect=OSError("device is busy")))
        moving = journal.move_until(1)
        assert moving is not None
        with pytest.raises(OSError, match="busy"):
            moving.result(60)
    assert segments(store)
    while (moving := journal.move_until(1)) is not None:
        moving.result(60)
    assert not segments(store) and texts(journal) == ["a"]


def test_rows_of_a_flush_that_only_seemed_to_fail_are_there_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(store, writable=True)
    append = LanceLog.append

    def lost_answer(table: LanceLog, rows: pa.Table) -> None:
        append(table, rows)
        raise OSError("connection reset")

    journal.append([row("first"), row("second")])
    with monkeypatch.context() as patched, pytest.raises(JournalError, match="connection reset"):
        patched.setattr(LanceLog, "append", lost_answer)
        journal.settle()
    journal.append([row("third")])
    assert texts(journal) == ["first", "second", "third"] and not segments(store)


def test_where_machines_do_not_see_each_others_files_at_once_lance_takes_every_commit(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = Mock(mountpoint=str(store.parent), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])
    journal = Journal.open(store, writable=True)
    journal.append([row("first")])
    assert raw_texts(store)[-1] == "first" and not (store / "wal").exists()
    assert stored(store) == ["first"]
    journal.close()


def test_a_log_that_was_copied_to_such_a_file_system_is_read_and_moved_to_lance(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a backup is that was restored there: with the log that a killed writer has left."""
    _, said = written(store)
    mount = Mock(mountpoint=str(store.parent), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])
    assert stored(store) == said
    journal = Journal.open(store, writable=True)
    assert raw_texts(store)[-len(said) - 1 : -1] == said and not segments(store)
    journal.append([row("more")])
    assert raw_texts(store)[-1] == "more" and not segments(store)
    assert stored(store) == [*said, "more"]
    journal.close()


def test_rows_that_a_former_writer_adds_late_are_not_read_by_the_writer_in_force(store: Path) -> None:
    former = Journal.open(store, writable=True)
    journal = taken_over(store)
    journal.append([row("mine")])
    late = Row("turn", "ann", "ann", 0, b"late", lsn=10, epoch=former.epoch)
    LanceLog(Location.of(store) / "journal.lance").append(to_table([late]))
    assert texts(journal) == ["mine"]


# ---- damage


@pytest.mark.parametrize("change", ["cut", "flip"])
def test_each_byte_of_the_last_kilobyte_cut_or_flipped(store: Path, change: str) -> None:
    """What is cut off was never acknowledged; what is flipped is told. Nothing else is missing or wrong."""
    file, said = written(store)
    data = file.read_bytes()
    log = WriteAheadLog(Location.of(store))
    for place in range(max(0, len(data) - 1024), len(data)):
        changed = (
            data[:place] if change == "cut" else data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        )
        file.write_bytes(changed)
        content = log.read()
        shown = {
            entry.first_lsn + n: text.decode()
            for entry in content.entries
            for n, text in enumerate(entry.batch["payload"].to_pylist())
        }
        assert all(said[lsn] == text for lsn, text in shown.items())
        missing = set(range(len(said))) - shown.keys()
        if change == "cut":
            assert not content.damages and missing == set(range(len(shown), len(said)))
            assert bool(content.torn) == (len(changed) not in ends_of(data))
        else:
            (damage,) = content.damages
            ends = len(said) if damage.end_lsn is None else damage.end_lsn
            assert missing == set(range(damage.first_lsn, ends))
            assert damage.offset is not None and damage.offset <= place
    file.write_bytes(data)
    assert stored(store) == said


def ends_of(data: bytes) -> set[int]:
    """Where the entries of a segment begin and end."""
    ends, offset = {0}, 0
    while offset < len(data):
        offset += wal._HEADER.size + wal._HEADER.unpack_from(data, offset)[5] + len(wal.END)
        ends.add(offset)
    return ends


@pytest.mark.parametrize("zeros", [False, True])
def test_an_append_that_was_cut_off_is_told_and_left_out(
    store: Path, caplog: pytest.LogCaptureFixture, zeros: bool
) -> None:
    """A loss of power may leave zeros where nothing was written yet."""
    file, said = written(store)
    data = file.read_bytes()
    file.write_bytes(data + bytes(4096) if zeros else data[:-7])
    left = said if zeros else said[:-2]
    assert stored(store) == left and not caplog.text
    journal = Journal.open(store, writable=True)
    assert "never acknowledged" in caplog.text and file.name in caplog.text
    journal.append([row("next")])
    assert stored(store) == texts(journal) == [*left, "next"]


def test_damage_is_refused_by_name_and_given_up_by_a_repair_alone(store: Path) -> None:
    file, said = written(store)
    data = bytearray(file.read_bytes())
    begins = sorted(ends_of(bytes(data)))
    data[begins[2] + 100] ^= 1  # the body of the third commit
    data[begins[4] + 9] ^= 1  # the header of the fifth
    file.write_bytes(data)
    named = (
        rf"{file.name} is damaged at byte {begins[2]}: rows 4 to 5.*at byte {begins[4]}: rows 8 to 9.*repair"
    )
    for writable in (False, True):
        with pytest.raises(DamagedLog, match=named):
            Journal.open(store, writable=writable)
    journal = Journal.open(store, writable=True, repair=True)
    kept = [text for text in said if text[0] not in "24"]
    assert [(d.first_lsn, d.end_lsn) for d in journal.given_up] == [(4, 6), (8, 10)]
    assert texts(journal) == kept and not segments(store)
    journal.append([row("next")])
    journal.close()
    assert stored(store) == [*kept, "next"]


def test_a_segment_that_is_missing_or_cut_before_the_last_one_is_damage(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(store, writable=True)
    for n in range(3):
        journal.append([row(f"{n}")])
        assert journal._wal is not None
        journal._wal.end_segments()
    killed(journal)
    names = segments(store)
    middle = store / "wal" / names[1]
    data = middle.read_bytes()
    middle.write_bytes(data[:-1])
    with pytest.raises(DamagedLog, match=f"{names[1]} is damaged at byte 0: rows 1 to 1"):
        stored(store)
    middle.unlink()
    with pytest.raises(DamagedLog, match=rf"wal/{names[1]} is missing: rows 1 to 1"):
        stored(store)
    middle.write_bytes(data)
    assert stored(store) == ["0", "1", "2"]


def test_damage_to_rows_that_are_in_lance_or_of_a_former_writer_is_none(store: Path) -> None:
    file, said = written(store)
    data = file.read_bytes()
    Journal.open(store, writable=True).close()
    file.write_bytes(data[:100] + bytes(100) + data[200:])
    assert stored(store) == said
    assert texts(Journal.open(store, writable=True)) == said and not segments(store)


# ---- erasure


SECRET = "zq7w-violin-9f3k"

ERASE: dict[str, Callable[[Journal], Any]] = {
    "tenant": lambda journal: journal.delete(["ann"], before_lsn=journal.next_lsn),
    "rows": lambda journal: journal.delete_rows([0]),
}


@pytest.mark.parametrize("how", ERASE)
def test_a_purge_leaves_no_byte_in_the_log(place: Location, how: str) -> None:
    journal = Journal.open(place, writable=True)
    journal.append([row(SECRET), row("b2mx-harbour", "bob")])
    assert bytes_hold(place, SECRET)
    ERASE[how](journal)
    journal.append([row("later", "bob")])
    journal.purge()
    assert not bytes_hold(place, SECRET) and bytes_hold(place, "b2mx-harbour")
    assert stored(place) == ["b2mx-harbour", "later"]


def test_a_purge_waits_for_a_flush_under_way(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "ROWS_PER_FLUSH", 2)
    begun, go = threading.Event(), threading.Event()
    journal = Journal.open(store, writable=True)
    append = LanceLog.append

    def slow(table: LanceLog, rows: pa.Table) -> None:
        begun.set()
        assert go.wait(SOON_S)
        append(table, rows)

    monkeypatch.setattr(LanceLog, "append", slow)
    journal.append([row(SECRET), row("b2mx-harbour", "bob")])
    assert begun.wait(SOON_S)
    journal.append([row(SECRET)])

    def erase() -> None:
        journal.delete(["ann"], before_lsn=journal.next_lsn)
        journal.purge()

    erasing = threading.Thread(target=erase)
    erasing.start()
    erasing.join(0.3)
    assert erasing.is_alive() and bytes_hold(store, SECRET)
    go.set()
    erasing.join()
    assert not bytes_hold(store, SECRET) and stored(store) == ["b2mx-harbour"]


def test_what_an_overtaken_writer_left_in_the_log_goes_with_a_purge(store: Path) -> None:
    old = Journal.open(store, writable=True)
    old.append([row("first")])
    new = taken_over(store)
    with pytest.raises(JournalError):
        old.append([row(SECRET)])
    assert bytes_hold(store, SECRET)
    new.purge()
    assert not bytes_hold(store, SECRET) and stored(store) == ["first"]


def test_a_commit_to_lance_is_not_acknowledged_once_another_has_claimed_the_store(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the number of its version seems to follow, as after a purge of the versions between."""
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 1)
    old = Journal.open(store, writable=True)
    taken_over(store).append([row("second")])
    old._seen = 1_000  # any version seems to follow
    with pytest.raises(Fenced):
        old.append([row("late")])
    assert stored(store) == ["second"]
