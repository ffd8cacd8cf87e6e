"""What every place does, whatever it lies on."""

from __future__ import annotations

from undertow.engine.storage.location import Place


def assert_is_a_place(place: Place) -> None:
    """`place` is empty before and after."""
    assert place.read("a.json") is None
    assert not place.exists() and not place.exists("a.json")
    assert place.list() == place.list("map") == place.children() == []
    place.remove("nothing")

    place.write("a.json", b"1")
    place.write("a.json", b"22")
    assert place.read("a.json") == b"22"
    assert place.create("map/00000001.json", b"first")
    assert not place.create("map/00000001.json", b"second")
    assert place.read("map/00000001.json") == b"first"
    assert place.create("map/00000002.json", b"")
    assert place.read("map/00000002.json") == b""
    assert place.create("map.old/x/y", b"z"), "a name that begins like another"
    assert place.list() == ["a.json", "map.old/x/y", "map/00000001.json", "map/00000002.json"]
    assert place.list("map") == ["map/00000001.json", "map/00000002.json"]
    assert (place / "map").list() == (place / "map").children() == ["00000001.json", "00000002.json"]
    assert place.children() == ["a.json", "map", "map.old"]
    assert place.exists() and place.exists("map") and place.exists("a.json")
    assert not place.exists("ma") and not place.exists("a")

    place.remove("map")
    assert place.list() == ["a.json", "map.old/x/y"]
    place.remove("a.json")
    place.remove("map.old/x")
    assert place.list() == []
