"""Places: small files read, replaced and created in a folder; test_object_storage.py has the same on S3."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from undertow.engine.storage.location import DRAFT, Place, StoreError

from ...support.storage.location_contract import assert_is_a_place


def test_a_folder_is_a_place(tmp_path: Path) -> None:
    assert_is_a_place(Place.of(tmp_path) / "nested" / "store")


def test_a_place_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Place.of("store")
    assert place == Place.of(tmp_path / "store") == Place.of(place) == pickle.loads(pickle.dumps(place))
    assert (str(place), place.uri, place.folder) == (
        f"{tmp_path}/store",
        f"{tmp_path}/store",
        tmp_path / "store",
    )
    bucket = Place.of("s3://memories/team//one/")
    assert (bucket.uri, bucket.folder) == ("s3://memories/team/one", None)
    assert (bucket / "shards" / "a").uri == "s3://memories/team/one/shards/a"
    assert pickle.loads(pickle.dumps(bucket)) == bucket != place


@pytest.mark.parametrize("text", ["gs://bucket/x", "s3://", "s3:///x", "file:///x"])
def test_an_address_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Name a folder or s3://BUCKET/PREFIX"):
        Place.of(text)


def test_a_path_is_never_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Place.of(Path("s3://b/c")).folder == tmp_path / "s3:" / "b" / "c"


def test_of_many_creators_one_succeeds(tmp_path: Path) -> None:
    place = Place.of(tmp_path)
    for n in range(20):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda k, n=n: place.create(f"map/{n}", b"%d" % k), range(8)))
        assert sum(made) == 1
        assert place.read(f"map/{n}") == b"%d" % made.index(True)
    assert place.children("map") == sorted(p.name for p in (tmp_path / "map").iterdir()), "no draft is left"


def test_what_a_killed_writer_leaves_is_not_shown(tmp_path: Path) -> None:
    place = Place.of(tmp_path)
    place.write("a/b", b"x")
    (tmp_path / "a" / f".b.0123{DRAFT}").write_bytes(b"half")
    assert place.list() == ["a/b"] and place.children("a") == ["b"]


def test_files_older_than_a_moment(tmp_path: Path) -> None:
    place = Place.of(tmp_path)
    place.write("old", b"")
    place.write("new", b"")
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).timestamp()
    os.utime(tmp_path / "old", (hour_ago, hour_ago))
    assert place.list(before=datetime.now(UTC) - timedelta(minutes=30)) == ["old"]


@pytest.mark.parametrize("act", ["write", "create"])
def test_a_file_in_the_way_is_told(tmp_path: Path, act: str) -> None:
    (tmp_path / "notes.txt").write_text("not a store")
    place = Place.of(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"cannot write .*notes\.txt/a.*Check the path"):
        getattr(place, act)("a", b"x")
    with pytest.raises(StoreError, match=r"cannot read .*notes\.txt/a"):
        place.read("a")
    assert not place.exists("a")
    assert (tmp_path / "notes.txt").read_text() == "not a store"


def test_a_write_is_on_the_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        really(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("names of open files are read from /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    for act in (Place.of(tmp_path).write, Place.of(tmp_path).create):
        synced.clear()
        act(f"{act.__name__}/deep/file", b"x")
        folder = tmp_path / act.__name__
        assert {str(tmp_path), str(folder), str(folder / "deep")} <= set(synced), "every new folder's entry"
        assert any(".file." in path and path.endswith(DRAFT) for path in synced), "the contents"
