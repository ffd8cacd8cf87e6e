"""The engine's call that stores an Arrow table of turns."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.api.search_calls import WAIT_FOR_REPLY_S, SearchCalls
from undertow.engine.base.results import TableReport
from undertow.engine.readers import StoreEncoder, turns_of_rows
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
        stored = new = 0
        for turns in turns_of_rows(table, source, self.settings.max_message_bytes, self.store_encoder):
            self.tenants.require_here(pc.unique(turns.column("tenant")).to_pylist())
            new += self._store(TurnColumns.of_table(turns))
            stored += turns.num_rows
        return TableReport(stored, new)

    def _store(self, turns: TurnColumns) -> int:
        """Store turns. Returns how many were new."""
        inbox, new, start = self.scheduler.inbox, 0, 0
        while start < turns.size or len(inbox):
            if not len(inbox):
                stop = min(turns.size, start + min(inbox.room, self.settings.batch_turns or MOST_BULK_TURNS))
                inbox.put_block(turns.part(start, stop))
                start = stop
            new += self.step(WAIT_FOR_REPLY_S, storing=True).admitted
        return new
