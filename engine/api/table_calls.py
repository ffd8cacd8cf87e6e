"""The engine's call that stores an Arrow table of turns."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.api.search_calls import WAIT_FOR_REPLY_S, SearchCalls
from undertow.engine.base.results import TableReport
from undertow.engine.readers import StoreEncoder, turns_of_rows
from undertow.engine.step.admission import Block
from undertow.engine.step.batch_size import MOST_BULK_TURNS
from undertow.engine.tenants.turn_columns import TurnColumns


class TableCalls(SearchCalls):
    """A part of Engine."""

    @property
    def store_encoder(self) -> StoreEncoder:
        """What vectors must be of that come with turns."""
        return StoreEncoder(self.journal.info.dim, self.journal.info.encoder["digest"])

    def add_table(self, table: pa.Table | pa.RecordBatchReader, *, source: str | None = None) -> TableReport:
        """Store the turns of a table; durable and searchable on return. Decisions follow in later steps.

        The columns are the fields of the `messages` format, as in a Parquet file; `tenant` and `messages` are
        required, and others ignored. `vectors`, a list of float16 or float32 [dim] a row, is used in place of
        the encoder: the schema's metadata must name the encoder (engine/readers/vectors.py). Rows without
        idempotency key are new in each call, unless `source` names where the rows are from: then a row that
        was stored from the same place of it is a duplicate.

        InputError names the row, from 1 on, the field and the cure: no turn of its record batch and of later
        ones is stored. ArenaFull: see `step`; the turns of earlier steps may have been stored.
        """
        return self.add_turns(
            turns_of_rows(table, source, self.settings.max_message_bytes, self.store_encoder)
        )

    def add_turns(self, tables: Iterable[pa.Table]) -> TableReport:
        """As `add_table`, of tables of TURNS (engine/storage/row_codec.py), as the readers make them."""
        count = new = 0
        try:
            for turns in tables:
                self.tenants.require_here(pc.unique(turns.column("tenant")).to_pylist())
                new += self._queue(TurnColumns.of_table(turns))
                count += turns.num_rows
        finally:  # the tables before a refused one are stored
            while not self.scheduler.inbox.is_empty and self._failure is None:
                new += self._store_batch()
        return TableReport(count, new)

    def _queue(self, turns: TurnColumns) -> int:
        """Queue turns, and store most of those before them. Returns how many of these were new."""
        inbox, new, most = self.scheduler.inbox, 0, min(self.settings.queue_turns, MOST_BULK_TURNS)
        for start in range(0, turns.size, most):
            part = turns.part(start, min(start + most, turns.size))
            while not inbox.has_room_for_block(part.size):
                new += self._store_batch()
            inbox.put_block(Block(part))
        return new

    def _store_batch(self) -> int:
        return self.step(WAIT_FOR_REPLY_S, storing=True).admitted
