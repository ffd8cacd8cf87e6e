"""Turns and receipts, as they travel between a router and its shards: Arrow tables, or a few turns as a list.

The sender packs the JSON that the journal stores and the text to embed. So a shard neither decodes nor
encodes it again (measured: docs/decisions/0028), and invalid Unicode or JSON is refused before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.base.model import PackedTurn, Turn
from undertow.engine.base.results import Receipt
from undertow.engine.storage.row_codec import TURNS as TURNS
from undertow.engine.storage.row_codec import pack_turn as pack_turn
from undertow.engine.storage.row_codec import turns_table as turns_table
from undertow.engine.storage.row_codec import unpack as unpack

RECEIPTS = pa.schema(
    [
        pa.field("status", pa.string(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("seq", pa.int64()),
        pa.field("detail", pa.string()),
    ]
)


class Status(StrEnum):
    """The outcome of a sent turn.

    `detail`: the reason of a parked turn; the new shard of a moved one. A turn in transit was not stored and
    must be sent again shortly.
    """

    STORED = "stored"
    DUPLICATE = "duplicate"
    PARKED = "parked"
    MOVED = "moved"
    IN_TRANSIT = "in_transit"


# what has become of a turn: as a row of RECEIPTS
Outcome = tuple[Status, str | None, int | None, str | None]

# Ray sends an argument with its call up to 100 KiB (max_direct_call_object_size)
PIECE_BYTES = 96_000
# and all of a call's arguments up to 10 MiB together (task_rpc_inlined_bytes_limit)
INLINE_BYTES = 8 << 20

# so many turns at most travel as a list: their table would cost more
FEW_ROWS = 16

# a shard did not take these: the router sends them again, to the owner
RETURNED = (Status.MOVED, Status.IN_TRANSIT)


def pack(turns: Iterable[Turn | PackedTurn]) -> pa.Table:
    """Turns as a table of schema TURNS, in their order. InputError names the field that cannot be sent."""
    return turns_table(pack_turn(turn) if isinstance(turn, Turn) else turn for turn in turns)


def check_turns(table: pa.Table, dim: int | None = None) -> None:
    """ValueError unless the table holds turns: sound columns of TURNS, tenants, no gaps.

    `dim`: how many values a given vector has; None: any number, but all the same.
    """
    if not table.schema.equals(TURNS):
        raise ValueError(
            f"a table of turns has the columns {TURNS.names}, not {table.schema.names}: use pack()."
        )
    table.validate(full=True)  # ArrowInvalid is a ValueError
    holed = [f.name for f in TURNS if not f.nullable and table.column(f.name).null_count]
    if holed:
        raise ValueError(f"the column {holed[0]!r} of a table of turns has nulls: use pack().")
    if not all(name and "\0" not in name for name in tenants_of(table)):
        raise ValueError("a turn's tenant is empty or holds a NUL. Name the owner of the memory.")
    vectors = table.column("vector")
    sizes: list[int] = []
    if vectors.null_count < len(vectors):
        sizes = pc.unique(pc.binary_length(vectors.drop_null())).to_pylist()
    if len(sizes) > 1 or (sizes and (sizes[0] == 0 or sizes[0] % 2 or dim not in (None, sizes[0] // 2))):
        raise ValueError(
            f"the turns' vectors have {sizes} bytes: each needs 2 for each of {dim or 'its'} values."
        )


def tenants_of(table: pa.Table) -> list[str]:
    """Each tenant of a table of turns once, in the order of their first turns."""
    found: list[str] = pc.unique(table.column("tenant")).to_pylist()
    return found


def to_buffer(table: pa.Table) -> pa.Buffer:
    """The table as an Arrow stream: a tenth of the work of Ray's serialisation. A slice travels alone."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def from_buffer(buffer: pa.Buffer) -> pa.Table:
    """The table of `to_buffer`, over the buffer's own memory."""
    return pa.ipc.open_stream(buffer).read_all()


def to_pieces(table: pa.Table) -> list[bytes]:
    """The table as arguments that Ray sends with the call, past its object stores; a large one as a whole."""
    stream = to_buffer(table)
    step = PIECE_BYTES if stream.size <= INLINE_BYTES else stream.size
    return [stream[at : at + step].to_pybytes() for at in range(0, stream.size, step)]


def from_pieces(pieces: Iterable[bytes]) -> pa.Table:
    """The table of `to_pieces`."""
    return from_buffer(pa.py_buffer(b"".join(pieces)))


def receipts_table(rows: Sequence[Outcome] | pa.Table) -> pa.Table:
    """One row a turn, in the order of the turns. A table is left as it is."""
    if isinstance(rows, pa.Table):
        return rows
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(RECEIPTS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, RECEIPTS, strict=True)], schema=RECEIPTS)


def unpack_receipts(receipts: Sequence[Outcome] | pa.Table, tenants: Iterable[str]) -> list[Receipt]:
    """The receipts of the turns of `tenants`, one a row of `receipts`, in order."""
    rows: Iterable[Outcome] = receipts
    if isinstance(receipts, pa.Table):
        rows = zip(*(receipts.column(name).to_pylist() for name in RECEIPTS.names), strict=True)
    return [
        Receipt(
            tenant, id, seq, status == Status.DUPLICATE, parked=detail if status == Status.PARKED else None
        )
        for tenant, (status, id, seq, detail) in zip(tenants, rows, strict=True)
    ]
