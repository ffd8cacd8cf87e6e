"""Blocks of a file's rows: plain rows as columns, all others by LineParser, in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from undertow.engine.base.model import BadInput
from undertow.engine.readers.messages import LineParser
from undertow.engine.readers.plain_rows import PlainRows, plain_turns
from undertow.engine.readers.record import OrderWatch, PackedRecord, TurnBlock
from undertow.engine.readers.vectors import GivenVectors
from undertow.engine.storage.row_codec import TURNS
from undertow.kernels.array_types import Int64s

OddRows = Callable[[Int64s], Iterable[PackedRecord]]
"""The records of rows that are not plain, by their places in the batch."""

# Below this many rows, LineParser is faster than the columns.
LEAST_ROWS = 48
_NO_ROWS = PlainRows(np.empty(0, np.int64), TURNS.empty_table())


@dataclass
class BlockBuilder:
    """Makes the blocks of one file, and issues its warnings once."""

    parser: LineParser
    _order: OrderWatch = field(default_factory=OrderWatch)

    def block(
        self, rows: pa.Table | None, lines: Int64s, odd: OddRows, vectors: GivenVectors | None = None
    ) -> TurnBlock:
        """The block of some rows, at least one; `lines` int64 [rows]: their numbers, ascending.

        `rows` has the columns of the `messages` format. None: no row is plain.
        """
        plain = _NO_ROWS
        if rows is not None and len(lines) >= LEAST_ROWS and self._knows(rows):
            plain = plain_turns(rows, lines, self.parser.file_name, self.parser.max_message_bytes)
        is_odd = np.ones(len(lines), bool)
        is_odd[plain.rows] = False
        records = list(odd(np.flatnonzero(is_odd)))
        if vectors is not None:
            plain, records = vectors.checked(plain, records, lines, self.parser.source)
        by_hand = TurnBlock.of(records)
        places = np.concatenate([lines[plain.rows], by_hand.positions])
        turns = pa.concat_tables([plain.turns, by_hand.turns])
        order = np.argsort(places, kind="stable")
        if records and len(plain.rows):
            turns = turns.take(pa.array(order))
        places = places[order]
        problems = self._with_order_warnings(by_hand.problems, turns, places)
        if vectors is not None:
            given = vectors.of_rows(np.searchsorted(lines, places))
            turns = turns.set_column(TURNS.get_field_index("vector"), TURNS.field("vector"), given)
        return TurnBlock(int(lines[-1]), turns, places, problems)

    def _knows(self, rows: pa.Table) -> bool:
        """Whether no warning about unknown fields is due; LineParser issues them."""
        kind = rows.schema.field("messages").type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        fields = kind.value_type if is_list and pa.types.is_struct(kind.value_type) else ()
        return self.parser.knows(rows.column_names, [field.name for field in fields])

    def _with_order_warnings(
        self, problems: Sequence[PackedRecord], turns: pa.Table, places: Int64s
    ) -> tuple[PackedRecord, ...]:
        by_position = {record.position: record for record in problems}
        for position, late in self._order.check_block(turns, places):
            record = by_position.get(position, PackedRecord(position))
            warnings = (*record.warnings, f"{self.parser.source}:{position}: {late}")
            by_position[position] = replace(record, warnings=warnings)
        return tuple(by_position[position] for position in sorted(by_position))


def block_of_error(position: int, problem: BadInput) -> TurnBlock:
    """The block of an error of a whole file, at the position reached."""
    return TurnBlock.of([PackedRecord(position, errors=(problem,))])


def blocks_of(records: Iterable[PackedRecord], most: int = 1_024) -> Iterator[TurnBlock]:
    """The blocks of a reader that has no columns: of so many turns or errors, but for the last record's."""
    batch: list[PackedRecord] = []
    count = 0
    for record in records:
        batch.append(record)
        count += len(record.turns) + len(record.errors)
        if count >= most:
            yield TurnBlock.of(batch)
            batch, count = [], 0
    if batch:
        yield TurnBlock.of(batch)
