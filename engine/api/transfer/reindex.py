"""Embedding a store again with another encoder. What was decided stays as it was decided.

The rows are copied, with new vectors, into a second journal beside the first. `store.json` names the
journal in force and its encoder, so replacing that one file puts the new one in place: killed at any
moment before, the store is as it was, and the same call goes on with the copy where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import as_embedded, spoken
from undertow.engine.encoders.base import Encoder, Fingerprint
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.location import Location
from undertow.engine.storage.row_codec import messages_of
from undertow.engine.storage.store_info import StoreError, StoreInfo, write_info

Encode = Callable[[Sequence[str]], NDArray[np.float16]]

# embedded at a time, and committed at a time: each commit is a version of the dataset, with files of its own
ROWS_PER_STEP = 512
ROWS_PER_COMMIT, BYTES_PER_COMMIT, SECONDS_PER_COMMIT = 32_768, 128 << 20, 60.0
PROGRESS_FILE = "reindex.json"


def reindex(
    store: Location | Path | str,
    encoder: Encoder,
    *,
    embed_timestamp: bool = False,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Give every turn, episode and fact (all versions) a vector of `encoder`; returns how many.

    0 when the store's vectors are of this encoder already. `on_rows(done, total)` is told of progress.
    Takes the writer's lock; readers that have the store open must open it again afterwards. StoreError.
    On an object store, which has no lock, let nobody open the store as a writer meanwhile.
    """
    # the old vectors are deleted afterwards, so the new ones must be on the disk by then
    with closing(Journal.open(store, writable=True, durability="fsync")) as journal:
        plain = encoder.fingerprint
        fingerprint = plain.with_timestamps() if embed_timestamp else plain
        if Fingerprint.stored(journal.info.encoder).mismatch(fingerprint) is None:
            return 0
        copy = _begin_or_resume(journal, fingerprint)
        embedded = _copy(journal, copy, encoder, embed_timestamp, on_rows)
        if copy.row_count != journal.row_count:
            journal.location.remove(PROGRESS_FILE)
            raise StoreError(
                f"the copy has {copy.row_count} rows and the store {journal.row_count}; nothing was "
                "replaced. Run reindex again: it begins afresh."
            )
        copy.compact()
        journal.check_in_force()
        write_info(journal.location, copy.info)
        copy.remove_others()
        journal.location.remove(PROGRESS_FILE)
        return embedded


def _begin_or_resume(journal: Journal, fingerprint: Fingerprint) -> Journal:
    """The copy to go on with. A half-made one counts only if no one has written the store since."""
    location = journal.location
    wanted: dict[str, Any] = {"encoder": asdict(fingerprint)}
    name = f"journal-{journal.epoch}.lance"
    if (progress := location.read(PROGRESS_FILE)) is not None:
        state = orjson.loads(progress)
        if state["encoder"] == wanted["encoder"] and state["epoch"] == journal.former_epoch:
            name = state["journal"]
    if not location.exists(name):
        journal.remove_others()
    location.write(PROGRESS_FILE, orjson.dumps({**wanted, "journal": name, "epoch": journal.epoch}))
    info: StoreInfo = replace(journal.info, dim=fingerprint.dim, encoder=wanted["encoder"], journal=name)
    return journal.sibling(info)


def _copy(
    journal: Journal,
    copy: Journal,
    encoder: Encoder,
    embed_timestamp: bool,
    on_rows: Callable[[int, int], None],
) -> int:
    """Copy what the copy does not have yet; how many vectors it then holds."""
    total, embedded, done = journal.row_count, 0, 0
    first = max(copy.columns(["lsn"])["lsn"].to_pylist(), default=-1) + 1
    waiting = _Waiting(copy)
    try:
        for rows in _batches(journal):
            embedded += sum(_embedded_text(row, embed_timestamp) is not None for row in rows)
            fresh = [row for row in rows if row.lsn >= first]
            embed_rows(fresh, encoder.encode, embed_timestamp)
            waiting.add(fresh)
            done += len(rows)
            on_rows(done, total)
    finally:  # also where the encoder has failed: what it made need not be made again
        waiting.commit()
    return embedded


class _Waiting:
    """Rows that wait to be committed to the copy."""

    def __init__(self, copy: Journal) -> None:
        self._copy = copy
        self._rows: list[Row] = []
        self._bytes, self._since_s = 0, time.monotonic()

    def add(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        self._bytes += sum(len(row.payload) for row in rows)
        late = time.monotonic() - self._since_s >= SECONDS_PER_COMMIT
        if late or len(self._rows) >= ROWS_PER_COMMIT or self._bytes >= BYTES_PER_COMMIT:
            self.commit()

    def commit(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self._copy.append_copies(rows)
        self._since_s = time.monotonic()


def _batches(journal: Journal) -> Iterator[list[Row]]:
    rows = journal.read(vectors=False)
    while batch := list(islice(rows, ROWS_PER_STEP)):
        yield batch


def embed_rows(rows: Sequence[Row], encode: Encode, embed_timestamp: bool) -> None:
    """Set the vectors of the turns, episodes and facts among `rows`."""
    texts = [(row, text) for row in rows if (text := _embedded_text(row, embed_timestamp)) is not None]
    if not texts:
        return
    for (row, _), vector in zip(texts, encode([text for _, text in texts]), strict=True):
        row.vector = vector


def _embedded_text(row: Row, embed_timestamp: bool) -> str | None:
    """The text whose vector a row holds; None for rows that hold none."""
    if row.kind not in ("turn", "episode", "fact"):
        return None
    body = orjson.loads(row.payload)
    if row.kind != "turn":
        return None if body.get("deleted") else str(body.get("index_text") or body["text"])
    return as_embedded(spoken(messages_of(body)), row.timestamp, embed_timestamp)
