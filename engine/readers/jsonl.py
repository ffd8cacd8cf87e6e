"""JSON lines (`.jsonl`, `.ndjson`, optionally gzipped), a megabyte or one line in memory at a time.

The same records as messages of a stream: `MessageReader`.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput
from undertow.engine.readers.blocks import LEAST_ROWS, BlockBuilder, OddRows, block_of_error
from undertow.engine.readers.messages import LineParser
from undertow.engine.readers.record import PackedRecord, TurnBlock
from undertow.engine.readers.source import DAMAGED, Log

MAX_LINE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_SKIP_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _SPACE, _OPENS, _CLOSES = b"\n\r {}"
# The fields of plain rows. Arrow infers others, and refuses other types of these.
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("tenant", "session", "timestamp", "idempotency_key")),
        ("messages", pa.list_(pa.struct([(name, pa.string()) for name in ("role", "name", "content")]))),
    ]
)


def jsonl_blocks(log: Log, *, after: int, max_message_bytes: int) -> Iterator[TurnBlock]:
    """The records of a `messages` file after line `after`, without blank lines.

    A line over MAX_LINE_BYTES is skipped without being held in memory. If the file cannot be read to its end
    (a truncated gzip, a disk error), the last block has the error.
    """
    builder = BlockBuilder(LineParser(str(log), log.name, max_message_bytes))

    def odd_of(lines: _Lines) -> OddRows:
        def odd(places: NDArray[np.int64]) -> Iterator[PackedRecord]:
            for n in places.tolist():
                yield _record(builder.parser, int(lines.numbers[n]), lines.text(n))

        return odd

    file = _File(log, after)
    for lines in file.pieces():
        for part, rows in _tables(lines):
            yield builder.block(rows, part.numbers, odd_of(part))
    yield from (block_of_error(file.line, error) for error in file.errors)


def _record(parser: LineParser, number: int, line: bytes | None) -> PackedRecord:
    if line is None:
        reason = f"line is longer than {MAX_LINE_BYTES:,} bytes"
        problem = BadInput(parser.source, number, None, reason, "Split the session over several lines.")
        return PackedRecord(number, errors=(problem,))
    try:
        raw = orjson.loads(line.removeprefix(_BOM) if number == 1 else line)
    except orjson.JSONDecodeError as broken:
        return _not_json(parser, number, broken)
    return parser.record(number, raw)


def _not_json(parser: LineParser, number: int, broken: orjson.JSONDecodeError) -> PackedRecord:
    cure = "Write one JSON object a line, in UTF-8."
    return PackedRecord(
        number, errors=(BadInput(parser.source, number, None, f"is not JSON: {broken}", cure),)
    )


class MessageReader:
    """Reads records that come as messages, each with what its envelope says about it."""

    def __init__(self, source: str, max_message_bytes: int) -> None:
        """`source`: the stream's name, for warnings. Unknown fields are named once."""
        self._builder = BlockBuilder(LineParser(source, source, max_message_bytes))

    def block(self, values: Sequence[bytes], tenants: Sequence[str | None], keys: Sequence[str]) -> TurnBlock:
        """The turns of messages, at least one; positions are places in `values`, from 0 on.

        `values`: a JSON object of the `messages` format each. `tenants`: whose it is where the record names
        nobody; a record that names another one is refused. `keys`: its idempotency key where it has none.
        """
        parser = self._builder.parser

        def odd_of(numbers: NDArray[np.int64]) -> OddRows:
            def odd(places: NDArray[np.int64]) -> Iterator[PackedRecord]:
                for n in numbers[places].tolist():
                    yield _addressed_record(parser, n, values[n], tenants[n], keys[n])

            return odd

        parts = []
        for lines, rows in _tables(_Lines.of_messages(values)):
            if rows is not None:
                at = pa.array(lines.numbers)
                rows = _addressed(rows, pa.array(tenants, pa.string()).take(at), pa.array(keys).take(at))
            parts.append(self._builder.block(rows, lines.numbers, odd_of(lines.numbers)))
        return parts[0] if len(parts) == 1 else TurnBlock.joined(parts)


def _addressed(rows: pa.Table, tenants: pa.Array, keys: pa.Array) -> pa.Table:
    """The rows with tenant and key of their envelopes; without tenant where the two contradict."""
    own = rows.column("tenant").combine_chunks()
    differ = pc.fill_null(pc.not_equal(own, tenants), False)
    tenants = pc.if_else(differ, pa.scalar(None, pa.string()), pc.coalesce(own, tenants))
    keys = pc.coalesce(rows.column("idempotency_key").combine_chunks(), keys)
    rows = rows.set_column(rows.schema.get_field_index("tenant"), "tenant", tenants)
    return rows.set_column(rows.schema.get_field_index("idempotency_key"), "idempotency_key", keys)


def _addressed_record(
    parser: LineParser, place: int, value: bytes, tenant: str | None, key: str
) -> PackedRecord:
    try:
        raw = orjson.loads(value)
    except orjson.JSONDecodeError as broken:
        return _not_json(parser, place, broken)
    if isinstance(raw, dict):
        named = raw.get("tenant")
        if None not in (named, tenant) and named != tenant:
            cure = "Send it under its tenant's name, or leave one of them out."
            reason = f"is {named!r:.80}, and the message was sent as {tenant!r:.80}"
            return PackedRecord(place, errors=(BadInput(parser.source, place, "tenant", reason, cure),))
        raw = {**raw, "tenant": tenant if named is None else named}
        if raw.get("idempotency_key") is None:
            raw["idempotency_key"] = key
    return parser.record(place, raw)


