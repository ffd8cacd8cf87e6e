"""The audit log: what stands in it, what cannot, and that no line is lost or torn."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from undertow.engine.storage.store_info import StoreInfo
from undertow.serving.auth.audit import (
    FORMS,
    LARGEST_COUNT,
    LINE_BYTES,
    MOST_COUNTS,
    WITHOUT_KEY,
    AuditError,
    AuditLog,
    AuditOutcome,
    Entry,
    RefusalCounts,
    local_user,
)

NOON = datetime(2026, 5, 8, 12, tzinfo=UTC)
KEY = "0123456789ab"
TENANT = StoreInfo.new(8, {}, "5e" * 32).tenant_key("ada")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "audit.jsonl"


@pytest.fixture
def log(path: Path) -> AuditLog:
    return AuditLog(path, now=lambda: NOON)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_an_act_is_written_before_and_after(log: AuditLog, path: Path) -> None:
    with log.act("erase", KEY, tenant_key=TENANT) as entry:
        (begun,) = lines(path)
        entry.counts["rows_removed"] = 12
    assert begun == {
        "at": "2026-05-08T12:00:00.000+00:00",
        "act_id": entry.act_id,
        "act": "erase",
        "by": KEY,
        "outcome": "begun",
        "tenant_key": TENANT,
    }
    assert lines(path) == [begun, begun | {"outcome": "done", "counts": {"rows_removed": 12}}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_of_a_failure_stands_its_kind_and_not_what_it_says(log: AuditLog, path: Path) -> None:
    with pytest.raises(RuntimeError), log.act("keys.create", local_user(), key_id=KEY):
        raise RuntimeError("ada said that her knee hurts")
    assert [(line["outcome"], line.get("error")) for line in lines(path)] == [
        ("begun", None),
        ("failed", "RuntimeError"),
    ]
    assert b"knee" not in path.read_bytes()
    log.refused("erase", WITHOUT_KEY, tenant_key=TENANT)
    assert lines(path)[-1]["outcome"] == "refused"
    assert len({line["act_id"] for line in lines(path)}) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"act": "Erase all of ada"},
        {"by": "ada"},
        {"by": "ut_0123456789ab_" + "A" * 43},
        {"tenant_key": "ada"},
        {"key_id": "ada's key"},
        {"counts": {"ada said": 1}},
        {"counts": {"rows": -1}},
        {"counts": {"rows": 2.5}},
        {"counts": {"rows": True}},
        {"counts": {f"n{n}": n for n in range(MOST_COUNTS + 1)}},
        {"act_id": "any words"},
    ],
)
def test_a_field_that_could_hold_content_is_refused(
    fields: dict[str, Any], log: AuditLog, path: Path
) -> None:
    entry = Entry(**{"act": "erase", "by": KEY} | fields)
    with pytest.raises(ValueError, match=r"no free text|counts are") as error:
        log.write(entry, AuditOutcome.DONE)
    assert "ada" not in str(error.value)
    assert not path.exists()


MOST = {f"{'n' * 38}{n:02d}": LARGEST_COUNT for n in range(MOST_COUNTS)}
LONGEST = Entry("a" * 40, "local:" + "9" * 10, TENANT, KEY, MOST)


def text_of(field: str) -> st.SearchStrategy[str]:
    return st.from_regex(FORMS[field], fullmatch=True, alphabet=st.characters(codec="ascii"))


@given(
    entry=st.builds(
        Entry,
        act=text_of("act"),
        by=text_of("by"),
        tenant_key=st.none() | text_of("tenant_key"),
        key_id=st.none() | text_of("key_id"),
        counts=st.dictionaries(text_of("act"), st.integers(0, LARGEST_COUNT), max_size=MOST_COUNTS),
    ),
    outcome=st.sampled_from(AuditOutcome),
    error=st.none() | text_of("error"),
)
@example(LONGEST, AuditOutcome.REFUSED, "E" * 80)
@settings(max_examples=50, deadline=None)
def test_every_line_is_read_back_and_bounded(entry: Entry, outcome: AuditOutcome, error: str | None) -> None:
    with TemporaryDirectory() as folder:
        log = AuditLog(Path(folder) / "audit.jsonl")
        for _ in range(2):
            log.write(entry, outcome, error=error)
        raw = (Path(folder) / "audit.jsonl").read_bytes()
    first, second = (orjson.loads(line) for line in raw.splitlines())
    assert max(map(len, raw.splitlines())) < LINE_BYTES
    assert (first["act"], first["by"], first["outcome"]) == (entry.act, entry.by, outcome.value)
    assert (first.get("counts", {}), second.get("error")) == (entry.counts, error)


def test_a_torn_line_of_a_killed_writer_spoils_no_other(log: AuditLog, path: Path) -> None:
    log.refused("erase", KEY)
    with path.open("ab") as file:
        file.write(b'{"at": "2026-')
    log.refused("export", KEY)
    first, torn, last = path.read_bytes().splitlines()
    assert (orjson.loads(first)["act"], torn, orjson.loads(last)["act"]) == (
        "erase",
        b'{"at": "2026-',
        "export",
    )


def test_an_act_that_cannot_be_written_down_is_not_begun(path: Path) -> None:
    path.mkdir(parents=True)
    log, done = AuditLog(path), False
    with (
        pytest.raises(AuditError, match=r"cannot write .*audit\.jsonl.*Check the path"),
        log.act("erase", KEY),
    ):
        done = True
    assert not done


def test_an_act_that_was_done_stays_done_where_its_end_cannot_be_written(
    log: AuditLog, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil() -> None:
        path.rename(path.with_name("moved"))
        path.mkdir()

    with log.act("erase", KEY) as entry:
        spoil()
    assert f"act {entry.act_id} (erase) ended, which is done" in caplog.text
    path.rmdir()
    with pytest.raises(RuntimeError, match="the disk"), log.act("erase", KEY):
        spoil()
        raise RuntimeError("the disk")
    assert "which is failed" in caplog.text


FULL = """
import resource, signal, sys
from pathlib import Path
from undertow.serving.auth.audit import AuditError, AuditLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
log = AuditLog(Path(sys.argv[1]))
try:
    for count in range(100):
        log.refused("erase", "0123456789ab")
