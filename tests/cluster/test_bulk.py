"""Bulk ingest without shards: what is read, in which order, what is remembered, what fails."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

ray = pytest.importorskip("ray")

from undertow.engine.base.model import BadInput, UndertowError
from undertow.engine.cluster.bulk import ingest as bulk
from undertow.engine.cluster.bulk import read_ahead
from undertow.engine.cluster.bulk import reading as bulk_reading
from undertow.engine.cluster.bulk.ingest import BulkIngest
from undertow.engine.cluster.bulk.read_ahead import tasks_of
from undertow.engine.cluster.bulk.reading import FileReport, Part, PartReader, Piece
from undertow.engine.cluster.bulk.records import FileProgress, IngestRecords, pieces_left
from undertow.engine.cluster.shard_map import ShardMap, load
from undertow.engine.cluster.wire import from_buffer
from undertow.engine.readers import Log, find_logs, jsonl, read, read_blocks
from undertow.engine.readers.vectors import ENCODER_KEY
from undertow.engine.storage.location import Location

from ..support.cluster.bulk import (
    ENCODER,
    LIMIT,
    SHARDS,
    DyingReader,
    Kept,
    line,
    new_root,
    one_process_order,
    reading,
    write_logs,
)

BUCKET = "bulk-logs"


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return new_root(tmp_path / "root")


@pytest.fixture
def logs(tmp_path: Path) -> list[Log]:
    return list(find_logs([write_logs(tmp_path / "logs", files=5, lines=60, tenants=12)]))


def pieces_of(logs: Sequence[Log]) -> list[Piece]:
    return [Piece(n, log) for n, log in enumerate(logs)]


# ---- reading, without Ray


def test_parts_hold_the_turns_of_each_shard_in_the_order_of_one_process(
    root: Location, logs: list[Log]
) -> None:
    how = reading(root)
    found: dict[str, list[str]] = defaultdict(list)
    read_turns = 0
    for part in how.parts(pieces_of(logs)):
        for shard, buffer in part.turns.items():
            rows = from_buffer(buffer).to_pylist()
            assert {how.shard_map.owner(row["tenant"]) for row in rows} == {shard}
            for row in rows:
                found[row["tenant"]].append(row["key"])
        read_turns += sum(report.turns for report in part.reports)
        assert sum(report.turns for report in part.reports) < how.part_turns + 10
    assert found == one_process_order(logs)
    assert read_turns == sum(map(len, found.values()))


@pytest.mark.parametrize("part_turns", [1, 7, 1_000])
def test_reports_add_up_whatever_the_parts(root: Location, tmp_path: Path, part_turns: int) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([json.dumps(line("ada", "x", colour="red")), "{broken", "[]"] * 40))
    report = FileReport(3, 0)
    for part in reading(root, part_turns=part_turns).parts([Piece(3, Log.of(path))]):
        for found in part.reports:
            report.extend(found)
    assert (report.file, report.position, report.turns, report.errors, report.warnings) == (3, 120, 40, 80, 1)
    assert len(report.first_errors) == bulk_reading.TOLD_PROBLEMS
    assert str(report.first_errors[0]).startswith(f"{path}:2: is not JSON")
    assert report.ended and report.head == Log.of(path).head()


def test_a_reader_that_fails_ends_its_file_alone(
    root: Location, logs: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(log: Log, *how: Any, **more: Any) -> Iterator[Any]:
        whole = next(read_blocks(log, *how, **more))
        if log == logs[0]:
            count = whole.before(10)
            yield replace(whole, position=10, turns=whole.turns[:count], positions=whole.positions[:count])
            raise RuntimeError("a defect of the reader")
        yield whole

    monkeypatch.setattr(bulk_reading, "read_blocks", fails)
    (part,) = reading(root, part_turns=10_000).parts(pieces_of(logs[:2]))
    first, second = part.reports
    assert (first.ended, first.errors, first.position) == (True, 1, 10)
    assert "a defect of the reader" in str(first.first_errors[0])
    turns = [len(record.turns) for record in read(logs[0], max_message_bytes=LIMIT)]
    assert first.turns == sum(turns[:10])
    assert (second.ended, second.errors, second.position) == (True, 0, 60)


def test_given_vectors_travel_and_those_of_another_encoder_are_refused(
    root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "ReadAhead", Here)
    monkeypatch.setattr(bulk, "free_cpus", lambda: 1)
    vectors: list[list[float] | None] = [[0, 1, 0, 0] if n % 2 else None for n in range(9)]
    vectors[0] = [2, 0, 0, 0]
    table = pa.Table.from_pylist([line(f"t{n}", f"word{n}") for n in range(9)])
    table = table.append_column("vectors", pa.array(vectors, pa.list_(pa.float32())))
    for digest in (ENCODER.digest, "other"):
        pq.write_table(table.replace_schema_metadata({ENCODER_KEY: digest}), tmp_path / f"{digest}.parquet")
    kept, told = Kept(), list[BadInput]()
    ingest(
        root, kept, list(find_logs(sorted(tmp_path.glob("*.parquet")))), part_turns=4, on_error=told.append
    )
    stored = pa.concat_tables(kept.calls).sort_by("text").select(["tenant", "vector"]).to_pylist()
    one = np.array([0, 1, 0, 0], "<f2").tobytes()
    assert stored == [{"tenant": f"t{n}", "vector": one if n % 2 else None} for n in range(1, 9)]
    assert [(Path(p.source).stem, p.line, p.field) for p in told] == [
        (ENCODER.digest, 1, "vectors"),
        ("other", None, "vectors"),
    ]
    assert "has the length 2" in told[0].reason and "leave the column out" in told[1].cure


def test_tasks_are_bounded_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a.jsonl": 10, "b.jsonl": 300, "c.parquet": 90, "d.jsonl.gz": 90, "e.jsonl": 0, "f.jsonl": 60}
    monkeypatch.setattr(read_ahead, "TASK_BYTES", 200)
    tasks = list(tasks_of(pieces_of([Log(name, name, size) for name, size in sizes.items()])))
    assert [[p.log.name[0] for p in task] for task in tasks] == [["a"], ["b"], ["c", "d", "e"], ["f"]]
    assert list(tasks_of([])) == []


def test_processes_that_read_or_feed_load_no_engine() -> None:
    """Torch would cost each of them seconds and hundreds of megabytes; Lance and pandas a second."""
    code = (
        "import sys; from undertow.engine.base.process_tuning import without_pandas\n"
        "with without_pandas():\n"
        "    from undertow.engine.cluster.bulk import ingest\n"
        "    from undertow.engine.cluster.ray import cluster\n"
        "sys.exit(', '.join({'torch', 'numba', 'openai', 'lance', 'pandas'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- what is remembered


def progress(log: Log, position: int = 60, **more: Any) -> FileProgress:
    given = {"clean": True, "map_version": 1, **log.head(), **more}
    return FileProgress(position, size_bytes=log.size_bytes, **given)


def test_a_log_that_was_read_to_its_end_is_passed_over(root: Location, logs: list[Log]) -> None:
    shard_map = load(root)
    records = IngestRecords(root)
    keys = [shard_map.tenant_key(log.uri) for log in logs]
    known = dict(zip(keys, map(progress, logs), strict=True))
    known[keys[1]].clean = False
    records.note(dict(list(known.items())[:3]))
    records.note(dict(list(known.items())[3:]))
    Path(logs[2].uri).write_text(Path(logs[2].uri).read_text() + json.dumps(line("new", "x")) + "\n")
    Path(logs[3].uri).write_text(json.dumps(line("another", "log")) + "\n")
    now = [Log.of(Path(log.uri)) for log in logs]
    left, changed = pieces_left(shard_map, now, records.reached())
    assert [(p.file, p.after, p.until) for p in left] == [(1, 60, 60), (2, 60, 60), (3, 0, 0)]
    assert changed == [logs[3]]
    records.tidy()
    assert pieces_left(shard_map, now, records.reached()) == (left, changed)
    assert len(root.list("jobs")) == 1
    assert all(b"log00" not in (root.read(name) or b"") for name in root.list("jobs"))
    records.note({keys[0]: progress(logs[0], 3)})
    assert records.reached()[keys[0]].position == 3


def test_what_a_shard_has_not_stored_is_read_again_for_it_alone(root: Location, logs: list[Log]) -> None:
    shard_map = load(root)
    behind = progress(logs[0], 50, behind={"a": 20}, clean=False)
    left, _ = pieces_left(shard_map, logs[:1], {shard_map.tenant_key(logs[0].uri): behind})
    assert left == [Piece(0, logs[0], 20, 50, {"a": 20})]
    (part,) = reading(root, part_turns=10_000).parts(left)
    wanted: dict[str, list[str]] = defaultdict(list)
    for record in read(logs[0], max_message_bytes=LIMIT):
        for turn in record.turns:
            owner = shard_map.owner(turn.tenant)
            if record.position > (20 if owner == "a" else 50):
                wanted[owner].append(turn.dedupe_key)
    assert {s: from_buffer(t).column("key").to_pylist() for s, t in part.turns.items()} == wanted
    # by another map, its turns may be anyone's
    other = ShardMap(2, ("a", "c"), hash_key=shard_map.hash_key)
    left, _ = pieces_left(other, logs[:1], {shard_map.tenant_key(logs[0].uri): behind})
    assert left == [Piece(0, logs[0], 20, 20)]


@dataclass
class Here:
    """Stands for ReadAhead: reads in this process."""

    reader: PartReader
    pieces: Sequence[Piece]
    stop: Callable[[], bool] = field(default=lambda: False)

    def parts(self) -> Generator[Part, None, None]:
        yield from self.reader.parts(self.pieces)


RUNS = st.lists(
    st.tuples(st.sets(st.sampled_from(SHARDS)), st.integers(0, 12), st.integers(1, 90)), max_size=4
)


@pytest.mark.rarely
@given(runs=RUNS, files=st.integers(1, 3))
def test_runs_cut_off_anywhere_send_each_turn_once(runs: list[tuple[set[str], int, int]], files: int) -> None:
    """Each run with other shards down, stopped after some parts, with parts of another size."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "ReadAhead", Here)
        patch.setattr(bulk, "free_cpus", lambda: 1)
        patch.setattr(jsonl, "_PIECE_BYTES", 700)  # so that a log has several blocks
        root = new_root(f"{folder}/root", hash_key="07")
        logs = list(find_logs([write_logs(Path(folder) / "logs", files=files, lines=20, tenants=9)]))
        expected = one_process_order(logs)
        kept, owner = Kept(), load(root).owner
        for down, parts, part_turns in [*runs, (set[str](), 10_000, 50)]:
            left = iter(range(parts))
            kept.broken = frozenset(tenant for tenant in expected if owner(tenant) in down)
            run = BulkIngest(
                root,
                kept,
                max_message_bytes=LIMIT,
                resume=True,
                part_turns=part_turns,
                stop=lambda left=left: next(left, None) is None,  # type: ignore[misc]
            )
            try:
                run.feed(logs)
            except UndertowError as error:
                assert down and "this shard is down" in str(error)
        assert kept.stored() == expected


