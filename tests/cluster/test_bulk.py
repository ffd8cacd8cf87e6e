"""Bulk ingest without shards: what is read, how it is grouped and ordered, what is remembered, what fails."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest
from obstore.store import S3Store

ray = pytest.importorskip("ray")

from undertow.engine.base.model import Message, Turn, UndertowError
from undertow.engine.cluster.bulk import ingest as bulk
from undertow.engine.cluster.bulk import reading as bulk_reading
from undertow.engine.cluster.bulk.feeding import CALL_TURNS, calls, inspect
from undertow.engine.cluster.bulk.ingest import BulkIngest
from undertow.engine.cluster.bulk.reading import ORDER, FileReport, Piece, waves_of
from undertow.engine.cluster.bulk.records import (
    FileProgress,
    IngestRecords,
    pieces_left,
    reached_by,
    wave_name,
)
from undertow.engine.cluster.wire import TURNS, pack
from undertow.engine.readers import Log, find_logs, read
from undertow.engine.storage.location import Location

from ..support.cluster.bulk import LIMIT, Kept, line, new_root, one_process_order, reading, write_logs

BUCKET = "bulk-logs"


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return new_root(tmp_path / "root")


@pytest.fixture
def logs(tmp_path: Path) -> list[Log]:
    return list(find_logs([write_logs(tmp_path / "logs", files=5, lines=60, tenants=12)]))


# ---- reading, without Ray


def test_groups_hold_whole_tenants_of_one_shard_in_the_order_of_one_process(
    root: Location, logs: list[Log]
) -> None:
    how = reading(root, buckets=3)
    tables = [t for n, log in enumerate(logs) for t in how.tables(Piece(n, log, 0))]
    random.Random(1).shuffle(tables)
    block = pa.concat_tables(tables).sort_by([(name, "ascending") for name in ORDER])
    spans, reports = inspect(block)
    found: dict[str, list[str]] = {}
    for span in spans:
        rows = block.slice(span.offset, span.rows)
        assert set(rows.column("group").to_pylist()) == {span.group}
        for tenant, key in zip(
            rows.column("tenant").to_pylist(), rows.column("key").to_pylist(), strict=True
        ):
            assert how.shard_map.owner(tenant) == how.shard_of(span.group)
            found.setdefault(tenant, []).append(key)
    assert found == one_process_order(logs)
    assert sorted({s.group for s in spans}) == sorted({int(g) for g in how.groups_of(list(found))})
    assert sum(FileReport.from_json(r).turns for r in reports) == sum(map(len, found.values()))


def test_a_report_survives_its_journey(root: Location, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([json.dumps(line("ada", "x", colour="red")), "{broken", "[]"] * 40))
    (*_, last) = reading(root).tables(Piece(3, Log.of(path), 0))
    report = FileReport.from_json(last.column("payload")[0].as_py())
    assert (report.file, report.position, report.turns, report.errors, report.warnings) == (3, 120, 40, 80, 1)
    assert len(report.first_errors) == bulk_reading.TOLD_PROBLEMS
    assert str(report.first_errors[0]).startswith(f"{path}:2: is not JSON")
    assert report.whole and report.head == Log.of(path).head()


def test_a_reader_that_fails_ends_its_file_alone(
    root: Location, logs: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(log: Log, *_: Any, **__: Any) -> Iterator[Any]:
        yield from list(read(log, max_message_bytes=LIMIT))[:10]
        raise RuntimeError("a defect of the reader")

    monkeypatch.setattr(bulk_reading, "read_packed", fails)
    *turns, last = reading(root).tables(Piece(0, logs[0], 0))
    report = FileReport.from_json(last.column("payload")[0].as_py())
    assert sum(t.num_rows for t in turns) == report.turns > 0
    assert (report.whole, report.errors, report.position) == (False, 1, 10)
    assert "a defect of the reader" in str(report.first_errors[0])


def test_turns_that_cannot_be_packed_end_their_file_alone(
    root: Location, logs: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect behind the readers, as one in grouping would be: what was packed before it is taken."""

    def fails(turns: Sequence[Turn]) -> pa.Table:
        if any("file 0 line 20 " in turn.text for turn in turns):
            raise RuntimeError("a defect of packing")
        return pack(turns)

    monkeypatch.setattr(bulk_reading, "TABLE_TURNS", 10)
    monkeypatch.setattr(bulk_reading, "pack", fails)
    pieces = [Piece(n, log, 0) for n, log in enumerate(logs[:2])]
    tables = [table for piece in pieces for table in reading(root).tables(piece)]
    taken = [t for t in tables if t.column("group")[0].as_py() != bulk_reading.REPORTS]
    first, second = (FileReport.from_json(t.column("payload")[0].as_py()) for t in tables if t not in taken)
    of_file = Counter(file for t in taken for file in t.column("file").to_pylist())
    assert (first.whole, first.errors, of_file[0]) == (False, 1, first.turns)
    assert 0 < first.turns < second.turns == of_file[1]
    assert second.whole and not second.errors
    assert f"with {first.turns} turns taken: RuntimeError: a defect" in str(first.first_errors[0])


