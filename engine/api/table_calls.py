"""The engine's call that stores an Arrow table of turns."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.api.search_calls import WAIT_FOR_REPLY_S, SearchCalls
from undertow.engine.base.model import InputError
from undertow.engine.base.results import TableReport
from undertow.engine.readers import StoreEncoder, TableBlocks, TurnBlock
from undertow.engine.step.batch_size import MOST_BULK_TURNS
from undertow.engine.tenants.turn_columns import TurnColumns


class TableCalls(SearchCalls):
    """A part of Engine."""

    @property
    def store_encoder(self) -> StoreEncoder:
        """What vectors must be of that come with turns."""
        return StoreEncoder.of(self.journal.info)

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
        for block in self._blocks_of(table, source):
            for record in block.problems:
                if record.errors:
                    raise InputError(record.errors[0])
            self.tenants.require_here(pc.unique(block.turns.column("tenant")).to_pylist())
            new += self._store(TurnColumns.of_table(block.turns))
            stored += block.turns.num_rows
        return TableReport(stored, new)

    def _blocks_of(self, table: pa.Table | pa.RecordBatchReader, source: str | None) -> Iterator[TurnBlock]:
        place = "add_table"
        encoder = self.store_encoder
        if missing := [name for name in ("tenant", "messages") if name not in table.schema.names]:
            cure = "Name the columns as the fields of the `messages` format."
            raise InputError.of(place, missing[0], "is no column of the table", cure)
        if refusal := encoder.refusal(table.schema, place):
            raise InputError(refusal)
        name = secrets.token_hex(12) if source is None else source
        blocks = TableBlocks(place, name, self.settings.max_message_bytes, encoder)
        batches = table.to_batches(MOST_BULK_TURNS) if isinstance(table, pa.Table) else table
        first = 1
        for batch in batches:
            if batch.num_rows:
                yield blocks.block(pa.Table.from_batches([batch]), first)
                first += batch.num_rows

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
