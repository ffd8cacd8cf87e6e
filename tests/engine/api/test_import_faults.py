"""Imports and exports across pages, kills and shards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.api.transfer.export import ExportBroken
from undertow.engine.api.transfer.import_ import TenantExists
from undertow.engine.base.model import InputError
from undertow.engine.base.queries import ImportCommand
from undertow.engine.base.results import Report
from undertow.engine.cluster.routing.errors import ShardGone
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.tenants.registry import UnknownTenant

from ...support.api.transfer import act, engine_at, exported, nameless, said, seen
from ...support.cluster.in_process import LocalShards, begin
from ...support.cluster.in_process import settings as cluster_settings
from ...support.engine import bytes_hold
from ...support.faults.harness import THETA, Driver, shared_driver

# ---- one export for all that follows


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """An export with every kind of record, decision and control."""
    with engine_at(tmp_path_factory.mktemp("source") / "s") as engine:
        engine.add_batch([said("ann", n) for n in range(40)])
        assert engine.drain()
        engine.replay_jobs()
        for what, n in (("delete turn", 3), ("update turn", 5), ("update memory", 1), ("delete memory", 2)):
            act(engine, "ann", what, n)
            assert engine.drain()
        act(engine, "ann", "flush", 0)
        engine._llm = engine.scheduler.llm_calls.llm = None  # what comes now waits
        engine.add_batch([said("ann", n) for n in range(60, 70)])
        act(engine, "ann", "update memory", 3)
        return exported(engine, "ann")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_at(tmp_path / "store") as engine:
        yield engine


# ---- pages


def test_words_deleted_between_two_pages_do_not_come_in(tmp_path: Path) -> None:
    with engine_at(tmp_path / "a") as here, engine_at(tmp_path / "b") as there:
        here.add_batch([said("ann", n) for n in range(30)])
        assert here.drain()
        page = here.export_page("ann", limit=45)
        records = [*page.items]
        doomed = [r for r in records if r["kind"] == "turn" and r["seq"] < 8]
        for turn in doomed:
            here.delete(turn["id"])
        here.add_batch([said("ann", 99)])
        assert here.drain()
        while page.after:
            page = here.export_page("ann", after=page.after, limit=45)
            records += page.items
        there.import_("bob", records)
        there.drain()
        assert seen(there, "bob") == seen(here, "ann")
        words = {m["content"] for turn in doomed for m in turn["messages"] if m["role"] == "user"}
    assert words and not any(bytes_hold(tmp_path / "b", text) for text in words)


def test_pages_of_another_life_or_place_are_refused(tmp_path: Path) -> None:
    with engine_at(tmp_path / "a") as engine, engine_at(tmp_path / "b") as other:
        for one in (engine, other):
            one.add_batch([said("ann", n) for n in range(5)])
        page = engine.export_page("ann", limit=2)
        with pytest.raises(ExportBroken, match="Begin the export again"):
            other.export_page("ann", after=page.after)
        engine.erase("ann")
        with pytest.raises(UnknownTenant):
            engine.export_page("ann", after=page.after)
        engine.add_batch([said("ann", n) for n in range(5)])
        with pytest.raises(ExportBroken):
            engine.export_page("ann", after=page.after)
        for wrong in ({"after": "x"}, {"after": "a.b.c.d"}, {"limit": 0}, {"limit": 10**9}):
            with pytest.raises(InputError):
                engine.export_page("ann", **wrong)


# ---- killed


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["append_stream", "_acknowledge"])
def test_killed_around_its_commit_an_import_is_there_whole_or_not_at_all(
    method: str, after: bool, source: list[Report], tmp_path: Path, driver: Driver
) -> None:
    file = tmp_path / "export.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, source)))
    task = {"task": "import", "file": file, "tenant": "bob", "settings": {**THETA, "encoder": "hash:64"}}
    store = tmp_path / "store"
    kill = {"method": method, "n": 1, "after": after}
    assert driver.run(store=store, kill=kill, **task).status == -signal.SIGKILL
    stored = (method, after) != ("append_stream", False)
    with engine_at(store) as engine:
        assert ("bob" in engine.tenants) == stored
        done = engine.call(ImportCommand("bob", source, again=True))
        assert done.turns == sum(r["kind"] == "turn" for r in source)
        engine.resume()
        engine.drain()
        found = seen(engine, "bob")
    with engine_at(tmp_path / "whole") as undisturbed:
        undisturbed.import_("bob", source)
        undisturbed.drain()
        assert found == seen(undisturbed, "bob")


# ---- over shards


class LosesOneAnswer(LocalShards):
    """Shards of which the one that has first stored an import dies before it can say so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lost = 0

    def calls(self, name: str) -> Any:
        calls, shards = super().calls(name), self

        class Calls:
            async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
                answer = await calls.call(method, *args, **kwargs)
                if method == "ask" and isinstance(args[0], ImportCommand) and not shards.lost:
                    shards.lost += 1
                    shards.kill(name)
                    raise ShardGone(f"shard {name} was killed")
                return answer

        return Calls()


def test_over_shards_an_import_is_stored_once_though_its_answer_is_lost(
    source: list[Report], tmp_path: Path
) -> None:
    root = begin(tmp_path / "root", 2)
    shards = LosesOneAnswer(root, cluster_settings())
    with shards, Router(root, shards.calls, ClusterSettings(patience_s=60)) as router:
        names = [f"tenant {n}" for n in range(4)]
        done = [router.import_(name, source) for name in names]
        assert shards.lost == 1 and len(set(done)) == 1
        assert router.drain()
        with pytest.raises(TenantExists):
            router.import_(names[0], source)
        assert router.tenant_names() == names
        assert router.tenant_names(prefix="tenant", limit=2, after="tenant 1") == names[2:]
        copies = {nameless(all_pages(router, name), name) for name in names}
        assert len(copies) == 1
        listed = router.list(names[0], kinds=["fact"], limit=3)
        assert [item["kind"] for item in listed.items] == ["fact"] * 3
        stats = [router.tenant_stats(name) for name in names]
        assert stats[1:] == stats[:-1] and stats[0]["turns"] == done[0].turns
        assert {len(router.explain(name, limit=5)) for name in names} == {5}
        spent = [router.usage(name)["episode"]["calls"] for name in names]
        assert router.usage()["episode"]["calls"] == sum(spent) > 0
        router.erase(names[0])
        assert len(router.purge()) == 1 and router.tenant_names() == names[1:]


def all_pages(router: Router, tenant: str) -> list[Report]:
    page = router.export_page(tenant, limit=50)
    records = [*page.items]
    while page.after:
        page = router.export_page(tenant, after=page.after, limit=50)
        records += page.items
    return records
