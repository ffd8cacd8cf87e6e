"""One Lance dataset as a log: atomic appends, made durable where asked, compacted, and cleaned up.

What the rows mean is engine/storage/journal.py's business. Errors of Lance pass through as they are
(OSError, ValueError, RuntimeError); the journal puts them into words.
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

# Fragments of this many rows are left alone by compaction, so each row is rewritten O(log) times. As many
# rows may be outside the index: a scan of their keys takes no longer than a look into it.
ROWS_PER_FRAGMENT = 32_768
# Lance reserves ids for the new fragments, then puts them in the place of the old ones.
VERSIONS_PER_MERGE = 2
# Versions younger than this may still be open in a reader, files younger than this in an append.
READER_GRACE = timedelta(minutes=10)
# What Lance keeps in memory of a dataset's files. By itself it goes up to 1 GiB and 6 GiB, about 80 KB a
# commit, most of it of versions and fragments that are not read again.
METADATA_CACHE_BYTES = 32 << 20
INDEX_CACHE_BYTES = 256 << 20
INDEXED = "tenant_key"
# how Lance says that the disk, the store or another writer refused
LANCE_ERRORS = (OSError, ValueError, RuntimeError)


class LanceLog:
    """An open dataset. `version` is that of this handle: what others commit is seen after `reload`."""

    def __init__(self, location: Location, *, fsync: bool = False) -> None:
        """Open the dataset at `location`. `fsync` is ignored on an object store, whose puts are durable."""
        self._location = location
        self._folder = location.folder
        self._fsync = fsync and self._folder is not None
        self._session = lance.Session(  # type: ignore[attr-defined]
            metadata_cache_size_bytes=METADATA_CACHE_BYTES, index_cache_size_bytes=INDEX_CACHE_BYTES
        )
        self._dataset = lance.dataset(location.uri, session=self._session)

    def __str__(self) -> str:
        return str(self._location)

    @classmethod
    def make(cls, location: Location, schema: pa.Schema) -> None:
        """An empty dataset at `location`, unless there is a whole one. OSError."""
        if _is_whole(location):
            return
        if location.folder is not None:
            make_folder(location.folder.parent)  # ours: Lance's would not be durable in the folders above
        empty = lance.LanceOperation.Overwrite(schema, [])
        try:
            # without retries, only the first version will do: a late creator must never replace what is there
            dataset = lance.LanceDataset.commit(location.uri, empty, read_version=0, max_retries=0)
        except OSError:
            if _is_whole(location):
                return  # another process was quicker
            raise
        dataset.create_scalar_index(INDEXED, "BTREE")

    @property
    def version(self) -> int:
        return int(self._dataset.version)

    def reload(self) -> None:
        """Go to the newest version."""
        self._dataset.checkout_latest()  # type: ignore[no-untyped-call]

    # ---- reading

    def scanner(self, columns: Sequence[str], filter: str | None = None, **options: Any) -> Any:
        """A Lance scanner over rows in the order of the fragments."""
        return self._dataset.scanner(columns=list(columns), filter=filter, scan_in_order=True, **options)

    def count(self, filter: str | None = None) -> int:
        return int(self._dataset.count_rows(filter=filter))

    # ---- writing

    def append(self, table: pa.Table) -> None:
        """Add all rows as one version."""
        if self._fsync:
            self.append_stream(table.to_reader())
        else:
            self._dataset.insert(table)

    def append_stream(self, batches: pa.RecordBatchReader) -> None:
        """Add all rows of a stream as one version, with no more than a few batches in memory."""
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
            _sync_manifest(Path(self._location.uri), self._dataset)

    def sync(self) -> None:
        """Have the version we are at on the disk, with all that it rests on, `fsync` or not. OSError."""
        if self._folder is None:
            return
        self._sync_files(fragment.metadata for fragment in self._dataset.get_fragments())
        _sync_version(self._folder, self._dataset)

    def delete(self, filter: str) -> None:
        """Delete rows; their bytes stay until they are compacted away and old versions dropped."""
        self._dataset.delete(filter)
        self._sync()

    # ---- tidying

    def tidy(self) -> int:
        """Merge the newest fragments; returns how many versions that has made, 0 for none or many.

        In the thread that writes, as Lance puts merged rows behind whatever was appended meanwhile. So it is
        to be quick: the index, which covers no fragment that is merged here, is refreshed only when what it
        lacks has come to a whole fragment.
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
            _sync_manifest(Path(self._location.uri), self._dataset)
        # where no row is left there is no fragment to reserve an id for
        return VERSIONS_PER_MERGE if [bool(m.new_fragments) for m in merged] == [True] else 0

    def compact(self) -> None:
        """Merge all small fragments and refresh the index."""
        self._merge_fragments()
        if self._dataset.describe_indices():
            self._dataset.optimize.optimize_indices()
        else:  # who made the store was killed before the index
            self._dataset.create_scalar_index(INDEXED, "BTREE")
        self._sync()

    def drop_old_versions(self) -> None:
        """Remove versions that no reader can still hold, through a handle of its own: from any thread.

        Commits may go on meanwhile: what they write stands in no version that this looks at.
        """
        lance.dataset(self._location.uri, session=self._session).cleanup_old_versions(older_than=READER_GRACE)

    def rewrite_deleted(self) -> None:
        """Rewrite what deletions touched, and the index, so that the newest version has none of it."""
        self._merge_fragments({"materialize_deletions_threshold": 0.0})
        self._dataset.create_scalar_index(INDEXED, "BTREE", replace=True)
        self._sync()

    def drop_history(self, *, alone: bool) -> None:
        """Remove every version but the newest, and what appends that never ended left behind.

        Unless `alone`, such an append may be under way in another process, so that files of the last
        `READER_GRACE` are left to a later call.
        """
        self._dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=alone)
        if not alone:
            self._remove_leftovers(datetime.now(UTC) - READER_GRACE)

    def _remove_leftovers(self, before: datetime) -> None:
        self.reload()
        files = [file for fragment in self._dataset.get_fragments() for file in fragment.metadata.files]
        used = {f"data/{file.path}" for file in files}
        for name in self._location.list("data", before=before):
            if name not in used:
                self._location.remove(name)

    def _merge_fragments(self, options: CompactionOptions | None = None) -> list[RewriteResult]:
        """Rewrite small fragments as large ones, in their order."""
        chosen: CompactionOptions = {"target_rows_per_fragment": ROWS_PER_FRAGMENT, **(options or {})}
        plan = Compaction.plan(self._dataset, chosen)
        rewritten = [task.execute(self._dataset) for task in plan.tasks]
        if self._fsync:
            self._sync_files(fragment for result in rewritten for fragment in result.new_fragments)
        if rewritten:
            Compaction.commit(self._dataset, rewritten, chosen)
        return rewritten

    def _sync_files(self, fragments: Iterable[lance.FragmentMetadata]) -> None:
        for fragment in fragments:
            for file in fragment.files:
                fsync_path(self._data / file.path)
        if self._data.exists():  # an empty store has none yet
            fsync_path(self._data)

    @property
    def _data(self) -> Path:
        return Path(self._location.uri) / "data"

    def _sync(self) -> None:
        if self._fsync:
            _sync_version(Path(self._location.uri), self._dataset)


def _worth_merging(rows: dict[int, int]) -> set[int]:
    """Of fragments and their rows, oldest first, the last ones: up to one larger than all behind it.

    What is merged has then doubled at least, so that a row is rewritten O(log) times.
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
    """What a version holds beside data files must be on the disk: index, deletions, manifest."""
    for folder in (uri / "_indices", uri / "_deletions"):
        for parent, _, names in os.walk(folder):
            for path in (*(Path(parent, name) for name in names), Path(parent)):
                with suppress(FileNotFoundError):  # of a version that is being dropped
                    fsync_path(path)
    _sync_manifest(uri, dataset)
    fsync_path(uri)


def _sync_manifest(uri: Path, dataset: lance.LanceDataset) -> None:
    manifest = f"{2**64 - 1 - dataset.version:020d}.manifest"
    for path in (uri / "_versions" / manifest, uri / "_versions"):
        fsync_path(path)