# ---- on Ray


def ingest(root: Location, kept: Kept, logs: list[Log], **options: Any) -> BulkIngest:
    run = BulkIngest(root, kept, max_message_bytes=LIMIT, **options)
    run.feed(logs)
    return run


def interrupted(root: Location, kept: Kept, logs: list[Log]) -> BulkIngest:
    """Stopped once some turns are stored."""
    return ingest(root, kept, logs, part_turns=50, stop=lambda: bool(kept.calls))


@pytest.mark.usefixtures("ray_address")
@pytest.mark.parametrize(("task_bytes", "part_turns"), [(1, 1_000), (20_000, 10), (1 << 30, None)])
def test_tenants_keep_their_order_whatever_the_parts(
    root: Location, logs: list[Log], task_bytes: int, part_turns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "TASK_BYTES", task_bytes)
    expected, kept = one_process_order(logs), Kept()
    run = ingest(root, kept, logs, part_turns=part_turns)
    assert kept.stored() == expected
    turns = sum(map(len, expected.values()))
    assert (run.report.read_turns, run.report.new_turns, run.report.errors) == (turns, turns, 0)
    again = ingest(root, kept, logs, part_turns=part_turns).report
    assert (again.read_turns, again.new_turns) == (turns, 0)
    before = len(kept.calls)
    assert (ingest(root, kept, logs, resume=True).report.read_turns, len(kept.calls)) == (0, before)


