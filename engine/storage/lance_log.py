"""One Lance dataset as a log: atomic and optionally durable appends, compaction, and cleanup.

engine/storage/journal.py defines the rows. Errors of Lance pass through (OSError, ValueError, RuntimeError);
the journal adds messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.optimize import Compaction, CompactionOptions, RewriteResult

from undertow.engine.storage.location import Location, fsync_path, make_folder

# Compaction leaves fragments of this many rows alone, so each row is rewritten O(log) times. As many rows may
# be outside the index: scanning their keys takes no longer than an index lookup.
ROWS_PER_FRAGMENT = 32_768
# Lance first reserves ids for the new fragments, then replaces the old ones.
VERSIONS_PER_MERGE = 2
# Versions younger than this may be open in a reader, and files younger than this in an append.
READER_GRACE = timedelta(minutes=10)
# Lance's caches of a dataset's files. Its defaults are 1 GiB and 6 GiB, and a commit adds about 80 KB, mostly
# of versions and fragments that are not read again.
METADATA_CACHE_BYTES = 32 << 20
INDEX_CACHE_BYTES = 256 << 20
INDEXED = "tenant_key"
# Raised by Lance if the disk, the store or another writer refuses.
LANCE_ERRORS = (OSError, ValueError, RuntimeError)


def _opened(uri: str, session: Any) -> lance.LanceDataset:
    try:
        return lance.dataset(uri, session=session)
    except BaseException as error:  # a panic of Lance, as over a damaged manifest, is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise OSError(f"Lance cannot read it: {error}") from error


class LanceLog:
    """An open dataset. `version` is that of this handle; `reload` shows the commits of others."""

    def __init__(
        self, location: Location, *, fsync: bool = False, dataset: lance.LanceDataset | None = None
    ) -> None:
        """Open the dataset at `location`, unless it is given.

        `fsync` has no effect on an object store: puts are durable.
        """
        self._location = location
        self._folder = location.folder
        self._path = Path(location.uri)
        self._fsync = fsync and self._folder is not None
        self._session = lance.Session(  # type: ignore[attr-defined]
            metadata_cache_size_bytes=METADATA_CACHE_BYTES, index_cache_size_bytes=INDEX_CACHE_BYTES
        )
        self._dataset = dataset or _opened(location.uri, self._session)

    def __str__(self) -> str:
        return str(self._location)

    @classmethod
    def in_memory(cls, table: pa.Table) -> LanceLog:
        """A dataset in this process alone, to be read."""
        uri = "memory://tail"
        return cls(Location(uri), dataset=lance.write_dataset(table.combine_chunks(), uri))

    @classmethod
    def make(cls, location: Location, schema: pa.Schema) -> None:
        """Create an empty dataset at `location`, unless there is a complete one. OSError."""
        if _is_whole(location):
            return
        if location.folder is not None:
            make_folder(location.folder)  # by Lance it would be neither durable nor private
        empty = lance.LanceOperation.Overwrite(schema, [])
        try:
            # Without retries only the first version can succeed: a late creator must not replace a dataset.
            dataset = lance.LanceDataset.commit(location.uri, empty, read_version=0, max_retries=0)
        except OSError:
            if _is_whole(location):
                return  # another process was faster
            raise
        dataset.create_scalar_index(INDEXED, "BTREE")
        cls(location, dataset=dataset).sync()  # the store's description, which follows, is durable

    @property
    def version(self) -> int:
        return int(self._dataset.version)

    def reload(self) -> None:
        """Switch to the newest version."""
        self._dataset.checkout_latest()  # type: ignore[no-untyped-call]

    # ---- reading

    def scanner(self, columns: Sequence[str], filter: str | None = None, **options: Any) -> Any:
        """A Lance scanner over rows in the order of the fragments."""
        return self._dataset.scanner(columns=list(columns), filter=filter, scan_in_order=True, **options)

    def count(self, filter: str | None = None) -> int:
        return int(self._dataset.count_rows(filter=filter))

    # ---- writing

    def append(self, table: pa.Table) -> None:
        """Append all rows as one version."""
        table = table.combine_chunks()  # Lance takes as long for each batch as for a thousand rows
        if self._fsync:
            self.append_stream(table.to_reader())
        else:
            self._dataset.insert(table)

    def append_stream(self, batches: pa.RecordBatchReader) -> None:
        """Append all rows of a stream as one version, with a few batches in memory."""
        fragments = lance.fragment.write_fragments(
            batches, self._dataset, mode="append", max_rows_per_file=ROWS_PER_FRAGMENT
        )
        if not fragments:
            return
        if self._fsync:
            self._sync_files(fragments)
        self._dataset = lance.LanceDataset.commit(
            self._dataset, lance.LanceOperation.Append(fragments), read_version=self._dataset.version
        )
        if self._fsync:
            _sync_manifest(self._path, self._dataset)

    def sync(self) -> None:
        """Flush the current version and all its files to the disk, whether or not `fsync` is set. OSError."""
        if self._folder is None:
            return
        self._sync_files(fragment.metadata for fragment in self._dataset.get_fragments())
        _sync_version(self._folder, self._dataset)

    def delete(self, filter: str) -> None:
        """Delete rows. Their bytes stay until compaction and the removal of old versions."""
        self._dataset.delete(filter)
        self._sync()

    # ---- tidying

    def tidy(self) -> int:
        """Merge the newest fragments. Returns the number of versions that this made; 0 for none or many.

        It runs on the writer's thread, since Lance puts merged rows after concurrent appends. So it must be
        quick: the index, which covers no fragment merged here, is refreshed only when the rows outside it
        fill a whole fragment.
        """
        segments = chain.from_iterable(index.segments for index in self._dataset.describe_indices())
        indexed = {i for segment in segments for i in segment.fragment_ids}
        rows = {f.fragment_id: f.metadata.physical_rows for f in self._dataset.get_fragments()}
        newer = {i: count for i, count in rows.items() if i not in indexed}
        if sum(newer.values()) >= ROWS_PER_FRAGMENT:
            self.compact()
            return 0
        others = rows.keys() - _worth_merging(newer)
        merged = self._merge_fragments({"excluded_fragment_ids": sorted(others)})
        if self._fsync:
            _sync_manifest(self._path, self._dataset)
        # Without any remaining row there is no fragment to reserve an id for.
        return VERSIONS_PER_MERGE if [bool(m.new_fragments) for m in merged] == [True] else 0

    def compact(self) -> None:
        """Merge all small fragments and refresh the index."""
        self._merge_fragments()
        if self._dataset.describe_indices():
            self._dataset.optimize.optimize_indices()
        else:  # the process that created the store was killed before it made the index
            self._dataset.create_scalar_index(INDEXED, "BTREE")
        self._sync()

    def drop_old_versions(self) -> None:
        """Remove versions that no reader can still hold. Callable from any thread; uses its own handle.

        Commits may go on: this does not touch the versions that they write.
        """
        lance.dataset(self._location.uri, session=self._session).cleanup_old_versions(older_than=READER_GRACE)

    def rewrite_deleted(self) -> None:
        """Rewrite fragments with deletions, and the index, so that the newest version has no deleted rows."""
        self._merge_fragments({"materialize_deletions_threshold": 0.0})
        self._dataset.create_scalar_index(INDEXED, "BTREE", replace=True)
        self._sync()

    def drop_history(self, *, alone: bool) -> None:
        """Remove every version but the newest, and files of interrupted appends.

        Unless `alone`, another process may have an append in flight, so files of the last `READER_GRACE` are
        left to a later call.
        """
        self._dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=alone)
        if not alone:
            self._remove_leftovers(datetime.now(UTC) - READER_GRACE)
        if self._folder is not None:  # else a power failure might bring a file back
            for folder, _, _ in os.walk(self._folder):
                fsync_path(Path(folder))

    def _remove_leftovers(self, before: datetime) -> None:
        self.reload()
        files = [file for fragment in self._dataset.get_fragments() for file in fragment.metadata.files]
        used = {f"data/{file.path}" for file in files}
        for name in self._location.list("data", before=before):
            if name not in used:
                self._location.remove(name)

    def _merge_fragments(self, options: CompactionOptions | None = None) -> list[RewriteResult]:
        """Merge small fragments into large ones, in order."""
        chosen: CompactionOptions = {"target_rows_per_fragment": ROWS_PER_FRAGMENT, **(options or {})}
        plan = Compaction.plan(self._dataset, chosen)
        rewritten = [task.execute(self._dataset) for task in plan.tasks]
        if self._fsync:
            self._sync_files(fragment for result in rewritten for fragment in result.new_fragments)
        if rewritten:
            Compaction.commit(self._dataset, rewritten, chosen)
        return rewritten

    def _sync_files(self, fragments: Iterable[lance.FragmentMetadata]) -> None:
        data = self._path / "data"
        for fragment in fragments:
            for file in fragment.files:
                fsync_path(data / file.path)
        if data.exists():  # an empty store has none yet
            fsync_path(data)

    def _sync(self) -> None:
        if self._fsync:
            _sync_version(self._path, self._dataset)


def _worth_merging(rows: dict[int, int]) -> set[int]:
    """The newest fragments, back to the first one with more rows than all newer ones together.

    `rows`: row counts by fragment, oldest first. Merging then at least doubles a fragment, so that a row is
    rewritten O(log) times.
    """
    chosen: set[int] = set()
    behind = 0
    for fragment, count in reversed(rows.items()):
        if chosen and count > behind:
            break
        chosen.add(fragment)
        behind += count
    return chosen


def _is_whole(location: Location) -> bool:
    return any(name.endswith(".manifest") for name in location.children("_versions"))


def _sync_version(uri: Path, dataset: lance.LanceDataset) -> None:
    """Flush a version's files besides data: index, deletions, manifest."""
    for folder in (uri / "_indices", uri / "_deletions"):
        for parent, _, names in os.walk(folder):
            for path in (*(Path(parent, name) for name in names), Path(parent)):
                with suppress(FileNotFoundError):  # of a version that is being removed
                    fsync_path(path)
    _sync_manifest(uri, dataset)
    fsync_path(uri)


def _sync_manifest(uri: Path, dataset: lance.LanceDataset) -> None:
    manifest = f"{2**64 - 1 - dataset.version:020d}.manifest"
    for path in (uri / "_versions" / manifest, uri / "_versions"):
        fsync_path(path)