def test_calls_are_cut_anew_and_lose_nothing() -> None:
    turns = [Turn("t", (Message("user", str(n)),), str(n)) for n in range(1000)]
    chance = random.Random(3)
    for _ in range(20):
        cuts = sorted(chance.randrange(1001) for _ in range(9))
        parts = [pack(turns[a:b]) for a, b in zip([0, *cuts], [*cuts, 1000], strict=True)]
        made = list(calls(parts, 64))
        assert [t.num_rows for t in made] == [64] * 15 + [40]
        assert pa.concat_tables(made).column("key").to_pylist() == [str(n) for n in range(1000)]
    assert list(calls([TURNS.empty_table()])) == []


def test_waves_are_bounded_and_keep_the_order(tmp_path: Path) -> None:
    sizes = {"a.jsonl": 10, "b.jsonl": 300, "c.parquet": 10, "d.jsonl.gz": 10, "e.jsonl": 0, "f.jsonl": 60}
    logs = [Log(name, name, size) for name, size in sizes.items()]
    waves = list(waves_of([Piece(n, log, 0) for n, log in enumerate(logs)], 200))
    assert [[p.log.name[0] for p in wave] for wave in waves] == [["a"], ["b"], ["c", "d", "e"], ["f"]]
    assert list(waves_of([], 200)) == []


