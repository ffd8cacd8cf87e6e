"""What the tests of bulk ingest share: logs of many tenants, and a stand-in for a router that keeps all."""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.bulk.reading import Part, PartReader, Piece
from undertow.engine.cluster.shard_map import ShardMap, load, publish
from undertow.engine.cluster.wire import Status, check_turns, receipts_table
from undertow.engine.readers import Log, StoreEncoder, read
from undertow.engine.storage.location import Location

LIMIT = 1_000_000
ENCODER = StoreEncoder(4, "digest")
SHARDS = ("a", "b")


def line(tenant: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "noted"}]
    return {"tenant": tenant, "session": "s", "messages": messages, **more}


def write_logs(folder: Path, *, files: int, lines: int, tenants: int, seed: int = 7) -> Path:
    """Logs whose tenants are spread over all files, one heavy; lines of one turn and of several."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        with (folder / f"log{number:02d}.jsonl").open("w") as out:
            for n in range(lines):
                tenant = f"t{min(chance.randrange(tenants), chance.randrange(tenants))}"
                said = line(tenant, f"file {number} line {n} {'word ' * chance.randrange(30)}")
                said["messages"] *= chance.choice((1, 1, 1, 3))
                out.write(json.dumps(said) + "\n")
    return folder


def one_process_order(logs: Iterable[Log]) -> dict[str, list[str]]:
    """The dedupe keys of each tenant, as one process stores them."""
    order: dict[str, list[str]] = defaultdict(list)
    for log in logs:
        for record in read(log, max_message_bytes=LIMIT):
            for turn in record.turns:
                order[turn.tenant].append(turn.dedupe_key)
    return dict(order)


def new_root(where: Path | str, hash_key: str = "") -> Location:
    root = Location.of(where)
    publish(root, ShardMap(1, SHARDS, hash_key=hash_key))
    return root


def reading(root: Location, **changes: Any) -> PartReader:
    return replace(PartReader(load(root), "auto", LIMIT, 64), **changes)


@dataclass
class Kept:
    """Stands for a router: keeps each call, row by row; a turn is new the first time.

    `broken`: tenants whose calls fail.
    """

    broken: frozenset[str] = frozenset()
    store_encoder: StoreEncoder = ENCODER
    calls: list[pa.Table] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def feed_table(self, table: pa.Table) -> Future[pa.Table]:
        check_turns(table)
        receipts: Future[pa.Table] = Future()
        if self.broken.intersection(table.column("tenant").to_pylist()):
            receipts.set_exception(UndertowError("this shard is down"))
            return receipts
        self.calls.append(table)
        keys = table.column("key").to_pylist()
        statuses = [Status.DUPLICATE if key in self._known else Status.STORED for key in keys]
        self._known.update(keys)
        receipts.set_result(receipts_table([(status, None, None, None) for status in statuses]))
        return receipts

    def stored(self) -> dict[str, list[str]]:
        """The dedupe keys of each tenant as they came."""
        order: dict[str, list[str]] = defaultdict(list)
        for table in self.calls:
            for tenant, key in zip(
                table.column("tenant").to_pylist(), table.column("key").to_pylist(), strict=True
            ):
                order[tenant].append(key)
        return dict(order)


@dataclass(frozen=True, slots=True)
class DyingReader(PartReader):
    """Ends its process before its first part and, when repeated, after its first and its second."""

    folder: Path = Path()

    def parts(self, pieces: Sequence[Piece]) -> Iterator[Part]:
        for number, part in enumerate(PartReader.parts(self, pieces)):
            if len(list(self.folder.iterdir())) == number < 3:
                (self.folder / f"death{number}").touch()
                time.sleep(0.5)  # until what was read before is there
                os._exit(9)
            yield part
