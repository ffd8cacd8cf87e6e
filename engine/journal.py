"""The journal: one Lance dataset a shard, one atomic append a step. All other state derives from it.

Rows are never changed in place. A row's `kind` says what it is; `payload` is JSON whose fields
depend on the kind (see engine/records.py). Vectors are little-endian fp16 bytes: a fixed-size list
would spend a full vector on each of the many rows that have none (docs/decisions.md).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lance
import numpy as np
import pyarrow as pa
from lance.optimize import Compaction, CompactionOptions
from numpy.typing import NDArray

from undertow.engine.store import (
    StoreError,
    StoreInfo,
    WriterLock,
    fsync_path,
    next_epoch,
    read_info,
    write_info,
)

log = logging.getLogger(__name__)

Durability = Literal["commit", "fsync"]
Kind = Literal[
    "turn", "episode", "fact", "note", "decision", "job", "control", "usage", "source_offset", "tombstone"
]

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("tenant", pa.string()),
        ("tenant_key", pa.string()),
        ("seq", pa.int64()),
        ("lsn", pa.int64()),
        ("epoch", pa.int64()),
        ("id", pa.string()),
        ("timestamp", pa.string()),
        ("vector", pa.binary()),
        ("payload", pa.binary()),
    ]
)

# Fragments of this many rows are left alone by compaction, so each row is rewritten O(log) times.
ROWS_PER_FRAGMENT = 65_536
COMMITS_PER_COMPACTION = 256
KEYS_PER_FILTER = 512
# Versions younger than this may still be open in a reader.
READER_GRACE = timedelta(minutes=10)


class JournalError(StoreError):
    """An append or a read failed; nothing of the failed append is acknowledged."""


@dataclass(slots=True)
class Row:
    """One row. `vector` is fp16 [dim] or None; `payload` is JSON bytes; `lsn` is set on append."""

    kind: Kind
    tenant: str
    tenant_key: str
    seq: int
    payload: bytes
    id: str | None = None
    timestamp: str | None = None
    vector: NDArray[np.float16] | None = None
    lsn: int = -1
    epoch: int = 0


class Journal:
    """Append-only log of one shard. Open with `create` or `open`; one writer at a time."""

    def __init__(
        self, folder: Path, info: StoreInfo, lock: WriterLock | None, durability: Durability = "commit"
    ) -> None:
        self.folder = folder
        self.info = info
        self._lock = lock
        self._durability = durability
        self._commits = 0
        self._failure: str | None = None
        self._uri = folder / info.journal
        try:
            self._dataset = lance.dataset(str(self._uri))
        except (OSError, ValueError) as error:
            raise JournalError(
                f"{self._uri} cannot be opened ({error}). Restore it from a backup."
            ) from error
        self._next_lsn = self._last_lsn() + 1

    @classmethod
    def create(cls, folder: Path, dim: int, encoder: dict[str, Any]) -> None:
        """Make an empty store in `folder`, if there is none. Safe to repeat after a kill half-way."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_create(folder, error) from error
        lock = WriterLock(folder)
        try:
            if (folder / "store.json").exists():  # another process was quicker; its hash key must stay
                return
            info = StoreInfo.new(dim, encoder)
            _make_empty(folder / info.journal)
            write_info(folder, info)
        except OSError as error:
            raise _cannot_create(folder, error) from error
        finally:
            lock.close()

    @classmethod
    def open(cls, folder: Path, *, writable: bool, durability: Durability = "commit") -> Journal:
        """Open an existing store; a writer takes the lock and begins a new epoch."""
        if not writable:
            return cls(folder, read_info(folder), None, durability)
        read_info(folder)  # refuses what is no store before anything is written into it
        lock = WriterLock(folder)
        try:
            return cls(folder, next_epoch(folder), lock, durability)
        except BaseException:
            lock.close()
            raise

    @property
    def writable(self) -> bool:
        return self._lock is not None

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def append(self, rows: Sequence[Row]) -> None:
        """Write all rows as one atomic version. JournalError: none of them is acknowledged.

        After a failure every later append fails too: the state in memory is ahead of the log by then,
        and only opening the store again brings them together.
        """
        if self._failure is not None:
            raise JournalError(f"an earlier write failed: {self._failure}")
        if not rows:
            return
        if not self.writable:
            raise JournalError(f"{self.folder} was opened for reading only.")
        for lsn, row in enumerate(rows, self._next_lsn):
            row.lsn, row.epoch = lsn, self.info.epoch
        self._write(rows)

    def append_copies(self, rows: Sequence[Row]) -> None:
        """Append rows of another journal as they are, lsn and epoch kept; for `reindex`. JournalError."""
        self._write(rows)

    def _write(self, rows: Sequence[Row]) -> None:
        table = _to_table(rows)
        try:
            if self._durability == "fsync":
                self._append_synced(table)
            else:
                self._dataset.insert(table)
        except (OSError, ValueError, RuntimeError) as error:
            self._failure = (
                f"cannot write to {self._uri}: {error}. Nothing of this step was acknowledged; "
                "free space or fix the disk, then run again."
            )
            raise JournalError(self._failure) from error
        self._next_lsn = rows[-1].lsn + 1
        self._commits += 1
        if self._commits % COMMITS_PER_COMPACTION == 0:
            self._try_to_compact()

    def _try_to_compact(self) -> None:
        """The rows of the append are stored by now: that a disk is too full for more must not undo that."""
        try:
            self.compact()
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("cannot compact %s: %s. It goes on uncompacted; free some space.", self._uri, error)

    def _append_synced(self, table: pa.Table) -> None:
        """Like insert, but every file of the new version is on the disk before this returns."""
        fragments = lance.fragment.write_fragments(table, self._dataset, mode="append")
        for fragment in fragments:
            for file in fragment.files:
                fsync_path(self._uri / "data" / file.path)
        self._dataset = lance.LanceDataset.commit(
            str(self._uri), lance.LanceOperation.Append(fragments), read_version=self._dataset.version
        )
        _sync_manifest(self._uri, self._dataset)

    def read(
        self,
        *,
        tenant_keys: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        vectors: bool = True,
    ) -> Iterator[Row]:
        """Rows in append order; of the named tenants, kinds and ids where given.

        Streams: memory is bounded by one batch, plus one tenant filter's rows when keys are given.
        """
        columns = [name for name in SCHEMA.names if vectors or name != "vector"]
        other = [_any_of("kind", kinds), _any_of("id", ids)]
        key_groups: Iterable[Sequence[str] | None] = [None]
        if tenant_keys is not None:
            key_groups = [
                tenant_keys[i : i + KEYS_PER_FILTER] for i in range(0, len(tenant_keys), KEYS_PER_FILTER)
            ]
        for keys in key_groups:
            terms = [t for t in [_any_of("tenant_key", keys), *other] if t]
            scanner = self._dataset.scanner(
                columns=columns, filter=" AND ".join(terms) or None, scan_in_order=True, batch_size=4096
            )
            for batch in scanner.to_batches():
                yield from _to_rows(batch)

    def columns(self, names: Sequence[str], *, kinds: Sequence[str] | None = None) -> pa.Table:
        """Some columns of all rows (of `kinds`), in append order: cheap even for millions of rows."""
        return self._dataset.to_table(columns=list(names), filter=_any_of("kind", kinds), scan_in_order=True)

    def count(self, tenant_keys: Sequence[str]) -> int:
        """How many rows the tenants have."""
        return int(self._dataset.count_rows(filter=_any_of("tenant_key", tenant_keys)))

    def delete(self, tenant_keys: Sequence[str], *, before_lsn: int) -> None:
        """Delete the tenants' rows older than `before_lsn`; bytes stay until `purge`."""
        with self._writing():
            for i in range(0, len(tenant_keys), KEYS_PER_FILTER):
                keys = _any_of("tenant_key", tenant_keys[i : i + KEYS_PER_FILTER])
                self._dataset.delete(f"{keys} AND lsn < {before_lsn}")
            self._sync()

    def delete_rows(self, lsns: Sequence[int]) -> None:
        """Delete single rows; bytes stay until `purge`."""
        if lsns:
            with self._writing():
                self._dataset.delete(f"lsn IN ({', '.join(map(str, lsns))})")
                self._sync()

    def purge(self) -> None:
        """Rewrite what deletions touched and drop all old versions: no deleted byte stays behind."""
        with self._writing():
            self._merge_fragments({"materialize_deletions_threshold": 0.0})
            self._dataset.create_scalar_index("tenant_key", "BTREE", replace=True)
            self._sync()
            self._dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
            self.remove_others()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Deletions and purges: what fails can be repeated, since deleted rows stay deleted."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise JournalError(
                f"cannot rewrite {self._uri}: {error}. Free space or fix the disk, then run it again."
            ) from error

    def sibling(self, info: StoreInfo) -> Journal:
        """The journal `info.journal` in the same folder, made if need be, under this writer's lock."""
        _make_empty(self.folder / info.journal)
        return Journal(self.folder, info, self._lock, self._durability)

    def remove_others(self) -> None:
        """Remove every journal of this folder but this one: what a reindex replaced or did not finish."""
        for path in self.folder.glob("journal*.lance"):
            if path != self._uri:
                shutil.rmtree(path)

    def compact(self) -> None:
        """Merge small fragments, refresh the tenant index, drop versions no reader can still hold."""
        self._merge_fragments()
        self._dataset.optimize.optimize_indices()
        self._sync()
        self._dataset.cleanup_old_versions(older_than=READER_GRACE)

    def _merge_fragments(self, options: CompactionOptions | None = None) -> None:
        """Rewrite small fragments as large ones, in their order."""
        chosen: CompactionOptions = {"target_rows_per_fragment": ROWS_PER_FRAGMENT, **(options or {})}
        data = self._uri / "data"
        before = set(data.glob("*"))
        plan = Compaction.plan(self._dataset, chosen)
        rewritten = [task.execute(self._dataset) for task in plan.tasks]
        if self._durability == "fsync":
            for path in set(data.glob("*")) - before:
                fsync_path(path)
        if rewritten:
            Compaction.commit(self._dataset, rewritten, chosen)

    def _sync(self) -> None:
        if self._durability == "fsync":
            _sync_version(self._uri, self._dataset)

    @property
    def row_count(self) -> int:
        return int(self._dataset.count_rows())

    @property
    def next_lsn(self) -> int:
        return self._next_lsn

    def _last_lsn(self) -> int:
        """The highest lsn. Appends are ordered, so it stands in the last fragment that has rows."""
        for fragment in reversed(self._dataset.get_fragments()):
            lsns = fragment.to_table(columns=["lsn"])["lsn"].to_numpy()
            if len(lsns):
                return int(lsns.max())
        return -1


