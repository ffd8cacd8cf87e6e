"""The disk of the simulated processes: real files, whose changes take virtual time and can be cut short.

At each effect the process may crash, be paused, or let others go on. A kill keeps what was written; a power
failure also undoes what no flush has made durable, or a part of it, and may bring removed files back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Appender, Location
from undertow.engine.storage.store_info import WriterLock
from undertow.engine.storage.wal import CLAIM


@dataclass
class Disk:
    """What befalls the files of processes."""

    rng: random.Random
    # of the files that are appended to: how much of each survives a power failure
    durable: dict[Path, int] = field(default_factory=dict)
    removed: dict[Path, bytes] = field(default_factory=dict)
    manifests: dict[Path, set[str]] = field(default_factory=dict)
    flushed: set[int] = field(default_factory=set)
    locks: list[tuple[str, WriterLock]] = field(default_factory=list)
    torn: int = 0

    def effect(self, name: str) -> None:
        """Called, with its name, before and after each thing that a process does to its files."""
        raise NotImplementedError

    def fail_power(self, store: Path) -> None:
        """Undo what is not durable of one store."""
        for path, size in self.durable.items():
            if path.is_relative_to(store) and path.exists():
                data = path.read_bytes()
                kept = self.rng.randint(min(size, len(data)), len(data))
                zeros = self.rng.choice([0, len(data) - kept])  # the length grows before the bytes are there
                path.write_bytes(data[:kept] + b"\0" * zeros)
                self.torn += kept < len(data)
        for path, data in self.removed.items():
            back = self.rng.random() < 0.5
            if back and path.is_relative_to(store) and path.parent.exists() and not path.exists():
                path.write_bytes(data)
        versions = store / "journal.lance" / "_versions"
        if versions in self.manifests:
            for path in sorted(versions.iterdir()):  # the newest first, back to one that was flushed
                if path.name in self.manifests[versions]:
                    break
                path.unlink()

    def sync(self, descriptor: int) -> None:
        """Stands for os.fsync."""
        self.flushed.add(descriptor)

    def sync_path(self, path: Path) -> None:
        """Stands for fsync_path of lance_log.py and wal.py."""
        if path.suffix == ".manifest":
            self.manifests.setdefault(path.parent, set()).add(path.name)
        self.removed = {file: data for file, data in self.removed.items() if file.parent != path}

    def unlock(self, process: str) -> None:
        """What the system does when a process has ended."""
        for holder, lock in self.locks:
            if holder == process:
                lock.close()


class Files(Location):
    """A folder on the simulated disk."""

    __slots__ = ()
    disk: ClassVar[Disk]

    def read(self, name: str) -> bytes | None:
        if name == CLAIM:
            self.disk.effect("before the claim is read")
        return super().read(name)

    def write(self, name: str, data: bytes) -> None:
        with self._around(f"write of {name}"):
            super().write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        with self._around(f"creation of {name}"):
            return super().create(name, data)

    def begin(self, name: str, *, fsync: bool) -> Appender:
        assert self.folder is not None
        self.disk.effect("before a segment begins")
        return SimAppender(self.disk, self.folder / name, fsync)

    def remove_files(self, names: Sequence[str]) -> None:
        assert self.folder is not None
        for name in names:
            self.disk.effect("before a segment goes")
            if (path := self.folder / name).exists():
                self.disk.removed[path] = path.read_bytes()
            super().remove_files([name])

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        self.disk.effect(f"before the {name}")
        yield
        self.disk.effect(f"after the {name}")


class SimAppender(Appender):
    def __init__(self, disk: Disk, path: Path, fsync: bool) -> None:
        super().__init__(path, fsync)
        self._disk, self._path = disk, path
        disk.durable[path] = 0

    def append(self, data: bytes) -> None:
        disk = self._disk
        disk.effect("before an append")
        size = os.fstat(self._descriptor).st_size
        os.write(self._descriptor, data[: disk.rng.randrange(len(data))])
        disk.torn += 1
        disk.effect("within an append")
        disk.torn -= 1
        os.ftruncate(self._descriptor, size)
        disk.flushed.discard(self._descriptor)
        super().append(data)
        if self._descriptor in disk.flushed:
            disk.durable[self._path] = os.fstat(self._descriptor).st_size
        disk.effect("after an append")


class Table(LanceLog):
    """A Lance table, whose versions are atomic. Lance itself runs at one moment of virtual time."""

    disk: ClassVar[Disk]

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        self.disk.effect(f"before {name}")
        yield
        self.disk.effect(f"after {name}")

    @classmethod
    def make(cls, location: Location, schema: pa.Schema) -> None:
        cls.disk.effect("before a table is made")
        super().make(location, schema)
        cls.disk.effect("after a table is made")

    def append(self, table: pa.Table) -> None:
        """Lance chooses the version's number, then writes its manifest unless there is one by then."""
        with self._around("a commit"):
            super().append(table)
            manifest = self._path / "_versions" / f"{2**64 - 1 - self.version:020d}.manifest"
            data, flushed = manifest.read_bytes(), self.disk.manifests.setdefault(manifest.parent, set())
            is_durable = manifest.name in flushed
            flushed.discard(manifest.name)
            manifest.unlink()
            self.disk.effect("within a commit")
            if manifest.exists():
                self.reload()
                super().append(table)
            else:
                manifest.write_bytes(data)
                flushed.update([manifest.name] if is_durable else [])

    def append_stream(self, batches: pa.RecordBatchReader) -> None:
        with self._around("a stream's commit"):
            super().append_stream(batches)

    def sync(self) -> None:
        with self._around("a flush to the disk"):
            super().sync()

    def delete(self, filter: str) -> None:
        with self._around("a deletion"):
            super().delete(filter)

    def tidy(self) -> int:
        with self._around("a merge of fragments"):
            return super().tidy()

    def rewrite_deleted(self) -> None:
        with self._around("a rewrite"):
            super().rewrite_deleted()

    def drop_history(self, *, alone: bool) -> None:
        with self._around("the removal of old versions"):
            super().drop_history(alone=alone)


def lock_of(disk: Disk, process: Callable[[], str]) -> Callable[[Path], Any]:
    """Stands for WriterLock: the lock is freed with its process."""

    def locked(folder: Path) -> WriterLock:
        lock = WriterLock(folder)
        disk.locks.append((process(), lock))
        return lock

    return locked
