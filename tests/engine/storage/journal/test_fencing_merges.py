"""Fencing of compactions, and of streams that are written as one version."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from lance.optimize import Compaction

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import lance_log
from undertow.engine.storage.fenced_log import mark_table
from undertow.engine.storage.fencing import FenceMark
from undertow.engine.storage.journal import Fenced, Journal, Row
from undertow.engine.storage.journal_rows import to_table
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location

from ....support.storage.journal import raw_texts, row, stored, taken_over, texts


@pytest.fixture(autouse=True)
def past_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every append goes to Lance."""
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 1)


def before_next_merge(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, between the rewriting of the next merge's fragments and its commit."""
    commit = Compaction.commit

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(Compaction, "commit", commit)
        act()
        return commit(*arguments)

    monkeypatch.setattr(Compaction, "commit", staticmethod(late))


def test_a_late_compaction_cannot_bring_rows_out_of_order(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Journal.open(store, writable=True)
    for n in range(4):
        old.append([row(f"old {n}", tenant=f"t{n % 2}")])
    new: list[Journal] = []

    def take_over() -> None:
        new.append(taken_over(store))
        new[0].append([row("new 0", tenant="t0"), row("new 1", tenant="t1")])

    before_next_merge(monkeypatch, take_over)
    with pytest.raises(Fenced):
        old.compact()
    assert raw_texts(store)[-1].startswith("old"), "Lance has put the old rows behind the new ones"
    new[0].append([row("new 2")])
    reader = Journal.open(store, writable=False)
    for journal in (reader, new[0]):
        assert [r.lsn for r in journal.read()] == list(range(7))
        assert journal.columns(["kind", "lsn"])["lsn"].to_pylist() == list(range(7))
        assert [r.payload for r in journal.read(tenant_keys=["t1"])] == [b"old 1", b"old 3", b"new 1"]
    new[0].purge()
    assert stored(store) == [*(f"old {n}" for n in range(4)), *(f"new {n}" for n in range(3))]


def test_own_merges_are_not_taken_for_anothers_commits(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are some versions each; a look at them reads the whole log."""
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 4)
    journal = Journal.open(store, writable=True)
    version, looks = journal._table.version, Mock()
    monkeypatch.setattr(Journal, "_look", looks)
    for n in range(12):
        journal.append([row(f"r{n}")])
    assert journal._table.version == version + 12 + 3 * lance_log.VERSIONS_PER_MERGE
    looks.assert_not_called()
    assert texts(journal) == stored(store) == [f"r{n}" for n in range(12)]


def test_a_claim_in_the_middle_of_a_merge_is_seen(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 3)
    new: list[Journal] = []
    old = Journal.open(store, writable=True)
    before_next_merge(monkeypatch, lambda: new.append(taken_over(store)))
    for n in range(3):
        old.append([row(f"r{n}")])  # acknowledged: committed before the claim
    with pytest.raises(Fenced):
        old.append([row("late")])
    new[0].append([row("r3")])
    assert stored(store) == texts(new[0]) == [f"r{n}" for n in range(4)]


def purge_of_one(table: LanceLog) -> None:
    table.delete("lsn = 1")
    table.rewrite_deleted()


BETWEEN: dict[str, Callable[[LanceLog], Any]] = {
    "a deletion": lambda table: table.delete("lsn = 1"),
    "a purge": lambda table: purge_of_one(table),
    "a merge": lambda table: table.tidy(),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_merge_of_rows_that_have_changed_meanwhile_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, between: str
) -> None:
    """Else it would bring a deleted row back, or a row twice. The append that it came with is stored."""
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 4)
    journal = Journal.open(store, writable=True)
    table = Location.of(store) / "journal.lance"
    before_next_merge(monkeypatch, lambda: BETWEEN[between](LanceLog(table)))
    for n in range(4):
        journal.append([row(f"r{n}")])
    assert "cannot compact" in caplog.text
    there = [f"r{n}" for n in range(4) if n != 1 or between == "a merge"]
    assert sorted(said_in(store)) == there == stored(store)
    for n in range(4, 8):  # the next merge finds what is there
        journal.append([row(f"r{n}")])
    assert caplog.text.count("cannot compact") == 1
    assert sorted(said_in(store)) == texts(journal) == [*there, *(f"r{n}" for n in range(4, 8))]


def said_in(store: Path) -> list[str]:
    return [text for text in raw_texts(store) if text.startswith("r")]  # no marks


def test_a_merge_that_leaves_nothing_hides_no_claim(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no fragment to reserve an id for, it is one version: with a claim in the middle as many
    as other merges make. Overlooked, what is appended after that would be acknowledged, and lost.

    Lance itself drops a fragment with its last row; this is what it would do if it left that to the merge.
    """
    old = Journal.open(store, writable=True)
    for n in range(3):
        old.append([row(f"r{n}")])

    def commit(dataset: Any, *_: Any) -> None:
        LanceLog(Location.of(store) / "journal.lance").append(mark_table([FenceMark(2, "next")]))
        dataset.delete("lsn = 0")

    with monkeypatch.context() as patched:
        emptied = SimpleNamespace(execute=lambda _: SimpleNamespace(new_fragments=[]))
        patched.setattr(Compaction, "plan", staticmethod(lambda *_: SimpleNamespace(tasks=[emptied])))
        patched.setattr(Compaction, "commit", staticmethod(commit))
        patched.setattr(journal_module, "COMMITS_PER_COMPACTION", 4)
        old.append([row("r3")])  # committed before the claim
    with pytest.raises(Fenced):
        old.append([row("late")])
    assert texts(taken_over(store)) == ["r1", "r2", "r3"]


# ---- streams


def test_a_stream_is_one_version_with_lsns_in_order(place: Location) -> None:
    journal = Journal.open(place, writable=True)
    journal.append([row("before")])
    batch = to_table([row("in a batch 0"), row("in a batch 1")]).to_batches()[0]
    version = journal._table.version
    rows: list[Row | pa.RecordBatch] = [*(row(f"r{n}") for n in range(5_000)), batch, row("last")]
    assert journal.append_stream(iter(rows)) == 5_003
    assert journal._table.version == version + 1
    assert journal.append_stream([]) == 0
    journal.append([row("after")])
    expected = ["before", *(f"r{n}" for n in range(5_000)), "in a batch 0", "in a batch 1", "last", "after"]
    assert texts(journal) == stored(place) == expected
    assert [(r.lsn, r.epoch) for r in journal.read()] == [(n, 1) for n in range(5_005)]


def test_a_source_that_fails_leaves_the_journal_as_it_was(store: Path) -> None:
    journal = Journal.open(store, writable=True)

    def rows() -> Iterator[Row]:
        for n in range(10_000):
            yield row(f"r{n}")
        raise LookupError("the other journal is gone")

    with pytest.raises(LookupError, match="the other journal is gone"):
        journal.append_stream(rows())
    journal.append([row("after")])
    assert [(r.lsn, r.payload) for r in journal.read()] == [(0, b"after")]
    journal.purge()
    assert len(list((store / "journal.lance" / "data").iterdir())) == len(
        journal._table._dataset.get_fragments()
    )


def test_a_stream_takes_a_few_batches_of_memory_at_most(store: Path) -> None:
    journal = Journal.open(store, writable=True)
    payload = os.urandom(4_000)
    most = 0

    def rows() -> Iterator[Row]:
        nonlocal most
        for n in range(30_000):
            if n % 1_000 == 0:
                most = max(most, pa.total_allocated_bytes())
            yield Row("turn", "ann", "ann", n, payload)

    base = pa.total_allocated_bytes()
    assert journal.append_stream(rows()) == 30_000
    assert most - base < 30_000 * len(payload) / 2
    assert journal.row_count == 30_000