@pytest.mark.usefixtures("ray_address")
def test_bad_files_are_reported_and_stop_no_other(root: Location, tmp_path: Path) -> None:
    folder = write_logs(tmp_path / "logs", files=2, lines=20, tenants=4)
    (folder / "broken.jsonl").write_text("{broken\n" + json.dumps(line("ada", "good")) + "\n[]\n")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(line("bo", "x")).encode() * 99)[:40])
    (folder / "other.json").write_text("{}")
    logs, kept = list(find_logs([folder])), Kept()
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
def test_logs_and_root_on_s3_are_as_in_folders(logs: list[Log]) -> None:
    for log in logs:
        obstore.put(S3Store(BUCKET), f"logs/{log.name}", Path(log.uri).read_bytes())
    there = list(find_logs([f"s3://{BUCKET}/logs"]))
    root, kept = new_root(f"s3://{BUCKET}/root"), Kept()
    for more in ({}, {"resume": True}):
        ingest(root, kept, there, part_turns=50, **more)
        assert kept.stored() == one_process_order(logs)


@pytest.mark.usefixtures("ray_address")
def test_strict_stores_the_parts_before_the_refused_input_alone(root: Location, logs: list[Log]) -> None:
    Path(logs[2].uri).write_text("{broken\n")
    kept = Kept()
    run = ingest(root, kept, logs, strict=True, part_turns=1)
    assert kept.stored() == one_process_order(logs[:2])
    assert run.report.stopped_by is not None and run.report.stopped_by.source == logs[2].shown


