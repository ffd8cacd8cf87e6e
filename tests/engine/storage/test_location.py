"""Places: small files read, replaced and created in a folder; test_object_storage.py has the same on S3."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from undertow.engine.storage.location import DRAFT, Location, StoreError, remove_drafts, replace_file

from ...support.engine import open_engine
from ...support.storage.location_contract import assert_is_a_place


def test_a_folder_is_a_place(tmp_path: Path) -> None:
    assert_is_a_place(Location.of(tmp_path) / "nested" / "store")


def test_a_place_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location.of("store")
    assert (
        location
        == Location.of(tmp_path / "store")
        == Location.of(location)
        == pickle.loads(pickle.dumps(location))
    )
    assert (str(location), location.uri, location.folder) == (
        f"{tmp_path}/store",
        f"{tmp_path}/store",
        tmp_path / "store",
    )
    bucket = Location.of("s3://memories/team//one/")
    assert (bucket.uri, bucket.folder) == ("s3://memories/team/one", None)
    assert (bucket / "shards" / "a").uri == "s3://memories/team/one/shards/a"
    assert pickle.loads(pickle.dumps(bucket)) == bucket != location


@pytest.mark.parametrize("text", ["gs://bucket/x", "s3://", "s3:///x", "file:///x"])
def test_an_address_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Name a folder or s3://BUCKET/PREFIX"):
        Location.of(text)


def test_a_path_is_never_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location.of(Path("s3://b/c")).folder == tmp_path / "s3:" / "b" / "c"


def test_what_a_killed_writer_leaves_is_not_shown(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    location.write("a/b", b"x")
    (tmp_path / "a" / f".b.0123{DRAFT}").write_bytes(b"half")
    assert location.list() == ["a/b"] and location.children("a") == ["b"]


def test_files_older_than_a_moment(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    location.write("old", b"")
    location.write("new", b"")
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).timestamp()
    os.utime(tmp_path / "old", (hour_ago, hour_ago))
    assert location.list(before=datetime.now(UTC) - timedelta(minutes=30)) == ["old"]


@pytest.mark.parametrize("act", ["write", "create"])
def test_a_file_in_the_way_is_told(tmp_path: Path, act: str) -> None:
    (tmp_path / "notes.txt").write_text("not a store")
    location = Location.of(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"cannot write .*notes\.txt/a.*Check the path"):
        getattr(location, act)("a", b"x")
    with pytest.raises(StoreError, match=r"cannot read .*notes\.txt/a"):
        location.read("a")
    assert not location.exists("a")
    assert (tmp_path / "notes.txt").read_text() == "not a store"


def test_a_write_is_on_the_disk_when_it_returns(tmp_path: Path, calls_of: Callable[..., list[str]]) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("names of open files are read from /proc")
    synced = calls_of(os, "fsync", lambda number: str(Path(f"/proc/self/fd/{number}").readlink()))
    for act in (Location.of(tmp_path).write, Location.of(tmp_path).create):
        synced.clear()
        act(f"{act.__name__}/deep/file", b"x")
        folder = tmp_path / act.__name__
        assert {str(tmp_path), str(folder), str(folder / "deep")} <= set(synced), "every new folder's entry"
        assert any(".file." in path and path.endswith(DRAFT) for path in synced), "the contents"


def test_a_store_is_for_its_user_alone(tmp_path: Path) -> None:
    """Also in a folder that was there before, and that others may enter."""
    there = tmp_path / "there"
    there.mkdir(0o755)
    for folder in (tmp_path / "new" / "store", there):
        with open_engine(folder) as engine:
            engine.add("ann", [{"role": "user", "content": "the boat"}])
            logs = [path.stat().st_mode & 0o777 for path in (folder / "wal").iterdir()]
        assert set(logs) == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    shared = {path.name: oct(path.stat().st_mode) for path in there.iterdir() if path.stat().st_mode & 0o077}
    assert shared == {}


def test_a_draft_that_another_writer_takes_for_a_killed_ones_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, taken = Path.replace, list[Path]()

    def late(draft: Path, target: Path) -> Path:
        if not taken:
            taken.append(draft)
            remove_drafts(target)
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", late)
    replace_file(tmp_path / "claim", b"mine")
    assert (tmp_path / "claim").read_bytes() == b"mine" and taken
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]
