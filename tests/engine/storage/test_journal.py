"""The journal: order, atomicity, one writer, compaction, purge, durability."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lance
import numpy as np
import pytest
from lance.file import LanceFileReader

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import lance_log as log_table
from undertow.engine.storage.journal import SCHEMA, Journal, JournalError, Kind, Row
from undertow.engine.storage.journal_rows import to_table
from undertow.engine.storage.lance_log import LanceLog, _worth_merging
from undertow.engine.storage.store_info import FORMAT_VERSION, StoreError, StoreLocked, read_info

DIM = 8


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Journal.create(tmp_path / "store", DIM, {"model": "none"})
    return tmp_path / "store"


@pytest.fixture
def journal(store: Path) -> Iterator[Journal]:
    opened = Journal.open(store, writable=True)
    yield opened
    opened.close()


def row(journal: Journal, tenant: str, seq: int, text: str = "words", kind: Kind = "turn") -> Row:
    vector = np.full(DIM, seq % 7, dtype=np.float16) if kind == "turn" else None
    payload = json.dumps({"text": text}).encode()
    key = journal.info.tenant_key(tenant)
    return Row(kind, tenant, key, seq, payload, f"{tenant}-{seq}", "2026-03-01", vector)


def contents(journal: Journal, **filters: Any) -> list[tuple[int, str, str, int, bytes, bytes | None]]:
    return [
        (r.lsn, r.kind, r.tenant, r.seq, r.payload, None if r.vector is None else r.vector.tobytes())
        for r in journal.read(**filters)
    ]


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# ---- order and atomicity


def test_rows_come_back_in_append_order_with_their_values(journal: Journal, store: Path) -> None:
    first = [row(journal, "ann", 0), row(journal, "bob", 0, kind="decision"), row(journal, "ann", 1)]
    second = [row(journal, "bob", 1, text="Grüße ' \" \x00 ☃")]
    journal.append(first)
    journal.append(second)
    expected = [
        (i, r.kind, r.tenant, r.seq, r.payload, None if r.vector is None else r.vector.tobytes())
        for i, r in enumerate([*first, *second])
    ]
    assert contents(journal) == expected
    assert contents(Journal.open(store, writable=False)) == expected
    assert journal.next_lsn == journal.row_count == 4


def test_filters_select_and_keep_order(journal: Journal) -> None:
    for seq in range(10):
        journal.append([row(journal, name, seq, kind=kind) for name in ("ann", "o'neil") for kind in KINDS])
    key = journal.info.tenant_key("o'neil")
    found = contents(journal, tenant_keys=[key], kinds=["turn"])
    assert [(r[2], r[1], r[3]) for r in found] == [("o'neil", "turn", seq) for seq in range(10)]
    assert [r[0] for r in found] == sorted(r[0] for r in found)
    assert len(contents(journal, ids=["o'neil-3"])) == len(KINDS)
    assert contents(journal, tenant_keys=[]) == []
    assert all(r[5] is None for r in contents(journal, vectors=False))


KINDS: tuple[Kind, ...] = ("turn", "decision")


def test_an_append_that_raises_leaves_nothing(journal: Journal, store: Path) -> None:
    journal.append([row(journal, "ann", 0)])
    bad = row(journal, "ann", 2)
    bad.payload = None  # type: ignore[assignment]
    bad.seq = "two"  # type: ignore[assignment]
    with pytest.raises((TypeError, ValueError, JournalError)):
        journal.append([row(journal, "ann", 1), bad])
    assert [r.seq for r in Journal.open(store, writable=False).read()] == [0]


def test_after_a_failed_write_nothing_is_taken_until_the_store_is_reopened(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a caller that goes on would be told that turns of the failed step are duplicates."""
    journal = Journal.open(store, writable=True)
    journal.append([row(journal, "ann", 0)])

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "insert", full)
        with pytest.raises(JournalError, match=r"No space left.*free space"):
            journal.append([row(journal, "ann", 1)])
    for rows in ([row(journal, "ann", 2)], []):
        with pytest.raises(JournalError, match="earlier write failed"):
            journal.append(rows)
    journal.close()
    again = Journal.open(store, writable=True)
    again.append([row(again, "ann", 1)])
    assert [(r.seq, r.lsn) for r in again.read()] == [(0, 0), (1, 1)]
    again.close()