def _make_empty(uri: Path) -> None:
    """An empty dataset at `uri`, unless there is a whole one."""
    if not uri.exists() or not any((uri / "_versions").glob("*.manifest")):
        dataset = lance.write_dataset(SCHEMA.empty_table(), str(uri), mode="create")
        dataset.create_scalar_index("tenant_key", "BTREE")


def _sync_version(uri: Path, dataset: lance.LanceDataset) -> None:
    """What a version holds beside data files must be on the disk: index, deletions, manifest."""
    for folder in (uri / "_indices", uri / "_deletions"):
        for path in [*folder.rglob("*"), folder] if folder.exists() else []:
            fsync_path(path)
    _sync_manifest(uri, dataset)
    fsync_path(uri)


def _sync_manifest(uri: Path, dataset: lance.LanceDataset) -> None:
    manifest = f"{2**64 - 1 - dataset.version:020d}.manifest"
    for path in (uri / "_versions" / manifest, uri / "_versions"):
        fsync_path(path)
    if (uri / "data").exists():  # an empty store has none yet
        fsync_path(uri / "data")


def _cannot_create(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot create a store in {folder}: {error}. Check --store, its rights and the disk's space."
    )


def _any_of(column: str, values: Sequence[str] | None) -> str | None:
    """SQL filter for `column IN values`; None when there is nothing to filter by."""
    if values is None:
        return None
    quoted = ", ".join("'" + v.replace("'", "''") + "'" for v in values)
    return f"{column} IN ({quoted})" if quoted else "false"


def _to_table(rows: Sequence[Row]) -> pa.Table:
    return pa.table(
        [
            [r.kind for r in rows],
            [r.tenant for r in rows],
            [r.tenant_key for r in rows],
            pa.array([r.seq for r in rows], pa.int64()),
            pa.array([r.lsn for r in rows], pa.int64()),
            pa.array([r.epoch for r in rows], pa.int64()),
            pa.array([r.id for r in rows], pa.string()),
            pa.array([r.timestamp for r in rows], pa.string()),
            pa.array([None if r.vector is None else r.vector.tobytes() for r in rows], pa.binary()),
            pa.array([r.payload for r in rows], pa.binary()),
        ],
        schema=SCHEMA,
    )


def _to_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    vectors = columns.pop("vector", None)
    for i, values in enumerate(zip(*columns.values(), strict=True)):
        row = Row(**dict(zip(columns, values, strict=True)))
        if vectors is not None and vectors[i] is not None:
            row.vector = np.frombuffer(vectors[i], dtype="<f2")
        yield row
