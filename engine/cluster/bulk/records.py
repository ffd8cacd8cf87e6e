"""How far bulk ingests have taken each log, kept in the cluster's root so that a resumed one is cheap.

ROOT/jobs/reached/<name>.json: some logs. Nothing depends on these files: what they forget is read again, and
dedupe drops it. Logs are named by the keyed hash that tenants are named by.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from undertow.engine.cluster.bulk.reading import FileReport, Piece
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.readers import Log
from undertow.engine.storage.location import Location

REACHED = "jobs/reached"
# requests to an object store side by side
THREADS = 32


@dataclass(slots=True)
class FileProgress:
    """How far a log was taken. All turns up to `position` are stored, but for those of some shards.

    `behind`: how far those shards have theirs, by the map of version `map_version`. `clean`: all of the log
    was read without an error.
    """

    position: int
    head: str
    head_bytes: int
    size_bytes: int
    clean: bool
    map_version: int = 0
    behind: dict[str, int] = field(default_factory=dict)

    @classmethod
    def begun(cls, piece: Piece, map_version: int) -> FileProgress:
        """Of a log of which nothing was read yet in this run."""
        return cls(piece.until, "", 0, piece.log.size_bytes, False, map_version, dict(piece.behind))

    def advance(self, report: FileReport, lost: Collection[str]) -> None:
        """The turns of more records are stored. `lost`: the shards that have failed, now or before."""
        for shard in lost:
            self.behind.setdefault(shard, self.position)
        self.position = max(self.position, report.position)
        reached = {s: at if s in lost else max(at, report.position) for s, at in self.behind.items()}
        self.behind = {shard: at for shard, at in reached.items() if at < self.position}
        self.head, self.head_bytes = report.head["head"], report.head["head_bytes"]


class IngestRecords:
    """The records of one root. Two ingests at a time do not disturb each other."""

    def __init__(self, root: Location) -> None:
        self._root = root

    def note(self, reached: Mapping[str, FileProgress]) -> None:
        """Remember how far some logs were taken, by the log's hash."""
        data = orjson.dumps({"at_s": time.time(), "logs": {log: asdict(r) for log, r in reached.items()}})
        name = hashlib.blake2b(data, digest_size=12).hexdigest()
        self._root.write(f"{REACHED}/{name}.json", data)

    def reached(self) -> dict[str, FileProgress]:
        """How far each log was taken by earlier runs, by the log's hash; of several, by the latest."""
        return self._merged(self._names())

    def tidy(self) -> None:
        """Merge all records into one, when an ingest has come to its end."""
        names = self._names()
        if len(names) > 1:
            self.note(self._merged(names))
            for name in names:
                self._root.remove(name)

    def _names(self) -> list[str]:
        return [f"{REACHED}/{name}" for name in self._root.children(REACHED) if name.endswith(".json")]

    def _merged(self, names: Sequence[str]) -> dict[str, FileProgress]:
        with ThreadPoolExecutor(THREADS) as pool:
            bodies: list[dict[str, Any]] = [
                orjson.loads(data) for data in pool.map(self._root.read, names) if data
            ]
        bodies.sort(key=lambda body: float(body["at_s"]))
        return {log: FileProgress(**raw) for body in bodies for log, raw in body["logs"].items()}


def pieces_left(
    shard_map: ShardMap, logs: Sequence[Log], reached: Mapping[str, FileProgress]
) -> tuple[list[Piece], list[Log]]:
    """What is still to be read, in order; and the logs that are to be read anew as they have changed.

    A log is passed over if nothing was wrong with it and it is as long as it was.
    """
    known = [reached.get(shard_map.tenant_key(log.identity)) for log in logs]
    with ThreadPoolExecutor(THREADS) as pool:
        same = list(pool.map(_is_same, logs, known))
    pieces: list[Piece] = []
    changed: list[Log] = []
    for file, (log, record, is_same) in enumerate(zip(logs, known, same, strict=True)):
        if record is None or not is_same:
            pieces.append(Piece(file, log))
            if record is not None:
                changed.append(log)
        elif record.behind or not (record.clean and record.size_bytes == log.size_bytes):
            pieces.append(_rest(file, log, record, shard_map.version))
    return pieces, changed


def _rest(file: int, log: Log, record: FileProgress, map_version: int) -> Piece:
    """What was not stored of a log. Under another map, which tenants a shard was to store is not known."""
    after = min([record.position, *record.behind.values()])
    if record.map_version != map_version:
        return Piece(file, log, after, after)
    return Piece(file, log, after, record.position, record.behind)


def _is_same(log: Log, record: FileProgress | None) -> bool:
    return record is not None and log.head(record.head_bytes) == {
        "head": record.head,
        "head_bytes": record.head_bytes,
    }
