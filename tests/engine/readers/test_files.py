"""Which files are logs: in folders and on S3."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from undertow.engine.base.model import InputError
from undertow.engine.readers import Log, detect_format, find_logs, jsonl, read, source

from ...support.readers import GOOD, LIMIT, line, parquet, records, write
from .exports.samples import OWNER, slack_files, turns, write_zip


def test_paths_are_sorted_recursive_and_unique(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/z.jsonl", "b/a.parquet", "c.json", "b/notes.txt", "a.ndjson"):
        (tmp_path / name).touch()
    found = [
        Path(log.uri).relative_to(tmp_path).as_posix() for log in find_logs([tmp_path / "c.json", tmp_path])
    ]
    assert found == ["a.ndjson", "b/a.parquet", "b/z.jsonl", "c.json"]
    with pytest.raises(InputError, match="does not exist"):
        list(find_logs([tmp_path / "nowhere"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no log"):
        list(find_logs([tmp_path / "empty"]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "not of a known format"),
        ("{}", "none of the fields"),
        ('[{"messages": []}]', "JSON array of"),
    ],
)
def test_an_unknown_format_says_which_there_are(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        detect_format(path)
    (record,) = records(path)
    assert reason in record.errors[0].reason


def test_a_file_that_is_gone_is_an_error_record(tmp_path: Path) -> None:
    for name in ("gone.jsonl", "gone.parquet", "gone.json"):
        (record,) = records(tmp_path / name, after=3)
        assert record.position == 3 and "cannot be read" in record.errors[0].reason


BUCKET = "readers-logs"


@pytest.fixture(scope="module")
def bucket(s3: dict[str, str]) -> S3Store:
    return S3Store(BUCKET)


@pytest.fixture
def copied(tmp_path: Path, bucket: S3Store, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Copies tmp_path to a folder of the bucket; gives its address."""
    folder = f"{request.node.name}/deep"

    def copy() -> str:
        for path in tmp_path.rglob("*"):
            if path.is_file():
                key = f"{folder}/{path.relative_to(tmp_path).as_posix()}"
                obstore.put(bucket, key, path.read_bytes())
        return f"s3://{BUCKET}/{folder}"

    return copy


def test_logs_on_s3_are_read_as_from_a_folder(tmp_path: Path, copied: Callable[[], str]) -> None:
    for name in ("a-b", "a", "c"):
        (tmp_path / name).mkdir()
    lines = [line(session=str(i)) for i in range(300)]
    write(tmp_path / "a", *lines[:5], "{broken", *lines[5:9])
    (tmp_path / "a-b" / "x.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "c" / "cut.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-200])
    parquet(
        tmp_path / "c",
        {"tenant": ["ada"] * 90, "messages": [json.dumps(GOOD["messages"])] * 89 + ["{"]},
        row_group_size=20,
    )
    (tmp_path / "c" / "other.json").write_text('{"conversation": {}}')
    (tmp_path / "c" / "notes.txt").write_text("no log")
    address = copied()
    here, there = list(find_logs([tmp_path])), list(find_logs([address]))
    assert [log.uri.removeprefix(address) for log in there] == [
        log.uri.removeprefix(str(tmp_path)) for log in here
    ]
    for mine, theirs in zip(here, there, strict=True):
        assert (theirs.name, theirs.size_bytes, theirs.head()) == (mine.name, mine.size_bytes, mine.head())
        assert detect_format(theirs) == detect_format(mine)
        for after in (0, 7, 88):
            local = list(read(mine, after=after, max_message_bytes=LIMIT))
            remote = list(read(theirs, after=after, max_message_bytes=LIMIT))
            assert [(r.position, r.turns) for r in remote] == [(r.position, r.turns) for r in local]
            told = [str(e).replace(theirs.shown, mine.shown) for r in remote for e in r.errors]
            assert told == [str(e) for r in local for e in r.errors]
    one = f"{address}/a/log.jsonl"
    assert [log.uri for log in find_logs([one, address])][:2] == [one, f"{address}/a-b/x.jsonl.gz"]


def test_an_archive_on_s3_is_read_in_place(tmp_path: Path, copied: Callable[[], str]) -> None:
    path = write_zip(tmp_path / "export.zip", slack_files())
    (log,) = find_logs([copied()])
    assert detect_format(log) == "slack"
    theirs = read(replace(log, tenant=OWNER), max_message_bytes=LIMIT)
    assert [t for r in theirs for t in r.turns] == turns(path)


def test_stores_and_roots_on_s3_are_passed_over(tmp_path: Path, copied: Callable[[], str]) -> None:
    for name in ("log.jsonl", "s/store.json", "s/x.json", "root/map/00000001.json", "root/jobs/y.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line())
    address = copied()
    assert [log.shown for log in find_logs([address])] == [f"{address}/log.jsonl"]
    with pytest.raises(InputError, match="holds no log"):
        list(find_logs([f"{address}/s"]))


def test_what_is_wrong_with_an_address_is_said(bucket: S3Store) -> None:
    with pytest.raises(InputError, match="does not exist"):
        list(find_logs([f"s3://{BUCKET}/nothing/here"]))
    with pytest.raises(InputError, match="AWS_"):
        list(find_logs(["s3://no-such-bucket-at-all/logs"]))
    for name in ("gone.jsonl", "gone.parquet", "gone.json"):
        (record,) = read(Log.of(f"s3://{BUCKET}/{name}"), after=3, max_message_bytes=LIMIT)
        assert record.position == 3 and "cannot be read" in record.errors[0].reason


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_REQUEST_BYTES", 1 << 10)
    monkeypatch.setattr(jsonl, "_PIECE_BYTES", 1 << 10)
    obstore.put(bucket, "changing.jsonl", "\n".join([line()] * 100).encode())
    records = read(Log.of(f"s3://{BUCKET}/changing.jsonl"), max_message_bytes=LIMIT)
    next(records)
    obstore.put(bucket, "changing.jsonl", "\n".join([line(tenant="eve")] * 100).encode())
    rest = list(records)
    assert {turn.tenant for r in rest for turn in r.turns} <= {"ada"}
    assert "cannot be read beyond this line" in rest[-1].errors[0].reason


def test_a_root_of_a_cluster_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, line())
    for name in ("root/map", "root/shards/s1", "root/jobs"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "root" / "jobs", line())
    assert [log.name for log in find_logs([tmp_path])] == ["log.jsonl"]
    with pytest.raises(InputError, match="is an Undertow store"):
        list(find_logs([tmp_path / "root"]))
