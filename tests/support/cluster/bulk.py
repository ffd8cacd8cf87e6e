"""What the tests of bulk ingest share: logs of many tenants, and a stand-in for shards that keeps all."""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.bulk.reading import WaveReader
from undertow.engine.cluster.shard_map import ShardMap, load, publish
from undertow.engine.cluster.wire import RECEIPTS, TURNS, Status, check_turns
from undertow.engine.readers import Log, read
from undertow.engine.storage.location import Location

LIMIT = 1_000_000
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


def new_root(where: Path | str, shards: Sequence[str] = SHARDS) -> Location:
    root = Location.of(where)
    publish(root, ShardMap.new(list(shards)))
    return root


def reading(root: Location, buckets: int = 2, **changes: Any) -> WaveReader:
    return replace(WaveReader(load(root), buckets, "auto", LIMIT), **changes)


@dataclass(frozen=True)
class Kept:
    """Connects to shards that write each call they get into a folder; a turn is new the first time.

    `broken`: tenants whose calls fail. `delay_s`: how long a call takes. `killed`: so many calls end
    their worker instead, each once, before anything is stored or right after.
    """

    folder: Path
    broken: frozenset[str] = frozenset()
    delay_s: float = 0.0
    killed: int = 0

    def __call__(self) -> Kept:
        return self

    def close(self) -> None:
        pass

    def add_table(self, table: pa.Table) -> pa.Table:
        check_turns(table)
        tenants = table.column("tenant").to_pylist()
        if self.broken.intersection(tenants):
            raise UndertowError("this shard is down")
        time.sleep(self.delay_s)
        self._die(after=False)
        before = {key for keys in self.stored().values() for key in keys}
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        draft = self.folder / f"{name}.draft"
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, TURNS) as writer:
            writer.write_table(table)
        draft.rename(self.folder / f"{name}.arrow")
        self._die(after=True)
        status = [
            Status.DUPLICATE if key in before else Status.STORED for key in table.column("key").to_pylist()
        ]
        nothing = [None] * len(status)
        columns = [status, nothing, nothing, nothing]
        return pa.table(
            [pa.array(c, f.type) for c, f in zip(columns, RECEIPTS, strict=True)], schema=RECEIPTS
        )

    def _die(self, *, after: bool) -> None:
        """End this process, if it is its turn to."""
        for number in range(int(after), self.killed, 2):
            try:
                (self.folder / f"death{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os._exit(9)

    def calls(self) -> list[pa.Table]:
        """What came, call by call."""
        return [
            pa.ipc.open_file(path.read_bytes()).read_all() for path in sorted(self.folder.glob("*.arrow"))
        ]

    def stored(self) -> dict[str, list[str]]:
        """The dedupe keys of each tenant in the order in which they first came."""
        order: dict[str, dict[str, None]] = defaultdict(dict)
        for table in self.calls():
            for tenant, key in zip(
                table.column("tenant").to_pylist(), table.column("key").to_pylist(), strict=True
            ):
                order[tenant].setdefault(key)
        return {tenant: list(keys) for tenant, keys in order.items()}
