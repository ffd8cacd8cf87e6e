"""The journal's compaction, deletion and durability."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lance
import pytest
from lance.file import LanceFileReader

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import lance_log, wal
from undertow.engine.storage.journal import SCHEMA, Journal, Row
from undertow.engine.storage.lance_log import LanceLog, _worth_merging
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import read_info

from ....support.engine import bytes_hold
from ....support.storage.journal import DIM, contents, row

# ---- compaction


def test_compaction_keeps_order_and_content_and_bounds_the_files(
    place: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, between = (600, 50) if place.folder else (40, 10)
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", between)
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 1)
    monkeypatch.setattr(lance_log, "READER_GRACE", timedelta(0))
    journal = Journal.open(place, writable=True)
    expected = []
    most = 0
    for n in range(commits):
        one = row(f"text {n}", f"tenant {n % 3}", seq=n // 3)
        journal.append([one])
        assert one.vector is not None
        expected.append((n, "turn", one.tenant, one.seq, one.payload, one.vector.tobytes()))
        if n % between == between - 1:
            journal.finish_tidying()
            most = max(most, len(place.list()))
    assert contents(journal) == expected
    of_one = [r for r in expected if r[2] == "tenant 1"]
    assert contents(journal, tenant_keys=["tenant 1"]) == of_one
    journal.close()
    again = Journal.open(place, writable=True)
    assert again.next_lsn == commits
    assert contents(again, tenant_keys=["tenant 1"]) == of_one
    again.close()
    # each commit leaves a data file, a manifest and a transaction if nothing is merged and dropped
    assert most < between + 10
    assert len(place.list()) < between + 10


def test_rows_that_no_fragment_limit_holds_stay_in_order(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments fill up and are left alone; deletions in the middle and the last lsn survive.

    The index covers all but less than a fragment's rows of older ones, and what has come since.
    """
    monkeypatch.setattr(lance_log, "ROWS_PER_FRAGMENT", 16)
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 7)
    journal = Journal.open(store, writable=True)
    for n in range(100):
        journal.append([row(seq=2 * n), row(tenant="bob", seq=2 * n + 1)])
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
    of_ann = [r.lsn for r in again.read(tenant_keys=["ann"])]
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
    journal.append([row()])
    assert not journal._table._dataset.describe_indices()
    journal.compact()
    assert len(journal._table._dataset.describe_indices()) == 1
    assert [r.seq for r in journal.read(tenant_keys=["ann"])] == [0]
    journal.close()


def test_a_compaction_that_fails_does_not_undo_the_append(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 2)
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 1)
    with monkeypatch.context() as patched:
        patched.setattr(LanceLog, "tidy", Mock(side_effect=OSError("No space left on device")))
        for seq in range(3):
            journal.append([row(seq=seq)])
    assert "cannot compact" in caplog.text
    journal.append([row(seq=3)])
    assert [r.seq for r in journal.read()] == [0, 1, 2, 3]


# ---- deletion


def every_value_on_disk(store: Path) -> str:
    """All columns of all Lance files that lie in the store, referenced or not, decoded."""
    tables = [
        LanceFileReader(str(path)).read_all().to_table() for path in store.rglob("*.lance") if path.is_file()
    ]
    return "\n".join(str(table.to_pylist()) for table in tables)


def found_in(store: Path, text: str) -> tuple[bool, bool]:
    """Whether the text is among the bytes of the store, and among the decoded values."""
    return bytes_hold(store, text), text in every_value_on_disk(store)


def test_purge_leaves_no_byte_of_deleted_text(journal: Journal, store: Path) -> None:
    secret, kept = "zq7w-violin-9f3k", "b2mx-harbour-77aa"
    journal.append([row(secret, secret), row(kept, "bob")])
    journal.append([row(f"again {secret}", secret, seq=1)])
    assert bytes_hold(store, secret), "in the log"
    assert journal.count([secret]) == 2
    assert found_in(store, secret) == found_in(store, kept) == (True, True)
    journal.delete([secret], before_lsn=journal.next_lsn)
    assert journal.count([secret]) == 0
    assert [r.tenant for r in journal.read()] == ["bob"]
    assert bytes_hold(store, secret), "deleting alone must not be enough"
    journal.purge()
    assert found_in(store, secret) == (False, False)
    assert found_in(store, kept) == (True, True)
    assert contents(journal)[0][2:4] == ("bob", 0)
    journal.append([row(tenant="bob", seq=1)])
    assert [r.lsn for r in journal.read(tenant_keys=["bob"])] == [1, 3]


