"""The journal: order, atomicity, one writer, compaction, purge, durability."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import lance
import pytest

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage.journal import Journal, JournalError, Kind
from undertow.engine.storage.journal_rows import to_table
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import FORMAT_VERSION, StoreError, StoreLocked, is_store, read_info

from ....support.storage.journal import DIM, contents, row, stored

# ---- order and atomicity


def test_rows_come_back_in_append_order_with_their_values(place: Location) -> None:
    journal = Journal.open(place, writable=True)
    first = [row(), row(tenant="bob", kind="decision"), row(seq=1)]
    second = [row("Grüße ' \" \x00 ☃", "bob", seq=1)]
    journal.append(first)
    journal.append(second)
    expected = [
        (i, r.kind, r.tenant, r.seq, r.payload, None if r.vector is None else r.vector.tobytes())
        for i, r in enumerate([*first, *second])
    ]
    assert contents(journal) == expected
    assert contents(Journal.open(place, writable=False)) == expected
    assert journal.next_lsn == journal.row_count == 4


def test_filters_select_and_keep_order(journal: Journal) -> None:
    for seq in range(10):
        journal.append(
            [row(f"{name} {seq}", name, seq, kind) for name in ("ann", "o'neil") for kind in KINDS]
        )
    found = contents(journal, tenant_keys=["o'neil"], kinds=["turn"])
    assert [(r[2], r[1], r[3]) for r in found] == [("o'neil", "turn", seq) for seq in range(10)]
    assert [r[0] for r in found] == sorted(r[0] for r in found)
    assert len(contents(journal, ids=["o'neil 3"])) == len(KINDS)
    assert contents(journal, tenant_keys=[]) == []
    assert all(r[5] is None for r in contents(journal, vectors=False))


KINDS: tuple[Kind, ...] = ("turn", "decision")


def test_an_append_that_raises_leaves_nothing(journal: Journal, store: Path) -> None:
    journal.append([row()])
    bad = row(seq=2)
    bad.payload = None  # type: ignore[assignment]
    bad.seq = "two"  # type: ignore[assignment]
    with pytest.raises((TypeError, ValueError, JournalError)):
        journal.append([row(seq=1), bad])
    assert [r.seq for r in Journal.open(store, writable=False).read()] == [0]


@pytest.mark.parametrize(
    ("past_log", "owner", "write"), [(1, lance.LanceDataset, "insert"), (1000, os, "write")]
)
def test_after_a_failed_write_nothing_is_taken_until_the_store_is_reopened(
    store: Path, monkeypatch: pytest.MonkeyPatch, past_log: int, owner: object, write: str
) -> None:
    """Else a caller that goes on would be told that turns of the failed step are duplicates."""
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", past_log)
    journal = Journal.open(store, writable=True)
    journal.append([row()])
    with monkeypatch.context() as patched:
        patched.setattr(owner, write, Mock(side_effect=OSError("No space left on device")))
        with pytest.raises(JournalError, match=r"No space left.*free space"):
            journal.append([row(seq=1)])
    for rows in ([row(seq=2)], []):
        with pytest.raises(JournalError, match="earlier write failed"):
            journal.append(rows)
    journal.close()
    again = Journal.open(store, writable=True)
    again.append([row(seq=1)])
    assert [(r.seq, r.lsn) for r in again.read()] == [(0, 0), (1, 1)]
    again.close()


def test_a_crash_between_data_file_and_commit_leaves_the_journal_readable(store: Path) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row()])
    journal.close()
    dataset = lance.dataset(str(store / "journal.lance"))
    orphan = to_table([row(seq=1)])
    lance.fragment.write_fragments(orphan, dataset, mode="append")
    whole = max((store / "journal.lance" / "data").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    (store / "journal.lance" / "data" / "half.lance").write_bytes(whole.read_bytes()[:100])
    again = Journal.open(store, writable=True)
    assert again.next_lsn == 1
    again.append([row(seq=1)])
    assert [(r.seq, r.lsn) for r in again.read()] == [(0, 0), (1, 1)]
    again.purge()
    names = {p.name for p in store.rglob("*")}
    assert "half.lance" not in names, "a purge removes what a crash left lying"
    again.close()


# ---- opening


def test_reopening_continues_lsns_and_raises_the_epoch(place: Location) -> None:
    for _ in range(3):
        journal = Journal.open(place, writable=True, durability="fsync")
        journal.append([row(), row(tenant="bob")])
        journal.close()
    reader = Journal.open(place, writable=False)
    assert [(r.lsn, r.epoch) for r in reader.read()] == list(enumerate([1, 1, 2, 2, 3, 3]))
    assert [(r.lsn, r.epoch) for r in reader.read(tenant_keys=["bob"])] == [(1, 1), (3, 2), (5, 3)]


def test_a_reader_neither_writes_nor_waits_and_sees_what_was_committed(store: Path) -> None:
    writer = Journal.open(store, writable=True)
    writer.append([row()])
    before = read_info(store)
    reader = Journal.open(store, writable=False)
    writer.append([row(seq=1)])
    assert [r.seq for r in reader.read()] == [0], "a reader keeps the version it opened"
    assert [r.seq for r in Journal.open(store, writable=False).read()] == [0, 1]
    assert read_info(store) == before
    with pytest.raises(JournalError, match="reading only"):
        reader.append([row(seq=2)])
    for seq in range(2, 30):
        writer.append([row(seq=seq)])
    writer.compact()
    assert [r.seq for r in reader.read()] == [0], "compaction takes nothing from an open reader"
    writer.close()


def test_a_newer_format_is_refused(store: Path) -> None:
    info = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**info, "format_version": FORMAT_VERSION + 1}))
    for writable in (True, False):
        with pytest.raises(StoreError, match=rf"version {FORMAT_VERSION + 1}.*Install"):
            Journal.open(store, writable=writable)


@pytest.mark.parametrize("damage", ["", "{", "not json"])
def test_a_damaged_description_is_refused_with_the_cure(store: Path, damage: str) -> None:
    (store / "store.json").write_text(damage)
    with pytest.raises(StoreError, match="backup"):
        Journal.open(store, writable=False)


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(StoreError, match="not an Undertow store"):
        Journal.open(tmp_path, writable=True)
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]


def test_creating_twice_keeps_the_hash_key(place: Location) -> None:
    before = read_info(place)
    Journal.create(place, DIM, {"model": "another"})
    assert read_info(place) == before
    assert is_store(place)


def test_creation_killed_half_way_is_finished_by_the_next(tmp_path: Path) -> None:
    Journal.create(tmp_path, DIM, {})
    (tmp_path / "store.json").unlink()
    Journal.create(tmp_path, DIM, {})
    journal = Journal.open(tmp_path, writable=True)
    journal.append([row()])
    assert journal.row_count == 1
    journal.close()


# ---- one writer


def test_a_second_writer_is_told_who_holds_the_store_and_a_killed_one_frees_it(store: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from undertow.engine.storage.store_info import WriterLock\n"
        "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    version = lance.dataset(str(store / "journal.lance")).version
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(store)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):  # the first refusal must not wipe the name for the second
            with pytest.raises(StoreLocked, match=rf"process {holder.pid} on .*Wait for it, or stop it"):
                Journal.open(store, writable=True)
        assert lance.dataset(str(store / "journal.lance")).version == version, (
            "a refused writer writes nothing"
        )
        assert list(Journal.open(store, writable=False).read()) == []
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    journal = Journal.open(store, writable=True)
    journal.append([row()])
    journal.close()


def test_creators_at_the_same_time_agree_on_one_store(empty_place: Location) -> None:
    def created(_: int) -> str:
        Journal.create(empty_place, DIM, {})
        return read_info(empty_place).hash_key

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(created, range(4))) == {read_info(empty_place).hash_key}
    Journal.open(empty_place, writable=True).append([row("first")])
    assert stored(empty_place) == ["first"]