def test_a_crash_between_data_file_and_commit_leaves_the_journal_readable(store: Path) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row(journal, "ann", 0)])
    journal.close()
    dataset = lance.dataset(str(store / "journal.lance"))
    orphan = to_table([row(journal, "ann", 1)])
    lance.fragment.write_fragments(orphan, dataset, mode="append")
    whole = max((store / "journal.lance" / "data").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    (store / "journal.lance" / "data" / "half.lance").write_bytes(whole.read_bytes()[:100])
    again = Journal.open(store, writable=True)
    assert again.next_lsn == 1
    again.append([row(again, "ann", 1)])
    assert [(r.seq, r.lsn) for r in again.read()] == [(0, 0), (1, 1)]
    again.purge()
    names = {p.name for p in files_in(store)}
    assert "half.lance" not in names, "a purge removes what a crash left lying"
    again.close()


# ---- opening


def test_reopening_continues_lsns_and_raises_the_epoch(store: Path) -> None:
    for n in range(3):
        journal = Journal.open(store, writable=True)
        journal.append([row(journal, "ann", 2 * n), row(journal, "ann", 2 * n + 1)])
        journal.close()
    rows = list(Journal.open(store, writable=False).read())
    assert [r.lsn for r in rows] == list(range(6))
    assert [r.epoch for r in rows] == [1, 1, 2, 2, 3, 3]


def test_a_reader_neither_writes_nor_waits_and_sees_what_was_committed(store: Path) -> None:
    writer = Journal.open(store, writable=True)
    writer.append([row(writer, "ann", 0)])
    before = read_info(store)
    reader = Journal.open(store, writable=False)
    writer.append([row(writer, "ann", 1)])
    assert [r.seq for r in reader.read()] == [0], "a reader keeps the version it opened"
    assert [r.seq for r in Journal.open(store, writable=False).read()] == [0, 1]
    assert read_info(store) == before
    with pytest.raises(JournalError, match="reading only"):
        reader.append([row(reader, "ann", 2)])
    for seq in range(2, 30):
        writer.append([row(writer, "ann", seq)])
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


def test_creating_twice_keeps_the_hash_key(store: Path) -> None:
    before = read_info(store)
    Journal.create(store, DIM, {"model": "another"})
    assert read_info(store) == before


def test_creation_killed_half_way_is_finished_by_the_next(tmp_path: Path) -> None:
    Journal.create(tmp_path, DIM, {})
    (tmp_path / "store.json").unlink()
    Journal.create(tmp_path, DIM, {})
    journal = Journal.open(tmp_path, writable=True)
    journal.append([row(journal, "ann", 0)])
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
    journal.append([row(journal, "ann", 0)])
    journal.close()


CREATOR = """
import sys
from pathlib import Path
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.store_info import StoreLocked, read_info
folder = Path(sys.argv[1])
try:
    Journal.create(folder, int(sys.argv[2]), {})
except StoreLocked:
    print("locked")
else:
    print(read_info(folder).hash_key)
"""


def test_creators_at_the_same_time_agree_on_one_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-B", "-c", CREATOR, str(store), str(DIM)]
    creators = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {creator.communicate(timeout=120)[0].strip() for creator in creators}
    assert keys - {"locked"} == {read_info(store).hash_key}


# ---- compaction


def test_compaction_keeps_order_and_content_and_bounds_the_files(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 50)
    monkeypatch.setattr(log_table, "READER_GRACE", timedelta(0))
    journal = Journal.open(store, writable=True)
    expected = []
    most = 0
    for n in range(600):
        one = row(journal, f"tenant {n % 3}", n // 3, text=f"text {n}")
        journal.append([one])
        assert one.vector is not None
        expected.append((n, "turn", one.tenant, one.seq, one.payload, one.vector.tobytes()))
        if n % 50 == 49:
            journal.finish_tidying()
            most = max(most, len(files_in(store)))
    assert contents(journal) == expected
    key = journal.info.tenant_key("tenant 1")
    of_one = [r for r in expected if r[2] == "tenant 1"]
    assert contents(journal, tenant_keys=[key]) == of_one
    journal.close()
    again = Journal.open(store, writable=True)
    assert again.next_lsn == 600
    assert contents(again, tenant_keys=[key]) == of_one
    again.close()
    # 600 commits: 600 data files, manifests and transactions each if nothing were merged and dropped
    assert most < 60
    assert len(files_in(store)) < 60


def test_rows_that_no_fragment_limit_holds_stay_in_order(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments fill up and are left alone; deletions in the middle and the last lsn survive.

    The index covers all but less than a fragment's rows of older ones, and what has come since.
    """
    monkeypatch.setattr(log_table, "ROWS_PER_FRAGMENT", 16)
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 7)
    journal = Journal.open(store, writable=True)
    for n in range(100):
        journal.append([row(journal, "ann", 2 * n), row(journal, "bob", 2 * n + 1)])
        if n % 10 == 5:
            journal.delete_rows([2 * n - 7])
        (index,) = journal._table._dataset.describe_indices()
        assert journal.row_count - index.num_rows_indexed < 16 + 2 * 7
    stored = journal._table.scanner(["lsn"]).to_table()["lsn"].to_pylist()
    assert stored == sorted(stored), "nothing has to be sorted to be read"
    journal.close()
    gone = {2 * n - 7 for n in range(100) if n % 10 == 5}
    again = Journal.open(store, writable=True)
    assert [r.lsn for r in again.read()] == [lsn for lsn in range(200) if lsn not in gone]
    assert again.next_lsn == 200
    of_ann = [r.lsn for r in again.read(tenant_keys=[again.info.tenant_key("ann")])]
    assert of_ann == [lsn for lsn in range(0, 200, 2) if lsn not in gone]
    again.close()


@pytest.mark.parametrize(
    ("rows", "merged"),
    [
        ({}, set()),
        ({7: 5}, {7}),
        ({1: 100, 2: 9, 3: 10, 7: 10}, {2, 3, 7}),
        ({1: 29, 2: 9, 3: 10, 7: 10}, {1, 2, 3, 7}),
        ({1: 5, 2: 21, 3: 10, 7: 10}, {3, 7}),
    ],
)
def test_the_newest_fragments_are_merged_up_to_one_larger_than_all_behind_it(
    rows: dict[int, int], merged: set[int]
) -> None:
    assert _worth_merging(rows) == merged


def test_an_index_that_a_kill_has_left_out_is_made_by_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lance.LanceDataset, "create_scalar_index", Mock(side_effect=KeyboardInterrupt))
        Journal.create(tmp_path, DIM, {})
    Journal.create(tmp_path, DIM, {})
    journal = Journal.open(tmp_path, writable=True)
    journal.append([row(journal, "ann", 0)])
    assert not journal._table._dataset.describe_indices()
    journal.compact()
    assert len(journal._table._dataset.describe_indices()) == 1
    assert [r.seq for r in journal.read(tenant_keys=[journal.info.tenant_key("ann")])] == [0]
    journal.close()


def test_a_compaction_that_fails_does_not_undo_the_append(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: LanceLog) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 2)
    with monkeypatch.context() as patched:
        patched.setattr(LanceLog, "tidy", full)
        for seq in range(3):
            journal.append([row(journal, "ann", seq)])
    assert "cannot compact" in caplog.text
    journal.append([row(journal, "ann", 3)])
    assert [r.seq for r in journal.read()] == [0, 1, 2, 3]


# ---- deletion


def bytes_of(store: Path) -> bytes:
    return b"\x00".join(path.read_bytes() for path in files_in(store))


def every_value_on_disk(store: Path) -> str:
    """All columns of all Lance files that lie in the store, referenced or not, decoded."""
    tables = [
        LanceFileReader(str(path)).read_all().to_table() for path in store.rglob("*.lance") if path.is_file()
    ]
    return "\n".join(str(table.to_pylist()) for table in tables)


def test_purge_leaves_no_byte_of_deleted_text(journal: Journal, store: Path) -> None:
    secret, kept = "zq7w-violin-9f3k", "b2mx-harbour-77aa"
    journal.append([row(journal, secret, 0, secret), row(journal, "bob", 0, kept)])
    journal.append([row(journal, secret, 1, f"again {secret}")])
    for found in (bytes_of(store).decode(errors="replace"), every_value_on_disk(store)):
        assert secret in found and kept in found
    key = journal.info.tenant_key(secret)
    assert journal.count([key]) == 2
    journal.delete([key], before_lsn=journal.next_lsn)
    assert journal.count([key]) == 0
    assert [r.tenant for r in journal.read()] == ["bob"]
    assert secret in bytes_of(store).decode(errors="replace"), "deleting alone must not be enough"
    journal.purge()
    for found in (bytes_of(store).decode(errors="replace"), every_value_on_disk(store)):
        assert secret not in found and kept in found
    assert contents(journal)[0][2:4] == ("bob", 0)
    journal.append([row(journal, "bob", 1)])
    assert [r.lsn for r in journal.read(tenant_keys=[journal.info.tenant_key("bob")])] == [1, 3]


def test_deleted_rows_leave_and_the_others_stay(journal: Journal, store: Path) -> None:
    journal.append([row(journal, "ann", seq, text=f"words {seq} wqx{seq}z") for seq in range(5)])
    journal.delete_rows([1, 3])
    journal.delete_rows([])
    assert [r.lsn for r in journal.read()] == [0, 2, 4]
    journal.purge()
    on_disk = every_value_on_disk(store)
    assert [f"wqx{seq}z" in on_disk for seq in range(5)] == [True, False, True, False, True]


def test_deletion_stops_at_the_lsn_it_is_given(journal: Journal) -> None:
    journal.append([row(journal, "ann", seq) for seq in range(4)])
    journal.delete([journal.info.tenant_key("ann")], before_lsn=2)
    assert [r.lsn for r in journal.read()] == [2, 3]


def test_a_purge_of_everything_keeps_the_journal_usable(store: Path) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row(journal, "ann", 0)])
    journal.delete_rows([0])
    journal.purge()
    journal.close()
    again = Journal.open(store, writable=True)
    again.append([row(again, "bob", 0)])
    assert [r.tenant for r in again.read(tenant_keys=[again.info.tenant_key("bob")])] == ["bob"]
    again.close()


def test_a_tenants_key_is_a_keyed_hash_of_its_name(store: Path, tmp_path: Path) -> None:
    Journal.create(tmp_path / "other", DIM, {})
    here, there = read_info(store), read_info(tmp_path / "other")
    for name in ("ann", "", "a" * 10_000, "\ud800"):
        key = here.tenant_key(name)
        assert key == here.tenant_key(name) != there.tenant_key(name)
        assert len(key) == 32 and int(key, 16) >= 0
        assert key != name
    assert here.tenant_key("ann") != here.tenant_key("Ann")


# ---- durability


SYNC_RECORDER = """
import json, os, sys
from pathlib import Path
import numpy as np
from undertow.engine.storage import journal as module
from undertow.engine.storage.journal import Journal, Row
synced, really = [], os.fsync
def fsync(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    synced.append(path)
    really(descriptor)
os.fsync = fsync
store, durability = Path(sys.argv[1]), sys.argv[2]
def now():
    return {str(p) for p in store.rglob("*")}
Journal.create(store, 8, {})
journal = Journal.open(store, writable=True, durability=durability)
module.COMMITS_PER_COMPACTION = 4
for n in range(4):
    before = now()
    synced.clear()
    journal.append([Row("turn", "ann", "k", n, b"{}", vector=np.zeros(8, np.float16))])
    print(json.dumps({"new": sorted(now() - before), "synced": sorted(set(synced))}))
print(json.dumps({"rows": [r.seq for r in journal.read()]}))
"""


def appends(store: Path, durability: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SYNC_RECORDER, str(store), durability],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def needed_of(paths: list[str]) -> set[str]:
    """The files that opening the newest version will read: all but transactions and older manifests."""
    files = [p for p in paths if Path(p).is_file() and "_transactions" not in p]
    newest = min(p for p in files if p.endswith(".manifest"))
    return {p for p in files if not p.endswith(".manifest")} | {newest}


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
def test_fsync_syncs_data_manifest_and_folders_before_append_returns(tmp_path: Path) -> None:
    *steps, last = appends(tmp_path / "store", "fsync")
    assert last["rows"] == [0, 1, 2, 3]
    uri = tmp_path / "store" / "journal.lance"
    for step in steps:
        needed = needed_of(step["new"])
        assert any(p.endswith(".lance") for p in needed) and any(p.endswith(".manifest") for p in needed)
        assert needed <= set(step["synced"])
        assert {str(uri / "data"), str(uri / "_versions")} <= set(step["synced"])


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
def test_commit_durability_leaves_syncing_to_the_system(tmp_path: Path) -> None:
    *steps, last = appends(tmp_path / "store", "commit")
    assert last["rows"] == [0, 1, 2, 3]
    assert all(step["new"] and not step["synced"] for step in steps)


def test_the_schema_has_no_column_that_the_rows_lack() -> None:
    assert set(SCHEMA.names) == set(Row.__slots__)