def test_deleted_rows_leave_and_the_others_stay(journal: Journal, store: Path) -> None:
    journal.append([row(f"words {seq} wqx{seq}z", seq=seq) for seq in range(5)])
    journal.delete_rows([1, 3])
    journal.delete_rows([])
    assert [r.lsn for r in journal.read()] == [0, 2, 4]
    journal.purge()
    on_disk = every_value_on_disk(store)
    assert [f"wqx{seq}z" in on_disk for seq in range(5)] == [True, False, True, False, True]


def test_deletion_stops_at_the_lsn_it_is_given(journal: Journal) -> None:
    journal.append([row(seq=seq) for seq in range(4)])
    journal.delete(["ann"], before_lsn=2)
    assert [r.lsn for r in journal.read()] == [2, 3]


def test_a_purge_of_everything_keeps_the_journal_usable(store: Path) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row()])
    journal.delete_rows([0])
    journal.purge()
    journal.close()
    again = Journal.open(store, writable=True)
    again.append([row(tenant="bob")])
    assert [r.tenant for r in again.read(tenant_keys=["bob"])] == ["bob"]
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
module.ROWS_PAST_LOG = int(sys.argv[3])
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


def appends(store: Path, durability: str, past_log: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SYNC_RECORDER, str(store), durability, str(past_log)],
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
    *steps, last = appends(tmp_path / "store", "fsync", past_log=1)
    assert last["rows"] == [0, 1, 2, 3]
    uri = tmp_path / "store" / "journal.lance"
    for step in steps:
        needed = needed_of(step["new"])
        assert any(p.endswith(".lance") for p in needed) and any(p.endswith(".manifest") for p in needed)
        assert needed <= set(step["synced"])
        assert {str(uri / "data"), str(uri / "_versions")} <= set(step["synced"])


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
def test_fsync_syncs_the_log_before_append_returns(tmp_path: Path) -> None:
    first, *others, last = appends(tmp_path / "store", "fsync", past_log=1000)
    assert last["rows"] == [0, 1, 2, 3]
    (segment,) = first["new"]
    assert first["synced"] == [str(Path(segment).parent), segment]
    assert [(step["new"], step["synced"]) for step in others] == 3 * [([], [segment])]


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
@pytest.mark.parametrize("past_log", [1, 1000])
def test_commit_durability_leaves_syncing_to_the_system(tmp_path: Path, past_log: int) -> None:
    *steps, last = appends(tmp_path / "store", "commit", past_log)
    assert last["rows"] == [0, 1, 2, 3]
    assert not any(step["synced"] for step in steps)


def test_the_schema_has_no_column_that_the_rows_lack() -> None:
    assert set(SCHEMA.names) == set(Row.__slots__)


def test_a_new_journal_is_on_the_disk_before_its_store_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure `store.json` would name a journal that is not there."""
    synced: set[Path] = set()
    monkeypatch.setattr(lance_log, "fsync_path", synced.add)
    LanceLog.make(Location(str(tmp_path / "log.lance")), SCHEMA)
    newest = min((tmp_path / "log.lance/_versions").glob("*.manifest"))  # they count down
    indexes = [path for path in (tmp_path / "log.lance/_indices").rglob("*") if path.is_file()]
    assert indexes and {newest, newest.parent, *indexes} <= synced


def test_segments_that_were_removed_stay_away_before_their_rows_are_deleted(
    place: Location, monkeypatch: pytest.MonkeyPatch, calls_of: Callable[..., list[str]]
) -> None:
    """A power failure could bring one back: its rows, beyond those of the table, would be stored again."""
    if place.folder is None:
        pytest.skip("a bucket loses no removal")
    order = calls_of(LanceLog, "delete", lambda *_: "deletion")
    monkeypatch.setattr(wal, "fsync_path", lambda path: order.append(path.name))
    journal = Journal.open(place, writable=True)
    deletions = partial(journal.delete, ["t"], before_lsn=9), partial(journal.delete_rows, [1])
    for act in deletions:
        journal.append([row("text", "t", seq=0)])
        order.clear()
        act()
        assert order == [wal.FOLDER, "deletion"]
    journal.close()
