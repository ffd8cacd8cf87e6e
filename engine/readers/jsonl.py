"""JSON lines (`.jsonl`, `.ndjson`, gzipped or not), one line in memory at a time."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import orjson

from undertow.engine.model import BadInput
from undertow.engine.readers.messages import LineParser
from undertow.engine.readers.record import Record

MAX_LINE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
DAMAGED = (OSError, EOFError, zlib.error)  # gzip raises all three


def open_log(path: Path) -> BinaryIO:
    """The file's bytes, unpacked where its name ends in .gz."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb", buffering=_BUFFER_BYTES)


def read_jsonl(path: Path, *, after: int, max_message_bytes: int) -> Iterator[Record]:
    """The records of a `messages` file after line `after`; blank lines make no record.

    A line over MAX_LINE_BYTES is skipped without being held in memory. Where the file can no longer
    be read (a cut-off gzip, a disk error), the last record says so.
    """
    source = str(path)
    parser = LineParser(source, path.name, max_message_bytes)
    number = 0
    try:
        with open_log(path) as log:
            for number, line in _lines(log):
                if number > after and (line is None or not line.isspace()):
                    yield _record(parser, source, number, line)
    except DAMAGED as problem:
        reason = f"cannot be read beyond this line: {problem}"
        cure = "Check the file and its permissions, then run again: what was taken is not taken twice."
        yield Record(max(number, after), errors=(BadInput(source, number or None, None, reason, cure),))


def _record(parser: LineParser, source: str, number: int, line: bytes | None) -> Record:
    if line is None:
        reason = f"line is longer than {MAX_LINE_BYTES:,} bytes"
        problem = BadInput(source, number, None, reason, "Split the session over several lines.")
        return Record(number, errors=(problem,))
    try:
        raw = orjson.loads(line.removeprefix(_BOM) if number == 1 else line)
    except orjson.JSONDecodeError as broken:
        cure = "Write one JSON object a line, in UTF-8."
        return Record(number, errors=(BadInput(source, number, None, f"is not JSON: {broken}", cure),))
    return parser.record(number, raw)


def _lines(log: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers from 1 with their bytes, None for a line that is too long to hold."""
    number = 0
    while line := log.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := log.readline(_BUFFER_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line
