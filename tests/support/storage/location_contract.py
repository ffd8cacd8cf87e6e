"""What every place does, whatever it lies on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from undertow.engine.storage.location import Location


def assert_is_a_place(location: Location) -> None:
    """`location` is empty before and after."""
    assert location.read("a.json") is None
    assert not location.exists() and not location.exists("a.json")
    assert location.list() == location.list("map") == location.children() == []
    location.remove("nothing")

    location.write("a.json", b"1")
    location.write("a.json", b"22")
    assert location.read("a.json") == b"22"
    assert location.create("map/00000001.json", b"first")
    assert not location.create("map/00000001.json", b"second")
    assert location.read("map/00000001.json") == b"first"
    assert location.create("map/00000002.json", b"")
    assert location.read("map/00000002.json") == b""
    assert location.create("map.old/x/y", b"z"), "a name that begins like another"
    assert location.list() == ["a.json", "map.old/x/y", "map/00000001.json", "map/00000002.json"]
    assert location.list("map") == ["map/00000001.json", "map/00000002.json"]
    assert (location / "map").list() == (location / "map").children() == ["00000001.json", "00000002.json"]
    assert location.children() == ["a.json", "map", "map.old"]
    assert location.exists() and location.exists("map") and location.exists("a.json")
    assert not location.exists("ma") and not location.exists("a")

    location.remove("map")
    assert location.list() == ["a.json", "map.old/x/y"]
    location.remove("a.json")
    location.remove("map.old/x")
    assert location.list() == []
    assert_one_of_many_creators_succeeds(location)


def assert_one_of_many_creators_succeeds(location: Location) -> None:
    for n in range(20):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda k, n=n: location.create(f"map/{n}", b"%d" % k), range(8)))
        assert sum(made) == 1
        assert location.read(f"map/{n}") == b"%d" % made.index(True)
    if location.folder is not None:
        names = sorted(path.name for path in (location.folder / "map").iterdir())
        assert location.children("map") == names, "no draft is left"
    hour = timedelta(hours=1)
    assert location.list(before=datetime.now(UTC) + hour) == location.list() != []
    assert location.list(before=datetime.now(UTC) - hour) == []
    location.remove("map")
    assert location.list() == []
