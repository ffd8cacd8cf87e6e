"""What a bulk ingest has done, kept in the cluster's root so that a resumed one is cheap.

ROOT/jobs/reached/<wave>.json     how far each log of a finished wave was taken
ROOT/jobs/stored/<wave>/<group>   groups of a wave under way whose turns are stored

Nothing depends on these files: what they forget is read again, and dedupe drops it. Logs are named by
the keyed hash that tenants are named by. A wave is named by what it reads and how it is cut into groups.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from undertow.engine.cluster.bulk.reading import FileReport, Piece, WaveReader
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.readers import Log
from undertow.engine.storage.location import Location

REACHED = "jobs/reached"
STORED = "jobs/stored"
# requests to an object store side by side
THREADS = 32


@dataclass(frozen=True, slots=True)
class FileProgress:
    """How far a log was taken. `clean`: all of it was read without an error."""

    position: int
    head: str
    head_bytes: int
    size_bytes: int
    clean: bool


def wave_name(reading: WaveReader, pieces: Sequence[Piece]) -> str:
    """Equal for waves that make the same groups of the same records of the same logs.

    A log is the same one if it lies there still, begins as it did and is as long.
    """
    map_ = reading.shard_map
    with ThreadPoolExecutor(THREADS) as pool:
        heads = list(pool.map(lambda piece: piece.log.head()["head"], pieces))
    logs = [
        [map_.tenant_key(p.log.uri), p.log.size_bytes, head, p.after]
        for p, head in zip(pieces, heads, strict=True)
    ]
    how = [map_.version, reading.buckets, reading.format, reading.max_message_bytes]
    return hashlib.blake2b(orjson.dumps([how, logs]), digest_size=12).hexdigest()


class IngestRecords:
    """The records of one root. Two ingests at a time do not disturb each other."""

    def __init__(self, root: Location) -> None:
        self._root = root

    def stored(self, wave: str) -> frozenset[int]:
        """The groups of a wave that are stored."""
        return frozenset(int(name) for name in self._root.children(f"{STORED}/{wave}"))

    def note_stored(self, wave: str, group: int) -> None:
        self._root.write(f"{STORED}/{wave}/{group}", b"")

    def note_reached(self, wave: str, reached: Mapping[str, FileProgress]) -> None:
        """A wave is done: its logs are passed over from now on, and its groups need no record."""
        self._root.write(f"{REACHED}/{wave}.json", _body(reached, time.time()))
        self._root.remove(f"{STORED}/{wave}")

    def reached(self) -> dict[str, FileProgress]:
        """How far each log was taken by earlier runs, by the log's hash; of several, by the latest."""
        bodies = sorted(self._read(self._names()), key=lambda body: float(body["at_s"]))
        return {source: FileProgress(**raw) for body in bodies for source, raw in body["logs"].items()}

    def tidy(self) -> None:
        """Put the records of all waves into one, when an ingest has come to its end."""
        names = self._names()
        if len(names) < 2:
            return
        data = _body(self.reached(), time.time())
        kept = f"{REACHED}/{hashlib.blake2b(data, digest_size=12).hexdigest()}.json"
        self._root.write(kept, data)
        for name in names:
            if name != kept:
                self._root.remove(name)

    def _names(self) -> list[str]:
        return [f"{REACHED}/{name}" for name in self._root.children(REACHED) if name.endswith(".json")]

    def _read(self, names: Iterable[str]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(THREADS) as pool:
            return [orjson.loads(data) for data in pool.map(self._root.read, names) if data]


def _body(reached: Mapping[str, FileProgress], at_s: float) -> bytes:
    return orjson.dumps({"at_s": at_s, "logs": {source: asdict(r) for source, r in reached.items()}})


def reached_by(shard_map: ShardMap, log: Log, report: FileReport) -> tuple[str, FileProgress]:
    """The record of a log that was read to its end."""
    record = FileProgress(
        position=report.position,
        head=report.head["head"],
        head_bytes=report.head["head_bytes"],
        size_bytes=log.size_bytes,
        clean=not report.errors,
    )
    return shard_map.tenant_key(log.uri), record


def pieces_left(
    shard_map: ShardMap, logs: Sequence[Log], reached: Mapping[str, FileProgress]
) -> tuple[list[Piece], list[Log]]:
    """What is still to be read, in order; and the logs that are to be read anew as they have changed.

    A log is passed over if nothing was wrong with it and it is as long as it was.
    """
    known = [reached.get(shard_map.tenant_key(log.uri)) for log in logs]
    with ThreadPoolExecutor(THREADS) as pool:
        same = list(pool.map(_is_same, logs, known))
    pieces: list[Piece] = []
    changed: list[Log] = []
    for file, (log, record, is_same) in enumerate(zip(logs, known, same, strict=True)):
        if record is None or not is_same:
            pieces.append(Piece(file, log, 0))
            if record is not None:
                changed.append(log)
        elif not (record.clean and record.size_bytes == log.size_bytes):
            pieces.append(Piece(file, log, record.position))
    return pieces, changed


def _is_same(log: Log, record: FileProgress | None) -> bool:
    return record is not None and log.head(record.head_bytes) == {
        "head": record.head,
        "head_bytes": record.head_bytes,
    }