except AuditError:
    print(count)
"""


def test_a_full_disk_leaves_whole_lines(path: Path) -> None:
    """The disk's end is a bound on the file's size, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(lines(path)) == int(done.stdout) > 3
    assert path.read_bytes().endswith(b"}\n")


WRITER = """
import sys
from pathlib import Path
from undertow.serving.auth.audit import AuditLog

log = AuditLog(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for n in range(300):
    log.refused("erase", sys.argv[2])
    print(n + 1, flush=True)
"""


def test_processes_write_while_the_log_is_moved_and_no_line_is_lost(path: Path) -> None:
    pipe = subprocess.PIPE
    writers = {
        name: subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name], stdin=pipe, stdout=pipe, text=True
        )
        for name in ("00000000000a", "00000000000b", "00000000000c")
    }
    for process in writers.values():
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in writers.values():
        print("go", file=process.stdin, flush=True)
    moves = 0
    while any(process.poll() is None for process in list(writers.values())[:2]):
        if path.exists():
            path.rename(path.with_name(f"audit.jsonl.{moves}"))
            moves += 1
        time.sleep(0.005)
        if moves == 3:
            os.kill(writers["00000000000c"].pid, signal.SIGKILL)
    found = [orjson.loads(line) for file in path.parent.iterdir() for line in file.read_bytes().splitlines()]
    printed = {name: process.communicate()[0].split() for name, process in writers.items()}
    assert moves > 3
    by = [line["by"] for line in found]
    assert by.count("00000000000a") == by.count("00000000000b") == 300
    acknowledged = int(printed["00000000000c"][-1]) if printed["00000000000c"] else 0
    assert acknowledged <= by.count("00000000000c") <= acknowledged + 1


def test_refusals_of_a_key_are_written_once_a_minute_with_their_number() -> None:
    now_s = 0.0
    counts = RefusalCounts(clock_s=lambda: now_s)
    assert [counts.take("erase", KEY) for _ in range(4)] == [{}, None, None, None]
    assert (counts.take("purge", KEY), counts.take("erase", "00000000000a")) == ({}, {})
    now_s = 60.0
    assert [counts.take("erase", KEY) for _ in range(2)] == [{"refused_before": 3}, None]
    now_s = 120.0
    assert [counts.take("purge", KEY), counts.take("erase", KEY)] == [{}, {"refused_before": 1}]


def test_refusals_that_nothing_follows_get_a_line_and_old_ones_are_forgotten() -> None:
    now_s = 0.0
    counts = RefusalCounts(clock_s=lambda: now_s)
    for n in range(100):
        counts.take("erase", f"{n:012x}")
    taken = [counts.take("erase", KEY) for _ in range(4)]
    assert taken == [{}, None, None, None] and list(counts.overdue()) == []
    now_s = 60.0
    assert list(counts.overdue()) == [("erase", KEY, {"refused_before": 2})]
    assert len(counts._last) == 1 and counts.take("erase", KEY) is None, "one line a minute"
    assert list(counts.overdue(ended=True)) == [("erase", KEY, {})] and not counts._last
