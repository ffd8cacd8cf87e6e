"""What must hold at the end of a run, whatever has befallen it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import Turn
from undertow.engine.base.queries import DeleteCommand, UpdateCommand
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.shard_map import STORES
from undertow.engine.storage.journal import Row
from undertow.engine.storage.location import Location
from undertow.engine.storage.row_codec import Control, control_of

from ...api.erasure import files_with, values_with
from ...faults.harness import assert_same_state, end_state, reports
from ..in_process import cluster_state
from .clients import GREETING, Client, wording
from .llm import REPLIES
from .world import ENCODER, World

Record = Turn | Control


def check(world: World) -> dict[str, int]:
    """Nothing acknowledged is lost or doubled, and the memories are those of turns that came one by one."""
    root = Path(str(world.root))
    stores = [root / STORES / shard for shard in shard_map.load(Location.of(root)).all_shards]
    stores = [store for store in stores if (store / "store.json").exists()]
    logs: dict[str, tuple[int, list[Record]]] = {}
    for store in stores:
        with reports(store) as of:
            logs |= {name: _log_of(of, name, world) for name in of.tenants.names()}
    for client in world.clients:
        _check_log(client, logs.get(client.name, (client.lives, []))[1])
    state = cluster_state(root)
    assert_same_state(state, end_state(_alone(world, logs)))
    _check_erased(world, stores)
    return {
        "turns": sum(len(client.acked) for client in world.clients),
        "torn": world.disk.torn,
        "lost": world.network.lost,
        "erased": sum(client.lives - 1 for client in world.clients),
        "deleted": sum(len(client.deleted) for client in world.clients),
        "changes": sum(_is_change(record) for _, log in logs.values() for record in log),
    }


def _is_change(record: Record) -> bool:
    return isinstance(record, Control) and record.kind == "policy"


def _log_of(of: Reports, name: str, world: World) -> tuple[int, list[Record]]:
    """The tenant's incarnation, and the records of its log in order; of a deleted turn, what was sent."""
    sent = next(client.sent for client in world.clients if client.name == name)
    found: dict[int, Record] = {}
    for row in of.tenants.stored(name, "turn", "control"):
        for seq, record in _records(row, sent):
            assert seq not in found, f"{name} has two records {seq}"
            found[seq] = record
    assert sorted(found) == list(range(len(found))), f"the log of {name} has gaps"
    return of.tenants.incarnation(name), [found[seq] for seq in sorted(found)]


def _records(row: Row, sent: dict[str, Turn]) -> Iterator[tuple[int, Record]]:
    if row.kind == "turn":
        yield row.seq, sent[orjson.loads(row.payload)["key"]]
        return
    control = control_of(row)
    if control.seq >= 0:
        yield control.seq, control
    if "turn_seq" in control.body:
        yield control.body["turn_seq"], sent[control.body["key"]]


def _check_log(client: Client, log: list[Record]) -> None:
    """Each acknowledged turn stands there once, in the order of the acknowledgements."""
    keys = [record.dedupe_key for record in log if isinstance(record, Turn)]
    assert len(set(keys)) == len(keys), f"{client.name}: a turn is stored twice"
    lost = client.acked.keys() - {*keys}
    assert not lost, f"{client.name}: {sorted(lost)[:3]} is acknowledged and lost"
    strange = {*keys} - client.acked.keys() - client.unsure
    assert not strange, f"{client.name}: {sorted(strange)[:3]} is stored, and nobody sent it in this life"
    if not client.careless:
        assert [key for key in keys if key in client.acked] == [*client.acked], f"{client.name}: out of order"


def _alone(world: World, logs: dict[str, tuple[int, list[Record]]]) -> Path:
    """A store of one engine that has got the same records one by one, each decided before the next."""
    store = world.folder / "alone"
    with Engine(store, world.settings, ENCODER, llm=MockLLM(REPLIES)) as engine:
        for name, (incarnation, log) in logs.items():
            while engine.tenants.incarnation(name) < incarnation:
                engine.add_batch([Turn(name, GREETING, "another life")])
                engine.erase(name)
            for record in log:
                _take(engine, name, record)
                assert engine.drain()
    return store


def _take(engine: Engine, name: str, record: Record) -> None:
    if isinstance(record, Turn):
        engine.add_batch([record])
        return
    body: Any = record.body
    match record.kind:
        case "flush":
            engine.flush(name)
        case "policy":
            engine.set_policy(name, body["policy"], drop_edits=True)
        case "delete":
            engine.call(DeleteCommand(body.get("memory_id") or body["id"], name))
        case "update":
            engine.call(UpdateCommand(body["memory_id"], name, text=wording(body["memory_id"])))
        case other:
            raise AssertionError(f"nobody has asked for {other}")


def _check_erased(world: World, stores: list[Path]) -> None:
    needles = [word.encode() for client in world.clients for word in sorted(client.buried)]
    for store in stores if needles else []:
        assert not (found := files_with(store, needles)), f"{store.name}: erased words are in {found[:3]}"
        assert not (values := values_with(store, needles)), f"{store.name}: they are in {sorted(values)[:3]}"
