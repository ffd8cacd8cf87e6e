"""The write-ahead log: commits of few rows, durable and readable before a flush moves them to Lance.

wal/EPOCH-LSN.log   a segment: entries of one writer in order, named by its epoch and the first lsn
wal/claim           which writer opened the store last

An entry is one commit: a header with its own checksum, a record batch without lsns and epochs, END. In a
folder a segment grows by entries; in a bucket each entry is an object. Who may append, and which segments
count, is a part of the rules in engine/storage/fencing.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa

from undertow.engine.storage.journal_rows import SCHEMA
from undertow.engine.storage.location import Appender, Location, fsync_path, remove_drafts

FOLDER = "wal"
CLAIM = "claim"
SUFFIX = ".log"
# Elsewhere (NFS, FUSE) one machine may not see at once what another has written, so no claim is safe there.
COHERENT_FILE_SYSTEMS = {
    *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs"),
    "zfs",
}

# A reader opens each segment, and in a bucket each entry is one.
ENTRIES_PER_FLUSH = 512
OBJECTS_PER_FLUSH = 32

MAGIC = b"UWL1"
# magic, checksum of the rest of the header; epoch, first lsn, rows, bytes of the body, checksum of the body
_HEADER = struct.Struct("<4sIQQIQI")
_CHECKED = struct.Struct("<QQIQI")
# The last bytes of an entry. A power failure may leave zeros where it was not written to its end.
END = b"\xff" * 8  # a multiple of what Arrow aligns to


class Entry(NamedTuple):
    """One commit. Its rows have the lsns from `first_lsn` on."""

    epoch: int
    first_lsn: int
    batch: pa.RecordBatch

    @property
    def end_lsn(self) -> int:
        return self.first_lsn + int(self.batch.num_rows)


@dataclass(frozen=True, slots=True)
class Damage:
    """Rows of the log, acknowledged ones among them, that cannot be read.

    `offset` None: the file is missing. `end_lsn` None: up to the end of the writer's log.
    """

    epoch: int
    file: str
    offset: int | None
    first_lsn: int
    end_lsn: int | None

    def __str__(self) -> str:
        what = "is missing" if self.offset is None else f"is damaged at byte {self.offset}"
        last = "the last one" if self.end_lsn is None else str(self.end_lsn - 1)
        return f"{self.file} {what}: rows {self.first_lsn} to {last} cannot be read"


@dataclass(slots=True)
class LogContent:
    """What a log held when it was read. `torn`: where appends that nobody was told of were cut off."""

    entries: list[Entry] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    def after(self, epoch: int, next_lsn: int) -> LogContent:
        """The part of one writer from an lsn on; rows that are missing between entries are damage."""
        entries = [e for e in self.entries if e.epoch == epoch and e.end_lsn > next_lsn]
        damages = [
            d for d in self.damages if d.epoch == epoch and (d.end_lsn is None or d.end_lsn > next_lsn)
        ]
        for one, two in pairwise(entries):
            known = any(d.end_lsn is None or d.end_lsn >= two.first_lsn > d.first_lsn for d in damages)
            if two.first_lsn > one.end_lsn and not known:
                name = f"{FOLDER}/{segment_name(epoch, one.end_lsn)}"
                damages.append(Damage(epoch, name, None, one.end_lsn, two.first_lsn))
        return LogContent(entries, damages, self.torn)


def packed(epoch: int, first_lsn: int, batch: pa.RecordBatch) -> bytes:
    """The bytes of an entry."""
    body = batch.serialize()
    checked = _CHECKED.pack(epoch, first_lsn, batch.num_rows, len(body), zlib.crc32(body))
    return b"".join((MAGIC, struct.pack("<I", zlib.crc32(checked)), checked, body, END))


class WriteAheadLog:
    """The log of one store. A writer calls `claim` first. Methods raise StoreError or OSError."""

    def __init__(self, store: Location, *, fsync: bool = False) -> None:
        self._store = store
        self._location = store / FOLDER
        self._fsync = fsync
        self._claim = b""
        self._epoch = 0
        # of this writer: the segments that hold entries, oldest first, and the open one
        self._segments: list[str] = []
        self._open: Appender | None = None
        # whether a power failure may bring segments back that were removed
        self._may_come_back = False

    @property
    def most_entries(self) -> int:
        """With so many entries a flush is due."""
        return OBJECTS_PER_FLUSH if self._location.folder is None else ENTRIES_PER_FLUSH

    @cached_property
    def takes_commits(self) -> bool:
        """Whether writers on several machines see each other's files at once, in the order of writing.

        Elsewhere a log may be read and moved to Lance: that of a store which was copied there.
        """
        if self._store.folder is None:
            return True
        mounts = {Path(m.mountpoint): m.fstype for m in psutil.disk_partitions(all=True)}
        folder = self._store.folder.resolve()
        return (
            next((mounts[p] for p in (folder, *folder.parents) if p in mounts), "") in COHERENT_FILE_SYSTEMS
        )

    @property
    def commits_quickly(self) -> bool:
        """Whether an append waits for no disk and no network."""
        return self._location.folder is not None and not self._fsync

    # ---- reading

    def read(self) -> LogContent:
        """Every entry of every writer. Segments that a flush removes meanwhile are passed over.

        Read the log before Lance: what a flush has moved by then is found in Lance.
        """
        content = LogContent()
        names = self._names()
        for name, following in zip_longest(names, names[1:]):
            if (data := self._location.read(name)) is not None:
                epoch, first_lsn = _parts(name)
                next_epoch, next_lsn = _parts(following) if following else (0, 0)
                end_lsn = next_lsn if next_epoch == epoch else None
                _Segment(str(self._location / name), epoch, data, end_lsn, content).read(first_lsn)
        return content

    def _names(self) -> list[str]:
        return [name for name in self._location.children() if name.endswith(SUFFIX)]

    # ---- writing

    def claim(self, epoch: int, writer: str) -> None:
        """Tell all former writers that this one has claimed the store; they may append, but not acknowledge.

        The claim must be committed in Lance before.
        """
        self._epoch, self._claim = epoch, f"{epoch} {writer}".encode()
        if self.takes_commits:
            self.renew_claim()

    def renew_claim(self) -> None:
        self._location.write(CLAIM, self._claim)

    @property
    def is_claimed_by_another(self) -> bool:
        """Whether another writer has opened the store, or has tried to, where a log takes commits."""
        return self.takes_commits and self._location.read(CLAIM) != self._claim

    def append(self, first_lsn: int, batch: pa.RecordBatch) -> int:
        """Write one entry. Returns its size in bytes.

        It counts once the caller has found that the store is not claimed by another.
        """
        data = packed(self._epoch, first_lsn, batch)
        name = segment_name(self._epoch, first_lsn)
        if self._location.folder is None:
            self._location.write(name, data)
            self._segments.append(name)
            return len(data)
        if self._open is None:
            self._open = self._location.begin(name, fsync=self._fsync)
            self._segments.append(name)
        self._open.append(data)
        return len(data)

    def end_segments(self) -> Sequence[str]:
        """Have the next entry begin a segment. Returns the segments of this writer up to here."""
        self.close()
        ended, self._segments = self._segments, []
        return ended

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    # ---- removing

    def remove(self, segments: Sequence[str]) -> None:
        self._location.remove_files(segments)
        self._may_come_back |= bool(segments)

    def sync_removals(self) -> None:
        """Have removed segments stay away, before their rows are deleted from Lance, too.

        A segment that came back after that would count as beyond the table, and its rows as stored.
        """
        if self._may_come_back and self._location.folder is not None:
            fsync_path(self._location.folder)
        self._may_come_back = False

    def remove_former(self) -> None:
        """Remove every segment of former writers, for good, and what a kill has left of their claims."""
        self.remove([name for name in self._names() if _parts(name)[0] < self._epoch])
        if self._location.folder is not None and self._location.exists():
            remove_drafts(self._location.folder / CLAIM)
            self._may_come_back = True
            self.sync_removals()


def segment_name(epoch: int, first_lsn: int) -> str:
    return f"{epoch:012d}-{first_lsn:020d}{SUFFIX}"


def _parts(name: str) -> tuple[int, int]:
    """Epoch and first lsn of a segment."""
    epoch, _, lsn = name.removesuffix(SUFFIX).partition("-")
    return int(epoch), int(lsn)


class _Header(NamedTuple):
    epoch: int
    first_lsn: int
    rows: int
    size_bytes: int
    checksum: int


class _Segment:
    """Reads the entries of one segment into `content`."""

    def __init__(self, file: str, epoch: int, data: bytes, end_lsn: int | None, content: LogContent) -> None:
        """`end_lsn`: where the writer's next segment begins; None for its last one."""
        self._file = file
        self._epoch = epoch
        self._data = data
        self._end_lsn = end_lsn
        self._content = content

    def read(self, lsn: int) -> None:
        """`lsn`: the first one of the segment."""
        offset = 0
        while offset < len(self._data):
            header = self._header(offset)
            if header is None:
                offset, lsn = self._pass_over(offset, lsn)
                continue
            start = offset + _HEADER.size
            end = start + header.size_bytes
            left = len(self._data) - end - len(END)
            if left < 0 or (left == 0 and self._ends_in_zeros):
                self._note_cut(offset, header.first_lsn)
                return
            lsn = header.first_lsn + header.rows
            body = memoryview(self._data)[start:end]
            if zlib.crc32(body) == header.checksum and self._data[end : end + len(END)] == END:
                batch = pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
                self._content.entries.append(Entry(header.epoch, header.first_lsn, batch))
            else:
                self._note_damage(offset, header.first_lsn, lsn)
            offset = end + len(END)

    @property
    def _ends_in_zeros(self) -> bool:
        return not any(self._data[-len(END) :])

    def _header(self, offset: int) -> _Header | None:
        """A whole and sound header of the segment's writer; None for anything else."""
        raw = self._data[offset : offset + _HEADER.size]
        if len(raw) < _HEADER.size or raw[: len(MAGIC)] != MAGIC:
            return None
        _, checksum, *fields = _HEADER.unpack(raw)
        header = _Header(*fields)
        sound = zlib.crc32(raw[-_CHECKED.size :]) == checksum and header.epoch == self._epoch
        return header if sound else None

    def _pass_over(self, offset: int, lsn: int) -> tuple[int, int]:
        """Pass over bytes that are no header: where the next one stands, and its first lsn."""
        found = offset
        while (found := self._data.find(MAGIC, found + 1)) >= 0:
            if (header := self._header(found)) is not None:
                self._note_damage(offset, lsn, header.first_lsn)
                return found, header.first_lsn
        if len(self._data) - offset < _HEADER.size or self._ends_in_zeros:
            self._note_cut(offset, lsn)
        else:
            self._note_damage(offset, lsn, self._end_lsn)
        return len(self._data), lsn

    def _note_cut(self, offset: int, lsn: int) -> None:
        """The segment ends within an entry: an append that was cut off, if it is the writer's last one."""
        if self._end_lsn is None:
            self._content.torn.append(f"{self._file} at byte {offset}")
        else:
            self._note_damage(offset, lsn, self._end_lsn)

    def _note_damage(self, offset: int, first_lsn: int, end_lsn: int | None) -> None:
        self._content.damages.append(Damage(self._epoch, self._file, offset, first_lsn, end_lsn))
