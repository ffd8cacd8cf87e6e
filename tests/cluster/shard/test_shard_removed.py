"""A shard that was removed from the map ends, and its callers find their way."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undertow.engine.base.queries import DrainCommand, SearchQuery, StatsQuery
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard_map import STORES, Removed, ShardMap
from undertow.engine.cluster.wire import pack
from undertow.engine.storage.journal import Fenced
from undertow.engine.storage.location import Location

from ...support.cluster.in_process import PARTS, begin, settings
from ...support.cluster.shard import SOON_S, Sender, some
from .conftest import Start

# ---- a shard that the map does without


def remove(root: Location, shard: str) -> ShardMap:
    """The maps of a resharding that takes a shard away; the last of them."""
    now = shard_map.load(root)
    now = now.toward([name for name in now.shards if name != shard])
    shard_map.publish(root, now)
    while now.phase is not None:
        now = now.after()
        shard_map.publish(root, now)
    return now


@pytest.mark.parametrize("how", ["add", "hello", "look"])
def test_a_shard_that_the_map_does_without_ends(tmp_path: Path, how: str, start: Start) -> None:
    root = begin(tmp_path / "root", 2)
    shard = start(name="s1", where=root)
    sender = Sender(shard)
    settled = remove(root, "s1")
    calls = {
        "add": lambda: shard.add(pack(some("ann", 0)), CallStamp("client", sender.token, 0, settled.version)),
        "hello": lambda: shard.hello("client", settled.version),
        "look": shard.look,
    }
    with pytest.raises(Removed, match="by map 5"):
        calls[how]().result(SOON_S)
    for call in (
        shard.ask(SearchQuery("ann", "x")),
        shard.ask(StatsQuery()),
        shard.ask(DrainCommand()),
        shard.look(),
    ):
        with pytest.raises(Removed):
            call.result(SOON_S)


def test_a_shard_that_the_map_does_without_makes_no_store(tmp_path: Path, start: Start) -> None:
    root = begin(tmp_path / "root", 2)
    remove(root, "s1")
    shard = start(name="s1", where=root)
    with pytest.raises(Removed):
        shard.hello("client", 1).result(SOON_S)
    assert not root.exists(f"{STORES}/s1")


def test_all_shards_are_asked_again_where_one_was_removed_meanwhile(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)

    class Way:
        def __init__(self, shard: str) -> None:
            self.shard = shard

        async def call(self, method: str, *_: Any, **__: Any) -> Any:
            if self.shard == "s1":
                raise Removed("s1", remove(root, "s1").version)
            return {"turns": 3}

    with Router(root, Way) as router:
        assert router.stats() == {"turns": 3}


def test_the_actor_of_a_removed_shard_ends_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, though nobody calls it; and none is started for it again."""
    ray = pytest.importorskip("ray")
    from undertow.engine.cluster.ray import actors, shard_actor
    from undertow.engine.cluster.settings import ClusterSettings

    root = begin(tmp_path / "root", 2)
    ended = threading.Event()
    exits: list[int] = []

    def kill(who: str, *, no_restart: bool) -> None:
        assert (who, no_restart) == ("me", True)
        ended.set()

    monkeypatch.setattr(shard_actor, "LOOK_S", 0.01)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="me"))
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr("os._exit", exits.append)
    actor = shard_actor.ShardActor(str(root), "s1", settings().model_dump(), pickle.dumps(PARTS), "")
    assert actor._shard.look().result(SOON_S) == 1 and not ended.is_set()
    remove(root, "s1")
    assert ended.wait(SOON_S)
    assert actor._shard.join(SOON_S) and exits == []
    start = actors.Starter(root, settings(), ClusterSettings(), PARTS)
    with pytest.raises(Removed):
        start("s1")
    with pytest.raises(Removed):
        asyncio.run(actors.RayShard(start, "s1").call("search", "ann", "x"))


def test_a_caller_hears_that_a_shard_was_fenced_and_does_not_guess() -> None:
    """Of a process that only dies it would have to think that it died of what it was sent."""
    ray = pytest.importorskip("ray")
    from undertow.engine.cluster.ray import actors
    from undertow.engine.cluster.routing.errors import ShardExited

    class Gone:
        async def remote(self, *_: Any) -> Any:
            raise ray.exceptions.RayTaskError("call", "its report", Fenced("another writer"))

    start: Any = lambda _: SimpleNamespace(call=Gone())  # noqa: E731
    with pytest.raises(ShardExited, match="another writer"):
        asyncio.run(actors.RayShard(start, "s0").call("search", "ann", "x"))