class _Lines(NamedTuple):
    """Lines of a piece of a file, without blank ones. All int64 [lines]: their `numbers`, from 1 on, and the
    places in `piece` where each starts and ends, before its newline.
    """

    piece: bytes
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, first: int, piece: bytes, after: int) -> Self:
        """The lines of a piece after line `after`. `first`: the number of its first line."""
        data = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        if not piece.endswith(b"\n"):
            ends = np.append(ends, len(piece))
        starts = np.concatenate([[0], ends[:-1] + 1])
        kept = (first + np.arange(len(ends)) > after) & (starts < ends)
        for n in np.flatnonzero(kept & (data[starts * kept] <= _SPACE)).tolist():
            kept[n] = not piece[starts[n] : ends[n]].isspace()
        return cls(piece, first + np.flatnonzero(kept), starts[kept], ends[kept])

    @classmethod
    def of_messages(cls, values: Sequence[bytes]) -> Self:
        """One line a message, numbered from 0 on; an empty object for one that is no line."""
        lines = [value if value and _NEWLINE not in value else b"{}" for value in values]
        ends = np.cumsum([len(line) + 1 for line in lines]) - 1
        starts = np.concatenate([[0], ends[:-1] + 1])
        return cls(b"\n".join(lines), np.arange(len(lines)), starts, ends)

    @classmethod
    def too_long(cls, number: int) -> Self:
        """A line over MAX_LINE_BYTES, without its text."""
        return cls(b"", np.array([number]), np.zeros(1, np.int64), np.full(1, MAX_LINE_BYTES + 1))

    def part(self, start: int, stop: int) -> _Lines:
        return _Lines(self.piece, *(column[start:stop] for column in self[1:]))

    def text(self, n: int) -> bytes | None:
        """The n-th of the lines; None for one over MAX_LINE_BYTES."""
        start, end = int(self.starts[n]), int(self.ends[n])
        return self.piece[start:end] if end - start <= MAX_LINE_BYTES else None

    def objects(self) -> Any:
        """Bytes with one line for each of these: itself if it may be an object, else an empty object."""
        data = np.frombuffer(self.piece, np.uint8)
        last = data[self.ends - 1]
        last = np.where(last == _RETURN, data[np.maximum(self.ends - 2, 0)], last)
        short = self.ends - self.starts <= MAX_LINE_BYTES
        good = (data[self.starts] == _OPENS) & (last == _CLOSES) & short
        if good.all():
            return memoryview(self.piece)[self.starts[0] : self.ends[-1]]
        places = zip(good.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)
        return b"\n".join(self.piece[start:end] if is_good else b"{}" for is_good, start, end in places)


class _File:
    """One file. `line`: the last that was read; `errors`: why no more were."""

    def __init__(self, log: Log, after: int) -> None:
        self.line = after
        self.errors: list[BadInput] = []
        self._log = log
        self._after = after

    def pieces(self) -> Iterator[_Lines]:
        """Lines after line `after`, some at a time."""
        number = 0
        try:
            with self._log.unpacked() as file:
                for first, piece in _pieces(file):
                    lines = _Lines.too_long(first) if piece is None else _Lines.of(first, piece, self._after)
                    number = first + (0 if piece is None else piece.count(b"\n", 0, -1))
                    if len(lines.numbers) and lines.numbers[-1] > self._after:
                        yield lines
                    self.line = max(self.line, number)
        except DAMAGED as problem:
            reason = f"cannot be read beyond this line: {problem}"
            cure = "Check the file and its permissions, then run again: what was taken is not taken twice."
            self.errors.append(BadInput(str(self._log), number or None, None, reason, cure))


def _pieces(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Whole lines, about _PIECE_BYTES of them, with the number of the first; None for one too long."""
    number, held, damage = 1, bytearray(), None
    more = True
    while more and damage is None:
        try:
            more = _fill(file, held)
        except DAMAGED as problem:
            damage = problem
        end = held.rfind(b"\n") + 1 if more or damage else len(held)
        if end:
            with memoryview(held) as view:
                piece = bytes(view[:end])
            del held[:end]
            yield number, piece
            number += piece.count(b"\n")
        elif len(held) > MAX_LINE_BYTES:
            while (rest := file.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
            held.clear()
            yield number, None
            number += 1
    if damage is not None:
        raise damage


def _fill(file: BinaryIO, held: bytearray) -> bool:
    """Add at least _PIECE_BYTES to the bytes held. Returns whether there may be more."""
    wanted = len(held) + _PIECE_BYTES
    while len(held) < wanted:
        # One raw read at a time, so that what stands before a damaged place is not lost.
        read: bytes = file.read1(wanted - len(held))  # type: ignore[attr-defined]
        if not read:
            return False
        held += read
    return True


def _tables(lines: _Lines) -> Iterator[tuple[_Lines, pa.Table | None]]:
    """The lines in parts, each with a table of its rows; None where Arrow cannot read them as one."""
    if not lines.piece:
        yield lines, None
        return
    count = len(lines.numbers)
    try:
        table = _table(lines.objects(), count)
    except (pa.ArrowException, ValueError):
        if count <= LEAST_ROWS:
            yield lines, None
            return
        yield from _tables(lines.part(0, count // 2))
        yield from _tables(lines.part(count // 2, count))
        return
    yield lines, table


def _table(text: memoryview | bytes, count: int) -> pa.Table:
    """The rows of `count` lines. ArrowException, ValueError: they are not that many JSON objects.

    As each line begins and ends with a brace, and no string holds a newline, each is then one object.
    """
    utf_8_decode(text, "strict", True)  # Arrow takes invalid UTF-8
    table = pa.json.read_json(
        pa.BufferReader(pa.py_buffer(text)),
        pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        pa.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="infer"),
    )
    if table.num_rows != count:
        raise ValueError(f"{table.num_rows} objects in {count} lines")
    return table
