"""What every place does, whatever it lies on."""

from __future__ import annotations

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