def test_workers_that_read_or_feed_load_no_engine() -> None:
    """Torch would cost each of them seconds and hundreds of megabytes."""
    code = (
        "import sys; from undertow.engine.cluster.bulk import feeding\n"
        "from undertow.engine.cluster.ray import actors\n"
        "from undertow.engine.cluster.routing import router\n"
        "sys.exit(', '.join({'torch', 'numba', 'openai'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- what is remembered


def test_a_log_that_was_read_to_its_end_is_passed_over(root: Location, logs: list[Log]) -> None:
    how = reading(root)
    records = IngestRecords(root)
    pieces = [Piece(n, log, 0) for n, log in enumerate(logs)]
    reports = [FileReport(n, 60, head=log.head(), whole=True) for n, log in enumerate(logs)]
    reports[1].errors = 1
    name = wave_name(how, pieces)
    records.note_stored(name, 7)
    records.note_stored(name, 0)
    assert records.stored(name) == {0, 7}
    assert records.stored("another") == frozenset()
    records.note_reached(
        name, dict(reached_by(how.shard_map, log, r) for log, r in zip(logs, reports, strict=True))
    )
    assert records.stored(name) == frozenset()
    Path(logs[2].uri).write_text(Path(logs[2].uri).read_text() + json.dumps(line("new", "x")) + "\n")
    Path(logs[3].uri).write_text(json.dumps(line("another", "log")) + "\n")
    now = [Log.of(Path(log.uri)) for log in logs]
    left, changed = pieces_left(how.shard_map, now, records.reached())
    assert [(p.file, p.after) for p in left] == [(1, 60), (2, 60), (3, 0)]
    assert changed == [logs[3]]
    records.tidy()
    assert pieces_left(how.shard_map, now, records.reached()) == (left, changed)
    assert len(root.list("jobs")) == 1
    assert all(b"log00" not in (root.read(name) or b"") for name in root.list("jobs"))
    key, _ = reached_by(how.shard_map, logs[0], reports[0])
    records.note_reached("newer", {key: FileProgress(3, "y", 1, 1, clean=True)})
    assert records.reached()[key].position == 3


def test_a_wave_is_named_by_all_that_makes_its_groups(root: Location, logs: list[Log]) -> None:
    pieces = [Piece(n, log, 0) for n, log in enumerate(logs)]
    longer = [Piece(0, Log(logs[0].uri, logs[0].shown, 1 << 30), 0), *pieces[1:]]
    names = [
        wave_name(reading(root), pieces),
        wave_name(reading(root, buckets=3), pieces),
        wave_name(reading(root, format="messages"), pieces),
        wave_name(reading(root), pieces[1:]),
        wave_name(reading(root), longer),
        wave_name(reading(root), [Piece(0, logs[0], 5), *pieces[1:]]),
    ]
    assert len(set(names)) == len(names)
    assert names[0] == wave_name(reading(root, done=frozenset({1})), pieces)
    path = Path(logs[4].uri)
    path.write_text(path.read_text().replace("file 4 line 0 ", "file 9 line 0 "))
    assert Log.of(path).size_bytes == logs[4].size_bytes
    assert wave_name(reading(root), pieces) not in names


# ---- on Ray


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    (tmp_path / "kept").mkdir()
    return Kept(tmp_path / "kept")


def ingest(root: Location, kept: Kept, logs: list[Log], **options: Any) -> BulkIngest:
    run = BulkIngest(root, kept, max_message_bytes=LIMIT, **options)
    run.feed(logs)
    return run


def interrupted(root: Location, kept: Kept, logs: list[Log]) -> BulkIngest:
    """Stopped once some turns are stored."""
    seen: list[int] = []
    return ingest(
        root,
        kept,
        logs,
        group_bytes=5_000,
        on_progress=lambda p: seen.append(p.stored_turns),
        stop=lambda: bool(seen and seen[-1]),
    )


@pytest.mark.usefixtures("ray_address")
@pytest.mark.parametrize("wave_bytes", [1, 40_000, None])
def test_tenants_keep_their_order_whatever_the_waves(
    root: Location, logs: list[Log], kept: Kept, wave_bytes: int | None
) -> None:
    expected = one_process_order(logs)
    run = ingest(root, kept, logs, wave_bytes=wave_bytes, group_bytes=20_000)
    assert kept.stored() == expected
    turns = sum(map(len, expected.values()))
    assert (run.report.read_turns, run.report.new_turns, run.report.errors) == (turns, turns, 0)
    again = ingest(root, kept, logs, wave_bytes=wave_bytes, group_bytes=20_000).report
    assert (again.read_turns, again.new_turns, kept.stored()) == (turns, 0, expected)
    before = len(kept.calls())
    resumed = ingest(root, kept, logs, resume=True).report
    assert (resumed.read_turns, len(kept.calls())) == (0, before)


@pytest.mark.usefixtures("ray_address")
def test_calls_are_large_and_a_large_tenant_is_sent_in_order(
    root: Location, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group larger than a block, and blocks smaller than a group: neither can reorder it."""
    folder = write_logs(tmp_path / "logs", files=4, lines=1500, tenants=2)
    found = list(find_logs([folder]))
    monkeypatch.setattr(bulk, "TASK_BYTES", 1)
    ingest(root, kept, found, group_bytes=1 << 40)
    assert kept.stored() == one_process_order(found)
    sizes = [t.num_rows for t in kept.calls()]
    assert sum(size < 512 for size in sizes) <= len(reading(root).shard_map.shards)
    assert max(sizes) == CALL_TURNS


@pytest.mark.usefixtures("ray_address")
def test_bad_files_are_reported_and_stop_no_other(root: Location, tmp_path: Path, kept: Kept) -> None:
    folder = write_logs(tmp_path / "logs", files=2, lines=20, tenants=4)
    (folder / "broken.jsonl").write_text("{broken\n" + json.dumps(line("ada", "good")) + "\n[]\n")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(line("bo", "x")).encode() * 99)[:40])
    (folder / "other.json").write_text("{}")
    logs = list(find_logs([folder]))
    told: list[str] = []
    run = ingest(root, kept, logs, on_error=lambda problem: told.append(str(problem)))
    assert kept.stored() == one_process_order(logs)
    assert {log.name: report.errors for log, report in run.report.files} == {
        "broken.jsonl": 2,
        "cut.jsonl.gz": 1,
        "other.json": 1,
    }
    assert run.report.errors == len(told) == 4
    assert told[0].startswith(f"{folder / 'broken.jsonl'}:1: is not JSON")


@pytest.mark.usefixtures("ray_address", "s3")
def test_logs_and_root_on_s3_are_as_in_folders(logs: list[Log], kept: Kept) -> None:
    for log in logs:
        obstore.put(S3Store(BUCKET), f"logs/{log.name}", Path(log.uri).read_bytes())
    there = list(find_logs([f"s3://{BUCKET}/logs"]))
    root = new_root(f"s3://{BUCKET}/root")
    for more in ({}, {"resume": True}):
        ingest(root, kept, there, wave_bytes=40_000, **more)
        assert kept.stored() == one_process_order(logs)
    assert sum(t.num_rows for t in kept.calls()) == sum(map(len, kept.stored().values()))


@pytest.mark.usefixtures("ray_address")
def test_strict_stores_the_waves_before_the_refused_input_alone(
    root: Location, logs: list[Log], kept: Kept
) -> None:
    Path(logs[2].uri).write_text("{broken\n")
    run = ingest(root, kept, logs, strict=True, wave_bytes=1)
    assert kept.stored() == one_process_order(logs[:2])
    assert run.report.stopped_by is not None and run.report.stopped_by.source == logs[2].shown


@pytest.mark.usefixtures("ray_address")
def test_a_shard_that_fails_does_not_keep_the_others_from_their_turns(
    root: Location, logs: list[Log], kept: Kept
) -> None:
    expected = one_process_order(logs)
    map_ = reading(root).shard_map
    mine = frozenset(t for t in expected if map_.owner(t) == "a")
    broken = Kept(kept.folder, broken=mine)
    with pytest.raises(UndertowError, match="this shard is down"):
        ingest(root, broken, logs, group_bytes=5_000)
    assert kept.stored() == {t: keys for t, keys in expected.items() if t not in mine}
    before = set(kept.folder.glob("*.arrow"))
    run = ingest(root, kept, logs, group_bytes=5_000, resume=True)
    assert kept.stored() == expected
    assert run.report.read_turns == run.report.new_turns == sum(len(expected[t]) for t in mine)
    assert before < set(kept.folder.glob("*.arrow"))


@pytest.mark.usefixtures("ray_address")
def test_workers_that_die_lose_nothing_and_reorder_nothing(
    root: Location, logs: list[Log], kept: Kept
) -> None:
    deadly = Kept(kept.folder, killed=2)
    run = ingest(root, deadly, logs, group_bytes=5_000)
    assert len(list(kept.folder.glob("death*"))) == 2
    assert kept.stored() == one_process_order(logs)
    turns = sum(map(len, kept.stored().values()))
    assert run.report.read_turns == run.report.stored_turns == turns
    # what the dead had stored is known when it comes again
    assert 0 < run.report.new_turns < turns


@pytest.mark.usefixtures("ray_address")
def test_an_interrupt_ends_after_whole_groups_and_resume_completes(
    root: Location, logs: list[Log], kept: Kept
) -> None:
    run = interrupted(root, kept, logs)
    expected = one_process_order(logs)
    assert run.report.interrupted
    assert 0 < run.report.new_turns < sum(map(len, expected.values()))
    done = ingest(root, kept, logs, group_bytes=5_000, resume=True)
    assert kept.stored() == expected
    assert run.report.new_turns + done.report.new_turns == sum(map(len, expected.values()))
    assert done.report.read_turns == done.report.new_turns


@pytest.mark.usefixtures("ray_address")
def test_a_log_that_was_replaced_in_an_interrupted_wave_is_read_anew(
    root: Location, logs: list[Log], kept: Kept
) -> None:
    """It is as long as the one before, so only how it begins tells them apart."""
    interrupted(root, kept, logs)
    path = Path(logs[0].uri)
    path.write_text(path.read_text().replace("line", "LINE").replace("word", "WORD"))
    assert Log.of(path).size_bytes == logs[0].size_bytes
    ingest(root, kept, logs, group_bytes=5_000, resume=True)
    stored = kept.stored()
    for tenant, keys in one_process_order(logs).items():
        assert set(keys) <= set(stored[tenant])