@pytest.mark.usefixtures("ray_address")
def test_a_shard_that_fails_does_not_keep_others_from_their_turns(root: Location, logs: list[Log]) -> None:
    expected, owner, kept = one_process_order(logs), load(root).owner, Kept()
    mine = frozenset(t for t in expected if owner(t) == "a")
    kept.broken = mine
    with pytest.raises(UndertowError, match="this shard is down"):
        ingest(root, kept, logs, part_turns=50)
    assert kept.stored() == {t: keys for t, keys in expected.items() if t not in mine}
    kept.broken = frozenset()
    run = ingest(root, kept, logs, part_turns=50, resume=True)
    assert kept.stored() == expected
    assert run.report.read_turns == run.report.new_turns == sum(len(expected[t]) for t in mine)


@pytest.mark.usefixtures("ray_address")
def test_workers_that_die_lose_nothing_and_reorder_nothing(
    root: Location, logs: list[Log], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaths").mkdir()
    monkeypatch.setattr(bulk, "PartReader", partial(DyingReader, folder=tmp_path / "deaths"))
    kept = Kept()
    run = ingest(root, kept, logs, part_turns=50)
    assert len(list((tmp_path / "deaths").iterdir())) == 3
    assert kept.stored() == one_process_order(logs)
    turns = sum(map(len, kept.stored().values()))
    assert run.report.read_turns == run.report.stored_turns == run.report.new_turns == turns


@pytest.mark.usefixtures("ray_address")
def test_an_interrupt_ends_after_whole_parts_and_resume_completes(root: Location, logs: list[Log]) -> None:
    kept = Kept()
    run = interrupted(root, kept, logs)
    expected = one_process_order(logs)
    assert run.report.interrupted
    assert 0 < run.report.new_turns < sum(map(len, expected.values()))
    done = ingest(root, kept, logs, resume=True)
    assert kept.stored() == expected
    assert run.report.new_turns + done.report.new_turns == sum(map(len, expected.values()))


@pytest.mark.usefixtures("ray_address")
def test_a_log_that_was_replaced_after_an_interrupt_is_read_anew(root: Location, logs: list[Log]) -> None:
    """It is as long as the one before, so only how it begins tells them apart."""
    kept = Kept()
    interrupted(root, kept, logs)
    path = Path(logs[0].uri)
    path.write_text(path.read_text().replace("line", "LINE").replace("word", "WORD"))
    assert Log.of(path).size_bytes == logs[0].size_bytes
    warned: list[str] = []
    ingest(root, kept, logs, resume=True, on_warning=warned.append)
    assert len(warned) == 1 and "has changed since it was last read" in warned[0]
    stored = kept.stored()
    for tenant, keys in one_process_order(logs).items():
        assert set(keys) <= set(stored[tenant])
