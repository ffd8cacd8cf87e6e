"""JSON lines (`.jsonl`, `.ndjson`, optionally gzipped), one line in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from undertow.engine.base.model import BadInput
from undertow.engine.readers.messages import LineParser, Parse
from undertow.engine.readers.record import PackedRecord, Record
from undertow.engine.readers.source import DAMAGED, Log

MAX_LINE_BYTES = 64 << 20
_SKIP_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


def read_jsonl(
    log: Log, *, after: int, max_message_bytes: int, packed: bool = False
) -> Iterator[Record | PackedRecord]:
    """The records of a `messages` file after line `after`, without blank lines.

    A line over MAX_LINE_BYTES is skipped without being held in memory. If the file cannot be read to its end
    (a truncated gzip, a disk error), the last record has the error.
    """
    source = str(log)
    parser = LineParser(source, log.name, max_message_bytes)
    parse = parser.packed if packed else parser.record
    number = 0
    try:
        with log.unpacked() as file:
            for number, line in _lines(file):
                if number > after and (line is None or not line.isspace()):
                    yield _record(parse, source, number, line)
    except DAMAGED as problem:
        reason = f"cannot be read beyond this line: {problem}"
        cure = "Check the file and its permissions, then run again: what was taken is not taken twice."
        yield Record(max(number, after), errors=(BadInput(source, number or None, None, reason, cure),))


def _record(parse: Parse, source: str, number: int, line: bytes | None) -> Record | PackedRecord:
    if line is None:
        reason = f"line is longer than {MAX_LINE_BYTES:,} bytes"
        problem = BadInput(source, number, None, reason, "Split the session over several lines.")
        return Record(number, errors=(problem,))
    try:
        raw = orjson.loads(line.removeprefix(_BOM) if number == 1 else line)
    except orjson.JSONDecodeError as broken:
        cure = "Write one JSON object a line, in UTF-8."
        return Record(number, errors=(BadInput(source, number, None, f"is not JSON: {broken}", cure),))
    return parse(number, raw)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers from 1 with their bytes; None for a line over MAX_LINE_BYTES."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line
