"""The removal of old versions beside the writer: it holds nobody up, and nothing of it is left running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import lance_log
from undertow.engine.storage import version_cleanup as cleaner
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.lance_log import LanceLog

SOON_S = 30


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """One that is tidied after every second commit; all commits go to Lance."""
    monkeypatch.setattr(journal_module, "COMMITS_PER_COMPACTION", 2)
    monkeypatch.setattr(journal_module, "ROWS_PAST_LOG", 1)
    monkeypatch.setattr(lance_log, "READER_GRACE", timedelta(0))
    Journal.create(tmp_path, 8, {"model": "none"})
    opened = Journal.open(tmp_path, writable=True)
    yield opened
    opened.close()


class Gate:
    """Holds each removal of old versions until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.ended = 0
        remove = LanceLog.drop_old_versions

        def held(table: LanceLog) -> None:
            self.begun.release()
            assert self.go.wait(SOON_S)
            remove(table)
            self.ended += 1

        patch.setattr(LanceLog, "drop_old_versions", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.go.set()


def append(journal: Journal, count: int) -> None:
    for n in range(count):
        journal.append([Row("turn", "ann", "k", n, f"text {n}".encode())])


def versions(journal: Journal) -> int:
    return len(journal.location.list(f"{journal.info.journal}/_versions"))


def test_appends_and_reads_go_on_beside_one_removal_at_most(journal: Journal, gate: Gate) -> None:
    append(journal, 9)
    assert [row.lsn for row in journal.read()] == list(range(9))
    assert gate.begun.acquire(timeout=SOON_S)
    assert not gate.begun.acquire(blocking=False), "four were due, and one is under way"
    kept = versions(journal)
    gate.go.set()
    journal.finish_tidying()
    assert gate.ended == 1 and versions(journal) < kept
    assert [row.lsn for row in Journal.open(journal.location, writable=False).read()] == list(range(9))


def test_what_is_committed_during_a_removal_stays(journal: Journal, gate: Gate) -> None:
    append(journal, 2)
    assert gate.begun.acquire(timeout=SOON_S)
    committing = threading.Thread(target=append, args=(journal, 30))
    committing.start()
    gate.go.set()
    committing.join()
    journal.finish_tidying()
    assert [row.lsn for row in Journal.open(journal.location, writable=False).read()] == list(range(32))


def test_a_removal_is_due_a_few_times_a_grace(
    journal: Journal, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(cleaner, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(lance_log, "READER_GRACE", timedelta(seconds=100))
    gate.go.set()
    for now_s[0], ended in ((1000.0, 1), (1019.0, 1), (1020.0, 2), (1021.0, 2)):
        append(journal, 2)
        journal.finish_tidying()
        assert gate.ended == ended


def test_a_purge_and_closing_wait_for_the_removal(
    journal: Journal, gate: Gate, calls_of: Callable[..., list[None]]
) -> None:
    early = threading.Event()
    append(journal, 2)
    assert gate.begun.acquire(timeout=SOON_S)
    calls_of(LanceLog, "rewrite_deleted", lambda _: early.set())
    purging = threading.Thread(target=journal.purge)
    purging.start()
    assert not early.wait(0.5)  # long enough to catch one that does not wait
    gate.go.set()
    purging.join()
    assert early.is_set() and gate.ended == 1
    gate.go.clear()
    append(journal, 2)
    assert gate.begun.acquire(timeout=SOON_S)
    closing = threading.Thread(target=journal.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    gate.go.set()
    closing.join()
    assert gate.ended == 2


def test_a_removal_that_fails_is_told_and_tried_again(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LanceLog, "drop_old_versions", Mock(side_effect=OSError("input/output error")))
        append(journal, 2)
        journal.finish_tidying()
    assert "cannot remove old versions" in caplog.text and "input/output error" in caplog.text
    kept = versions(journal)
    append(journal, 2)
    journal.finish_tidying()
    assert versions(journal) < kept


def test_syncing_passes_over_what_a_removal_has_taken(journal: Journal, tmp_path: Path) -> None:
    """A dangling link is listed and cannot be opened, as a file that goes in between."""
    journal.append([Row("turn", "ann", "k", 0, b"text")])
    journal.close()
    (tmp_path / journal.info.journal / "_indices" / "gone").symlink_to("nowhere")
    durable = Journal.open(tmp_path, writable=True, durability="fsync")
    durable.delete_rows([0])
    durable.append([Row("turn", "ann", "k", 1, b"text")])
    assert [row.seq for row in durable.read()] == [1]
    durable.close()
